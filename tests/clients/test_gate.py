"""The gate: what it refuses, when it closes, and what it then does to data and update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from clients.defenses.gate import Gate
from fedsim.base.errors import ConfigError, RunError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.exposure.measure import Meaning, Measure
from fedsim.federation.experiment import Experiment
from fedsim.federation.resolve import resolve
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.defense_calls import apply_on_data
from fedsim.interfaces.local_context import LocalContext, Memory
from fedsim.plugins import registry
from fedsim.training.cohort import LocalData
from fedsim.training.local_round import LocalRound
from fedsim.training.message_function import ClientMessage
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining
from tests.support.data_folder import find_data_folder
from tests.support.experiments import make_tiny_config

TASK = Task((1, 4, 4), 3)
LABELS = torch.tensor([0, 1, 2, 0, 1])
EVERYTHING = list(range(len(LABELS)))
HERE = __name__


@dataclass(frozen=True, kw_only=True)
class Brightness(Measure):
    """The largest of all numbers that vary; undefined where that is 0."""

    quantities: ClassVar[Mapping[str, Meaning]] = {"most": "more", "least": "less"}

    def _compute(self, sent: ClientMessage) -> Mapping[str, float | Tensor]:
        most = float(sent.unknown_inputs.max())
        return {"most": most or torch.nan, "least": -most or torch.nan}


def a_round(*brightness: float, training: LocalTraining | None = None) -> LocalRound:
    """Examples that are each as bright as said."""
    with seed_globals("gate"):
        model = Mlp(hidden=(6,)).build(TASK)
    each = brightness if len(brightness) > 1 else brightness * len(LABELS)
    inputs = torch.tensor(each).reshape(-1, 1, 1, 1).expand(len(LABELS), *TASK.input_shape)
    training = training or LocalTraining(local_epochs=1, batch_size=2)
    return LocalRound.create(model, LocalData(inputs=inputs, labels=LABELS, key=("gate",)), training, TASK.loss)


def kept(gate: Gate, *brightness: float, memory: Memory | None = None) -> list[int]:
    context = LocalContext(rng=generator(1), memory={} if memory is None else memory)
    return apply_on_data(gate, a_round(*brightness), context).tolist()


def bright(**settings: Any) -> Gate:
    return Gate(measure={"name": f"{HERE}:Brightness"}, **settings)


# The hook behind it.


@dataclass(frozen=True, kw_only=True)
class Chooses(Defense):
    """Gives what it was made with."""

    given: Any = field(hash=False, default=None)
    paper = Gate.paper

    def on_data(self, local: LocalRound, context: LocalContext) -> Tensor:
        return self.given


@pytest.mark.parametrize(
    "given",
    [
        None,
        [0, 1],
        torch.ones(5, dtype=torch.bool),
        torch.tensor([0.0, 1.0]),
        torch.tensor([1, 0]),
        torch.tensor([1, 1]),
        torch.tensor([-1, 2]),
        torch.tensor([3, 5]),
        torch.tensor([[0, 1]]),
    ],
    ids=repr,
)
def test_what_is_no_choice_of_examples_is_refused(given: Any) -> None:
    with pytest.raises(RunError, match=r"Chooses.on_data: expected ascending places of examples, int64 from 0 to 4"):
        apply_on_data(Chooses(given=given), a_round(1.0), LocalContext(rng=generator(1)))


@pytest.mark.parametrize("given", [[], [4], [0, 3], [0, 1, 2, 3, 4]])
def test_a_choice_of_examples_is_taken_as_it_is(given: list[int]) -> None:
    chosen = torch.tensor(given, dtype=torch.int64)
    assert apply_on_data(Chooses(given=chosen), a_round(1.0), LocalContext(rng=generator(1))).tolist() == given


# Settings.


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"above": 1.0, "quantile": 0.5}, "expected exactly one of above, below, quantile and fraction, got above and"),
        ({}, "expected exactly one of above, below, quantile and fraction, got none"),
        (
            {"measure": "gradient-nrom", "above": 1.0},
            "defense.0: measure: nothing is called 'gradient-nrom', did you mean 'gradient-norm'",
        ),
        ({"measure": {"sigma": 1.0}, "above": 1.0}, "expected the name of a measure, or a table with a 'name'"),
        ({"measure": {"name": "lavp", "stps": 1}, "below": 1.0}, "unknown setting for 'lavp', did you mean 'steps'"),
        ({"measure": "lavp", "quantity": "ang_mux", "below": 1.0}, "lavp gives no 'ang_mux', did you mean 'ang_m"),
        ({"below": 1.0}, "below: a larger 'norm' of gradient-norm says that more is exposed, so the gate would close"),
        ({"measure": "lavp", "above": 1.0}, "above: a larger 'max' of lavp says that less is exposed"),
        ({"measure": "lavp", "below": 1.0, "access": "black-box"}, "access: lavp takes derivatives of the model"),
        ({"measure": "lavp", "above": 1.0}, "use below, or, if your clients show the reverse, larger_means = 'more'"),
        ({"above": 1.0, "larger_means": "less"}, "above: a larger 'norm' of gradient-norm says that less is exposed"),
        ({"below": 1.0, "larger_means": "fewer"}, "larger_means"),
        ({"above": 1.0, "access": "grey-box"}, "access"),
        ({"above": 1.0, "action": "drop"}, "action"),
        ({"above": 1.0, "noise": 1.0}, "noise: belongs to action 'noise', got action 'withhold'; leave it out"),
        (
            {"above": 1.0, "action": "noise"},
            "noise: action 'noise' needs a standard deviation, which is not set",
        ),
        ({"above": 1.0, "action": "noise", "noise": 0.0}, "noise: expected a value above 0, got 0.0"),
        ({"quantile": 1.0}, "quantile: expected a value below 1, got 1.0"),
        ({"fraction": 0.5}, "fraction: counts examples, which action 'withhold' does not choose"),
        ({"fraction": 1.0, "action": "drop-examples"}, "fraction: expected a value below 1, got 1.0"),
        ({"above": float("nan")}, "above: expected a finite value, got nan"),
        ({"above": 1.0, "memory": 0}, "memory: expected at least 1, got 0"),
    ],
)
def test_wrong_settings_are_one_sentence(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.build("defenses", "gate", {"measure": "gradient-norm", **settings}, "defense.0")
    assert says in str(caught.value)
    assert str(caught.value).startswith("defense.0")
    assert "\n" not in str(caught.value)


def test_an_action_and_an_access_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="action: expected 'withhold', 'noise' or 'drop-examples', got 'drop'"):
        bright(above=1.0, action="drop")
    with pytest.raises(ConfigError, match="access: expected 'white-box' or 'black-box', got 'grey-box'"):
        bright(above=1.0, access="grey-box")


def test_a_run_tells_all_settings_of_the_measure() -> None:
    config = resolve(make_tiny_config(defense=[{"name": "gate", "measure": "angular-lipschitz", "below": 1.0}]))
    table = config.defense[0].settings["measure"]
    assert table == {"name": "angular-lipschitz", "sigma": 0.001, "noises": 1000}
    assert resolve(config) == config


def test_with_black_box_access_measures_of_gradients_alone_are_left() -> None:
    gradients = {"gradient-norm", "lipschitz", "angular-lipschitz", "sensitivity"}
    ways = {name: Gate(measure=name, quantile=0.5) for name in registry.registered_names("measures")}
    assert {name for name, gate in ways.items() if gate._built_measure.black_box} == gradients
    for name, gate in ways.items():
        if name in gradients:
            assert replace(gate, access="black-box").access == "black-box"
            continue
        with pytest.raises(ConfigError, match=f"^access: {name} takes derivatives of the model"):
            replace(gate, access="black-box")


def check_experiment(*defenses: dict[str, Any], **tables: Any) -> None:
    Experiment(resolve(make_tiny_config(defense=list(defenses), **tables))).check()


GATE: dict[str, Any] = {"name": "gate", "measure": "gradient-norm", "above": 1.0}
DROP: dict[str, Any] = {**GATE, "action": "drop-examples"}
TEXTS: dict[str, Any] = {
    "data": {"name": "reuters-r8", "length": 8, "vocabulary": 40},
    "model": {"name": "text-cnn"},
}


@pytest.mark.parametrize(
    ("defenses", "tables", "says"),
    [
        ([GATE, {"name": "dp-sgd", "noise_multiplier": 1.0}], {}, "guarantee of dp-sgd does not cover"),
        ([{"name": "dp-sgd", "epsilon": 5.0}, GATE], {}, "guarantee of dp-sgd does not cover"),
        ([GATE, {"name": "update-noise", "noise_multiplier": 1.0}], {}, "guarantee of update-noise does not cover"),
        ([DROP], {"partition": {"samples_per_client": 1}}, "would leave nothing to send; use action 'withhold'"),
        (
            [DROP],
            {
                "strategy": {"name": "fedsgd", "learning_rate": 0.1},
                "training": {"local_epochs": None, "local_steps": 1, "batch_size": 1, "learning_rate": None},
            },
            "action 'drop-examples' of client 0, whose message is made of a single example",
        ),
        (
            [{**DROP, "above": None, "fraction": 0.01}],
            {},
            "fraction: 0.01 of 24 examples, the most of any client, is less than one, so nothing is ever left out",
        ),
        ([GATE], {"training": {"optimizer": "adam"}}, "of what optimizer 'adam' sends there is no measure yet"),
    ],
)
def test_what_makes_no_sense_is_refused_before_work(
    defenses: list[dict[str, Any]], tables: dict[str, Any], says: str
) -> None:
    defenses = [{key: value for key, value in table.items() if value is not None} for table in defenses]
    with pytest.raises(ConfigError) as caught:
        check_experiment(*defenses, **tables)
    assert says in str(caught.value)
    assert "gate: " in str(caught.value)


def test_what_is_said_of_a_fraction_that_is_too_small_helps() -> None:
    check_experiment({"name": "gate", "measure": "gradient-norm", "action": "drop-examples", "fraction": 0.042})


def test_a_clip_without_noise_proves_nothing_and_may_stand_beside() -> None:
    check_experiment(GATE, {"name": "update-noise", "clip": 1.0})


def test_a_measure_of_numbers_is_refused_for_texts_before_work() -> None:
    find_data_folder("r8")
    gate = {"name": "gate", "measure": {"name": "angular-lipschitz", "noises": 3}, "below": 1.0}
    with pytest.raises(ConfigError, match="gate: measure: the inputs are token ids"):
        check_experiment(gate, **TEXTS)


# When it closes.


def test_a_limit_lets_pass_what_is_at_it() -> None:
    gate = bright(above=1.0)
    assert kept(gate, 1.0) == EVERYTHING
    assert kept(gate, 1.5) == []
    gate = bright(below=-1.0, quantity="least")
    assert kept(gate, 1.0) == EVERYTHING
    assert kept(gate, 1.5) == []


def test_a_gate_may_close_on_the_side_that_its_measure_calls_less_exposed() -> None:
    memory: dict[str, Tensor] = {"values": torch.tensor([-3.0, -2.0, -1.0], dtype=torch.float64)}
    gate = bright(below=1.0, larger_means="less")
    assert kept(gate, 1.0) == EVERYTHING
    assert kept(gate, 0.5) == []
    assert kept(bright(quantile=0.5, larger_means="less"), 1.5, memory=dict(memory)) == []
    assert kept(bright(quantile=0.5, larger_means="less"), 2.5, memory=dict(memory)) == EVERYTHING
    dark_first = bright(fraction=0.4, larger_means="less", action="drop-examples")
    assert kept(dark_first, 1.0, 3.0, 2.0, 2.5, 0.5) == [1, 2, 3]


def test_what_is_undefined_is_not_exposed_and_not_remembered() -> None:
    memory: dict[str, Tensor] = {}
    assert kept(bright(above=-1.0), 0.0) == EVERYTHING
    assert kept(bright(quantile=0.5), 0.0, memory=memory) == EVERYTHING
    assert not len(memory["values"])


def test_a_quantile_of_the_past_is_open_until_there_is_enough_of_it() -> None:
    for quantile, rounds in ((0.5, 1), (0.75, 3), (0.9, 9)):
        memory: dict[str, Tensor] = {}
        closed = [not kept(bright(quantile=quantile), 1.0 + number, memory=memory) for number in range(12)]
        assert closed == [number >= rounds for number in range(12)], "each value is above all before it"
        assert memory["values"].tolist() == [1.0 + number for number in range(12)], "those of silent rounds, too"


@pytest.mark.parametrize(("action", "first"), [("withhold", 10), ("drop-examples", 2)])
def test_a_quantile_that_no_round_can_reach_is_refused(action: str, first: int) -> None:
    """Nine values of earlier rounds are the fewest of which one is at 0.9; examples have as many after one round."""
    gate = {"name": "gate", "measure": "gradient-norm", "quantile": 0.9, "action": action}
    check_experiment(gate, federation={"rounds": first})
    with pytest.raises(ConfigError, match=rf"last of {first - 1} rounds, so the gate never closes; set a smaller one"):
        check_experiment(gate, federation={"rounds": first - 1})


def test_a_quantile_of_more_values_than_are_kept_is_refused() -> None:
    """Of 1000 values the last is at 0.999, in however many rounds."""
    gate = {"name": "gate", "measure": "gradient-norm", "quantile": 0.999}
    check_experiment(gate, federation={"rounds": 3000})
    with pytest.raises(ConfigError, match=r"0.9991 .* the 1000 values .* never closes; set a smaller one$"):
        check_experiment(gate | {"quantile": 0.9991}, federation={"rounds": 3000})


@pytest.mark.parametrize("quantity", ["most", pytest.param("least", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("quantile", [pytest.param(0.5, marks=pytest.mark.thorough), 0.8])
def test_values_in_random_order_pass_their_quantile_seldom_enough(quantile: float, quantity: str) -> None:
    closed, rounds = 0, 40
    for client in range(60):
        memory: dict[str, Tensor] = {}
        gate = bright(quantile=quantile, quantity=quantity)
        values = torch.rand(rounds, dtype=torch.float64, generator=generator("values", client))
        sign = 1 if quantity == "most" else -1
        closed += sum(bool(gate._is_past_limit(sign * value.reshape(1), memory)) for value in values)
    share = closed / (60 * rounds)
    assert share <= 1 - quantile + 0.02
    assert share >= (1 - quantile) * 0.7


def test_the_latest_thousand_values_are_kept() -> None:
    memory = {"values": torch.arange(1000, dtype=torch.float64)}
    kept(bright(quantile=0.5), 5.0, memory=memory)
    assert len(memory["values"]) == 1000
    assert memory["values"][-1] == 5
    assert memory["values"][0] == 1


def test_a_place_in_the_past_is_not_moved_by_rounding() -> None:
    """In floats 0.55 * 100 is above 55."""
    memory = {"values": torch.arange(1, 100, dtype=torch.float64)}
    assert 0.55 * 100 > 55
    assert kept(bright(quantile=0.55), 55.0, memory=dict(memory)) == EVERYTHING
    assert kept(bright(quantile=0.55), 55.5, memory=dict(memory)) == []


def test_examples_are_beside_those_of_earlier_rounds_and_not_beside_each_other() -> None:
    """0.9 needs 9 values: after one round of five there are 5, after two 10, of which the tenth is the limit."""
    gate, memory = bright(quantile=0.9, action="drop-examples"), dict[str, Tensor]()
    assert kept(gate, 1.0, 2.0, 3.0, 4.0, 50.0, memory=memory) == EVERYTHING
    assert kept(gate, 60.0, 2.0, 3.0, 4.0, 5.0, memory=memory) == EVERYTHING
    assert kept(gate, 60.0, 61.0, 3.0, 4.0, 5.0, memory=memory) == [0, 2, 3, 4]
    assert len(memory["values"]) == 15


def test_the_past_of_examples_has_whole_rounds() -> None:
    """Else of a client with many examples only the last ones, perhaps of one class, would set the limit."""
    gate = bright(quantile=0.5, action="drop-examples")
    memory, many = dict[str, Tensor](), torch.arange(1500, dtype=torch.float64)
    gate._is_past_limit(many, memory)
    assert torch.equal(memory["values"], many)
    gate._is_past_limit(many + 1, memory)
    assert torch.equal(memory["values"], many + 1)
    some = torch.arange(400, dtype=torch.float64)
    for number in range(4):
        gate._is_past_limit(some + number, memory)
    assert torch.equal(memory["values"], torch.cat([some + 2, some + 3]))


def test_it_measures_what_the_client_would_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its batches of this round, in float32, by the loss of the task."""
    local, seen = a_round(1.0), []
    monkeypatch.setattr(Brightness, "_compute", lambda _, sent: seen.append(sent) or {"most": 0.0, "least": 0.0})
    apply_on_data(bright(above=1.0), local, LocalContext(rng=generator(1)))
    (sent,) = seen
    assert sent.training == local.training
    assert [step.tolist() for step in sent.steps] == [step.tolist() for step in local.order or ()]


