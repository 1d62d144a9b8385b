"""Tiny recordings for checks of attacks: messages of three clients, and all facts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task, sort_targets, squared_error
from fedsim.interfaces.attack import (
    GROUP,
    Attack,
    Knowledge,
    KnownCandidates,
    KnownRows,
    PartialRecords,
    PropertyRecords,
    Records,
    Subject,
    Target,
)
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.split_steps import BOTTOM, ROWS
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from fedsim.training.models.mlp import Mlp
from fedsim.training.models.text_cnn import TextCnn
from fedsim.training.models.transformer import TransformerDecoder
from fedsim.training.models.u_net import UNet

VICTIM, OTHER, THIRD = 2**63 + 5, 2**64 - 1, 4
"""Ids of clients; two do not fit into int64, as half of the ids that Flower draws."""
_LEARNING_RATE = 0.1
_REPETITIONS = 10
"""Of each auxiliary record."""
_IMAGES, _TEXTS, _TABLE = Task((1, 8, 8), 10), Task((6,), 10, 20), Task((4,), 0)
_MASKS = Task((1, 8, 8), 0, mask_classes=3)
_ROWS, _COLUMNS = Task((6,), 10), (1, 3, 2)
_LABELS = torch.tensor([1, 4, 4])
_WEIGHT_ROUNDS, _GRADIENT_ROUNDS = [1, 2], [3, 4]
"""Rounds in which clients send weights, and in which they send gradients."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TinyRecording:
    """Recording of a tiny federation, with all knowledge about it.

    Attributes:
        description: for error texts.
        knowledge: all facts that can be granted.
    """

    description: str
    transcript: Transcript
    knowledge: Knowledge
    task: Task

    def make_target(self, knowledge: Knowledge, rng: torch.Generator) -> Target:
        """Return what an attack on the victim, or on the sum that it is in, is given."""
        reply = self.transcript.header(self.transcript.rounds[0]).find_reply(VICTIM)
        members = tuple(reply.members) if reply else ()
        return Target(transcript=self.transcript, victim=VICTIM, members=members, knowledge=knowledge, rng=rng)


def recordings_for(attack: Attack, folder: Path) -> Iterator[TinyRecording]:
    """Yield the recordings that suit the kind of `attack`, recorded in `folder` when due."""
    if attack.subject in _SCENES:
        yield _adapt_knowledge(attack, _SCENES[attack.subject](folder / attack.subject))
        return
    if attack.subject == "texts":
        yield from _rounds_for(attack, "texts", _text_scene(folder / "texts", _text_network))
        yield from _rounds_for(attack, "texts for a transformer", _text_scene(folder / "attention", _transformer))
        return
    if "columns" in attack.needs:
        yield from _rounds_for(attack, "rows of a table", _row_scene(folder / "rows"))
        return
    if attack.reads == {GROUP}:
        yield from _rounds_for(attack, "sums over images", _image_scene(folder / "sums", 1, members=(VICTIM, OTHER)))
        return
    if "partial_records" not in attack.needs:
        yield from _rounds_for(attack, "images", _image_scene(folder / "images", 3))
        yield from _rounds_for(attack, "one image", _image_scene(folder / "image", 1))
    regression = _regression_scene(folder / "table")
    rounds = [1] if attack.reads_one_round() else regression.transcript.rounds
    yield _adapt_knowledge(attack, replace(regression, transcript=regression.transcript.restrict_to(rounds)))
    if attack.vector_targets and "partial_records" not in attack.needs:
        yield from _rounds_for(attack, "images with masks", _mask_scene(folder / "masks"))


def _rounds_for(attack: Attack, data: str, scene: TinyRecording) -> Iterator[TinyRecording]:
    """Yield rounds of weights and rounds of gradients: one for an attack that reads one, else several."""
    for rounds, form in (_WEIGHT_ROUNDS, "weights"), (_GRADIENT_ROUNDS, "gradients"):
        chosen_rounds = rounds[:1] if attack.reads_one_round() else rounds
        noun = "round" if attack.reads_one_round() else "rounds"
        description = f"{len(chosen_rounds)} {noun} of {form} of {data}"
        transcript = scene.transcript.restrict_to(chosen_rounds)
        yield _adapt_knowledge(attack, replace(scene, description=description, transcript=transcript))


