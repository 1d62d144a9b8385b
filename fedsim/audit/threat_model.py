"""Turn [adversary.knowledge] into the knowledge that an attack is granted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.audit.architecture import ReferencedLoss, ReferencedModel
from fedsim.audit.evaluation.truth import Truth, draw_known_rows
from fedsim.base.errors import (
    AttackError,
    ConfigError,
    DataError,
    PluginError,
    describe_error,
    did_you_mean,
    first_line,
)
from fedsim.base.loss_term import add_model_term
from fedsim.base.randomness import seed_globals
from fedsim.base.task import label_loss, mask_loss, smooth_labels, sort_targets, squared_error
from fedsim.data import Column
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.interfaces.knowledge import (
    FACTS,
    TRAINING_FACTS,
    Knowledge,
    KnownRows,
    PartialRecords,
    Records,
    config_keys,
)
from fedsim.inversion.model_checks import probe_inputs
from fedsim.plugins import registry
from fedsim.recording.header import DIFFERS_BY_CLIENT, Header
from fedsim.recording.message_format import MessageFormat
from fedsim.training.hidden_state import HIDDEN_STATE, has_hidden_state
from fedsim.training.models.checks import lazy_layer_complaint
from fedsim.training.settings import LocalTraining

if TYPE_CHECKING:
    from fedsim.audit.evaluation.case import Case

PRIVATE = tuple(name for name, fact in FACTS.items() if fact.private)
"""Facts that differ from victim to victim."""
LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy,
    "nll": cross_entropy,
    "bce": cross_entropy,
    "mse": squared_error,
    "multi-label": label_loss,
    "segmentation": mask_loss,
}
"""Losses by name.

