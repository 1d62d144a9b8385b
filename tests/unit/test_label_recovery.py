"""Labels from the last layer of gradients that were sent: exact in closed form, repeats and all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.labels import RULES, LastLayer, bias_rule, column_rule, label_optimisation, last_layer
from adversaries.scene import Scene, scene_of
from fedsim.attack import Knowledge
from fedsim.errors import AttackError, KnowledgeError
from fedsim.messages import Update
from fedsim.randomness import generator

CLASSES, WIDTH = 30, 24
REPEATED = torch.tensor([2, 2, 2, 7, 7, 19, 23, 29])
DISTINCT = torch.tensor([0, 3, 4, 11, 12, 17, 25, 29])


def layer_of(labels: Tensor, *, seed: int = 0, size: float = 0.3, bias: bool = True) -> LastLayer:
    """A last layer's gradient, written out: features that are not negative, weights of size `size`."""
    rng = generator(seed)
    weight = size * torch.randn((CLASSES, WIDTH), generator=rng, dtype=torch.float64)
    shift = size * torch.randn(CLASSES, generator=rng, dtype=torch.float64) * bias
    features = torch.randn((len(labels), WIDTH), generator=rng, dtype=torch.float64).relu()
    p = (features @ weight.T + shift).softmax(1)
    wrong = (p - torch.eye(CLASSES, dtype=torch.float64)[labels]) / len(labels)
    return LastLayer(
        weight=weight,
        bias=shift if bias else None,
        weight_gradient=wrong.T @ features,
        bias_gradient=wrong.sum(0) if bias else None,
    )


@pytest.mark.parametrize("rule", [label_optimisation, bias_rule])
@pytest.mark.parametrize("size", [0.05, 0.3])
def test_repeated_labels_are_counted_exactly(rule: object, size: float) -> None:
    layers = [layer_of(REPEATED, size=size)]
    assert rule(layers, 8, generator(1)).tolist() == REPEATED.tolist()  # type: ignore[operator]


def test_without_a_bias_labels_are_the_sums_of_the_dummy_labels() -> None:
    assert label_optimisation([layer_of(DISTINCT, bias=False)], 8, generator(1)).tolist() == DISTINCT.tolist()


def test_several_gradients_of_one_mini_batch_share_their_labels() -> None:
    layers = [layer_of(REPEATED, seed=seed) for seed in (0, 5, 9)]
    for name in ("optimisation", "bias"):
        assert RULES[name](layers, 8, generator(1)).tolist() == REPEATED.tolist()


def test_the_column_rule_finds_each_class_once() -> None:
    assert column_rule([layer_of(DISTINCT)], 8, generator(0)).tolist() == DISTINCT.tolist()
    found = column_rule([layer_of(REPEATED)], 8, generator(0))
    assert len(set(found.tolist())) == 8
    assert set(REPEATED.tolist()) <= set(found.tolist())


def test_the_column_rule_reads_the_smallest_entry_of_each_row() -> None:
    layer = layer_of(DISTINCT)
    rows = [min(row) for row in layer.weight_gradient.tolist()]
    expected = sorted(sorted(range(CLASSES), key=rows.__getitem__)[:8])
    assert column_rule([layer], 8, generator(0)).tolist() == expected


def test_the_column_rule_refuses_more_examples_than_classes() -> None:
    with pytest.raises(AttackError, match="N = 31 is more than 30 classes; recover labels by optimisation"):
        column_rule([layer_of(DISTINCT)], 31, generator(0))


def test_counting_by_the_bias_wants_a_bias() -> None:
    with pytest.raises(KnowledgeError, match="has no bias to count them by; recover them by optimisation, or grant"):
        bias_rule([layer_of(DISTINCT, bias=False)], 8, generator(0))


def scene_for(model: nn.Module, labels: Sequence[int], shape: tuple[int, ...] = (6,)) -> Scene:
    inputs = torch.randn((len(labels), *shape), generator=generator("x"))
    outputs = model(inputs)
    targets = torch.tensor(labels)
    loss = cross_entropy(outputs, targets) if outputs.shape[1] > 1 else outputs.square().mean()
    names = [name for name, _ in model.named_parameters()]
    sent = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update = Update(round=1, client=0, before=before, after={}, gradient=sent, num_examples=len(labels))
    knowledge = Knowledge(model=lambda: model, loss=cross_entropy, input_shape=shape, value_range=([0.0], [1.0]))
    return scene_of(update, knowledge)


@pytest.mark.parametrize("bias", [True, False])
def test_the_last_layer_is_that_of_the_model(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5, bias=bias))
    layer = last_layer(scene_for(model, [1, 1, 4]))
    assert torch.equal(layer.weight.float(), model[2].weight)
    assert layer.weight_gradient.shape == (5, 9)
    assert (layer.bias is not None) == (layer.bias_gradient is not None) == bias
    assert bias_free_or_counted(layer, [1, 1, 4])


def bias_free_or_counted(layer: LastLayer, labels: list[int]) -> bool:
    return layer.bias is None or bias_rule([layer], len(labels), generator(0)).tolist() == labels


def test_a_linear_model_is_its_own_last_layer() -> None:
    torch.manual_seed(0)
    assert last_layer(scene_for(nn.Linear(6, 5), [0, 2])).weight.shape == (5, 6)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), "the model ends in BatchNorm1d, not in a linear layer"),
        (nn.Sequential(nn.Linear(6, 1)), "targets of a regression, which nothing gives away"),
    ],
)
def test_a_model_without_a_last_layer_of_classes_is_refused(model: nn.Module, told: str) -> None:
    torch.manual_seed(0)
    scene = dataclasses.replace(scene_for(nn.Sequential(nn.Linear(6, 5)), [0, 1]), model=model)
    names = tuple(name for name, _ in model.named_parameters())
    with pytest.raises(KnowledgeError, match=told) as caught:
        last_layer(dataclasses.replace(scene, names=names))
    assert str(caught.value).endswith("with adversary.knowledge.labels = true, and set align = false")
