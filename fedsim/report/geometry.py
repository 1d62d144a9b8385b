"""Geometry of recorded updates, for which local training is simulated once more, and its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import use_one_thread
from fedsim.exposure.geometry import Geometry, compute_geometry
from fedsim.federation.algorithm_checks import check_trains_plainly
from fedsim.federation.experiment import Experiment
from fedsim.federation.exposure_moments import read_training
from fedsim.recording.transcript import Transcript
from fedsim.report.charts import Look
from fedsim.report.curves import overlay_curves
from fedsim.report.figures import draw_curve
from fedsim.training.sampling import round_batches


def geometries_of_updates(
    experiment: Experiment, transcript: Transcript, rounds: Sequence[int]
) -> Iterator[tuple[int, int, Geometry]]:
    """Yield round, client and geometry of every recorded update of these rounds.

    Local training is simulated once more from the broadcast, with the client's own data and randomness. Defenses are
    left out.
    """
    if experiment.training.sends == "gradient":
        raise ConfigError(
            "geometry: the clients of this run send gradients, so there is no path of local steps to look at; "
            "name a run whose clients send weights"
        )
    if experiment.config.secure_aggregation is not None:
        raise ConfigError(
            "geometry: under secure aggregation sums over groups are recorded, and it looks at the path of local steps "
            "of a client; name a run without [secure_aggregation]"
        )
    check_trains_plainly(experiment, "geometry")
    data, loss = experiment.data, experiment.client_loss
    for number in rounds:
        settings = read_training(experiment, transcript.header(number))
        for client in transcript.clients(number):
            inputs, labels = data.train(client)
            before = transcript.update(number, client).before
            key = (experiment.seed, "train", number, client)
            order = round_batches(len(labels), settings, seed=experiment.seed, client=client, number=number)
            with use_one_thread():
                client_geometry = compute_geometry(
                    experiment.model, before, data.to_model(inputs), labels, settings, key=key, loss=loss, order=order
                )
            yield number, client, client_geometry


def draw_geometries(geometries: Sequence[Geometry]) -> dict[str, bytes]:
    """Return SME's Figures 3 and 4 as PNGs by name: the ratio by local step and the cosine by position.

    A line is the mean over clients, in the band of all clients.
    """
    steps = min(len(item.ratios) for item in geometries)
    step_numbers = np.arange(steps, dtype=float)
    ratios = overlay_curves("", Look(0), [(step_numbers, item.ratios[:steps]) for item in geometries])
    cosines = overlay_curves("", Look(0), [(item.alphas, item.cosines) for item in geometries])
    return {
        "ratios": draw_curve(ratios, xlabel="local step t", ylabel="‖P₂ g‖ / ‖g‖"),
        "cosines": draw_curve(cosines, xlabel="α: 0 returned state, 1 broadcast state", ylabel="cosine"),
    }
