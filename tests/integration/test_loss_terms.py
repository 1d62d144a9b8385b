"""A network adds a term to the loss: clients train with it, attacks match it, and it is never lost in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedsim
from fedsim.audit.architecture import ReferencedLoss, ReferencedModel
from fedsim.audit.audit import make_audit
from fedsim.audit.stated_model import check_outputs
from fedsim.audit.threat_model import apply_headers
from fedsim.base.errors import ConfigError, FedsimError, KnowledgeError, RunError
from fedsim.base.loss_term import LossWithTerm, add_model_term
from fedsim.base.task import goal_of
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.knowledge import Knowledge
from fedsim.inversion.labels.last_layer import output_layer
from fedsim.training.gradients import example_gradients
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining
from tests.support.experiments import make_attack_file, make_tiny_config, run_serial
from tests.support.vib import Vib

MODEL = "tests.support.vib:build"


def make_batch(count: int) -> tuple[Tensor, Tensor]:
    """Return images of 8 x 8 and classes."""
    return torch.rand((count, 1, 8, 8), generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3


def make_network(weight: float = 0.5) -> Vib:
    """Return the same network in each call."""
    torch.manual_seed(0)
    return Vib(64, 3, weight, is_noisy=False)


def take_step(network: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return w_t and w_T of one local step as a client takes it."""
    before, training = copy_state(network), LocalTraining(local_epochs=1, batch_size=len(labels), learning_rate=0.1)
    loss = add_model_term(cross_entropy, network)
    return before, local_update(network, before, inputs, labels, training, key=("term",), loss=loss)[0]


def test_clients_descend_the_loss_with_the_term() -> None:
    network, (inputs, labels) = make_network(), make_batch(4)
    before, after = take_step(network, inputs, labels)
    network = make_network()
    mean, log_variance = network.encoder(inputs.flatten(1)).chunk(2, 1)
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
    (cross_entropy(network.last(mean), labels) + 0.5 * divergence.mean()).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(before[name] - after[name], 0.1 * parameter.grad, atol=1e-6), name


def test_gradients_of_examples_hold_the_term() -> None:
    network, (inputs, labels) = make_network(), make_batch(4)
    loss = add_model_term(cross_entropy, network)
    gradients, losses = example_gradients(network, inputs, labels, loss)
    loss(network(inputs), labels).backward()
    assert torch.allclose(losses, loss(network(inputs), labels, reduction="none"))
    for name, parameter in network.named_parameters():
        assert torch.allclose(gradients[name].mean(0), parameter.grad, atol=1e-6), name


class Wrapper(nn.Module):
    """A network around another one, which alone says that it adds a term."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the inner network returns."""
        outputs: Tensor = self.inner(inputs)
        return outputs


def test_an_attack_matches_the_term() -> None:
    network, (inputs, labels) = make_network(), make_batch(1)
    before, after = take_step(network, inputs, labels)
    wrapped = [{f"inner.{name}": tensor for name, tensor in state.items()} for state in (before, after)]

    def psnr(model: nn.Module, sent: dict[str, Tensor] = before, returned: dict[str, Tensor] = after) -> float:
        finding = fedsim.attack(
            sent, returned, model=model, num_examples=1, attack="inverting-gradients", labels=labels,
            settings={"iterations": 300, "step_size": 0.1, "tv_weight": 1e-4}, input_shape=(1, 8, 8),
            value_range=(0.0, 1.0), learning_rate=0.1, local_epochs=1, batch_size=1,
        )  # fmt: skip
        return float(-10 * (finding.data - inputs).square().mean().log10())

    told, untold = make_network(), make_network(weight=0.0)
    assert psnr(told) > psnr(untold) + 5, "the term is part of the gradient that is matched"
    assert psnr(Wrapper(make_network()), *wrapped) == psnr(told)
    untold = make_network()
    untold.adds_loss_term = False
    with pytest.raises(ConfigError, match="does not say by adds_loss_term"):
        psnr(untold)


