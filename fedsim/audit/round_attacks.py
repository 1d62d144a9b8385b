"""Attack a round as soon as it is recorded, in another process while the rounds go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedsim.audit.audit import open_audit
from fedsim.base.errors import FedsimError
from fedsim.interfaces.attack import Progress

log = logging.getLogger(__name__)


def attack_round(path: Path, number: int) -> None:
    """Attack one round of a run that is not finished; called in a separate process, by the run that trusts its code.

    An attack that fails here is made again at the end of the run, and reported if it fails again.
    """
    audit = open_audit(path, None, trust=True)
    # [recording] may have selected no round yet.
    if any(audit.folder.transcript.glob("*.safetensors")):
        try:
            audit.run(rounds=[number])
        except FedsimError as error:
            log.warning("round %d was not attacked in the round loop: %s", number, error)


@contextmanager
def round_attacker(path: Path) -> Iterator[Callable[[int, Progress], None]]:
    """Give the function with which another process attacks each round while the rounds go on."""
    yield lambda number, progress: attack_round(path, number)
