"""What an adversary that knows a defense makes of a gradient: numbers by hand, and slopes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from clients.defenses.gradient_prune import GradientPrune
from clients.defenses.layer_freeze import LayerFreeze
from clients.defenses.quantise import Quantise
from clients.defenses.random_mask import RandomMask
from clients.defenses.soteria import Soteria
from clients.defenses.top_k import TopK
from clients.defenses.views import find_random_mask
from clients.mods import as_mod
from fedsim.base.errors import PluginError
from fedsim.base.papers import Paper
from fedsim.base.randomness import generator
from fedsim.interfaces.defense import Defense, apply_adversary_views
from fedsim.interfaces.defense_calls import apply_on_update
from fedsim.interfaces.local_context import ClientRound, LocalContext
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State

TRUE = {"w": torch.tensor([[3.0, -0.5], [0.25, -4.0]]), "b": torch.tensor([1.0, -2.0])}
BUILT_IN: list[Defense] = [
    TopK(k=3),
    RandomMask(masked=0.4),
    RandomMask(masked=0.4, rescale=True),
    LayerFreeze(layers=("b",)),
    Quantise(scheme="sign"),
    Quantise(scheme="fp16"),
    GradientPrune(pruned=0.5),
    Soteria(pruned=0.5),
]


def sent_by(defense: Defense, true: State = TRUE, seed: int = 0) -> State:
    """What the defense makes of a gradient that is sent as an update."""
    if isinstance(defense, GradientPrune):
        return defense.on_gradient(true, LocalContext(rng=generator(seed)))
    if isinstance(defense, Soteria):
        return {**true, "w": true["w"] * torch.tensor([1.0, 0.0])}
    got = apply_on_update(defense, true, LocalContext(rng=generator(seed)))
    return got.values("delta", true) if isinstance(got, Payload) else got


def tensors(**lists: Any) -> dict[str, Tensor]:
    return {name: torch.tensor(values) for name, values in lists.items()}


@pytest.mark.parametrize("defense", BUILT_IN)
def test_the_true_gradient_is_seen_as_what_was_sent(defense: Defense) -> None:
    """But for signs, which are seen as smooth ones, and for what was not sent, of which half is left."""
    sent = sent_by(defense)
    seen = defense.adversary_view(TRUE, sent)
    for name, tensor in sent.items():
        there = tensor != 0
        if isinstance(defense, Quantise) and defense.scheme == "sign":
            assert torch.equal(seen[name].sign(), tensor.sign())
            assert (seen[name].abs() <= tensor.abs()).all()
        else:
            torch.testing.assert_close(seen[name][there], tensor[there].float(), rtol=1e-3, atol=0)
            assert (seen[name][~there].abs() <= TRUE[name][~there].abs() / 2).all()


@pytest.mark.parametrize("defense", BUILT_IN)
def test_what_is_seen_has_a_slope_in_the_gradient(defense: Defense) -> None:
    leaves = {name: tensor.clone().requires_grad_(True) for name, tensor in TRUE.items()}
    seen = defense.adversary_view(leaves, sent_by(defense))
    slopes = torch.autograd.grad(sum(t.square().sum() for t in seen.values()), list(leaves.values()), allow_unused=True)
    assert all(slope is None or slope.isfinite().all() for slope in slopes)
    assert any(slope is not None and slope.any() for slope in slopes)


def test_what_top_k_did_not_send_counts_half() -> None:
    sent = tensors(w=[[3.0, 0.0], [0.0, -4.0]], b=[0.0, -2.0])
    seen = TopK(k=3).adversary_view(tensors(w=[[3.0, 5.0], [-0.5, -4.0]], b=[1.0, -2.0]), sent)
    torch.testing.assert_close(seen, tensors(w=[[3.0, 2.5], [-0.25, -4.0]], b=[0.5, -2.0]))


def test_what_pruning_set_to_zero_counts_half_up_to_its_bound_in_the_unit_of_the_gradient() -> None:
    """A tenth of 4 and -3 was sent, so the rest of the gradient was at most 3; of 5 that is 1.5 and 2."""
    defense, sent = GradientPrune(pruned=0.3), tensors(w=[0.0, 0.4, -0.3])
    torch.testing.assert_close(defense.adversary_view(tensors(w=[5.0, 4.0, -3.0]), sent), tensors(w=[3.5, 4.0, -3.0]))
    torch.testing.assert_close(defense.adversary_view(tensors(w=[0.5, 0.4, -0.3]), sent), tensors(w=[0.35, 0.4, -0.3]))


def test_what_error_feedback_adds_up_is_seen_as_it_is() -> None:
    sent = tensors(w=[[3.0, 0.0], [0.0, -4.0]], b=[0.0, -2.0])
    assert TopK(k=3, error_feedback=True).adversary_view(TRUE, sent) is TRUE


def test_bounds_of_pruning_are_those_of_each_tensor() -> None:
    gradient = tensors(w=[4.0, 6.0], b=[0.4, 0.6])
    seen = GradientPrune(pruned=0.5).adversary_view(gradient, tensors(w=[4.0, 0.0], b=[0.4, 0.0]))
    torch.testing.assert_close(seen, tensors(w=[4.0, 4.0], b=[0.4, 0.4]))
    far = GradientPrune(pruned=0.5).adversary_view(tensors(w=[4.0, 3.0], b=[0.4, 0.3]), gradient | {"w": gradient["w"]})
    assert far["w"].tolist() == [4.0, 3.0], "all was sent"


def test_a_tensor_of_which_nothing_was_sent_has_no_bound() -> None:
    sent = tensors(w=[4.0, 0.0], b=[0.0, 0.0])
    assert GradientPrune(pruned=0.5).adversary_view(tensors(w=[4.0, 0.0], b=[9.0, 1.0]), sent)["b"].tolist() == [
        4.5,
        0.5,
    ]


@pytest.mark.parametrize(("rescale", "factor"), [(False, 1.0), (True, 2.5)])
def test_masked_numbers_count_for_nothing_and_the_factor_of_the_rest_is_known(rescale: bool, factor: float) -> None:
    sent = tensors(w=[[1.0, 0.0], [0.0, 2.0]], b=[0.0, 1.0])
    seen = RandomMask(masked=0.6, rescale=rescale).adversary_view(TRUE, sent)
    torch.testing.assert_close(seen["w"], factor * torch.tensor([[3.0, 0.0], [0.0, -4.0]]))
    torch.testing.assert_close(seen["b"], factor * torch.tensor([0.0, -2.0]))


def test_rows_and_columns_that_no_mask_empties_are_zero_by_themselves() -> None:
    """Of 8 rows and 6 columns, 0.4^6 and 0.4^8 are below a hundredth; of 2 columns 0.4^2 is not."""
    sent = torch.ones(8, 6)
    sent[0, 0] = sent[3] = 0.0
    sent[:, 5] = 0.0
    expected = torch.zeros(8, 6, dtype=torch.bool)
    expected[0, 0] = True
    assert torch.equal(find_random_mask(sent, 0.4), expected)
    assert find_random_mask(torch.zeros(1, 2), 0.4).all()
    assert torch.equal(find_random_mask(sent.reshape(8, 2, 3), 0.4), expected.reshape(8, 2, 3))
    assert find_random_mask(sent[0], 0.4).tolist() == [True, False, False, False, False, True], "a bias has no rows"


def test_layers_that_are_never_sent_are_left_out() -> None:
    seen = LayerFreeze(layers=("b*",)).adversary_view(TRUE, sent_by(LayerFreeze(layers=("b*",))))
    assert torch.equal(seen["w"], TRUE["w"])
    assert not seen["b"].any()


def test_signs_are_smooth_and_of_the_mean_absolute_value() -> None:
    """|1|, |-3| have the mean 2, so tanh(1 / 0.6) and tanh(-3 / 0.6), times 2."""
    seen = Quantise(scheme="sign").adversary_view(tensors(w=[1.0, -3.0]), tensors(w=[2.0, -2.0]))
    torch.testing.assert_close(seen["w"], 2 * torch.tensor([1 / 0.6, -3 / 0.6]).tanh())
    assert not Quantise(scheme="sign").adversary_view(tensors(w=[0.0, 0.0]), tensors(w=[0.0, 0.0]))["w"].any()


@pytest.mark.parametrize("scheme", ["qsgd", "ternary", "fp16"])
def test_roundings_that_are_right_on_average_leave_the_gradient_as_it_is(scheme: Any) -> None:
    assert Quantise(scheme=scheme).adversary_view(TRUE, sent_by(Quantise(scheme=scheme))) == TRUE


def test_features_that_were_left_out_count_for_nothing_in_the_last_layer_alone() -> None:
    gradient = tensors(first=[[1.0, 2.0]], last=[[3.0, 4.0], [5.0, 6.0]], bias=[7.0, 8.0])
    sent = tensors(first=[[1.0, 0.0]], last=[[3.0, 0.0], [5.0, 0.0]], bias=[0.0, 8.0])
    seen = Soteria(pruned=0.5).adversary_view(gradient, sent)
    assert {name: tensor.tolist() for name, tensor in seen.items()} == {
        "first": [[1.0, 2.0]],
        "last": [[3.0, 0.0], [5.0, 0.0]],
        "bias": [7.0, 8.0],
    }


@pytest.mark.parametrize("defense", [GradientPrune(pruned=0.0), RandomMask(masked=0.0), Soteria(pruned=0.0)])
def test_at_strength_zero_the_gradient_is_seen_as_it_is(defense: Defense) -> None:
    sent = tensors(w=[[3.0, 0.0], [0.0, 0.0]], b=[0.0, -2.0])
    assert defense.adversary_view(TRUE, sent) is TRUE


# One mask for all clients of a round.


def masks(defense: RandomMask, client: int, number: int) -> Tensor:
    ones = {"w": torch.ones(40)}
    client_round = ClientRound(key=(client, number), number=number, common_key=("common", number))
    context = client_round.make_context("on_update", ("RandomMask", 0), defense.draws_in_common)
    got = apply_on_update(defense, ones, context)
    assert isinstance(got, Payload)
    return got.values("delta", ones)["w"]


def test_all_clients_of_a_round_leave_out_the_same_numbers_where_the_mask_is_common() -> None:
    own, common = RandomMask(), RandomMask(common=True)
    assert not torch.equal(masks(own, 0, 1), masks(own, 1, 1))
    assert torch.equal(masks(common, 0, 1), masks(common, 1, 1))
    assert not torch.equal(masks(common, 0, 1), masks(common, 0, 2)), "each round has a mask of its own"
    assert common.summable
    assert not own.summable


def test_only_a_common_mask_keeps_the_defense_from_being_a_mod() -> None:
    assert callable(as_mod(RandomMask()))
    with pytest.raises(PluginError, match="its clients share random draws in each round"):
        as_mod(RandomMask(common=True))


def test_of_a_defense_that_says_nothing_nothing_is_known_and_others_are_still_seen() -> None:
    @dataclass(frozen=True)
    class Silent(Defense):
        paper: ClassVar[Paper] = RandomMask.paper

        def on_update(self, update: State, context: LocalContext) -> State:
            del context
            return update

    sent = tensors(w=[[3.0, 0.0], [0.0, 0.0]], b=[0.0, -2.0])
    assert Silent().adversary_view(TRUE, sent) is None
    assert apply_adversary_views([Silent(), Silent()], TRUE, sent) is None
    one = RandomMask(masked=0.6)
    both = apply_adversary_views([Silent(), one, Silent()], TRUE, sent)
    assert both is not None
    assert all(torch.equal(both[name], tensor) for name, tensor in (one.adversary_view(TRUE, sent) or {}).items())