def _adapt_knowledge(attack: Attack, scene: TinyRecording) -> TinyRecording:
    """Grant local steps in place of epochs, and local models, where the attack needs them."""
    knowledge = scene.knowledge
    if "local_steps" in attack.needs:
        knowledge = replace(knowledge, local_steps=1, local_epochs=None)
    if attack.builds_on:
        first_round = scene.transcript.rounds[0]
        clients = scene.transcript.clients(first_round)
        models = {client: scene.transcript.update(first_round, client).after for client in clients}
        knowledge = replace(knowledge, models=models)
    return replace(scene, knowledge=knowledge)


def _base_knowledge(model: Callable[[], nn.Module], task: Task, inputs: Tensor, labels: Tensor) -> Knowledge:
    """Return the facts of all tiny federations: one step of gradient descent on all data."""
    return Knowledge(
        model=model,
        loss=task.loss,
        input_shape=task.input_shape,
        num_classes=task.num_classes or None,
        learning_rate=_LEARNING_RATE,
        local_epochs=1,
        batch_size=len(inputs),
        optimizer="sgd",
        momentum=0.0,
        weight_decay=0.0,
        proximal_mu=0.0,
        labels=sort_targets(labels),
        records=Records(inputs=inputs, labels=labels),
        modality=task.modality,
        candidates=Records(inputs=inputs, labels=labels),
        known_candidates=KnownCandidates(
            inputs=torch.cat([inputs, inputs.flip(-1)]),
            labels=torch.cat([labels, labels]),
            members=torch.arange(2 * len(inputs)) < len(inputs),
        ),
        auxiliary=_auxiliary_records(inputs, labels),
        property_records=_property_records(inputs, labels),
    )


def _auxiliary_records(inputs: Tensor, labels: Tensor) -> Records:
    """Repeat each record, so that many clients can be drawn from them."""
    sizes = [_REPETITIONS, *[1] * (inputs.ndim - 1)]
    return Records(inputs=inputs.repeat(sizes), labels=torch.cat([labels] * _REPETITIONS))


def _property_records(inputs: Tensor, labels: Tensor) -> PropertyRecords:
    """Repeat each record to fill batches, every other time with the property."""
    repetitions = 2 * len(inputs)
    has = torch.arange(repetitions * len(inputs)) // len(inputs) % 2 == 0
    sizes = [repetitions, *[1] * (inputs.ndim - 1)]
    return PropertyRecords(inputs=inputs.repeat(sizes), labels=torch.cat([labels] * repetitions), has=has)


