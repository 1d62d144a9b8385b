"""Federations that aggregate securely: what the server sees, on which engine ever, and what attacks make of it."""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message
from flwr.serverapp.strategy import FedAvg
from safetensors import safe_open
from torch import Tensor

import fedsim
import fedsim.federation.engines.cohort
from fedsim.api import pipeline
from fedsim.audit.audit import open_audit
from fedsim.audit.finding_files import read_facts
from fedsim.audit.visibility import explain_group_refusal
from fedsim.base.errors import ConfigError, FedsimError, KnowledgeError
from fedsim.cli.inspect import inspect
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.privacy_tables import SecureAggregationTable
from fedsim.federation.run_folder import read_rows
from fedsim.federation.secure_aggregation import check_defenses, check_weights
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.plugins import registry
from fedsim.recording.payloads import Payload
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State
from fedsim.report.page import write_report
from tests.integration.test_client_memory import started
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import assert_same_runs
from tests.support.tensors import flatten_state

GROUPS: dict[str, Any] = {"groups": 3, "threshold": 2}


def secure(*, table: dict[str, Any] | None = None, **tables: Any) -> Config:
    federation = {"clients": 8, "rounds": 3, "straggler_probability": 0.2, **tables.pop("federation", {})}
    return make_tiny_config(federation=federation, secure_aggregation=GROUPS if table is None else table, **tables)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenRun]:
    """The same federation without secure aggregation and with it."""
    folder, config = tmp_path_factory.mktemp("runs"), secure()
    plain = config.model_copy(update={"secure_aggregation": None})
    return {"plain": run_serial(plain, folder / "plain"), "secure": run_serial(config, folder / "secure")}


# What the server sees.


def test_a_common_mask_is_that_of_all_clients_in_one_round_and_another_one_in_the_next(tmp_path: Path) -> None:
    mask = {"name": "random-mask", "masked": 0.5, "common": True}
    federation = {"clients": 3, "rounds": 2}
    plain = Transcript(run_serial(make_tiny_config(federation=federation, defense=[mask]), tmp_path / "plain").path)
    masks = {(u.round, u.client): flatten_state(u.pseudo_gradient).double() == 0 for u in plain.updates()}
    left_out = [torch.stack([masks[number, client] for client in range(3)]) for number in (1, 2)]
    for each in left_out:
        assert (each == each.all(0)).float().mean() > 0.9  # a number may be zero by itself
        assert each.all(0).float().mean() > 0.3
    assert (left_out[0].all(0) == left_out[1].all(0)).float().mean() < 0.7
    config = secure(federation={**federation, "straggler_probability": 0.0}, defense=[mask])
    (summed,) = Transcript(run_serial(config, tmp_path / "secure").path).restrict_to([1]).updates()
    assert not flatten_state(summed.pseudo_gradient).double()[left_out[0].all(0)].any()


def test_the_recording_has_the_weighted_mean_of_each_group_and_who_is_in_it(runs: dict[str, OpenRun]) -> None:
    plain, sums = (Transcript(runs[name].path) for name in ("plain", "secure"))
    for update in sums.updates():
        assert update.members
        assert update.client == update.members[0]
        assert dict(update.metrics) == {}
        assert update.sends_delta
    alone = {update.client: update for update in plain.updates() if update.round == 1}  # later the models differ
    for update in (update for update in sums.updates() if update.round == 1):
        parts = [alone[client] for client in update.members]
        assert update.num_examples == sum(part.num_examples for part in parts)
        mean = (
            sum(part.num_examples * flatten_state(part.pseudo_gradient).double() for part in parts)
            / update.num_examples
        )
        assert torch.allclose(flatten_state(update.pseudo_gradient).double(), mean, atol=1e-6)  # type: ignore[arg-type]
    for number in sums.rounds:
        members = [client for reply in sums.header(number).replies for client in reply.members]
        assert sorted([*members, *sums.header(number).failures]) == list(range(8))
        assert len(members) == len(set(members))


def test_the_model_is_that_of_the_federation_without(runs: dict[str, OpenRun]) -> None:
    one, other = (Transcript(runs[name].path) for name in ("plain", "secure"))
    before = [flatten_state(transcript.update(3, transcript.clients(3)[0]).before) for transcript in (one, other)]
    assert torch.allclose(*before, atol=1e-5)
    assert not torch.equal(*before)


