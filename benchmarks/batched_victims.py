"""What an iteration of SME and IG costs for many victims in one call: time on a GPU, or counts without one.

    python benchmarks/batched_victims.py --device cuda [--victims 1 10 100] [--precision float32 tf32 bfloat16]
    python benchmarks/batched_victims.py --device cuda --victims 1 [--compile]
    python benchmarks/batched_victims.py --device meta [--victims 8 100]
    python benchmarks/batched_victims.py --device cpu --victims 100

SME's CNN for CIFAR-100, N = 50, labels known; a victim's w_T is w_0 and noise of its own, as the work does not depend
on the data. Times are of the whole attack: those of the first five iterations, in which an attack is set up, are
taken from those of `--iterations` more.

PyTorch's device `meta` has shapes and no memory, so counts need no GPU: of the forward and both backward passes of one
iteration, with convolutions in groups and as products. Kernels are operations that compute; a convolution in groups
counts once for each group, as cuDNN runs them. Bytes are those of what operations read and write.

On a CPU, which attacks victims one by one, only the set-up of a call is measured, in processor time, with N = 2 so that
reading, copies and checks count and not the passes, which an accelerator computes; and the kernels of it that one more
victim starts.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from measuring import Row, make_parser, publish_rows
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from victims import NoiseVictims

from fedsim.inversion import matching
from fedsim.inversion.input_scaling import InputScaling
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.restart import objective_terms
from fedsim.plugins import registry
from fedsim.recording.transcript import Transcript
from fedsim.training import convolution_products
from fedsim.training.convolution_products import ConvolutionsAsProducts

VICTIMS = NoiseVictims()
ATTACKS = ("sme", "inverting-gradients")
SET_UP = 5
"""Iterations of the shorter of the two attacks whose times are compared."""


# Times on a device.


def time_attack(attack: GradientInversion, transcript: Transcript, victims: int, device: str) -> float:
    """Return the seconds of an attack on all victims, whose findings are on the CPU at its end."""
    start = time.perf_counter()
    for _, outcome in attack.run_several(VICTIMS.draw_targets(transcript, victims, device)):
        if isinstance(outcome, BaseException):
            raise outcome
    return time.perf_counter() - start


def measure_times(options: argparse.Namespace) -> list[Row]:
    """Time all attacks for all numbers of victims and precisions."""
    name_of_device = torch.cuda.get_device_name(options.device) if "cuda" in options.device else options.device
    rows = []
    with TemporaryDirectory() as room:
        transcript = VICTIMS.record_updates(max(options.victims), Path(room) / "transcript")
        for precision, name, victims in product(options.precision, options.only, options.victims):
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
            settings: dict[str, Any] = {"precision": "bfloat16" if precision == "bfloat16" else "float32"}
            settings["compile"] = options.compile
            few, many = (
                registry.build("attacks", name, {**settings, "iterations": iterations}, name)
                for iterations in (SET_UP, SET_UP + options.iterations)
            )
            for attack in (few, many) if options.compile else (few,):
                time_attack(attack, transcript, victims, options.device)  # what runs first compiles and allocates
            first = time_attack(few, transcript, victims, options.device)
            each = (time_attack(many, transcript, victims, options.device) - first) / options.iterations
            about = {"device": name_of_device, "precision": precision, "attack": name, "victims": victims}
            set_up = first - SET_UP * each
            rows.append({**about, "ms": 1e3 * each, "ms a victim": 1e3 * each / victims, "set-up s": set_up})
    return rows


# Set-up without a device.


def measure_set_up(options: argparse.Namespace) -> list[Row]:
    """Measure what comes before the first iteration of all victims; what is first of its kind is not counted."""
    victims, rows = NoiseVictims(count=2), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory())) / "transcript"
        for owner, name in ((matching, "batching_is_faster"), (convolution_products, "products_are_faster")):
            stack.enter_context(patch.object(owner, name, lambda device: True))
        stack.enter_context(patch.object(matching, "run_round_robin", lambda turns: iter(())))
        victims.record_updates(max(3, *options.victims), folder)

        def set_up(attack: GradientInversion, count: int) -> float:
            start = time.process_time()
            assert not list(attack.run_several(victims.draw_targets(Transcript(folder), count)))
            return time.process_time() - start

        for name, count in product(options.only, options.victims):
            attack = registry.build("attacks", name, {"iterations": 1}, name)
            set_up(attack, 2)
            seconds, counts = set_up(attack, count), []
            for few in (2, 3):
                with OperationCount() as operations:
                    set_up(attack, few)
                counts.append(operations.kernels)
            figures = {"set-up CPU s": seconds, "kernels of a further victim": counts[1] - counts[0]}
            rows.append({"attack": name, "victims": count, **figures})
    return rows


# Counts without a device.


class OperationCount(TorchDispatchMode):
    """Count of kernels, bytes and floating-point operations of what runs in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes, self.operations = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count an operation, unless it returns a view or bare memory."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        aliases = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and "empty" not in name and name not in ("_unsafe_view", "detach"):
            self.kernels += count_groups(name, args)
            self.operations += count_operations(name, args, result)
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.bytes += sum(map(count_bytes, tensors))
        return result


