"""What was changed after it was written is named, and exits with code 1."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation import local_models
from fedsim.audit.finding_files import load_finding, save_finding
from fedsim.base.errors import ConfigError, RunError
from fedsim.federation import lock
from fedsim.federation.config import Config
from fedsim.federation.integrity import Verdict, compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_rows
from fedsim.federation.states import TrainingStates
from fedsim.interfaces.findings import LocalModel
from fedsim.recording import manifest
from fedsim.recording.recorder import Recorder
from fedsim.recording.wire_format import Update
from tests.support.commands import call_fedsim
from tests.support.experiments import run_serial
from tests.support.recordings import build_update

Run = Callable[..., OpenRun]
Tiny = Callable[..., Config]
Call = Callable[..., subprocess.CompletedProcess[str]]
FILE = """
[partition]
samples_per_client = 6
[model]
name = "linear"
[training]
local_epochs = 1
batch_size = 6
[federation]
engine = "serial"
seed = 3
clients = 3
rounds = 3
[adversary]
workers = 1
rounds = [1, 2]
[[attack]]
name = "shared-model"
"""


@pytest.fixture(scope="module", autouse=True)
def shortest_explanations() -> Iterator[None]:
    """How good the finding is, which takes the longest to judge, matters to no test here."""
    with pytest.MonkeyPatch.context() as patch:
        for name, count in {"REFERENCES": 2, "DRAWS": 1}.items():
            patch.setattr(local_models, name, count)
        yield


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The exit code, and all that was printed."""
    monkeypatch.setenv("FEDSIM_KEY", "")

    def run(*words: str | Path) -> tuple[int, str]:
        done = call_fedsim(*words, capfd=capfd)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("made")
    (home / "x.toml").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSIM_KEY", "")
        assert not call_fedsim("run", home / "x.toml", "--out", home / "run").returncode
    return home / "run"


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def test_an_untouched_run_is_intact_and_the_report_quotes_its_id(
    run: Path, call: Callable[..., tuple[int, str]]
) -> None:
    code, said = call("inspect", run)
    noted = manifest.ManifestFile(run).contents
    assert noted is not None
    assert code == 0, said
    assert f"run {noted.run}: 3 rounds and" in said
    assert "unsigned" in said
    assert noted.seed == 3
    assert len([name for name in noted.files if name.startswith("findings/")]) == 1
    assert {"scores.csv", "image-scores.csv", "metrics.csv", "checkpoint.safetensors"} <= set(noted.files)
    assert f"run {noted.run}" in (run / "report.html").read_text()


def other_seed(run: Path) -> None:
    config = OpenRun(run).read_experiment()
    assert config is not None
    federation = config.federation.model_copy(update={"seed": 4})
    run_serial(config.model_copy(update={"federation": federation}), run.parent / "other")
    name = "transcript/round-000002.safetensors"
    shutil.copy(run.parent / "other" / name, run / name)


def noise(run: Path) -> None:
    path = next((run / "findings").glob("*/*.safetensors"))
    finding, about = load_finding(path)
    finding.state[next(iter(finding.state))].add_(torch.ones(()))  # type: ignore[union-attr]
    save_finding(finding, path, about)


def edited(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new, 1))

    return edit


def better_scores(run: Path) -> None:
    with (run / "scores.csv").open() as file:
        rows = list(csv.reader(file))
    rows[1][5] = "99"
    (run / "scores.csv").write_text("\n".join(map(",".join, rows)))


def added(run: Path) -> None:
    path = next((run / "findings").glob("*/*.safetensors"))
    shutil.copy(path, path.with_name("round-3-client-0-repeat-0.safetensors"))


def forged(run: Path) -> None:
    text = (run / "manifest.json").read_text()
    (run / "manifest.json").write_text(text.replace('"seed": 3', '"seed": 5'))


def copied_checkpoint(run: Path) -> None:
    other_seed(run)
    shutil.copy(run.parent / "other" / "checkpoint.safetensors", run / "checkpoint.safetensors")


