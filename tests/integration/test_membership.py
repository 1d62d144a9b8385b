"""Membership in a run: candidates are granted, attacked, judged and reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedsim
from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.finding_files import load_finding
from fedsim.audit.threat_model import check_private_facts
from fedsim.base.errors import ConfigError, KnowledgeError
from fedsim.federation.candidates import draw_candidates
from fedsim.federation.config import AttackFile
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.findings import Membership
from fedsim.interfaces.knowledge import HELD_OUT, OTHER_CLIENTS
from fedsim.recording.transcript import Transcript
from fedsim.report.page import write_report
from tests.support.experiments import make_tiny_config, run_serial

RUN = {
    "partition": {"name": "iid", "samples_per_client": 40},
    "training": {"local_epochs": 4, "learning_rate": 0.2, "batch_size": 10},
    "federation": {"clients": 4, "rounds": 4, "evaluate_every": 100},
    "adversary": {"when": "never"},
}
ATTACKS = ("membership-loss", "membership-cosine", "fedmia", "membership-lira")


def spec(
    others: Any, count: int = 60, attacks: tuple[str, ...] = ATTACKS, victims: Any = "all", **knowledge: Any
) -> AttackFile:
    adversary = {
        "victims": victims,
        "rounds": "all",
        "workers": 1,
        "candidates": count,
        "knowledge": {"candidates": others, **knowledge},
    }
    return validate_tables(
        AttackFile, {"adversary": adversary, "attack": [{"name": name} for name in attacks]}, "attacks"
    )


def test_candidates_are_attacked_judged_and_reported(folder: OpenRun) -> None:
    audit = open_audit(folder.path, spec(HELD_OUT))
    assert audit.run() == []
    rows = audit.score()
    areas = {(row["attack"], row["victim"]): row for row in rows if row["metric"] == "membership_auc"}
    assert len(areas) == 4 * len(ATTACKS)
    for attack in ATTACKS[1:]:  # cosine, fedmia and lira find most of what clients learnt by heart
        assert sum(areas[attack, client]["value"] for client in range(4)) / 4 > 0.6
    assert {row["floor"] for row in areas.values()} == {0.5}
    finding, about = load_finding(next((folder.findings / "fedmia").glob("*client-2*.safetensors")))
    assert isinstance(finding, Membership)
    assert len(finding.scores) == 60
    assert "candidates" in about["granted"]
    page = write_report(audit.folder, audit).read_text()
    for words in ("Members among candidates", "false-positive rate", "membership AUC", "half of the candidate records"):
        assert words in page


@pytest.mark.thorough
def test_the_truth_is_that_of_the_candidates_that_were_granted(folder: OpenRun) -> None:
    experiment = folder.read_experiment()
    assert experiment is not None
    data = Experiment(experiment).data
    for others in (HELD_OUT, OTHER_CLIENTS):
        audit = open_audit(folder.path, spec(others, 20, ("membership-loss",)))
        assert audit.run() == []
        rows = {row["victim"]: row["value"] for row in audit.score() if row["metric"] == "membership_auc"}
        paths = (folder.findings).glob("membership-loss*/*client-1*.safetensors")
        found = [load_finding(path) for path in paths]
        [scores] = [
            f.scores for f, about in found if about["knowledge"]["candidates"] == others and len(f.scores) == 20
        ]
        held = draw_candidates(data, [1], others, 20).members
        pairs = scores[held][:, None] - scores[~held]
        assert rows[1] == pytest.approx(float(((pairs > 0) + 0.5 * (pairs == 0)).mean(dtype=torch.float64)))


def test_a_finding_about_more_candidates_is_made_anew(folder: OpenRun) -> None:
    for count in (20, 30):
        audit = open_audit(folder.path, spec(HELD_OUT, count, ("membership-loss",)))
        assert audit.run() == []
        found = [load_finding(path) for path in folder.findings.glob("membership-loss*/*.safetensors")]
        held_out = [f for f, about in found if about["knowledge"]["candidates"] == HELD_OUT]
        assert [len(finding.tensors["scores"]) for finding in held_out] == 4 * [count]


def test_where_others_are_from_is_one_of_two(folder: OpenRun) -> None:
    with pytest.raises(ConfigError, match=r"expected where half of them come from, held-out or other-clients, got 'x'"):
        open_audit(folder.path, spec("x")).run()


def test_of_a_recording_made_elsewhere_nobody_knows_others() -> None:
    with pytest.raises(ConfigError, match="which records the victim of a recording made elsewhere does not hold"):
        check_private_facts(spec(HELD_OUT).adversary, ForeignRecording({"0": Path("truth.safetensors")}))
    with pytest.raises(ConfigError, match="no truth file says what other clients hold"):
        check_private_facts(spec(OTHER_CLIENTS).adversary, ForeignRecording({"0": Path("truth.safetensors")}))


def test_candidates_of_a_recording_made_elsewhere_come_from_its_truth_files(tmp_path: Path) -> None:
    """Members of a class that nobody else has, and others' records that the victim has as well, are left out."""
    data = torch.arange(12.0).reshape(6, 2) / 12
    held = (data[:3], torch.tensor([0, 1, 2]))
    others = (torch.cat([data[:1], data[3:]]), torch.tensor([0, 0, 1, 1]))
    table = fedsim.write_truth(tmp_path, lambda client: held if client == 0 else others, [0, 1], public=others)
    case = ForeignRecording({client: Path(file) for client, file in table.items()})
    for source in (HELD_OUT, OTHER_CLIENTS):
        adversary = spec(source, value_range=[-1.0, 1.0]).adversary
        drawn = case.draw_candidates([0], source, 60)
        assert sorted(drawn.labels[drawn.members].tolist()) == sorted(drawn.labels[~drawn.members].tolist())
        assert 1 in drawn.labels.tolist()
        for inputs, label, is_member in zip(drawn.inputs, drawn.labels, drawn.members, strict=True):
            rows = [row for row, own in zip(*held, strict=True) if own == label]
            assert any(torch.equal(inputs, row) for row in rows) == bool(is_member)
        assert torch.equal(case.candidates(adversary, [0]).inputs, 2 * drawn.inputs - 1)
    without_range = spec(HELD_OUT).adversary
    with pytest.raises(ConfigError, match=r"candidates: the truth is in \[0, 1\], and without value_range"):
        case.candidates(without_range, [0])


