"""The geometry of recorded updates, simulated once more by the evaluator, and its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedsim.errors import ConfigError
from fedsim.experiments.build import Experiment
from fedsim.exposure.geometry import Geometry, geometry
from fedsim.randomness import one_thread
from fedsim.recording.transcript import Transcript
from fedsim.reporting.figures import Line, Panel, Style
from fedsim.training.sampling import batches_of_round


def recorded(
    experiment: Experiment, transcript: Transcript, rounds: Sequence[int]
) -> Iterator[tuple[int, int, Geometry]]:
    """Round, client and geometry of every recorded update of these rounds.

    Local training is simulated once more from what the server sent, with the client's own data and
    randomness. Defenses are left out.

    Raises:
        ConfigError: clients send gradients, so there are no local steps.
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
    data, loss, settings = experiment.data, experiment.dataset.task.loss, experiment.training
    for number in rounds:
        for client in transcript.clients(number):
            inputs, labels = data.train(client)
            before = transcript.update(number, client).before
            key = (experiment.seed, "train", number, client)
            order = batches_of_round(len(labels), settings, seed=experiment.seed, client=client, number=number)
            with one_thread():
                found = geometry(
                    experiment.model, before, data.to_model(inputs), labels, settings, key=key, loss=loss, order=order
                )
            yield number, client, found


def panels(found: Sequence[Geometry], style: Style) -> list[Panel]:
    """SME's Figures 3 and 4: the ratio by local step, the cosine by position; a mean in the band of all clients."""
    steps = min(len(item.ratios) for item in found)
    ratios = Line(x=np.arange(steps, dtype=float), y=np.stack([item.ratios[:steps] for item in found]), style=style)
    cosines = Line(x=found[0].alphas, y=np.stack([item.cosines for item in found]), style=style)
    return [
        Panel(
            title="Local gradients in their leading plane", xlabel="local step t", ylabel="‖P₂ g‖ / ‖g‖", lines=[ratios]
        ),
        Panel(
            title="Gradient on the line against the update",
            xlabel="α: 0 returned state, 1 broadcast state",
            ylabel="cosine",
            lines=[cosines],
        ),
    ]
