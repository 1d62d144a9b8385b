"""`fedsim dossier` says what a run shows, and `fedsim verify` computes every number of it again."""

from __future__ import annotations

import csv
import datetime
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from safetensors.torch import save_file

import fedsim
from fedsim.audit.audit import open_audit
from fedsim.base.errors import ConfigError, RunError
from fedsim.dossier import contents
from fedsim.dossier.attack_results import read_finding_facts
from fedsim.dossier.files import write_dossier_files
from fedsim.dossier.limits import describe_validity
from fedsim.dossier.missing_attacks import list_missing_attacks
from fedsim.dossier.recomputation import judge_findings_again
from fedsim.federation.open_run import OpenRun
from fedsim.recording.messages import RecordedExchange, RecordedMessage, write_messages
from fedsim.recording.seals import KEY_VARIABLE, seal_text
from fedsim.report.reported_run import open_reported_run
from tests.support.commands import Call
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import read_dossier

RUN: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 1},
    "model": {"name": "linear"},
    "training": {"local_steps": 1, "batch_size": 1, "learning_rate": 0.1},
    "federation": {"engine": "serial", "seed": 3, "clients": 6, "rounds": 2},
    "adversary": {"victims": [0, 1, 2, 3, 4], "rounds": [1], "workers": 1},
    "attack": [{"name": "analytic"}],
}
DEFENDED = RUN | {
    "adversary": {"victims": [0], "rounds": [1], "workers": 1},
    "attack": [{"name": "inverting-gradients", "iterations": 1}],
    "defense": [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 2.0}],
}
NET = """
from fedsim.base.task import Task
from fedsim.training.models.linear import Linear

def build():
    return Linear().build(Task((1, 8, 8), 10))
"""
ATTACK_FILE = """
[adversary]
victims = [0]
rounds = [1]
workers = 1
[adversary.knowledge]
model = "net_of_dossier:build"
input_shape = [1, 8, 8]
value_range = [-2.0, 2.0]
[truth]
0 = "zero.safetensors"
[[attack]]
name = "analytic"
"""
"""Attack file for a bare recording of the leaking run."""
SCHEMA = Path(contents.__file__).with_name("dossier.schema.json")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose messages leak, the gradient of one example at a linear model, and its dossier."""
    folder = fedsim.run(RUN, tmp_path_factory.mktemp("own") / "leaking").path
    fedsim.write_dossier(folder, fail_if=["psnr>20"])
    return folder


@pytest.fixture(scope="module")
def defended_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same under DP-SGD, which has a ledger."""
    return fedsim.run(DEFENDED, tmp_path_factory.mktemp("own") / "defended").path


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of the leaking run, for a test that changes it."""
    return Path(shutil.copytree(original, tmp_path / "leaking"))


def forge(folder: Path, change: Callable[[dict[str, Any]], None], secret: bytes | None = None) -> None:
    """Change a dossier, and seal it again, as anybody who can write there can."""
    content = read_dossier(folder)
    change(content)
    seal = seal_text(json.dumps(content, sort_keys=True), secret)
    (folder / "dossier.json").write_text(json.dumps({"seal": seal, "dossier": content}))


def rewrite(path: Path, change: Callable[[dict[str, str]], dict[str, str] | None]) -> None:
    """Change the rows of a table; those for which None is returned are left out."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(filter(None, map(change, rows)))


def reseal(folder: Path, *names: str) -> None:
    """Have the manifest name the present hashes of files, as anybody who can write there can."""
    OpenRun(folder).manifest.note(*(folder / name for name in names))


def test_a_leak_is_told_with_the_most_exposed_client_and_what_was_not_attacked(run: Path) -> None:
    dossier = fedsim.write_dossier(run).contents
    assert dossier.verdict == "leaks"
    answer = " ".join(dossier.answer)
    assert "From the messages of 5 victims, the server recovered all 5 examples exactly (by analytic)." in answer
    assert (
        "5 of 6 recorded clients were attacked, in 1 of 2 recorded rounds; nothing is known about the others." in answer
    )
    assert "No guarantee is proved, because clients have no defense." in answer
    psnr = next(result for result in dossier.results if result.metric == "psnr")
    scores = fedsim.open(run).scores.query("metric == 'psnr'").set_index("victim")["value"]
    assert psnr.worst is not None
    assert (psnr.worst.client, psnr.worst.value) == (scores.idxmax(), pytest.approx(scores.max()))
    assert [observer.who for observer in dossier.observers if observer.is_examined] == ["The server"]
    assert [aim.attacks for aim in dossier.aims if aim.attacks] == [["analytic"]]
    assert any(caution.title == "one seed only" for caution in dossier.cautions)


