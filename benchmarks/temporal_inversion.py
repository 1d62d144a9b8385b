"""TGIAs-RO beside the paper's tables, on the networks and data sets that fit a CPU.

    python benchmarks/temporal_inversion.py batch       # PSNR and SSIM against b
    python benchmarks/temporal_inversion.py gradients   # against T
    python benchmarks/temporal_inversion.py steps       # against R_l, with L-BFGS: --paper --iterations 15
    python benchmarks/temporal_inversion.py baselines   # beside attacks on the first gradient alone
    python benchmarks/temporal_inversion.py invalid     # m of 10 gradients are noise, four aggregations
    python benchmarks/temporal_inversion.py noise       # N(0, 1e-4) on each entry, or 40 % of the entries masked
    python benchmarks/temporal_inversion.py single      # one gradient from ten starts, aggregated, beside ten gradients
    python benchmarks/temporal_inversion.py norms       # how long gradients are as the network is trained
    python benchmarks/temporal_inversion.py labels      # labels recovered from one gradient, CIFAR-100
    python benchmarks/temporal_inversion.py alignment   # mini-batches told apart over five epochs, CIFAR-10 and -100

Each prints one row a case: the mean over seeds, and every seed's own value. Data come from FEDSIM_DATA. A
federation is simulated: `--clients` clients send the gradient of one mini-batch of size b each, the server steps along
their mean with `--rate`; the victim's mini-batch comes up every `--every` rounds, in between it sends others'.
With `--untrained`, each gradient is taken at weights of its own that were never trained (App. B, Table V).
A client with 100 examples and b = 8 has 12 mini-batches, so `--every` is 12. Labels are granted, except to the last two
subcommands; pixels are standardised.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inversion.deep_leakage import DeepLeakage
from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.sapag import SelfAdaptiveLeakage
from adversaries.inversion.see_through_gradients import SeeThroughGradients
from adversaries.inversion.tgias_ro import TemporalInversion
from fedsim.base import metrics
from fedsim.base.randomness import generator, seed_globals
from fedsim.data import Dataset
from fedsim.data.cifar import Cifar10, Cifar100
from fedsim.data.idx import Mnist
from fedsim.federation.build import find_data_folder
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.alignment import align
from fedsim.inversion.labels.gradients import LABEL_RULES
from fedsim.inversion.labels.last_layer import last_layer
from fedsim.inversion.problem import InversionProblem, build_problem
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from fedsim.training.models.alexnet import AlexNet
from fedsim.training.models.lenet import TgiasLeNet
from fedsim.training.models.resnet import ResNet8

ROBUST = ("median", "trimmed-mean", "krum", "mean")
CELLS: dict[str, tuple[type, type]] = {"lenet-mnist": (Mnist, TgiasLeNet), "alexnet-cifar10": (Cifar10, AlexNet)}


class Federation:
    """A data set in memory, standardised, and networks for it."""

    def __init__(self, dataset: type, network: type) -> None:
        if (folder := find_data_folder()) is None:
            raise SystemExit("FEDSIM_DATA is not set; point it at the folder with the data sets")
        self.data: Dataset = dataset().load(folder)
        self.network = network()
        self.inputs, self.labels = self.data.train.inputs(slice(0, 10000)), self.data.train.labels[:10000]
        axes = (0, 2, 3)
        self.mean, self.std = self.inputs.mean(axes), self.inputs.std(axes)
        self.low, self.high = ((end - self.mean) / self.std for end in (0.0, 1.0))

    def model(self, *key: int | str) -> nn.Module:
        """A network in evaluation mode whose weights depend on `key` alone."""
        with seed_globals("model", *key):
            return self.network.build(self.data.task).eval()  # type: ignore[no-any-return]

    def units(self, inputs: Tensor) -> Tensor:
        """Standardised pixels."""
        shape = (-1, 1, 1)
        centred: Tensor = inputs - self.mean.reshape(shape)
        return centred.div(self.std.reshape(shape))

    def knowledge(self, labels: Tensor | None) -> Knowledge:
        """What the adversary knows."""
        return Knowledge(
            model=lambda: self.model("attack"),
            loss=cross_entropy,
            input_shape=tuple(self.inputs.shape[1:]),
            num_classes=self.data.task.num_classes,
            value_range=(self.low.tolist(), self.high.tolist()),
            input_mean=[0.0] * len(self.mean),
            input_std=[1.0] * len(self.std),
            learning_rate=1.0,  # asked for by attacks on updates; gradients that were sent are read as they are
            local_epochs=1,
            batch_size=1,
            labels=None if labels is None else labels.sort().values,
        )

    def gradient(self, model: nn.Module, index: Tensor) -> list[Tensor]:
        """Of the mean loss over these examples."""
        loss = cross_entropy(model(self.units(self.inputs[index])), self.labels[index])
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def step(self, model: nn.Module, index: Tensor, rate: float) -> None:
        """What the server does with the mean gradient over these examples."""
        slopes = self.gradient(model, index)
        with torch.no_grad():
            for p, slope in zip(model.parameters(), slopes, strict=True):
                p.sub_(rate * slope)


def parameters(model: nn.Module) -> State:
    """Copies of everything that travels."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def make_updates(
    federation: Federation, size: int, count: int, seed: int, options: argparse.Namespace
) -> tuple[list[Update], Tensor]:
    """`count` gradients of the victim's mini-batch, and which examples are in it."""
    rng = generator(seed, "who")
    order = torch.randperm(len(federation.inputs), generator=rng)
    mine, others = order[:size], order[size:]
    model, updates = federation.model(seed), []
    names = [name for name, _ in model.named_parameters()]
    for number in range(1, count + 1):
        if options.untrained:
            model = federation.model(seed, number)
        gradient = dict(zip(names, federation.gradient(model, mine), strict=True))
        updates.append(
            Update(
                round=number,
                client=0,
                before=parameters(model),
                payload=Payload.from_dense(gradient, "gradient"),
                num_examples=size,
            )
        )
        for turn in range(0 if options.untrained else options.every):
            crowd = size * (options.clients - 1 if turn == 0 else options.clients)
            index = others[torch.randint(0, len(others), (crowd,), generator=rng)]
            federation.step(model, torch.cat([mine, index]) if turn == 0 else index, options.rate)
    return updates, mine


