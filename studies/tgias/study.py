"""A simulated federation whose victim sends the gradient of one mini-batch again and again, and TGIAs-RO on it.

`clients` clients send the gradient of one mini-batch of size b each, and the server steps along their mean with `rate`.
The victim's mini-batch comes up every `every` rounds; in between it sends others'. A client with 100 examples and b = 8
has 12 mini-batches, so `every` is 12. With `untrained`, each gradient is taken at weights of its own that were never
trained (App. B, Table V). Labels are granted, except to Tables 4 and 5; pixels are standardised; words outside the
vocabulary are one word. The paper's rates of texts are multiples of 1 / (32 b), so each seems to be that of one
mini-batch of texts of 32 words, though the table's caption says 30.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from adversaries.inversion.tgias_ro import TemporalInversion
from adversaries.text.texts import TemporalTextInversion
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.data import DatasetPlugin
from fedsim.data.cifar import Cifar10, Cifar100
from fedsim.data.idx import Mnist
from fedsim.data.reuters import ReutersR8
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.findings import Reconstruction, Texts
from fedsim.inversion.alignment import align
from fedsim.inversion.labels.gradients import LABEL_RULES
from fedsim.inversion.labels.last_layer import last_layer
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from fedsim.training.model_state import copy_state
from fedsim.training.models.alexnet import AlexNet
from fedsim.training.models.lenet import TgiasLeNet
from fedsim.training.models.resnet import ResNet8
from fedsim.training.models.text_cnn import TextCnn
from studies.messages import attack_updates, data_folder, gradient_update, mean_gradient, score_claim, task_knowledge
from studies.running import Row

DATA: dict[str, type[DatasetPlugin]] = {"mnist": Mnist, "cifar10": Cifar10, "cifar100": Cifar100}
NETWORKS = {"lenet": TgiasLeNet, "alexnet": AlexNet, "resnet8": ResNet8}
QUICK = {
    "optimizer": "adam", "distance": "cosine", "layers": "equal", "step_size": 0.5, "aggregation": "trimmed-mean",
}  # fmt: skip
"""In place of the paper's L-BFGS and median, unless a grid says `paper`."""


class Examples:
    """Examples in memory, in model units, and networks for them."""

    def __init__(self, inputs: Tensor, labels: Tensor, network: Any, task: Task) -> None:
        self.inputs, self.labels, self.network, self.task = inputs, labels, network, task

    def model(self, *key: int | str) -> nn.Module:
        """Return a network in evaluation mode whose weights depend on `key` alone."""
        with seed_globals("model", *key):
            model: nn.Module = self.network.build(self.task)
        return model.eval()

    def gradient(self, model: nn.Module, index: Tensor) -> dict[str, Tensor]:
        """Return the gradient of the mean loss over these examples."""
        return mean_gradient(model, self.inputs[index], self.labels[index])

    def step(self, model: nn.Module, index: Tensor, rate: float) -> None:
        """Step along the mean gradient over these examples, as the server does."""
        gradient = self.gradient(model, index)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(rate * gradient[name])

    def send_gradients(
        self,
        size: int,
        count: int,
        seed: int,
        *,
        rate: float,
        every: int = 12,
        clients: int = 5,
        untrained: bool = False,
    ) -> tuple[list[Update], Tensor]:
        """Return `count` gradients of the victim's mini-batch, and which examples are in it."""
        rng = generator(seed, "who")
        order = torch.randperm(len(self.inputs), generator=rng)
        mine, others = order[:size], order[size:]
        model, updates = self.model(seed), []
        for number in range(1, count + 1):
            if untrained:
                model = self.model(seed, number)
            updates.append(gradient_update(copy_state(model), self.gradient(model, mine), size, number))
            for turn in range(0 if untrained else every):
                crowd = size * (clients - 1 if turn == 0 else clients)
                index = others[torch.randint(0, len(others), (crowd,), generator=rng)]
                self.step(model, torch.cat([mine, index]) if turn == 0 else index, rate)
        return updates, mine


