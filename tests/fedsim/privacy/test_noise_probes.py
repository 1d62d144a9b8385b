"""Probes of noise and claims find what one layer, one number, one round or one declaration hides."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedsim.base.errors import PluginError
from fedsim.interfaces.defense import Guarantee, Participation
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy import noise_probes
from fedsim.privacy.audited_defense import AuditedDefense
from fedsim.privacy.claim_probes import probe_accountant, probe_freshness, probe_sampling
from fedsim.privacy.defense_audit import plan_audit
from fedsim.privacy.noise_probes import list_violations, probe_noise
from fedsim.recording.wire_format import State
from tests.support.planted_defenses import CLIP, SoundShares


@dataclass(frozen=True, kw_only=True)
class LocalNoise(SoundShares):
    """Clip the update and add noise that the server sees by itself."""

    needed: int = 1

    def on_update(self, update: State, context: LocalContext) -> State:
        clipped = {name: tensor * self.clip_factor(update) for name, tensor in update.items()}
        scale = self.noise_multiplier * CLIP * self.noise_share(update, context)
        noise = self.draw(update, context)
        return {name: tensor + scale * noise[name] for name, tensor in clipped.items()}

    def clip_factor(self, update: State) -> Tensor:
        return CLIP / torch.stack([tensor.norm() for tensor in update.values()]).norm().clamp(min=CLIP)

    def noise_share(self, update: State, context: LocalContext) -> float:
        del update, context
        return 1.0

    def draw(self, update: State, context: LocalContext) -> State:
        return {name: torch.randn(tensor.shape, generator=context.rng) for name, tensor in update.items()}


class LessNoiseLater(LocalNoise):
    """It adds half of the noise from round 2 on."""

    def noise_share(self, update: State, context: LocalContext) -> float:
        return 1 / context.round


class NoiseByPastNorm(LocalNoise):
    """It clips to the norm of the update before, and adds noise in proportion."""

    def on_update(self, update: State, context: LocalContext) -> State:
        norm = torch.stack([tensor.norm() for tensor in update.values()]).norm()
        clip = context.memory.get("norm", torch.tensor(CLIP))
        context.memory["norm"] = norm.clamp(min=1e-3)
        factor = clip / torch.maximum(norm, clip)
        noise = self.draw(update, context)
        scale = self.noise_multiplier * clip
        return {name: tensor * factor + scale * noise[name] for name, tensor in update.items()}


class HalfTheNoiseAfterClipping(LocalNoise):
    """It halves its noise once an update was longer than 20 clips, which the clipped update does not say."""

    def noise_share(self, update: State, context: LocalContext) -> float:
        before = context.memory.get("norm", torch.tensor(0.0))
        context.memory["norm"] = torch.stack([tensor.norm() for tensor in update.values()]).norm()
        return 0.5 if before > 20 * CLIP else 1.0


class HalfTheNoiseAfterShortUpdates(LocalNoise):
    """It halves its noise after an update that is shorter than half of the clip."""

    def noise_share(self, update: State, context: LocalContext) -> float:
        before = context.memory.get("norm", torch.tensor(CLIP))
        context.memory["norm"] = torch.stack([tensor.norm() for tensor in update.values()]).norm()
        return 0.5 if before < CLIP / 2 else 1.0


class NoiseByPastMessage(LocalNoise):
    """Its noise is less after a message whose sum is positive, which tells nothing that the message did not."""

    def on_update(self, update: State, context: LocalContext) -> State:
        sent = super().on_update(update, context)
        context.memory["sum"] = torch.stack([tensor.sum() for tensor in sent.values()]).sum()
        return sent

    def noise_share(self, update: State, context: LocalContext) -> float:
        del update
        return 1.5 if context.memory.get("sum", torch.tensor(1.0)) > 0 else 3.0


class RestIsSentLater(LocalNoise):
    """What clipping cuts off is added to the next update, before that is clipped, too."""

    def on_update(self, update: State, context: LocalContext) -> State:
        total = {name: tensor + context.memory.get(name, torch.tensor(0.0)) for name, tensor in update.items()}
        factor = self.clip_factor(total)
        for name, tensor in total.items():
            context.memory[name] = tensor * (1 - factor)
        return super().on_update(total, context)


class NoiseByNorm(LocalNoise):
    """It adds no noise to an update of zeros."""

    def noise_share(self, update: State, context: LocalContext) -> float:
        return float(any(tensor.any() for tensor in update.values()))


class OneBareNumber(LocalNoise):
    """It adds no noise to one of 730 numbers."""

    def draw(self, update: State, context: LocalContext) -> State:
        noise = super().draw(update, context)
        noise["first.weight"][5, 7] = 0
        return noise


class OneStreamForLayers(LocalNoise):
    """It draws the noise of each layer from the same secret seed."""

    def draw(self, update: State, context: LocalContext) -> State:
        seed = int(torch.randint(2**62, (1,), generator=context.rng))
        noise = {}
        for name, tensor in update.items():
            noise[name] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        return noise


class OneDrawForRows(LocalNoise):
    """It adds the same draw to all numbers of a row."""

    def draw(self, update: State, context: LocalContext) -> State:
        noise = super().draw(update, context)
        return {name: tensor[..., :1].expand(tensor.shape) for name, tensor in noise.items()}


class SampledClients(LocalNoise):
    """It claims amplification by the sampling of clients."""

    def mechanism(self, participation: Participation) -> Mechanism | None:
        return replace(super().mechanism(participation), rate=0.1)


class NoiseBySmallPastNorm(LocalNoise):
    """Its noise follows the norm of the update before, up to the clip, unless that was zero."""

    def noise_share(self, update: State, context: LocalContext) -> float:
        norm = torch.stack([tensor.norm() for tensor in update.values()]).norm()
        before = context.memory.get("norm", torch.tensor(CLIP))
        context.memory["norm"] = norm.clamp(max=CLIP) if norm else torch.tensor(CLIP)
        return float(before / CLIP)


class RoundsLeftOut(LocalNoise):
    """It accounts for one round."""

    def mechanism(self, participation: Participation) -> Mechanism | None:
        return super().mechanism(replace(participation, rounds=1))


class OneReleaseForAll(LocalNoise):
    """It declares its rounds as one release under less noise, which is the same."""

    def mechanism(self, participation: Participation) -> Mechanism | None:
        return Mechanism(
            scale=self.noise_multiplier / 2 / math.sqrt(participation.rounds), unit="client", neighbours="replaced"
        )


class NoNumber(LocalNoise):
    """It promises an epsilon that is no number."""

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        return Guarantee(epsilon=math.nan, delta=delta, neighbours="one client", accountant="none")


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_probes, "_PAIRS", 30)


def find_violations_in_claims(defense: LocalNoise) -> list[str]:
    audited = AuditedDefense.from_defense(defense)
    mechanism = audited.mechanism
    assert mechanism is not None
    return list_violations([probe_sampling(audited, mechanism), probe_accountant(audited)])


def find_violations_in_noise(defense: LocalNoise) -> list[str]:
    audited = AuditedDefense.from_defense(defense)
    mechanism = audited.mechanism
    assert mechanism is not None
    return list_violations([*probe_noise(audited, mechanism), probe_freshness(audited)])


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (LessNoiseLater, "in release 2 at zeros is 0."),
        (NoiseByNorm, "is the same for clients with different secret randomness"),
        (OneBareNumber, "a number in the noise of first.weight"),
        (OneStreamForLayers, "the noise of first.weight and last.weight has a correlation of 1.000"),
        (OneDrawForRows, "the noise of neighbouring numbers of"),
        (RoundsLeftOut, "more releases than are accounted for"),
        (NoiseBySmallPastNorm, "20 of 20 clients send something else after an update that is"),
        (HalfTheNoiseAfterShortUpdates, "20 of 20 clients send something else after an update that is"),
        (NoiseByPastNorm, "0.000 times as large at zeros after a barely clipped one"),
        (HalfTheNoiseAfterClipping, "2.000 times as large at zeros after a barely clipped one"),
    ],
)
def test_what_is_wrong_in_one_layer_number_or_round_alone_is_found(cls: type[LocalNoise], words: str) -> None:
    violations = find_violations_in_noise(cls())
    assert any(words in violation for violation in violations), violations


def test_a_sampling_that_is_claimed_and_not_done_is_found() -> None:
    violations = find_violations_in_claims(SampledClients())
    assert any("an observer of its updates sees that" in violation for violation in violations), violations


@pytest.mark.parametrize(
    "cls", [pytest.param(LocalNoise, marks=pytest.mark.thorough), OneReleaseForAll, RestIsSentLater, NoiseByPastMessage]
)
def test_sound_noise_passes_however_its_releases_are_declared(cls: type[LocalNoise]) -> None:
    assert find_violations_in_claims(cls()) == find_violations_in_noise(cls()) == []


def test_an_epsilon_that_is_no_number_is_no_promise() -> None:
    audited = AuditedDefense.from_defense(NoNumber())
    with pytest.raises(PluginError, match="a guarantee of epsilon = nan at delta = 1e-05 proves nothing"):
        plan_audit(audited, 1000)
