"""Attacks that build on what others decoded: handed on by the audit, judged, reported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.evaluation.imputation import Imputation
from fedsim.audit.evaluation.local_optimum import local_optimum
from fedsim.audit.finding_files import load_finding, save_finding
from fedsim.audit.round_attacks import attack_round
from fedsim.audit.threat_model import grant_knowledge, grant_private
from fedsim.base.errors import ConfigError, RunError
from fedsim.federation.config import AttackFile
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_rows
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import ALL, Attack, Paper, Progress, Target
from fedsim.interfaces.findings import Finding, Inference, LocalModel, Representatives
from fedsim.recording.transcript import Transcript
from fedsim.report.page import write_report
from tests.support.experiments import make_tiny_config, run_serial

TABLE = {"name": "leaf-synthetic", "features": 6, "classes": 3, "clients": 3, "examples_per_client": 40,
         "sensitive": True, "decay": 0.0}  # fmt: skip
PAPER = Paper(title="None", authors="Nobody", venue="nowhere", year=2026)


@dataclass(frozen=True, kw_only=True)
class Decoder(Attack):
    """Claims what it returned last, times `factor`."""

    factor: float = 1.0
    paper = PAPER
    rounds_needed = ALL

    def _run(self, target: Target, progress: Progress) -> Finding:
        if target.victim == 2 and self.factor < 0:
            raise RuntimeError("it did not work")
        update = list(target.transcript.updates(target.victim))[-1]
        return LocalModel(state={name: self.factor * t for name, t in update.after.items()})


@dataclass(frozen=True, kw_only=True)
class Reader(Decoder):
    """Declares that it reads records."""

    uses = frozenset({"records"})


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = ModuleType("own_decoder")
    module.Decoder, module.Reader = Decoder, Reader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return {
        "data": TABLE,
        "partition": {"name": "natural"},
        "training": {"learning_rate": 0.05, "batch_size": 20},
        "federation": {"clients": 3, "rounds": 6},
        "recording": {"every": 2},
        "adversary": {"when": "never", "victims": "all", "rounds": "all", "workers": 1,
                      "knowledge": {"records": True, "partial_records": "sensitive"}},
    }  # fmt: skip


def attack(name: str, source: str = "", **settings: Any) -> dict[str, Any]:
    return {"name": name, **({"source": source} if source else {}), **settings}


DECODER = {"name": "own_decoder:Decoder", "label": "decoder"}


@pytest.fixture
def run(tables: dict[str, Any], tmp_path: Path) -> Callable[..., OpenRun]:
    def make(*attacks: dict[str, Any], **changes: Any) -> OpenRun:
        return run_serial(make_tiny_config(**{**tables, "attack": list(attacks)} | changes), tmp_path / "run")

    return make


@pytest.mark.thorough
def test_what_is_decoded_is_handed_on_judged_and_reported(run: Callable[..., OpenRun]) -> None:
    folder = run(
        attack("aia-model", "decoder", label="aia"),  # first in the file, last to work
        attack("sia", "decoder"),
        attack("sia", "optimal", label="ceiling"),
        DECODER,
    )
    audit = open_audit(folder.path, None, trust=True)
    assert audit.run() == []
    kinds = {"aia": Inference, "sia": Inference, "ceiling": Inference, "decoder": LocalModel}
    for title, kind in kinds.items():
        for client in range(3):
            finding, about = load_finding(folder.findings / title / f"round-1-5-client-{client}-repeat-0.safetensors")
            assert isinstance(finding, kind)
            assert about["partial_records"] == ("sensitive" if title == "aia" else "")
    rows = audit.score()
    values = {(row["attack"], row["metric"], row["victim"]): row for row in rows}
    assert {metric for title, metric, _ in values if title == "decoder"} == {
        "parameter_distance",
        "zest",
        "zest_other_start",
        "zest_of_optima",
        "local_loss",
        "local_accuracy",
    }
    # It claims the last-returned model, which is a proxy, so nothing it gets can be better than the floor.
    distance = values["decoder", "parameter_distance", 0]
    assert distance["value"] >= distance["floor"] > 0 == distance["ceiling"]
    assert values["ceiling", "source_accuracy", 1]["value"] > values["ceiling", "source_accuracy", 1]["floor"]
    column = audit.experiment.dataset.column("sensitive")  # type: ignore[union-attr]
    true = column.values(audit.experiment.data.train(0)[0])  # type: ignore[union-attr]
    found, _ = load_finding(folder.findings / "aia" / "round-1-5-client-0-repeat-0.safetensors")
    assert isinstance(found, Inference)
    expected = (found.predictions == true).double().mean().item()
    assert values["aia", "attribute_accuracy", 0]["value"] == pytest.approx(expected)
    html = write_report(audit.folder, audit).read_text()
    for word in ("source accuracy", "attribute accuracy", "Zest", "parameter distance"):
        assert word in html
    assert "is left out" not in html
    headline = html[html.index('<p class="lead">By ') :].split("</p>")[0]
    assert "By source accuracy, " in headline
    assert "By attribute accuracy, " in headline
    assert "ceiling" not in headline  # nobody could carry that out
    assert "it reads the victim&#39;s optimal local model" in html


def test_public_records_that_give_the_attribute_away_are_the_floor_and_are_learnt_from_once(
    run: Callable[..., OpenRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model-based attack is below what the other columns, of which one is the attribute's echo, say in public."""
    folder = run(attack("aia-model", "last-returned"))
    audit = open_audit(folder.path, None, trust=True)
    assert audit.run() == []
    dataset = audit.experiment.dataset  # type: ignore[union-attr]
    column, learnt = dataset.column("sensitive"), []
    for examples in (dataset.train, dataset.test):
        examples.raw[:, 0] = column.values(examples.raw).float()
    whole = Imputation.fit
    monkeypatch.setattr(Imputation, "fit", lambda *given: learnt.append(given) or whole(*given))
    rows = [row for row in audit.score() if row["metric"] == "attribute_accuracy"]
    assert [row["floor_guess"] for row in rows] == ["imputed from public data"] * 3
    assert all(row["floor"] > 0.9 > row["value"] for row in rows)
    assert len(learnt) == 1


