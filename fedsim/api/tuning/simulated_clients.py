"""Federation of simulated clients: public examples, trained on as the clients of an experiment train on theirs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fedsim.base.errors import DataError, KnowledgeError
from fedsim.base.files import replace_atomically
from fedsim.base.randomness import derive_seed
from fedsim.federation.auxiliary import draw_auxiliary
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.public_part import PublicPart
from fedsim.federation.resolve import resolve
from fedsim.federation.strategy_checks import MIN_CLIENT_KEYS
from fedsim.federation.table_validation import validate_tables
from fedsim.plugins.allowed_code import allow_code
from fedsim.plugins.inline import is_object
from fedsim.recording.header import hash_state
from fedsim.recording.wire_format import State

_LEFT_OUT = ("attack", "canaries", "measure", "states", "recording", "report", "truth")
"""Tables of the experiment that simulated clients have no use for."""
_SAMPLING_KEYS = (*MIN_CLIENT_KEYS, "fraction_train", "fraction_evaluate")
"""Settings of strategies that say how many clients take part."""


def simulated_experiment(config: Config, broadcast: State | None, victim: int, clients: int, folder: Path) -> Config:
    """Return an experiment of one round, in which simulated clients train as `victim` does on as many examples.

    All that differs is who holds what: the clients hold public examples, so nothing of the victim's is in it.

    Args:
        broadcast: w_t, from which they start; None for the experiment's own first weights.
        victim: the client whose number of examples and defenses they have.
        clients: how many there are at most; fewer where there are not enough public examples.
    """
    if config.secure_aggregation is not None:
        raise KnowledgeError(
            "tune: the server sees sums over clients alone, and single clients are simulated; tune the experiment "
            "without [secure_aggregation]"
        )
    experiment = Experiment(config)
    start = _save_start(experiment.initial_state() if broadcast is None else broadcast, folder)
    count = experiment.data.counts[victim]
    part = _public_part(experiment, count, clients)
    tables = config.model_dump(mode="json", exclude_none=True)
    for name in _LEFT_OUT:
        tables.pop(name, None)
    # Who holds what, and from which weights they start.
    class_name = f"{PublicPart.__module__}:{PublicPart.__name__}"
    tables["data"] = {"name": class_name, "standardise": config.data.standardise, **part}
    tables["partition"] = {"name": "iid"}
    tables["model"]["start"] = str(start)
    # One round with all of them, whatever share of clients the strategy samples.
    tables["federation"] = {
        "clients": len(part["indices"]) // count,
        "seed": derive_seed(config.federation.seed, "tune") >> 32,
        "evaluate_every": 0,
        "device": config.federation.device,
    }
    for key in _SAMPLING_KEYS:
        tables["strategy"].pop(key, None)
    tables["defense"] = _fixed_defenses(experiment, victim)
    # Victims and rounds are those of the trials.
    tables["adversary"] |= {"when": "never", "victims": "all", "rounds": [1], "repeats": 1}
    if is_object(config.data.name) or is_object(config.model.name):
        tables["adversary"]["workers"] = 1  # other processes cannot get the object
    allow_code(tables)
    return resolve(validate_tables(Config, tables, "tune"))


def _public_part(experiment: Experiment, count: int, clients: int) -> dict[str, Any]:
    """Return the settings of `PublicPart`: `count` public examples for each of `clients`, drawn by the seed."""
    data, name = experiment.data, experiment.dataset.name
    _, index = data.auxiliary_examples()
    if not len(index):
        raise DataError(
            f"tune: there are no public examples to simulate clients with, as clients train on all of '{name}'; hold "
            "some out with partition.test_fraction"
        )
    examples, chosen = draw_auxiliary(data, clients * count, "auxiliary")
    if len(chosen) < count:
        raise DataError(
            f"tune: '{name}' has {len(chosen)} public examples, and the victim trains on {count}; hold out more, or "
            "lower partition.samples_per_client"
        )
    held = chosen[: len(chosen) // count * count]
    of = experiment.config.data.model_dump(mode="json", exclude={"standardise"}, exclude_none=True)
    split = "test" if examples is experiment.dataset.test else "train"
    return {"of": of, "split": split, "indices": sorted(held.tolist())}


def _save_start(state: State, folder: Path) -> Path:
    """Write w_t, in a file whose name distinguishes it from others."""
    path = folder / f"start-{hash_state(state)[:16]}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as temporary:
            save_file({name: torch.as_tensor(tensor).contiguous() for name, tensor in state.items()}, temporary)
    return path


def _fixed_defenses(experiment: Experiment, victim: int) -> list[dict[str, Any]]:
    """Return the tables of the defenses, as strong as they are for the victim over all of its rounds."""
    tables = []
    pairs = zip(experiment.config.defense, experiment.defenses, experiment.client_defenses(victim), strict=True)
    for table, general, configured in pairs:
        settings = dict(table.settings)
        for field in dataclasses.fields(configured) if configured != general else ():
            value = getattr(configured, field.name)
            if field.init and value != getattr(general, field.name):
                settings[field.name] = value
        tables.append({"name": table.name, **settings})
    return tables