def test_what_is_granted_of_a_recording_made_elsewhere_has_the_term() -> None:
    knowledge = Knowledge(model=ReferencedModel(f"{__name__}:make_network"), loss=ReferencedLoss(f"{__name__}:my_loss"))
    loss = apply_headers(knowledge, AdversaryTable(), [], frozenset()).loss
    assert isinstance(loss, LossWithTerm)
    network, (inputs, labels) = make_network(), make_batch(3)
    outputs = network(inputs)
    assert torch.equal(loss(outputs, labels), cross_entropy(outputs, labels) + outputs.loss_term.mean())
    facts = {"input_shape": (1, 8, 8), "value_range": ([0.0], [1.0])}
    network.adds_loss_term = False
    with pytest.raises(ConfigError, match="does not say by adds_loss_term"):
        check_outputs(network, Knowledge(**facts, loss=cross_entropy))


def my_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss, as a loss of the user does, which takes no reduction."""
    return cross_entropy(outputs, labels)


@pytest.mark.parametrize("defense", [[], [{"name": "dp-sgd", "noise_multiplier": 0.1, "clip": 1.0}]])
def test_a_federation_with_a_bottleneck_is_trained_and_attacked(
    tmp_path: Path, defense: list[dict[str, object]]
) -> None:
    config = make_tiny_config(
        model={"name": MODEL}, defense=defense, federation={"clients": 2}, partition={"samples_per_client": 4}
    )
    run = run_serial(config, tmp_path / "run")
    attacks = [{"name": "inverting-gradients", "iterations": 2}, "membership-loss", "membership-cosine", "sia"]
    attacks += ["label-counts", "analytic"]
    knowledge = {"candidates": "held-out", "records": True}
    spec = make_attack_file(*attacks, victims=[0], rounds="all", knowledge=knowledge)
    audit = make_audit(run, spec, trust=True)
    assert [failure for failure in audit.run() if "term" in failure] == []
    failures: list[str] = []
    audit.score(failures)
    assert failures == []
    rows = (run.path / "scores.csv").read_text()
    assert all(name in rows for name in ("l_sim", "membership_auc", "label_distance")), rows
    assert "came without it" not in rows


def test_a_term_is_never_lost_in_silence() -> None:
    network, (inputs, labels) = make_network(), make_batch(3)
    loss = add_model_term(cross_entropy, network)
    assert goal_of(loss) == "classes"
    assert isinstance(loss, LossWithTerm)
    assert add_model_term(loss, network) is loss
    with pytest.raises(RunError, match="came without it"):
        loss(network(inputs) * 2, labels)
    with pytest.raises(RunError, match="expected a number for each of 3 examples"):
        fedsim.with_loss_term(torch.zeros(3, 2), torch.zeros(()))
    config = make_tiny_config(model={"name": "tests.support.vib:build_undeclared"})
    with pytest.raises(ConfigError, match="does not say by adds_loss_term"):
        Experiment(config).check()


def test_smoothed_labels_keep_the_term() -> None:
    config = make_tiny_config(model={"name": MODEL}, training={"label_smoothing": 0.1})
    loss = Experiment(config).loss
    assert isinstance(loss, LossWithTerm)
    with pytest.raises(FedsimError):
        loss(torch.zeros(2, 10), torch.tensor([0, 1]))


class PenalisedLogits(nn.Linear):
    """A linear layer whose term keeps its outputs small, so that the last layer's gradient is not the loss's alone."""

    adds_loss_term = True

    def forward(self, input: Tensor) -> Tensor:
        """Return logits that carry a hundredth of their squared size."""
        logits = super().forward(input)
        return fedsim.with_loss_term(logits, 0.01 * logits.square().sum(1))


def test_labels_are_read_only_where_the_term_leaves_the_last_layer_alone() -> None:
    inputs, _ = make_batch(2)
    assert output_layer(make_network(), inputs)[0] == "last"
    with pytest.raises(KnowledgeError, match="the term that the network adds to the loss changes the gradient"):
        output_layer(PenalisedLogits(64, 3), inputs.flatten(1))
