"""Settings of a federation that keep something from the server, though they are no defense of a client."""

from __future__ import annotations

from fedsim.defense import NO_GUARANTEE
from fedsim.experiments.build import Experiment
from fedsim.training.model_state import statistics_of


def free_settings(experiment: Experiment) -> str:
    """Those that this federation uses, and what they promise; empty where it uses none.

    Batch size, local epochs and the number of rounds, of which every federation has some, are told elsewhere.

    Raises:
        FedsimError: the data set or the model is not there.
    """
    training, strategy = experiment.config.training, experiment.config.strategy
    used = []
    if training.label_smoothing:
        used.append(f"labels smoothed by {training.label_smoothing:g}")
    if training.batch_norm_statistics == "withheld" and statistics_of(experiment.model):
        used.append("BatchNorm's running statistics withheld")
    if isinstance(share := strategy.settings.get("fraction_train"), int | float) and 0 < share < 1:
        used.append(f"{share:.4g} of the clients sampled in a round")
    return f"{', '.join(used)}: {NO_GUARANTEE}" if used else ""
