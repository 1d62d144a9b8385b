"""Tiny recordings to try an attack on: what a server saw of three clients, and all that may be known besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.attacks import Attack, Knowledge, KnownCandidates, PartialRecords, PropertyRecords, Records
from fedsim.models.mlp import Mlp
from fedsim.models.text_cnn import TextCnn
from fedsim.models.transformer import TransformerDecoder
from fedsim.randomness import generator, seeded
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.task import Task, squared_error
from fedsim.wire.messages import State, Update
from fedsim.wire.payloads import Payload

VICTIM, OTHER, THIRD = 2**63 + 5, 2**64 - 1, 4
"""Flower draws ids of nodes from all of 64 bits, so that half of them do not fit into int64."""
_RATE = 0.1
_IMAGES, _TEXTS, _TABLE = Task((1, 8, 8), 10), Task((6,), 10, 20), Task((4,), 0)
_ROWS, _COLUMNS = Task((6,), 10), (1, 3, 2)
_LABELS = torch.tensor([1, 4, 4])
_WEIGHTS, _GRADIENTS = [1, 2], [3, 4]
"""Rounds in which clients send weights, and gradients."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Scene:
    """A recording that an attack is shown.

    Attributes:
        about: what it is, for messages.
        transcript: the rounds to attack.
        knowledge: everything there is to know.
        task: of the clients.
    """

    about: str
    transcript: Transcript
    knowledge: Knowledge
    task: Task


def scenes_for(attack: Attack, folder: Path) -> Iterator[Scene]:
    """Those that are made for the kind of `attack`, recorded in `folder` when they are asked for."""
    if attack.texts:
        yield from _chosen(attack, "texts", _texts(folder / "texts", _network_of_texts))
        yield from _chosen(attack, "texts for a transformer", _texts(folder / "attention", _transformer))
        return
    if "columns" in attack.needs:
        yield from _chosen(attack, "rows of a table", _rows(folder / "rows"))
        return
    if "partial_records" not in attack.needs:
        yield from _chosen(attack, "images", _images(folder / "images", 3))
        yield from _chosen(attack, "one image", _images(folder / "image", 1))
    table = _table(folder / "table")
    shown = table.transcript.rounds if attack.temporal else [1]
    yield _granted(attack, replace(table, transcript=table.transcript.only(shown)))


def _chosen(attack: Attack, about: str, scene: Scene) -> Iterator[Scene]:
    """The rounds of `scene` that an attack on one round, or on several, may read."""
    for rounds, sent in (_WEIGHTS, "weights"), (_GRADIENTS, "gradients"):
        shown = rounds if attack.temporal else rounds[:1]
        about_it = f"{len(shown)} round{'s' * attack.temporal} of {sent} of {about}"
        yield _granted(attack, replace(scene, about=about_it, transcript=scene.transcript.only(shown)))


def _granted(attack: Attack, scene: Scene) -> Scene:
    """With steps instead of epochs, and with decoded models, where the attack asks for them."""
    known = scene.knowledge
    if "local_steps" in attack.needs:
        known = replace(known, local_steps=1, local_epochs=None)
    if attack.builds_on:
        first = scene.transcript.rounds[0]
        clients = scene.transcript.clients(first)
        known = replace(known, models={client: scene.transcript.update(first, client).after for client in clients})
    return replace(scene, knowledge=known)


def _known(model: Callable[[], nn.Module], task: Task, inputs: Tensor, labels: Tensor) -> Knowledge:
    """What holds for all tiny federations: one local step of plain gradient descent on all data."""
    return Knowledge(
        model=model,
        loss=task.loss,
        input_shape=task.input_shape,
        num_classes=task.num_classes or None,
        learning_rate=_RATE,
        local_epochs=1,
        batch_size=len(inputs),
        optimizer="sgd",
        momentum=0.0,
        weight_decay=0.0,
        proximal_mu=0.0,
        labels=labels.sort().values,
        records=Records(inputs=inputs, labels=labels),
        candidates=Records(inputs=inputs, labels=labels),
        known_candidates=KnownCandidates(
            inputs=torch.cat([inputs, inputs.flip(-1)]),
            labels=torch.cat([labels, labels]),
            members=torch.arange(2 * len(inputs)) < len(inputs),
        ),
        auxiliary=Records(inputs=inputs, labels=labels),
        property_records=_with_property(inputs, labels),
    )


def _with_property(inputs: Tensor, labels: Tensor) -> PropertyRecords:
    """Each record often enough for batches as large as the client's, every other time with the property."""
    often = 2 * len(inputs)
    has = torch.arange(often * len(inputs)) // len(inputs) % 2 == 0
    times = [often, *[1] * (inputs.ndim - 1)]
    return PropertyRecords(inputs=inputs.repeat(times), labels=labels.repeat(often), has=has)


def _network() -> nn.Module:
    with seeded("contract", "model"):
        return Mlp(hidden=(12,)).build(_IMAGES)