def test_no_update_of_a_single_client_reaches_the_strategy_or_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as it was trained, nor as a difference, nor quantised; and not while a large round waits either."""
    own, passed = list[Tensor](), list[Message]()
    aggregate, evaluate = FedAvg.aggregate_train, FedAvg.aggregate_evaluate
    _note_clients(own, monkeypatch)

    def seen(method: Any) -> Any:
        def spied(strategy: Any, number: int, replies: Any) -> Any:
            replies = list(replies)
            passed.extend(replies)
            return method(strategy, number, replies)

        return spied

    monkeypatch.setattr(FedAvg, "aggregate_train", seen(aggregate))
    monkeypatch.setattr(FedAvg, "aggregate_evaluate", seen(evaluate))
    monkeypatch.delattr(fedsim.federation.engines.cohort, "ReplySpool")  # which moves replies of large rounds to disk
    folder = run_serial(secure(partition={"test_fraction": 0.2}), tmp_path / "run")
    assert len(own) >= 8
    known = {values for update in own for values in _forms(update)}
    told = [dict(record) for message in passed if message.has_content() for record in _metrics(message)]
    assert told
    assert all(set(one) == {"num-examples"} for one in told)
    arrays = [
        array.numpy()
        for m in passed
        if m.has_content()
        for r in m.content.array_records.values()
        for array in r.values()
    ]
    files = list(folder.path.rglob("*.safetensors"))
    assert len(files) >= 4
    for path in files:
        with safe_open(path, framework="np") as file:
            arrays += [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    held = {form for array in arrays for form in _forms(torch.from_numpy(np.array(array)))}
    assert held
    assert not held & known
    for path in (path for path in folder.path.rglob("*") if path.is_file()):
        text = path.read_bytes()
        assert not [values for values in known if values in text], path
        assert b"train_loss" not in text or path.name == "experiment.toml"


def _note_clients(own: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note each array that a client returns, and that it quantises, before and after."""
    from strategies.secure_sum import SecureSum

    real, sums = SecureSum.quantise, SecureSum.sum_groups

    def noted(rules: SecureSum, update: Any, count: int, *key: int) -> Any:
        got = real(rules, update, count, *key)
        own.extend(torch.from_numpy(np.array(values)) for values in (*update.values(), *got[1:]))
        return got

    def watched(replies: Any) -> Any:
        for reply in replies:
            for record in reply.content.array_records.values() if reply.has_content() else ():
                own.extend(torch.from_numpy(array.numpy()) for array in record.values())
            yield reply

    monkeypatch.setattr(SecureSum, "quantise", noted)
    monkeypatch.setattr(SecureSum, "sum_groups", lambda rules, replies, *rest: sums(rules, watched(replies), *rest))


def _metrics(message: Message) -> Any:
    return message.content.metric_records.values()


def _forms(values: Tensor) -> list[bytes]:
    """The bytes of an array of eight numbers or more that are not all the same."""
    if values.numel() < 8 or len(values.unique()) < 2:
        return []
    return [np.ascontiguousarray(values.numpy()).tobytes()]


def test_gradients_are_summed_too_and_the_truth_is_the_mini_batches_of_all_members(tmp_path: Path) -> None:
    config = secure(
        strategy={"name": "fedsgd", "learning_rate": 0.1},
        training={"local_epochs": None, "local_steps": 1, "learning_rate": 0.1, "batch_size": 4},
        federation={"straggler_probability": 0.0},
        adversary={"when": "never", "knowledge": {"labels": True}},
        attack=[{"name": "inverting-gradients", "iterations": 2}],
    )
    folder = run_serial(config, tmp_path / "run")
    transcript = Transcript(folder.path)
    for update in transcript.updates():
        assert update.num_examples == 4 * len(update.members)
        assert update.gradient is not None
    audit = open_audit(folder.path, None)
    first = transcript.header(1).replies[0]
    truth = audit.case.truth(first.client, 1, first.members)
    assert truth is not None
    assert audit.experiment is not None
    held = torch.cat([audit.experiment.attacked_examples(client, 1)[1] for client in first.members])
    assert torch.equal(truth.labels, held)


# The same bytes.


def test_a_resumed_run_is_the_run(runs: dict[str, OpenRun], tmp_path: Path) -> None:
    run_serial(secure(federation={"rounds": 1}), tmp_path / "run")
    assert_same_runs(run_serial(secure(), tmp_path / "run", resume=True), runs["secure"])


