"""TimberStrike on trees made by hand: claims add up to all covers, and labels are counted exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from adversaries.trees.timberstrike import TimberStrike
from fedsim.base.errors import AttackError, TranscriptError
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import Knowledge, Records
from fedsim.recording.tree_models import SQUARED_ERROR, Tree, parse_tree_model
from fedsim.recording.wire_format import Update
from tests.support.recordings import record_updates, run_attack
from tests.support.trees import Split, grow_tree, model_bytes, predict_margins, tree_update

RNG = np.random.default_rng(5)
ROWS = RNG.integers(0, 10, size=(24, 3)).astype(np.float32)
LABELS = (ROWS[:, 0] + RNG.integers(0, 4, size=24) > 6).astype(int)
SPLITS: list[Split] = [
    (0, 5.0, (1, 3.0, None, None), (2, 6.0, None, None)),
    (1, 6.0, (0, 3.0, None, None), (0, 7.0, None, None)),
    (2, 4.0, (1, 2.0, None, None), (0, 6.0, None, None)),
]
KNOWLEDGE = Knowledge(columns=(1, 1, 1), value_range=([0.0] * 3, [10.0] * 3))
Attack = Callable[..., Reconstruction]


def train_rounds(
    rows: NDArray[Any] = ROWS, labels: NDArray[Any] = LABELS, num_examples: int = 24, **settings: Any
) -> list[Update]:
    """Return what a client sends that trains a tree in each round on those that it made before."""
    objective = {name: value for name, value in settings.items() if name == "objective"}
    updates, trees, sent = list[Update](), list[dict[str, Any]](), b""
    for number, split in enumerate(SPLITS, 1):
        model = parse_tree_model(model_bytes(trees, 3, **objective), "here")
        tree = grow_tree(rows, labels, split, predict_margins(model, rows), **settings)
        answer = model_bytes([tree], 3, **objective)
        updates.append(tree_update(sent, answer, number=number, num_examples=num_examples))
        trees.append(tree)
        sent = model_bytes(trees, 3, **objective)
    return updates


@pytest.fixture
def attack(tmp_path: Path) -> Attack:
    def run(updates: list[Update], knowledge: Knowledge = KNOWLEDGE, **settings: Any) -> Reconstruction:
        return run_attack(TimberStrike(**settings), record_updates(tmp_path / "transcript", updates), knowledge)

    return run


def sent_trees(updates: list[Update]) -> list[Tree]:
    contents = [update.after["0"].numpy().tobytes() for update in updates]
    return [parse_tree_model(content, "here").trees[0] for content in contents]


def test_claims_fall_into_the_leaves_of_all_trees_as_their_records_do(attack: Attack) -> None:
    updates = train_rounds()
    finding = attack(updates)
    claimed = 10 * finding.data.double().numpy()
    off = 0
    for number, tree in enumerate(sent_trees(updates)):
        claimed_leaves, true_leaves = (np.bincount(tree.find_leaves(rows), minlength=7) for rows in (claimed, ROWS))
        off += int(abs(claimed_leaves - true_leaves).sum()) // 2
        if number == 0:
            assert off == 0
    assert len(claimed) == 24
    assert off <= 3  # two trees of 24 records; drawn rows have about 14
    assert finding.trace["objective"][-1] < 0.5


def test_labels_of_each_leaf_of_the_first_tree_are_exact(attack: Attack) -> None:
    updates = train_rounds()
    finding = attack(updates, iterations=1)
    tree = sent_trees(updates)[0]
    claimed_leaves, true_leaves = tree.find_leaves(10 * finding.data.numpy()), tree.find_leaves(ROWS)
    for leaf in tree.leaves:
        assert sorted(finding.labels[claimed_leaves == leaf].tolist()) == sorted(LABELS[true_leaves == leaf].tolist())


def test_the_clients_records_are_picked_out_of_others(attack: Attack) -> None:
    # A tree with a leaf for each of these, which auxiliary records share with nobody else.
    rows = np.array([[1, 1, 1], [1, 8, 1], [8, 1, 1], [8, 1, 8]], np.float32)
    labels = np.array([0, 1, 0, 1])
    updates = train_rounds(rows, labels, 4)
    others = np.concatenate([RNG.integers(0, 10, size=(40, 3)), rows]).astype(np.float32)
    other_labels = np.concatenate([RNG.integers(0, 2, size=40), labels])
    auxiliary = Records(inputs=torch.from_numpy(others), labels=torch.from_numpy(other_labels))
    finding = attack(updates, Knowledge(columns=(1, 1, 1), value_range=([0.0] * 3, [10.0] * 3), auxiliary=auxiliary))
    claimed = {tuple(row) for row in (10 * finding.data).round().int().tolist()}
    assert claimed <= {tuple(row) for row in others.astype(int).tolist()}
    leaves = [tree.find_leaves(10 * finding.data.numpy()) for tree in sent_trees(updates)]
    expected = [tree.find_leaves(rows) for tree in sent_trees(updates)]
    assert sorted(zip(*leaves, strict=True)) == sorted(zip(*expected, strict=True))


def test_categories_are_claimed_whole(attack: Attack) -> None:
    categories = np.eye(2)[(ROWS[:, 0] > 5).astype(int)]
    rows = np.column_stack([categories, ROWS[:, 1]]).astype(np.float32)
    tree = grow_tree(rows, LABELS, (0, 1.0, (2, 4.0, None, None), None))
    update = tree_update(b"", model_bytes([tree], 3), num_examples=24)
    finding = attack([update], Knowledge(columns=(2, 1), value_range=([0.0] * 3, [1.0, 1.0, 10.0])))
    assert (finding.data[:, :2].sum(1) == 1).all()
    assert finding.data[:, 0].sum() == categories[:, 0].sum()


def test_targets_of_a_regression_add_up(attack: Attack) -> None:
    targets = 2.0 * ROWS[:, 0] + ROWS[:, 1]
    finding = attack(train_rounds(labels=targets, objective=SQUARED_ERROR))
    assert finding.labels.is_floating_point()
    assert finding.labels.sum().item() == pytest.approx(targets.sum(), rel=0.1)


def test_a_client_that_comes_later_is_claimed_as_many_records_as_it_reports(attack: Attack) -> None:
    finding = attack(train_rounds()[1:])
    assert len(finding.data) == 24


def test_covers_of_a_sample_are_said_to_be_such(attack: Attack, caplog: pytest.LogCaptureFixture) -> None:
    updates = train_rounds(num_examples=48)
    with caplog.at_level(logging.WARNING):
        finding = attack(updates)
    assert "made from 24 of N = 48 records; covers are those of samples (subsample)" in caplog.text
    # Each sampled record stands for two.
    tree = sent_trees(updates)[0]
    claimed_leaves, true_leaves = (tree.find_leaves(rows) for rows in (10 * finding.data.numpy(), ROWS))
    for leaf in tree.leaves:
        assert abs((claimed_leaves == leaf).sum() - 2 * (true_leaves == leaf).sum()) <= 1


def test_records_that_count_more_than_once_are_refused(attack: Attack) -> None:
    with pytest.raises(AttackError, match="counts 24 of N = 12 records, so records have weights, which are not read"):
        attack(train_rounds(num_examples=12))


LEAF = tree_update(b"", model_bytes([grow_tree(ROWS, LABELS, None)], 3), num_examples=24)
OTHER_START = tree_update(b"", model_bytes([grow_tree(ROWS, LABELS, SPLITS[0], 0.7)], 3), num_examples=24)
NARROW = Knowledge(columns=(1, 1), value_range=([0.0] * 2, [1.0] * 2))


@pytest.mark.parametrize(
    ("updates", "knowledge", "reason"),
    [
        ([LEAF], KNOWLEDGE, "no tree has a split"),
        (train_rounds(), NARROW, "3 features, columns has 2"),
        (train_rounds(num_examples=0)[1:], KNOWLEDGE, r"reports no N, .* set \[app\] num_examples"),
        ([tree_update(b"", b"", num_examples=24)], KNOWLEDGE, "sent no model"),
        ([OTHER_START], KNOWLEDGE, "covers are not counts"),
        ([tree_update(b"", b"no model")], KNOWLEDGE, "is no JSON of XGBoost"),
    ],
)
def test_what_cannot_be_attacked_is_refused_in_a_sentence(
    attack: Attack, updates: list[Update], knowledge: Knowledge, reason: str
) -> None:
    with pytest.raises((AttackError, TranscriptError), match=reason):
        attack(updates, knowledge)
