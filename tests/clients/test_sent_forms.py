"""Defenses that send fewer numbers, or fewer bits of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from clients.defenses.gradient_prune import GradientPrune
from clients.defenses.layer_freeze import LayerFreeze
from clients.defenses.quantise import Quantise
from clients.defenses.random_mask import RandomMask
from clients.defenses.top_k import TopK
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator
from fedsim.base.task import Task
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.simulation import run_federation
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.defense import Defense, Setting
from fedsim.interfaces.defense_calls import apply_on_gradient, apply_on_update
from fedsim.interfaces.defense_checks import check_order, check_setting
from fedsim.interfaces.local_context import LocalContext, Memory
from fedsim.recording.payloads import Payload
from fedsim.recording.transcript import Transcript
from fedsim.training.settings import LocalTraining

UPDATE = {"w": torch.tensor([[3.0, -0.5], [0.25, -4.0]]), "b": torch.tensor([1.0, -2.0])}

SETTING = Setting(
    update=UPDATE,
    task=Task((4,), 2),
    training=LocalTraining(local_epochs=1),
    rounds=3,
    clients=2,
    num_examples=[10, 20],
)


def defended_payload(
    defense: Defense, update: dict[str, Tensor] = UPDATE, memory: Memory | None = None, seed: int = 0
) -> Payload:
    memory = {} if memory is None else memory
    got = apply_on_update(defense, update, LocalContext(rng=generator(seed), memory=memory))
    return got if isinstance(got, Payload) else Payload.from_dense(got)


def values(payload: Payload) -> dict[str, Tensor]:
    return dict(payload.values("delta", UPDATE))


def test_top_k_sends_the_largest_numbers_of_all_layers_together() -> None:
    payload = defended_payload(TopK(k=3))
    torch.testing.assert_close(
        values(payload), {"w": torch.tensor([[3.0, 0.0], [0.0, -4.0]]), "b": torch.tensor([0.0, -2.0])}
    )
    assert payload.nbytes == 3 * (4 + 4), "three places and three numbers"
    assert values(defended_payload(TopK(fraction=0.5)))["w"].tolist() == [[3.0, 0.0], [0.0, -4.0]], "three of six"
    assert sum(int((t != 0).sum()) for t in values(defended_payload(TopK(fraction=1e-9))).values()) == 1, "at least one"


@pytest.mark.parametrize("defense", [TopK(k=2, error_feedback=True), RandomMask(masked=0.7, error_feedback=True)])
def test_with_error_feedback_what_is_not_sent_is_sent_later(defense: Defense) -> None:
    memory: dict[str, Tensor] = {}
    total = {name: torch.zeros_like(tensor) for name, tensor in UPDATE.items()}
    for number in range(5):
        for name, tensor in values(defended_payload(defense, memory=memory, seed=number)).items():
            total[name] += tensor
    for name, tensor in UPDATE.items():
        torch.testing.assert_close(total[name] + memory[name], 5 * tensor, msg="sent and owed are all there was")


@pytest.mark.parametrize("defense", [TopK(k=2), RandomMask(masked=0.7)])
def test_without_error_feedback_nothing_is_kept(defense: Defense) -> None:
    memory: dict[str, Tensor] = {}
    defended_payload(defense, memory=memory)
    assert not memory


def test_a_random_mask_leaves_out_its_share_and_is_right_on_average_if_asked() -> None:
    update = {"w": torch.ones(20_000)}
    plain = defended_payload(RandomMask(masked=0.4), update).values("delta", update)["w"]
    assert 0.38 < (plain == 0).float().mean() < 0.42
    assert set(plain.unique().tolist()) == {0.0, 1.0}
    other = defended_payload(RandomMask(masked=0.4), update, seed=1).values("delta", update)["w"]
    assert not torch.equal(plain, other), "a new mask each time"
    scaled = defended_payload(RandomMask(masked=0.4, rescale=True), update).values("delta", update)["w"]
    assert scaled.mean() == pytest.approx(1.0, abs=0.03)


def test_signs_come_with_the_mean_absolute_value_of_their_tensor() -> None:
    payload = defended_payload(Quantise(scheme="sign"))
    size = (3.0 + 0.5 + 0.25 + 4.0) / 4
    torch.testing.assert_close(values(payload)["w"], torch.tensor([[size, -size], [size, -size]]))
    assert payload.nbytes == 6 + 2 * 4, "a byte a number and a scale a tensor"


@pytest.mark.parametrize(
    ("defense", "levels"),
    [
        (Quantise(scheme="ternary"), 1),
        pytest.param(Quantise(scheme="qsgd", bits=2), 1, marks=pytest.mark.thorough),
        (Quantise(scheme="qsgd", bits=4), 7),
        pytest.param(Quantise(scheme="qsgd", bits=8), 127, marks=pytest.mark.thorough),
        pytest.param(Quantise(scheme="qsgd", bits=12), 2047, marks=pytest.mark.thorough),
    ],
)
def test_random_rounding_is_right_on_average_and_never_off_by_more_than_a_level(defense: Quantise, levels: int) -> None:
    rows = [values(defended_payload(defense, seed=seed))["w"] for seed in range(1000)]
    largest = UPDATE["w"].abs().max() if defense.scheme == "ternary" else UPDATE["w"].norm()
    level = largest / levels
    assert all((row - UPDATE["w"]).abs().max() <= level * 1.0001 for row in rows)
    torch.testing.assert_close(torch.stack(rows).mean(0), UPDATE["w"], atol=0.085 * float(level) + 1e-6, rtol=0)
    steps = rows[0] / level
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)


def test_pruning_takes_the_smallest_numbers_of_each_tensor() -> None:
    context = LocalContext(rng=generator(0))
    got = apply_on_gradient(GradientPrune(pruned=0.5), UPDATE, context)
    assert got["w"].tolist() == [[3.0, 0.0], [0.0, -4.0]]
    assert got["b"].tolist() == [0.0, -2.0]
    assert apply_on_gradient(GradientPrune(pruned=0.0), UPDATE, context) == UPDATE, "the same objects"
    few = {"b": torch.tensor([1.0])}
    assert apply_on_gradient(GradientPrune(pruned=0.9), few, context)["b"].item() == 1.0


def test_frozen_layers_are_not_sent() -> None:
    payload = defended_payload(LayerFreeze(layers=("b*",)))
    assert torch.equal(values(payload)["w"], UPDATE["w"])
    assert values(payload)["b"].tolist() == [0.0, 0.0]
    assert payload.nbytes == 4 * 4, "the other layer's numbers alone"


def test_patterns_of_frozen_layers_match_whole_names_in_their_case() -> None:
    update = {name: torch.ones(2) for name in ("head", "head.bias", "Head", "body.0", "body.1")}
    payload = defended_payload(LayerFreeze(layers=("head", "body.?")), update)
    left = {name: bool(tensor.any()) for name, tensor in payload.values("delta", update).items()}
    assert left == {"head": False, "head.bias": True, "Head": True, "body.0": False, "body.1": False}
    assert payload.nbytes == 2 * 2 * 4


def test_half_precision_takes_two_bytes_a_number() -> None:
    payload = defended_payload(Quantise(scheme="fp16"))
    assert payload.nbytes == 12
    torch.testing.assert_close({n: t.float() for n, t in values(payload).items()}, UPDATE, rtol=1e-3, atol=0)


@pytest.mark.parametrize("scheme", ["sign", "qsgd", "ternary", "fp16"])
def test_a_tensor_of_zeros_or_of_nothing_stays_one(scheme: Any) -> None:
    update = {"w": torch.zeros(3), "none": torch.zeros(0)}
    got = defended_payload(Quantise(scheme=scheme), update).values("delta", update)
    assert {name: tensor.float().tolist() for name, tensor in got.items()} == {"w": [0.0] * 3, "none": []}


@pytest.mark.parametrize("defense", [TopK(fraction=1.0), RandomMask(masked=0.0)])
def test_strength_zero_hands_back_the_update_itself(defense: Defense) -> None:
    update = dict(UPDATE)
    got = apply_on_update(defense, update, LocalContext(rng=generator(0)))
    assert isinstance(got, dict)
    assert all(got[name] is tensor for name, tensor in update.items())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: TopK(fraction=0.0), "fraction: expected a value above 0"),
        (lambda: TopK(k=-1), "k: expected at least 0, got -1"),
        (lambda: RandomMask(masked=1.0), "masked: expected a value below 1, got 1.0"),
        (lambda: RandomMask(rescale=True, error_feedback=True), "set one of them to false"),
        (lambda: GradientPrune(pruned=1.0), "pruned: expected a value below 1, got 1.0"),
        (lambda: LayerFreeze(), "layers: nothing is named"),
        (
            lambda: check_setting(LayerFreeze(layers=("c",)), SETTING),
            "layer-freeze: layers: 'c' matches nothing .* w, b",
        ),
        (lambda: check_setting(LayerFreeze(layers=("*",)), SETTING), "they are the whole model"),
        (lambda: Quantise(bits=1), "bits: expected at least 2, got 1"),
        (lambda: check_setting(TopK(k=7), SETTING), "top-k: k: 7 numbers are to be sent, but an update has 6"),
        (lambda: check_order([Quantise(), UpdateNoise()]), "; put quantise last"),
        (
            lambda: check_order([TopK(), Quantise()]),
            "top-k puts .*; use one of top-k, quantise alone, and",
        ),
        (lambda: check_order([Quantise(), TopK()]), "use one of quantise, top-k alone, and put it last"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make()


def test_noise_before_quantisation_is_accepted() -> None:
    check_order([UpdateNoise(), Quantise()])


def config(*defenses: dict[str, Any]) -> Config:
    tables: dict[str, Any] = {
        "partition": {"samples_per_client": 4},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"local_steps": 1, "batch_size": 2},
        "federation": {"clients": 2, "rounds": 3, "evaluate_every": 0, "vectorise": False},
        "defense": list(defenses),
    }
    return resolve(validate_tables(Config, tables, "test"))


def messages(tmp_path: Any, *defenses: dict[str, Any]) -> Transcript:
    folder = OpenRun(tmp_path / "run")
    run_federation(config(*defenses), folder)
    return Transcript(folder.transcript)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Transcript:
    """What clients without a defense send."""
    return messages(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "table",
    [
        {"name": "top-k", "fraction": 0.1},
        {"name": "random-mask", "masked": 0.9},
        {"name": "quantise", "scheme": "sign"},
        {"name": "layer-freeze", "layers": ["1.weight"]},
        {"name": "quantise", "scheme": "fp16"},
    ],
)
def test_the_server_sees_what_was_sent_and_its_size(tmp_path: Any, plain: Transcript, table: dict[str, Any]) -> None:
    update, other = messages(tmp_path, table).recorded_update(1, 0), plain.recorded_update(1, 0)
    assert update.sends_delta
    assert update.payload.nbytes < 0.6 * other.payload.nbytes


def test_settings_that_do_not_fit_the_model_are_refused_before_work() -> None:
    with pytest.raises(ConfigError, match=r"^defense: top-k: k: 1000000 numbers are to be sent, but an update has"):
        Experiment(config({"name": "top-k", "k": 10**6})).check()
    with pytest.raises(ConfigError, match="put quantise last"):
        Experiment(config({"name": "quantise"}, {"name": "update-noise"})).check()