@pytest.mark.slow
def test_supernodes_give_the_same_bytes(runs: dict[str, OpenRun], tmp_path: Path) -> None:
    process = started(secure(federation={"engine": "flower", "supernodes": 2}), tmp_path / "run")
    said = process.communicate(timeout=250)
    assert process.returncode == 0, said
    assert_same_runs(OpenRun(tmp_path / "run"), runs["secure"])


# Rounds that are lost.


def test_a_round_whose_groups_are_all_lost_leaves_the_model_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = secure(
        table={"groups": "all", "threshold": 1.0},
        federation={"clients": 4, "rounds": 6, "straggler_probability": 0.15, "evaluate_every": 0},
    )
    with caplog.at_level(logging.WARNING):
        folder = run_serial(config, tmp_path / "run")
    transcript = Transcript(folder.path)
    lost = [number for number in transcript.rounds if not transcript.clients(number)]
    kept = [number for number in transcript.rounds if transcript.clients(number)]
    assert lost
    assert kept
    assert "the strategy aggregated nothing, too few clients returned; the model stays" in caplog.text
    for number in lost:
        failures = transcript.header(number).failures
        assert sorted(failures) == [0, 1, 2, 3]
        assert any("its sum is lost" in why for why in failures.values())
    after = {number: flatten_state(transcript.update(number, 0).before).double() for number in kept}
    gaps = [(one, two) for one, two in itertools.pairwise(kept) if two > one + 1]
    assert gaps
    for one, two in gaps:  # nothing happened in between
        moved = flatten_state(transcript.update(one, 0).after).double() - after[two]
        assert moved.abs().max() < 1e-6


# What makes no sense.


