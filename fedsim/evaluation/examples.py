"""What all kinds of findings share that claim examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedsim import metrics, table_metrics
from fedsim.errors import DataError
from fedsim.evaluation.case import Case
from fedsim.evaluation.kind import About, Bench, Judgement, Owed, Rows, Sheet, Shown, first_round, members
from fedsim.evaluation.scoring import claimed_data, score
from fedsim.evaluation.similarity import Message
from fedsim.evaluation.truth import Truth
from fedsim.findings import Reconstruction, Representatives, Texts
from fedsim.randomness import one_thread

IMAGES = 16
"""Most images of a finding on a page and on its sheet, the first ones."""


def check_kinds(finding: Reconstruction | Texts, owed: Owed) -> None:
    """Raise AttackError unless claimed examples and labels are of the federation's kind and shape."""
    if (task := owed.task) is not None:
        kinds = {True: "texts", False: "numbers"}
        owed.expect("data that are", kinds[isinstance(finding, Texts)], kinds[task.kind == "text"])
        kinds = {True: "targets of a regression", False: "classes"}
        owed.expect("labels that are", kinds[finding.labels.is_floating_point()], kinds[not task.num_classes])
        owed.expect_below("labels", finding.labels, task.num_classes)
        if isinstance(finding, Texts):
            owed.expect_below("tokens", finding.tokens, task.vocabulary)
    example = task.input_shape if task else owed.knowledge.input_shape
    if example is not None:
        owed.expect("examples of shape", tuple(claimed_data(finding).shape[1:]), tuple(example))


def truth_of(finding: Reconstruction | Texts, about: About, case: Case) -> Truth | None:
    """What those held whose examples are claimed, or None where nobody says.

    Raises:
        DataError: examples of the whole federation are claimed, and nobody says what that is.
    """
    if finding.claims == "federation":
        return case.truth_of_all()
    number = None if finding.claims == "client" else first_round(about)
    return case.truth(int(about["victim"]), number, members(about))


@one_thread()  # small images are scored many times faster, and a score does not depend on the number of cores
def judged(finding: Reconstruction | Texts, about: About, bench: Bench, message: Message | None) -> Judgement:
    """See `fedsim.evaluation.scoring.score`."""
    truth = truth_of(finding, about, bench.case)
    if truth is None:
        return Judgement()
    if finding.labels.is_floating_point() != truth.labels.is_floating_point():
        raise DataError("truth: the victim's labels are of another kind than the attack claims, classes or targets")
    scores = score(
        finding,
        truth,
        public=bench.public,
        rng=bench.rng(int(about["victim"])),
        weights=bench.weights,
        labels_granted="labels" in about["granted"],
        message=message,
    )
    return Judgement(scores=scores, examples=len(truth.labels))


@one_thread()
def shown(finding: Reconstruction, truth: Truth | None) -> Shown:
    """Claimed images or rows, with the true ones that they are assigned to where these are known."""
    typical, known = isinstance(finding, Representatives), truth is not None
    right, places = None, None
    if truth is not None and not typical:
        right, places = _assigned(finding.data, truth)
    claimed, true = _at(finding.data, places), truth.data if truth else None
    about: dict[str, Any] = {"examples": len(claimed), "known": known, "typical": typical}
    if claimed.ndim == 2:
        unsure = finding.entropy if finding.entropy is None or places is None else finding.entropy[places.clamp_min(0)]
        return Shown(rows=Rows(claimed=claimed, true=true, entropy=unsure, right=right), **about)
    if claimed.ndim != 4:
        return Shown(**about)
    steps, iterations = _steps(finding, places)
    sheet = Sheet(
        claimed=claimed,
        true=true,
        psnr=metrics.psnr(claimed, true).tolist() if true is not None else (),
        certified=_certified(finding, places),
        steps=steps,
        iterations=iterations,
    )
    curves = {}
    if true is not None and finding.snapshots is not None and finding.snapshot_iterations is not None:
        curves["psnr"] = finding.snapshot_iterations.double(), _closeness(finding.snapshots, true)
    return Shown(sheet=sheet, curves=curves, **about)


def _assigned(data: Tensor, truth: Truth) -> tuple[Tensor | None, Tensor]:
    """Which values of a table are right, `true column`, and which claim each true example is scored with."""
    if not truth.columns or truth.deviations is None:
        return None, metrics.assigned(data, truth.data)
    found = table_metrics.right(data, truth.data, truth.columns, truth.deviations)
    places = table_metrics.assigned(found.sum(2))
    return found[torch.arange(len(places)), places.clamp_min(0)] & (places >= 0)[:, None], places


def _at(data: Tensor, places: Tensor | None) -> Tensor:
    """`example ...` in the order of the true ones; mid-grey where none is assigned."""
    if places is None:
        return data
    return torch.where((places >= 0).reshape(-1, *[1] * (data.ndim - 1)), data[places.clamp_min(0)], 0.5)


def _steps(finding: Reconstruction, places: Tensor | None) -> tuple[Tensor | None, Sequence[int]]:
    """What the attack had during its descent of each image that is shown, and after which iterations."""
    taken, at = finding.snapshots, finding.snapshot_iterations
    if taken is None or at is None:
        return None, ()
    return torch.stack([_at(data, places) for data in taken]), at.tolist()


def _certified(finding: Reconstruction, places: Tensor | None) -> Sequence[bool]:
    """Of each image that is shown, whether the attack is sure of it; empty where it never says."""
    if finding.certified is None or isinstance(finding, Representatives):
        return ()
    if places is None:
        sure: list[bool] = finding.certified.tolist()
        return sure
    return [place >= 0 and bool(finding.certified[place]) for place in places.tolist()]


def _closeness(snapshots: Tensor, true: Tensor) -> Tensor:
    """`snapshot`, the mean PSNR of each in dB."""
    return snapshots.new_tensor([metrics.psnr(metrics.paired(data, true), true).mean().item() for data in snapshots])