def write_text_into(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("round,client\n")


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (lambda run: (run / "transcript/round-000002.safetensors").unlink(), "round 2 is missing"),
    (lambda run: shutil.rmtree(run / "transcript"), "holds no recording"),
    (other_seed, "round 2 is not what was recorded"),
    (
        lambda run: (run / "transcript/round-000003.safetensors").rename(run / "transcript/round-000004.safetensors"),
        "round 3 is missing",
    ),
    (better_scores, "scores.csv is not what was written"),
    (lambda run: (run / "metrics.csv").write_text("round,client\n"), "metrics.csv is not what was written"),
    (lambda run: (run / "image-scores.csv").unlink(), "image-scores.csv is missing"),
    (noise, "repeat-0.safetensors is not what was written"),
    (added, "round-3-client-0-repeat-0.safetensors is there, though manifest.json does not name it"),
    (edited("experiment.toml", "learning_rate = 0.01", "learning_rate = 0.5"), "says training.learning_rate = 0.5"),
    (copied_checkpoint, "checkpoint.safetensors is not what was written"),
    (lambda run: (run / "scores.csv").unlink(), "scores.csv is missing"),
    (
        lambda run: write_text_into(run / "messages/exchange-000001.safetensors"),
        "messages/exchange-000001.safetensors is there, though manifest.json does not name it",
    ),
    (
        lambda run: write_text_into(run / "geometry.csv"),
        "geometry.csv is there, though manifest.json does not name it",
    ),
    (forged, "manifest.json: was altered"),
    (lambda run: (run / "manifest.json").unlink(), "manifest.json: is not there, so nothing proves the run whole"),
]


IN_FAST_SUITE = ("round 2 is missing", "scores.csv is not", "repeat-0.safetensors is not", "learning_rate", "altered")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param(
            *case, id=case[1], marks=() if any(part in case[1] for part in IN_FAST_SUITE) else pytest.mark.thorough
        )
        for case in CHANGES
    ],
)
def test_inspect_names_what_was_changed(
    change: Callable[[Path], None], sentence: str, run: Path, call: Callable[..., tuple[int, str]]
) -> None:
    change(run)
    code, said = call("inspect", run)
    assert code == 1, said
    assert sentence in said
    assert "intact" not in said
    assert call("report", run)[0] == 1
    if "no recording" not in sentence:
        assert sentence in (run / "report.html").read_text().replace("&#39;", "'")


@pytest.mark.parametrize(
    ("command", "name"),
    [(["geometry"], "geometry.csv"), (["expose", "--measure", "gradient-norm"], "exposure/exposure.csv")],
)
def test_what_other_commands_write_into_a_run_is_noted_too(
    command: list[str], name: str, run: Path, call: Callable[..., tuple[int, str]]
) -> None:
    code, said = call(command[0], run, *command[1:])
    assert code == 0, said
    code, said = call("inspect", run)
    assert code == 0, said
    text = (run / name).read_text()
    (run / name).write_text(text[:-2] + ("1" if text[-2] != "1" else "2") + "\n")
    code, said = call("inspect", run)
    assert (code, f"{name} is not what was written" in said) == (1, True), said


def test_a_file_of_the_users_own_is_told_and_is_no_damage(run: Path, call: Callable[..., tuple[int, str]]) -> None:
    (run / "notes.txt").write_text("mine")
    code, said = call("inspect", run)
    assert code == 0
    assert "notes.txt: not written by fedsim, and not used" in said


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("learning_rate = 0.01", "learning_rate = 0.5", "training.learning_rate"),
        ("seed = 3", "seed = 4", "federation.seed"),
        ("rounds = 3", "rounds = 2", "federation.rounds"),
    ],
)
def test_a_run_does_not_go_on_with_other_settings(
    old: str, new: str, key: str, run: Path, call: Callable[..., tuple[int, str]]
) -> None:
    edited("experiment.toml", old, new)(run)
    code, said = call("run", "--resume", run)
    assert code == 2
    assert f"experiment.toml: {key}: the run was made with {old.split()[-1]}, but now it says {new.split()[-1]}" in said