@pytest.mark.parametrize(
    ("table", "tables", "expected"),
    [
        (
            {"groups": 9},
            {},
            r"secure_aggregation.groups: expected at most federation.clients = 8, and 2 clients or more, got 9",
        ),
        (
            {"groups": 1},
            {},
            r"groups: expected 2 clients or more, since the sum over one is its update, or 'all', got 1",
        ),
        ({"groups": 3, "threshold": 4}, {}, r"threshold: 4 of a group have to answer, but groups = 3; lower it"),
        (
            {"threshold": 9},
            {},
            r"secure_aggregation.threshold: 9 of a group have to answer, but federation.clients is 8",
        ),
        (
            {"threshold": 0},
            {},
            r"threshold: expected a number of clients from 1 on, or a fraction above 0 and .* got 0",
        ),
        ({"threshold": 1.5}, {}, r"threshold: expected a number of clients from 1 on, or a fraction .* got 1.5"),
        ({"bits": 3}, {}, r"bits: expected 4 to 24, the numbers that float32 can distinguish, got 3"),
        ({"bits": 25}, {}, r"bits: expected 4 to 24, the numbers that float32 can distinguish, got 25"),
        ({"clip": 0.0}, {}, r"clip: expected a value above 0, in units of the update, got 0"),
        ({"clip": -1.0}, {}, r"clip: expected a value above 0, in units of the update, got -1"),
        ({"group": 3}, {}, r"secure_aggregation.group: unknown key, did you mean 'groups'"),
        (
            {},
            {"canaries": {"count": 100}},
            r"canaries: they measure what one client's messages reveal, and under",
        ),
        ({}, {"recording": {"clients": [0]}}, r"recording.clients: under secure aggregation the server sees groups"),
    ],
)
def test_tables_that_make_no_sense_are_one_sentence(
    table: dict[str, Any], tables: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        secure(table=table, **tables)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("table", "tables", "expected"),
    [
        (
            {"groups": 5},
            {"strategy": {"name": "fedavg", "fraction_train": 0.5}},
            "groups: 5, but a round has 4 of the 8",
        ),
        ({}, {"strategy": {"name": "fedavg", "fraction_train": 0.2}}, "groups: all, but a round has 1 of the 8"),
        (
            {"threshold": 5},
            {"strategy": {"name": "fedavg", "fraction_train": 0.5}},
            "threshold: 5 of a group have to answer, but a round has groups of 4; lower it",
        ),
        ({}, {"strategy": {"name": "krum"}}, "Krum chooses among the updates of single clients, and under secure"),
        ({}, {"strategy": {"name": "fedmedian"}}, "FedMedian sorts the updates of single clients"),
        ({}, {"strategy": {"name": "fedtrimmedavg"}}, "FedTrimmedAvg sorts the updates of single clients"),
        (
            {},
            {"strategy": {"name": "qfedavg", "client_learning_rate": 0.1}},
            "QFedAvg weights each client by its own loss",
        ),
        (
            {},
            {"strategy": {"name": "fedavg", "weighted_by_key": "train_loss"}},
            "strategy.weighted_by_key: under secure aggregation clients are weighted by 'num-examples'",
        ),
        ({}, {"defense": [{"name": "quantise"}]}, "defense: quantise sends the update in another form, and under"),
        ({}, {"defense": [{"name": "top-k"}]}, "defense: top-k sends the update in another form"),
        ({}, {"defense": [{"name": "random-mask"}]}, "random-mask with common = true"),
        (
            {"bits": 24},
            {"federation": {"clients": 256}, "partition": {"samples_per_client": 2}},
            r"bits: sums are taken modulo 2\^32, and those over 256 clients with 24 bits .*; expected at most 23",
        ),
    ],
)
def test_what_does_not_go_with_sums_is_refused_before_work(
    table: dict[str, Any], tables: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        Experiment(secure(table=table, **tables)).check()
    assert "\n" not in str(error.value)


def test_a_weight_that_would_be_rounded_to_nothing_is_refused() -> None:
    check_weights(SecureAggregationTable(bits=4), [4, 100])
    expected = (
        "secure_aggregation.bits: the weight of a client with 3 of at most 100 examples is rounded to 0 with 4 bits, "
        "so that its update would not count; expected at least 5"
    )
    with pytest.raises(ConfigError, match=expected):
        check_weights(SecureAggregationTable(bits=4), [3, 100, 50])


def test_a_defense_whose_clients_leave_out_the_same_goes_with_sums() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Common(Defense):
        common: bool = True
        encodes: ClassVar[bool] = True
        paper: ClassVar[Paper] = Paper(title="t", authors="a", venue="v", year=2000, url="")

        @property
        def draws_in_common(self) -> bool:
            return self.common

        def on_update(self, update: State, context: LocalContext) -> Payload:
            return Payload.from_sparse(update)

    check_defenses([Common()])
    with pytest.raises(ConfigError, match="Common sends the update in another form"):
        check_defenses([Common(common=False)])
    Experiment(secure(defense=[{"name": "layer-freeze", "layers": ["*.bias"]}])).check()


def test_layers_that_are_frozen_are_zero_in_the_sum(tmp_path: Path) -> None:
    defense = [
        {"name": "layer-freeze", "layers": ["*.bias"]},
    ]
    folder = run_serial(secure(defense=defense, federation={"rounds": 1}), tmp_path / "run")
    for update in Transcript(folder.path).updates():
        largest = {name: tensor.abs().max().item() for name, tensor in update.pseudo_gradient.items()}
        assert all(value < 1e-6 if name.endswith("bias") else value > 1e-3 for name, value in largest.items())


# Attacks.


def attacked(config: Config, path: Path) -> pipeline.AuditResult:
    return pipeline.run(config, OpenRun(path))


def test_a_group_is_attacked_as_one_client_that_holds_all(tmp_path: Path) -> None:
    config = secure(
        partition={"samples_per_client": 2},
        federation={"clients": 6, "rounds": 1, "straggler_probability": 0.0},
        adversary={"when": "at-end", "victims": [5, 2], "rounds": [1], "workers": 1, "knowledge": {"labels": True}},
        attack=[{"name": "inverting-gradients", "iterations": 2}],
    )
    done = attacked(config, tmp_path / "run")
    assert done.failures == []
    transcript, experiment = Transcript(done.folder.path), Experiment(config)
    rows = read_rows(done.folder.scores, ("attack",), ())
    for path in sorted(done.folder.findings.rglob("*.safetensors")):
        about = read_facts(path)
        reply = transcript.header(int(about["round"])).find_reply(about["victim"])
        assert reply is not None
        assert about["members"] == list(reply.members)
        assert {5, 2} & set(about["members"])
        own = [row for row in rows if row["victim"] == str(about["victim"]) and row["round"] == about["round"]]
        assert {int(row["examples"]) for row in own} == {2 * len(reply.members)}
        truth = open_audit(done.folder.path, None).case.truth(about["victim"], int(about["round"]), reply.members)
        assert truth is not None
        labels = torch.cat([experiment.data.train(client)[1] for client in reply.members])
        assert torch.equal(truth.labels, labels)
    page = done.folder.report.read_text()
    assert "the sum over clients" in page
    assert "which client holds an example is not known" in page
    assert "sums over groups of 3 clients or more, drawn in each round" in page
    assert "and who is in it, but no update of a single client" in page
    assert "reads all messages" not in page


def test_batches_of_a_group_are_those_of_its_members_together(tmp_path: Path) -> None:
    """With full batches and one epoch, the sum is the gradient of all examples of the group, times the rate."""
    from fedsim.audit.threat_model import scale_to_group
    from fedsim.interfaces.knowledge import Knowledge

    known = scale_to_group(Knowledge(batch_size=8, local_epochs=2), 3)
    assert (known.batch_size, known.local_epochs) == (24, 2)
    assert scale_to_group(Knowledge(local_steps=5), 3).batch_size is None
    assert scale_to_group(Knowledge(batch_size=8), 0).batch_size == 8
    config = secure(
        training={"batch_size": 24},
        federation={"rounds": 1, "straggler_probability": 0.0},
    )
    folder, experiment = run_serial(config, tmp_path / "run"), Experiment(config)
    for update in Transcript(folder.path).updates():
        inputs, labels = map(torch.cat, zip(*experiment.data.model_examples(update.members), strict=True))
        model = experiment.new_model()
        model.load_state_dict(dict(update.before))
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        moved = flatten_state(update.pseudo_gradient).double() / config.training.learning_rate
        assert torch.allclose(moved, torch.cat([g.flatten() for g in gradient]).double(), atol=1e-5)


@pytest.mark.parametrize("attack", ["lmra", "lmra-linear", "lmra-dummy-data", "shared-model", "sia"])
def test_an_attack_on_single_clients_does_not_apply_and_says_so_before_work(attack: str, tmp_path: Path) -> None:
    config = secure(adversary={"when": "at-end", "knowledge": {"records": True}}, attack=[{"name": attack}])
    with pytest.raises(KnowledgeError, match="does not apply: it reads the updates of single clients") as error:
        attacked(config, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "transcript").exists()


@pytest.mark.thorough
def test_several_rounds_of_a_group_have_to_be_of_the_same_members(tmp_path: Path) -> None:
    def audit_result(table: dict[str, Any], name: str, *others: str) -> pipeline.AuditResult:
        return attacked(
            secure(
                table=table,
                strategy={"name": "fedsgd", "learning_rate": 0.1},
                training={
                    "local_epochs": None,
                    "local_steps": 1,
                    "learning_rate": 0.1,
                    "batch_size": 4,
                    "batches": "fixed",
                },
                partition={"samples_per_client": 4},
                federation={"clients": 4, "rounds": 2, "straggler_probability": 0.0},
                adversary={"when": "at-end", "rounds": "all", "victims": [1], "workers": 1},
                attack=[{"name": "tgias-ro", "iterations": 2, "fewest": 2}, *({"name": other} for other in others)],
            ),
            tmp_path / name,
        )

    failure, needs_several = audit_result({"groups": 2}, "drawn", "sratta").failures
    assert failure.startswith(
        "tgias-ro does not apply: it reads several rounds of one group, and the members of groups"
    )
    assert failure.endswith("attack one round (adversary.rounds)")
    assert needs_several.endswith(
        "record a group that stays the same, as all clients do ([secure_aggregation] groups = 'all')"
    )
    done = audit_result({"groups": "all"}, "all")
    assert done.failures == []
    assert done.readings


def test_the_sums_of_somebody_elses_app_are_not_taken_for_clients(tmp_path: Path) -> None:
    """A recording without an experiment says in its headers what it has seen."""
    config = secure(federation={"rounds": 1, "straggler_probability": 0.0})
    folder = pipeline.run(config, OpenRun(tmp_path / "run")).folder
    for name in ("experiment.toml", "manifest.json"):
        (folder.path / name).unlink()
    run = fedsim.open(folder.path)
    with pytest.raises(FedsimError, match="shared-model does not apply: it reads the updates of single clients"):
        run.attack("shared-model")


def test_run_attack_finds_the_group_of_a_client(tmp_path: Path) -> None:
    config = secure(partition={"samples_per_client": 2}, federation={"straggler_probability": 0.0})
    folder = pipeline.run(config, OpenRun(tmp_path / "run")).folder
    victim = Transcript(folder.path).header(1).replies[0].members[-1]
    run = fedsim.open(folder.path)
    finding = run.attack("inverting-gradients", victim=victim, iterations=2)
    assert len(finding.data) >= 6  # type: ignore[attr-defined]


def test_geometry_of_sums_is_refused(runs: dict[str, OpenRun]) -> None:
    from fedsim.report.geometry import geometries_of_updates

    folder = runs["secure"]
    config = folder.read_experiment()
    assert config is not None
    with pytest.raises(ConfigError, match="geometry: under secure aggregation sums over groups are recorded"):
        list(geometries_of_updates(Experiment(config), Transcript(folder.path), [1]))


# Single clients again.


def test_inspect_and_the_report_tell_sums_from_updates_of_clients(
    runs: dict[str, OpenRun], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, updates in (("plain", "updates"), ("secure", "sums over groups")):
        inspect(runs[name].path)
        shown = capsys.readouterr().out
        assert re.search(rf"clients +8, 0 to 7 *\n *{updates} ", shown)
        assert ("bytes sent" in shown) == (name == "plain")
        assert ("8 bytes for each number, masked" in " ".join(shown.split())) == (name == "secure")
        html = write_report(OpenRun(runs[name].path)).read_text("utf-8")
        assert ("Clients sent" in html) == (name == "plain")
        assert ("8 bytes for each number, masked" in html) == (name == "secure")
        assert ("<td>6, in 2 sums</td>" in html) == (name == "secure")


@pytest.mark.thorough
def test_disaggregated_models_are_models_that_others_build_on(tmp_path: Path) -> None:
    config = secure(
        table={"groups": 2},
        federation={"clients": 5, "rounds": 8, "straggler_probability": 0.0, "evaluate_every": 0},
        adversary={
            "when": "at-end", "victims": [0, 3], "rounds": "all", "workers": 1, "knowledge": {"records": True},
        },
        attack=[{"name": "disaggregation"}, {"name": "sia", "source": "disaggregation"}],
    )  # fmt: skip
    done = attacked(config, tmp_path / "run")
    assert done.failures == []
    rows = read_rows(done.folder.scores, ("attack",), ("value", "floor"))
    for attack, metric in (("disaggregation", "parameter_distance"), ("sia", "source_accuracy")):
        mine = [row for row in rows if row["attack"] == attack and row["metric"] == metric]
        assert sorted(row["victim"] for row in mine) == ["0", "3"]
        assert all(float(row["floor"]) > 0 for row in mine)
    abouts = [read_facts(path) for path in done.folder.findings.rglob("*.safetensors")]
    assert all(about["members"] == [] for about in abouts)


def test_the_attacks_that_build_on_disaggregated_models_are_those_that_the_page_and_the_error_name() -> None:
    building = set[str]()
    for name in registry.registered_names("attacks"):
        try:
            built = registry.build("attacks", name, {"source": "disaggregation"}, "attack")
        except ConfigError:
            continue
        building |= {name} if built.builds_on == "disaggregation" else set()
    page = Path("docs/explanation/local-models.md").read_text("utf-8")
    sentence = re.search(r"`source = \"disaggregation\"`: (.*?)\.\n", page, re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`([\w-]+)`", sentence[1])) == building
    told = {
        name
        for name in registry.registered_names("attacks")
        if "'disaggregation' (source)" in explain_group_refusal(registry.build("attacks", name, {}, "attack"))
    }
    assert told == building


def test_one_group_of_all_hides_single_clients_from_the_regression(tmp_path: Path) -> None:
    config = secure(
        table={"groups": "all"},
        federation={"clients": 4, "rounds": 6, "straggler_probability": 0.0, "evaluate_every": 0},
        adversary={"when": "at-end", "victims": [2], "rounds": "all", "workers": 1},
        attack=[{"name": "disaggregation"}],
    )
    (failure,) = attacked(config, tmp_path / "run").failures
    assert "client 2: its update does not follow from the sums: 6 sums over 4 clients have rank 1" in failure
    assert "clients 0, 1, 2, 3 are always in the same groups" in failure
