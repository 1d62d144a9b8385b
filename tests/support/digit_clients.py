"""Clients that hold four digits each and train a small network, for attacks with a prior from public digits."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.mods import defend_payload
from fedsim.base.metrics import pair_examples, psnr
from fedsim.base.randomness import generator, seed_globals
from fedsim.data.digits import Digits
from fedsim.interfaces.attack import Knowledge, Records
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

COUNT, FIRST_PUBLIC = 4, 600
DIGITS = Digits().load(None)
PLAN = LocalTraining(local_epochs=1, batch_size=COUNT, learning_rate=0.1)


def mlp() -> nn.Module:
    with seed_globals("mlp"):
        return Mlp(hidden=(64,)).build(DIGITS.task)


def data(victim: int) -> tuple[Tensor, Tensor]:
    rows = slice(victim * COUNT, (victim + 1) * COUNT)
    return DIGITS.train.inputs(rows), DIGITS.train.labels[rows]


@cache
def public() -> Records:
    rows = slice(FIRST_PUBLIC, None)
    return Records(inputs=DIGITS.train.inputs(rows), labels=DIGITS.train.labels[rows])


def make_update(victim: int, *defenses: Defense, count: int = COUNT) -> Update:
    inputs, labels = (tensor[:count] for tensor in data(victim))
    before, key = copy_state(mlp()), ("client", victim)
    sent, _ = local_update(mlp(), before, inputs, labels, PLAN, key=key, defenses=defenses)
    payload = Payload.from_dense(sent, "weights")
    for defense in defenses:
        payload = defend_payload(defense, before, payload, LocalContext(rng=generator(*key, "sent"), broadcast=before))
    return Update(round=1, client=victim, before=before, payload=payload, num_examples=count)


def knowledge(victim: int, *defenses: Defense, auxiliary: Records | None = None) -> Knowledge:
    return Knowledge(
        model=mlp, loss=cross_entropy, input_shape=(1, 8, 8), num_classes=10, value_range=([0.0], [1.0]),
        input_mean=[0.3], input_std=[0.37], learning_rate=0.1, local_epochs=1, batch_size=COUNT, optimizer="sgd",
        momentum=0.0, weight_decay=0.0, proximal_mu=0.0, labels=data(victim)[1].sort().values,
        auxiliary=auxiliary or public(), defenses=defenses or None,
    )  # fmt: skip


def quality(finding: Reconstruction, victim: int) -> float:
    true = data(victim)[0]
    return psnr(pair_examples(finding.data, true), true).mean().item()


def floor(victim: int) -> float:
    """PSNR of the public means of the victim's classes."""
    true, labels = data(victim)
    means = [public().inputs[public().labels == label].mean(0) for label in labels]
    return psnr(torch.stack(means), true).mean().item()
