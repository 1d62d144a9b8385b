"""Labels from the last layer of gradients that were sent: exact in closed form, repeats and all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.labels.gradients import LABEL_RULES, LabelRule, bias_rule, column_rule, label_optimisation
from fedsim.inversion.labels.last_layer import LastLayer, apportion_counts, last_bias_name, last_layer, output_layer
from fedsim.inversion.labels.updates import layer_directions
from fedsim.inversion.named_states import NamedStates
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.plugins import registry
from tests.support.recordings import build_update

CLASSES, WIDTH = 30, 24
REPEATED = torch.tensor([2, 2, 2, 7, 7, 19, 23, 29])
PROBES = torch.randn((4, 6), generator=generator("probes"))
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
@pytest.mark.parametrize("size", [0.05, pytest.param(0.3, marks=pytest.mark.thorough)])
def test_repeated_labels_are_counted_exactly(rule: object, size: float) -> None:
    layers = [layer_of(REPEATED, size=size)]
    assert rule(layers, 8, generator(1)).tolist() == REPEATED.tolist()  # type: ignore[operator]


def test_without_a_bias_labels_are_the_sums_of_the_dummy_labels() -> None:
    assert label_optimisation([layer_of(DISTINCT, bias=False)], 8, generator(1)).tolist() == DISTINCT.tolist()


def test_several_gradients_of_one_mini_batch_share_their_labels() -> None:
    layers = [layer_of(REPEATED, seed=seed) for seed in (0, 5, 9)]
    for name in ("optimisation", "bias"):
        assert LABEL_RULES[name](layers, 8, generator(1)).tolist() == REPEATED.tolist()


def test_counts_that_are_no_numbers_are_refused() -> None:
    """A network whose running variances are below 0 gives NaN."""
    with pytest.raises(AttackError, match=r"labels cannot be counted: what counts them is NaN or infinite"):
        apportion_counts(torch.tensor([1.0, float("nan")]), 4)


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
    with pytest.raises(KnowledgeError, match="has no bias to count labels by; recover them by optimisation, or grant"):
        bias_rule([layer_of(DISTINCT, bias=False)], 8, generator(0))


def scene_for(model: nn.Module, labels: Sequence[int], shape: tuple[int, ...] = (6,)) -> InversionProblem:
    inputs = torch.randn((len(labels), *shape), generator=generator("x"))
    outputs = model(inputs)
    targets = torch.tensor(labels)
    loss = cross_entropy(outputs, targets) if outputs.shape[1] > 1 else outputs.square().mean()
    names = [name for name, _ in model.named_parameters()]
    sent = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    before = {name: t.detach().clone() for name, t in model.state_dict().items() if t.is_floating_point()}
    update = build_update(before, sent, "gradient", num_examples=len(labels))
    knowledge = Knowledge(model=lambda: model, loss=cross_entropy, input_shape=shape, value_range=([0.0], [1.0]))
    return build_problem(update, knowledge)


@pytest.mark.parametrize("bias", [True, False])
def test_the_last_layer_is_that_of_the_model(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5, bias=bias))
    layer = last_layer(scene_for(model, [1, 1, 4]), PROBES)
    assert torch.equal(layer.weight.float(), model[2].weight)
    assert layer.weight_gradient.shape == (5, 9)
    assert (layer.bias is not None) == (layer.bias_gradient is not None) == bias
    assert bias_free_or_counted(layer, [1, 1, 4])


def bias_free_or_counted(layer: LastLayer, labels: list[int]) -> bool:
    return layer.bias is None or bias_rule([layer], len(labels), generator(0)).tolist() == labels


def test_a_linear_model_is_its_own_last_layer() -> None:
    torch.manual_seed(0)
    assert last_layer(scene_for(nn.Linear(6, 5), [0, 2]), PROBES).weight.shape == (5, 6)


def test_the_last_layer_is_the_one_that_is_called_last_whatever_the_order_of_registration() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(9, 5)
            self.hidden = nn.Linear(6, 9)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.hidden(x).relu())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Backwards()
    layer = last_layer(scene_for(model, [1, 1, 4]), PROBES)
    assert torch.equal(layer.weight.float(), model.out.weight)
    assert bias_rule([layer], 3, generator(0)).tolist() == [1, 1, 4]


def test_a_last_layer_that_clients_do_not_send_tells_no_labels() -> None:
    """As where they train low-rank matrices beside it."""
    state = {"head.lora_A": torch.ones(2, 3)}
    shapes = {"head.lora_A": torch.Size([2, 3])}
    states = NamedStates(shapes=shapes, buffer_names=(), before=state, after=state, gradient=None, delta=None)
    with pytest.raises(KnowledgeError, match=r"head\.weight of the last linear layer did not move"):
        layer_directions("head.bias", states, (), owns_weights=True)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.Sigmoid()])
def test_whether_features_may_be_negative_is_seen(activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), activation, nn.Linear(9, 5))
    assert last_layer(scene_for(model, [1, 1, 4]), PROBES).non_negative == (not isinstance(activation, nn.Tanh))


@pytest.mark.parametrize(
    "name",
    [
        "lenet",
        "tgias-lenet",
        "sme-cnn",
        pytest.param("alexnet", marks=pytest.mark.thorough),
        "resnet8",
        "mlp",
        pytest.param("vit-april", marks=pytest.mark.thorough),
        "vit",
        "linear",
    ],
)
def test_the_last_layer_of_our_networks_is_found(name: str) -> None:
    task = Task(input_shape=(3, 32, 32), num_classes=7)
    with seed_globals("model", name):
        model = registry.build("models", name, {}, "model").build(task).eval()
    layer = last_layer(scene_for(model, [1, 1, 4], (3, 32, 32)), torch.randn((2, 3, 32, 32), generator=generator(name)))
    assert len(layer.weight) == 7


@pytest.mark.parametrize("rule", LABEL_RULES.values(), ids=LABEL_RULES)
@pytest.mark.parametrize("classes", [2, pytest.param(30, marks=pytest.mark.thorough)])
def test_as_many_labels_as_examples_come_back_whatever_noise_was_sent(rule: LabelRule, classes: int) -> None:
    for scale in (0.0, 1.0, 100.0):
        rng = generator("noise", 0)
        weight, slope = torch.randn((2, classes, 6), generator=rng, dtype=torch.float64)
        bias, bias_slope = torch.randn((2, classes), generator=rng, dtype=torch.float64)
        layer = LastLayer(weight=weight, bias=bias, weight_gradient=scale * slope, bias_gradient=scale * bias_slope)
        count = min(8, classes) if rule is column_rule else 8
        found = rule([layer], count, generator(0))
        assert len(found) == count
        assert found.min() >= 0
        assert found.max() < classes


class ShiftedInputs(nn.Module):
    """A layer of classes, a parameter of which moves its inputs, too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.layer = name, nn.Linear(6, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(inputs + getattr(self.layer, self.name).sum())
        return result


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (ShiftedInputs("bias"), "the model uses 'layer.bias' of its last linear layer elsewhere, too"),
        (ShiftedInputs("weight"), "the model uses 'layer.weight' of its last linear layer elsewhere, too"),
        (nn.Sequential(nn.Linear(6, 5), nn.Softmax(1)), "the model ends in Softmax, not in a linear layer"),
        (nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), "the model ends in BatchNorm1d, not in a linear layer"),
        (nn.Sequential(nn.Linear(6, 1)), "the model has one output, whose gradient is summed over all examples"),
    ],
)
def test_a_model_without_a_last_layer_of_classes_is_refused(model: nn.Module, told: str) -> None:
    torch.manual_seed(0)
    scene = dataclasses.replace(scene_for(nn.Sequential(nn.Linear(6, 5)), [0, 1]), model=model)
    names = tuple(name for name, _ in model.named_parameters())
    with pytest.raises(KnowledgeError, match=told) as caught:
        last_layer(dataclasses.replace(scene, parameter_names=names), PROBES)
    assert "; grant them with adversary.knowledge.labels = true, and set align = false" in str(caught.value)


