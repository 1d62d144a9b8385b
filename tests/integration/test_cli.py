"""The program as users start it: a process, its exit code, and what it says."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from fedsim.audit.finding_files import load_finding
from fedsim.federation.run_folder import read_rows
from fedsim.recording.messages import RecordedExchange, RecordedMessage, write_messages
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.wire_format import Update
from tests.support.commands import Call
from tests.support.experiments import IMAGE_METRICS
from tests.support.forks import ForkedCommand
from tests.support.processes import wait_until
from tests.support.recordings import build_update
from tests.support.shared import make_once

FILE = """
[partition]
samples_per_client = 6

[model]
name = "mlp"
hidden = [16]

[training]
local_epochs = 1
batch_size = 6
learning_rate = 0.1

[federation]
engine = "serial"
seed = 3
clients = 3
rounds = 2

[adversary]
victims = [0]
rounds = [1, 2]
workers = 1

[[attack]]
name = "sme"
iterations = 4
"""


def own(stderr: str) -> str:
    """Without the leaks that torch's Triton counts, now and then, when a process ends."""
    return stderr.split("nanobind: leaked")[0]


def fedsim(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [str(Path(sys.executable).with_name("fedsim")), *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | {"COLUMNS": "200"},
    )
    return subprocess.CompletedProcess(result.args, result.returncode, result.stdout, own(result.stderr))


def complains(result: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line of an error; see `complaints`."""
    lines = complaints(result, code)
    assert len(lines) == 1, result.stderr
    return lines[0]


def complaints(result: subprocess.CompletedProcess[str], code: int) -> list[str]:
    """The lines of errors; there is no traceback and nothing else on stderr."""
    assert result.returncode == code, result.stdout + result.stderr
    lines = result.stderr.strip().splitlines()
    assert all(line.startswith("fedsim: ") for line in lines), result.stderr
    assert "Traceback" not in result.stdout
    return [line.removeprefix("fedsim: ") for line in lines]


def run_tiny(home: Path) -> None:
    """`fedsim run`, which leaves its results in runs/tiny, and in said.json what it said."""
    (home / "tiny.toml").write_text(FILE)
    done = ForkedCommand("run", "tiny.toml", folder=home, before=lambda: os.chdir(home)).finish()
    (home / "said.json").write_text(json.dumps(done))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment file in it, and its run."""
    return make_once(tmp_path_factory, "cli", run_tiny)


@pytest.fixture(scope="module")
def at_end(home: Path) -> subprocess.CompletedProcess[str]:
    """What the run of the file came to."""
    return subprocess.CompletedProcess([], *json.loads((home / "said.json").read_text()))


@pytest.fixture
def run(home: Path, at_end: subprocess.CompletedProcess[str], tmp_path: Path) -> Path:
    """A copy of that run to do anything to."""
    assert at_end.returncode == 0
    return Path(shutil.copytree(home / "runs" / "tiny", tmp_path / "run"))


def tensors(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for path in (run / "findings").glob("*/*.safetensors"):
        finding, _ = load_finding(path)
        found[f"{path.parent.name}/{path.name}"] = {
            "data": finding.data,
            "labels": finding.labels,
            **finding.trace,
        }
    return found


def same(one: Path, other: Path) -> bool:
    a, b = tensors(one), tensors(other)
    return (
        len(a) > 0
        and a.keys() == b.keys()
        and all(a[k].keys() == b[k].keys() and all(torch.equal(a[k][t], b[k][t]) for t in a[k]) for k in a)
    )


def test_run_leaves_everything_that_a_run_folder_holds(home: Path, at_end: subprocess.CompletedProcess[str]) -> None:
    assert at_end.returncode == 0, at_end.stderr
    assert at_end.stderr == ""
    folder = home / "runs" / "tiny"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"experiment.toml", "versions.json", "transcript", "findings", "scores.csv", "image-scores.csv"}
    assert names >= {"metrics.csv", "report.html", "log.txt"}
    assert not [name for name in names if name.endswith(".tmp")]
    rows = read_rows(folder / "scores.csv")
    assert sorted(row["metric"] for row in rows) == sorted(IMAGE_METRICS * 2)
    said = at_end.stdout
    assert "round 1/2" in said
    assert "round 2/2" in said
    assert "Scores of" in said
    assert "one victim only" in said or "of one victim" in said
    assert re.search(r"(means|k-means|mean)\s+of\s+public|mid-grey", said)
    assert f"report: {Path('runs/tiny/report.html')}" in said
    assert "round 2/2" in (folder / "log.txt").read_text()
    assert "nan" not in said.split("Scores of")[0]


def test_attacking_later_and_between_rounds_finds_the_same(call: Call, home: Path, run: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    shutil.copytree(run, later)
    shutil.rmtree(later / "findings")
    result = call("attack", later)
    assert result.returncode == 0, result.stderr
    assert same(run, later)
    between = tmp_path / "between"
    words = ("--set", "adversary.when=in-round", "--out", between)
    result = call("run", home / "tiny.toml", *words)
    assert result.returncode == 0, result.stderr
    assert "nothing new" not in result.stdout  # what was found between rounds was found by this run
    assert same(run, between)
    assert (between / "transcript" / "round-000001.safetensors").read_bytes() == (
        run / "transcript" / "round-000001.safetensors"
    ).read_bytes()


def test_attacking_with_a_file_and_overrides(call: Call, run: Path, tmp_path: Path) -> None:
    (tmp_path / "attack.toml").write_text(
        "[adversary]\nvictims = [2]\nworkers = 1\n"
        '[[attack]]\nname = "inverting-gradients"\niterations = 3\nlabel = "ig"\n'
    )
    result = call("attack", run, tmp_path / "attack.toml", "--set", "attack.ig.iterations=5")
    assert result.returncode == 0, result.stderr
    finding, about = load_finding(run / "findings" / "ig" / "round-1-client-2-repeat-0.safetensors")
    assert len(finding.trace["objective"]) == 5
    assert about["victim"] == 2
    assert {row["attack"] for row in read_rows(run / "scores.csv")} == {"sme", "ig"}


def test_attacking_twice_skips_what_is_there(call: Call, run: Path) -> None:
    result = call("attack", run)
    assert result.returncode == 0
    assert result.stdout.count("already there") == 2
    told = " ".join(result.stdout.split())
    assert "nothing new: all these findings are there already; name other clients, rounds or settings, as in " in told
    [suggested] = re.findall(r"as in fedsim attack .*? (--set '.*?')", told)
    assert suggested == "--set 'adversary.victims=[1]'"
    more = call("attack", run, *shlex.split(suggested), "--set", "adversary.rounds=[1]")
    assert more.returncode == 0, more.stderr
    assert "nothing new" not in more.stdout
    everyone = ["attack", run, "--set", "adversary.victims=all", "--set", "adversary.rounds=[1]"]
    assert "nothing new" not in call(*everyone).stdout
    assert "--set adversary.repeats=2" in " ".join(call(*everyone).stdout.split())
    assert (run / "findings" / "sme" / "round-1-client-1-repeat-0.safetensors").is_file()
    assert "nan" not in result.stdout
    assert "Scores of" in result.stdout


@pytest.mark.parametrize("given", [[], ["tiny.toml"]])
def test_an_attack_does_not_change_the_federation(given: list[str], call: Call, home: Path, run: Path) -> None:
    files = [home / name for name in given]
    sentence = complains(call("attack", run, *files, "--set", "federation.seed=4"), 2)
    assert sentence.startswith("--set federation.seed=4: the recording was made with [federation] as it was")


def test_the_folder_to_attack_is_the_one_around_the_recording(call: Call, home: Path, run: Path) -> None:
    before = sorted(run.rglob("*"))
    sentence = complains(call("attack", run / "transcript", home / "tiny.toml"), 2)
    assert sentence.endswith("transcript: is the recording in a run folder; name the folder around it")
    assert sorted(run.rglob("*")) == before


def test_a_recording_whose_rounds_lie_right_in_the_folder_is_attacked_and_reported(
    call: Call, run: Path, tmp_path: Path
) -> None:
    recording = shutil.copytree(run / "transcript", tmp_path / "recording")
    (tmp_path / "attack.toml").write_text('[adversary]\nworkers = 1\n[[attack]]\nname = "shared-model"\n')
    result = call("attack", recording, tmp_path / "attack.toml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 readable rounds" in (recording / "report.html").read_text()
    assert call("inspect", recording).returncode == 0


def test_a_refused_attack_leaves_nothing_behind(call: Call, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "transcript", tmp_path / "app" / "transcript")
    (tmp_path / "attack.toml").write_text('[[attack]]\nname = "sme"\n')
    assert call("attack", tmp_path / "app", tmp_path / "attack.toml").returncode == 2
    assert [path.name for path in (tmp_path / "app").iterdir()] == ["transcript"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scores.csv", "a,b\n1,2\n"),
        ("scores.csv", "attack,victim\nsme\n"),
        ("metrics.csv", "round,client\nx,server\n"),
        ("metrics.csv", "round,client,accuracy\n1,server,high\n"),
    ],
)
def test_an_edited_table_is_one_sentence(name: str, text: str, call: Call, run: Path) -> None:
    (run / name).write_text(text)
    assert f"{run / name}: " in complains(call("report", run), 1)


def test_a_damaged_round_fails_with_code_1_and_the_other_is_attacked(call: Call, run: Path) -> None:
    for finding in (run / "findings").glob("*/*"):
        finding.unlink()
    path = run / "transcript" / "round-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    result = call("attack", run)
    damaged, missing = complaints(result, 1)
    assert "round-000001.safetensors: is damaged" in damaged
    assert missing.endswith("findings/sme/round-1-client-0-repeat-0.safetensors is missing")
    assert [path.name for path in (run / "findings").glob("*/*.safetensors")] == [
        "round-2-client-0-repeat-0.safetensors"
    ]
    assert "Scores of" in result.stdout
    assert "report: " in result.stdout
    result = call("inspect", run, "--rows")
    damaged, missing = result.stderr.strip().splitlines()
    assert result.returncode == 1
    assert "round-000001.safetensors: is damaged" in damaged
    assert missing == "fedsim: findings/sme/round-1-client-0-repeat-0.safetensors is missing"
    assert "intact" not in result.stdout
    assert re.findall(r"│ 2 +│ (\d)", result.stdout) == ["0", "1", "2"]
    assert "is damaged" in complains(call("inspect", "--hash", run), 1)


def test_inspect_shows_replies_of_other_tensors_than_were_sent(call: Call, tmp_path: Path) -> None:
    """As from an app whose clients return a part of the model, or whose model keeps flags."""
    recorder = Recorder(tmp_path / "odd" / "transcript")
    flags = {"w": torch.zeros(2), "flag": torch.zeros(1, dtype=torch.bool)}
    moved = {"w": torch.tensor([3.0, 4.0]), "flag": torch.zeros(1, dtype=torch.bool)}
    recorder.write(1, [build_update(flags, moved, num_examples=2)])
    recorder.write(
        2,
        [build_update(flags, {"v": torch.ones(1)}, round=2, num_examples=2)],
    )
    result = call("inspect", tmp_path / "odd", "--rows")
    assert result.returncode == 0, result.stderr
    lines = [line.split("│")[-2].strip() for line in result.stdout.splitlines() if line.startswith("│")]
    assert lines == ["5", "-"]


def test_messages_without_any_update_are_shown(call: Call, tmp_path: Path) -> None:
    query = [RecordedMessage(node=node, client=node) for node in (3, 4)]
    times = [{"survival": {"times": np.linspace(0, 9, rows), "events": [1] * 5}} for rows in (12, 30)]
    replies = [RecordedMessage(node=node, client=node, arrays=held) for node, held in zip((3, 4), times, strict=True)]
    messages = RecordedExchange(number=1, kind="query.survival", round=0, recorded_as=0, sent=query, replies=replies)
    write_messages(tmp_path / "run-1" / "messages", messages)
    result = call("inspect", tmp_path, "--rows")
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "1 name with a row for each example of a client" in said
    assert "holds no recording of updates, but 1 other exchange of messages" in said


def test_inspect_counts_the_bytes_that_clients_sent(call: Call, tmp_path: Path) -> None:
    before, moved = {"w": torch.zeros(100)}, {"w": torch.arange(100.0).clamp_min(97) - 97}
    sent = Payload.from_dense(before, "weights"), Payload.from_sparse(moved)
    updates = [Update(round=1, client=c, before=before, payload=p, num_examples=2) for c, p in enumerate(sent)]
    Recorder(tmp_path / "odd" / "transcript").write(1, updates)
    result = call("inspect", tmp_path / "odd", "--rows")
    assert result.returncode == 0, result.stderr
    assert re.search(r"│ 400 +│ 0 ", result.stdout)
    assert re.search(r"│ 16 +│ 2.236 \(delta\) ", result.stdout)
    assert "416, a round 416 to 416, 416 on average" in result.stdout


def test_inspect_prints_nothing_that_a_terminal_obeys(call: Call, tmp_path: Path) -> None:
    """Whatever reasons and metrics are in a recording that somebody else made."""
    state = {"w": torch.zeros(2)}
    sent = Update(
        round=1,
        client=0,
        before=state,
        payload=Payload.from_dense(state, "weights"),
        num_examples=2,
        metrics={"\x1b[2Jloss": 1.5},
    )
    Recorder(tmp_path / "odd" / "transcript").write(1, [sent], {3: "\x1b[2Jgone"})
    result = call("inspect", tmp_path / "odd", "--rows")
    assert result.returncode == 0, result.stderr
    assert "failed: [2Jgone" in result.stdout
    assert "[2Jloss 1.5" in result.stdout
    assert "\x1b" not in result.stdout


def test_inspect_says_what_is_recorded_and_its_hash(call: Call, home: Path, run: Path) -> None:
    result = call("inspect", run)
    assert result.returncode == 0
    assert result.stdout.count("train_loss") == 0
    for told in (
        r"rounds +2, 1 to 2",
        r"clients +3, 0 to 2",
        r"updates +6, and 0 failures",
        r"N +6 to 6, 6 on average",
    ):
        assert re.search(told, result.stdout), result.stdout
    assert call("inspect", run, "--rows").stdout.count("train_loss") == 6
    assert "intact: 6 updates of 2 rounds, each verified by its SHA-256" in result.stdout
    first, again = call("inspect", "--hash", run), call("inspect", "--hash", home / "runs" / "tiny" / "transcript")
    assert re.fullmatch(r"[0-9a-f]{64}\n", first.stdout)
    assert first.stdout == again.stdout


def test_the_table_of_scores_leaves_reasons_of_doubt_to_the_answer_below_it() -> None:
    from fedsim.cli.work_shown import score_table
    from fedsim.report.verdicts import score_readings

    row = {"attack": "mine", "metric": "psnr", "variant": "", "settings": "{}", "granted": "", "round": 1}
    row |= {"missing": "", "instrument": "", "ceiling": math.nan, "nearest_public": math.nan, "higher_is_better": True}
    row |= {
        "examples": 8,
        "floor": 9.0,
        "floor_guess": "mid-grey",
        "value": 12.0,
        "doubt": "its claims are odd; claim x",
    }
    screen = Console(width=200, file=io.StringIO())
    screen.print(score_table("mine", score_readings([row | {"victim": victim} for victim in range(6)], {})))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "in doubt for 6 findings" in text
    assert "odd" not in text


def test_the_scores_in_the_terminal_carry_the_verdict_of_the_page_in_80_columns() -> None:
    from fedsim.cli.work_shown import score_table
    from fedsim.report.verdicts import score_readings

    row = {
        "attack": "aia, [x]",
        "variant": "",
        "settings": "{}",
        "granted": "",
        "round": 1,
        "missing": "",
        "instrument": "",
    }
    row |= {"ceiling": 1.0, "nearest_public": math.nan, "higher_is_better": True, "examples": 10}
    rows = [
        row | {"metric": metric, "victim": victim, "value": value, "floor": 0.5, "floor_guess": "every class as often"}
        for metric, value in (("attribute_balanced_accuracy", 0.6), ("attribute_accuracy", 0.4), ("psnr", 21.25))
        for victim in range(6)
    ]
    screen = Console(width=80, file=io.StringIO())
    screen.print(score_table("aia, [x]", score_readings(rows, {})))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert "Scores of aia, [x]" in words
    shown = ("attribute_balanced_accuracy", "(0.32 to", "0.79)", "leaks", "6 of 6", "no better", "guessing", "21.25")
    for told in shown:
        assert told in words, text
    assert "…" not in text


def test_report_is_written_anew(call: Call, run: Path) -> None:
    (run / "report.html").unlink()
    result = call("report", run)
    assert result.returncode == 0, result.stderr
    assert (run / "report.html").stat().st_size > 1000


def test_a_finding_that_cannot_be_shown_is_told_and_the_page_is_written(call: Call, run: Path) -> None:
    (run / "report.html").unlink()
    (run / "findings" / "sme" / "round-1-client-0-repeat-0.safetensors").write_bytes(b"garbage")
    sentence, changed = complaints(call("report", run), 1)
    assert changed.endswith("round-1-client-0-repeat-0.safetensors is not what was written")
    assert sentence.startswith("round-1-client-0-repeat-0.safetensors is left out: ")
    assert sentence.endswith("remove it and attack again")
    assert "round 2" in (run / "report.html").read_text()


def test_a_finished_run_is_neither_overwritten_nor_lost(call: Call, home: Path, run: Path) -> None:
    again = call("run", home / "tiny.toml", "--out", run)
    said = complains(again, 2)
    assert said == f"{run}: is not empty; choose another --out, continue with --resume, or pass --overwrite"
    stamp = (run / "transcript" / "round-000001.safetensors").stat().st_mtime_ns
    resumed = call("run", "--resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert "the run is finished: all 2 rounds are done already" in resumed.stdout
    assert (run / "transcript" / "round-000001.safetensors").stat().st_mtime_ns == stamp
    fewer = ("--set", "federation.rounds=1", "--set", "adversary.rounds=[1]")
    anew = call("run", home / "tiny.toml", "--out", run, "--overwrite", *fewer)
    assert anew.returncode == 0, anew.stderr
    assert [path.name for path in (run / "transcript").iterdir()] == ["round-000001.safetensors"]


@pytest.mark.parametrize("group", ["attacks", "defenses", "strategies", "datasets", "models"])
def test_list_begins_each_line_with_a_name(call: Call, group: str) -> None:
    from fedsim.plugins import registry

    result = call("list", group)
    assert result.returncode == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == registry.registered_names(group)  # type: ignore[arg-type]
    ours = [line for line in result.stdout.splitlines() if registry.is_builtin(group, line.split()[0])]  # type: ignore[arg-type]
    assert ours
    assert not [line for line in ours if "does not load" in line]


@pytest.mark.parametrize("width", [80, 120])
def test_on_a_terminal_a_list_fits_its_width_and_promises_stand_on_lines_of_their_own(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedsim.cli import plugins

    monkeypatch.setattr(plugins, "console", Console(width=width, force_terminal=True))
    plugins.list_plugins("defenses")
    lines = capsys.readouterr().out.splitlines()
    names = plugins.registry.registered_names("defenses")
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == names
    assert sum(line.lstrip().startswith("guarantee: ") for line in lines) == len(names)
    assert max(map(len, lines)) <= width
    assert not any("against: " in line or "costs: " in line for line in lines)
    plugins.list_plugins(None)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_an_evaluation_on_some_examples_is_said_once_and_counted(call: Call, home: Path, tmp_path: Path) -> None:
    capped = ("--set", "federation.evaluate_examples=30", "--set", "adversary.when=never", "--out", tmp_path / "capped")
    result = call("run", home / "tiny.toml", *capped, "--verbose")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the server evaluates on 30 of ") == 1
    assert {row["num_examples"] for row in read_rows(tmp_path / "capped" / "metrics.csv")} == {"30"}
    assert result.stdout.count(": returned") == 6  # verbose: a line for each client of each round


def test_list_without_a_word_lists_all_groups(call: Call) -> None:
    from fedsim.plugins import registry

    result = call("list")
    assert result.returncode == 0, result.stderr
    heads = [line for line in result.stdout.splitlines() if line.endswith(":") and " " not in line]
    assert heads == [f"{group}:" for group in registry.GROUPS]
    assert re.search(r"^sme +Zhu", result.stdout, re.MULTILINE)


def test_the_version_is_told(call: Call) -> None:
    assert re.fullmatch(r"fedsim \d+\.\d+\.\d+\S*\n", call("--version").stdout)


def test_the_shell_can_complete_commands(call: Call) -> None:
    assert "--install-completion" in call("--help").stdout


def test_quiet_prints_the_final_table_and_verbose_a_line_for_each_client(call: Call, run: Path) -> None:
    shutil.rmtree(run / "findings")
    quiet = call("attack", run, "--quiet")
    assert quiet.returncode == 0, quiet.stderr
    assert quiet.stdout.split()[:3] == ["Scores", "of", "sme"]
    assert "already there" not in call("attack", run, "-q").stdout
    assert "report:" not in quiet.stdout + quiet.stderr


def test_help_names_every_command(call: Call) -> None:
    result = fedsim("--help")
    assert result.returncode == 0
    for command in ("run", "attack", "report", "inspect", "list", "show"):
        assert re.search(rf"\b{command}\b", result.stdout)
    assert call().returncode == 2


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("reproduce", "A table such as sme/table2, or a paper such as sme; else all."),
        ("sweep", "A sweep file. [required]"),
        ("data", "A data set, or an experiment file"),
        ("list", "attacks, defenses, strategies, datasets"),
        ("new", "What to call it, such as my-attack."),
    ],
)
def test_help_says_what_arguments_are(call: Call, command: str, told: str) -> None:
    assert told in call(command, "--help").stdout


def test_help_keeps_what_stands_in_brackets(call: Call) -> None:
    assert "at the rounds and epochs in [states]" in call("train", "--help").stdout


def test_geometry_names_the_rounds_that_it_is_of(call: Call, run: Path) -> None:
    result = call("geometry", run)
    assert "3 updates, round 1 of" in result.stdout
    result = call("geometry", run, "--round", "2", "--round", "1")
    assert "6 updates, rounds 1, 2 of" in result.stdout
    said = complains(call("geometry", run, "--round", "7"), 2)
    assert said == "geometry: round 7 is not recorded; recorded: [1, 2]"


def test_a_crash_is_a_sentence_on_the_screen_and_a_traceback_in_the_log(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_crash.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedsim.interfaces.attack import Attack\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Mine(Attack):\n"
        "    'Break.'\n"
        "    def _run(self, target, progress):\n"
        "        return {}['k']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "attack.toml").write_text('[adversary]\nworkers = 1\n[[attack]]\nname = "own_crash:Mine"\n')
    result = call("attack", run, tmp_path / "attack.toml")
    where = f"{tmp_path / 'own_crash.py'}:7"
    assert (
        complains(result, 1)
        == f"own_crash:Mine, round 1, client 0: KeyError: 'k' ({where}; the traceback is in log.txt)"
    )
    assert "Traceback" not in result.stdout
    assert "Traceback" in (run / "log.txt").read_text()


def test_sys_exit_in_somebody_elses_code_is_no_success(
    call: Call, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving_model.py").write_text(
        "import sys\nclass Leaves:\n    def build(self, task):\n        sys.exit(0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("--set", "model={name='leaving_model:Leaves'}", "--out", tmp_path / "out")
    said = complains(call("run", home / "tiny.toml", *words), 2)
    assert said == "the experiment cannot be made, a plug-in ended the program (it called sys.exit(0))"


def test_no_hyperparameter_is_a_flag(call: Call) -> None:
    """They live in the experiment file; the flags are frozen here."""
    flags = {
        command: set(re.findall(r"--[a-z][a-z-]*", call(command, "--help").stdout)) - {"--help"}
        for command in ("run", "attack")
    }
    told = {"--quiet", "--verbose"}
    trusted = {"--trust", "--key"}
    assert flags["run"] == {"--app", "--set", "--out", "--resume", "--overwrite", "--data-dir"} | told | trusted
    assert flags["attack"] == {"--set", "--data-dir"} | told | trusted


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_says_how_to_go_on_and_that_works(call: Call, home: Path, tmp_path: Path) -> None:
    out = tmp_path / "cut"
    words = ["run", home / "tiny.toml", "--out", out]
    words += ["--set", "federation.rounds=4000", "--set", "adversary.when=never"]
    process = ForkedCommand(*words, folder=tmp_path)
    wait_until(lambda: len(list(out.glob("transcript/round-*"))) >= 3)
    process.send_signal(signal.SIGINT)
    code, _, error = process.finish()
    assert code == 1
    assert error.strip() == "fedsim: interrupted; `fedsim run --resume RUN` continues the run"
    recorded = len(list(out.glob("transcript/round-*")))
    text = (out / "experiment.toml").read_text()
    (out / "experiment.toml").write_text(text.replace("rounds = 4000", f"rounds = {recorded + 2}"))
    resumed = call("run", "--resume", out)
    assert resumed.returncode == 0, resumed.stderr
    assert len(list(out.glob("transcript/round-*"))) == recorded + 2
    assert [int(row["round"]) for row in read_rows(out / "metrics.csv")] == list(range(1, recorded + 3))
