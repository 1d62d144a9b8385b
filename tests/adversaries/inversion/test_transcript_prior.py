"""GIML: a generator learnt from the recording alone, and what it is worth, on clients with four digits each."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adversaries.inversion import transcript_prior
from adversaries.inversion.transcript_generator import TunedGenerators
from adversaries.inversion.transcript_prior import TranscriptPrior
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.attack_warnings import collect_warnings
from fedsim.inversion import public_fits
from fedsim.inversion.distances import Cosine
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import step_decay_schedule
from fedsim.inversion.update_models import GradientAtBroadcast
from fedsim.recording.payloads import Payload
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from tests.support import digit_clients as digits
from tests.support.recordings import record_updates, run_attack, target_client

CLIENTS, VICTIMS = 30, 2
STEPS: dict[str, Any] = {"latent_iterations": 40, "tuning_iterations": 40}
SHORT = TranscriptPrior(tasks=3, task_latent_steps=2, task_tuning_steps=2, latent_iterations=2, tuning_iterations=2)
ATTACK = TranscriptPrior(tasks=40, task_latent_steps=10, task_tuning_steps=10, **STEPS)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(public_fits, "_fits", {})


@pytest.fixture
def updates() -> list[Update]:
    return [digits.make_update(client) for client in range(CLIENTS)]


def knowledge(victim: int) -> Knowledge:
    return replace(digits.knowledge(victim), auxiliary=None)


def mean_quality(attack: TranscriptPrior, transcript: Transcript) -> float:
    findings = [run_attack(attack, transcript, knowledge(victim), victim) for victim in range(VICTIMS)]
    return sum(digits.quality(finding, victim) for victim, finding in enumerate(findings)) / VICTIMS


def test_what_is_learnt_from_other_clients_helps_and_noise_teaches_nothing(
    updates: list[Update], tmp_path: Path
) -> None:
    untrained = mean_quality(TranscriptPrior(tasks=0, **STEPS), record_updates(tmp_path / "a", updates))
    learnt = mean_quality(ATTACK, record_updates(tmp_path / "b", updates))
    assert learnt > untrained + 2
    # Updates of all clients but the victims are noise.
    noisy = updates[:VICTIMS]
    for update in updates[VICTIMS:]:
        rng = generator("noise", update.client)
        after = {}
        for name, before in update.before.items():
            drawn = torch.randn(before.shape, generator=rng)
            after[name] = before + drawn * (update.after[name] - before).norm() / drawn.norm()
        noisy.append(replace(update, payload=Payload.from_dense(after, "weights")))
    assert mean_quality(ATTACK, record_updates(tmp_path / "c", noisy)) < learnt - 1


def test_victims_of_a_recording_share_a_generator_which_is_kept(
    updates: list[Update], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt, learn = list[str](), transcript_prior.learn_generator

    def count(*arguments: Any) -> bool:
        learnt.append(arguments[3])
        return learn(*arguments)

    monkeypatch.setattr(transcript_prior, "learn_generator", count)
    transcript = record_updates(tmp_path / "a", updates)
    first = run_attack(SHORT, transcript, knowledge(0), 0)
    run_attack(SHORT, transcript, knowledge(1), 1)
    assert len(learnt) == 1
    # Another process reads it.
    public_fits._fits.clear()
    again = run_attack(SHORT, transcript, knowledge(0), 0)
    assert len(learnt) == 1
    assert torch.equal(first.data, again.data)
    # Another recording has another.
    run_attack(SHORT, record_updates(tmp_path / "b", updates[:5]), knowledge(0), 0)
    assert len(set(learnt)) == 2


def test_updates_that_cannot_be_inverted_teach_nothing_and_end_nothing(updates: list[Update], tmp_path: Path) -> None:
    def with_sent(update: Update, change: float) -> Update:
        sent = {name: before + change for name, before in update.before.items()}
        return replace(update, payload=Payload.from_dense(sent, "weights"))

    recording = [*updates[:2], with_sent(updates[2], 0.0), with_sent(updates[3], math.nan)]
    transcript, attack, said = record_updates(tmp_path / "a", recording), replace(SHORT, tasks=12), list[str]()
    with collect_warnings(said.append):
        finding = run_attack(attack, transcript, knowledge(0))
    assert finding.data.isfinite().all()
    for client, fault in ((2, "there is nothing to match"), (3, "what it sent is")):
        (sentence,) = [sentence for sentence in said if f"client {client}: " in sentence]
        assert fault in sentence
        assert sentence.endswith("the generator is learnt without this update")
    # An update through which the copy diverges teaches nothing, either.
    untaught = replace(attack, tuning_step_size=1e37)
    network = untaught._find_generator(target_client(transcript, knowledge(0)), (1, 8, 8), lambda *_: None)
    assert all(bool(weight.isfinite().all()) for weight in network.parameters())
    # Where none can be inverted, there is no generator.
    empty = record_updates(tmp_path / "b", [with_sent(update, 0.0) for update in updates[:3]])
    with pytest.raises(AttackError, match="there is nothing to match"):
        attack._find_generator(target_client(empty, knowledge(0)), (1, 8, 8), lambda *_: None)


def test_generators_are_tuned_as_adam_tunes_their_weights(
    updates: list[Update], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients are small: in another unit, the constant that Adam adds to them stopped most of the tuning."""
    kept = list[TunedGenerators]()

    generate = TunedGenerators.dummy_data

    def keep(self: TunedGenerators, *arguments: Any) -> Tensor:
        kept.append(self)
        return generate(self, *arguments)

    monkeypatch.setattr(TunedGenerators, "dummy_data", keep)
    attack, known = replace(SHORT, tasks=0, tuning_iterations=4), knowledge(0)
    finding = run_attack(attack, record_updates(tmp_path / "a", updates[:2]), known, 0)
    assert known.labels is not None
    problem = replace(build_problem(updates[0], known), labels=known.labels)
    copies = [copy.deepcopy(kept[0].network).requires_grad_() for _ in kept[0].latents]
    optimizer = torch.optim.Adam([weight for network in copies for weight in network.parameters()])
    for iteration in range(4):
        optimizer.param_groups[0]["lr"] = attack.tuning_step_size * step_decay_schedule(iteration, 4)
        images = torch.cat([network(latent[None]) for network, latent in zip(copies, kept[0].latents, strict=True)])
        dummy = problem.scaling.from_unit_range(images)
        gradient = GradientAtBroadcast().gradient(problem, {}, dummy, problem.labels)
        prior = attack.tv_weight * TotalVariation()(problem, dummy, dummy)
        optimizer.zero_grad()
        (Cosine()(gradient, Cosine().target(problem)) + prior).backward()
        optimizer.step()
    images = torch.cat([network(latent[None]) for network, latent in zip(copies, kept[0].latents, strict=True)])
    assert torch.allclose(finding.data, images, atol=1e-5)


def test_one_client_alone_teaches_nothing(updates: list[Update], tmp_path: Path) -> None:
    with pytest.raises(
        AttackError, match="the attacked rounds have no other client's; attack rounds in which others take"
    ):
        run_attack(ATTACK, record_updates(tmp_path / "a", updates[:1]), knowledge(0))


def test_examples_have_to_be_images(updates: list[Update], tmp_path: Path) -> None:
    with pytest.raises(AttackError, match="generates images, and examples are of shape"):
        run_attack(ATTACK, record_updates(tmp_path / "a", updates[:2]), replace(knowledge(0), input_shape=(64,)))
