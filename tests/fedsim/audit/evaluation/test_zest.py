"""Zest: explanations that can be checked by hand, and how alike models come out."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsim.audit.evaluation.zest import draw_references, interpretable_pieces, model_outputs, signature, zest
from fedsim.base.errors import AttackError, ConfigError, DataError
from fedsim.base.randomness import seed_globals
from fedsim.base.task import Task
from fedsim.data import Column, Examples
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from tests.support.tensors import draw_normal

FEATURES, OUTPUTS = 6, 3


REFERENCES = draw_normal(10, FEATURES)
PIECES = interpretable_pieces((FEATURES,))


def network(seed: int, batch_norm: bool = False) -> nn.Module:
    with seed_globals(seed):
        return Mlp(hidden=(16,), batch_norm=batch_norm).build(Task((FEATURES,), OUTPUTS))


def explain_outputs(outputs: Callable[[Tensor], Tensor]) -> Tensor:
    return signature(outputs, REFERENCES, PIECES, masks=200)


def sorted_examples(labels: Tensor) -> Examples:
    """Three clients one after the other, the first of them with most examples."""
    groups = torch.tensor([0] * 60 + [1] * 20 + [2] * 10)
    return Examples(raw=torch.zeros(90, 1), labels=labels, scale=1.0, groups=groups)


def test_references_are_drawn_evenly_over_clients_and_classes() -> None:
    """The first 24 rows would all be one client's."""
    examples = sorted_examples(torch.arange(90) % 2)
    drawn = draw_references(examples, 24, 7, 0)
    assert examples.groups is not None
    pairs = list(zip(examples.groups[drawn].tolist(), examples.labels[drawn].tolist(), strict=True))
    assert {pair: pairs.count(pair) for pair in pairs} == {(group, label): 4 for group in range(3) for label in (0, 1)}
    assert len(set(drawn.tolist())) == 24
    assert torch.equal(drawn, draw_references(examples, 24, 7, 0))
    assert not torch.equal(drawn, draw_references(examples, 24, 7, 1))
    assert not torch.equal(drawn, draw_references(examples, 24, 8, 0))


def test_references_of_a_regression_are_drawn_evenly_over_its_targets() -> None:
    """Of each quarter as many, which by chance alone would be rare."""
    examples = Examples(raw=torch.zeros(90, 1), labels=torch.arange(90.0) ** 3, scale=1.0)
    targets = examples.labels[draw_references(examples, 36, 0)]
    quarters = np.digitize(targets.numpy(), np.quantile(examples.labels.numpy(), (0.25, 0.5, 0.75)))
    assert np.bincount(quarters).tolist() == [9, 9, 9, 9]


def test_where_references_are_few_all_are_drawn() -> None:
    examples = sorted_examples(torch.arange(90) % 2)
    assert sorted(draw_references(examples, 200, 0).tolist()) == list(range(90))
    nothing = Examples(raw=torch.zeros(0, 1), labels=torch.zeros(0), scale=1.0)
    assert len(draw_references(nothing, 8, 0)) == 0


def test_the_explanation_of_a_linear_model_is_its_weights() -> None:
    """Piece j of reference x adds weight_kj (x_j - mean_j)."""
    layer = nn.Linear(FEATURES, OUTPUTS, bias=False)
    references = REFERENCES - REFERENCES.mean(0)
    found = signature(layer, references, PIECES, masks=64)
    assert found.shape == (10, FEATURES, OUTPUTS)
    expected = references[:, :, None] * layer.weight.detach().T[None]
    torch.testing.assert_close(found, expected.double(), atol=1e-5, rtol=1e-4)


def test_without_a_constant_the_fit_is_that_of_the_pseudo_inverse() -> None:
    """As the Zest paper fits, of any model; the masks are read off a model that returns them."""
    ones = torch.ones(1, FEATURES)
    shown: list[Tensor] = []

    def spy(batch: Tensor) -> Tensor:
        shown.append(batch)
        return batch

    signature(spy, torch.cat([ones, -ones]), PIECES, masks=50)
    kept = (shown[0] == 1).double()  # masked numbers become the mean, 0
    assert kept[0].all()
    assert 0.3 < kept[1:].mean() < 0.7
    model = network(1)
    found = signature(model, REFERENCES, PIECES, masks=50)
    for place in (0, 7):
        masked = torch.where(kept.bool(), REFERENCES[place], REFERENCES.mean(0))
        expected = torch.linalg.pinv(kept) @ model(masked).detach().double()
        torch.testing.assert_close(found[place], expected, atol=1e-6, rtol=1e-5)


def test_features_of_one_column_are_masked_together() -> None:
    columns = (Column(name="kind", start=0, categories=("a", "b", "c")), Column(name="n", start=3))
    pieces = interpretable_pieces((4,), columns)
    assert pieces.tolist() == [0, 0, 0, 1]
    layer = nn.Linear(4, 2, bias=False)
    references = torch.eye(4) - 0.25
    found = signature(layer, references, pieces, masks=40)
    each = references[:, :, None] * layer.weight.detach().T[None]
    expected = torch.stack([each[:, :3].sum(1), each[:, 3]], 1)
    torch.testing.assert_close(found, expected.double(), atol=1e-5, rtol=1e-4)


