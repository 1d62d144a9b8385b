"""What users get wrong: one sentence, the right exit code, and nothing half done.

The program's own `main` is called in this process, since a new one costs seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import call_fedsim

FILE = """
[model]
name = "mlp"
hidden = [8]

[training]
local_epochs = 1

[federation]
clients = 3

[[attack]]
name = "sme"
iterations = 2
"""

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """`fedsim WORDS...` in a folder of its own with an experiment file in it: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSIM_DATA", "restored afterwards, whatever --data-dir does")
    monkeypatch.delenv("FEDSIM_DATA")
    (tmp_path / "x.toml").write_text(FILE)

    def program(*words: str) -> tuple[int, str, str]:
        done = call_fedsim(*words, capfd=capfd)
        return done.returncode, done.stdout, done.stderr

    return program


def sentence(result: tuple[int, str, str], code: int = 2) -> str:
    got, out, error = result
    assert got == code, out + error
    assert len(error.strip().splitlines()) == 1, error
    assert "Traceback" not in out
    assert error.startswith("fedsim: ")
    return error.removeprefix("fedsim: ").strip()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("frobnicate", "No such command 'frobnicate'"),
        ("run --iterations 5", "No such option"),
        ("inspect", "Missing argument 'RUN'"),
        ("list attack", "list: there is no kind of plug-in 'attack', did you mean 'attacks'?"),
        ("list widgets", "list: there is no kind of plug-in 'widgets'"),
        ("show smee", "nothing is called 'smee', did you mean 'sme'?"),
        ("run", "give either an experiment file or --resume RUN"),
        ("run x.toml --resume r", "give either an experiment file or --resume RUN"),
        ("run --resume none", "none: holds no run to resume; expected experiment.toml in it"),
        ("run --resume none --overwrite", "--resume continues the experiment without changes; leave out --set, --out"),
        ("run --resume none --set a.b=1", "--resume continues the experiment without changes"),
        ("run --resume none --out o", "--resume continues the experiment without changes"),
        ("run none.toml", "none.toml: cannot be read (No such file or directory)"),
        ("run .", ".: cannot be read (Is a directory)"),
        ("run x.toml --set federation.clinets=3", "x.toml: federation.clinets: unknown key, did you mean 'clients'?"),
        ("run x.toml --set attack.sme.iters=3", "iters: unknown setting for 'sme', did you mean 'iterations'?"),
        ("run x.toml --set iterations", "--set iterations: expected key=value"),
        ("run x.toml --set federation.supernodes=0", "supernodes: expected at least 1, got 0"),
        ("run x.toml --set adversary.device=gpu", "adversary.device: 'gpu' is not usable here"),
        ("run x.toml --set adversary.device=meta", "adversary.device: 'meta' is not usable here"),
        ("run x.toml --set adversary.device=hpu", "'hpu' is not usable here (No module named 'torch.hpu'); expected"),
        ("run x.toml --set adversary.knowledge.model=false", "sme needs model, which"),
        ("run x.toml --set data.name=mnist", "data: 'mnist' needs a data folder; give --data-dir DIR or set"),
        ("run x.toml --set data.name=mnist --data-dir none", "none does not exist; give --data-dir DIR or set"),
        ("run x.toml --set data.name=mnist --data-dir .", "train-images-idx3-ubyte.gz): no such file; on a mach"),
        ("run x.toml --set truth.0=none", "truth: a federation has its own; [truth] belongs in an attack file"),
        ("run x.toml --set adversary.knowledge.model=os:system", "adversary.knowledge.model: a federation defines"),
        ("run x.toml --set federation.clients=5000", "federation.clients: 5000 clients for 1438 examples; lower it"),
        ("run x.toml --out x.toml", "x.toml: is a file; choose another --out"),
        ("attack none", "none: no such run folder"),
        ("inspect none", "none: no such run folder"),
        ("inspect --hash none", "none: no such run folder"),
        ("inspect x.toml", "x.toml: no such run folder"),
        ("attack none x.toml", "none: no such run folder"),
        ("attack none --set attack.sme.iterations=3", "cannot be read (No such file or directory)"),
        ("attack .", "was recorded elsewhere, so it names no attacks; give an attack file"),
        ("attack . none.toml", "none.toml: cannot be read (No such file or directory)"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_one_sentence_with_code_2(call: Call, words: str, expected: str, tmp_path: Path) -> None:
    assert expected in sentence(call(*words.split()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.toml"]  # nothing was begun


def test_what_was_meant_is_asked_once(call: Call) -> None:
    assert sentence(call("rn")) == "No such command 'rn'. Did you mean 'run'?"


@pytest.mark.parametrize("words", ["inspect .", "inspect --hash ."])
def test_a_recording_that_is_not_there_is_one_sentence_with_code_1(call: Call, words: str) -> None:
    assert "holds no recording; expected round-000001.safetensors or the like in it" in sentence(
        call(*words.split()), 1
    )


@pytest.mark.parametrize("out", ["x.toml/run", "/proc/run", "/dev/null/run"])
def test_a_folder_that_cannot_be_written_is_one_sentence_with_code_1(call: Call, out: str) -> None:
    said = sentence(call("run", "x.toml", "--out", out), 1)
    assert said.startswith(f"{out}: cannot be written (")
    assert said.endswith("; choose another --out")


def test_overwrite_leaves_alone_what_is_no_run(call: Call, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("ten years")
    said = sentence(call("run", "x.toml", "--out", "thesis", "--overwrite"))
    assert said == "thesis: is not a run folder, so --overwrite does not touch it"
    said = sentence(call("run", "x.toml", "--out", "thesis"))
    assert said.startswith("thesis: is not empty; choose another --out")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "ten years"


def test_a_bad_file_is_found_before_an_earlier_run_is_overwritten(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run = tmp_path / "run"
    (run / "transcript").mkdir(parents=True)
    (run / "experiment.toml").write_text(FILE)
    (run / "transcript" / "keep").write_text("me")
    for wrong in (
        "attack.sme.iterations=0",
        "model.dropout=2.0",
        "federation.clients=5000",
        "adversary.knowledge.loss=false",
        "federation.device=cuda",
    ):
        sentence(call("run", "x.toml", "--out", "run", "--overwrite", "--set", wrong))
    assert (run / "transcript" / "keep").read_text() == "me"


def test_broken_toml_names_the_line(call: Call, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[federation]\nclients == 3\n")
    assert "x.toml: is not valid TOML: " in sentence(call("run", "x.toml"))


def test_an_attack_file_with_a_misspelt_table_says_so(call: Call, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "a.toml").write_text('[[atack]]\nname = "sme"\n')
    assert sentence(call("attack", "run", "a.toml")) == "a.toml: atack: unknown key, did you mean 'attack'?"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "sme",
            ["attacks, from fedsim-curious", "alpha_step_size", "0.001", "needs: input_shape, loss, model", "ICML"],
        ),
        ("inverting-gradients", ["attacks", "tv_weight", "References:", "NeurIPS"]),
        (
            "update-noise",
            ["defenses", "noise_multiplier", "References:", "promises: (epsilon", "against: the server", "costs: acc"],
        ),
        ("top-k", ["promises: no formal guarantee", "against: a server that", "costs: "]),
        ("digits", ["datasets", "targets", "1797"]),
        ("mlp", ["models", "hidden", "tuple[int >= 1, ...]", "(200,)"]),
        ("fedadam", ["strategies", "tau", "eta"]),
    ],
)
def test_show_describes_a_plugin_of_any_kind(call: Call, name: str, expected: list[str]) -> None:
    code, out, error = call("show", name)
    assert (code, error) == (0, "")
    assert out.startswith(name)
    for word in expected:
        assert word in out, f"{word} is missing in:\n{out}"


def test_help_of_every_command_has_code_0(call: Call) -> None:
    for command in ("run", "attack", "report", "inspect", "list", "show"):
        code, out, error = call(command, "--help")
        assert (code, error) == (0, "")
        assert f"fedsim {command}" in out
