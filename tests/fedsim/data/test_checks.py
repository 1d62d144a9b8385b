"""A data set or a model that does not keep its promises is one sentence before anything runs; so is a user's own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.base.errors import ConfigError, DataError, PluginError
from fedsim.base.task import Task
from fedsim.data import Column, Dataset, Examples
from fedsim.data.checks import check_dataset
from fedsim.data.digits import Digits
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.plugins import registry
from fedsim.training.models.checks import check_model, check_network, limit_memory
from fedsim.training.models.mlp import Mlp


def table(**fields: Any) -> Dataset:
    examples = Examples(raw=torch.linspace(0, 1, 12).reshape(6, 2), labels=torch.arange(6) % 3, scale=1.0)
    whole = {"name": "t", "train": examples, "test": examples, "num_classes": 3, "source": "here", "licence": "any"}
    return Dataset(**{**whole, **fields})


def with_train(**fields: Any) -> Dataset:
    return table(train=dataclasses.replace(table().train, **fields))


def images(*shape: int) -> Dataset:
    examples = Examples(raw=torch.rand(6, *shape), labels=torch.arange(6) % 3, scale=1.0)
    return table(train=examples, test=examples, modality="image")


def one_label_each() -> Dataset:
    examples = Examples(raw=torch.rand(12, 2), labels=torch.eye(3).repeat(4, 1), scale=1.0)
    return table(train=examples, test=examples, num_classes=0, num_labels=3)


def with_label(examples: Examples, place: tuple[int, int]) -> Examples:
    """Let one example have one more label."""
    return dataclasses.replace(examples, labels=put(examples.labels, place, 1))


def put(tensor: Tensor, place: Any, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[place] = value
    return tensor


RAW, LABELS = table().train.raw, table().train.labels


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ([1, 2], "'mine' gave a list, expected a fedsim"),
        (with_train(raw=RAW.numpy()), "the training part of 'mine' has raw of type ndarray, expected a torch.Tensor"),
        (with_train(labels=LABELS.tolist()), "has labels of type list, expected a torch.Tensor"),
        (with_train(groups=[0] * 6), "has groups of type list, expected a torch.Tensor"),
        (with_train(raw=RAW[:0], labels=LABELS[:0]), "the training part of 'mine' is empty"),
        (with_train(labels=LABELS[:5]), "holds 6 inputs but 5 labels|holds 5"),
        (with_train(labels=put(LABELS, 4, 3)), "label 3 at example 4, expected classes from 0 to 2"),
        (with_train(labels=put(LABELS, 4, -1)), "label -1 at example 4"),
        (with_train(labels=LABELS.float()), "labels of type torch.float32, expected int64"),
        (with_train(labels=LABELS[:, None]), "labels of shape"),
        (with_train(raw=put(RAW, (3, 1), float("nan"))), "has a NaN in example 3"),
        (
            images(28, 28, 3),
            r"has images of shape \(28, 28, 3\), expected channel, height and width, in this order; x.tr",
        ),
        (images(28, 28), r"has images of shape \(28, 28\), expected channel, height and width.*; add an axis"),
        (images(2, 3, 8, 8), r"has images of shape \(2, 3, 8, 8\).*; reshape them, or name another modality"),
        (with_train(scale=None), "has no scale, and so its numbers would be cut to integers as tokens are"),
        (with_train(raw=RAW.to(torch.complex64)), r"has inputs of type torch\.complex64, expected real numbers"),
        (table(vocabulary=9), r"has tokens of type torch\.float32 and scale 1\.0, expected integers, and None"),
        (table(class_names=("a", "b")), "has 2 class_names for 3; name all of them, or none"),
        (table(columns=(Column(name="a", start=0),)), r"has columns of 1 features in all, and inputs of shape \(2,\)"),
        (
            table(columns=(Column(name="a", start=0), Column(name="b", start=2))),
            "has the column 'b' from feature 2 on, expected 1, the next one",
        ),
        (
            table(columns=(Column(name="a", start=0, categories=("no", "yes")),)),
            "has a column 'a' of categories that is not 1 in one feature and 0 in the others",
        ),
        (one_label_each(), "has exactly one label an example, so that labels are classes"),
        (with_train(raw=put(RAW, (3, 1), float("inf"))), "from 0 to inf, expected finite numbers"),
        (with_train(raw=put(RAW, (3, 1), 1.5)), r"from 0 to 1.5, outside \[0, 1\]"),
        (with_train(raw=RAW[:, :1]), r"of different shapes, \(1,\) and \(2,\)"),
        (with_train(groups=torch.zeros(5, dtype=torch.int64)), "for 5 of 6 examples"),
        (with_train(groups=torch.zeros(6, dtype=torch.int64)), "groups from 0 to 0, but 0 group names"),
        (table(num_classes=0), "targets of type torch.int64, expected float32 for a regression"),
        (
            table(train=Examples(raw=torch.tensor([[9, 2]]), labels=LABELS[:1], scale=None), vocabulary=9),
            "outside the vocabulary of 9 tokens",
        ),
    ],
)
def test_a_data_set_that_does_not_hold_what_it_promises(dataset: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        check_dataset(dataset, "mine")
    assert "\n" not in str(caught.value)
    assert "mine" in str(caught.value)


def test_good_data_sets_pass() -> None:
    assert check_dataset(good := table(), "mine") is good
    targets = torch.linspace(-1, 1, 6)
    part = Examples(raw=RAW, labels=targets, scale=1.0)
    check_dataset(table(train=part, test=part, num_classes=0), "mine")
    for shape in ((64, 4, 4), (3, 32, 32), (1, 28, 1), (22, 1, 3), (13, 64, 64)):
        check_dataset(images(*shape), "mine")
    singles = one_label_each()
    check_dataset(dataclasses.replace(singles, train=with_label(singles.train, (0, 1))), "mine")
    check_dataset(dataclasses.replace(singles, test=with_label(singles.test, (0, 1))), "mine")
    words = Examples(raw=torch.tensor([[8, 0], [1, 2]]), labels=LABELS[:2], scale=None)
    check_dataset(table(train=words, test=words, vocabulary=9), "mine")


# Models.


class Doubled(torch.autograd.Function):
    """Can be differentiated once only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        slope: Tensor = Slope.apply(slopes[0])
        return slope


class Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        raise NotImplementedError("no second derivative")


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = Doubled.apply(self.layer(x.flatten(1)).tanh())
        return doubled


def check(model: Any, attacked: bool = True) -> None:
    data = Digits().load(None)
    check_model(model, data, data.train.inputs(slice(0, 2)), "mine", attacked=attacked)


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


def broken() -> nn.Module:
    model = flat(nn.Linear(64, 10))
    nn.init.constant_(model[1].weight, float("nan"))  # type: ignore[index]
    return model


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: "net", "gave a str, expected a torch.nn.Module"),
        (lambda: flat(nn.ReLU()), "has no parameter to train"),
        (lambda: flat(nn.Linear(63, 10)), r"does not take inputs of shape \(1, 8, 8\): RuntimeError: .*mat1"),
        (lambda: flat(nn.Linear(64, 9)), r"gives \(2, 9\) for 2 examples, expected \(2, 10\) for 10 classes"),
        (lambda: nn.Conv2d(1, 10, 3), r"gives \(2, 10, 6, 6\) for 2 examples"),
        (broken, "gives NaN or infinite outputs"),
        (Once, "cannot be differentiated twice, which attacks need"),
    ],
)
def test_a_network_that_does_not_fit(model: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^model: .*{sentence}") as caught:
        check(model())
    assert "\n" not in str(caught.value)


def test_without_attacks_one_derivative_is_enough() -> None:
    check(Once(), attacked=False)
    check(Mlp(batch_norm=True).build(Task((1, 8, 8), 10)))


# A user's own functions.

OWN = """
from __future__ import annotations
import torch
from torch import nn
from fedsim.data import Column, Dataset, Examples
from fedsim.base.task import Task

def net(task: Task, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, task.outputs))

class Net(nn.Linear):
    def __init__(self, classes: int):
        super().__init__(64, classes)
    def forward(self, x):
        return super().forward(x.flatten(1))

def data(folder, count: int) -> Dataset:
    part = Examples(raw=torch.rand(count, 2), labels=torch.arange(count) % 2, scale=1.0)
    return Dataset(name=str(folder), train=part, test=part, num_classes=2, source="here", licence="any")

def broken(folder) -> Dataset:
    raise ValueError("two\\nlines")

def forgetful(task: Task) -> nn.Module:
    task.outputs

def unmarked(task):
    raise AssertionError("was called")

def number() -> int:
    raise AssertionError("was called")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_function_that_returns_a_network_is_a_model(own: str) -> None:
    model = registry.build("models", f"{own}:net", {"width": 7}, "model").build(Task((1, 8, 8), 10))
    assert [tuple(p.shape) for p in model.parameters()] == [(7, 64), (7,), (10, 7), (10,)]
    check(registry.build("models", f"{own}:Net", {"classes": 10}, "model").build(Task((1, 8, 8), 10)))


def test_a_function_that_returns_a_data_set_is_one(own: str, tmp_path: Path) -> None:
    data = registry.build("datasets", f"{own}:data", {"count": 6}, "data").load(tmp_path)
    assert (data.name, len(data.train)) == (str(tmp_path), 6)


def test_its_settings_are_checked(own: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.wdth: unknown setting for .*, did you mean 'width'"):
        registry.build("models", f"{own}:net", {"wdth": 7}, "model")
    with pytest.raises(ConfigError, match="needs count, which is not set"):
        registry.build("datasets", f"{own}:data", {}, "data")
    with pytest.raises(ConfigError, match=r"model\.task: unknown setting"):
        registry.build("models", f"{own}:net", {"task": 7}, "model")


def test_what_it_raises_or_forgets_to_return_is_one_sentence(own: str, tmp_path: Path) -> None:
    place = rf"\({re.escape(str(tmp_path / own))}\.py, line \d+\)$"
    with pytest.raises(PluginError, match=rf"^'{own}:broken' fails, ValueError: two lines {place}"):
        registry.build("datasets", f"{own}:broken", {}, "data").load(tmp_path)
    federation = Config.model_validate({"data": {"name": "digits"}, "model": {"name": f"{own}:forgetful"}})
    with pytest.raises(ConfigError, match=rf"^model: '{own}:forgetful' gave a NoneType, expected a torch\.nn\.Module$"):
        Experiment(federation).check()


@pytest.mark.parametrize("name", ["unmarked", "number", "data"])
def test_a_function_that_does_not_say_that_it_makes_a_model_is_not_called(own: str, name: str) -> None:
    with pytest.raises(PluginError, match=r"nor a function annotated to return torch\.nn\.Module"):
        registry.build("models", f"{own}:{name}", {}, "model")


def test_a_lazy_layer_is_refused_by_name() -> None:
    network = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(ConfigError) as caught:
        check_network(network, "mine")
    assert "model: 'mine' does not say how large '1.weight' is, of a LazyLinear" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert check_network(nn.Sequential(nn.Linear(2, 2)), "mine")


def test_a_network_larger_than_memory_is_refused_while_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 100)  # 10 kB
    sentence = r"'mine' has 900 parameters or more, .* more than the 0.0 GB of memory here"
    with pytest.raises(ConfigError, match=sentence), limit_memory("mine"):
        nn.Sequential(*(nn.Linear(30, 30, bias=False) for _ in range(10)))
    nn.Linear(1000, 1000)  # and nobody counts afterwards