# What it does.


def test_examples_past_the_limit_are_left_out() -> None:
    assert kept(bright(above=2.0, action="drop-examples"), 1.0, 3.0, 2.0, 2.5, 0.0) == [0, 2, 4]
    assert kept(bright(above=0.5, action="drop-examples"), 1.0) == []


def test_a_fraction_of_the_examples_is_left_out_those_that_are_exposed_most() -> None:
    drop = {"action": "drop-examples"}
    assert kept(bright(fraction=0.4, **drop), 1.0, 3.0, 2.0, 2.5, 0.0) == [0, 2, 4]
    assert kept(bright(fraction=0.39, **drop), 1.0, 3.0, 2.0, 2.5, 0.0) == [0, 2, 3, 4]
    assert kept(bright(fraction=0.4, quantity="least", **drop), 1.0, 3.0, 2.0, 2.5, 0.0) == [0, 2, 4]
    assert kept(bright(fraction=0.8, **drop), 1.0, 0.0, 0.0, 2.5, 0.0) == [4], (
        "undefined is least, the first of several"
    )


def test_examples_are_measured_one_by_one_by_the_gradient_also_where_an_update_is_sent() -> None:
    """Of an update no example has a share of its own."""
    local = a_round(1.0, 3.0, 2.0, 2.5, 0.5)
    gate = Gate(measure="gradient-norm", fraction=0.4, action="drop-examples")
    norms = gate._measure_examples(local)
    places = apply_on_data(gate, local, LocalContext(rng=generator(1))).tolist()
    assert places == sorted(norms.argsort()[:3].tolist())
    for example in range(len(LABELS)):
        local.model.zero_grad()
        loss = TASK.loss(local.model(local.inputs[[example]]), LABELS[[example]]) / len(LABELS)
        gradient = torch.autograd.grad(loss, list(local.model.parameters()))
        assert norms[example].item() == pytest.approx(
            torch.cat([part.flatten() for part in gradient]).norm().item(), rel=1e-5
        )


