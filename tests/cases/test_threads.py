"""Calls from several threads of a program find what they find one after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import fedsim
from fedsim.base.randomness import seed_globals, serialize_calls, use_one_thread


def record(folder: Path, seed: int) -> dict[str, bytes]:
    experiment = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 8},
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"local_epochs": 2, "batch_size": 4, "learning_rate": 0.1},
        "federation": {"engine": "serial", "clients": 4, "rounds": 2, "seed": seed},
    }
    fedsim.run(experiment, out=folder)
    return {path.name: path.read_bytes() for path in sorted((folder / "transcript").glob("*.safetensors"))}


def test_runs_in_threads_record_the_bytes_that_runs_alone_record(tmp_path: Path) -> None:
    alone = [record(tmp_path / f"alone{seed}", seed) for seed in (5, 6)]
    assert all(len(files) >= 2 for files in alone)
    generator, threads = torch.default_generator.get_state(), torch.get_num_threads()
    with ThreadPoolExecutor(4) as pool:
        seeds = [5, 6, 5, 6]
        recorded = list(pool.map(lambda at: record(tmp_path / f"thread{at}", seeds[at]), range(4)))
    assert recorded == [*alone, *alone]
    assert torch.equal(torch.default_generator.get_state(), generator)
    assert torch.get_num_threads() == threads


def test_a_call_may_wait_for_a_thread_of_its_own_that_draws() -> None:
    @serialize_calls
    def call() -> float:  # as `fedsim.run` on Ray, where Flower runs the ServerApp in a thread
        with use_one_thread(), ThreadPoolExecutor(1) as pool:
            return pool.submit(draw).result(timeout=60)

    def draw() -> float:
        with seed_globals(3), use_one_thread():
            return float(torch.rand(()))

    with seed_globals(3):
        wanted = float(torch.rand(()))
    assert call() == wanted