def test_a_run_goes_on_for_more_rounds_and_is_what_was_written(run: Path, call: Callable[..., tuple[int, str]]) -> None:
    edited("experiment.toml", "rounds = 3", "rounds = 4")(run)
    assert call("run", "--resume", run)[0] == 0
    code, said = call("inspect", run)
    assert code == 0, said
    assert "4 rounds" in said


def test_a_replaced_finding_is_not_taken_for_done(run: Path, call: Callable[..., tuple[int, str]]) -> None:
    noise(run)
    code, said = call("attack", run)
    assert code == 0
    assert "was changed, so the attack runs again" in " ".join(said.split())
    assert call("inspect", run)[0] == 0


def test_a_finding_that_the_manifest_does_not_name_is_not_scored(
    run: Path, call: Callable[..., tuple[int, str]]
) -> None:
    added(run)
    code, said = call("attack", run)
    assert (code, "round-3-client-0-repeat-0.safetensors: is not what this run found" in said) == (1, True), said
    assert {row["round"] for row in read_rows(run / "scores.csv")} == {"1-2"}


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "metrics.csv"])
def test_a_run_does_not_go_on_from_what_it_did_not_write(
    name: str, run: Path, call: Callable[..., tuple[int, str]]
) -> None:
    edited("experiment.toml", "rounds = 3", "rounds = 4")(run)
    if name == "metrics.csv":
        edited(name, "1,server", "1,somebody")(run)
    else:
        copied_checkpoint(run)
    code, said = call("run", "--resume", run)
    assert (code, f"{name}: is not what this run wrote" in said) == (1, True), said
    assert not (run / "transcript/round-000004.safetensors").exists()


def test_a_writer_killed_between_announcing_and_writing_leaves_a_run_that_is_intact(
    run: Path, call: Callable[..., tuple[int, str]]
) -> None:
    OpenRun(run).manifest.announce(run / "checkpoint.safetensors", "0" * 64)
    assert call("inspect", run)[0] == 0
    edited("experiment.toml", "rounds = 3", "rounds = 4")(run)
    assert call("run", "--resume", run)[0] == 0
    assert call("inspect", run)[0] == 0


@pytest.mark.parametrize("name", ["metrics.csv", "checkpoint.safetensors"])
def test_what_was_right_a_round_before_is_right_no_more(
    name: str, run: Path, tmp_path: Path, call: Callable[..., tuple[int, str]]
) -> None:
    config = OpenRun(run).read_experiment()
    assert config is not None
    federation = config.federation.model_copy(update={"rounds": 2})
    shorter = run_serial(config.model_copy(update={"federation": federation}), tmp_path / "shorter")
    shutil.copy(shorter.path / name, run / name)
    code, said = call("inspect", run)
    assert (code, f"{name} is not what was written" in said) == (1, True), said


class Killed(BaseException):
    """Like a signal: nothing catches it."""


