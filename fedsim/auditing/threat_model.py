"""From [adversary.knowledge] to what an attack is handed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.auditing.architecture import Architecture, WrittenLoss, WrittenOut
from fedsim.datasets import Column
from fedsim.errors import AttackError, ConfigError, DataError, PluginError, did_you_mean, first_line
from fedsim.evaluation.truth import Truth
from fedsim.experiments.auxiliary import auxiliary_records
from fedsim.experiments.build import Experiment
from fedsim.experiments.candidates import drawn, known_drawn
from fedsim.experiments.config import AdversaryTable, AppTable
from fedsim.experiments.properties import property_records
from fedsim.knowledge import FACTS, Knowledge, KnownCandidates, PartialRecords, Records, sent_as
from fedsim.models.checks import unsized
from fedsim.plugins import registry
from fedsim.randomness import seed_for
from fedsim.recording.header import DIFFERING, Header
from fedsim.task import smoothed, squared_error

PRIVATE = tuple(name for name, fact in FACTS.items() if fact.private)
"""What differs from victim to victim."""
_SETTINGS = tuple(name for name, fact in FACTS.items() if fact.setting)
"""The settings of local training, which a server sends along with its model."""


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy,
    "nll": cross_entropy,
    "bce": cross_entropy,
    "mse": squared_error,
}
"""Losses by name. The cross-entropy of log-probabilities is their negative log-likelihood, and that of two logits, of
which one is 0, is the binary cross-entropy of the other; `WrittenOut` adds that 0."""


def grant(
    adversary: AdversaryTable, experiment: Experiment | None, beside: Path, app: AppTable | None = None
) -> Knowledge:
    """What the adversary is granted about every victim; `grant_private` adds the rest.

    Args:
        experiment: the federation behind the recording, whose server knows what it wrote; None for a
            recording made elsewhere, where everything is written out in the attack file.
        beside: folder in which `module:callable` is found.
        app: what the messages of a recording made elsewhere mean.

    Raises:
        ConfigError: the device or a written-out value is not usable.
        PluginError: the model does not load.
    """
    own = _protocol(experiment) if experiment else {"loss": cross_entropy}
    app = app or AppTable()
    written = adversary.knowledge.model_fields_set
    values: dict[str, Any] = {"device": device_of(adversary.device)}
    for name in FACTS:
        setting = getattr(adversary.knowledge, name)
        if name in PRIVATE or setting is False:
            continue
        if name in ("auxiliary", "property_records") and experiment is None:
            raise ConfigError(
                f"adversary.knowledge.{name}: of a recording made elsewhere nobody says which records clients do not "
                "train on; attack the run of an experiment, or pass them to `fedsim.attack`"
            )
        if setting is True and experiment is None and name in written and name not in own and name not in _SETTINGS:
            raise ConfigError(
                f"adversary.knowledge.{name}: a recording made elsewhere has none to grant; write it out, or leave the "
                "key out"
            )
        values[name] = own.get(name) if setting is True else _written_out(name, setting, beside)
    _check_widths(values)
    if adversary.knowledge.auxiliary and experiment is not None:
        values["auxiliary"] = auxiliary_records(experiment.data, adversary.auxiliary)
    if "property_records" in values and experiment is not None:
        name = adversary.knowledge.property_records
        if not isinstance(name, str):
            expected = FACTS["property_records"].expected
            raise ConfigError(f"adversary.knowledge.property_records: name the property, {expected}; got {name}")
        values["property_records"] = property_records(experiment.data, name, adversary.auxiliary)
    if isinstance(model := values.get("model"), WrittenOut):
        if app.outputs:
            registry.load_object(app.outputs, beside)
        binary = adversary.knowledge.loss == "bce"
        values["model"] = replace(model, outputs=app.outputs, frozen=app.frozen, binary=binary)
    return Knowledge(**values)


def full_knowledge(
    adversary: AdversaryTable, experiment: Experiment | None, beside: Path, app: AppTable | None = None
) -> Knowledge:
    """What the evaluator knows of the protocol: all of it, or of a recording made elsewhere what the file grants."""
    known = Knowledge(**_protocol(experiment)) if experiment else grant(adversary, experiment, beside, app)
    return _as_minimised(known)


def as_sent(
    knowledge: Knowledge, adversary: AdversaryTable, headers: Sequence[Header], declared: Set[str]
) -> Knowledge:
    """`knowledge`, where the protocol's facts are what the server sent along in the attacked rounds.

    A header is what clients were told, which a strategy may change from round to round, so it goes before the
    experiment file. A value that is written out and contradicts it is refused: the recording is evidence, and an attack
    made with either of the two would be filed under a threat model that nobody stated.

    Args:
        headers: of the attacked rounds; those that say nothing of a fact leave it as it is.
        declared: what the attack reads.

    Raises:
        ConfigError: a value that is written out contradicts a header, or a header holds a value that is none.
        AttackError: the rounds differ, or the clients of a round were not sent the same, and no value is written out.
    """
    values: dict[str, Any] = {}
    for name in sorted(declared & set(_SETTINGS)):
        setting = getattr(adversary.knowledge, name)
        if setting is False:
            continue
        if setting is True and (differing := [header.round for header in headers if _differs(header, name)]):
            raise AttackError(
                f"adversary.knowledge.{name}: in round {differing[0]} the server did not send all clients the same, "
                "and the recording does not say what it sent whom; write the victim's out, or withhold it (false)"
            )
        said = {header.round: value for header in headers if (value := _said(header, name)) is not None}
        if not said:
            continue
        first = next(iter(said.values()))
        told = ", ".join(f"{value} in round {number}" for number, value in said.items())
        if any(value != first for value in said.values()):
            raise AttackError(
                f"adversary.knowledge.{name}: the server sent {told}, and this attack reads one value for all rounds; "
                "attack rounds that agree (adversary.rounds), or withhold it (false)"
            )
        if setting is not True and getattr(knowledge, name) != first:
            raise ConfigError(
                f"adversary.knowledge.{name}: {setting} is written out, but the server sent {told}, as the recording "
                "says; leave the key out"
            )
        values[name] = first
    for name, other in (("local_epochs", "local_steps"), ("local_steps", "local_epochs")):
        # Where T is known, there is no E; but a gradient is one step, whatever its batch is of.
        if other in values and name not in values and not any(h.config.get("sends") == "gradient" for h in headers):
            values[name] = None
    return _as_minimised(replace(knowledge, **values))


def _as_minimised(knowledge: Knowledge) -> Knowledge:
    """`knowledge` with the loss of smoothed labels, where it is known that clients smooth them.

    A loss that is written out as code is taken for what clients minimise as it is.
    """
    if not knowledge.label_smoothing or knowledge.loss is None or isinstance(knowledge.loss, WrittenLoss):
        return knowledge
    return replace(knowledge, loss=smoothed(knowledge.loss, knowledge.label_smoothing))  # type: ignore[arg-type]


def of_group(knowledge: Knowledge, members: int) -> Knowledge:
    """`knowledge` of an attack on the sum over a group of so many `members`; 0 is a client that stands for itself.

    A group is read as one client that holds all their N examples. In a step each member takes a mini-batch of its own,
    so B is that of all of them together, and T = E ceil(N / B) that of a member of average size.
    """
    return (
        replace(knowledge, batch_size=knowledge.batch_size * members) if members and knowledge.batch_size else knowledge
    )


def sent_along(headers: Sequence[Header]) -> list[str]:
    """Names of the protocol's facts that these headers tell."""
    return [name for name in _SETTINGS if any(_said(header, name) is not None for header in headers)]


