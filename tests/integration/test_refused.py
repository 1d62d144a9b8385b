"""An attack that cannot be made is told of before any work and stops no other; a file without one that can does."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from numpy.typing import NDArray

import fedsim
from fedsim.api import pipeline
from fedsim.api.adversaries import Adversary
from fedsim.audit.audit import Audit, open_audit
from fedsim.base.errors import ConfigError, KnowledgeError
from fedsim.data import Dataset
from fedsim.federation.config import AttackFile
from fedsim.federation.experiment import Experiment
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.run_folder import read_refusals
from fedsim.federation.table_validation import validate_tables
from fedsim.report.page import write_report
from fedsim.sweeps.file import parse_sweep
from fedsim.sweeps.plan import plan_sweep
from fedsim.sweeps.store import CellStore
from tests.support.commands import call_fedsim
from tests.support.experiments import make_tiny_config, run_serial

SME = {"name": "sme", "iterations": 2}
TEXTS = {"name": "tgias-ro-text"}
TABLES: dict[str, Any] = {
    "partition": {"name": "iid", "samples_per_client": 4},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"local_epochs": 1, "batch_size": 4},
    "federation": {"engine": "serial", "clients": 2, "rounds": 2},
    "adversary": {"victims": [0], "workers": 1},
}
LEARNT = "membership-white-box needs candidates, known_candidates, which the threat model withholds; grant it under "
WORDS = "tgias-ro-text is an attack on texts, and 'digits' holds numbers; choose an attack on numbers, or texts"


def ended(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, list[str]]:
    """Exit code, what is said meanwhile, and the last words on stderr."""
    done = call_fedsim(*words, capfd=capfd, columns=300)
    lines = [line.removeprefix("fedsim: ") for line in done.stderr.splitlines()]
    return done.returncode, " ".join(done.stdout.split()), lines


def written(folder: Path, **tables: Any) -> Path:
    (folder / "file.toml").write_text(tomli_w.dumps(tables))
    return folder / "file.toml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    return run_serial(
        make_tiny_config(**TABLES | {"adversary": {"when": "never"}}), tmp_path_factory.mktemp("run") / "run"
    )


def audit(run: OpenRun, *attacks: dict[str, Any], **knowledge: Any) -> Audit:
    adversary = {"victims": [0], "workers": 1, "knowledge": knowledge}
    return open_audit(run.path, validate_tables(AttackFile, {"adversary": adversary, "attack": attacks}, "a file"))


def test_what_cannot_be_made_is_said_before_training_and_the_others_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, **TABLES, attack=[{"name": "membership-white-box"}, SME, TEXTS])
    code, said, told = ended(capfd, "run", file, "--out", tmp_path / "run")
    assert code == 1
    assert len(told) == 2
    assert told[0].startswith(LEARNT)
    assert told[1] == WORDS
    for sentence in told:
        assert 0 < said.find(sentence) < said.find("round 1/2"), said
        assert said.count(sentence) == 1
    assert "Scores of sme" in said
    log, page = ((tmp_path / "run" / name).read_text() for name in ("log.txt", "report.html"))
    assert [log.count(sentence) for sentence in told] == [1, 1]
    notes = re.findall(r'<p class="note">(Not made: .*?)</p>', page)
    assert [note.split(" ")[2] for note in notes] == ["membership-white-box", "tgias-ro-text"]
    assert {path.name for path in (tmp_path / "run" / "findings").iterdir()} == {"sme"}


TABLE = {"name": "leaf-synthetic", "features": 6, "classes": 3, "clients": 2, "examples_per_client": 8}


@pytest.mark.parametrize(
    ("attack", "tables", "reason"),
    [
        ("spear-ica", {"model": {"name": "linear"}}, "no ReLU directly follows the first linear layer"),
        (
            "cocktail-party",
            {"model": {"name": "resnet8"}},
            "no linear layer that is trained and sent takes",
        ),
        ("see-through-gradients", {}, "bn_weight is a prior on BatchNorm layers, and the model has none"),
        ("sratta", {}, "it reads sums over clients, and the server sees each message in clear"),
        ("pixel-shares", {}, "it is an attack on masks, and the loss is not one of pixels"),
        ("llg", {"data": TABLE | {"classes": 2}, "partition": {"name": "natural"}}, "the network: of two classes the"),
        ("map", {}, "a prior is fitted to two auxiliary records at least; raise adversary.auxiliary"),
        ("client-size", {}, "there are 1 auxiliary records, and clients of unlike sizes are simulated on them"),
        ("giml", {"data": TABLE, "partition": {"name": "natural"}}, "it generates images, and examples are of shape"),
    ],
)
def test_a_network_and_records_that_an_attack_cannot_use_are_refused_before_any_training(
    attack: str, tables: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    adversary = {"victims": [0], "rounds": "all", "auxiliary": 1, "knowledge": {"auxiliary": True}}
    config = make_tiny_config(**{**TABLES, "adversary": adversary, "attack": [{"name": attack}], **tables})
    found = Audit(
        folder=OpenRun(tmp_path / "run"),
        spec=config,
        experiment=Experiment(resolve(config)),
        base_folder=tmp_path,
        awaits_run=True,
    )
    assert f"{attack} does not apply: " in found.refusal_reasons[attack]
    assert reason in found.refusal_reasons[attack]


FEDSGD = {
    "strategy": {"name": "fedsgd"},
    "training": {"learning_rate": None, "local_epochs": None, "local_steps": 1, "batch_size": 8},
}
FEW_UNITS = "N is 8, but the network's first linear layer, with 8 units and 64 inputs, distinguishes at most 7 examples"


@pytest.mark.parametrize(
    ("attack", "tables", "reason"),
    [
        ("spear", {}, FEW_UNITS),
        ("spear-ica", {}, FEW_UNITS),
        ("cocktail-party", {}, FEW_UNITS),
        ("cocktail-party", {"partition": {"name": "iid", "samples_per_client": 7}}, ""),
        # The batches of an epoch of 12 examples are of 8 and of 4.
        ("spear", {**FEDSGD, "partition": {"name": "iid", "samples_per_client": 12}}, ""),
        ("spear", {**FEDSGD, "partition": {"name": "iid", "samples_per_client": 16}}, FEW_UNITS),
        # The sum of two clients is of twice as many examples.
        ("spear", {"partition": {"name": "iid", "samples_per_client": 4}, "secure_aggregation": {}}, FEW_UNITS),
        # A gate chooses how many examples clients use.
        (
            "spear",
            {"defense": [{"name": "gate", "measure": "gradient-norm", "above": 1.0, "action": "drop-examples"}]},
            "",
        ),
        # Units of several rounds are read together.
        ("spear-ica-rounds", {}, ""),
        ("spear-ica-rounds", {"partition": {"name": "iid", "samples_per_client": 64}}, "distinguishes at most 63"),
    ],
)
def test_more_examples_than_a_first_layer_distinguishes_are_refused_before_any_training(
    attack: str, tables: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    eight_each = {"partition": {"name": "iid", "samples_per_client": 8}, "training": {"batch_size": 8}}
    config = make_tiny_config(**{**TABLES, **eight_each, "attack": [{"name": attack}], **tables})
    experiment, folder = Experiment(resolve(config)), OpenRun(tmp_path / "run")
    found = Audit(folder=folder, spec=config, experiment=experiment, base_folder=tmp_path, awaits_run=True)
    assert reason in found.refusal_reasons.get(attack, "")
    assert bool(found.refusal_reasons) == bool(reason)


def iid(examples: int) -> dict[str, Any]:
    return {"partition": {"name": "iid", "samples_per_client": examples}}


ONE_LABEL = "idlg does not apply: the clients: the label of one example is read from signs, N is 4"
WHOLE_GRADIENTS = {**FEDSGD, "training": FEDSGD["training"] | {"batch_size": 64}}
THREE = {"federation": {"clients": 3}}
COLUMN = {"name": "tgias-ro", "labels": "column", "gradients": 2}
LARGEST_FIRST = {"name": "tests.integration.test_refused:LargestFirst"}


class LargestFirst:
    """Twelve examples for the first client, four for each of the others."""

    def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        ends = np.cumsum([12, *[4] * (clients - 1)])
        return np.split(np.arange(ends[-1]), ends[:-1])


@pytest.mark.parametrize(
    ("attack", "tables", "reason"),
    [
        ({"name": "idlg"}, {}, ONE_LABEL),
        ({"name": "idlg"}, {"adversary": {"knowledge": {"labels": True}}}, ""),
        ({"name": "idlg"}, iid(1), ""),
        (
            COLUMN,
            WHOLE_GRADIENTS | iid(11),
            "tgias-ro does not apply: the column rule finds each class once, N = 11 is more than 10",
        ),
        (COLUMN, WHOLE_GRADIENTS | iid(10), ""),
        (COLUMN | {"labels": "bias"}, WHOLE_GRADIENTS | iid(11), ""),
        (
            {"name": "tgias-ro"},
            WHOLE_GRADIENTS,
            "tgias-ro needs at least 10 rounds of a client, and 2 are to be attacked",
        ),
        ({"name": "fedmia"}, {}, "fedmia compares a client with others and needs 3 clients in the attacked rounds"),
        ({"name": "giml"}, {"federation": {"clients": 1}}, "giml compares a client with others and needs 2 clients"),
        ({"name": "membership-lira"}, {"recording": {"clients": [0, 1]}, "federation": {"clients": 3}}, "at most 2"),
        ({"name": "membership-lira"}, {"federation": {"clients": 3}}, ""),
        ({"name": "membership-lira"}, {"federation": {"clients": 3}, "strategy": {"fraction_train": 0.7}}, ""),
        (
            {"name": "membership-lira"},
            {"federation": {"clients": 3}, "strategy": {"fraction_train": 0.7}, "adversary": {"rounds": [1]}},
            "which have at most 2",
        ),
        ({"name": "tgias-ro", "gradients": 2}, {}, "tgias-ro does not read weights, which clients send"),
        ({"name": "tgias-ro", "gradients": 2}, WHOLE_GRADIENTS, ""),
        ({"name": "sme"}, WHOLE_GRADIENTS, "sme does not read gradients, which clients send; attack clients that"),
        ({"name": "fedmia", "measure": "loss"}, WHOLE_GRADIENTS | THREE, "fedmia does not read gradients"),
        (
            {"name": "membership-white-box"},
            WHOLE_GRADIENTS | {"adversary": {"knowledge": {"candidates": "held-out", "known_candidates": 4}}},
            "membership-white-box does not read gradients",
        ),
        (
            {"name": "dlfa"},
            {"training": {"optimizer": "adam"}},
            "simulates local training by SGD, and clients train by",
        ),
        ({"name": "joint-inversion"}, {"training": {"batch_size": 2}}, "steps take 2 of N = 4 examples each"),
        ({"name": "joint-inversion"}, {}, ""),
        ({"name": "fedmia"}, WHOLE_GRADIENTS | THREE, ""),
        ({"name": "shared-model", "source": "global"}, WHOLE_GRADIENTS, ""),
        # Without victims the first client is attacked, which is not the one with the fewest examples.
        ({"name": "spear"}, {"partition": LARGEST_FIRST, "adversary": {"victims": None}}, "N is 12, but"),
        ({"name": "spear"}, {"partition": LARGEST_FIRST, "adversary": {"victims": [1]}}, ""),
    ],
)
def test_too_many_examples_too_few_rounds_and_too_few_clients_are_refused_before_any_training(
    attack: dict[str, Any], tables: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    adversary = {"victims": [0], "rounds": "all", "knowledge": {"candidates": "held-out"}} | tables.get("adversary", {})
    federation = TABLES["federation"] | tables.get("federation", {})
    changed = TABLES | tables | {"adversary": adversary, "federation": federation, "attack": [attack]}
    experiment = Experiment(resolve(config := make_tiny_config(**changed)))
    folder = OpenRun(tmp_path / "run")
    found = Audit(folder=folder, spec=config, experiment=experiment, base_folder=tmp_path, awaits_run=True)
    assert reason in found.refusal_reasons.get(attack["name"], "")
    assert bool(found.refusal_reasons) == bool(reason)


def test_a_file_of_which_nothing_can_be_made_starts_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, **TABLES, attack=[{"name": "membership-white-box"}, TEXTS])
    code, said, [told] = ended(capfd, "run", file, "--out", tmp_path / "run")
    assert code == 2
    assert told.startswith(LEARNT)
    assert "round" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("attack", "told"),
    [
        ({"name": "smee"}, "did you mean 'sme'"),
        ({"name": "inverting-gradients", "iteration": 3}, "did you mean 'iterations'"),
        ({"name": "inverting-gradients", "iterations": "many"}, "iterations"),
        ({"name": "sia", "source": "nobody"}, "there is no attack 'nobody' in the file"),
    ],
)
def test_a_mistake_in_the_file_still_stops_all_of_it(
    run: OpenRun, tmp_path: Path, capfd: pytest.CaptureFixture[str], attack: dict[str, Any], told: str
) -> None:
    before = sorted(run.path.rglob("*"))
    code, _, [sentence] = ended(capfd, "attack", run.path, written(tmp_path, attack=[SME, attack]))
    assert code == 2
    assert told in sentence
    assert [path for path in sorted(run.path.rglob("*")) if path not in before and path.name != "log.txt"] == []


def test_an_attack_file_reports_what_it_cannot_make_as_a_failure(
    run: OpenRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, adversary={"victims": [0], "workers": 1}, attack=[TEXTS, SME])
    code, said, told = ended(capfd, "attack", run.path, file)
    assert (code, told) == (1, [WORDS])
    assert 0 < said.find(WORDS) < said.find("Scores of sme")
    assert f"Not made: {WORDS}." in run.report.read_text().replace("&#39;", "'")


def not_made(run: OpenRun) -> list[str]:
    """What a report that is written later says was not made, by the title that each sentence begins with."""
    pipeline.report(OpenRun(run.path))
    return re.findall(r"Not made: (\S+) ", run.report.read_text())


def test_a_later_report_and_a_later_attack_know_what_was_refused(run: OpenRun, tmp_path: Path) -> None:
    own = OpenRun(tmp_path / "run")
    shutil.copytree(run.path, own.path, ignore=shutil.ignore_patterns("findings", "*.csv", "manifest.json"))

    def attack(*attacks: dict[str, Any], **knowledge: Any) -> list[str]:
        adversary = {"victims": [0], "workers": 1, "knowledge": knowledge}
        spec = validate_tables(AttackFile, {"adversary": adversary, "attack": attacks}, "a file")
        return pipeline.attack(OpenRun(own.path), Adversary(spec=spec)).failures

    membership = {"name": "membership-loss"}
    assert len(attack(TEXTS, membership, SME)) == 2
    assert not_made(own) == ["tgias-ro-text", "membership-loss"]
    assert attack(SME) == []  # says nothing of the others
    assert not_made(own) == ["tgias-ro-text", "membership-loss"]
    assert attack(membership, candidates="held-out") == []
    assert not_made(own) == ["tgias-ro-text"]
    assert read_refusals(own) == {"tgias-ro-text": WORDS}
    assert compare_with_manifest(OpenRun(own.path)).differences == []
    own.experiment.unlink()  # as of a recording made elsewhere
    assert not_made(own) == ["tgias-ro-text"]


def test_what_builds_on_a_refused_attack_is_refused_with_it(run: OpenRun) -> None:
    source = {"name": "lmra-dummy-data"}
    chain = [{"name": "sia", "source": "lmra-dummy-data"}, source, {"name": "shared-model"}]
    withheld = audit(run, *chain, records=True, input_shape=False)
    assert withheld.run() == [
        "lmra-dummy-data needs input_shape, which the threat model withholds; grant it under [adversary.knowledge] or "
        "choose another attack",
        "sia builds on 'lmra-dummy-data', which is not made; name another source",
    ]
    assert (run.findings / "shared-model").is_dir()
    assert not (run.findings / "sia").exists()
    with pytest.raises(KnowledgeError, match=r"^lmra-dummy-data needs input_shape"):
        audit(run, *chain[:2], records=True, input_shape=False).check()


def test_nothing_is_said_of_an_attack_that_another_file_made(run: OpenRun) -> None:
    assert audit(run, {"name": "membership-loss"}, candidates="held-out").run() == []
    withheld = audit(run, {"name": "membership-loss"}, SME)
    [failure] = withheld.run()
    assert failure.startswith("membership-loss needs candidates, which")
    assert "Not made: membership-loss" not in write_report(withheld.folder, withheld).read_text()


def test_in_python_an_attack_that_cannot_be_made_raises_and_its_source_is_not_made(run: OpenRun) -> None:
    opened = fedsim.open(run.path)
    before = len(opened.findings)
    with pytest.raises(KnowledgeError, match="sia needs records, which the threat model withholds"):
        opened.attack("sia")
    assert len(opened.findings) == before


def test_a_cell_whose_own_attack_is_refused_does_not_apply_although_its_source_does(tmp_path: Path) -> None:
    attacks = [{"name": "sia", "source": "shared-model"}, {"name": "shared-model"}]
    sweep = {"sweep": {"axes": {"attack": attacks}}, **TABLES}
    plan = plan_sweep(parse_sweep(sweep, "study.toml", tmp_path), CellStore(tmp_path), trust=False)
    assert [cell.title for cell in plan.cells] == ["shared-model"]
    [(point, why)] = plan.inapplicable
    assert point.labels["attack"].startswith("sia")
    assert why.startswith("sia needs records, which the threat model withholds")
    with pytest.raises(ConfigError, match="no cell of the grid applies; the first one does not, because sia needs"):
        plan_sweep(
            parse_sweep(
                {**sweep, "sweep": {"axes": {"attack": attacks[:1]}}, "attack": attacks[1:]}, "s.toml", tmp_path
            ),
            CellStore(tmp_path),
            trust=False,
        )


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            {"attack": [{"name": "sratta"}], "secure_aggregation": {}},
            "sratta needs at least 2 rounds of a client, and 1 is to be attacked",
        ),
        (
            {"attack": [{"name": "lmra"}], "adversary": {"rounds": "all"}, "recording": {"rounds": [1, 2]}},
            "lmra needs at least 3 rounds of a client, and 2 are to be attacked",
        ),
        (
            {"attack": [{"name": "lmra-linear"}], "adversary": {"rounds": "all"}},
            "lmra-linear needs at least 611 rounds of a client, and 2 are to be attacked",
        ),
        (
            {"attack": [SME], "recording": {"clients": [1]}},
            "adversary.victims: client 0 will not be recorded (recording.clients = [1])",
        ),
    ],
)
def test_what_is_not_to_be_recorded_is_refused_before_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], tables: dict[str, Any], told: str
) -> None:
    adversary = TABLES["adversary"] | tables.pop("adversary", {})
    file = written(tmp_path, **TABLES | {"adversary": adversary} | tables)
    code, said, [sentence] = ended(capfd, "run", file, "--out", tmp_path / "run")
    assert code == 2
    assert sentence.startswith(told)
    assert "round 1/2" not in said
    assert not (tmp_path / "run").exists()