The cross-entropy of log-probabilities is their negative log-likelihood. The cross-entropy of two
logits, of which one is 0, is the binary cross-entropy of the other; `ReferencedModel` adds that 0.
"""


def grant_knowledge(
    adversary: AdversaryTable,
    case: Case,
    base_folder: Path,
    app: MessageFormat | None = None,
) -> Knowledge:
    """Return what the adversary is granted about every victim; `grant_private` adds the rest.

    Raises:
        ConfigError: the device or a stated value is not usable.
        PluginError: the model does not load.
    """
    protocol = case.protocol_facts()
    app = app or MessageFormat()
    values: dict[str, Any] = {"device": parse_device(adversary.device)}
    for name in FACTS:
        setting = getattr(adversary.knowledge, name)
        if name in PRIVATE or setting is False:
            continue
        case.check_grant(adversary, name)
        # A fact that is True is granted as the protocol has it; any other setting is its value.
        values[name] = protocol.get(name) if setting is True else _stated_value(name, setting, base_folder)
    if adversary.role.reads_messages:  # it sees updates before the server's noise
        values.pop("noise_covariance", None)
    _check_widths(values)
    values |= case.public_records(adversary)
    # The model of a foreign app returns and sends what [app] says.
    model = values.get("model")
    if isinstance(model, ReferencedModel):
        if app.outputs:
            registry.load_object(app.outputs, base_folder)
        binary = adversary.knowledge.loss == "bce"
        values["model"] = replace(model, outputs=app.outputs, frozen=app.frozen, binary=binary)
    return Knowledge(**values, modality=case.task.modality if case.task else "")


def full_knowledge(
    adversary: AdversaryTable,
    case: Case,
    base_folder: Path,
    app: MessageFormat | None = None,
) -> Knowledge:
    """Return all that the evaluator knows of the protocol.

    For a recording made elsewhere that is what the attack file grants.
    """
    return _complete_loss(case.full_knowledge(partial(grant_knowledge, adversary, case, base_folder, app)))


def apply_headers(
    knowledge: Knowledge, adversary: AdversaryTable, headers: Sequence[Header], declared: Set[str]
) -> Knowledge:
    """Replace the protocol's facts in `knowledge` by those that the attacked rounds' headers state.

    A header is what clients were sent, which a strategy may change from round to round, so it goes
    before the experiment file. A value in the attack file that contradicts it is refused: the
    recording is evidence, and an attack made with either of the two would be filed under a threat
    model that was never stated.

    Args:
        headers: of the attacked rounds; those that state no value of a fact leave it as it is.

    Raises:
        ConfigError: a value in the attack file contradicts a header, or a header states a value
            that is not possible.
        AttackError: the rounds differ, or the clients of a round were not sent the same, and the
            attack file states no value.
    """
    values: dict[str, Any] = {}
    for name in sorted(declared & set(TRAINING_FACTS)):
        setting = getattr(adversary.knowledge, name)
        if setting is False:
            continue
        value = _value_in_headers(name, setting, getattr(knowledge, name), headers)
        if value is not None:
            values[name] = value
    sends_gradients = any(header.config.get("sends") == "gradient" for header in headers)
    for name, alternative in (("local_epochs", "local_steps"), ("local_steps", "local_epochs")):
        # Where the number of steps T is known, there is no E, and the other way round; but a
        # gradient is one step, whatever its batch is of.
        if alternative in values and name not in values and not sends_gradients:
            values[name] = None
    return _complete_loss(replace(knowledge, **values))


def _value_in_headers(name: str, setting: Any, current: Any, headers: Sequence[Header]) -> Any:
    """Return the one value of a fact that headers state; None where they state none.

    Args:
        setting: True, or the value that the attack file states.
    """
    differing = [header.round for header in headers if _differs_by_client(header, name)]
    if setting is True and differing:
        raise AttackError(
            f"adversary.knowledge.{name}: in round {differing[0]} the server did not send all clients the same "
            "value, and the recording does not say which client got which; set the victim's, or withhold it (false)"
        )
    values: dict[int, Any] = {}
    for header in headers:
        value = _value_in_header(header, name)
        if value is not None:
            values[header.round] = value
    if not values:
        return None
    first = next(iter(values.values()))
    listing = ", ".join(f"{value} in round {number}" for number, value in values.items())
    if any(value != first for value in values.values()):
        raise AttackError(
            f"adversary.knowledge.{name}: the server sent {listing}, and this attack reads one value for all rounds; "
            "attack rounds that agree (adversary.rounds), or withhold it (false)"
        )
    if setting is not True and current != first:
        raise ConfigError(
            f"adversary.knowledge.{name}: {setting} is written out, but the server sent {listing}, as the recording "
            "says; leave the key out"
        )
    return first


def _complete_loss(knowledge: Knowledge) -> Knowledge:
    """Return `knowledge` with the loss that clients minimise.

    It is of smoothed labels where they are known to smooth them, and has the term of a model that adds one. What a
    loss that the attack file names as code does to labels is taken as it is.
    """
    loss = knowledge.loss
    if loss is None:
        return knowledge
    if knowledge.label_smoothing and not isinstance(loss, ReferencedLoss):
        loss = smooth_labels(loss, knowledge.label_smoothing)  # type: ignore[arg-type]
    # The loss of an experiment has the term already.
    if isinstance(knowledge.model, ReferencedModel) and isinstance(network := knowledge.model(), nn.Module):
        loss = add_model_term(loss, network)
    return replace(knowledge, loss=loss)


def scale_to_group(knowledge: Knowledge, members: int) -> Knowledge:
    """Scale the batch size in `knowledge` for an attack on the sum over a group.

    A group is read as one client that holds all their N examples. In a step each member takes a
    mini-batch of its own, so B is the total of all members, and T = E ceil(N / B) the number of
    steps of a member of average size.
    """
    if not members or not knowledge.batch_size:
        return knowledge
    return replace(knowledge, batch_size=knowledge.batch_size * members)


def facts_in_headers(headers: Sequence[Header]) -> list[str]:
    """Return the names of the protocol's facts that these headers state."""
    names = []
    for name in TRAINING_FACTS:
        if any(_value_in_header(header, name) is not None for header in headers):
            names.append(name)
    return names


def _differs_by_client(header: Header, name: str) -> bool:
    """Return whether the server sent some clients another value of a fact than others."""
    differing = {*str(header.config.get(DIFFERS_BY_CLIENT, "")).split(", ")}
    return bool(differing.intersection(config_keys(name)))