def _differs(header: Header, name: str) -> bool:
    """Whether the server sent some clients another value of a fact than others."""
    return bool({*str(header.config.get(DIFFERING, "")).split(", ")}.intersection(sent_as(name)))


def _said(header: Header, name: str) -> Any:
    """What a header says of a fact; None where it says nothing."""
    key = next((key for key in sent_as(name) if key in header.config), None)
    if key is None:
        return None
    value = header.config[key]
    if not FACTS[name].takes(value):
        raise ConfigError(
            f"round {header.round}: the server sent {key} = {value!r}, expected {FACTS[name].expected}; withhold it "
            f"with adversary.knowledge.{name} = false"
        )
    return value.lower() if isinstance(value, str) else value


def check_sent(experiment: Experiment | None, headers: Sequence[Header], victim: int) -> None:
    """Raise ConfigError where `victim` sent something else than the experiment says: the truth would be another."""
    for header in headers if experiment else ():
        for reply in header.replies:
            sent = "gradient" if reply.kind == "gradient" else "weights"  # a delta is another form of weights
            if reply.client == victim and experiment and experiment.training.sends != sent:
                raise ConfigError(
                    f"training.sends: the experiment says {experiment.training.sends!r}, but in round {header.round} "
                    f"client {victim} sent {sent!r}, as the recording says; make the run again"
                )


def check_model(adversary: AdversaryTable, knowledge: Knowledge) -> None:
    """Raise PluginError where a model that is written out does not build."""
    setting = adversary.knowledge.model
    if not isinstance(setting, str):
        return
    assert knowledge.model is not None
    try:
        built = knowledge.model()
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise PluginError(f"adversary.knowledge.model: {setting} raised {type(error).__name__}: {error}") from error
    if not isinstance(built, nn.Module):
        raise PluginError(
            f"adversary.knowledge.model: {setting} gives {type(built).__name__}, expected a function that builds a "
            "torch.nn.Module"
        )
    if complaint := unsized(built):
        raise PluginError(f"adversary.knowledge.model: {setting} {complaint}")