def count_groups(name: str, args: Any) -> int:
    """Return how many kernels cuDNN runs: one for each group of a convolution, and of both of its gradients."""
    if name == "convolution":
        return int(args[8])
    if name == "convolution_backward":
        return int(args[9] * sum(args[10][:2]))
    return 1


def count_operations(name: str, args: Any, result: Tensor) -> int:
    """Return the floating-point operations of products and convolutions."""
    if name == "convolution":
        return 2 * result.numel() * math.prod(args[1].shape[1:])
    if name == "convolution_backward":
        return 2 * args[0].numel() * math.prod(args[2].shape[1:]) * sum(args[10][:2])
    if name in ("mm", "bmm"):
        return 2 * result.numel() * args[0].shape[-1]
    return 0


def count_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, without those that are repeated along an axis."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return tensor.element_size() * math.prod(sizes)


def make_problem() -> InversionProblem:
    """Return the problem of one victim without values."""
    model, scale = VICTIMS.build_model().to("meta"), torch.empty(3, 1, 1, device="meta")
    weights = [parameter.detach() for parameter in model.parameters()]
    return InversionProblem(
        model=model,
        loss=cross_entropy,
        parameter_names=tuple(name for name, _ in model.named_parameters()),
        before=weights,
        after=weights,
        buffers={},
        returned_buffers={},
        labels=torch.empty(VICTIMS.count, dtype=torch.int64, device="meta"),
        scaling=InputScaling(centre=scale, scale=scale, low=scale, high=scale),
        num_examples=VICTIMS.count,
        smooth_dimensions=(2, 3),
        uses_func_transforms=True,
    )


def count_iteration(attack: GradientInversion, victims: int, *, as_products: bool) -> OperationCount:
    """Count the passes of an iteration for all victims, whose w_T, labels and updates differ."""
    problem = make_problem()
    recipe = attack._recipe(problem)

    def stack_of(tensor: Tensor) -> Tensor:
        return torch.empty((victims, *tensor.shape), dtype=tensor.dtype, device="meta")

    def compute_objective(values: dict[str, Tensor], after: list[Tensor], target: list[Tensor], labels: Tensor) -> Any:
        own = replace(problem, after=after, labels=labels)
        inputs = torch.empty((), device="meta"), values["dummy"].detach()
        return objective_terms(recipe, own, values, inputs, target)

    values = {"dummy": stack_of(torch.empty((VICTIMS.count, *VICTIMS.shape))).requires_grad_()}
    for name, variable in recipe.update_model.variables(problem).items():
        values[name] = stack_of(variable.start).requires_grad_()
    weights = [stack_of(tensor) for tensor in problem.before]
    with OperationCount() as count, ConvolutionsAsProducts() if as_products else nullcontext():
        objective, _, _ = vmap(compute_objective)(values, weights, weights, stack_of(problem.labels))
        torch.autograd.grad(objective.sum(), list(values.values()))
    return count


def measure_counts(options: argparse.Namespace) -> list[Row]:
    """Count all attacks for all numbers of victims, both ways."""
    rows = []
    for name, victims, as_products in product(options.only, options.victims, (False, True)):
        attack = registry.build("attacks", name, {}, name)
        count = count_iteration(attack, victims, as_products=as_products)
        way = "products" if as_products else "in groups"
        figures = {"kernels": count.kernels, "GB": count.bytes / 1e9, "TFLOP": count.operations / 1e12}
        rows.append({"attack": name, "victims": victims, "convolutions": way, **figures})
    return rows


def main() -> None:
    """Measure times or counts."""
    parser = make_parser(__doc__, choices=ATTACKS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "meta")
    parser.add_argument("--victims", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--compile", action="store_true", help="time compiled attacks, on one victim after the other")
    parser.add_argument("--precision", nargs="+", choices=("float32", "tf32", "bfloat16"), default=["float32"])
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    measure = {"meta": measure_counts, "cpu": measure_set_up}.get(options.device, measure_times)
    publish_rows(measure(options), options.out)


if __name__ == "__main__":
    main()
