"""Random numbers, each drawn under a key that says what it is for.

Every draw belongs to a key such as `(seed, "train", round, client)`. The order in which clients
reply, the number of workers and what ran before cannot change it.
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
_call = threading.RLock()
"""Held by the thread of a user's program whose call is under way."""
_generators = threading.RLock()
"""Held by the thread that draws from the global generators. It is another lock than `_call`, as a call may wait for
threads that draw: Flower runs its ServerApp in one."""


def seed_for(*key: Key) -> int:
    """A 63-bit seed that depends on nothing but `key`."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1


@cache
def adversary_key(seed: int) -> str:
    """Return what the keys of an adversary begin with in place of the run's seed.

    Who is handed a seed under such a key can try seeds of runs until one gives it, and from that follows who holds
    what. Each try takes scrypt 0.1 s and 32 MiB, in place of a microsecond.

    Args:
        seed: of the run, from which partition and batches follow.
    """
    cost = 1 << 15
    return hashlib.scrypt(str(seed).encode(), salt=b"fedsim adversary", n=cost, r=8, p=1, maxmem=cost << 11).hex()


def generator(*key: Key) -> torch.Generator:
    """A CPU torch generator for `key`."""
    return torch.Generator().manual_seed(seed_for(*key))


def numpy_generator(*key: Key) -> np.random.Generator:
    """A NumPy generator for `key`."""
    return np.random.default_rng(seed_for(*key))


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Let calls from several threads of a program wait for one another, as each needs the process's shared states.

    For functions that a user calls: they ask before anything else is locked, so that nobody waits for two locks in
    another order. Threads that such a call starts must not call another.
    """

    @wraps(function)
    def wait(*args: P.args, **kwargs: P.kwargs) -> R:
        with _call:
            return function(*args, **kwargs)

    return wait


@contextlib.contextmanager
def seeded(*key: Key) -> Iterator[None]:
    """Run code that draws from the global generators (Flower's sampling, dropout) under `key`.

    The global states of `random`, NumPy and torch (CPU) are restored on leaving; a GPU that is in
    use is seeded as well. Other threads wait until they may enter a block of their own.
    """
    with seeded_by(seed_for(*key)):
        yield


@contextlib.contextmanager
def seeded_by(seed: int) -> Iterator[None]:
    """As `seeded`, for those who were given the seed of a key and not the key."""
    with _generators:
        python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
        torch_state = torch.default_generator.get_state()
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.manual_seed_all(seed)
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            torch.default_generator.set_state(torch_state)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: their number changes float sums, and so bytes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
