"""Examples behind a secure sum are grouped by client, and nothing is linked that the sums do not tell."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from adversaries.exact.layer import read_first_layer
from adversaries.exact.lone_examples import LayerChange, find_lone_examples
from adversaries.exact.sratta import Sratta, UnitHistory, group_by_client
from adversaries.exact.unit_supports import find_supports
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, seed_globals
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.interfaces.findings import ExampleGroups
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update

INPUTS = 0.1 + 0.8 * torch.eye(6)
"""Inputs of six examples; the first three are of client 0, the others of client 1."""
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
CLIENTS = ([0, 1, 2], [3, 4, 5])
THRESHOLD = 0.02
"""How far an example is from firing a unit that another one fires."""


def network(*, relu: bool = True) -> nn.Module:
    """Build a network with a detector of each example, and units that an example nearly fires as well."""
    detectors = [(index, ()) for index in range(6)]
    links = [(0, (1, 4)), (1, (2, 5)), (3, (4, 1)), (4, (5, 2))] * 6
    weight, bias = torch.zeros(len(detectors) + len(links), 6), torch.full((len(detectors) + len(links),), -0.35)
    for unit, (firing, nearly) in enumerate(detectors + links):
        weight[unit, firing] = 1.0
        # The input 0.1 of all other examples adds to what they give the unit.
        for example in nearly:
            weight[unit, example] = (0.35 - 0.1 - THRESHOLD) / 0.8
    with seed_globals("head"):
        head = nn.Linear(len(weight), 3)
    layer = nn.Linear(6, len(weight))
    layer.weight.data, layer.bias.data = weight, bias
    return nn.Sequential(layer, nn.ReLU() if relu else nn.Tanh(), head)


KNOWLEDGE = Knowledge(model=network, loss=cross_entropy, input_shape=(6,), value_range=([0.0], [1.0]), num_classes=3)


def train(model: nn.Module, examples: list[int], *, steps: int, rate: float) -> State:
    """Return the state after so many passes, each of one step for every example, or of one for all."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    batches = [[example] for example in examples] * (steps - 1) if steps > 1 else [examples]
    for batch in batches:
        optimizer.zero_grad()
        cross_entropy(model(INPUTS[batch]), LABELS[batch]).backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def record(
    folder: Path,
    *,
    rounds: int = 4,
    steps: int = 2,
    noise: float = 0.0,
    grid: float = 0.0,
    members: tuple[int, ...] = (0, 1),
) -> Target:
    """Record rounds of sums over two clients.

    Args:
        noise: standard deviation of what is added to each number.
        grid: step to which each client rounds its numbers at random; 0 for none.
    """
    rng = generator("noise")
    model = network()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    recorder = Recorder(folder)
    for number in range(1, rounds + 1):
        deltas = []
        for examples in CLIENTS:
            model.load_state_dict(state)
            after = train(model, examples, steps=steps, rate=0.3)
            delta = {name: after[name] - state[name] for name in state}
            if grid:
                for name, change in delta.items():
                    delta[name] = (change / grid + torch.rand(change.shape, generator=rng)).floor() * grid
            deltas.append(delta)
        total = {}
        for name in state:
            mean = (deltas[0][name] + deltas[1][name]) / 2
            total[name] = state[name] + mean + noise * torch.randn(mean.shape, generator=rng)
        payload = Payload.from_dense(total, "weights")
        recorder.write(
            number,
            [Update(round=number, client=0, before=state, payload=payload, num_examples=6, members=members)],
        )
        state = total
    return Target(
        transcript=Transcript(folder), victim=0, members=members, knowledge=KNOWLEDGE, rng=generator("attack")
    )


def true_examples(finding: ExampleGroups) -> list[int]:
    """Return the index of the example that each claim is, all of which are exact."""
    errors, nearest = (finding.data[:, None] - INPUTS).abs().amax(2).min(1)
    assert float(errors.max()) < 1e-3
    return nearest.tolist()


def pairs_together(finding: ExampleGroups) -> set[frozenset[int]]:
    examples, clients = true_examples(finding), finding.clients.tolist()
    pairs = set()
    for first in range(len(examples)):
        for second in range(first):
            if clients[first] == clients[second]:
                pairs.add(frozenset({examples[first], examples[second]}))
    return pairs