def test_an_overwriting_that_was_killed_can_be_begun_again(
    run: Path, tmp_path: Path, call: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.toml").write_text(FILE)
    real = shutil.rmtree

    def killed(path: Path, **settings: bool) -> None:
        if Path(path).name == "transcript":
            raise Killed
        real(path, **settings)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr("fedsim.federation.open_run.shutil.rmtree", killed)
        with pytest.raises(Killed):
            call("run", tmp_path / "x.toml", "--out", run, "--overwrite")
    assert call("run", tmp_path / "x.toml", "--out", run, "--overwrite")[0] == 0


def test_a_recording_copied_without_its_manifest_gets_one_that_says_it_came_late(
    run: Path, call: Callable[..., tuple[int, str]]
) -> None:
    (run / "manifest.json").unlink()
    code, said = call("attack", run)
    assert code == 0, said
    code, said = call("inspect", run)
    assert (code, "manifest.json was begun late" in said) == (0, True), said
    (run / "transcript/round-000002.safetensors").unlink()
    code, said = call("inspect", run)
    assert (code, "round 2 is missing" in said) == (1, True)


def test_a_key_does_not_vouch_for_a_recording_without_a_manifest(
    run: Path, tmp_path: Path, call: Callable[..., tuple[int, str]]
) -> None:
    (run / "manifest.json").unlink()
    (tmp_path / "key").write_bytes(b"k" * 32)
    code, said = call("attack", run, "--key", tmp_path / "key")
    assert (code, "was begun without a key" in said) == (2, True)


def test_a_changed_state_is_named(run: Path) -> None:
    states = TrainingStates(run / "states")
    states.save_state("round-1", {"w": torch.zeros(2)}, {"experiment": {}}, {})
    assert compare_with_manifest(OpenRun(run)).differences == []
    shutil.copy(run / "checkpoint.safetensors", states.path("round-1"))
    assert compare_with_manifest(OpenRun(run)).differences == [
        "states/round-1.safetensors is missing, or not what was written"
    ]
    (run / "states" / "manifest.json").write_text("{}")
    assert compare_with_manifest(OpenRun(run)).differences == ["states/manifest.json is not what was written"]


def test_an_optimum_that_the_run_did_not_find_is_found_anew(run: Path) -> None:
    audit = open_audit(run, None)
    own = audit.optimum(0)
    (path,) = (run / "optima").glob("*/client-0.safetensors")
    assert compare_with_manifest(OpenRun(run)).differences == []
    save_finding(LocalModel(state={name: tensor + 1 for name, tensor in own.items()}), path, {"client": 0})
    assert "client-0.safetensors is not what was written" in compare_with_manifest(OpenRun(run)).text
    again = audit.optimum(0)
    assert all(torch.equal(again[name], own[name]) for name in own)
    assert compare_with_manifest(OpenRun(run)).differences == []


def test_a_run_is_held_from_its_first_round_to_its_report(
    tmp_path: Path, call: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    acquired, real = list[Path](), lock._acquire_lock
    monkeypatch.setattr(lock, "_acquire_lock", lambda folder, wait: acquired.append(folder) or real(folder, wait))
    (tmp_path / "x.toml").write_text(FILE.replace("rounds = 3", "rounds = 2"))
    assert call("run", tmp_path / "x.toml", "--out", tmp_path / "run")[0] == 0
    assert acquired == [(tmp_path / "run").resolve()]


def test_a_signed_manifest_tells_who_knows_the_key(
    tmp_path: Path, call: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.toml").write_text(FILE.replace("rounds = 3", "rounds = 1").replace("[1, 2]", "[1]"))
    key, other, run = tmp_path / "key", tmp_path / "other", tmp_path / "run"
    key.write_bytes(b"k" * 32)
    other.write_bytes(b"o" * 32)
    assert call("run", tmp_path / "x.toml", "--out", run, "--key", key)[0] == 0
    code, said = call("inspect", run, "--key", key)
    assert (code, "signed with this key" in said) == (0, True), said
    shutil.copytree(run, tmp_path / "defended")  # signed with this key, too, and not what that folder should be
    code, said = call("inspect", tmp_path / "defended", "--key", key)
    assert (code, "the signature is for the run 'run', but this folder is called 'defended'" in said) == (1, True), said
    code, said = call("inspect", run, "--key", other)
    assert (code, "it is not signed with this key" in said) == (1, True)
    monkeypatch.setenv("FEDSIM_KEY", "")
    code, said = call("inspect", run)
    assert (code, "signed, with a key that was not given" in said) == (0, True)
    code, said = call("attack", run)
    assert (code, "give --key FILE" in said) == (2, True)
    # Made again by somebody without the key: plain inspection passes, the one with the key does not.
    noted = manifest.ManifestFile(run).contents
    assert noted is not None
    noted.seed = 77
    (run / "manifest.json").unlink()
    manifest.ManifestFile(run)._write(noted, durable=False)
    code, said = call("inspect", run, "--key", key)
    assert (code, "is not signed" in said) == (1, True)
    code, said = call("attack", run, "--key", key)
    assert (code, "was begun without a key" in said) == (2, True)


def test_a_key_that_is_none_is_one_sentence(run: Path, tmp_path: Path, call: Callable[..., tuple[int, str]]) -> None:
    (tmp_path / "short").write_bytes(b"short")
    assert "expected a secret of 16 bytes or more, got 5" in call("inspect", run, "--key", tmp_path / "short")[1]
    code, said = call("inspect", run, "--key", tmp_path / "none")
    assert (code, "cannot be read (No such file" in said) == (2, True)


def an_update(number: int) -> Update:
    state = {"w": torch.full((2,), float(number))}
    return build_update(state, state, round=number)


def test_a_recording_made_elsewhere_has_a_manifest_too(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "app" / "transcript")
    for number in (1, 2, 3):
        recorder.write(number, [an_update(number)])
    assert compare_with_manifest(OpenRun(tmp_path / "app")).differences == []
    assert compare_with_manifest(OpenRun(tmp_path / "app" / "transcript")).differences == []
    (tmp_path / "app" / "transcript" / "round-000002.safetensors").unlink()
    assert compare_with_manifest(OpenRun(tmp_path / "app")).differences == ["round 2 is missing"]


def test_a_bare_folder_of_rounds_says_that_nothing_vouches_for_it(tmp_path: Path) -> None:
    Recorder(tmp_path).write(1, [an_update(1)])
    verdict = compare_with_manifest(OpenRun(tmp_path))
    assert verdict.differences == []
    assert "no manifest.json is there" in verdict.text


def test_the_chain_follows_from_all_rounds_in_their_order(tmp_path: Path) -> None:
    one, other = manifest.Manifest(), manifest.Manifest()
    for number in (1, 2, 3):
        one.add_round(number, str(number) * 64)
    for number in (1, 3, 2):
        other.add_round(number, str(number) * 64)
    assert one.chain == other.chain == manifest.chain_hash(one.rounds)
    other.add_round(2, "4" * 64)
    assert one.chain != other.chain


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"seal": 1, "manifest": {}}',
        '{"seal": {"sha256": "x"}, "manifest": {"rounds": {"x": 1}}}',
        "{" * 9999,
    ],
)
def test_a_broken_manifest_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(RunError, match=r"manifest\.json: was altered") as caught:
        _ = manifest.ManifestFile(tmp_path).contents
    assert "\n" not in str(caught.value)


