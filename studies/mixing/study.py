"""Gradients of mixed images, inverted by `ig` without and with knowledge of the defense, and by `unmixing`."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.unmixing import Unmixing
from clients.defenses.instahide import InstaHide
from clients.defenses.mixup import Mixup
from fedsim.base.errors import AttackError
from fedsim.base.metrics import psnr
from fedsim.base.randomness import generator, seed_globals
from fedsim.data import Dataset
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.defense import Defense, Participation
from fedsim.interfaces.findings import Reconstruction
from fedsim.plugins import registry
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.training.loop import local_gradient
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining
from studies.messages import data_folder, gradient_update, pair_psnr, task_knowledge
from studies.running import Row

ROUNDS = 8
DEFENSES: dict[str, Defense | None] = {
    "none": None,
    "mixup": Mixup(),
    "mixup alpha=1": Mixup(alpha=1.0),
    "instahide k=2": InstaHide(k=2),
    "instahide k=4": InstaHide(k=4),
}
COUNTS = {"none": (4, 5), "mixup": (4, 5, 8), "mixup alpha=1": (4,), "instahide k=2": (4,), "instahide k=4": (4, 8)}
ATTACK = InvertingGradients(step_size=0.1, tv_weight=0.001, iterations=2000, restarts=3)


def applies(cell: Row) -> bool:
    """Return whether the study has this number of images with the defense."""
    return cell["count"] in COUNTS[cell["defense"]]


@cache
def load_dataset(name: str) -> Dataset:
    """Load a data set."""
    dataset: Dataset = registry.build("datasets", name, {}, "data").load(data_folder())
    return dataset


def measure(data: str, model: str, defense: str, count: int, victim: int) -> Row:
    """Return PSNR, means over the images of one victim: of the mean training image, and of each attack."""
    dataset, mixing = load_dataset(data), DEFENSES[defense]
    plugin = registry.build("models", model, {"hidden": [64]} if model == "mlp" else {}, "model")

    def network() -> nn.Module:
        with seed_globals("mixing", "model"):
            return plugin.build(dataset.task)  # type: ignore[no-any-return]

    images, labels = victims_images(dataset, victim, count)
    mean, std = (moment.reshape(-1, 1, 1) for moment in dataset.standardisation)
    low, high = (((end - mean) / std).flatten().tolist() for end in (0, 1))
    zeros, ones = [0.0] * len(low), [1.0] * len(low)
    ends = {"value_range": (low, high), "input_mean": zeros, "input_std": ones}
    knowledge = task_knowledge(network, dataset.task, **ends)
    informed = replace(knowledge, defenses=None if mixing is None else (mixing,))
    with tempfile.TemporaryDirectory() as folder:
        # Record the gradients of all rounds, at the same weights.
        recorder, defenses = Recorder(Path(folder) / "transcript"), []
        if mixing is not None:
            bounds = (tuple(low), tuple(high))
            defenses = [mixing.of_client(Participation(
                num_examples=count, batch_size=count, steps=1, rounds=ROUNDS, num_classes=dataset.num_classes,
                value_range=bounds,
            ))]  # fmt: skip
        plan = LocalTraining(local_steps=1, batch_size=count, sends="gradient")
        for number in range(1, ROUNDS + 1):
            before, key = copy_state(network()), (victim, "train", number, 0)
            inputs = (images - mean) / std
            gradient, _, _ = local_gradient(network(), before, inputs, labels, plan, key=key, defenses=defenses)
            recorder.write(number, [gradient_update(before, gradient, count, number)])
        transcript = Transcript(Path(folder) / "transcript")
        # Attack the first gradient, and growing numbers of them.
        first = transcript.restrict_to([1])
        floor = dataset.train.inputs(slice(0, 5000)).mean(0).expand_as(images)
        row = {
            "floor": psnr(floor, images).mean().item(),
            "naive": psnr_of(ATTACK, first, knowledge, images),
            "adaptive": psnr_of(ATTACK, first, informed, images),
        }
        for rounds in (1, 2, 4, ROUNDS):
            seen = transcript.restrict_to(list(range(1, rounds + 1)))
            unmixed = math.nan if mixing is None else psnr_of(Unmixing(), seen, informed, images)
            row[f"unmixing, {rounds} rounds"] = unmixed
        return row


def victims_images(dataset: Dataset, victim: int, count: int) -> tuple[Tensor, Tensor]:
    """Return images in [0, 1] of different classes, and their labels."""
    places: dict[int, int] = {}
    for place in torch.randperm(len(dataset.train), generator=generator("victim", victim)).tolist():
        places.setdefault(int(dataset.train.labels[place]), place)
    index = torch.tensor(list(places.values())[:count])
    return dataset.train.inputs(index), dataset.train.labels[index]


def psnr_of(attack: Attack, transcript: Transcript, knowledge: Knowledge, images: Tensor) -> float:
    """Return the mean over the images; NaN where the attack gives up."""
    try:
        found = attack.run(Target(transcript=transcript, victim=0, knowledge=knowledge, rng=generator("attack")))
    except AttackError as error:
        print(error)
        return math.nan
    assert isinstance(found, Reconstruction)
    return pair_psnr(found.data, images)