def test_what_lies_between_the_first_and_the_last_returned_model_is_a_floor(
    run: Callable[..., OpenRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the optimum in their middle, to claim the last-returned model would be no reconstruction."""
    folder = run(DECODER, adversary={"when": "never", "victims": [0], "rounds": "all", "workers": 1})
    audit = open_audit(folder.path, None, trust=True)
    assert audit.run() == []
    experiment = audit.experiment
    assert experiment is not None
    first, last = experiment.initial_state(), Transcript(folder.path).update(5, 0).after
    middle = {name: (first[name] + last[name]) / 2 for name in first}
    monkeypatch.setitem(vars(audit), "optimum", lambda client, *, other_start=False: middle)
    rows = {row["metric"]: row for row in audit.score()}
    for metric in ("parameter_distance", "zest", "zest_other_start"):
        assert rows[metric]["floor_guess"] == "between the last-returned model and the first model"
        assert rows[metric]["floor"] == pytest.approx(rows[metric]["ceiling"], abs=1e-6)
        assert abs(rows[metric]["value"] - rows[metric]["ceiling"]) > 1e-4


def test_an_optimum_from_another_start_is_kept_and_one_that_diverges_costs_only_its_own_row(
    run: Callable[..., OpenRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(DECODER, adversary={"when": "never", "victims": [0, 1], "rounds": "all", "workers": 1})
    audit = open_audit(folder.path, None, trust=True)
    assert audit.run() == []
    own, other = audit.optimum(0), audit.optimum(0, other_start=True)
    assert all(not torch.equal(own[name], other[name]) for name in own)
    assert audit.experiment is not None
    name, elsewhere = next(iter(audit.experiment.random_start().items()))
    whole = local_optimum

    def diverging(model: torch.nn.Module, start: dict[str, torch.Tensor], *rest: Any) -> dict[str, torch.Tensor]:
        if torch.equal(start[name], elsewhere):
            raise RunError("it diverged")
        return whole(model, start, *rest)

    monkeypatch.setattr("fedsim.audit.optima.local_optimum", diverging)
    failures: list[str] = []
    rows = {(row["victim"], row["metric"]): row for row in audit.score(failures)}
    assert failures == []
    assert rows[0, "zest_other_start"]["missing"] == ""
    assert rows[1, "zest_other_start"]["missing"] == "there is no optimum from other random weights (it diverged)"
    assert rows[1, "zest"]["missing"] == ""


def test_a_decoder_with_other_settings_is_not_built_upon(run: Callable[..., OpenRun]) -> None:
    folder = run(DECODER, attack("aia-model", "decoder", label="aia"))
    assert open_audit(folder.path, None, trust=True).run() == []
    path = folder.findings / "aia" / "round-1-5-client-0-repeat-0.safetensors"
    before = load_finding(path)[1]["fingerprint"]
    spec = open_audit(folder.path, None, trust=True).spec
    again = open_audit(folder.path, spec, trust=True)
    assert again.run() == []
    assert load_finding(path)[1]["fingerprint"] == before
    other = spec.model_copy(
        update={"attack": [type(spec.attack[0])(**{**spec.attack[0].model_dump(), "factor": 2.0}), spec.attack[1]]}
    )
    assert open_audit(folder.path, other, trust=True).run() == []
    assert load_finding(path)[1]["fingerprint"] == before
    found = {}
    for title in ("decoder", "aia"):  # what builds on other models stands beside what built on the first
        assert len(list(folder.findings.glob(f"{title}-*"))) == 1
        [beside] = folder.findings.glob(f"{title}-*/round-1-5-client-0-repeat-0.safetensors")
        found[title] = load_finding(beside)
    assert found["aia"][1]["fingerprint"] != before
    decoded, _ = found["decoder"]
    assert isinstance(decoded, LocalModel)
    first, _ = load_finding(folder.findings / "decoder" / "round-1-5-client-0-repeat-0.safetensors")
    assert isinstance(first, LocalModel)
    assert all(torch.equal(decoded.state[name], 2 * tensor) for name, tensor in first.state.items())


def test_what_builds_on_a_model_is_made_anew_when_the_model_is_another(run: Callable[..., OpenRun]) -> None:
    """As when a newer fedsim decodes better with the same settings."""
    folder = run(DECODER, attack("aia-model", "decoder", label="aia"))
    assert open_audit(folder.path, None, trust=True).run() == []
    decoded, built = (
        folder.findings / title / "round-1-5-client-0-repeat-0.safetensors" for title in ("decoder", "aia")
    )
    before = load_finding(built)[1]["fingerprint"]
    finding, about = load_finding(decoded)
    assert isinstance(finding, LocalModel)
    save_finding(finding, decoded, about)
    folder.manifest.note(decoded)
    assert open_audit(folder.path, None, trust=True).run() == []
    assert load_finding(built)[1]["fingerprint"] == before
    save_finding(LocalModel(state={name: 2 * tensor for name, tensor in finding.state.items()}), decoded, about)
    folder.manifest.note(decoded)
    written = decoded.read_bytes()
    assert open_audit(folder.path, None, trust=True).run() == []
    assert decoded.read_bytes() == written  # what the run noted is kept
    assert load_finding(built)[1]["fingerprint"] != before


def test_where_the_decoder_failed_the_others_go_on(run: Callable[..., OpenRun]) -> None:
    folder = run({**DECODER, "factor": -1.0}, attack("aia-model", "decoder", label="aia"))
    failures = open_audit(folder.path, None, trust=True).run()
    line = Path(__file__).read_text().splitlines().index('            raise RuntimeError("it did not work")') + 1
    assert failures == [
        "decoder, rounds 1-5 by 2, client 2: RuntimeError: it did not work "
        f"({__file__}:{line}; the traceback is in log.txt)",
        "aia, source: 'decoder' decoded no model of client 2; see why it failed there, or choose another source",
    ]
    assert len(list((folder.findings / "aia").glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("attacks", "sentence"),
    [
        (
            [attack("sia", "decodr"), DECODER],
            "attack.sia.source: there is no attack 'decodr' in the file to take local models from, "
            "did you mean 'decoder'?",
        ),
        ([attack("aia-model", "a", label="b"), attack("aia-model", "b", label="a")], "; name another source"),
    ],
)
def test_a_source_that_is_none(run: Callable[..., OpenRun], attacks: list[dict[str, Any]], sentence: str) -> None:
    folder = run(DECODER)
    spec = open_audit(folder.path, None, trust=True).spec
    wrong = validate_tables(AttackFile, {**spec.model_dump(include={"adversary"}), "attack": attacks}, "attack.toml")
    with pytest.raises(ConfigError) as caught:
        open_audit(folder.path, wrong, trust=True).check()
    assert sentence in str(caught.value)


@pytest.mark.thorough
def test_the_decoded_model_of_a_regression_tells_an_attribute_as_well_as_the_optimal_one(tmp_path: Path) -> None:
    """Diana et al., AAAI 2025. The attribute moves the targets of half of the clients up and of the others down."""
    rng, rows = torch.Generator().manual_seed(0), ["client,a,b,secret,y"]
    for client in range(6):
        inputs, secret = torch.randn((25, 2), generator=rng), torch.randint(2, (25,), generator=rng)
        targets = inputs.sum(1) + (-1) ** client * 2 * secret + 0.3 * torch.randn(25, generator=rng)
        for x, kind, y in zip(inputs.tolist(), secret.tolist(), targets.tolist(), strict=True):
            rows.append(",".join(map(str, [client, *x, "yes" if kind else "no", y])))
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    folder = run_serial(
        make_tiny_config(
            data={"name": "csv", "path": str(tmp_path / "table.csv"), "target": "y", "task": "regression",
                  "group": "client"},
            partition={"name": "natural"},
            model={"name": "linear"},
            training={"local_epochs": 1, "batch_size": 100, "learning_rate": 0.05},
            strategy={"name": "fedavg", "fraction_train": 0.5},
            federation={"clients": 6, "rounds": 40, "evaluate_every": 0},
            adversary={"victims": [0, 1], "rounds": "all", "workers": 1, "knowledge": {"partial_records": "secret"}},
            attack=[{"name": "lmra-linear"}, attack("aia-model", "lmra-linear", label="decoded"),
                    attack("aia-model", "optimal", label="best"), attack("aia-model", "last-returned", label="sent")],
        ),
        tmp_path / "run",
    )  # fmt: skip
    audit = open_audit(folder.path, None, trust=True)
    assert audit.run() == []
    rows_of = [row for row in audit.score() if row["metric"] == "attribute_accuracy"]
    right = {(row["attack"], row["victim"]): row["value"] for row in rows_of}
    for victim in (0, 1):
        assert right["decoded", victim] == right["best", victim] > 0.9
    assert min(right["sent", victim] for victim in (0, 1)) < 0.8


@pytest.mark.parametrize(("sampled", "directions"), [pytest.param(0.5, 5, marks=pytest.mark.thorough), (1.0, 4)])
def test_linear_models_are_decoded_exactly_where_rounds_sample_clients_and_in_part_where_all_take_part(
    tmp_path: Path, sampled: float,
    directions: int,
) -> None:  # fmt: skip
    """With all clients each broadcast model follows from the one before, so that they lie in a few directions."""
    rng, rows = torch.Generator().manual_seed(0), ["client,a,b,c,d,y"]
    for client in range(6):
        inputs, weights = torch.randn((25, 4), generator=rng), torch.randn(4, generator=rng)
        targets = inputs @ weights + torch.randn(1, generator=rng) + 0.5 * torch.randn(25, generator=rng)
        rows += [",".join(map(str, [client, *x.tolist(), float(y)])) for x, y in zip(inputs, targets, strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    folder = run_serial(
        make_tiny_config(
            data={"name": "csv", "path": str(tmp_path / "table.csv"), "target": "y", "task": "regression",
                  "group": "client"},
            partition={"name": "natural"},
            model={"name": "linear"},
            training={"local_epochs": None, "local_steps": 3, "batch_size": 100, "learning_rate": 0.05},
            strategy={"name": "fedavg", "fraction_train": sampled},
            federation={"clients": 6, "rounds": round(24 / sampled), "evaluate_every": 0},
            adversary={"victims": [0], "rounds": "all"},
            attack=[{"name": "lmra-linear"}, attack("shared-model", "last-returned")],
        ),
        tmp_path / "run",
    )  # fmt: skip
    audit = open_audit(folder.path, None, trust=True)
    assert audit.run() == []
    [path] = (folder.findings / "lmra-linear").glob("*.safetensors")
    finding, _ = load_finding(path)
    assert isinstance(finding, LocalModel)
    assert finding.trace["determined_directions"].tolist() == [directions]
    far = {row["attack"]: row["value"] for row in audit.score() if row["metric"] == "parameter_distance"}
    if sampled < 1:
        assert far["lmra-linear"] < 1e-4 < 0.1 < far["shared-model"]
    else:
        assert 1e-2 < far["lmra-linear"] < far["shared-model"]


def test_a_victim_who_is_no_client(run: Callable[..., OpenRun]) -> None:
    folder = run(DECODER)
    adversary = {"victims": [1, 7], "rounds": "all", "workers": 1, "knowledge": {"records": True}}
    spec = validate_tables(AttackFile, {"adversary": adversary, "attack": [DECODER]}, "attack.toml")
    with pytest.raises(ConfigError, match=r"^adversary\.victims: client 7 is not recorded; recorded: 0, 1, 2$"):
        open_audit(folder.path, spec, trust=True).run()


def test_a_source_that_decodes_no_model(run: Callable[..., OpenRun]) -> None:
    folder = run(attack("sia"), attack("aia-model", "sia"))
    failures = open_audit(folder.path, None, trust=True).run()
    assert failures[0].endswith("attack.aia-model.source: 'sia' claims no local models; name an attack that does")


def test_findings_about_other_records_of_an_outside_client_are_not_there_already(
    run: Callable[..., OpenRun], tmp_path: Path
) -> None:
    folder = run()
    knowledge = {"records": True, "value_range": [0.0, 1.0]}
    tables = {
        "adversary": {"knowledge": knowledge, "victims": [0], "rounds": "all", "workers": 1},
        "attack": [DECODER, {"name": "own_decoder:Reader", "label": "reader"}],
        "truth": {"0": "truth.safetensors"},
    }
    spec = validate_tables(AttackFile, tables, "a.toml")
    written: dict[str, list[int]] = {"decoder": [], "reader": []}
    for value in (0.0, 0.0, 1.0):
        save_file({"data": torch.full((4, 6), value), "labels": torch.zeros(4).long()}, tmp_path / "truth.safetensors")
        assert Audit(folder=folder, spec=spec, experiment=None, base_folder=tmp_path).run() == []
        for title, stamps in written.items():
            [path] = (folder.findings / title).glob("*.safetensors")
            stamps.append(path.stat().st_mtime_ns)
    assert written["reader"][0] == written["reader"][1] < written["reader"][2]
    assert len(set(written["decoder"])) == 1  # it does not read them


def test_elsewhere_there_are_no_optimal_models_and_no_columns(run: Callable[..., OpenRun], tmp_path: Path) -> None:
    folder = run(DECODER)

    def elsewhere(*attacks: dict[str, Any], **knowledge: Any) -> Audit:
        tables = {"adversary": {"knowledge": knowledge}, "attack": list(attacks), "truth": {"0": "truth.safetensors"}}
        return Audit(
            folder=folder, spec=validate_tables(AttackFile, tables, "a.toml"), experiment=None, base_folder=tmp_path
        )

    save_file({"data": torch.rand(4, 6), "labels": torch.zeros(4).long()}, tmp_path / "truth.safetensors")
    with pytest.raises(ConfigError, match=r"^attack.sia.source: 'optimal' is for the run of an experiment"):
        elsewhere(attack("sia", "optimal")).check()
    with pytest.raises(ConfigError, match=r"^adversary.knowledge.partial_records: a recording made elsewhere names no"):
        elsewhere(DECODER, partial_records="sensitive").check()
    audit = elsewhere(DECODER, records=True, value_range=[-1.0, 3.0])
    common = grant_knowledge(audit.spec.adversary, audit.case, tmp_path)
    own = grant_private(common, audit.spec.adversary, audit.case, 0, audit.case.truth(0, 1))
    truth = audit.case.truth(0, 1)
    assert truth is not None
    assert own.records is not None
    torch.testing.assert_close(own.records.inputs, truth.data * 4 - 1)
    without = elsewhere(DECODER, records=True, value_range=False)
    common = grant_knowledge(without.spec.adversary, without.case, tmp_path)
    with pytest.raises(ConfigError, match=r"^adversary.knowledge.records: the truth is in \[0, 1\], and without value"):
        grant_private(common, without.spec.adversary, without.case, 0, truth)


def test_partial_records_hold_nothing_of_the_column(tables: dict[str, Any]) -> None:
    experiment = Experiment(make_tiny_config(**tables, attack=[DECODER]))
    audit = Audit(folder=OpenRun(Path()), spec=experiment.config, experiment=experiment, base_folder=Path())
    granted = grant_private(
        grant_knowledge(audit.spec.adversary, audit.case, Path()),
        audit.spec.adversary,
        audit.case,
        1,
        audit.case.truth(1, 1),
    )
    assert granted.records is not None
    assert granted.partial_records is not None
    partial, column = granted.partial_records, experiment.dataset.column("sensitive")
    assert (partial.inputs[:, column.features] == 0).all()
    true = column.values(experiment.data.train(1)[0])
    for category in (0, 1):
        rows = true == category
        torch.testing.assert_close(partial.complete_with(category)[rows], granted.records.inputs[rows])
    assert {"records", "partial_records"} <= set(granted.granted_facts())


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        ("x0", "column 'x0' holds numbers, and candidates for these "),
        ("sex", "'leaf-synthetic' has no column 'sex', known: sensitive, x0, x1,"),
        ("sensitiv", "'leaf-synthetic' has no column 'sensitiv', did you mean 'sensitive'?"),
    ],
)
def test_a_column_that_cannot_be_inferred(tables: dict[str, Any], column: str, sentence: str) -> None:
    tables["adversary"] = {"when": "never", "knowledge": {"partial_records": column}}
    experiment = Experiment(make_tiny_config(**tables, attack=[DECODER]))
    audit = Audit(folder=OpenRun(Path()), spec=experiment.config, experiment=experiment, base_folder=Path())
    with pytest.raises(ConfigError) as caught:
        audit.check()
    assert str(caught.value).startswith(f"adversary.knowledge.partial_records: {sentence}")


def test_attacks_on_several_rounds_wait_for_the_end_of_the_run(run: Callable[..., OpenRun]) -> None:
    """In the round loop they would be made on one round alone, and be scored beside those on all."""
    folder = run(DECODER)
    attack_round(folder.path, 3)
    assert not folder.findings.exists()
    assert open_audit(folder.path, None, trust=True).run() == []
    assert {path.stem[:9] for path in (folder.findings / "decoder").iterdir()} == {"round-1-5"}


def test_a_model_decoded_from_other_rounds_is_not_built_upon(run: Callable[..., OpenRun]) -> None:
    """Rounds 1, 3 and 5 have the file name of rounds 1 and 5."""
    folder = run(DECODER)
    assert open_audit(folder.path, None, trust=True).run() == []
    tables = {"adversary": {"victims": [0], "rounds": [1, 5], "workers": 1, "knowledge": {"records": True}}}
    fewer = validate_tables(AttackFile, {**tables, "attack": [DECODER, attack("sia", "decoder")]}, "a.toml")
    [failure] = open_audit(folder.path, fewer, trust=True).run()
    assert failure == (
        "sia, rounds 1+5, client 0: expected at least 2 candidates for the source of a record, but 1 have a model that "
        "'decoder' decoded; attack more victims, or see why it failed for the others"
    )


def test_a_federation_of_gradients_has_one_proxy_and_typical_images_of_all_examples(tmp_path: Path) -> None:
    attacks = [attack("shared-model", "global"), attack("sra-model", "global", iterations=1)]
    folder = run_serial(
        make_tiny_config(
            strategy={"name": "fedsgd", "learning_rate": 0.1},
            training={"local_epochs": None, "local_steps": 1, "batch_size": 2},
            partition={"samples_per_client": 40},
            federation={"clients": 2, "rounds": 2},
            adversary={"victims": [0], "rounds": "all"},
            attack=attacks,
        ),
        tmp_path / "run",
    )
    audit = open_audit(folder.path, None, trust=True)
    assert audit.run() == []
    rows = {row["metric"]: row for row in audit.score()}
    assert rows["parameter_distance"]["floor_guess"] == "global model"
    assert rows["parameter_distance"]["value"] == rows["parameter_distance"]["floor"]
    whole, batch = audit.case.truth(0, None), audit.case.truth(0, 1)
    assert whole is not None
    assert batch is not None
    assert len(batch.labels) == 2 < len(whole.labels)
    # Of each class that it holds there is something to compare with, not of those of one batch alone.
    values = [float(row["value"]) for row in read_rows(folder.images) if row["metric"] == "class_psnr"]
    assert [value > 0 for value in values] == [label in whole.labels for label in range(len(values))]


def test_every_kind_of_finding_survives_the_disk(tmp_path: Path) -> None:
    trace = {"objective": torch.arange(3.0)}
    images = {"data": torch.rand(2, 1, 4, 4), "labels": torch.tensor([0, 3])}
    findings: list[Finding] = [
        LocalModel(state={"b.weight": torch.rand(2, 3), "a.bias": torch.rand(2)}, trace=trace),
        Inference(of="source", candidates=torch.tensor([4, 7]), scores=torch.rand(3, 2), trace=trace),
        Inference(of="attribute", candidates=torch.arange(2), scores=torch.rand(3, 2)),
        Representatives(**images, trace=trace),
    ]
    for finding in findings:
        save_finding(finding, tmp_path / "f.safetensors", {"about": 1})
        again, about = load_finding(tmp_path / "f.safetensors")
        assert type(again) is type(finding)
        assert about == {"about": 1}
        assert list(again.tensors) == list(finding.tensors)
        for name, tensor in finding.tensors.items():
            torch.testing.assert_close(again.tensors[name], tensor)
        if isinstance(finding, Inference) and isinstance(again, Inference):
            assert again.of == finding.of
            assert again.predictions.tolist() == finding.candidates[finding.scores.argmax(1)].tolist()


def test_the_pictures_of_typical_images_stand_beside_the_most_alike_true_ones(tmp_path: Path) -> None:
    folder = run_serial(
        make_tiny_config(
            partition={"samples_per_client": 60},
            attack=[attack("sra-model", iterations=3)],
            adversary={"victims": [0], "rounds": "all"},
        ),
        tmp_path / "run",
    )
    audit = open_audit(folder.path, None, trust=True)
    assert audit.run() == []
    audit.score()
    assert {row["metric"] for row in read_rows(folder.scores)} >= {"class_ssim", "class_psnr"}
    html = write_report(audit.folder, audit).read_text()
    assert "originals and reconstructions by sra-model" in html