def _value_in_header(header: Header, name: str) -> Any:
    """Return the value of a fact that a header states; None where it states none."""
    key = next((key for key in config_keys(name) if key in header.config), None)
    if key is None:
        return None
    value = header.config[key]
    if not FACTS[name].accepts(value):
        raise ConfigError(
            f"round {header.round}: the server sent {key} = {value!r}, expected {FACTS[name].expected}; withhold it "
            f"with adversary.knowledge.{name} = false"
        )
    return value.lower() if isinstance(value, str) else value


def check_model(adversary: AdversaryTable, knowledge: Knowledge) -> None:
    """Raise PluginError where a model that the attack file names does not build."""
    setting = adversary.knowledge.model
    if not isinstance(setting, str):
        return
    assert knowledge.model is not None
    try:
        network = knowledge.model()
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise PluginError(f"adversary.knowledge.model: {setting} raised {describe_error(error)}") from error
    if not isinstance(network, nn.Module):
        raise PluginError(
            f"adversary.knowledge.model: {setting} gives {type(network).__name__}, expected a function that builds a "
            "torch.nn.Module"
        )
    if complaint := lazy_layer_complaint(network):
        raise PluginError(f"adversary.knowledge.model: {setting} {complaint}")


def check_hidden_state(adversary: AdversaryTable, knowledge: Knowledge) -> None:
    """Raise PluginError where a model that the attack file names, and that builds, is another one each time."""
    setting = adversary.knowledge.model
    if not isinstance(setting, str):
        return
    assert knowledge.model is not None
    network = knowledge.model()
    inputs = probe_inputs(network, knowledge)
    with seed_globals("another draw"):
        other = knowledge.model()
    if inputs is not None and has_hidden_state(network, other, LocalTraining(local_steps=1), inputs):
        raise PluginError(f"adversary.knowledge.model: of {setting}, {HIDDEN_STATE}")


def private_facts(adversary: AdversaryTable) -> list[str]:
    """Return the names of the facts that `grant_private` will add."""
    return [name for name in PRIVATE if getattr(adversary.knowledge, name) is not False]


def check_private_facts(adversary: AdversaryTable, case: Case) -> None:
    """Check that there is a source for each fact that `grant_private` is to add."""
    names = private_facts(adversary)
    if names:
        case.check_truth_source(names[0])
    if "partial_records" in names:
        case.sensitive_column(str(adversary.knowledge.partial_records))
    for name in ("known_candidates", "known_rows"):
        count, fact = getattr(adversary.knowledge, name), FACTS[name]
        if name in names and not fact.is_valid(count):
            raise ConfigError(f"adversary.knowledge.{name}: expected {fact.expected}, got {count}")
    if "known_candidates" in names and "candidates" not in names:
        raise ConfigError(
            "adversary.knowledge.known_candidates: they are drawn as candidates are, and none are granted; give "
            "candidates, too, which says where non-members come from"
        )
    if "candidates" in names:
        non_members, fact = adversary.knowledge.candidates, FACTS["candidates"]
        if not fact.is_valid(non_members):
            raise ConfigError(f"adversary.knowledge.candidates: expected {fact.expected}, got '{non_members}'")
        case.check_candidate_source(str(non_members))
    if "private_parts" in names:
        case.check_private_parts()