def test_examples_of_each_client_are_recovered_and_grouped(tmp_path: Path) -> None:
    finding = Sratta().run(record(tmp_path, rounds=6))
    assert isinstance(finding, ExampleGroups)
    assert sorted(true_examples(finding)) == [0, 1, 2, 3, 4, 5]
    assert finding.certified is not None
    assert finding.certified.all()
    of_one_client = {frozenset({a, b}) for client in CLIENTS for a in client for b in client if a < b}
    assert pairs_together(finding) == of_one_client


def test_one_local_step_links_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        finding = Sratta().run(record(tmp_path, steps=1))
    assert not pairs_together(finding)
    assert "nothing links any of the 6 recovered examples" in caplog.text


def test_fine_rounding_of_the_sum_is_survived(tmp_path: Path) -> None:
    finding = Sratta().run(record(tmp_path, grid=1e-7))
    assert pairs_together(finding)
    assert pairs_together(finding) <= {frozenset({a, b}) for client in CLIENTS for a in client for b in client}


@pytest.mark.parametrize("change", [{"noise": 1e-3}, {"grid": 1e-3}])
def test_noise_and_coarse_rounding_leave_nothing_and_the_error_says_why(
    tmp_path: Path, change: dict[str, float]
) -> None:
    with pytest.raises(AttackError, match=r"^client \d+ and its group: no three units or rounds give the same input"):
        Sratta().run(record(tmp_path, **change))


def test_messages_in_clear_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AttackError, match="seen in clear"):
        Sratta().run(record(tmp_path, members=()))


def test_a_single_round_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AttackError, match="needs at least 2"):
        Sratta().run(record(tmp_path, rounds=1))


def test_a_layer_without_relu_is_refused(tmp_path: Path) -> None:
    target = record(tmp_path)
    knowledge = replace(target.knowledge, model=lambda: network(relu=False))
    with pytest.raises(AttackError, match="no ReLU directly follows"):
        Sratta().run(replace(target, knowledge=knowledge))


def test_sums_of_two_examples_whose_shares_drift_are_not_certified(tmp_path: Path) -> None:
    # In rounds 3 to 5 the shares are nearly the same, so that three rounds agree.
    layer = read_first_layer(record(tmp_path).read_update(1), replace(KNOWLEDGE, model=network))
    changes = []
    for share in (0.60, 0.58, 0.57, 0.565, 0.565, 0.565):
        alone = torch.cat([INPUTS[0], torch.ones(1)]).double()
        mixed = share * alone + (1 - share) * torch.cat([INPUTS[1], torch.ones(1)]).double()
        rows = torch.zeros(len(layer.weight), 7, dtype=torch.float64)
        rows[0], rows[1] = 0.01 * alone, 0.01 * mixed
        changes.append(LayerChange(layer=layer, rows=rows, errors=torch.full_like(rows, 1e-9)))
    examples = find_lone_examples(changes, generator("projection"))
    is_alone = (examples.inputs - INPUTS[0]).abs().amax(1) < 1e-6
    assert is_alone.sum() == 1
    assert examples.certified.equal(is_alone)
    assert len(is_alone) == 2


def test_a_change_is_explained_by_the_examples_that_made_it() -> None:
    inputs = torch.rand((12, 30), generator=generator("inputs")).double()
    atoms = torch.cat([inputs, torch.ones(12, 1)], 1)
    weights = torch.zeros(3, 12, dtype=torch.float64)
    weights[0, [1, 4, 7]] = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    weights[1, 5] = 0.4
    rows = weights @ atoms
    rows[2] = rows[0] + 0.1 * torch.rand(31, generator=generator("unknown"))
    supports, complete = find_supports(rows, torch.full_like(rows, 1e-9), inputs, torch.full((12,), 1e-9))
    assert complete.tolist() == [True, True, False]
    assert supports.equal(weights != 0)


def test_links_are_followed_until_none_is_new() -> None:
    histories = [
        UnitHistory(already=frozenset({0, 1}), newly=frozenset({2})),  # conclusive once 0 and 1 are linked
        UnitHistory(already=frozenset({0}), newly=frozenset({1})),
        UnitHistory(already=frozenset({3, 0}), newly=frozenset({4})),  # of two clients, for all that is known
    ]
    assert group_by_client(histories, 5).tolist() == [0, 0, 0, 1, 2]
