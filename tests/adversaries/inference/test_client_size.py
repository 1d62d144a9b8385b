"""N of a client is inferred from its message where it shows, and nothing is from noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
import torch

from adversaries.inference.client_size import ClientSize
from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.evaluation.example_counts import score_count
from fedsim.audit.finding_files import load_finding
from fedsim.audit.threat_model import apply_headers
from fedsim.base.errors import AttackError
from fedsim.federation.open_run import OpenRun
from fedsim.interfaces.attack import Knowledge, Target, VictimTask
from fedsim.interfaces.count_findings import ExampleCount
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from tests.support.experiments import make_attack_file, make_tiny_config, run_serial

CLIENTS = 12


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """A round of clients with 21 to 258 digits, of which the smaller ones have fewer than pixels vary."""
    config = make_tiny_config(
        partition={"name": "quantity-skew"},
        model={"hidden": [64]},
        federation={"clients": CLIENTS, "rounds": 1, "evaluate_every": 100},
    )
    return run_serial(config, tmp_path_factory.mktemp("sizes") / "run")


def audit_sizes(recording: OpenRun, **knowledge: bool) -> Audit:
    granted = {"auxiliary": True, **knowledge}
    return open_audit(recording.path, make_attack_file("client-size", victims="all", auxiliary=400, knowledge=granted))


def attack_transcript(recording: OpenRun, transcript: Transcript) -> dict[int, ExampleCount]:
    """Attack all clients of a transcript at once, with the knowledge of the audit and without N."""
    audit, attack = audit_sizes(recording, num_examples=False), ClientSize()
    names = attack.facts_to_grant()
    knowledge = apply_headers(audit.granted_knowledge, audit.spec.adversary, [transcript.header(1)], names)
    hidden = transcript.without_example_counts()
    tasks = [VictimTask(target=make_target(hidden, client, knowledge)) for client in transcript.clients(1)]
    findings = {}
    for task, outcome in attack.run_several(tasks):
        assert isinstance(outcome, ExampleCount), outcome
        findings[task.target.victim] = outcome
    alone = attack.run(make_target(hidden, 7, knowledge))
    assert isinstance(alone, ExampleCount)
    assert (alone.count, alone.lowest, alone.highest) == (findings[7].count, findings[7].lowest, findings[7].highest)
    return findings


def make_target(transcript: Transcript, victim: int, knowledge: Knowledge) -> Target:
    return Target(transcript=transcript, victim=victim, knowledge=knowledge, rng=torch.Generator())


def replace_by_noise(recording: OpenRun, folder: Path) -> Transcript:
    """Return the recording with noise of one norm in place of what clients sent."""
    original, generator = Transcript(recording.path), torch.Generator().manual_seed(1)
    updates = []
    for client in original.clients(1):
        update = original.update(1, client)
        arrays = {name: 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in update.before.items()}
        payload = Payload.from_dense(arrays, "delta")
        updates.append(
            Update(round=1, client=client, before=update.before, payload=payload, num_examples=update.num_examples)
        )
    Recorder(folder).write(1, updates)
    return Transcript(folder)


def compare_with_guesses(transcript: Transcript, findings: dict[int, ExampleCount]) -> tuple[float, float]:
    """Return the mean error of claims, and that of the floors."""
    counts = {reply.client: reply.num_examples for reply in transcript.header(1).replies}
    scores = []
    for client, finding in findings.items():
        others = [count for other, count in counts.items() if other != client]
        scores.append(score_count(finding.count, counts[client], others, is_granted=False)[0])
    return mean(score.value for score in scores), mean(score.floor for score in scores)


def test_sizes_are_inferred_beyond_the_guess_and_who_is_sure_is_right(recording: OpenRun) -> None:
    audit = audit_sizes(recording, num_examples=False)
    assert audit.run() == []
    rows = [row for row in audit.score() if row["metric"] == "count_error"]
    assert len(rows) == CLIENTS
    assert mean(row["value"] for row in rows) < mean(row["floor"] for row in rows) / 4
    counts = {reply.client: reply.num_examples for reply in audit.transcript.header(1).replies}
    sure, within = [], []
    for file in (audit.folder.findings / "client-size").glob("*.safetensors"):
        finding, about = load_finding(file)
        assert isinstance(finding, ExampleCount)
        true = counts[int(about["victim"])]
        within.append(finding.lowest <= true <= finding.highest)
        if finding.lowest == finding.highest:
            sure.append(finding.count == true)
    assert len(sure) >= 2
    assert all(sure)
    assert mean(within) > 0.7


def test_of_noise_nothing_is_inferred_and_nobody_is_sure(recording: OpenRun, tmp_path: Path) -> None:
    noise = replace_by_noise(recording, tmp_path)
    findings = attack_transcript(recording, noise)
    assert all(finding.lowest < finding.highest for finding in findings.values())
    error, floor = compare_with_guesses(noise, findings)
    assert error > floor
    # The same way of attacking does infer from what clients sent.
    transcript = Transcript(recording.path)
    error, floor = compare_with_guesses(transcript, attack_transcript(recording, transcript))
    assert error < floor / 4


def test_who_is_granted_n_claims_the_same_and_infers_nothing(recording: OpenRun) -> None:
    claims = {}
    for granted in (False, True):
        audit = audit_sizes(recording, num_examples=granted)
        assert audit.run() == []
        rows = [row for row in audit.score() if ("num_examples" in row["settings"]) is not granted]
        claims[granted] = {(row["victim"], row["metric"]): row["value"] for row in rows}
        assert len(claims[granted]) == 2 * CLIENTS
    assert claims[False] == claims[True]
    for row in rows:
        assert row["floor"] == {"count_error": 0.0, "count_exact": 1.0}[row["metric"]]
        assert row["floor_guess"] == "N in the message"


def test_sizes_that_leave_one_example_for_batch_norm_are_not_simulated(tmp_path: Path) -> None:
    config = make_tiny_config(
        model={"hidden": [16], "batch_norm": True}, federation={"clients": 2, "rounds": 1, "evaluate_every": 100}
    )
    run = run_serial(config, tmp_path / "run")
    tables = [{"name": "client-size", "simulated": 20}]
    spec = make_attack_file(*tables, victims=[0], auxiliary=60, knowledge={"auxiliary": True})
    assert open_audit(run.path, spec).run() == []


def test_of_equal_clients_the_guess_is_right_and_no_claim_is_better() -> None:
    error, exact = score_count(30, 30, [30] * 5, is_granted=False)
    assert (error.value, error.floor, exact.value, exact.floor) == (0, 0, 1, 1)


def test_guesses_are_the_median_and_what_is_nearest_by_relative_error() -> None:
    error, exact = score_count(12, 10, [10, 20, 90, 100, 110], is_granted=False)
    assert (error.value, error.floor, error.floor_guess) == (pytest.approx(0.2), 0, "N with the least relative error")
    assert (exact.value, exact.floor) == (0, 1)
    error, _ = score_count(12, 80, [10, 20, 90, 100, 110], is_granted=False)
    assert (error.floor, error.floor_guess) == (pytest.approx(0.125), "median N of other clients")
    assert "no other client" in score_count(12, 80, [], is_granted=False)[0].missing


@pytest.mark.parametrize("numbers", [(0, 1, 1), (3, 2, 4), (1, 2, 1), (1.0, 1, 1)])
def test_a_claim_outside_its_own_range_is_refused(numbers: tuple[int, int, int]) -> None:
    lowest, count, highest = numbers
    claims: Callable[..., ExampleCount] = ExampleCount
    with pytest.raises(AttackError, match="expected integers of at least 1 in ascending order"):
        claims(lowest=lowest, count=count, highest=highest)
