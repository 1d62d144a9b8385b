"""Proved and measured epsilon in whole runs: beside each other, reproducible, and loud where a promise is broken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import fedsim
from clients.defenses.dp_sgd import DpSgd
from clients.defenses.update_noise import UpdateNoise
from fedsim.audit.evaluation.empirical_epsilon import (
    EpsilonComparison,
    _list_rounds,
    _shadow_scores,
    read_epsilons,
)
from fedsim.base.errors import ConfigError, RunError
from fedsim.federation.run_folder import RunFolder
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Guarantee, Participation, Poisson
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.ceilings import compute_composed_epsilon
from fedsim.privacy.central import CentralPrivacy
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State
from fedsim.training.canaries import CANARY_VALUE, Canaries
from strategies.central_privacy import CentrallyPrivate
from strategies.round_noise import RoundNoise
from tests.support.experiments import make_tiny_config

DP_SGD: dict[str, Any] = {"name": "dp-sgd", "noise_multiplier": 1.0}
FEW: dict[str, Any] = {"canaries": {"count": 200}}
PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")


def tables(*defenses: Any, **others: dict[str, Any]) -> dict[str, Any]:
    """An experiment of three clients, of which the first carries canaries."""
    found: dict[str, Any] = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 40},
        "model": {"name": "mlp", "hidden": [32]},
        "training": {"local_steps": 8, "batch_size": 4, "learning_rate": 0.1},
        "federation": {"engine": "serial", "clients": 3, "rounds": 3, "seed": 1},
        "defense": list(defenses),
        "canaries": {"count": 1000},
        "adversary": {"when": "never"},
    }
    return {name: found.get(name, {}) | others[name] if name in others else found[name] for name in found | others}


def run(path: Path, *defenses: Any, **others: dict[str, Any]) -> list[EpsilonComparison]:
    fedsim.run(tables(*defenses, **others), out=path, overwrite=True)
    return read_epsilons(RunFolder(path))


def test_proved_and_measured_epsilon_stand_side_by_side(tmp_path: Path) -> None:
    noise = {"name": "update-noise", "clip": 1.0, "noise_multiplier": 4.0}
    found = run(tmp_path / "run", DP_SGD, noise, canaries={"count": 200, "clients": [0, 2]})
    assert [(item.client, item.defense, item.rounds) for item in found] == [
        (client, name, 3) for client in (0, 2) for name in ("dp-sgd", "update-noise")
    ]
    for item in found:
        assert item.measured.epsilon <= item.proved < 20
        assert item.measured.canaries == 200
        assert not item.is_broken
    assert found[1].measured.epsilon > 0.2
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Proved and measured epsilon" in page
    assert "Broken" not in page


@pytest.mark.parametrize(
    ("noise", "multiplier"), [pytest.param("gaussian", 3.0, marks=pytest.mark.thorough), ("laplace", 4.0)]
)
def test_noise_on_updates_keeps_its_promise_in_one_round(noise: str, multiplier: float, tmp_path: Path) -> None:
    table = {"name": "update-noise", "noise": noise, "noise_multiplier": multiplier}
    (item,) = run(tmp_path / "run", table, federation={"rounds": 1}, canaries={"count": 1000})
    assert item.measured.epsilon <= item.proved
    if noise == "laplace":
        assert item.proved == pytest.approx(0.5)
        assert item.measured.epsilon > 0.2  # one round of it is told apart as well as its epsilon allows


@pytest.mark.thorough
def test_a_clip_that_follows_the_norms_keeps_its_promise(tmp_path: Path) -> None:
    table = {"name": "update-noise", "noise_multiplier": 4.0, "quantile": 0.5, "bit_noise": 4.0}
    (item,) = run(tmp_path / "run", table)
    assert 0 < item.measured.epsilon <= item.proved


def test_without_noise_the_measured_epsilon_is_large_and_nothing_is_proved(tmp_path: Path) -> None:
    (item,) = run(tmp_path / "run", {"name": "update-noise", "noise_multiplier": 0.0}, federation={"rounds": 1})
    assert item.proved == float("inf")
    assert item.measured.epsilon > 4
    assert not item.is_broken


@dataclass(frozen=True, kw_only=True)
class WrongRate(DpSgd):
    """Samples more examples than the accountant is told."""

    def sampling(self, num_examples: int, batch_size: int) -> Poisson:
        return Poisson(rate=min(1.0, 8 * batch_size / num_examples))


@dataclass(frozen=True, kw_only=True)
class NoiseFirst(DpSgd):
    """Adds the noise before it clips."""

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        assert self.noise_multiplier is not None
        noisy = {
            name: each + self.noise_multiplier * torch.randn(each.shape, generator=context.rng)
            for name, each in gradients.items()
        }
        return {name: total / expected for name, total in self.clipped_sum(noisy).items()}


@dataclass(frozen=True, kw_only=True)
class SameNoise(DpSgd):
    """Adds the same noise in every step, as one does who seeds a generator there."""

    def on_sum(self, total: State, expected: float, context: LocalContext) -> State:
        del context
        return super().on_sum(total, expected, LocalContext(rng=torch.Generator().manual_seed(7)))


@dataclass(frozen=True, kw_only=True)
class NoiseOfTheMean(UpdateNoise):
    """Has too little noise by the number of tensors."""

    paper: ClassVar[Paper] = PAPER

    def on_update(self, update: State, context: LocalContext) -> State:
        sent = super().on_update(update, context)
        clipped = UpdateNoise(clip=self.clip).on_update(update, LocalContext(rng=context.rng))
        return {name: clipped[name] + (sent[name] - clipped[name]) / 8 for name in sent}


@pytest.mark.parametrize(
    "broken",
    [
        WrongRate(noise_multiplier=2.0),
        pytest.param(NoiseFirst(noise_multiplier=2.0), marks=pytest.mark.thorough),
        pytest.param(SameNoise(noise_multiplier=2.0), marks=pytest.mark.thorough),
        pytest.param(NoiseOfTheMean(noise_multiplier=8.0), marks=pytest.mark.thorough),
    ],
    ids=lambda defense: type(defense).__name__,
)
def test_a_broken_promise_fails_the_run_and_is_told_of_again_by_each_report(broken: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"client 0: .* does not keep its promise: epsilon = .* is proved, but at least"):
        fedsim.run(tables(broken), out=tmp_path / "run")
    (item,) = read_epsilons(RunFolder(tmp_path / "run"))
    assert item.is_broken
    assert "does not keep its promise" in (tmp_path / "run" / "report.html").read_text()
    assert fedsim.open(tmp_path / "run", trust=True).report().failures == (item.sentence,)


@pytest.mark.thorough
def test_the_same_seed_measures_the_same_and_another_one_something_else(tmp_path: Path) -> None:
    first, again = (run(tmp_path / name, DP_SGD, **FEW) for name in ("first", "again"))
    assert first == again
    assert Transcript(tmp_path / "first").hash() == Transcript(tmp_path / "again").hash()
    assert run(tmp_path / "other", DP_SGD, **FEW, federation={"seed": 2}) != first


def test_a_run_that_was_interrupted_measures_the_same(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", DP_SGD, **FEW)
    fedsim.run(tables(DP_SGD, **FEW, federation={"rounds": 2}), out=tmp_path / "cut")
    path = tmp_path / "cut" / "experiment.toml"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 3"))
    fedsim.open(tmp_path / "cut").resume()
    assert read_epsilons(RunFolder(tmp_path / "cut")) == whole


def test_canaries_change_nothing_that_other_clients_send(tmp_path: Path) -> None:
    """In the first round, up to rounding, for fewer train in one batch; later rounds begin with another model."""
    run(tmp_path / "with", DP_SGD)
    plain = tables(DP_SGD)
    del plain["canaries"]
    fedsim.run(plain, out=tmp_path / "without")
    recorded, undisturbed = Transcript(tmp_path / "with"), Transcript(tmp_path / "without")
    for client in (1, 2):
        sent = [transcript.update(1, client) for transcript in (recorded, undisturbed)]
        assert all((tensor - sent[1].after[name]).abs().max() < 1e-6 for name, tensor in sent[0].after.items())
    carrier = [transcript.update(1, 0) for transcript in (recorded, undisturbed)]
    assert carrier[0].num_examples == carrier[1].num_examples == 40
    assert any((tensor - carrier[1].after[name]).abs().max() > 1e-2 for name, tensor in carrier[0].after.items())
    assert not RunFolder(tmp_path / "without").epsilons.exists()


def test_canaries_of_clients_that_never_sent_are_a_failure(tmp_path: Path) -> None:
    """One client of three is asked in each of two rounds, so another one never is."""
    sampled = {"name": "fedavg", "fraction_train": 0.4, "min_train_nodes": 1}
    few = {"strategy": sampled, "federation": {"rounds": 2}, "canaries": {"clients": [0]}}
    fedsim.run(tables(DP_SGD, **few) | {"canaries": {"count": 50, "clients": [0, 1, 2]}}, out=tmp_path / "all")
    seen = {item.client for item in read_epsilons(RunFolder(tmp_path / "all"))}
    (missing, *_) = {0, 1, 2} - seen
    with pytest.raises(RunError, match="epsilon was not measured: none of the clients with canaries sent anything"):
        fedsim.run(tables(DP_SGD, **few | {"canaries": {"clients": [missing]}}), out=tmp_path / "none")


@dataclass(frozen=True, kw_only=True)
class LeavesOut(UpdateNoise):
    """Promises something of an update that is added or left out, whose distance is half of one that is replaced."""

    def mechanism(self, participation: Participation) -> Mechanism:
        scale = self.noise_multiplier or 1.0
        return Mechanism(scale=scale, releases=participation.rounds, unit="client")

    def guarantee(self, participation: Participation, delta: float) -> Guarantee:
        epsilon = compute_composed_epsilon([self.mechanism(participation)], delta)
        return Guarantee(epsilon=epsilon, delta=delta, neighbours="", accountant="")


def test_canaries_are_the_neighbours_that_are_declared(tmp_path: Path) -> None:
    (item,) = run(tmp_path / "run", LeavesOut(noise_multiplier=2.5), canaries={"count": 1000})
    assert 0.2 * item.proved < item.measured.epsilon < item.proved


CENTRAL: dict[str, Any] = {
    "model": {"hidden": [16]},
    "training": {"local_steps": 1},
    "strategy": {"name": "fedavg", "min_train_nodes": 1, "min_available_nodes": 1},
    "federation": {"clients": 6, "rounds": 6},
    "central_privacy": {"noise_multiplier": 4.0, "delta": 1e-5},
}
"""Tables of an experiment in which each canary is a client, and the server promises something of it."""


@pytest.mark.parametrize(
    ("fraction", "sampling", "rounds"),
    [
        (1.0, {}, 6),
        pytest.param(0.5, {"sampling": "poisson"}, 6, marks=pytest.mark.thorough),
        pytest.param(0.5, {"sampling": "cyclic"}, 3, marks=pytest.mark.thorough),
        pytest.param(0.5, {"sampling": "cyclic", "noise": "tree"}, 3, marks=pytest.mark.thorough),
        pytest.param(0.5, {"sampling": "cyclic", "noise": "banded"}, 3, marks=pytest.mark.thorough),
    ],
)
def test_models_tell_of_a_client_what_the_server_promises_and_hardly_less(
    fraction: float, sampling: dict[str, str], rounds: int, tmp_path: Path
) -> None:
    strategy = CENTRAL["strategy"] | {"fraction_train": fraction}
    noise = {"noise_multiplier": 1.0} if fraction < 1 else {}
    privacy = CENTRAL["central_privacy"] | sampling | noise
    (item,) = run(tmp_path / "run", **CENTRAL | {"strategy": strategy, "central_privacy": privacy})
    assert (item.client, item.defense, item.rounds) == (None, "central_privacy", rounds)
    assert item.measured.uses_curve
    assert 0.1 * item.proved < item.measured.epsilon < item.proved


@pytest.mark.parametrize("share", [0.3, pytest.param(0.0, marks=pytest.mark.thorough)])
def test_a_server_with_less_noise_than_it_promises_fails_the_run(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CentralPrivacy, "sum_noise", property(lambda self: share * self.noise_multiplier))
    with pytest.raises(RunError, match=r"^each client: central_privacy does not keep its promise"):
        run(tmp_path / "run", **CENTRAL)


def test_a_server_that_uses_its_noise_again_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = RoundNoise.draw
    monkeypatch.setattr(RoundNoise, "draw", lambda self, values, server_round, clip: draw(self, values, 1, clip))
    with pytest.raises(RunError, match=r"^each client: central_privacy does not keep its promise"):
        run(tmp_path / "run", **CENTRAL)


def test_a_server_that_does_not_clip_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Any, update: Any, total: Any, client: int) -> float:
        for name, values in update.items():
            total[name] += values.clip(-10, 10)
        return 0.5

    monkeypatch.setattr(CentrallyPrivate, "_add_clipped", add)
    with pytest.raises(RunError, match=r"^each client: central_privacy does not keep its promise"):
        run(tmp_path / "run", **CENTRAL)


@pytest.mark.parametrize(
    ("tables_", "sentence"),
    [
        ({"canaries": {"clients": [0]}}, "canaries.clients: with .* each canary is a separate client"),
        (
            {"central_privacy": {"quantile": 0.5, "count_noise": 9.0}},
            "canaries: the server clips all of them, so",
        ),
        ({"recording": {"rounds": [2]}}, "of 6 rounds recording keeps one model alone, that before round 2; record"),
        ({"recording": {"every": 6}}, "of 6 rounds recording keeps one model alone, that before round 1; record"),
        ({"canaries": {"count": 5000}}, "canaries.count: each needs a number .* expected at most 1210"),
    ],
)
def test_canaries_that_cannot_be_clients_are_refused(tables_: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    settings = {name: CENTRAL.get(name, {}) | tables_.get(name, {}) for name in CENTRAL | tables_}
    with pytest.raises(ConfigError, match=sentence):
        run(tmp_path / "run", **settings)


def test_the_victims_carry_canaries_unless_others_are_named() -> None:
    def carriers(**named: Any) -> list[int]:
        return make_tiny_config(canaries={"count": 50}, **named).canary_clients

    assert carriers() == [0]
    assert carriers(recording={"clients": [3, 2]}) == [2]
    assert carriers(adversary={"victims": [1, 3]}) == [1, 3]
    assert carriers(adversary={"victims": "all"}) == [0, 1, 2, 3]
    assert make_tiny_config(canaries={"count": 50, "clients": [2]}, adversary={"victims": [1]}).canary_clients == [2]
    assert make_tiny_config().canary_clients == []


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ({"canaries": {"count": 5}}, "canaries.count"),
        ({"canaries": {"clients": [0]}}, "canaries.count"),
        ({"canaries": {"count": 50, "confidence": 1.0}}, "canaries.confidence"),
        ({"canaries": {"count": 50, "clients": [7]}}, "canaries.clients: expected clients from 0 to 3, got 7"),
        ({"canaries": {"count": 50, "clients": []}}, "canaries.clients: the list is empty"),
        ({"canaries": {"count": 50}, "recording": {"rounds": []}}, "canaries: no round is recorded"),
        (
            {"canaries": {"count": 50, "clients": [1]}, "recording": {"clients": [0]}},
            "canaries: client 1 is not recorded",
        ),
        (
            {"canaries": {"count": 50}, "secure_aggregation": {"groups": "all"}},
            "canaries: they measure what one client's messages reveal",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(named: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_tiny_config(**named)


@pytest.mark.parametrize(
    ("defenses", "count", "why"),
    [
        ([], 50, "no defense here has one; add dp-sgd or update-noise"),
        ([{"name": "top-k"}], 50, "no defense here has one; add dp-sgd or update-noise"),
        ([DP_SGD], 10_000, "expected at most 2410, the parameters that are trained, got 10000"),
        ([DP_SGD | {"with_mixing": True}, {"name": "mixup"}], 50, "mixup makes one example out of several records"),
    ],
)
def test_canaries_that_can_measure_nothing_are_refused_before_work(
    defenses: list[Any], count: int, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        fedsim.run(tables(*defenses, canaries={"count": count}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True, kw_only=True)
class SilentLater(UpdateNoise):
    """Add its noise in the first round of the federation alone."""

    def on_update(self, update: Any, context: LocalContext) -> Any:
        return super().on_update(update, context) if context.round == 1 else update


def test_canaries_pass_the_rounds_in_which_the_client_sent() -> None:
    canaries, zeros = Canaries(seed=0, client=0, count=8), {"w": torch.zeros(5)}
    ledger = [
        {"round": number, "client": client, "defense": "noise", "counts": int(number != 2)}
        for number in (1, 2, 3)
        for client in (0, 1)
    ]
    assert _list_rounds(ledger, "noise", 0) == [1, 3]
    defense = SilentLater(clip=1000.0, noise_multiplier=1.0)
    late = _shadow_scores(defense, "noise", canaries, zeros, [5, 9], 0.0)
    assert set(late.tolist()) == {0.0, 2 * CANARY_VALUE}, "what was sent in late rounds has no noise"
    assert len(set(_shadow_scores(defense, "noise", canaries, zeros, [1, 9], 0.0).tolist())) == 8