class Images(Examples):
    """Standardised images.

    Attributes:
        true: the images in [0, 1].
    """

    def __init__(self, network: str) -> None:
        model, _, data = network.partition("-")
        dataset = DATA[data]().load(data_folder())
        self.true, labels = dataset.train.inputs(slice(0, 10000)), dataset.train.labels[:10000]
        mean, std = self.true.mean((0, 2, 3)), self.true.std((0, 2, 3))
        self.low, self.high = ((end - mean) / std for end in (0.0, 1.0))
        inputs = (self.true - mean.reshape(-1, 1, 1)) / std.reshape(-1, 1, 1)
        super().__init__(inputs, labels, NETWORKS[model](), dataset.task)

    def knowledge(self, labels: Tensor | None) -> Knowledge:
        """Return what the adversary knows."""
        return task_knowledge(
            lambda: self.model("attack"),
            self.task,
            value_range=(self.low.tolist(), self.high.tolist()),
            input_mean=[0.0] * len(self.low),
            input_std=[1.0] * len(self.low),
            learning_rate=1.0,  # asked for by attacks on updates; gradients that were sent are read as they are
            local_epochs=1,
            batch_size=1,
            labels=None if labels is None else labels.sort().values,
        )

    def problem(self, model: nn.Module, index: Tensor) -> tuple[InversionProblem, Tensor]:
        """Return one gradient as an attack sees it, and dummy data."""
        update = gradient_update(copy_state(model), self.gradient(model, index), len(index))
        dummy = torch.randn((8, *self.inputs.shape[1:]), generator=generator("dummy"))
        return build_problem(update, self.knowledge(None)), dummy


load_images = cache(Images)


@cache
def load_texts(kernels: str) -> Examples:
    """Load the texts of Reuters R8 that have 32 words, and a TextCNN with these kernels."""
    dataset = ReutersR8(length=32, vocabulary=5000).load(data_folder())
    full = (dataset.train.raw != 0).all(1)
    network = TextCnn(kernels=tuple(map(int, kernels.split())), channels=100, dimension=300, pool=2)
    return Examples(dataset.train.inputs()[full], dataset.train.labels[full], network, dataset.task)


def applies(cell: Row) -> bool:
    """Leave out ten gradients from ten starts."""
    return bool(cell.get("starts", 1) == 1 or cell["gradients"] == 1)


def measure(table: str, **cell: Any) -> list[Row]:
    """Return a row for each quantity of a cell."""
    measures: dict[str, Any] = {
        "table3": gradient_norms, "table4": recover_labels, "table5": align_batches, "table10": attack_texts
    }  # fmt: skip
    values = measures.get(table, attack_images)(**cell)
    return [{"quantity": name, "value": value} for name, value in values.items()]


def attack_images(
    seed: int,
    size: int = 1,
    network: str = "lenet-mnist",
    gradients: int = 10,
    starts: int = 1,
    invalid: int = 0,
    untrained: bool = False,
    paper: bool = False,
    tv: float = 0.0,
    iterations: int = 300,
    **settings: Any,
) -> dict[str, float]:
    """Attack gradients of images: PSNR and SSIM, means over the mini-batch; of several starts, of their median."""
    images = load_images(network)
    updates, mine = images.send_gradients(size, gradients, seed, rate=0.1, untrained=untrained)
    for place in range(gradients - invalid, gradients):
        updates[place] = with_noise_in_place(updates[place], generator(seed, place, "change"))
    known: dict[str, Any] = {"align": False, "iterations": iterations, "tv_weight": tv, "gradients": gradients}
    known |= ({} if paper else QUICK) | ({"trim": 0.3, "invalid": 3} if "aggregation" in settings else {})
    attack = TemporalInversion(**known | settings)
    estimates, seconds = [], 0.0
    for start in range(starts):
        key = (seed, "attack", start) if start else (seed, "attack")
        knowledge = images.knowledge(images.labels[mine])
        finding, spent = attack_updates(attack, updates, knowledge, generator(*key))
        assert isinstance(finding, Reconstruction)
        estimates.append(finding.data)
        seconds += spent
    paired = [estimate[metrics.match_examples(estimate, estimates[0])] for estimate in estimates]
    true = images.true[mine]
    claimed = metrics.pair_examples(torch.stack(paired).quantile(0.5, 0), true)
    psnr, ssim = metrics.psnr(claimed, true).mean().item(), metrics.ssim(claimed, true).mean().item()
    return {"psnr": psnr, "ssim": ssim, "seconds": seconds}


def with_noise_in_place(update: Update, rng: torch.Generator) -> Update:
    """Return an update whose gradient is noise of the same norm, tensor by tensor."""
    noisy = {}
    for name, tensor in (update.gradient or {}).items():
        noise = torch.randn(tensor.shape, generator=rng)
        noisy[name] = noise.mul(tensor.norm() / noise.norm())
    return replace(update, payload=Payload.from_dense(noisy, "gradient"))