class TwoViews(nn.Module):
    """A head that is used on a second view as well, which does not enter the outputs; in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 5)
        self.similarity = torch.zeros(4)

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs: Tensor = self.head(self.body(inputs).relu())
            self.similarity = self.head(self.body(inputs.flip(1)).relu()).detach() @ outputs.detach().T
        return outputs


class TiedWeights(nn.Module):
    """A layer of classes whose weights are those of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 6), nn.Linear(6, 5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.embedding(tokens).mean(1).tanh())
        return outputs


def test_what_changes_nothing_of_the_gradient_that_is_read_is_accepted() -> None:
    torch.manual_seed(0)
    assert output_layer(TwoViews(), PROBES)[0] == "head"
    assert last_bias_name(TiedWeights(), torch.arange(5)[None]) == "head.bias"
    with pytest.raises(KnowledgeError, match=r"the model uses 'layer\.bias' of its last linear layer elsewhere, too"):
        last_bias_name(ShiftedInputs("bias"), PROBES)
    with pytest.raises(KnowledgeError, match="computes the weights of its last linear layer from others, as"):
        output_layer(nn.utils.spectral_norm(nn.Linear(6, 5)), PROBES)


@pytest.mark.parametrize("classes", [2, 30])
def test_slopes_that_say_that_no_class_occurs_still_give_as_many_labels_as_examples(classes: int) -> None:
    layer = layer_of(REPEATED)
    upwards = torch.full((classes,), 5.0, dtype=torch.float64)
    layer = dataclasses.replace(
        layer,
        weight=layer.weight[:classes],
        bias=upwards.mul(0),
        weight_gradient=layer.weight_gradient[:classes],
        bias_gradient=upwards + torch.arange(classes) / classes,
    )
    found = bias_rule([layer], 8, generator(0))
    assert len(found) == 8
    assert found.bincount(minlength=classes).max() == -(-8 // classes)