def test_the_page_is_self_contained_and_escapes_what_it_quotes(run: Path) -> None:
    renamed = run.rename(run.with_name("<script>alert(1)<"))
    page = fedsim.write_dossier(renamed).page.read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "default-src 'none'" in page
    assert "EDPB Opinion 28/2024" in page


def test_the_json_follows_the_schema_of_the_package(run: Path) -> None:
    fedsim.write_dossier(run, fail_if=["leaks"], review_by=datetime.date(2030, 1, 2))
    schema = json.loads(SCHEMA.read_text())
    expected = contents.SealedDossier.model_json_schema()
    assert schema == expected, "write json.dumps(SealedDossier.model_json_schema(), indent=1) into it"
    content = json.loads((run / "dossier.json").read_text())
    jsonschema.validate(content, schema)
    content["dossier"]["verdict"] = "safe"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, schema)


def test_a_dossier_does_not_change_the_run(run: Path, call: Call) -> None:
    manifest = (run / "manifest.json").read_bytes()
    fedsim.write_dossier(run)
    assert (run / "manifest.json").read_bytes() == manifest
    done = call("inspect", run)
    assert done.returncode == 0, done.stderr
    assert "not fedsim's" not in done.stdout


def test_a_proof_stands_with_unit_accountant_and_trust_and_is_composed_again(
    defended_run: Path, tmp_path: Path
) -> None:
    dossier = fedsim.write_dossier(defended_run, tmp_path).contents
    [proof] = dossier.proofs
    largest = fedsim.open(defended_run).ledger["epsilon"].max()
    assert proof.epsilon == pytest.approx(largest)
    assert (proof.neighbours, proof.delta) == ("one example added or removed", 1e-5)
    assert "Rényi" in proof.accountant
    assert "the server" in proof.against
    verification = fedsim.verify_dossier(tmp_path)
    assert len(verification.epsilons) == len(fedsim.open(defended_run).ledger)
    assert {value.state for value in verification.values if value.is_number} <= {"equal", "cannot be recomputed"}


@pytest.mark.parametrize(
    ("threshold", "outcome"),
    [
        ("leaks", "reached"),
        ("undecided", "not reached"),
        ("psnr>20", "reached"),
        ("psnr>1000", "not reached"),
        ("identified>0.5", "reached"),
        ("mse<0.001", "reached"),
        ("epsilon>8", "reached"),
        ("measured-epsilon>1", "cannot be decided"),
        ("accuracy<0.01", "not reached"),
        ("lpips<0.1", "cannot be decided"),
    ],
)
def test_thresholds_are_about_the_most_exposed_client(
    original: Path, tmp_path: Path, threshold: str, outcome: str
) -> None:
    [judged] = fedsim.write_dossier(original, tmp_path, fail_if=[threshold]).contents.thresholds
    assert judged.outcome == outcome, judged