def score(
    federation: Federation, attack: Attack, updates: Sequence[Update], mine: Tensor, seed: int, starts: int = 1
) -> tuple[float, float, float]:
    """PSNR and SSIM, means over the mini-batch, and CPU seconds; with several `starts`, of their results' median."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "transcript")
        for update in updates[:1] if attack.reads_one_round() else updates:
            recorder.write(update.round, [update])
        started = time.process_time()
        knowledge = federation.knowledge(federation.labels[mine])
        keys = [(seed, "attack"), *((seed, "attack", start) for start in range(1, starts))]
        findings = [
            attack.run(Target(transcript=Transcript(Path(folder)), victim=0, knowledge=knowledge, rng=generator(*key)))
            for key in keys
        ]
    seconds = time.process_time() - started
    true = federation.inputs[mine]
    found = metrics.pair_examples(_joined([f.data for f in findings if isinstance(f, Reconstruction)]), true)
    return metrics.psnr(found, true).mean().item(), metrics.ssim(found, true).mean().item(), seconds


def _joined(estimates: Sequence[Tensor]) -> Tensor:
    """The median of `estimates` at each pixel, their images assigned to those of the first."""
    first = estimates[0]
    return torch.stack([estimate[metrics.match_examples(estimate, first)] for estimate in estimates]).quantile(0.5, 0)


def row(name: str, values: Sequence[tuple[float, float, float]]) -> None:
    """Print one case."""
    psnr, ssim, seconds = zip(*values, strict=True)
    each = " ".join(f"{value:.1f}" for value in psnr)
    print(
        f"{name:42} {statistics.fmean(psnr):6.2f} dB  SSIM {statistics.fmean(ssim):.3f}  "
        f"{statistics.fmean(seconds):6.1f} s  [{each}]",
        flush=True,
    )


def ours(options: argparse.Namespace, **settings: object) -> TemporalInversion:
    """The attack in the setting that is measured: the quick one unless `--paper`."""
    quick = {
        "optimizer": "adam",
        "distance": "cosine",
        "layers": "equal",
        "step_size": 0.5,
        "aggregation": "trimmed-mean",
    }
    chosen = {} if options.paper else quick
    base = {"align": False, "iterations": options.iterations, "tv_weight": options.tv}
    return TemporalInversion(**(base | chosen | settings))


def table(
    options: argparse.Namespace,
    cases: Sequence[tuple[str, int, int, Attack, Callable[[list[Update], int], list[Update]]]],
) -> None:
    """One row a case: `(name, b, T, attack, what happens to the gradients)`."""
    federation = Federation(*CELLS[options.cell])
    for name, size, count, attack, change in cases:
        values = []
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            updates, mine = make_updates(federation, size, count, seed, options)
            values.append(score(federation, attack, change(updates, seed), mine, seed))
        row(name, values)


def untouched(updates: list[Update], seed: int) -> list[Update]:
    """The gradients as they were sent."""
    return updates


def changed(
    updates: list[Update], places: Sequence[int], change: Callable[[Tensor, torch.Generator], Tensor], seed: int
) -> list[Update]:
    """`updates` with each tensor of the gradients at `places` changed."""
    result = list(updates)
    for place in places:
        rng = generator(seed, place, "change")
        gradient = {name: change(tensor, rng) for name, tensor in (updates[place].gradient or {}).items()}
        result[place] = replace(updates[place], payload=Payload.from_dense(gradient, "gradient"))
    return result


def as_noise(tensor: Tensor, rng: torch.Generator) -> Tensor:
    """Noise of the same length."""
    noise = torch.randn(tensor.shape, generator=rng)
    return noise.mul(tensor.norm() / noise.norm())


def with_noise(tensor: Tensor, rng: torch.Generator) -> Tensor:
    """N(0, 1e-4), a variance, on each entry."""
    return tensor + 0.01 * torch.randn(tensor.shape, generator=rng)


def masked(tensor: Tensor, rng: torch.Generator) -> Tensor:
    """40 % of the entries are zero."""
    return tensor * (torch.rand(tensor.shape, generator=rng) >= 0.4)


def batch(options: argparse.Namespace) -> None:
    """Table III of App. B."""
    table(options, [(f"b = {b}, T = 10", b, 10, ours(options), untouched) for b in options.sizes])


def gradients(options: argparse.Namespace) -> None:
    """Sect. 4.5.1."""
    b = options.sizes[0]
    table(options, [(f"b = {b}, T = {t}", b, t, ours(options, gradients=t), untouched) for t in (1, 2, 5, 10)])


def steps(options: argparse.Namespace) -> None:
    """Table IV of App. B: as many aggregations, more steps of L-BFGS in between."""
    b = options.sizes[0]
    cases = [(f"b = {b}, R_l = {r}", b, 10, ours(options, local_iterations=r), untouched) for r in (2, 4, 8, 10, 20)]
    table(options, cases)


def baselines(options: argparse.Namespace) -> None:
    """Table III of App. B."""
    single: dict[str, Attack] = {
        "dlg": DeepLeakage(iterations=100),
        "inverting-gradients": InvertingGradients(iterations=1000, step_size=0.1, signed=True),
        "sapag": SelfAdaptiveLeakage(iterations=1000),
        "gc": SeeThroughGradients(iterations=500, restarts=4, bn_weight=0.0),
    }
    if options.cell == "alexnet-cifar10":
        single["bn"] = SeeThroughGradients(iterations=500, restarts=1, group_weight=0.0)
    for b in options.sizes:
        cases = [(f"b = {b}, {name}", b, 1, attack, untouched) for name, attack in single.items()]
        table(options, [*cases, (f"b = {b}, tgias-ro, T = 10", b, 10, ours(options), untouched)])


def invalid(options: argparse.Namespace) -> None:
    """Fig. 8 and Theorem 1."""
    b = options.sizes[0]
    for m in options.invalid:
        places = range(10 - m, 10)
        settings = {"trim": 0.3, "invalid": 3}
        table(
            options,
            [
                (f"b = {b}, {m} of 10 invalid, {name}", b, 10, ours(options, aggregation=name, **settings),
                 lambda updates, seed, places=places: changed(updates, places, as_noise, seed))  # type: ignore[misc]
                for name in ROBUST
            ],
        )  # fmt: skip


def noise(options: argparse.Namespace) -> None:
    """Fig. 6."""
    b = options.sizes[0]
    for name, change in (("N(0, 1e-4)", with_noise), ("40 % masked", masked)):

        def spoil(updates: list[Update], seed: int, change: Callable[..., Tensor] = change) -> list[Update]:
            return changed(updates, range(len(updates)), change, seed)

        table(
            options,
            [
                (f"b = {b}, {name}, T = {t}", b, t, ours(options, gradients=t), spoil) for t in (1, 10)
            ],
        )  # fmt: skip


def single(options: argparse.Namespace) -> None:
    """Table VII of App. B: robust aggregation over starts of one gradient, and over gradients."""
    federation = Federation(*CELLS[options.cell])
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for b in options.sizes:
        for name, count, starts in (("one gradient", 1, 1), ("one gradient, ten starts", 1, 10), ("T = 10", 10, 1)):
            cases = [(make_updates(federation, b, count, seed, options), seed) for seed in seeds]
            attack = ours(options, gradients=count)
            row(f"b = {b}, {name}", [score(federation, attack, u, mine, seed, starts) for (u, mine), seed in cases])


def norms(options: argparse.Namespace) -> None:
    """Table III: L2 norm of a mini-batch's gradient, all tensors together, and its entries' root mean square."""
    for dataset, network in ((Mnist, TgiasLeNet), (Cifar10, ResNet8)):
        federation = Federation(dataset, network)
        model, rng = federation.model(options.first_seed), generator("norms", options.first_seed)
        for epoch in range(1, max(options.epochs) + 1):
            mine = torch.randperm(options.examples, generator=rng)
            for index in mine.split(32):
                federation.step(model, index, options.rate)
            if epoch in options.epochs:
                lengths = [_norm(federation.gradient(model, index)) for index in mine[:640].split(32)]
                entries = sum(p.numel() for p in model.parameters())
                mean = statistics.fmean(lengths)
                told = f"norm {mean:.3g}, root mean square {mean / entries**0.5:.3g}"
                print(f"{network.__name__}, epoch {epoch}: {told}", flush=True)


def _norm(gradient: Sequence[Tensor]) -> float:
    return torch.stack([tensor.norm() for tensor in gradient]).norm().item()


def scenes(federation: Federation, model: nn.Module, index: Tensor) -> tuple[InversionProblem, Tensor]:
    """One gradient as an attack sees it, and dummy data."""
    names = [name for name, _ in model.named_parameters()]
    gradient = dict(zip(names, federation.gradient(model, index), strict=True))
    update = Update(
        round=1,
        client=0,
        before=parameters(model),
        payload=Payload.from_dense(gradient, "gradient"),
        num_examples=len(index),
    )
    dummy = torch.randn((8, *federation.inputs.shape[1:]), generator=generator("dummy"))
    return build_problem(update, federation.knowledge(None)), dummy


def labels(options: argparse.Namespace) -> None:
    """Table IV: the share of labels, as a multiset, that is right."""
    for network in (TgiasLeNet, ResNet8):
        federation = Federation(Cifar100, network)
        model, rng = federation.model(options.first_seed), generator("labels", options.first_seed)
        for steps in (0, 100):
            for _ in range(steps):
                index = torch.randint(0, len(federation.inputs), (32,), generator=rng)
                federation.step(model, index, options.rate)
            for size in options.sizes:
                right, spent = dict.fromkeys(LABEL_RULES, 0.0), dict.fromkeys(LABEL_RULES, 0.0)
                for _ in range(options.batches):
                    index = torch.randperm(len(federation.inputs), generator=rng)[:size]
                    layer, true = last_layer(*scenes(federation, model, index)), federation.labels[index]
                    for name, rule in LABEL_RULES.items():
                        started = time.process_time()
                        found = rule([layer], size, rng)
                        spent[name] += time.process_time() - started
                        counts = (torch.bincount(each, minlength=100) for each in (found, true))
                        right[name] += torch.minimum(*counts).sum().item() / size / options.batches
                told = "  ".join(
                    f"{n} {100 * right[n]:.2f} % ({spent[n] / options.batches:.3f} s)" for n in LABEL_RULES
                )
                print(f"{network.__name__}, {steps:3} steps, b = {size:2}: {told}", flush=True)


def alignment(options: argparse.Namespace) -> None:
    """Table V: the share of gradients that are in the right group, five epochs.

    A group is right for one mini-batch at most, by the best assignment. In brackets, the share of gradients whose
    group is exactly the gradients of their mini-batch.
    """
    for dataset in (Cifar10, Cifar100)[: options.data_sets]:
        federation = Federation(dataset, TgiasLeNet)
        for size in options.sizes:
            model, rng = federation.model(options.first_seed), generator("alignment", size, options.first_seed)
            whole = torch.randperm(len(federation.inputs), generator=rng)[: size * options.batches].reshape(-1, size)
            found, rows, own = [], [], []
            for _ in range(5):
                for place in torch.randperm(len(whole), generator=rng).tolist():
                    scene, dummy = scenes(federation, model, whole[place])
                    found.append(LABEL_RULES[options.rule]([last_layer(scene, dummy)], size, rng))
                    rows.append(torch.cat([tensor.flatten() for tensor in scene.mean_gradient]))
                    own.append(place)
                    federation.step(model, whole[place], options.rate)
            truth = {frozenset(i for i, place in enumerate(own) if place == which) for which in set(own)}
            told = []
            for name, groups in (("labels", align(found)), ("labels and gradients", align(found, rows))):
                exact = sum(len(group) for group in groups if frozenset(group) in truth)
                shared = torch.tensor([[len(each & set(group)) for each in truth] for group in groups]).numpy()
                right = shared[linear_sum_assignment(shared, maximize=True)].sum()
                told.append(f"{name} {100 * right / len(own):.2f} % ({100 * exact / len(own):.2f} %)")
            print(f"{dataset.__name__}, b = {size}, {len(own)} gradients: {', '.join(told)}", flush=True)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measures = {
        f.__name__: f for f in (batch, gradients, steps, baselines, invalid, noise, single, norms, labels, alignment)
    }
    sizes = {
        "batch": [1, 2, 4, 8, 16],
        "baselines": [1, 4],
        "single": [4, 8, 16],
        "labels": [8, 16, 32],
        "alignment": [16, 32, 64],
    }
    parser.add_argument("measure", choices=measures)
    parser.add_argument("--cell", choices=CELLS, default="lenet-mnist")
    parser.add_argument("--sizes", type=int, nargs="+", help="mini-batch sizes b")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="the only one of labels and alignment")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--paper", action="store_true", help="the paper's L-BFGS and median")
    parser.add_argument("--tv", type=float, default=0.0, help="weight of total variation")
    parser.add_argument("--untrained", action="store_true")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 2, 10, 40, 60, 100], help="of norms")
    parser.add_argument("--examples", type=int, default=2000, help="that the network of norms is trained on")
    parser.add_argument("--batches", type=int, default=20, help="mini-batches, of labels and alignment")
    parser.add_argument("--invalid", type=int, nargs="+", default=list(range(10)), help="how many of 10 gradients")
    parser.add_argument("--data-sets", type=int, choices=(1, 2), default=2, help="of alignment: 1 is CIFAR-10 alone")
    parser.add_argument("--rule", choices=LABEL_RULES, default="bias", help="label recovery, of alignment")
    options = parser.parse_args()
    options.sizes = options.sizes or sizes.get(options.measure, [1])
    torch.set_num_threads(1)
    measures[options.measure](options)


if __name__ == "__main__":
    main()
