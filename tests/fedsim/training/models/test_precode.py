"""PRECODE: what training sees of the code, the term of its loss, and the first layer that it leaves open."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

import fedsim
from fedsim.base.loss_term import LossWithTerm, add_model_term
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.training.loop import local_gradient
from fedsim.training.model_state import copy_state
from fedsim.training.models.precode import Precode
from fedsim.training.settings import LocalTraining

TASK = Task((1, 4, 4), 3)
INPUTS, LABELS = torch.rand(3, 1, 4, 4, generator=generator("precode")), torch.tensor([0, 1, 2])


def network(**settings: Any) -> torch.nn.Module:
    with seed_globals("precode"):
        return Precode(hidden=(120,), bottleneck=6, **settings).build(TASK)


def test_training_samples_the_code_and_evaluation_takes_its_mean() -> None:
    model = network().train()
    assert not torch.equal(model(INPUTS), model(INPUTS))
    model.eval()
    assert torch.equal(model(INPUTS), model(INPUTS))


def test_the_loss_has_the_divergence_of_each_code() -> None:
    model = network(weight=0.5).eval()
    loss = add_model_term(cross_entropy, model)
    assert isinstance(loss, LossWithTerm)
    outputs = model(INPUTS)
    mean, log_variance = model[-1].encoder(model[:-1](INPUTS)).chunk(2, 1)
    normal = torch.distributions.Normal(mean, (log_variance / 2).exp())
    divergence = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum(1).mean()
    torch.testing.assert_close(loss(outputs, LABELS), cross_entropy(outputs, LABELS) + 0.5 * divergence)


def test_the_first_layer_gives_the_batch_away_all_the_same() -> None:
    model = network()
    before = copy_state(model)
    settings = LocalTraining(local_steps=1, local_epochs=None, batch_size=3, learning_rate=0.1)
    loss = add_model_term(cross_entropy, model)
    gradient, *_ = local_gradient(model, before, INPUTS, LABELS, settings, key=("precode",), loss=loss)
    after = {name: tensor - 0.1 * gradient[name] for name, tensor in before.items()}
    finding = fedsim.attack(
        before, after, model=network(), num_examples=3, attack="spear-ica", learning_rate=0.1, local_epochs=1,
        batch_size=3, input_shape=(1, 4, 4), value_range=(0.0, 1.0),
    )  # fmt: skip
    distances = torch.cdist(finding.data.flatten(1), INPUTS.flatten(1))
    assert (distances.min(0).values < 1e-3).all()