@pytest.mark.parametrize(
    ("threshold", "words"),
    [
        ("colour>1", "'colour' names nothing that this dossier has; it has leaks, undecided, psnr"),
        ("psnr<20", "higher values of psnr are worse, so it would pass what is worst; write psnr>20"),
        ("psnr>much", "expected a number after >, got 'much'"),
        ("psnr>nan", "expected a number after >, got 'nan'"),
        ("psnr", "write it as psnr>NUMBER"),
        ("l_sim<1", "'l_sim' names nothing"),
        ("identified>50", "is never reached, since identified has values from 0 to 1"),
        ("identified>1", "is never reached"),
        ("mse<0", "is never reached, since mse has values from 0 to 1; write a limit in between"),
        ("accuracy<78", "is always reached, since accuracy has values from 0 to 1"),
        ("epsilon>-1", "is always reached, since epsilon has values from 0 up"),
    ],
)
def test_a_threshold_that_says_nothing_is_refused_and_nothing_is_written(
    original: Path, tmp_path: Path, threshold: str, words: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        fedsim.write_dossier(original, tmp_path / "out", fail_if=[threshold])
    assert words in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_the_command_fails_with_a_sentence_where_a_threshold_is_reached(run: Path, call: Call) -> None:
    done = call("dossier", run, "--fail-if", "leaks", "--fail-if", "psnr>1000", "--review-by", "2030-01-02")
    assert done.returncode == 1
    assert done.stderr == "fedsim: --fail-if 'leaks': reached: shown by analytic\n"
    suite = ElementTree.parse(run / "dossier.junit.xml").getroot()
    assert suite.attrib | {"name": ""} == {"name": "", "tests": "2", "failures": "1", "errors": "0"}
    assert [case.get("name") for case in suite if case.find("failure") is not None] == ["leaks"]
    # Without thresholds nothing fails, and no old outcome stays.
    done = call("dossier", run)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (run / "dossier.junit.xml").exists()


def test_every_number_of_an_unchanged_run_is_equal(run: Path, call: Call) -> None:
    done = call("verify", run)
    assert done.returncode == 0, done.stderr
    assert "numbers of the dossier: " in done.stdout
    assert ", 0 differ\n" in done.stdout
    scores = fedsim.verify_dossier(run / "dossier.json").scores
    assert sum(value.state == "equal" for value in scores) > 20
    assert not [value for value in scores if value.state == "differs"]


def test_a_dossier_is_verified_beside_a_run_that_moved(run: Path, tmp_path: Path) -> None:
    fedsim.write_dossier(run, tmp_path / "dossier")
    moved = run.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="does not exist; name it with --run FOLDER"):
        fedsim.verify_dossier(tmp_path / "dossier")
    assert fedsim.verify_dossier(tmp_path / "dossier", moved).differences == []


def test_a_changed_dossier_is_refused(run: Path, call: Call) -> None:
    file = run / "dossier.json"
    file.write_text(file.read_text().replace('"verdict": "leaks"', '"verdict": "no leak shown"', 1))
    done = call("verify", run)
    assert done.returncode == 1
    assert "was altered, or is not a dossier (its bytes are not those that were written)" in done.stderr