def grant_private(
    knowledge: Knowledge,
    adversary: AdversaryTable,
    case: Case,
    victim: int,
    truth: Truth | None,
    declared: Set[str] = frozenset(PRIVATE),
    members: Sequence[int] = (),
    *,
    is_first_round: bool = False,
) -> Knowledge:
    """Add what is granted of this `victim`: labels, records, records without a column, candidates.

    Args:
        truth: the victim's data in the attacked round; None where they are not known.
        declared: what the attack reads; nothing else is added.
        members: of the group that the victim stands for, whose labels and records are granted then.
        is_first_round: whether the attacked round is the first in which the victim takes part.

    Raises:
        ConfigError, DataError: there is no source for these facts.
    """
    names = [name for name in private_facts(adversary) if name in declared]
    if not names:
        return knowledge
    if truth is None:
        raise DataError(f"truth: {names[0]} are granted, but no file is named for client {victim}; name one")
    clients = members or (victim,)
    values: dict[str, Any] = {}
    if "labels" in names:
        values["labels"] = sort_targets(truth.labels)
    if "private_parts" in names:
        values["private_parts"] = case.private_parts(victim, is_first_round=is_first_round)
    if "candidates" in names:
        values["candidates"] = case.candidates(adversary, clients)
    if "known_candidates" in names:
        values["known_candidates"] = case.known_candidates(adversary, clients)
    if {"records", "partial_records", "known_rows"}.intersection(names):
        records = case.client_records(knowledge, clients, truth)
        if "records" in names:
            values["records"] = records
        if "known_rows" in names:
            values["known_rows"] = _draw_known_rows(
                records, truth, int(adversary.knowledge.known_rows), case.seed, victim
            )
        if "partial_records" in names:
            column = case.sensitive_column(str(adversary.knowledge.partial_records))
            values["partial_records"] = _remove_column(records, column)
    return replace(knowledge, **values)


def _draw_known_rows(records: Records, truth: Truth, count: int, seed: int, victim: int) -> KnownRows:
    """Draw the rows that the adversary knows."""
    total = len(records.labels)
    if count >= total:
        raise ConfigError(
            f"adversary.knowledge.known_rows: {count} of {total} rows would be known, so that none is left to attack; "
            "grant fewer"
        )
    chosen = draw_known_rows(count, total, seed, victim)
    ids = truth.rows if truth.rows is not None else torch.arange(total)
    return KnownRows(inputs=records.inputs[chosen], labels=records.labels[chosen], rows=ids[chosen])


def _remove_column(records: Records, column: Column) -> PartialRecords:
    inputs = records.inputs.clone()
    inputs[:, column.features] = 0
    return PartialRecords(
        inputs=inputs,
        labels=records.labels,
        column=column.name,
        features=column.features,
        categories=column.categories,
    )


def _check_widths(values: Mapping[str, Any]) -> None:
    """Check that ranges and scales have one value, or one for each channel or feature."""
    shape = values.get("input_shape")
    if shape is None:
        return
    widths = {"value_range": len((values.get("value_range") or [[]])[0])}
    for name in ("input_mean", "input_std"):
        widths[name] = len(values.get(name) or [])
    for name, width in widths.items():
        if width > 1 and width != shape[0]:
            raise ConfigError(
                f"adversary.knowledge.{name}: it has {width} values, and an input of shape {list(shape)} has "
                f"{shape[0]} channels or features; give one value, or {shape[0]}"
            )


def _stated_value(name: str, setting: Any, base_folder: Path) -> Any:
    """Return the value of a fact that the attack file states."""
    if name == "model":
        registry.load_object(setting, base_folder)
        return ReferencedModel(setting)
    if name == "loss":
        if ":" in setting:
            registry.load_object(setting, base_folder)
            return ReferencedLoss(setting)
        if setting not in LOSSES:
            raise ConfigError(
                f"adversary.knowledge.loss: '{setting}' is unknown to fedsim, {did_you_mean(setting, LOSSES)}; or "
                "give module:callable, a function of outputs and labels that returns the mean loss"
            )
        return LOSSES[setting]
    if not FACTS[name].is_valid(setting):
        raise ConfigError(f"adversary.knowledge.{name}: expected {FACTS[name].expected}, got {setting}")
    if name == "value_range":
        low, high = (end if isinstance(end, list) else [end] for end in setting)
        return low, high
    if name == "optimizer":
        return setting.lower()
    return tuple(setting) if name in ("input_shape", "columns") else setting


def parse_device(name: str) -> torch.device:
    """Return the device on which attacks optimise.

    Args:
        name: in [adversary]; `auto` is a GPU where there is one.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(2, device=device).sum().item()  # some devices, such as `meta`, have tensors and no values
    except Exception as error:  # of several types: some devices need a package that is not installed
        reason = first_line(error).split(". ")[0]
        raise ConfigError(
            f"adversary.device: '{name}' is not usable here ({reason}); expected auto, cpu or a GPU of this machine, "
            "such as cuda:0"
        ) from error
    return device