def _network_of_texts() -> nn.Module:
    with seeded("contract", "model"):
        return TextCnn(kernels=(3,), channels=8, dimension=6, pool=2, dropout=0.0).build(_TEXTS).eval()


def _transformer() -> nn.Module:
    with seeded("contract", "model"):
        return TransformerDecoder(dim=32, heads=2).build(_TEXTS).eval()


def _network_of_columns() -> nn.Module:
    with seeded("contract", "model"):
        return Mlp(hidden=(12,)).build(_ROWS)


def _network_of_rows() -> nn.Module:
    with seeded("contract", "model"):
        return nn.Linear(4, 1, bias=False)


def _images(folder: Path, count: int) -> Scene:
    inputs = torch.rand((3, 1, 8, 8), generator=generator("inputs"))[:count]
    known = _known(_network, _IMAGES, inputs, _LABELS[:count])
    known = replace(known, value_range=([0.0], [1.0]), input_mean=[0.3], input_std=[0.3])
    return Scene(about="", transcript=_recorded(folder, known), knowledge=known, task=_IMAGES)


def _rows(folder: Path) -> Scene:
    kinds = torch.tensor([[0, 1], [2, 0], [1, 1]])
    inputs = torch.cat([torch.tensor([[0.2], [0.9], [0.4]]), torch.eye(3)[kinds[:, 0]], torch.eye(2)[kinds[:, 1]]], 1)
    known = replace(_known(_network_of_columns, _ROWS, inputs, _LABELS), columns=_COLUMNS)
    known = replace(known, value_range=([0.0], [1.0]), input_mean=[0.4] * 6, input_std=[0.4] * 6)
    return Scene(about="", transcript=_recorded(folder, known), knowledge=known, task=_ROWS)


def _texts(folder: Path, network: Callable[[], nn.Module]) -> Scene:
    inputs = torch.randint(20, (3, 6), generator=generator("tokens"))
    known = _known(network, _TEXTS, inputs, _LABELS)
    return Scene(about="", transcript=_recorded(folder, known), knowledge=known, task=_TEXTS)


def _recorded(folder: Path, known: Knowledge) -> Transcript:
    """Rounds of weights of three clients, then rounds of gradients of the victim."""
    if folder.is_dir():
        return Transcript(folder)
    recorder, count = Recorder(folder), len(known.records.inputs) if known.records else 0
    before, gradient = _gradient(known)
    after = {name: tensor - _RATE * gradient[name] for name, tensor in before.items()}
    shrunk, grown = ({name: factor * tensor for name, tensor in before.items()} for factor in (0.9, 1.2))
    for number in _WEIGHTS:
        sent = ((THIRD, grown), (VICTIM, after), (OTHER, shrunk))
        recorder.write(number, [_update(number, who, before, Payload.dense(s, "weights"), count) for who, s in sent])
    for number in _GRADIENTS:
        recorder.write(number, [_update(number, VICTIM, before, Payload.dense(gradient, "gradient"), count)])
    return Transcript(folder)


def _gradient(known: Knowledge) -> tuple[State, State]:
    assert known.model is not None
    assert known.records is not None
    model = known.model()
    cross_entropy(model(known.records.inputs), known.records.labels).backward()  # type: ignore[no-untyped-call]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    return before, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _update(number: int, client: int, before: State, payload: Payload, count: int) -> Update:
    return Update(round=number, client=client, before=before, payload=payload, num_examples=count)


def _table(folder: Path) -> Scene:
    """A dozen rounds of two clients that regress by full-batch steps, from models that are far apart.

    A row holds two numbers and a category of two.
    """
    numbers, targets = torch.randn((6, 3), generator=generator("rows")).tensor_split([2], 1)
    inputs = torch.cat([numbers, torch.eye(2)[torch.tensor([0, 1, 1, 0, 1, 0])]], 1)
    targets, hidden = targets.squeeze(1), inputs.clone()
    hidden[:, 2:4] = 0
    partial = PartialRecords(inputs=hidden, labels=targets, column="kind", features=slice(2, 4), categories=("a", "b"))
    known = replace(_known(_network_of_rows, _TABLE, inputs, targets), partial_records=partial)
    return Scene(
        about="12 rounds of a regression",
        transcript=_recorded_rows(folder, inputs, targets),
        knowledge=known,
        task=_TABLE,
    )


def _recorded_rows(folder: Path, inputs: Tensor, targets: Tensor) -> Transcript:
    if folder.is_dir():
        return Transcript(folder)
    recorder = Recorder(folder)
    for number in range(1, 13):
        before = {"weight": torch.randn((1, 4), generator=generator("broadcast", number))}
        updates = []
        for client, sign in ((VICTIM, 1), (OTHER, -1)):
            weight = before["weight"].clone().requires_grad_(True)
            squared_error(inputs @ weight.T, sign * targets).backward()  # type: ignore[no-untyped-call]
            assert weight.grad is not None
            after = {"weight": weight.detach() - _RATE * weight.grad}
            updates.append(_update(number, client, before, Payload.dense(after, "weights"), len(inputs)))
        recorder.write(number, updates)
    return Transcript(folder)
