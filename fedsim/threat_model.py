"""From [adversary.knowledge] to what an attack is handed."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from fedsim import registry
from fedsim.attack import KNOWLEDGE, Knowledge
from fedsim.config import AdversaryTable
from fedsim.errors import ConfigError
from fedsim.experiment import Experiment


def grant(adversary: AdversaryTable, experiment: Experiment | None, beside: Path) -> Knowledge:
    """What the adversary is granted, labels apart: those differ from victim to victim.

    Args:
        experiment: the federation behind the recording, whose server knows what it wrote; None for a
            recording made elsewhere, where everything is written out in the attack file.
        beside: folder in which `module:callable` is found.

    Raises:
        ConfigError: the device or a written-out value is not usable.
        PluginError: the model does not load.
    """
    own = _protocol(experiment) if experiment else {"loss": cross_entropy}
    values: dict[str, Any] = {"device": _device(adversary.device)}
    for name in KNOWLEDGE:
        setting = getattr(adversary.knowledge, name)
        if name == "labels" or setting is False:
            continue
        values[name] = own.get(name) if setting is True else _written_out(name, setting, beside)
    return Knowledge(**values)


def _protocol(experiment: Experiment) -> dict[str, Any]:
    """What the server of a federation knows anyway: it wrote the protocol.

    The model is handed over as copies of a network: a method of the experiment would carry the data.
    """
    task, data = experiment.dataset.task, experiment.data
    inputs: dict[str, Any] = {}
    if task.kind != "text":
        inputs["value_range"] = data.value_range()
        if data.standardise:
            inputs["input_mean"], inputs["input_std"] = data.moments()
    return inputs | {
        "model": partial(deepcopy, experiment.new_model()),
        "loss": task.loss,
        "input_shape": task.input_shape,
        "num_classes": task.num_classes or None,
        "learning_rate": experiment.training.learning_rate,
        # A gradient is one step on one batch, whatever that batch is of.
        "local_epochs": 1 if experiment.training.sends == "gradient" else experiment.training.local_epochs,
        "batch_size": experiment.training.batch_size,
    }


def _written_out(name: str, setting: Any, beside: Path) -> Any:
    if name == "model":
        return registry.load_object(setting, beside)
    if name == "value_range":
        if len(setting) != 2 or not setting[0] < setting[1]:
            raise ConfigError(f"adversary.knowledge.value_range: expected [lowest, highest], got {setting}")
        return [setting[0]], [setting[1]]
    return tuple(setting) if name == "input_shape" else setting


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"adversary.device: '{name}' is not usable here ({str(error).splitlines()[0]})") from error
    return device