def attack_texts(
    seed: int, kernels: str, size: int, gradients: int, refinements: int, every: int, iterations: int
) -> dict[str, float]:
    """Attack gradients of texts: right words in the right places, wherever they stand, and which occur at all."""
    texts = load_texts(kernels)
    updates, mine = texts.send_gradients(size, gradients, seed, rate=0.01, every=every)
    knowledge = task_knowledge(lambda: texts.model(0), texts.task, labels=texts.labels[mine].sort().values)
    attack = TemporalTextInversion(
        gradients=gradients, iterations=iterations, optimizer="adam", distance="cosine", layers="relative",
        step_size=0.1, aggregation="mean", align=False, nearest="cosine", words="vocabulary", refinements=refinements,
    )  # fmt: skip
    finding, seconds = attack_updates(attack, updates, knowledge, generator(seed, "attack"))
    assert isinstance(finding, Texts)
    truth = Truth(data=texts.inputs[mine], labels=texts.labels[mine])
    scores = score_claim(finding, truth, generator(0), labels_granted=True)
    return {name: scores[name].value for name in ("recover_rate", "tokens_found", "words_found")} | {"seconds": seconds}


def gradient_norms(network: str, epoch: int) -> dict[str, float]:
    """Train on 2000 examples: L2 norm of a mini-batch's gradient, and its entries' root mean square."""
    images = load_images(network)
    model, rng = images.model(0), generator("norms", 0)
    order = torch.empty(0)
    for _ in range(epoch):
        order = torch.randperm(2000, generator=rng)
        for index in order.split(32):
            images.step(model, index, 0.1)
    norms = []
    for index in order[:640].split(32):
        gradient = images.gradient(model, index)
        norms.append(torch.stack([tensor.norm() for tensor in gradient.values()]).norm().item())
    mean = sum(norms) / len(norms)
    return {"norm": mean, "rms": mean / sum(parameter.numel() for parameter in model.parameters()) ** 0.5}


def recover_labels(seed: int, network: str, steps: int, size: int) -> dict[str, float]:
    """Recover labels from single gradients: the share, as a multiset, that is right, by each rule."""
    images, batches = load_images(network), 5
    model, rng = images.model(seed), generator("labels", seed, steps, size)
    for _ in range(steps):
        images.step(model, torch.randint(0, len(images.inputs), (32,), generator=rng), 0.1)
    right = dict.fromkeys(LABEL_RULES, 0.0)
    for _ in range(batches):
        index = torch.randperm(len(images.inputs), generator=rng)[:size]
        layer, true = last_layer(*images.problem(model, index)), images.labels[index]
        for name, rule in LABEL_RULES.items():
            claimed = torch.bincount(rule([layer], size, rng), minlength=100)
            overlap = torch.minimum(claimed, torch.bincount(true, minlength=100)).sum().item()
            right[name] += overlap / size / batches
    return right


def align_batches(seed: int, network: str, size: int, rate: float, batches: int = 78) -> dict[str, float]:
    """Tell mini-batches apart over five epochs: the share of gradients in the right group, one for each mini-batch."""
    images = load_images(network)
    model, rng = images.model(seed), generator("alignment", size, seed)
    chosen = torch.randperm(len(images.inputs), generator=rng)[: size * batches].reshape(-1, size)
    labels, rows, owners = [], [], []
    for _ in range(5):
        for place in torch.randperm(len(chosen), generator=rng).tolist():
            problem, dummy = images.problem(model, chosen[place])
            labels.append(LABEL_RULES["bias"]([last_layer(problem, dummy)], size, rng))
            rows.append(torch.cat([tensor.flatten() for tensor in problem.mean_gradient]))
            owners.append(place)
            images.step(model, chosen[place], rate)
    return {
        "labels": share_grouped(group_equal(labels), owners),
        "labels and gradients": share_grouped(align(labels, rows), owners),
    }


def group_equal(labels: Sequence[Tensor]) -> list[list[int]]:
    """Group gradients whose labels are equal in any order, as the paper does first.

    >>> group_equal([torch.tensor([0, 1]), torch.tensor([2, 2]), torch.tensor([1, 0])])
    [[0, 2], [1]]
    """
    groups = defaultdict[tuple[int, ...], list[int]](list)
    for number, of_gradient in enumerate(labels):
        groups[tuple(sorted(of_gradient.tolist()))].append(number)
    return list(groups.values())


def share_grouped(groups: Sequence[Sequence[int]], owners: Sequence[int]) -> float:
    """Return the share of gradients whose group is that of their mini-batch, by the best assignment."""
    batches = [{number for number, owner in enumerate(owners) if owner == batch} for batch in dict.fromkeys(owners)]
    overlap = torch.tensor([[len(members & set(group)) for members in batches] for group in groups]).numpy()
    return float(overlap[linear_sum_assignment(overlap, maximize=True)].sum() / len(owners))
