"""TabLeak: rows stay rows, starts are pooled, and what it is sure of is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inversion.tableak import RelaxedScaling, TabLeak
from fedsim.base.errors import AttackError, ConfigError, KnowledgeError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.table_metrics import find_correct_columns
from fedsim.base.task import Task
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.input_scaling import InputScaling
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining
from tests.support.recordings import build_update

COLUMNS = (1, 4, 1, 2, 5, 3)
FEATURES = sum(COLUMNS)
SPREAD = torch.full((FEATURES,), 0.3)
LABELS = torch.tensor([0, 1, 1, 0])


def table(count: int, seed: int = 0) -> Tensor:
    """Rows whose columns are drawn evenly."""
    rng = generator("table", seed)
    drawn = [
        torch.rand((count, 1), generator=rng)
        if size == 1
        else torch.eye(size)[torch.randint(size, (count,), generator=rng)]
        for size in COLUMNS
    ]
    return torch.cat(drawn, 1)


def network() -> nn.Module:
    with seed_globals("tableak"):
        return Mlp(hidden=(40,)).build(Task((FEATURES,), 2))


Run = Callable[..., Reconstruction]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Record what a client with the first rows of the table sends, and attack it."""

    def attack_it(
        attack: Attack, count: int = 4, granted: dict[str, Any] | None = None, **training: Any
    ) -> Reconstruction:
        plan = LocalTraining(**({"local_epochs": 1, "batch_size": count, "learning_rate": 0.1} | training))
        before = copy_state(network())
        after, _ = local_update(network(), before, table(4)[:count], LABELS[:count], plan, key=("x",))
        update = build_update(before, after, client=5, num_examples=count)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        Recorder(folder).write(1, [update])
        known = Knowledge(
            model=network,
            loss=cross_entropy,
            input_shape=(FEATURES,),
            columns=COLUMNS,
            value_range=([0.0], [1.0]),
            input_mean=[0.4] * FEATURES,
            input_std=SPREAD.tolist(),
            labels=LABELS[:count].sort().values,
            learning_rate=plan.learning_rate,
            local_epochs=plan.local_epochs,
            batch_size=plan.batch_size,
        )
        found = attack.run(
            Target(
                transcript=Transcript(folder),
                victim=5,
                knowledge=replace(known, **granted or {}),
                rng=generator("attack"),
            )
        )
        assert isinstance(found, Reconstruction)
        return found

    return attack_it


def share(found: Reconstruction, count: int = 4) -> float:
    return find_correct_columns(found.data, table(4)[:count], COLUMNS, SPREAD).double().mean().item()


def units() -> RelaxedScaling:
    centre, scale = torch.linspace(-1, 1, FEATURES), torch.linspace(0.5, 2, FEATURES)
    low, high = torch.linspace(-3, -2, FEATURES), torch.linspace(2, 5, FEATURES)
    return RelaxedScaling.from_scaling(InputScaling(centre, scale, low, high), COLUMNS)


def test_whatever_the_dummy_rows_are_the_model_is_fed_with_shares_and_numbers_within_bounds() -> None:
    own, dummy = units(), 3 * torch.randn((7, FEATURES), generator=generator("dummy"))
    dummy[0], dummy[1] = 400, -400 * torch.rand(FEATURES)
    inside = (own.to_model(dummy) - own.low) / (own.high - own.low)
    logits = (own.centre + own.scale * dummy - own.low) / (own.high - own.low)
    start = 0
    for size in COLUMNS:
        here = slice(start, start + size)
        expected = dummy[:, here].sigmoid() if size == 1 else logits[:, here].softmax(1)
        torch.testing.assert_close(inside[:, here], expected)
        start += size


def test_relaxed_rows_have_a_second_derivative_everywhere() -> None:
    own = units()
    dummy = torch.randn((2, FEATURES), generator=generator("dummy"), dtype=torch.float64)
    double = RelaxedScaling(*(part.double() for part in (own.centre, own.scale, own.low, own.high)), COLUMNS)
    assert torch.autograd.gradgradcheck(double.to_model, (dummy.requires_grad_(True),))


def test_rows_are_recovered_and_each_has_one_category_a_column(run: Run) -> None:
    found = run(TabLeak(iterations=150, restarts=2), 2)
    assert share(found, 2) == 1
    assert share(Reconstruction(data=table(2, seed=1), labels=LABELS[:2]), 2) < 0.7
    categories = torch.split(found.data, COLUMNS, 1)
    assert all(part.sum(1).eq(1).all() and part.max(1).values.eq(1).all() for part in categories if part.shape[1] > 1)


