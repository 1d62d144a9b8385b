"""Who tests on what clients train on is told so: of apps, of data sets, and of public examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedsim
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.data.partitions.shares import Iid
from fedsim.federation.experiment import Experiment
from fedsim.federation.federated_data import FederatedData
from fedsim.federation.overlap import describe_tested_records
from fedsim.federation.resolve import resolve
from fedsim.federation.settings import training_fingerprint
from fedsim.federation.states import TrainingStates
from fedsim.federation.tested_examples import ExampleWatch
from fedsim.recording.reported_accuracy import ReportedAccuracy, describe_tested_examples
from fedsim.report.headline import describe_reported_accuracy
from tests.support.experiments import make_tiny_config


def draw(seed: int, count: int = 4) -> Tensor:
    return torch.rand((count, 1, 8, 8), generator=torch.Generator().manual_seed(seed))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(64, 4)))


def train(model: nn.Module, inputs: Tensor) -> None:
    model(inputs).sum().backward()


def test_examples_that_an_app_trains_and_tests_on_are_counted() -> None:
    watch, model = ExampleWatch(), make_model()
    with watch.watch():
        with watch.answer("train"):
            train(model, draw(0))
            model.eval()(draw(1))  # validated: nothing comes back
        with watch.answer("evaluate"):
            model(torch.cat([draw(0, 2), draw(1)]))  # without no_grad
            train(model, draw(2))  # a model of the client's own
        with torch.no_grad():
            model(draw(3))  # the server tests, too
    assert watch.count() == (2 + 4 + 4, 2)
    model(draw(5))
    assert watch.count()[0] == 10, "nothing is looked at afterwards"


@pytest.mark.parametrize(("equal", "expected"), [(10, 0), (30, 30)])
def test_some_rows_of_a_table_are_equal_by_chance(equal: int, expected: int) -> None:
    watch, model, rows = ExampleWatch(), nn.Linear(64, 4), draw(0, 80).flatten(1)
    with watch.watch():
        with watch.answer("train"):
            train(model, rows[:40])
        with watch.answer("evaluate"), torch.no_grad():
            model(rows[40 - equal : 80 - equal])
    assert watch.count() == (40, expected)


def test_what_losses_and_heads_are_given_is_no_example() -> None:
    watch, body, head = ExampleWatch(), nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), nn.Linear(8, 1)
    with watch.watch():
        for _ in range(2):
            with watch.answer("train"):
                nn.MSELoss()(head(body(draw(0))), torch.zeros(4, 1)).backward()
                with torch.no_grad():
                    body[1].weight.add_(1)
            with watch.answer("evaluate"), torch.no_grad():
                nn.MSELoss()(head(body(draw(0))), torch.zeros(4, 1))
    assert watch.count() == (4, 4)


def test_few_equal_examples_are_chance_and_failing_networks_are_left_alone() -> None:
    watch, model = ExampleWatch(), make_model()
    with watch.watch():
        with watch.answer("train"):
            train(model, draw(0))
        with watch.answer("evaluate"), torch.no_grad():
            with pytest.raises(RuntimeError):
                model(torch.zeros(2, 3))
            model(torch.cat([draw(0, 1), draw(1, 40)]))
    assert watch.count() == (41, 0)


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        del inputs
        return self.prompt


def test_watching_leaves_parameters_and_traces_as_they_are(recwarn: pytest.WarningsRecorder) -> None:
    watch, constant = ExampleWatch(), Constant()
    with watch.watch(), watch.answer("train"):
        constant(draw(0)).sum().backward()
        torch.jit.trace(make_model(), draw(1))
    assert not constant.prompt._backward_hooks
    assert not [warning for warning in recwarn if "NumPy" in str(warning.message)]
    assert watch.count() == (0, 0)


def test_small_examples_end_the_watch_before_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsim.federation.tested_examples._MOST_BYTES", 20_000)
    watch, model = ExampleWatch(), nn.Linear(2, 1)
    with watch.watch(), torch.no_grad():
        for row in torch.rand(100, 1, 2):
            model(row)
    assert watch.count()[0] == 10


def test_reported_accuracy_is_told_beside_what_is_trained_on() -> None:
    remark = describe_tested_examples(8, 8)
    reported = ReportedAccuracy(accuracy=0.5, clients=2, examples=8, round=1, remark=remark)
    assert describe_reported_accuracy(reported).endswith("test on other examples.")


def test_a_data_set_whose_test_part_is_trained_on_is_told_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def find(test: Tensor) -> str:
        parts = [fedsim.Examples(raw=raw, labels=torch.arange(len(raw)) % 4, scale=1.0) for raw in (draw(0, 40), test)]
        data = fedsim.Dataset(
            name="mine", train=parts[0], test=parts[1], num_classes=4, source="drawn", licence="none", modality="image"
        )
        if len(test) > 40:
            return describe_tested_records(FederatedData(dataset=data, partition=Iid(), clients=2, seed=1))
        tables: dict[str, Any] = {
            "data": data,
            "partition": {"name": "iid", "samples_per_client": 8},
            "model": {"name": "mlp", "hidden": [4]},
            "federation": {"engine": "serial", "clients": 2, "rounds": 1},
            "adversary": {"when": "never"},
        }
        fedsim.run(tables, tmp_path / "run")
        return caplog.text

    assert "16 of 40 examined test examples are equal to training examples of clients" in find(draw(0, 40))
    assert find(draw(1, 41)) == ""
    assert "41 of 41 examined test examples" in find(torch.cat([draw(0, 40), draw(0, 1)]))


@pytest.mark.parametrize(
    ("about", "seed", "complaint"),
    [
        ({"epoch": 3}, 1, "was trained on the whole training set"),
        ({"round": 3}, 2, "was trained on examples of other clients"),
        ({"round": 3}, 1, ""),
        ({"epoch": 0}, 1, ""),
    ],
)
def test_a_state_that_was_trained_on_what_clients_hold_out_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, about: dict[str, int], seed: int, complaint: str
) -> None:
    held_out = {"test_fraction": 0.2}
    trained = Experiment(resolve(make_tiny_config(partition=held_out, federation={"seed": 1})))
    states = TrainingStates(tmp_path)
    states.save_state("state", trained.initial_state(), training_fingerprint(trained), about)
    start = {"start": str(states.path("state"))}
    config = make_tiny_config(model=start, partition=held_out, federation={"seed": seed})
    Experiment(resolve(config)).check()
    assert complaint in caplog.text
    assert bool(complaint) == ("model.start" in caplog.text)
    # A state whose training started from it knows the same examples.
    caplog.clear()
    heir = Experiment(resolve(make_tiny_config(model=start, partition=held_out, federation={"seed": seed})))
    states = TrainingStates(tmp_path / "heirs" / "states")
    states.save_state("heir", trained.initial_state(), training_fingerprint(heir), {"round": 1})
    later_start = {"start": str(states.path("heir"))}
    config = make_tiny_config(model=later_start, partition=held_out, federation={"seed": seed})
    Experiment(resolve(config)).check()
    assert complaint in caplog.text
    assert bool(complaint) == ("model.start: 'heir.safetensors'" in caplog.text)
    # Nothing is known of an ancestor whose manifest is gone.
    caplog.clear()
    (tmp_path / "manifest.json").unlink()
    Experiment(resolve(config)).check()
    assert "nothing says what 'state.safetensors' was trained on, from which the training of 'heir" in caplog.text


def test_public_examples_that_clients_hold_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = torch.zeros(4, dtype=torch.long)

    def public_of(held: Tensor, public: Tensor) -> Any:
        files = fedsim.write_truth(
            tmp_path / f"{len(public)}{held.ndim}", lambda client: (held, labels), [0], value_range=(0.0, 1.0),
            public=(public, torch.zeros(len(public), dtype=torch.long)),
        )  # fmt: skip
        return ForeignRecording(files={client: Path(file) for client, file in files.items()}).public()

    kept = public_of(draw(0), torch.cat([draw(0, 3), draw(1)]))
    assert len(kept.data) == 4
    assert "3 of 7 examples are equal to ones that clients hold, and are left out" in caplog.text
    assert public_of(draw(0), draw(0, 4)) is None
    rows = draw(0).flatten(1)
    assert len(public_of(rows, torch.cat([rows[:1], draw(1, 5).flatten(1)])).data) == 6, (
        "one row may be equal by chance"
    )
