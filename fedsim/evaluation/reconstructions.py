"""Images and rows of tables that the attack claims the victim trained on."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedsim import metrics
from fedsim.errors import FedsimError
from fedsim.evaluation.case import Case
from fedsim.evaluation.examples import check_kinds, judged, shown, truth_of
from fedsim.evaluation.kind import About, Bench, Evaluator, Judgement, Owed, Shown, first_round
from fedsim.evaluation.score import Public
from fedsim.evaluation.scoring import guesses_of
from fedsim.evaluation.similarity import Message
from fedsim.evaluation.truth import Truth
from fedsim.findings import Reconstruction

log = logging.getLogger(__name__)

_UNRELATED, _RELATED = 0.95, 0.5
"""One minus the cosine from which on examples do not explain a message at all, and up to which they do."""


@dataclass(frozen=True)
class Reconstructions(Evaluator[Reconstruction]):
    """Examples of numbers."""

    finding = Reconstruction

    def form(self, finding: Reconstruction, owed: Owed) -> None:
        """Of the federation's shape and kind."""
        check_kinds(finding, owed)

    def truth(self, finding: Reconstruction, about: About, case: Case) -> Truth | None:
        """What those held whose examples are claimed."""
        return truth_of(finding, about, case)

    def judge(self, finding: Reconstruction, about: About, bench: Bench) -> Judgement:
        """See `fedsim.evaluation.scoring.score`; what somebody says that a client held has to explain its message."""
        message = _message(finding, about, bench)
        if (
            message is not None
            and bench.case.experiment is None
            and (wrong := _why_not_its_truth(message, about, bench))
        ):
            log.error("%s, client %s: not scored: %s", about["attack"], about["victim"], wrong)
            return Judgement()
        return judged(finding, about, bench, message)

    def show(self, finding: Reconstruction, truth: Truth | None, tokens: Sequence[str], metric: str) -> Shown:
        """Images or rows, beside the true ones where these are known."""
        return shown(finding, truth)

    def guess(
        self, finding: Reconstruction, truth: Truth, name: str, public: Public | None, rng: torch.Generator
    ) -> Tensor | None:
        """The images of a guess, assigned to the true ones as claims are."""
        made = guesses_of(finding, max(len(finding.data), len(truth.data)), public, rng).get(name)
        return None if made is None or made.ndim != 4 else metrics.paired(made, truth.data)


def _why_not_its_truth(message: Message, about: About, bench: Bench) -> str:
    """Say why what a victim is said to have held cannot be what its message came of; nothing if it can."""
    victim = str(about["victim"])
    if victim not in bench.case.files:
        return ""
    apart = {client: _unexplained(message, file) for client, file in bench.case.files.items()}
    own = apart[victim]
    if math.isnan(own) or own < _RELATED:
        return ""
    nearest = min(apart, key=lambda client: apart[client])
    told = f"what truth.{victim} says that it held does not explain its message (1 - cosine {own:.3f})"
    if apart[nearest] < _RELATED:
        return f"{told}, and what client {nearest} is said to have held does ({apart[nearest]:.3f}); mend [truth]"
    if own < _UNRELATED or bench.knowledge.defenses:
        return ""  # many local steps turn an update away from any gradient, and noise may leave nothing of it
    return (
        f"{told}, nor does anybody else's; mend [truth], or what [app] and [adversary.knowledge] say of the model, the "
        "loss and the messages"
    )


def _unexplained(message: Message, file: Path) -> float:
    """Return one minus the cosine between the message and the gradient of a truth, the least along the line."""
    try:
        truth = Truth.load(file)
        return min(message.similarities(truth.data, truth.labels).values())
    except (FedsimError, RuntimeError, ValueError, IndexError):  # of another shape, say
        return math.nan


def _message(finding: Reconstruction, about: About, bench: Bench) -> Message | None:
    """What the finding was read from, as far as L_sim takes it; None where it is several messages.

    None too where nobody says what the model is, or the recording is not there.
    """
    known, several = bench.knowledge, "-" in str(about["round"])
    if finding.claims != "update" or several or known.model is None or known.value_range is None:
        return None
    assert known.loss is not None
    victim = int(about["victim"])
    low, high = (torch.tensor(end) for end in known.value_range)
    try:
        update = bench.transcript.update(first_round(about), victim)
    except FedsimError as error:
        log.warning("%s, client %d: no L_sim: %s", about["attack"], victim, error)
        return None
    settings = bench.case.experiment.training if bench.case.experiment else None
    return Message(model=known.model(), loss=known.loss, update=update, value_range=(low, high), settings=settings)