def test_what_a_round_costs_does_not_grow_with_what_it_does_not_change(tmp_path: Path) -> None:
    """The file of one round is not read again for the next."""
    recorder = Recorder(tmp_path / "app" / "transcript")
    recorder.write(1, [an_update(1)])
    (tmp_path / "app" / "transcript" / "round-000001.safetensors").chmod(0)
    (tmp_path / "app" / "transcript" / "round-000001.safetensors").write_bytes(b"")
    recorder.write(2, [an_update(2)])
    noted = json.loads((tmp_path / "app" / "manifest.json").read_text())["manifest"]
    assert list(noted["rounds"]) == ["1", "2"]


def test_an_edited_seed_is_not_scored_against_other_data(run: Path, call: Callable[..., tuple[int, str]]) -> None:
    edited("experiment.toml", "seed = 3", "seed = 4")(run)
    with pytest.raises(ConfigError, match=r"federation\.seed: the run was made with 3"):
        OpenRun(run).read_experiment()
    assert call("attack", run)[0] == 2


def test_one_round_and_one_file_are_counted_in_the_singular() -> None:
    noted = SimpleNamespace(run="0a1b", rounds={1: "hash"}, files={"scores.csv": "hash"})
    verdict = Verdict(manifest=noted, differences=[], remark="unsigned")  # type: ignore[arg-type]
    assert verdict.text == "run 0a1b: 1 round and 1 file match manifest.json, unsigned"