def test_a_forged_dossier_differs_even_with_a_new_seal(run: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content.update(verdict="no leak shown")
        content["answer"].pop(0)
        content["results"][0]["worst"].update(value=1.0)
        content["accuracy"].update(accuracy=None)
        content["results"].pop()
        content["notes"].append("all is well")

    last_result = len(read_dossier(run)["results"]) - 1
    forge(run, change)
    differences = [value.where for value in fedsim.verify_dossier(run).differences]
    forged = "verdict", "answer.0", "results.0.worst.value", "accuracy.accuracy", f"results.{last_result}", "notes.0"
    for where in forged:
        assert any(name.startswith(where) for name in differences), where


def test_scores_that_were_changed_with_manifest_and_dossier_do_not_follow_from_the_findings(run: Path) -> None:
    rewrite(run / "scores.csv", lambda row: row | ({"value": "1.0"} if row["metric"] == "psnr" else {}))
    reseal(run, "scores.csv")
    fedsim.write_dossier(run)
    verification = fedsim.verify_dossier(run)
    assert not [value for value in verification.contents if value.state == "differs"]
    assert len([value for value in verification.scores if value.state == "differs"]) == 5


def test_scores_that_were_taken_out_are_missed(run: Path) -> None:
    rewrite(run / "scores.csv", lambda row: None if row["victim"] == "2" else row)
    reseal(run, "scores.csv")
    fedsim.write_dossier(run)
    differences = fedsim.verify_dossier(run).differences
    assert {"analytic, client 2, round 1, psnr", "analytic, client 2, round 1, exact"} <= {
        value.where for value in differences
    }


def test_an_epsilon_that_was_changed_is_not_what_the_accountant_composes(defended_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(defended_run, tmp_path / "defended"))
    rewrite(run / "ledger.csv", lambda row: row | {"epsilon": "0.1"})
    reseal(run, "ledger.csv")
    assert fedsim.write_dossier(run).contents.proofs[0].epsilon == 0.1
    differences = fedsim.verify_dossier(run).differences
    assert len(differences) == len(fedsim.open(run).ledger)


def test_a_run_that_is_not_as_it_was_written_gives_no_verdict(run: Path, call: Call) -> None:
    (run / "scores.csv").write_text((run / "scores.csv").read_text().replace("psnr", "ssim"))
    done = call("dossier", run, "--fail-if", "undecided")
    assert done.returncode == 1
    assert "files of the run were changed" in done.stderr
    content = read_dossier(run)
    assert content["verdict"] == "nothing can be said"
    assert content["answer"][0] == "This is not the run that was written, so nothing below can be relied on."
    # A quiet threshold does not pass either.
    [judged] = fedsim.write_dossier(run, fail_if=["leaks"]).contents.thresholds
    assert judged.outcome == "cannot be decided"


def test_without_the_data_scores_are_not_judged_again_and_it_is_said_why(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsim.data.digits import Digits

    def lose(self: Digits, folder: Path | None) -> None:
        raise fedsim.errors.DataError("digits: not found; download them")

    monkeypatch.setattr(Digits, "load", lose)
    verification = fedsim.verify_dossier(run)
    assert verification.differences == []
    assert {value.state for value in verification.scores} == {"cannot be recomputed"}
    assert [fault.partition(":")[0] for fault in verification.faults] == ["no score was recomputed"]
    assert {value.why for value in verification.scores} == {
        "analytic, round 1, client 0: not scored: digits: not found; download them"
    }


def test_a_signed_dossier_takes_its_key(tmp_path: Path, original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, other_key = tmp_path / "key", tmp_path / "other"
    key.write_bytes(b"a secret of sixteen bytes")
    other_key.write_bytes(b"another secret of sixteen")
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    run = fedsim.run(RUN | {"adversary": {"when": "never"}}, tmp_path / "signed").path
    fedsim.write_dossier(run)
    assert "signed with this key" in read_dossier(run)["evidence"]["integrity"]
    assert fedsim.verify_dossier(run).is_signed
    monkeypatch.delenv(KEY_VARIABLE)
    assert any("its signature was not checked" in remark for remark in fedsim.verify_dossier(run).remarks)
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    # Who has no key cannot forge it, nor leave the signature out.
    for secret in (other_key.read_bytes(), None):
        forge(run, lambda content: content.update(answer=["All is well."]), secret)
        with pytest.raises(RunError, match="is not signed"):
            fedsim.verify_dossier(run)


def test_a_run_without_attacks_says_what_is_not_known(tmp_path: Path, call: Call) -> None:
    folder = run_serial(make_tiny_config(), tmp_path / "trained").path
    done = call("dossier", folder, "--fail-if", "leaks")
    assert done.returncode == 1
    assert "--fail-if 'leaks': cannot be decided: nothing that can be relied on was scored" in done.stderr
    content = read_dossier(folder)
    assert content["verdict"] == "nothing can be said"
    assert content["answer"][0] == "No attack left a finding, so it is unknown what the messages leak."
    assert not any(observer["is_examined"] for observer in content["observers"])
    assert call("verify", folder).returncode == 0


def test_findings_of_a_recording_whose_truth_nobody_knows_say_so(run: Path, tmp_path: Path, call: Call) -> None:
    shutil.copytree(run / "transcript", tmp_path / "app" / "transcript")
    (tmp_path / "attack.toml").write_text('[adversary]\nworkers = 1\n[[attack]]\nname = "shared-model"\n')
    done = call("attack", tmp_path / "app", tmp_path / "attack.toml", "-q")
    dossier = fedsim.write_dossier(tmp_path / "app").contents
    assert dossier.verdict == "nothing can be said", done.stderr
    assert dossier.answer[0].startswith("There are no scores (1 finding), for example because the clients' data are")
    assert dossier.no_proof.startswith("There are no known guarantees: it was recorded elsewhere")
    assert dossier.observers[0].is_examined
    assert fedsim.verify_dossier(tmp_path / "app").differences == []


def test_a_folder_without_a_run_is_refused(tmp_path: Path, call: Call) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = call("dossier", tmp_path)
    assert done.returncode == 2
    assert "holds neither a run nor a sweep of fedsim" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert "no such folder" in call("dossier", tmp_path / "gone").stderr
    assert "no such dossier; `fedsim dossier RUN` writes one" in call("verify", tmp_path).stderr


def test_what_is_no_dossier_is_refused(run: Path) -> None:
    for text in ("{}", "[]", "no JSON", '{"seal": {}, "dossier": {}}'):
        (run / "dossier.json").write_text(text)
        with pytest.raises(RunError, match="was altered, or is not a dossier"):
            fedsim.verify_dossier(run)
    fedsim.write_dossier(run)
    forge(run, lambda content: content.update(format=2))
    with pytest.raises(RunError, match=r"is not a dossier of this fedsim \(dossier.format"):
        fedsim.verify_dossier(run)


def test_a_past_day_of_examination_is_refused(run: Path, call: Call) -> None:
    before = (run / "dossier.json").read_bytes()
    done = call("dossier", run, "--review-by", "2020-01-02")
    assert done.returncode == 2
    assert "2020-01-02 is past, so the dossier would not be valid; name a later day" in done.stderr
    assert (run / "dossier.json").read_bytes() == before
    assert fedsim.write_dossier(run, review_by=datetime.date.today()).contents.review_by == datetime.date.today()


def test_a_dossier_past_its_day_fails(run: Path, call: Call) -> None:
    dossier = fedsim.write_dossier(run, review_by=datetime.date.today()).contents
    day = datetime.date(2020, 1, 2)
    past = dossier.model_copy(update={"review_by": day, "validity": describe_validity(day)})
    write_dossier_files(past, run)
    done = call("verify", run)
    assert done.returncode == 1
    assert done.stderr.endswith("had to be examined again by 2020-01-02, so the dossier is no longer valid\n")


@pytest.mark.parametrize("name", ["dossier.html", pytest.param("dossier.junit.xml", marks=pytest.mark.thorough)])
def test_a_page_or_test_result_that_was_forged_differs(run: Path, name: str) -> None:
    fedsim.write_dossier(run, fail_if=["leaks"])
    file = run / name
    file.write_text(file.read_text().replace("leaks", "no leak shown"))
    assert [value.where for value in fedsim.verify_dossier(run).differences] == [name]
    # One that is gone is no proof of anything, and is said to be gone.
    file.unlink()
    [value] = [value for value in fedsim.verify_dossier(run).files if value.state != "equal"]
    assert (value.state, value.why) == (
        "cannot be recomputed",
        f"{name} is not next to dossier.json, so its contents are unknown",
    )


@pytest.mark.thorough
def test_a_test_result_without_thresholds_differs(run: Path) -> None:
    fedsim.write_dossier(run)
    (run / "dossier.junit.xml").write_text("<testsuite failures='0'/>")
    assert [value.where for value in fedsim.verify_dossier(run).differences] == ["dossier.junit.xml"]


def test_each_column_of_a_score_that_was_changed_differs(run: Path) -> None:
    forged = {
        "floor_guess": "some guess",
        "higher_is_better": "False",
        "examples": "200",
        "nearest_public": "50.0",
        "ceiling": "60.0",
        "missing": "it was too small",
        "granted": "labels",
        "instrument": "a ruler",
        "settings": "{}  ",
    }
    is_forged = {"metric": "psnr", "victim": "2"}
    rewrite(run / "scores.csv", lambda row: row | forged if is_forged.items() <= row.items() else row)
    reported = open_reported_run(OpenRun(run))
    differences = [value.where for value in judge_findings_again(reported) if value.state == "differs"]
    assert sorted(differences) == sorted(f"analytic, client 2, round 1, psnr, {column}" for column in forged)


def test_what_an_attack_is_known_to_lack_depends_on_who_asked_for_it(original: Path) -> None:
    reported = open_reported_run(OpenRun(original))
    findings = read_finding_facts(reported)
    assert list_missing_attacks(reported, findings) == []
    # The run's own file asked for client 2.
    [missing] = list_missing_attacks(reported, [about for about in findings if about["victim"] != 2])
    assert missing.is_failure
    assert missing.why.startswith("it was requested, but there is no finding for client 2 (round 1); see log.txt")
    # Nobody asked a further attack for other clients than its own.
    further = findings[0] | {"title": "sme", "attack": "sme", "victim": 5, "command": "fedsim attack RUN more.toml"}
    missing_by_attack = {missing.attack: missing for missing in list_missing_attacks(reported, [*findings, further])}
    assert not missing_by_attack["analytic"].is_failure
    assert missing_by_attack["analytic"].why == "it was not run on client 5"
    # The same command made another attack of client 4.
    further_dlg = further | {"title": "dlg", "attack": "dlg", "victim": 4}
    every = list_missing_attacks(reported, [*findings, further, further_dlg])
    assert {(missing.attack, missing.why.partition(";")[0]) for missing in every if missing.is_failure} >= {
        ("sme", "it was requested, but there is no finding for client 4 (round 1)")
    }


def test_a_round_that_an_attack_failed_in_is_missed(original: Path) -> None:
    reported = open_reported_run(OpenRun(original))
    adversary = reported.audit.spec.adversary.model_copy(update={"rounds": [1, 2]})
    spec = reported.audit.spec.model_copy(update={"adversary": adversary})
    reported = replace(reported, audit=replace(reported.audit, spec=spec))
    [missing] = list_missing_attacks(reported, read_finding_facts(reported))
    assert (missing.attack, missing.is_failure) == ("analytic", True)
    assert "client 0 (round 2)" in missing.why


def test_a_finding_without_a_score_is_missed(run: Path) -> None:
    rewrite(run / "scores.csv", lambda row: None if row["victim"] == "2" else row)
    reported = open_reported_run(OpenRun(run))
    [missing] = list_missing_attacks(reported, read_finding_facts(reported))
    assert (missing.is_failure, missing.why) == (
        True,
        "its finding for client 2 (round 1) has no score, so it is unknown whether it is right",
    )


def test_scores_of_an_attack_file_are_judged_again_with_that_file(run: Path, tmp_path: Path, call: Call) -> None:
    app = tmp_path / "recording" / "run-1"
    shutil.copytree(run / "transcript", app / "transcript")
    truth = open_audit(run, None).case.truth(0, 1)
    assert truth is not None
    save_file({"data": truth.data, "labels": truth.labels}, tmp_path / "zero.safetensors")
    (tmp_path / "net_of_dossier.py").write_text(NET)
    (tmp_path / "attack.toml").write_text(ATTACK_FILE)
    call("attack", app, tmp_path / "attack.toml", "-q")
    contents = fedsim.write_dossier(app).contents
    # The pitfalls are those of the attack file.
    pitfalls = [pitfall.title for pitfall in fedsim.lint(tmp_path / "attack.toml")]
    assert "fresh weights only: attacks see round 1 alone" in pitfalls
    assert [caution.title for caution in contents.cautions] == pitfalls
    done = call("verify", app)
    assert done.returncode == 1
    assert done.stdout.startswith("result: no score was recomputed: the run does not say where the clients' data are")
    done = call("verify", app.parent, "--attack", tmp_path / "attack.toml")
    assert done.returncode == 0, done.stderr
    rewrite(app / "scores.csv", lambda row: row | ({"value": "1.0"} if row["metric"] == "psnr" else {}))
    reseal(app, "scores.csv")
    fedsim.write_dossier(app)
    done = call("verify", app, "--attack", tmp_path / "attack.toml")
    assert done.returncode == 1
    assert "differs from the run: analytic, client 0, round 1, psnr, value is stated as 1.0" in done.stderr


def test_of_a_recorded_app_the_accuracy_that_clients_reported_is_quoted(run: Path, tmp_path: Path) -> None:
    app = tmp_path / "app"
    shutil.copytree(run / "transcript", app / "transcript")
    nobody = fedsim.write_dossier(app).contents
    assert nobody.accuracy is not None
    assert nobody.accuracy.sentence == (
        "The recording does not show the accuracy of the model; see the app's own evaluation, if it has one."
    )
    assert nobody.no_cautions == "Nothing was attacked, so the attacks were not checked for pitfalls."
    replies = []
    for client, accuracy in enumerate((0.2, 0.0)):
        metrics = {"metrics": {"num-examples": 20, "accuracy": accuracy}}
        replies.append(RecordedMessage(node=client, client=client, metrics=metrics))
    evaluation = RecordedExchange(number=1, kind="evaluate", round=2, recorded_as=0, sent=[], replies=replies)
    write_messages(app / "messages", evaluation)
    contents = fedsim.write_dossier(app, fail_if=["accuracy<0.5"]).contents
    assert contents.accuracy is not None
    assert (contents.accuracy.accuracy, contents.accuracy.examples) == (pytest.approx(0.1), 40)
    sentence = "As 2 clients reported in round 2, the model's accuracy on their 40 examples is 10.0 %."
    assert contents.accuracy.sentence == sentence
    assert sentence in contents.answer
    assert contents.accuracy.no_learning.startswith("The model has not learnt: the accuracy that its clients reported")
    assert contents.accuracy.no_learning.endswith(
        "is not beyond the 10.0 % that guessing among the 10 outputs of the model gets."
    )
    # Without a manifest nothing is decided.
    assert [(item.observed, item.outcome) for item in contents.thresholds] == [
        (pytest.approx(0.1), "cannot be decided")
    ]


def test_a_run_without_its_manifest_is_said_to_be_so_in_whole_sentences(run: Path, call: Call) -> None:
    (run / "manifest.json").unlink()
    fedsim.write_dossier(run)
    assert fedsim.verify_dossier(run).remarks[0] == (
        "manifest.json: is not there, so nothing proves the run whole; it was removed, or the run never began."
    )
