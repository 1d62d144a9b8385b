"""Random generators, each seeded by a key that names its purpose.

Every draw belongs to a key such as `(seed, "train", round, client)`. It depends neither on the
order in which clients reply, nor on the number of workers, nor on earlier draws.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import numpy as np
import torch

P = ParamSpec("P")
R = TypeVar("R")
Key = int | str
_call_lock = threading.RLock()
"""Held by the thread that runs one of fedsim's public functions."""
_generators_lock = threading.RLock()
"""Held by the thread that draws from the global generators. It is not `_call_lock`, because a call
may wait for threads that draw: Flower runs its ServerApp in one."""
_seeded_blocks = threading.local()
"""`depth`: how many blocks of `seed_globals` the current thread is in."""


def derive_seed(*key: Key) -> int:
    """Return a 63-bit seed that depends on nothing but `key`."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1


@cache
def adversary_key(seed: int) -> str:
    """Return the first part of an adversary's keys, which replaces the seed of the run.

    An attack that knows a seed derived from the run's seed could try run seeds until one matches,
    and the partition and the batches follow from that. scrypt makes each try take 0.1 s and 32 MiB
    instead of a microsecond.

    Args:
        seed: of the run, from which partition and batches follow.
    """
    cost = 1 << 15
    return hashlib.scrypt(str(seed).encode(), salt=b"fedsim adversary", n=cost, r=8, p=1, maxmem=cost << 11).hex()


def generator(*key: Key) -> torch.Generator:
    """Return a torch generator (CPU) seeded by `key`.

    >>> first, second = generator(1, "train"), generator(1, "train")
    >>> torch.equal(torch.rand(3, generator=first), torch.rand(3, generator=second))
    True
    """
    return torch.Generator().manual_seed(derive_seed(*key))


def numpy_generator(*key: Key) -> np.random.Generator:
    """Return a NumPy generator seeded by `key`."""
    return np.random.default_rng(derive_seed(*key))


def serialize_calls(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that calls from several threads run one after the other.

    Each call needs states that the process shares. Only functions that users call are decorated:
    they take this lock before any other, so that no two threads wait for each other. Threads that
    such a call starts must not call a decorated function.
    """

    @wraps(function)
    def call_with_lock(*args: P.args, **kwargs: P.kwargs) -> R:
        with _call_lock:
            return function(*args, **kwargs)

    return call_with_lock


@contextlib.contextmanager
def seed_globals(*key: Key) -> Iterator[None]:
    """Seed the global generators by `key` for the block, for code that draws from them.

    Such code is Flower's sampling, or dropout. The states of `random`, NumPy and torch (CPU) are
    restored afterwards; a GPU that is in use is seeded as well. Other threads wait before they
    enter such a block.
    """
    with seed_globals_with(derive_seed(*key)):
        yield


@contextlib.contextmanager
def seed_globals_with(seed: int) -> Iterator[None]:
    """Seed the global generators by a seed for the block, as `seed_globals` does by a key."""
    with _generators_lock:
        python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
        torch_state = torch.default_generator.get_state()
        _seeded_blocks.depth = _seeded_depth() + 1
        try:
            reseed_globals(seed)
            yield
        finally:
            _seeded_blocks.depth -= 1
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            torch.default_generator.set_state(torch_state)


def reseed_globals(seed: int) -> None:
    """Seed the global generators within a block of `seed_globals`, which restores them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def _seeded_depth() -> int:
    return getattr(_seeded_blocks, "depth", 0)


@contextlib.contextmanager
def lend_generators() -> Iterator[None]:
    """Let other threads enter blocks of `seed_globals`, for which this one, which is in one, may wait.

    Each block of another thread restores the states of the generators, so that this one draws on as before where
    it draws nothing meanwhile.
    """
    depth = _seeded_depth()
    for _ in range(depth):
        _generators_lock.release()
    try:
        yield
    finally:
        for _ in range(depth):
            _generators_lock.acquire()


@contextlib.contextmanager
def use_one_thread() -> Iterator[None]:
    """Compute on one thread in the block, because the number of threads changes float sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