def _with_seed(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that makes a network whose parameters are the same each time."""

    def make_with_seed() -> nn.Module:
        with seed_globals("contract", "model"):
            return make()

    return make_with_seed


_image_network = _with_seed(lambda: Mlp(hidden=(12,)).build(_IMAGES))
_mask_network = _with_seed(lambda: UNet(channels=(4, 4)).build(_MASKS))
_text_network = _with_seed(
    lambda: TextCnn(kernels=(3,), channels=8, dimension=6, pool=2, dropout=0.0).build(_TEXTS).eval()
)
_transformer = _with_seed(lambda: TransformerDecoder(dim=32, heads=2).build(_TEXTS).eval())
_row_network = _with_seed(lambda: Mlp(hidden=(12,)).build(_ROWS))
_regression_network = _with_seed(lambda: nn.Linear(4, 1, bias=False))
_bottom_network = _with_seed(lambda: nn.Linear(6, 2, bias=False))


def _image_scene(folder: Path, count: int, members: tuple[int, ...] = ()) -> TinyRecording:
    """Record images whose range in model units is not that of findings, so that an attack has to convert."""
    inputs = torch.rand((3, 1, 8, 8), generator=generator("inputs"))[:count]
    knowledge = _base_knowledge(_image_network, _IMAGES, inputs, _LABELS[:count])
    knowledge = replace(knowledge, value_range=([-1.0], [2.0]), input_mean=[0.3], input_std=[0.3])
    transcript = _record_rounds(folder, knowledge, members)
    return TinyRecording(description="", transcript=transcript, knowledge=knowledge, task=_IMAGES)


def _mask_scene(folder: Path) -> TinyRecording:
    """Record two images, whose brighter pixels are of another class and whose brightest of a third one."""
    inputs = torch.rand((2, 1, 8, 8), generator=generator("inputs"))
    masks = (inputs[:, 0] > 0.5).long() + (inputs[:, 0] > 0.8).long()
    knowledge = _base_knowledge(_mask_network, _MASKS, inputs, masks)
    knowledge = replace(knowledge, value_range=([0.0], [1.0]), input_mean=[0.5], input_std=[0.3])
    return TinyRecording(description="", transcript=_record_rounds(folder, knowledge), knowledge=knowledge, task=_MASKS)


def _row_scene(folder: Path) -> TinyRecording:
    """Record rows of a number and two categorical columns."""
    numbers = torch.tensor([[0.2], [0.9], [0.4]])
    categories = torch.tensor([[0, 1], [2, 0], [1, 1]])
    inputs = torch.cat([numbers, torch.eye(3)[categories[:, 0]], torch.eye(2)[categories[:, 1]]], 1)
    knowledge = replace(_base_knowledge(_row_network, _ROWS, inputs, _LABELS), columns=_COLUMNS)
    knowledge = replace(knowledge, value_range=([0.0], [1.0]), input_mean=[0.4] * 6, input_std=[0.4] * 6)
    return TinyRecording(description="", transcript=_record_rounds(folder, knowledge), knowledge=knowledge, task=_ROWS)


def _tree_scene(folder: Path) -> TinyRecording:
    """Record a tree of each client, of three rows of a number and two categorical columns."""
    scene = _row_scene(folder.with_name("rows"))
    if not folder.is_dir():
        recorder = Recorder(folder)
        state = {"0": torch.frombuffer(bytearray(_TREE), dtype=torch.uint8)}
        payload, empty = Payload.from_dense(state, "weights"), {"0": torch.zeros(0, dtype=torch.uint8)}
        recorder.write(1, [_make_update(1, client, empty, payload, 3) for client in (THIRD, VICTIM, OTHER)])
    return replace(scene, description="a tree of rows of a table", transcript=Transcript(folder))


def _answer_scene(folder: Path) -> TinyRecording:
    """Record counts of three clients in one sum, then those of the victim and another one."""
    scene = _row_scene(folder.with_name("rows"))
    if not folder.is_dir():
        recorder = Recorder(folder)
        for number, members, counts in ((1, (THIRD, VICTIM, OTHER), [6.0, 9.0]), (2, (VICTIM, OTHER), [5.0, 4.0])):
            state = {"ages": torch.tensor(counts) / len(members)}
            empty = {"ages": torch.zeros(2)}
            update = _make_update(number, VICTIM, empty, Payload.from_dense(state, "weights"), len(members))
            recorder.write(number, [replace(update, members=members)])
    return replace(scene, description="sums of counts", transcript=Transcript(folder))


def _split_scene(folder: Path) -> TinyRecording:
    """Record two steps of split learning: embeddings of rows by a linear model, then gradients of them."""
    scene = _row_scene(folder.with_name("rows"))
    knowledge, ids = scene.knowledge, torch.arange(12)
    assert knowledge.records is not None
    rows = knowledge.records.inputs.repeat(4, 1)
    weight = torch.randn(2, 6, generator=generator("contract", "bottom"))
    logits = torch.randn(12, generator=generator("contract", "logits"))
    gradients = torch.stack([-logits, logits], 1)
    if not folder.is_dir():
        recorder = Recorder(folder)
        for number in 1, 2:
            before = {ROWS: ids} | ({f"{BOTTOM}weight": weight} if number == 1 else {"gradient": gradients})
            state = {"embedding": rows @ weight.T, ROWS: ids}
            recorder.write(number, [_make_update(number, VICTIM, before, Payload.from_dense(state, "weights"), 12)])
    known = KnownRows(inputs=rows[:6], labels=torch.zeros(6, dtype=torch.long), rows=ids[:6])
    knowledge = replace(knowledge, model=_bottom_network, num_classes=2, known_rows=known)
    knowledge = replace(knowledge, value_range=([0.0], [1.0]))
    return replace(scene, description="steps of split learning", transcript=Transcript(folder), knowledge=knowledge)


_TREE = json.dumps(
    {
        "learner": {
            "gradient_booster": {
                "name": "gbtree",
                "model": {
                    "trees": [
                        {
                            "left_children": [1, -1, -1],
                            "right_children": [2, -1, -1],
                            "split_indices": [0, 0, 0],
                            "split_conditions": [0.4, -0.12, 0.2],
                            "sum_hessian": [0.75, 0.25, 0.5],
                            "base_weights": [0.2857142857, -0.12, 0.2],
                            "loss_changes": [0.7238095238, 0.0, 0.0],
                        }
                    ]
                },
            },
            "learner_model_param": {"base_score": "[0.5]", "num_feature": "6"},
            "objective": {"name": "binary:logistic", "reg_loss_param": {"scale_pos_weight": "1"}},
        }
    }
).encode()
"""A tree that XGBoost trains on labels 0, 1 and 1 with a learning rate of 0.3 and a penalty of 1."""


def _text_scene(folder: Path, network: Callable[[], nn.Module]) -> TinyRecording:
    inputs = torch.randint(20, (3, 6), generator=generator("tokens"))
    knowledge = _base_knowledge(network, _TEXTS, inputs, _LABELS)
    return TinyRecording(description="", transcript=_record_rounds(folder, knowledge), knowledge=knowledge, task=_TEXTS)


def _record_rounds(folder: Path, knowledge: Knowledge, members: tuple[int, ...] = ()) -> Transcript:
    """Record rounds of weights of three clients, then rounds of gradients of the victim.

    With `members`, all are sums over these clients, recorded under the id of the victim.
    """
    if folder.is_dir():
        return Transcript(folder)
    recorder = Recorder(folder)
    count = len(knowledge.records.inputs) if knowledge.records else 0
    before, gradient = _victim_gradient(knowledge)
    # The victim takes one step; the weights of the others are those of no training.
    states = {
        THIRD: {name: 1.2 * tensor for name, tensor in before.items()},
        VICTIM: {name: tensor - _LEARNING_RATE * gradient[name] for name, tensor in before.items()},
        OTHER: {name: 0.9 * tensor for name, tensor in before.items()},
    }
    if members:
        states = {VICTIM: states[VICTIM]}
    for number in _WEIGHT_ROUNDS:
        updates = []
        for client, state in states.items():
            update = _make_update(number, client, before, Payload.from_dense(state, "weights"), count)
            updates.append(replace(update, members=members))
        recorder.write(number, updates)
    for number in _GRADIENT_ROUNDS:
        update = _make_update(number, VICTIM, before, Payload.from_dense(gradient, "gradient"), count)
        recorder.write(number, [replace(update, members=members)])
    return Transcript(folder)


def _victim_gradient(knowledge: Knowledge) -> tuple[State, State]:
    """Return the model's parameters and their gradient on the victim's records, by name."""
    assert knowledge.model is not None
    assert knowledge.records is not None
    model, records = knowledge.model(), knowledge.records
    assert knowledge.loss is not None
    knowledge.loss(model(records.inputs), records.labels).backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    return before, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _make_update(number: int, client: int, before: State, payload: Payload, count: int) -> Update:
    return Update(round=number, client=client, before=before, payload=payload, num_examples=count)


def _regression_scene(folder: Path) -> TinyRecording:
    """Record twelve rounds of two clients that train a regression by full-batch steps.

    The broadcast models are far apart. A row holds two numbers and a category of two.
    """
    numbers, targets = torch.randn((6, 3), generator=generator("rows")).tensor_split([2], 1)
    inputs = torch.cat([numbers, torch.eye(2)[torch.tensor([0, 1, 1, 0, 1, 0])]], 1)
    targets = targets.squeeze(1)
    partial_inputs = inputs.clone()
    partial_inputs[:, 2:4] = 0
    partial = PartialRecords(
        inputs=partial_inputs,
        labels=targets,
        column="kind",
        features=slice(2, 4),
        categories=("a", "b"),
    )
    knowledge = _base_knowledge(_regression_network, _TABLE, inputs, targets)
    return TinyRecording(
        description="12 rounds of a regression",
        transcript=_record_regression(folder, inputs, targets),
        knowledge=replace(knowledge, partial_records=partial),
        task=_TABLE,
    )


def _record_regression(folder: Path, inputs: Tensor, targets: Tensor) -> Transcript:
    if folder.is_dir():
        return Transcript(folder)
    recorder = Recorder(folder)
    for number in range(1, 13):
        before = {"weight": torch.randn((1, 4), generator=generator("broadcast", number))}
        updates = []
        for client, sign in ((VICTIM, 1), (OTHER, -1)):
            weight = before["weight"].clone().requires_grad_(True)
            squared_error(inputs @ weight.T, sign * targets).backward()
            assert weight.grad is not None
            after = {"weight": weight.detach() - _LEARNING_RATE * weight.grad}
            payload = Payload.from_dense(after, "weights")
            updates.append(_make_update(number, client, before, payload, len(inputs)))
        recorder.write(number, updates)
    return Transcript(folder)


_SCENES: Mapping[Subject, Callable[[Path], TinyRecording]] = {
    "trees": _tree_scene,
    "answers": _answer_scene,
    "embeddings": _split_scene,
    "embedding gradients": _split_scene,
}
"""Recordings for attacks on something else than a network, by their subject."""
