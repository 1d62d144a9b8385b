"""A server that colludes with clients takes away from secure sums what these added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedsim.api.runs import Run
from fedsim.audit.audit import make_audit
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.observers import observe_run
from fedsim.base.errors import ConfigError, KnowledgeError, RunError
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.recording.message_format import MessageFormat
from fedsim.report.page import write_report
from fedsim.sweeps.rows import sweep_rows
from tests.support.commands import call_fedsim
from tests.support.experiments import make_attack_file, make_tiny_config, run_serial

TINY = {"partition": {"samples_per_client": 4}, "training": {"batch_size": 4}, "model": {"hidden": [64]}}
SUMS = {"groups": "all", "clip": 4.0}
CLIP = 4.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    """Four clients with four digits each in one sum, of which three may collude."""
    tables = {"secure_aggregation": SUMS, "recording": {"colluders": [0, 1, 2]}, "federation": {"rounds": 3}}
    return run_serial(make_tiny_config(**TINY, **tables), tmp_path_factory.mktemp("run") / "run")


def attack(run: OpenRun, *attacks: str, **adversary: Any) -> list[str]:
    """Attack and score; return what failed."""
    audit = make_audit(run, make_attack_file(*attacks, victims="all", **adversary))
    failures = audit.run()
    audit.score(failures)
    return failures


def test_of_one_client_that_is_left_the_server_sees_the_update(run: OpenRun, tmp_path: Path) -> None:
    plain = run_serial(make_tiny_config(**TINY), tmp_path / "plain")
    audit = make_audit(run, make_attack_file("analytic", who=["server", 0, 1, 2]))
    [reply] = audit.transcript.header(1).replies
    assert (reply.client, list(reply.members), reply.num_examples) == (3, [], 4)
    seen, true = audit.transcript.update(1, 3), plain.recording.update(1, 3)
    for name, move in true.pseudo_gradient.items():
        # Its own rounding stays, by one step of the grid at most; all have the same N.
        assert torch.allclose(seen.pseudo_gradient[name], move, atol=1.01 * 2 * CLIP / 2**22, rtol=1e-5)


def test_colluders_help_an_attack_on_the_last_client(run: OpenRun) -> None:
    assert attack(run, "analytic") == []
    assert attack(run, "analytic", who=["server", 0]) == []
    assert attack(run, "analytic", who=["server", 0, 1, 2]) == []
    scores = Run(run.path).scores
    by_who = dict(list(scores[scores.metric == "psnr"].groupby("settings")))
    server, some = by_who["{}"], by_who['{"adversary.who": ["server", 0]}']
    last = by_who['{"adversary.who": ["server", 0, 1, 2]}']
    assert [list(rows.examples) for rows in (server, some, last)] == [[16], [12], [4]]
    assert list(last.victim) == [3]
    assert last.value.item() > max(server.value.item(), some.value.item()) + 10
    page = write_report(run, None, []).read_text()
    assert "the server with clients 0, 1, 2" in page
    assert "without what these clients themselves added to them" in page
    assert "with colluding clients, without their contributions" in page


def test_inspect_says_who_attacks_and_whose_parts_are_kept(run: OpenRun, capfd: pytest.CaptureFixture[str]) -> None:
    assert attack(run, "label-counts", who=["server", 0]) == []
    shown = call_fedsim("inspect", run.path, capfd=capfd).stdout
    assert "the server with client 0" in shown
    assert "0, 1, 2, of which the run keeps what they added to sums" in shown


def test_attacks_on_single_clients_are_made_where_one_is_left(run: OpenRun) -> None:
    knowledge = {"candidates": "held-out"}
    assert attack(run, "lmra", "membership-loss", who=["server", 0, 1, 2], rounds="all", knowledge=knowledge) == []
    with pytest.raises(KnowledgeError, match="what colluding clients leave of sums is still of several clients"):
        attack(run, "lmra", who=["server", 0], rounds="all")


def test_attacks_in_the_rounds_see_what_later_attacks_see(tmp_path: Path) -> None:
    adversary = {"who": ["server", 0, 1, 2], "when": "in-round", "victims": [3], "rounds": [2]}
    tables = {"secure_aggregation": SUMS, "recording": {"colluders": [0, 1, 2]}}
    config = make_tiny_config(**TINY, **tables, adversary=adversary, attack=[{"name": "analytic"}])
    run = run_serial(config, tmp_path / "run")
    [finding] = run.findings.rglob("*.safetensors")
    before = finding.read_bytes()
    assert make_audit(run, None).run() == []
    assert finding.read_bytes() == before  # it is of the present recording, and so kept


def test_without_such_an_adversary_nothing_of_a_single_client_is_written(tmp_path: Path) -> None:
    run = run_serial(make_tiny_config(**TINY, secure_aggregation=SUMS), tmp_path / "run")
    assert not run.colluders.exists()
    with pytest.raises(ConfigError, match=r"does not keep what client 2 adds to sums.*recording.colluders = \[2\]"):
        attack(run, "analytic", who=["server", 2])


def test_what_was_kept_is_held_to_the_manifest(tmp_path: Path) -> None:
    tables = {"secure_aggregation": SUMS, "recording": {"colluders": [0]}}
    run = run_serial(make_tiny_config(**TINY, **tables), tmp_path / "run")
    first, second = sorted(run.colluders.iterdir())
    second.rename(tmp_path / "second")
    audit = make_audit(run, make_attack_file("analytic", who=["server", 0]))
    assert audit.transcript.rounds == [1]  # of a sum with unknown parts nothing is subtracted
    second.write_bytes(first.read_bytes())
    with pytest.raises(RunError, match="is not what this run wrote"):
        attack(run, "analytic", who=["server", 0])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"adversary": {"who": ["server"]}}, "expected the ids of colluding clients"),
        ({"adversary": {"who": ["server", 9]}}, "adversary.who"),
        ({"adversary": {"who": ["server", 1]}}, "to which colluding clients add nothing"),
        ({"recording": {"colluders": [1]}}, "without .secure_aggregation. the server sees"),
        ({"adversary": {"who": ["server", 1]}, "secure_aggregation": {}}, r"with recording.colluders = \[1\]"),
        ({"adversary": {"who": ["server", 0, 1, 2, 3]}, "secure_aggregation": {}}, "all clients attack"),
        ({"adversary": {"who": [0, 1, 2, 3]}}, "all clients attack"),
        ({"recording": {"colluders": [7]}, "secure_aggregation": {}}, "recording.colluders"),
    ],
)
def test_colluders_that_learn_nothing_are_named(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_tiny_config(**tables)


def test_of_a_recording_made_elsewhere_nobody_kept_what_clients_added(run: OpenRun) -> None:
    adversary = validate_tables(AdversaryTable, {"who": ["server", 0]}, "adversary")
    with pytest.raises(ConfigError, match="a recording made elsewhere does not hold"):
        observe_run(run, ForeignRecording({}), adversary, MessageFormat())
    with pytest.raises(ConfigError, match="num_examples and client_ids are withheld"):
        attack(run, "analytic", who=["server", 0], knowledge={"client_ids": False})


def test_what_is_proved_of_sums_is_not_claimed_against_those_who_know_the_noise(tmp_path: Path) -> None:
    tables = {"secure_aggregation": SUMS, "recording": {"colluders": [0, 1, 2]}}
    privacy = {"distributed_privacy": {"epsilon": 5.0, "delta": 1e-5, "clip": 1.0}}  # from the shares of two clients
    run = run_serial(make_tiny_config(**TINY, **tables, **privacy), tmp_path / "run")
    for who, excepted in (["server", 0], False), (["server", 0, 1, 2], True):
        assert attack(run, "membership-loss", who=who, knowledge={"candidates": "held-out"}) == []
        page = write_report(run, None, []).read_text()
        assert ("it does not hold against the server with clients 0, 1, 2" in page) == excepted
        assert "it does not hold against the server with client 0" not in page
        assert "ε of distributed_privacy (unless too many clients collude) is" in page
    for role, proves in (AdversaryRole("server"), True), (AdversaryRole("server", (0,)), False):
        rows = sweep_rows(run, "membership-loss", (), role=role)
        assert rows
        assert all(bool(row["proved_epsilon"]) == proves for row in rows)


def test_a_resumed_run_keeps_what_it_would_have_kept_at_once(run: OpenRun, tmp_path: Path) -> None:
    tables = {"secure_aggregation": SUMS, "recording": {"colluders": [0, 1, 2]}}
    run_serial(make_tiny_config(**TINY, **tables, federation={"rounds": 1}), tmp_path / "run")
    resumed = run_serial(make_tiny_config(**TINY, **tables, federation={"rounds": 3}), tmp_path / "run", resume=True)
    for path in run.colluders.iterdir():
        assert (resumed.colluders / path.name).read_bytes() == path.read_bytes()
    assert compare_with_manifest(resumed).differences == []