def test_noise_is_added_in_the_rounds_in_which_it_closes_alone() -> None:
    gate, memory = bright(above=1.0, action="noise", noise=0.5), dict[str, Tensor]()
    update = {"w": torch.ones(4000)}
    assert kept(gate, 2.0, memory=memory) == EVERYTHING
    noisy = gate.on_update(update, LocalContext(rng=generator(1), memory=memory))["w"] - 1
    assert noisy.std().item() == pytest.approx(0.5, rel=0.05)
    assert abs(noisy.mean().item()) < 0.05
    assert not memory
    assert kept(gate, 1.0, memory=memory) == EVERYTHING
    assert gate.on_update(update, LocalContext(rng=generator(1), memory=memory)) is update


def test_a_round_that_did_not_come_to_the_update_leaves_no_noise_for_the_next_one() -> None:
    gate, memory = bright(above=1.0, action="noise", noise=0.5), dict[str, Tensor]()
    kept(gate, 2.0, memory=memory)
    kept(gate, 1.0, memory=memory)
    assert gate.on_update(update := {"w": torch.ones(3)}, LocalContext(rng=generator(1), memory=memory)) is update


def test_equal_gates_are_equal_whatever_form_the_measure_has() -> None:
    assert Gate(measure="lavp", below=1.0) == Gate(measure={"name": "lavp", "steps": 100}, below=1.0)
    assert replace(Gate(measure="lavp", below=1.0), below=2.0).below == 2.0
