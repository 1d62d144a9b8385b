"""Reports of tables mark what is scored, and show the rows that the headline calls best and worst."""

from __future__ import annotations

import pytest
import torch

from fedsim.audit.evaluation.display import TableRows
from fedsim.audit.evaluation.examples import display_examples
from fedsim.audit.evaluation.own_run import OwnRun
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.randomness import generator
from fedsim.data import Column, Dataset, Examples
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.modality import PublicExamples
from fedsim.report.image_scores import extreme_examples
from fedsim.report.records import shown_records

COLUMNS = (
    Column(name="gain", start=0, low=0.0, high=100_000.0),
    Column(name="kind", start=1, categories=("a", "b")),
    Column(name="always", start=3, categories=("x",)),
)


def make_dataset() -> Dataset:
    rows = torch.zeros(50, 4)
    rows[:, 1], rows[:, 3], rows[0, 0] = 1.0, 1.0, 0.01
    examples = Examples(raw=rows, labels=torch.arange(50) % 2, scale=1.0)
    return Dataset(name="people", train=examples, test=examples, num_classes=2, source="", licence="", columns=COLUMNS)


def test_marks_are_what_is_scored() -> None:
    data = make_dataset()
    public = PublicExamples(data=data.test.inputs(slice(0, 50)), labels=data.test.labels)
    case = OwnRun({}, _own(data))
    truth = case._add_columns(Truth(data=public.data[1:3], labels=torch.tensor([0, 1])))
    claims = torch.tensor([[0.0323, 0.9, 0.1, 0.7], [0.0001, 0.2, 0.8, 0.0]])
    finding = Reconstruction(data=claims, labels=truth.labels)
    found = next(
        s for s in score_examples(finding, truth, public=public, rng=generator(0)) if s.metric == "columns_right"
    )
    rows = display_examples(finding, truth).rows
    assert rows is not None
    marks = [[cell.right for cell in record.claimed] for record in shown_records(rows, data).records]
    assert sorted(marks) == [[False, True, True], [True, False, True]]  # 3,230 against 0 is not recovered
    assert found.per_image == pytest.approx([sum(row) / 3 for row in marks])


def test_large_numbers_are_shown_without_an_exponent() -> None:
    rows = TableRows(claimed=torch.tensor([[0.88104, 1.0, 0.0, 1.0]]), true=None, right=None, entropy=None)
    assert shown_records(rows, make_dataset()).records[0].claimed[0].text == "88104"


def _own(data: Dataset) -> Experiment:
    config = Config.model_validate({"data": {"name": "digits"}, "partition": {"name": "iid"}, "model": {"name": "mlp"}})
    experiment = Experiment(config)
    experiment.__dict__["dataset"] = data
    return experiment


def test_the_best_is_the_best_by_the_metric_of_the_headline() -> None:
    key = ("tableak", "v", "1", "0", "0")
    values = {key: {"mse": [0.1, 0.2, 0.3], "columns_right": [0.5, 1.0, 0.5]}}
    ranked = extreme_examples(values, key[:2], "columns_right")
    assert [(item.rank, item.image) for item in ranked] == [("best", 1), ("median", 0), ("worst", 2)]
    assert {item.metric for item in ranked} == {"columns_right"}
