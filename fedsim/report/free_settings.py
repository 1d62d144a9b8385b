"""Settings of a federation that keep something from the server, though they are no defense of a client."""

from __future__ import annotations

from fedsim.federation.experiment import Experiment
from fedsim.interfaces.defense import NO_GUARANTEE
from fedsim.training.model_state import running_statistics


def free_settings(experiment: Experiment) -> str:
    """List the settings that this federation uses, and what they promise; empty where it uses none.

    Batch size, local epochs and the number of rounds, which every federation has, are listed elsewhere.
    """
    training, strategy = experiment.config.training, experiment.config.strategy
    sentences = []
    if training.label_smoothing:
        sentences.append(f"labels smoothed by {training.label_smoothing:g}")
    if training.batch_norm_statistics == "withheld" and running_statistics(experiment.model):
        sentences.append("BatchNorm's running statistics withheld")
    if isinstance(share := strategy.settings.get("fraction_train"), int | float) and 0 < share < 1:
        sentences.append(f"{share:.4g} of the clients sampled in a round")
    return f"{', '.join(sentences)}: {NO_GUARANTEE}" if sentences else ""
