"""CENSOR: what takes the place of gradients, in which rounds, and what its adversary is told."""

from __future__ import annotations

import math

import pytest
import torch

from clients.defenses.censor import Censor
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.knowledge import Knowledge
from fedsim.interfaces.local_context import ClientRound
from fedsim.recording.wire_format import State
from fedsim.training.loop import local_gradient
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

INPUTS, LABELS = torch.rand(8, 1, 4, 4, generator=generator(4)), torch.arange(8) % 3
SETTINGS = LocalTraining(local_epochs=1, batch_size=8, learning_rate=0.1)


def network() -> torch.nn.Module:
    with seed_globals("censor"):
        return Mlp(hidden=(5,)).build(Task((1, 4, 4), 3))


def sent_gradient(*defenses: Censor, number: int = 1, seed: int = 0) -> State:
    model = network()
    before = copy_state(model)
    client_round = ClientRound(key=(seed, "train", number, 0), number=number, broadcast=before)
    gradient, *_ = local_gradient(
        model, before, INPUTS, LABELS, SETTINGS, key=(seed,), defenses=defenses, client_round=client_round
    )
    return gradient


def test_each_tensor_is_orthogonal_to_the_gradient_and_has_its_norm() -> None:
    gradient, sent = sent_gradient(), sent_gradient(Censor(trials=3))
    assert sent.keys() == gradient.keys()
    for name, tensor in gradient.items():
        assert abs((tensor.double() * sent[name].double()).sum().item()) < 1e-6 * tensor.norm().item() ** 2
        assert sent[name].norm().item() == pytest.approx(tensor.norm().item(), rel=1e-5)


def test_as_many_messages_as_the_last_bias_has_numbers_reveal_its_gradient() -> None:
    """What is orthogonal to all of them is the gradient, where a client takes the same batch in each round."""
    sent = torch.stack([sent_gradient(Censor(trials=3), number=number, seed=number)["3.bias"] for number in (1, 2, 3)])
    gradient = sent_gradient()["3.bias"]
    claimed = torch.linalg.svd(sent)[2][-1]
    assert abs(torch.cosine_similarity(claimed, gradient, dim=0).item()) > 0.999
    assert abs(torch.cosine_similarity(sent[0], gradient, dim=0).item()) < 1e-3


def test_the_candidate_with_the_smallest_loss_is_sent() -> None:
    """With long trial steps the losses of candidates differ; more of them leave a smaller one."""

    def loss_after(trials: int) -> float:
        sent, model = sent_gradient(Censor(trials=trials, trial_rate=3.0)), network()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 3.0 * sent[name]
            return torch.nn.functional.cross_entropy(model(INPUTS), LABELS).item()

    losses = [loss_after(trials) for trials in (1, 4, 64)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


def test_later_rounds_send_the_gradient_and_an_adversary_knows_it() -> None:
    gradient, defense = sent_gradient(), Censor(rounds=2, trials=2)
    replaced = [
        not torch.equal(sent_gradient(defense, number=number)["1.weight"], gradient["1.weight"]) for number in (1, 2, 3)
    ]
    assert replaced == [True, True, False]
    known = Knowledge(defenses=[defense])
    assert [known.defenses_in(number) for number in (2, 3)] == [[defense], []]
    always = Censor(rounds=0, trials=2)
    assert not torch.equal(sent_gradient(always, number=99)["1.weight"], gradient["1.weight"])
    assert Knowledge(defenses=[always]).defenses_in(99) == [always]


def test_its_adversary_compares_norms_of_tensors_alone() -> None:
    gradient, sent = sent_gradient(), sent_gradient(Censor(trials=2))
    view = Censor().adversary_view(gradient, sent)
    for name, tensor in sent.items():
        torch.testing.assert_close(view[name], tensor, rtol=1e-5, atol=1e-9)
    twice = Censor().adversary_view({name: 2 * tensor for name, tensor in gradient.items()}, sent)
    torch.testing.assert_close(twice["1.weight"], 2 * sent["1.weight"], rtol=1e-5, atol=1e-9)


def test_a_single_number_and_a_gradient_of_zero_become_zero() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 1))
    before = copy_state(model)
    settings = LocalTraining(local_epochs=1, batch_size=8, learning_rate=0.1)
    sent, *_ = local_gradient(
        model, before, INPUTS, torch.rand(8, 1), settings, key=(0,), defenses=[Censor(trials=2)],
        loss=torch.nn.functional.mse_loss, client_round=ClientRound(key=(0,), broadcast=before),
    )  # fmt: skip
    assert sent["1.bias"].tolist() == [0.0]
    assert sent["1.weight"].norm() > 0


@pytest.mark.parametrize("settings", [{"trials": 0}, {"rounds": -1}, {"trial_rate": 0.0}, {"trial_rate": math.nan}])
def test_settings_that_cannot_be_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))}: expected"):
        Censor(**settings)  # type: ignore[arg-type]