def private(adversary: AdversaryTable) -> list[str]:
    """What `grant_private` will add."""
    return [name for name in PRIVATE if getattr(adversary.knowledge, name) is not False]


def check_private(adversary: AdversaryTable, experiment: Experiment | None, has_truth: bool) -> None:
    """Raise ConfigError or DataError where there is nothing to take from what `grant_private` is to add."""
    wanted = private(adversary)
    if wanted and experiment is None and not has_truth:
        raise ConfigError(f"adversary.knowledge.{wanted[0]}: there is no truth to take them from; add a [truth] table")
    if "partial_records" in wanted:
        _sensitive(adversary, experiment)
    if "known_candidates" in wanted:
        known, fact = adversary.knowledge.known_candidates, FACTS["known_candidates"]
        if not fact.fits(known):
            raise ConfigError(f"adversary.knowledge.known_candidates: expected {fact.expected}, got {known}")
        if "candidates" not in wanted:
            raise ConfigError(
                "adversary.knowledge.known_candidates: they are drawn as candidates are, and none are granted; give "
                "candidates, too, which says where those that are no members come from"
            )
    if "candidates" in wanted:
        others, fact = adversary.knowledge.candidates, FACTS["candidates"]
        if not fact.fits(others):
            raise ConfigError(f"adversary.knowledge.candidates: expected {fact.expected}, got '{others}'")
        if experiment is None:
            raise ConfigError(
                "adversary.knowledge.candidates: of a recording made elsewhere nobody says what the victim does not "
                "hold; attack the run of an experiment"
            )


def grant_private(
    knowledge: Knowledge,
    adversary: AdversaryTable,
    experiment: Experiment | None,
    victim: int,
    truth: Truth | None,
    declared: Set[str] = frozenset(PRIVATE),
    members: Sequence[int] = (),
) -> Knowledge:
    """`knowledge` and what is granted of this `victim`: its labels, its records, these but a column, or candidates.

    Args:
        truth: what it held in the attacked round; None where nobody says.
        declared: what the attack reads; nothing else is added.
        members: of the group that it stands for, whose labels and records these are then.

    Raises:
        ConfigError, DataError: there is nothing to take them from.
    """
    wanted = [name for name in private(adversary) if name in declared]
    if not wanted:
        return knowledge
    if truth is None:
        raise DataError(f"truth: {wanted[0]} are granted, but no file is named for client {victim}; name one")
    values: dict[str, Any] = {"labels": truth.labels.sort().values} if "labels" in wanted else {}
    if "candidates" in wanted:
        values["candidates"] = _candidates(adversary, experiment, members or (victim,))
    if "known_candidates" in wanted:
        values["known_candidates"] = _known_candidates(adversary, experiment, members or (victim,))
    if {"records", "partial_records"}.intersection(wanted):
        records = _records(knowledge, experiment, members or (victim,), truth)
        if "records" in wanted:
            values["records"] = records
        if "partial_records" in wanted:
            values["partial_records"] = _without(records, _sensitive(adversary, experiment))
    return replace(knowledge, **values)


def _records(knowledge: Knowledge, experiment: Experiment | None, clients: Sequence[int], truth: Truth) -> Records:
    """All training examples of these clients in model units."""
    if experiment is not None:
        inputs, labels = map(torch.cat, zip(*experiment.data.train_parts(clients), strict=True))
        return Records(inputs=experiment.data.to_model(inputs), labels=labels)
    if knowledge.value_range is None:
        raise ConfigError(
            "adversary.knowledge.records: the truth is in [0, 1], and without value_range nobody knows what the "
            "model is fed with; give value_range"
        )
    ends = (torch.tensor(end).reshape(-1, *[1] * (truth.data.ndim - 2)) for end in knowledge.value_range)
    low, high = ends
    return Records(inputs=low + truth.data * (high - low), labels=truth.labels)


def _candidates(adversary: AdversaryTable, experiment: Experiment | None, clients: Sequence[int]) -> Records:
    """See `fedsim.experiments.candidates`; which of them are training records is not in it."""
    assert experiment is not None  # or `check_private` had refused it
    asked = adversary.knowledge
    found = drawn(experiment.data, clients, asked.candidates, adversary.candidates, int(asked.known_candidates))
    return Records(inputs=experiment.data.to_model(found.inputs), labels=found.labels)


