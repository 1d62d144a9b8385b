"""The optimizers give the bits of those in `torch.optim`, and do without torch's compiler."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsim.interfaces.knowledge import Knowledge
from fedsim.training.optimizers import SGD, Adam, Optimizer, sgd_direction
from fedsim.training.settings import LocalTraining, known_steps

ROOT = Path(__file__).parents[3]
Kind = Callable[[Any], Any]
PAIRS: dict[str, tuple[Kind, Kind]] = {
    "sgd": (lambda p: SGD(p, 0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum and decay": (
        lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    "momentum": (
        lambda p: SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
    "decay": (
        lambda p: SGD(p, 0.1, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    ),
    "fused sgd": (
        lambda p: SGD(p, 0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    ),
    "adam": (lambda p: Adam(p, 0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
    "fused adam": (lambda p: Adam(p, 0.1, fused=True), lambda p: torch.optim.Adam(p, lr=0.1, fused=True)),
    "adam and decay": (
        lambda p: Adam(p, 0.1, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.01),
    ),
    "adamw": (
        lambda p: Adam(p, 0.1, weight_decay=0.01, decoupled=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.01),
    ),
}


def tensors() -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng).requires_grad_() for shape in ((3, 4), (5,), ())]


def take_steps(optimizer: Any, own: list[Tensor], steps: int = 5) -> list[Tensor]:
    """Where `own` are after steps along slopes of a function; the second tensor has none in every other step."""
    for step in range(steps):
        optimizer.zero_grad()
        used = [own[0], own[2]] if step % 2 else own
        objective = torch.stack([tensor.sin().square().sum() for tensor in used]).sum()
        objective.backward()
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()
    return own


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("groups", [False, True])
def test_the_bits_are_those_of_torch(name: str, groups: bool) -> None:
    ends = []
    for kind in PAIRS[name]:
        own = tensors()
        given: Any = [{"params": own[:2]}, {"params": own[2:], "lr": 0.3}] if groups else own
        ends.append(take_steps(kind(given), own))
    for ours, theirs in zip(*ends, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()


def test_plain_steps_of_tensors_of_any_type_have_the_bits_of_torch() -> None:
    ends = []
    for kind in PAIRS["sgd"]:
        rng = torch.Generator().manual_seed(0)
        types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        own = [torch.randn(70, 3, generator=rng).to(dtype).t() for dtype in types]
        own += [torch.randn(5, 3, generator=rng), torch.empty(0)]
        for tensor in own:
            tensor.grad = torch.randn(tensor.shape, generator=rng).to(tensor.dtype)
        own[4].grad = torch.randn(5, 3, generator=rng).to_sparse(1)
        kind(own).step()
        ends.append(own)
    assert all(map(torch.equal, *ends))


def test_an_optimizer_goes_on_from_its_memory() -> None:
    for kind in (lambda p: SGD(p, 0.1, momentum=0.9), lambda p: Adam(p, 0.1)):
        whole = tensors()
        take_steps(kind(whole), whole, 4)
        first: Optimizer = kind(own := tensors())
        take_steps(first, own, 2)
        second: Optimizer = kind(own)
        second.memory = [{key: tensor.clone() for key, tensor in memory.items()} for memory in first.memory]
        second.param_groups[0]["lr"] = first.param_groups[0]["lr"]
        assert all(map(torch.equal, take_steps(second, own, 2), whole))


@pytest.mark.thorough
def test_no_optimizer_imports_the_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from fedsim.training.optimizers import SGD, Adam\n"
        "for kind in (SGD, Adam):\n"
        "    tensor = torch.ones(2, requires_grad=True)\n"
        "    tensor.sum().backward()\n"
        "    kind([tensor], 0.1).step()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_trains_takes_our_optimizers() -> None:
    """Those of torch import its compiler, which takes seconds in each process that attacks."""
    may_take_them = {"fedsim/skeletons/attack.py", "fedsim/inversion/denoisers.py"}  # text; trains for minutes
    for folder in ("fedsim", "adversaries", "clients", "strategies"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            made = re.findall(r"torch\.optim\.[A-Z]\w*\(", path.read_text(encoding="utf-8"))
            assert name in may_take_them or "training/optimizers" in name or not made, f"{name}: {made}"


@dataclass(frozen=True)
class KnownSettings:
    """What an attack knows of a client's steps, which is no `LocalTraining`."""

    momentum: float = 0.9
    weight_decay: float = 0.01
    proximal_mu: float = 0.1


def test_the_rule_that_can_be_differentiated_takes_the_steps_of_sgd_with_a_proximal_term() -> None:
    settings = KnownSettings()
    start = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    trained = start.clone().requires_grad_()
    optimizer = SGD([trained], 0.1, momentum=settings.momentum, weight_decay=settings.weight_decay)
    weight, momentum = start, dict[int, Tensor]()
    for _ in range(5):
        optimizer.zero_grad()
        penalty = settings.proximal_mu / 2 * (trained - start).square().sum()
        (trained.sin().square().sum() + penalty).backward()
        optimizer.step()
        gradient = 2 * weight.sin() * weight.cos()
        weight = weight - 0.1 * sgd_direction(gradient, weight, start, settings, momentum, 0)
    torch.testing.assert_close(weight, trained.detach(), rtol=1e-12, atol=1e-12)


def test_what_is_known_of_a_clients_settings_counts_its_steps_as_the_settings_do() -> None:
    for settings in (LocalTraining(local_epochs=3, batch_size=4), LocalTraining(local_steps=7, batch_size=4)):
        known = Knowledge(
            local_epochs=settings.local_epochs, local_steps=settings.local_steps, batch_size=settings.batch_size
        )
        assert known_steps(known, 10) == settings.steps(10) == known_steps(settings, 10)
    assert known_steps(Knowledge(local_epochs=3), 10) is None