def test_images_are_cut_into_a_grid_through_all_channels() -> None:
    pieces = interpretable_pieces((3, 80, 70))
    assert pieces.shape == (3, 80, 70)
    assert (pieces == pieces[0]).all()
    assert pieces.unique().tolist() == list(range(64))
    assert (pieces[0, :10, :8] == 0).all()
    assert pieces[0, 79, 69] == 63
    sizes = pieces[0].flatten().bincount()
    assert sizes.min() >= 80
    assert sizes.max() <= 90
    assert interpretable_pieces((1, 2, 3)).tolist() == [[[0, 1, 2], [3, 4, 5]]]


def test_a_series_is_cut_into_spans_of_time_that_its_channels_share() -> None:
    pieces = interpretable_pieces((2, 20))
    assert torch.equal(pieces[0], pieces[1])
    assert pieces[0].unique(return_counts=True)[1].tolist() == [3, 2, 3, 2, 3, 2, 3, 2]
    assert interpretable_pieces((1, 2, 3), modality="image").shape == (1, 2, 3)
    assert interpretable_pieces((1, 3)).tolist() == [[0, 1, 2]]


def test_a_masked_image_shows_the_mean_of_its_channel() -> None:
    images = torch.rand(5, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    shown: list[Tensor] = []

    def spy(batch: Tensor) -> Tensor:
        shown.append(batch)
        return batch.flatten(1)

    signature(spy, images, interpretable_pieces((2, 4, 4)), masks=40)
    for channel in range(2):
        values = set(shown[0][1:, channel].flatten().tolist())
        own = set(images[0, channel].flatten().tolist())
        assert len(values - own) == 1
        assert (values - own).pop() == pytest.approx(images[:, channel].mean().item(), abs=1e-6)


def test_a_model_is_like_itself_and_its_negative_is_not() -> None:
    model = network(1)
    own = explain_outputs(model)
    assert zest(own, own) == pytest.approx(1, abs=1e-12)
    assert zest(own, 3 * own) == pytest.approx(1, abs=1e-12)
    assert zest(own, -own) == pytest.approx(-1, abs=1e-12)


def test_unrelated_models_are_not_alike() -> None:
    """Weights drawn apart: no cosine leaves what 1 / sqrt(numbers) would bring about by far."""
    centre = REFERENCES.mean(0, keepdim=True)
    signatures = []
    for seed in range(24):
        model = network(seed)
        signatures.append(explain_outputs(lambda rows, model=model: model(rows) - model(centre)))
    pairs = [zest(*pair) for pair in zip(signatures[::2], signatures[1::2], strict=True)]
    assert abs(sum(pairs) / len(pairs)) < 0.2
    assert max(map(abs, pairs)) < 0.8


def test_the_nearer_the_weights_the_higher() -> None:
    model = network(1)
    noise = network(2)
    found = []
    for size in (0.0, 0.1, 0.3, 1.0):
        other = copy.deepcopy(model)
        for own, away in zip(other.parameters(), noise.parameters(), strict=True):
            own.data += size * away.data
        found.append(zest(explain_outputs(model), explain_outputs(other)))
    assert found == sorted(found, reverse=True)
    assert found[1] > 0.95 > found[3]


def test_a_model_without_an_answer_is_like_none() -> None:
    own = explain_outputs(network(1))
    assert zest(own, torch.zeros_like(own)) == 0


def test_withheld_statistics_are_those_of_the_references() -> None:
    """So that the answer to an example does not depend on what else is in its batch."""
    model = network(1, batch_norm=True)
    with torch.no_grad():
        model(draw_normal(40, FEATURES, seed=3) * 5)  # some other statistics
    before = copy.deepcopy(model.state_dict())
    answer = model_outputs(model, copy_state(model, statistics=False), REFERENCES)
    model.eval()
    hidden = model[1](REFERENCES)  # type: ignore[index]
    normal = (hidden - hidden.mean(0)) / (hidden.var(0) + 1e-5).sqrt()
    torch.testing.assert_close(answer(REFERENCES), model[4](normal.relu()))  # type: ignore[index]
    torch.testing.assert_close(answer(REFERENCES[:1]), answer(REFERENCES)[:1])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_shared_statistics_are_kept() -> None:
    model = network(1, batch_norm=True)
    with torch.no_grad():
        model(draw_normal(40, FEATURES, seed=3) * 5)
    answer = model_outputs(model, copy_state(model), REFERENCES)
    torch.testing.assert_close(answer(REFERENCES), model.eval()(REFERENCES))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ConfigError, "expected more than the 6 pieces", lambda: signature(nn.ReLU(), REFERENCES, PIECES, masks=6)),
        (DataError, "no reference examples", lambda: signature(nn.Identity(), REFERENCES[:0], PIECES)),
        (AttackError, "NaN or infinite", lambda: signature(lambda x: x / 0, REFERENCES, PIECES)),
        (DataError, "expected images, rows of a table or series", lambda: interpretable_pieces((2, 3, 4, 5))),
        (DataError, "signatures of one shape", lambda: zest(torch.ones(1, 2, 3), torch.ones(1, 2, 2))),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_said_in_a_sentence(error: type[Exception], message: str, call: object) -> None:
    with pytest.raises(error, match=message) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith(".")
