"""Whether a finding has the form that its attack owes, which takes no truth to say."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsim.attack import Knowledge
from fedsim.errors import AttackError
from fedsim.findings import Finding, Inference, LocalModel, Reconstruction, Texts
from fedsim.task import Task
from fedsim.wire.messages import State


@dataclass(frozen=True, kw_only=True)
class Owed:
    """What a finding about one victim has to look like. None is not known, so anything will do.

    Attributes:
        where: round and client, for messages.
        knowledge: what the attack was handed.
        before: the state that the server sent, which a local model is measured by.
        task: of the federation behind the recording.
        clients: of the federation.
    """

    where: str
    knowledge: Knowledge
    before: State | None = None
    task: Task | None = None
    clients: int | None = None

    def check(self, finding: Finding) -> None:
        """Raise AttackError unless `finding` has the form that it can be judged in."""
        if isinstance(finding, LocalModel):
            self._check_state(finding.state)
        elif isinstance(finding, Inference):
            self._check_inference(finding)
        else:
            self._check_kinds(finding)
            self._check_data(finding)

    def _check_data(self, finding: Reconstruction | Texts) -> None:
        data = finding.tokens if isinstance(finding, Texts) else finding.data
        example = self.task.input_shape if self.task else self.knowledge.input_shape
        if example is not None:
            self._expect("examples of shape", tuple(data.shape[1:]), tuple(example))

    def _check_kinds(self, finding: Reconstruction | Texts) -> None:
        if self.task is None:
            return
        kinds = {True: "texts", False: "numbers"}
        self._expect("data that are", kinds[isinstance(finding, Texts)], kinds[self.task.kind == "text"])
        kinds = {True: "targets of a regression", False: "classes"}
        self._expect("labels that are", kinds[finding.labels.is_floating_point()], kinds[not self.task.num_classes])
        self._expect_below("labels", finding.labels, self.task.num_classes)
        if isinstance(finding, Texts):
            self._expect_below("tokens", finding.tokens, self.task.vocabulary)

    def _check_state(self, state: State) -> None:
        if self.before is None:
            return
        for name in (*self.before, *state):
            got, expected = (_form(of.get(name)) for of in (state, self.before))
            self._expect(f"a model whose {name} is", got, expected)

    def _check_inference(self, finding: Inference) -> None:
        partial = self.knowledge.partial_records
        records = self.knowledge.records if finding.of == "source" else partial
        if records is not None:
            self._expect("scores of records numbering", len(finding.scores), len(records.inputs))
        known = self.clients if finding.of == "source" else len(partial.categories) if partial else None
        if known is not None and not ((finding.candidates >= 0) & (finding.candidates < known)).all():
            self._expect("candidates", finding.candidates.tolist(), f"numbers from 0 to {known - 1}")

    def _expect_below(self, what: str, numbers: Tensor, end: int) -> None:
        if not numbers.is_floating_point() and int(numbers.max()) >= end:
            self._expect(f"{what} up to", int(numbers.max()), f"at most {end - 1}")

    def _expect(self, what: str, got: object, expected: object) -> None:
        if got != expected:
            raise AttackError(f"{self.where}: the attack claims {what} {got}, expected {expected}; mend the attack")


def _form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"of {tensor.dtype}, shape {tuple(tensor.shape)}"