def _known_candidates(
    adversary: AdversaryTable, experiment: Experiment | None, clients: Sequence[int]
) -> KnownCandidates:
    """Others than the candidates; see `fedsim.experiments.candidates`."""
    assert experiment is not None  # or `check_private` had refused it
    asked = adversary.knowledge
    found = known_drawn(experiment.data, clients, asked.candidates, asked.known_candidates)
    return KnownCandidates(inputs=experiment.data.to_model(found.inputs), labels=found.labels, members=found.members)


def _sensitive(adversary: AdversaryTable, experiment: Experiment | None) -> Column:
    """The column that `partial_records` withholds."""
    name = str(adversary.knowledge.partial_records)
    if experiment is None:
        raise ConfigError(
            "adversary.knowledge.partial_records: a recording made elsewhere names no columns; attack the run of an "
            "experiment whose data are a table"
        )
    columns = {column.name: column for column in experiment.dataset.columns}
    if (column := columns.get(name)) is None:
        raise ConfigError(
            f"adversary.knowledge.partial_records: '{experiment.dataset.name}' has no column '{name}', "
            f"{did_you_mean(name, columns)}"
        )
    if len(column.categories) < 2:
        possible = ", ".join(other.name for other in columns.values() if len(other.categories) > 1)
        held = "one category alone" if column.categories else "numbers, and candidates for these cannot be listed"
        remedy = f"name one of: {possible}" if possible else "it has no column of several categories"
        raise ConfigError(f"adversary.knowledge.partial_records: column '{name}' holds {held}; {remedy}")
    return column


def _without(records: Records, column: Column) -> PartialRecords:
    inputs = records.inputs.clone()
    inputs[:, column.features] = 0
    return PartialRecords(
        inputs=inputs,
        labels=records.labels,
        column=column.name,
        features=column.features,
        categories=column.categories,
    )


def _protocol(experiment: Experiment) -> dict[str, Any]:
    """What the server of a federation knows anyway: it wrote the protocol.

    The model is handed over as copies of a network: a method of the experiment would carry the data.
    """
    task, data, model = experiment.dataset.task, experiment.data, experiment.config.model
    inputs: dict[str, Any] = {}
    if task.kind != "text":
        inputs["value_range"] = data.value_range()
        if data.standardise:
            inputs["input_mean"], inputs["input_std"] = data.moments()
    if columns := experiment.dataset.columns:
        inputs["columns"] = tuple(column.width for column in columns)
    architecture = Architecture(
        model.name, model.settings, task, seed_for(experiment.seed, "model"), experiment.training.dropout
    )
    about_the_task = {"loss": task.loss, "input_shape": task.input_shape, "num_classes": task.num_classes or None}
    known = {"model": architecture, "defenses": tuple(experiment.defenses)}
    return inputs | known | about_the_task | _settings(experiment)


def _settings(experiment: Experiment) -> dict[str, Any]:
    """The settings of local training; a gradient is one step on one batch, which the server takes."""
    settings = {name: getattr(experiment.training, name) for name in _SETTINGS}
    if experiment.training.sends == "gradient":
        settings |= {"learning_rate": experiment.server_rate, "local_epochs": 1}
    return settings


def _check_widths(values: Mapping[str, Any]) -> None:
    """Inputs have one range and one scale, or those of each channel or feature."""
    if (shape := values.get("input_shape")) is None:
        return
    given = {"value_range": (values.get("value_range") or [[]])[0]}
    given |= {name: values.get(name) or [] for name in ("input_mean", "input_std")}
    for name, each in given.items():
        if len(each) > 1 and len(each) != shape[0]:
            raise ConfigError(
                f"adversary.knowledge.{name}: it has {len(each)} values, and an input of shape {list(shape)} has "
                f"{shape[0]} channels or features; give one value, or {shape[0]}"
            )


def _written_out(name: str, setting: Any, beside: Path) -> Any:
    if name == "model":
        registry.load_object(setting, beside)
        return WrittenOut(setting)
    if name == "loss":
        if ":" in setting:
            registry.load_object(setting, beside)
            return WrittenLoss(setting)
        if setting not in LOSSES:
            raise ConfigError(
                f"adversary.knowledge.loss: '{setting}' is none that fedsim knows, {did_you_mean(setting, LOSSES)}; or "
                "give module:callable, a function of outputs and labels that returns the mean loss"
            )
        return LOSSES[setting]
    if not FACTS[name].fits(setting):
        raise ConfigError(f"adversary.knowledge.{name}: expected {FACTS[name].expected}, got {setting}")
    if name == "value_range":
        low, high = (end if isinstance(end, list) else [end] for end in setting)
        return low, high
    if name == "optimizer":
        return setting.lower()
    return tuple(setting) if name in ("input_shape", "columns") else setting


def device_of(name: str) -> torch.device:
    """Where attacks optimise, by the name in [adversary].

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"adversary.device: '{name}' is not usable here ({first_line(error)})") from error
    return device