@pytest.mark.thorough
def test_a_row_after_several_known_local_steps_is_recovered(run: Run) -> None:
    attack = TabLeak(iterations=60, restarts=2)
    found = run(attack, 2, local_epochs=2, batch_size=1, learning_rate=0.05)
    assert share(found, 2) > 0.8


def test_where_local_steps_are_not_known_the_update_is_taken_for_one_gradient(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    withheld = {"learning_rate": None, "local_epochs": None}
    found = run(TabLeak(iterations=100, restarts=2), granted=withheld, local_epochs=3, learning_rate=0.01)
    assert "assumes one local step, the update is of an unknown number of" in caplog.text
    assert share(found) > 0.7


class _Start:
    """A restart whose descent is over."""

    def __init__(self, data: Tensor, labels: Tensor) -> None:
        self.problem = cast("Any", type("Problem", (), {"scaling": RelaxedScaling.from_scaling(_UNIT, COLUMNS)}))
        self._found = Reconstruction(data=data, labels=labels)

    def finding(self, trial: Any, merged: Any) -> Reconstruction:
        return self._found


_UNIT = InputScaling(torch.zeros(FEATURES), SPREAD, torch.zeros(FEATURES), torch.ones(FEATURES))


class _Trial:
    def __init__(self, objective: float) -> None:
        self.objective = objective


def pooled(rows: list[Tensor], labels: Tensor = LABELS) -> Reconstruction:
    """What is claimed when starts end at these rows, the first one best."""
    ends = [(_Start(data, labels), _Trial(float(place))) for place, data in enumerate(rows)]
    return TabLeak()._conclude(cast("Any", ends))


def test_starts_are_aligned_and_a_minority_that_collapsed_moves_nothing() -> None:
    true = table(4)
    swapped = true[[3, 2, 1, 0]]  # labels 0 1 1 0 stay where they are
    found = pooled([true, swapped, true, swapped, table(4, seed=9)])
    torch.testing.assert_close(found.data, true)


def test_rows_of_another_class_are_not_pooled() -> None:
    true = table(4)
    crossed = true[[1, 0, 2, 3]]  # which would be put right if classes were not kept apart
    found = pooled([true, crossed, crossed])
    torch.testing.assert_close(found.data, crossed)


def test_entropy_is_low_where_starts_agree() -> None:
    true = table(4)
    numbers = true.clone()
    numbers[0, 0] = (numbers[0, 0] + 0.3) % 1
    halves = true.clone()
    halves[2, 1:5] = 0.25
    starts = [true, halves, halves, halves, numbers]
    entropy = pooled(starts).entropy
    assert entropy is not None
    assert entropy.shape == (4, len(COLUMNS))
    assert entropy[0, 0] > entropy[1, 0] + 5
    assert entropy[2, 1].item() == pytest.approx(1)
    assert entropy[:, 3:].max() == 0
    spread = torch.stack([x[0, 0] for x in starts]).std() / 0.3
    assert entropy[0, 0].item() == pytest.approx(0.5 + 0.5 * math.log(2 * math.pi * spread**2), abs=1e-4)


def test_one_start_says_nothing_of_how_sure_it_is() -> None:
    assert pooled([table(4)]).entropy is None


@pytest.mark.thorough
def test_values_of_low_entropy_are_right_more_often(run: Run) -> None:
    found = run(TabLeak(iterations=40, restarts=8))
    right = find_correct_columns(found.data, table(4), COLUMNS, SPREAD)
    kinds = [place for place, size in enumerate(COLUMNS) if size > 1]
    assert found.entropy is not None
    assert 0 < right[:, kinds].double().mean() < 1
    sure = found.entropy[:, kinds] <= found.entropy[:, kinds].median()
    assert right[:, kinds][sure].double().mean() > right[:, kinds][~sure].double().mean()


def test_columns_that_do_not_fit_an_example_are_refused(run: Run) -> None:
    message = r"^TabLeak: columns: 2 columns have 3 features, and an example has the shape \(16,\); expected"
    with pytest.raises(AttackError, match=message):
        run(TabLeak(), granted={"columns": (1, 2)})


def test_without_columns_nothing_is_computed(run: Run) -> None:
    with pytest.raises(KnowledgeError, match=r"^TabLeak needs columns, which the threat model withholds; grant it"):
        run(TabLeak(), granted={"columns": None})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step_size": 0.0}, "step_size: expected a value above 0, got 0.0"),
        ({"order_weight": -1.0}, "order_weight: expected at least 0, got -1.0"),
        ({"restarts": 0}, "restarts: expected at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TabLeak(**settings)
