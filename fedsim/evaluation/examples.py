"""What all kinds of findings share that claim examples."""

from __future__ import annotations

from torch import Tensor

from fedsim import metrics
from fedsim.errors import DataError
from fedsim.evaluation.case import Case
from fedsim.evaluation.kind import About, Bench, Judgement, Owed, Sheet, Shown, first_round, members
from fedsim.evaluation.scoring import claimed_data, score
from fedsim.evaluation.similarity import Message
from fedsim.evaluation.truth import Truth
from fedsim.findings import Reconstruction, Representatives, Texts

IMAGES = 16
"""Most images shown of a finding."""


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


def shown(finding: Reconstruction, truth: Truth | None) -> Shown:
    """Claimed images, with the true ones that they are assigned to where these are known."""
    typical, count = isinstance(finding, Representatives), len(truth.data if truth else finding.data)
    if finding.data.ndim != 4:
        return Shown(examples=count, known=truth is not None, typical=typical)
    if truth is None:
        sure = () if finding.certified is None else finding.certified[:IMAGES].tolist()
        return Shown(examples=count, sheet=Sheet(claimed=finding.data[:IMAGES], certified=sure), typical=typical)
    claimed = (finding.data if typical else metrics.paired(finding.data, truth.data))[:IMAGES]
    true = truth.data[:IMAGES]
    curves = {}
    if finding.snapshots is not None and finding.snapshot_iterations is not None:
        curves["psnr"] = finding.snapshot_iterations.double(), _closeness(finding.snapshots, truth.data)
    sheet = Sheet(
        claimed=claimed, true=true, psnr=metrics.psnr(claimed, true).tolist(), certified=_certified(finding, truth)
    )
    return Shown(examples=count, known=True, sheet=sheet, typical=typical, curves=curves)


def _certified(finding: Reconstruction, truth: Truth) -> list[bool]:
    """Of each image that is drawn, whether the attack is sure of it; empty where it never says."""
    if finding.certified is None or isinstance(finding, Representatives):
        return []
    chosen = metrics.assigned(finding.data, truth.data)[:IMAGES].tolist()
    return [place >= 0 and bool(finding.certified[place]) for place in chosen]


def _closeness(snapshots: Tensor, true: Tensor) -> Tensor:
    """`snapshot`, the mean PSNR of each in dB."""
    return snapshots.new_tensor([metrics.psnr(metrics.paired(data, true), true).mean().item() for data in snapshots])