LEARNT = ("membership-white-box",)


@pytest.mark.thorough
def test_what_is_known_to_be_a_member_is_learnt_from_and_not_scored(folder: OpenRun) -> None:
    audit = open_audit(folder.path, spec(HELD_OUT, 1000, LEARNT, known_candidates=40))
    assert audit.run() == []
    rows = audit.score()
    areas = [row["value"] for row in rows if (row["attack"], row["metric"]) == (*LEARNT, "membership_auc")]
    assert sum(areas) / 4 > 0.6
    found = [load_finding(path) for path in (folder.findings / LEARNT[0]).glob("*.safetensors")]
    assert [len(finding.tensors["scores"]) for finding, _ in found] == 4 * [40]  # each client holds 40 records
    assert "known_candidates" in found[0][1]["granted"]
    page = write_report(audit.folder, audit).read_text()
    assert "some of its training records, known to be such" in page


def test_without_known_records_it_is_refused_before_work(folder: OpenRun) -> None:
    with pytest.raises(KnowledgeError, match="membership-white-box needs known_candidates, which the threat model"):
        open_audit(folder.path, spec(HELD_OUT, 20, LEARNT)).run()


@pytest.mark.parametrize(
    ("others", "known", "told"),
    [
        (False, 40, "known_candidates: they are drawn as candidates are, and none are granted; give candidates, too"),
        (HELD_OUT, 2, "known_candidates: expected an even number, at least 4, got 2"),
        (HELD_OUT, 41, "known_candidates: expected an even number, at least 4, got 41"),
    ],
)
def test_known_records_that_cannot_be_drawn_are_refused(others: Any, known: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_private_facts(
            spec(others, 20, LEARNT, known_candidates=known).adversary,
            ForeignRecording({"0": Path("truth.safetensors")}),
        )


def test_a_client_that_holds_too_little_is_refused_and_other_attacks_go_on(folder: OpenRun) -> None:
    audit = open_audit(folder.path, spec(HELD_OUT, 20, (*LEARNT, "membership-loss"), [0], known_candidates=80))
    [told] = audit.run()
    assert "client 0 has 40 records with partners from 'held-out', so 80 known ones leave no candidate" in told
    assert {row["attack"] for row in audit.score()} >= {"membership-loss"}


def test_a_client_that_is_alone_cannot_be_compared_and_other_attacks_go_on(tmp_path: Path) -> None:
    alone = {"clients": 1, "rounds": 1, "evaluate_every": 100}
    run = run_serial(make_tiny_config(**RUN | {"federation": alone}), tmp_path / "run")
    audit = open_audit(run.path, spec(HELD_OUT, 20, ATTACKS))
    told = audit.run()
    assert len(told) == 2
    assert all("needs 3 clients in the attacked rounds, which have at most 1" in one for one in told)
    assert {row["attack"] for row in audit.score()} == {"membership-loss", "membership-cosine"}


def test_a_client_that_was_silent_in_all_rounds_is_refused_before_work(tmp_path: Path) -> None:
    some = {"clients": 4, "rounds": 1, "evaluate_every": 100}
    run = run_serial(
        make_tiny_config(**RUN | {"federation": some, "strategy": {"name": "fedavg", "fraction_train": 0.5}}),
        tmp_path / "run",
    )
    there = Transcript(run.transcript).clients(1)
    [silent, *_] = set(range(4)) - set(there)
    with pytest.raises(ConfigError, match=f"adversary.victims: client {silent} is not recorded; recorded: "):
        open_audit(run.path, spec(HELD_OUT, 20, ATTACKS, [there[0], silent])).run()


def test_writers_who_differ_in_more_than_membership_are_doubted(tmp_path: Path) -> None:
    writers = RUN | {
        "data": {"name": "handwriting"},
        "partition": {"name": "natural", "test_fraction": 0.5},
        "federation": {"clients": 12, "rounds": 1, "evaluate_every": 100},
        "training": {"local_steps": 1, "local_epochs": None, "learning_rate": 1e-7},
    }
    folder = run_serial(make_tiny_config(**writers), tmp_path)
    audit = open_audit(folder.path, spec(HELD_OUT, 1000, ("membership-loss",), victims=[2]))
    assert audit.run() == []
    assert {row["doubt"].partition(":")[0] for row in audit.score()} == {"membership-loss, client 2"}
