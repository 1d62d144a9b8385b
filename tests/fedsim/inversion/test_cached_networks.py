"""Networks that are trained once for all processes that want them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from fedsim.inversion.cached_networks import load_or_train


def get(path: Path, trained: list[float], *, may_keep: bool = True) -> float:
    """Return the weight of a network, which is the number of trainings before its own."""
    network = nn.Linear(1, 1, bias=False)

    def train() -> bool:
        time.sleep(0.1)
        network.weight.data.fill_(len(trained))
        trained.append(network.weight.item())
        return may_keep

    load_or_train(network, path, train)
    return network.weight.item()


def test_of_several_that_want_a_network_one_trains_it(tmp_path: Path) -> None:
    """Each thread opens the lock by itself, as another process would."""
    trained: list[float] = []
    path = tmp_path / "networks" / "a.safetensors"
    with ThreadPoolExecutor(4) as pool:
        weights = list(pool.map(lambda _: get(path, trained), range(4)))
    assert trained == [0.0]
    assert weights == [0.0] * 4


def test_what_nobody_else_may_have_and_what_is_damaged_is_trained_again(tmp_path: Path) -> None:
    trained: list[float] = []
    path = tmp_path / "a.safetensors"
    assert [get(path, trained, may_keep=False) for _ in range(2)] == [0.0, 1.0]
    assert [get(path, trained) for _ in range(2)] == [2.0, 2.0]
    path.write_bytes(path.read_bytes()[:-1])
    assert get(path, trained) == 3.0


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert torch.tensor([get(tmp_path / "file" / "a.safetensors", [])]).isfinite().all()
