"""Client algorithms: each against its paper's steps by hand, and what stays with a client stays there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inference.source_inference import SourceInference
from adversaries.local_models.shared_model import SharedModel
from clients.algorithms.ditto import Ditto
from clients.algorithms.fedavg import FedAvgClient
from clients.algorithms.fedbn import FedBn
from clients.algorithms.feddyn import FedDynClient
from clients.algorithms.fedper import FedPer
from clients.algorithms.fedprox import FedProxClient
from clients.algorithms.fedrep import FedRep
from clients.algorithms.moon import Moon
from clients.algorithms.scaffold import ScaffoldClient
from clients.defenses.dp_sgd import DpSgd
from fedsim.base.errors import AttackError, ConfigError, FedsimError, RunError, TranscriptError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.contract.algorithms import CHECKS
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.run_folder import read_metrics
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient
from fedsim.interfaces.attack import Knowledge, Records, Target
from fedsim.interfaces.local_context import ClientRound
from fedsim.inversion.named_states import named_states
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.control_variates import split_controls
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.training.algorithm_client import TrainingClient, run_algorithm
from fedsim.training.cohort import LocalData
from fedsim.training.loop import local_update
from fedsim.training.model_parts import find_private_names
from fedsim.training.model_state import copy_state, load_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.penalties import LocalObjective
from fedsim.training.settings import LocalTraining
from strategies.checkpoint import Checkpoint
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.runs import assert_same_runs, hash_recording
from tests.support.tensors import are_equal

RATE, STEPS = 0.1, 3
SETTINGS = LocalTraining(local_steps=STEPS, batch_size=8, learning_rate=RATE)
State = Mapping[str, Tensor]


def network(**settings: Any) -> nn.Module:
    with seed_globals("algorithms"):
        return Mlp(hidden=(6,), **settings).build(Task((1, 4, 4), 3)).double()


def batch(client: int = 0) -> tuple[Tensor, Tensor]:
    inputs = torch.randn((8, 1, 4, 4), generator=generator("algorithms", client), dtype=torch.float64)
    return inputs, torch.arange(8) % 3


def gradient(model: nn.Module, weights: State, client: int = 0) -> dict[str, Tensor]:
    """Return the gradient of the whole of a client's data, which is its batch in each step."""
    load_state(model, weights)
    inputs, labels = batch(client)
    parameters = dict(model.named_parameters())
    slopes = torch.autograd.grad(cross_entropy(model(inputs), labels), [*parameters.values()])
    return dict(zip(parameters, slopes, strict=True))


def descend(weights: State, direction: State) -> dict[str, Tensor]:
    return {name: tensor - RATE * direction[name] for name, tensor in weights.items()}


def train(
    algorithm: ClientAlgorithm,
    model: State,
    *,
    client: int = 0,
    memory: dict[str, Tensor] | None = None,
    private: dict[str, Tensor] | None = None,
    controls: State | None = None,
    settings: LocalTraining = SETTINGS,
    on: nn.Module | None = None,
) -> dict[str, Tensor]:
    """Return what a client sends, in one round; `memory` and `private` get what it keeps."""
    on = on or network()
    private_names = find_private_names(algorithm, on, "it")
    training_client = make_client(
        algorithm, model, client=client, memory=memory, controls=controls, settings=settings, on=on
    )
    return run_algorithm(algorithm, training_client, private_names, {} if private is None else private)[0]


def make_client(
    algorithm: ClientAlgorithm,
    model: State,
    *,
    client: int = 0,
    memory: dict[str, Tensor] | None = None,
    controls: State | None = None,
    settings: LocalTraining = SETTINGS,
    on: nn.Module,
) -> TrainingClient:
    key = (1, "train", 1, client)
    inputs, labels = batch(client)
    return TrainingClient(
        network=on,
        model=model,
        controls=controls or {},
        parts=algorithm.divide_model(on),
        memory={} if memory is None else memory,
        share=LocalData(inputs=inputs, labels=labels, key=key),
        settings=settings,
        defenses=(),
        client_round=ClientRound(key=key),
        loss=cross_entropy,
    )


def assert_close(state: State, expected: State) -> None:
    assert set(state) == set(expected)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12)


# Each algorithm against its steps.


def test_fedavg_is_local_training_to_the_bit() -> None:
    model = network()
    start = copy_state(model)
    plain, _ = local_update(network(), start, *batch(), SETTINGS, key=(1, "train", 1, 0))
    assert are_equal(train(FedAvgClient(), start), plain)


def test_fedprox_pulls_towards_what_was_sent_for_two_rounds() -> None:
    model, mu = network(), 0.7
    start = copy_state(model)
    for _ in range(2):
        weights: State = start
        for _ in range(STEPS):
            slope = gradient(model, weights)
            pulled = {name: slope[name] + mu * (weights[name] - start[name]) for name in weights}
            weights = descend(weights, pulled)
        sent = train(FedProxClient(mu=mu), start)
        assert_close(sent, weights)
        start = sent


def test_fedprox_is_what_the_server_of_fedprox_asks_for() -> None:
    start = copy_state(network())
    by_server = train(FedAvgClient(), start, settings=dataclasses.replace(SETTINGS, proximal_mu=0.7))
    assert_close(train(FedProxClient(mu=0.7), start), by_server)


def test_scaffold_takes_corrected_steps_and_renews_its_control_for_two_rounds() -> None:
    model = network()
    start = copy_state(model)
    control = {name: torch.full_like(tensor, 0.01) for name, tensor in start.items()}
    own: State = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    memory: dict[str, Tensor] = {}
    for _ in range(2):
        weights, slopes = dict(start), []
        for _ in range(STEPS):
            slopes.append(gradient(model, weights))
            corrected = {name: slopes[-1][name] - own[name] + control[name] for name in weights}
            weights = descend(weights, corrected)
        sent, sent_controls = split_controls(train(ScaffoldClient(), start, memory=memory, controls=control))
        assert_close(sent, weights)
        # Option II is the mean of the gradients, see the paper.
        mean = {name: sum(slope[name] for slope in slopes) / STEPS for name in start}
        assert_close(memory, mean)
        assert_close(sent_controls, {name: control[name] + mean[name] - own[name] for name in start})
        start, own = sent, mean


def test_fedper_trains_all_and_sends_the_body() -> None:
    model = network()
    start = copy_state(model)
    weights = start
    for _ in range(STEPS):
        weights = descend(weights, gradient(model, weights))
    private: dict[str, Tensor] = {}
    sent = train(FedPer(), start, private=private)
    assert set(private) == {"3.weight", "3.bias"}
    assert_close({**sent, **private}, weights)


def test_fedrep_trains_the_head_and_then_the_body_for_two_rounds() -> None:
    model = network()
    start, head = copy_state(model), ("3.weight", "3.bias")
    for _ in range(2):
        weights: dict[str, Tensor] = dict(start)
        for step in range(4 + STEPS):  # four epochs of one batch each
            slope = gradient(model, weights)
            trains_head = step < 4
            weights |= descend(
                {name: tensor for name, tensor in weights.items() if (name in head) is trains_head}, slope
            )
        private: dict[str, Tensor] = {}
        sent = train(FedRep(head_epochs=4), start, private=private)
        assert_close({**sent, **private}, weights)
        start = {**start, **sent, **private}


def test_fedbn_keeps_batch_norm_and_its_statistics() -> None:
    model = network(batch_norm=True)
    start = copy_state(model)
    plain, _ = local_update(network(batch_norm=True), start, *batch(), SETTINGS, key=(1, "train", 1, 0))
    private: dict[str, Tensor] = {}
    sent = train(FedBn(), start, private=private, on=model)
    assert set(private) == {"2.weight", "2.bias", "2.running_mean", "2.running_var"}
    assert_close({**sent, **private}, plain)
    assert not torch.equal(private["2.running_mean"], start["2.running_mean"])


def test_ditto_sends_what_fedavg_sends_and_pulls_its_own_model_to_what_it_got() -> None:
    model, weight = network(), 0.5
    start, memory = copy_state(model), dict[str, Tensor]()
    own = start
    for _ in range(2):
        for _ in range(STEPS):
            slope = gradient(model, own)
            own = descend(own, {name: slope[name] + weight * (own[name] - start[name]) for name in own})
        sent = train(Ditto(weight=weight), start, memory=memory)
        assert are_equal(sent, train(FedAvgClient(), start))
        assert_close(memory, own)
        start = sent


def test_feddyn_adds_the_gradient_at_its_last_model_and_a_pull_for_three_rounds() -> None:
    model, alpha = network(), 0.4
    start, memory = copy_state(model), dict[str, Tensor]()
    last_gradient: State = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    for _ in range(3):
        weights: State = start
        for _ in range(STEPS):
            slope = gradient(model, weights)
            weights = descend(
                weights,
                {n: slope[n] - last_gradient[n] + alpha * (weights[n] - start[n]) for n in weights},
            )
        sent = train(FedDynClient(alpha=alpha), start, memory=memory)
        assert_close(sent, weights)
        last_gradient = {name: last_gradient[name] - alpha * (sent[name] - start[name]) for name in start}
        assert_close(memory, last_gradient)
        start = {name: tensor + 0.1 for name, tensor in sent.items()}  # what a server makes of it


def test_the_linear_term_of_feddyn_is_the_gradient_where_a_client_reached_its_minimum() -> None:
    with seed_globals("algorithms"):  # one minimum, and no kinks
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    memory: dict[str, Tensor] = {}
    settings = dataclasses.replace(SETTINGS, local_steps=150)
    sent = train(FedDynClient(alpha=2.0), copy_state(model), memory=memory, settings=settings, on=model)
    for name, slope in gradient(model, sent).items():
        torch.testing.assert_close(memory[name], slope, rtol=1e-4, atol=1e-9)


def test_moon_contrasts_representations_from_its_second_round_on() -> None:
    model, mu, temperature = network(), 0.8, 0.5
    start, memory = copy_state(model), dict[str, Tensor]()
    start["1.bias"] += 1.0  # so that no example has a representation of zeros
    inputs, labels = batch()

    def represent(weights: State) -> Tensor:
        return torch.relu(inputs.flatten(1) @ weights["1.weight"].T + weights["1.bias"])

    def cosines(weights: State, features: Tensor) -> Tensor:
        own = represent(weights)
        return (own * features).sum(1) / own.norm(dim=1) / features.norm(dim=1)

    algorithm = Moon(mu=mu, temperature=temperature)
    previous = train(algorithm, start, memory=memory)
    assert_close(previous, train(FedAvgClient(), start))  # it has sent nothing before
    start = {name: 0.7 * tensor + 0.2 for name, tensor in start.items()}
    for _ in range(2):
        to_global, to_previous = represent(start).detach(), represent(previous).detach()
        weights: State = start
        for _ in range(STEPS):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
            logits = represent(leaves) @ leaves["3.weight"].T + leaves["3.bias"]
            towards = (cosines(leaves, to_global) / temperature).exp()
            away = (cosines(leaves, to_previous) / temperature).exp()
            objective = cross_entropy(logits, labels) - mu * (towards / (towards + away)).log().mean()
            slopes = torch.autograd.grad(objective, [*leaves.values()])
            weights = descend(weights, dict(zip(leaves, slopes, strict=True)))
        sent = train(algorithm, start, memory=memory)
        assert_close(sent, weights)
        assert_close(memory, sent)
        previous, start = sent, {name: 0.9 * tensor for name, tensor in sent.items()}


def test_moon_compares_with_fixed_models_in_evaluation_mode() -> None:
    """A model that drops half of its features has one representation, and its training moves no other."""
    model = network(dropout=0.5)
    start = copy_state(model)
    client = make_client(Moon(), start, on=model)
    represent = client.make_representation(start)
    inputs, _ = batch()
    assert torch.equal(represent(inputs), represent(inputs))
    expected = represent(inputs)
    load_state(client.network, {name: tensor + 1 for name, tensor in start.items()})
    assert torch.equal(represent(inputs), expected)
    assert not expected.requires_grad


# In a federation.

BASE: dict[str, Any] = {"partition": {"test_fraction": 0.25}}
ALGORITHMS: Mapping[str, dict[str, Any]] = {
    "fedprox": {},
    "scaffold": {"strategy": {"name": "scaffold"}},
    "fedrep": {"algorithm": {"name": "fedrep", "head_epochs": 1}},
    "ditto": {},
    "feddyn": {"strategy": {"name": "feddyn"}},
    "moon": {},
}


def config_of(name: str, **tables: Any) -> Config:
    return resolve(make_tiny_config(**{"algorithm": {"name": name}, **BASE, **ALGORITHMS.get(name, {}), **tables}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenRun]:
    folder = tmp_path_factory.mktemp("algorithms")
    return {name: run_serial(config_of(name), folder / name) for name in ALGORITHMS}


def test_fedavg_by_name_is_a_federation_without_an_algorithm(tmp_path: Path) -> None:
    named = run_serial(config_of("fedavg"), tmp_path / "named")
    assert_same_runs(named, run_serial(make_tiny_config(**BASE), tmp_path / "without"))


def test_algorithms_differ_in_what_is_sent(runs: dict[str, OpenRun], tmp_path: Path) -> None:
    plain = run_serial(make_tiny_config(**BASE, federation={"vectorise": False}), tmp_path / "plain")
    hashes = {name: hash_recording(run)["round-000002.safetensors"] for name, run in runs.items()}
    # The personal models of Ditto change nothing that is sent.
    assert hashes.pop("ditto") == hash_recording(plain)["round-000002.safetensors"]
    assert len({*hashes.values(), hash_recording(plain)["round-000002.safetensors"]}) == len(hashes) + 1


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(name: str, runs: dict[str, OpenRun], tmp_path: Path) -> None:
    config = config_of(name, federation={"rounds": 1})
    run_serial(config, tmp_path / "run")
    assert_same_runs(run_serial(config_of(name), tmp_path / "run", resume=True), runs[name])


def test_the_control_of_the_server_is_the_mean_of_the_clients(runs: dict[str, OpenRun]) -> None:
    transcript = Transcript(runs["scaffold"].path)
    totals: dict[str, Tensor] = {}
    for update in (transcript.recorded_update(1, client) for client in range(4)):
        _, received = split_controls(update.before)
        _, sent = split_controls(update.after)
        for name, control in received.items():
            assert not control.any(), "c begins at 0"
            totals[name] = totals.get(name, torch.zeros(())) + sent[name]
    _, control = split_controls(transcript.broadcast(2, 0))
    for name, total in totals.items():
        torch.testing.assert_close(control[name], total / 4, rtol=1e-5, atol=1e-8)
        assert total.any()


def test_attacks_are_given_updates_without_control_variates(runs: dict[str, OpenRun]) -> None:
    """The server knows c_i, so that what it reads is the mean gradient of the client, in each round."""
    transcript = Transcript(runs["scaffold"].path)
    distance = 0.1 * 3  # eta times K
    own: dict[str, Tensor] = {}
    for number in (1, 2):
        recorded = transcript.recorded_update(number, 1)
        _, received = split_controls(recorded.before)
        _, sent = split_controls(recorded.after)
        own = {name: own.get(name, 0.0) + sent[name] - received[name] for name in received}
        update = transcript.restrict_to([number]).update(number, 1)
        assert set(update.before) == set(update.after) == set(own)
        for name, tensor in update.pseudo_gradient.items():
            torch.testing.assert_close(tensor, distance * own[name], rtol=1e-4, atol=1e-6)
            if number == 2:
                uncorrected = recorded.before[name] - recorded.after[name]
                assert not torch.allclose(tensor, uncorrected, rtol=1e-3, atol=1e-6)


def test_attacks_read_the_gradient_that_noise_leaves_in_control_variates(tmp_path: Path) -> None:
    """K eta is .03, so that the noise of an update hides a move more than the change of c_i."""
    settings = {"training": {"learning_rate": 0.01}, "federation": {"rounds": 1}}
    noise = {"name": "update-noise", "clip": 1.0, "noise_multiplier": 0.02}
    plain = run_serial(config_of("scaffold", **settings), tmp_path / "plain")
    noisy = run_serial(config_of("scaffold", **settings, defense=[noise]), tmp_path / "noisy")
    updates = [Transcript(run.path).update(1, 0) for run in (plain, noisy)]
    true_gradient, gradient = (torch.cat([t.flatten() for t in u.pseudo_gradient.values()]) for u in updates)
    assert torch.cosine_similarity(true_gradient, gradient, dim=0) > 0.7
    recorded = Transcript(noisy.path).recorded_update(1, 0)
    moves = [recorded.before[name] - recorded.after[name] for name in updates[0].before]
    assert torch.cosine_similarity(true_gradient, torch.cat([move.flatten() for move in moves]), dim=0) < 0.2


def test_attacks_are_given_updates_without_the_linear_term_of_feddyn(runs: dict[str, OpenRun]) -> None:
    """The server knows a client's earlier moves, so that what it reads are those of FedProx."""
    run, client = runs["feddyn"], 1
    transcript = Transcript(run.path)
    experiment = Experiment(config_of("feddyn"))
    for number in (1, 2):
        recorded = transcript.recorded_update(number, client)
        (share,) = experiment.local_data([client], number, experiment.training)
        pulled, _ = local_update(
            experiment.new_model(),
            recorded.before,
            share.inputs,
            share.labels,
            experiment.training,
            key=share.key,
            objective=LocalObjective(proximal_mu=0.1),
        )
        update = transcript.restrict_to([number]).update(number, client)
        moves = {name: recorded.before[name] - recorded.after[name] for name in recorded.before}
        for name, tensor in update.pseudo_gradient.items():
            if number == 1:
                torch.testing.assert_close(tensor, recorded.before[name] - pulled[name], rtol=1e-4, atol=1e-6)
            else:
                # Its steps took another path, so gradients differ a little, and by less than the term.
                error = (tensor - (recorded.before[name] - pulled[name])).norm()
                assert error < 0.2 * (moves[name] - tensor).norm()
        assert are_equal(update.after, recorded.after)


def test_an_attack_is_told_the_pull_of_feddyn_and_the_linear_term_is_taken_off() -> None:
    experiment = Experiment(config_of("feddyn", algorithm={"name": "feddyn", "alpha": 0.3}))
    assert experiment.algorithm.training_facts() == {"proximal_mu": 0.3}
    assert experiment.algorithm.message_facts() == {"linear-alpha": 0.3}


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_a_copy_of_some_rounds_has_the_moves_and_the_models_of_the_whole(
    name: str, runs: dict[str, OpenRun], tmp_path: Path
) -> None:
    whole = Transcript(runs[name].path).restrict_to([2])
    whole.copy_to(tmp_path / "copy")
    update, copied = whole.update(2, 3), Transcript(tmp_path / "copy").update(2, 3)
    assert are_equal(copied.pseudo_gradient, update.pseudo_gradient)
    assert are_equal(copied.after, update.after)
    assert Transcript(tmp_path / "copy").adds_known_terms(2), "who sent what before is used, which linkability refuses"
    assert not are_equal(update.pseudo_gradient, {n: update.before[n] - update.after[n] for n in update.before})


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_the_returned_model_is_the_one_that_the_client_returned(name: str, runs: dict[str, OpenRun]) -> None:
    """Attacks on losses read it; the gradient alone is freed from what the algorithm added."""
    transcript = Transcript(runs[name].path)
    recorded, _ = split_controls(transcript.recorded_update(2, 1).after)
    attacked = transcript.restrict_to([1, 2])
    rng, records = generator("target"), Records(inputs=torch.rand(5, 1, 8, 8), labels=torch.arange(5))
    knowledge = Knowledge(
        model=lambda: Mlp(hidden=(16,)).build(Task((1, 8, 8), 10)), loss=cross_entropy, records=records
    )
    target = Target(transcript=attacked, victim=1, knowledge=knowledge, rng=rng)
    finding = SharedModel().run(target)
    assert are_equal(finding.state, recorded)
    claim = SourceInference(source="last-returned").run(target)
    network_ = Mlp(hidden=(16,)).build(Task((1, 8, 8), 10))
    for position, client in enumerate(claim.candidates.tolist()):
        returned, _ = split_controls(transcript.recorded_update(2, client).after)
        load_state(network_, returned)
        losses = cross_entropy(network_(records.inputs), records.labels, reduction="none")
        torch.testing.assert_close(claim.scores[:, position], -losses.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "term"), [("scaffold", "control variate"), ("feddyn", "linear term")])
def test_a_term_that_a_recording_does_not_tell_is_refused(name: str, term: str, tmp_path: Path) -> None:
    run = run_serial(config_of(name, recording={"rounds": [2]}), tmp_path / "run")
    with pytest.raises(TranscriptError, match=rf"round 2, client 0: its {term} is .* and round 1 is not"):
        Transcript(run.path).update(2, 0)


@pytest.mark.parametrize(("name", "term"), [("scaffold", "control variate"), ("feddyn", "linear term")])
def test_a_term_is_refused_after_a_round_of_which_only_the_client_knows_whether_it_trained(
    name: str, term: str, runs: dict[str, OpenRun], tmp_path: Path
) -> None:
    whole, silence = Transcript(runs[name].path), "straggler: did not return in round 1"
    for reason in (silence, "no reply in time"):
        recorder = Recorder(tmp_path / reason)
        for number in (1, 2):
            replies = [whole.recorded_update(number, client) for client in whole.clients(number)]
            returned = [update for update in replies if (number, update.client) != (1, 0)]
            recorder.write(number, returned, {0: reason} if number == 1 else {}, whole.header(number).config)
    assert Transcript(tmp_path / silence).update(2, 0).gradient_move is not None
    failing = Transcript(tmp_path / "no reply in time")
    assert failing.update(2, 1).gradient_move is not None
    with pytest.raises(TranscriptError, match=rf"^round 2, client 0: its {term} is .* failed \(no reply in time\), is"):
        failing.update(2, 0)


def test_private_parts_are_in_no_message(runs: dict[str, OpenRun]) -> None:
    run, head = runs["fedrep"], {"3.weight", "3.bias"}
    transcript = Transcript(run.path)

    checkpoint = Checkpoint.load(run.checkpoint, FedAvg())
    assert checkpoint is not None
    heads = [state["algorithm.private"] for _, state in sorted(checkpoint.clients.items())]
    assert [set(kept) for kept in heads] == [head] * 4
    assert len({kept["3.weight"].tobytes() for kept in heads}) == 4, "each client has a head of its own"
    for number in (1, 2):
        content = (run.transcript / f"round-{number:06d}.safetensors").read_bytes()
        for client in range(4):
            update = transcript.recorded_update(number, client)
            assert not head & (set(update.before) | set(update.after))
        # Nor anywhere in the file, under whatever name.
        for kept in heads:
            assert kept["3.weight"].tobytes() not in content
            assert kept["3.bias"].tobytes()[:16] not in content


def test_metrics_say_whose_model_was_evaluated(runs: dict[str, OpenRun]) -> None:
    private, beside = read_metrics(runs["fedrep"]), read_metrics(runs["ditto"])
    assert {row["model"] for row in private} == {"personal"}
    assert {(row["client"] == "server", row["model"]) for row in beside} == {(True, "shared"), (False, "personal")}
    last = [row for row in private if row["round"] == "2"]
    total = sum(float(row["accuracy"]) * int(row["num_examples"]) for row in last if row["client"] != "server")
    count = sum(int(row["num_examples"]) for row in last if row["client"] != "server")
    (server,) = [row for row in last if row["client"] == "server"]
    assert float(server["accuracy"]) == pytest.approx(total / count)
    assert "model" not in read_metrics(runs["fedprox"])[0]


def test_updates_of_clients_with_a_memory_are_computed_again(runs: dict[str, OpenRun], tmp_path: Path) -> None:
    run = run_serial(config_of("scaffold", recording={"keep": "recipe"}), tmp_path / "run")
    recorded = Transcript(runs["scaffold"].path).recorded_update(2, 1)
    computed = run.recording.recorded_update(2, 1)
    assert are_equal(computed.after, recorded.after)


def test_attacks_on_the_whole_model_name_the_part_that_they_lack(runs: dict[str, OpenRun]) -> None:
    update = Transcript(runs["fedrep"].path).update(1, 0)
    model = Mlp(hidden=(16,)).build(Task((1, 8, 8), 10))
    with pytest.raises(
        AttackError, match=r"here: '3.weight', '3.bias' of the model are in no message, as of a part that stays"
    ):
        named_states(update, model, "here")
    states = named_states(update, model, "here", body_alone=True)
    assert list(states.shapes) == ["1.weight", "1.bias"]


def test_an_update_of_another_model_is_no_private_part(runs: dict[str, OpenRun]) -> None:
    update = Transcript(runs["fedrep"].path).update(1, 0)
    with pytest.raises(TranscriptError, match="attack with the model of that federation"):
        named_states(update, Mlp(hidden=(7,)).build(Task((1, 8, 8), 10)), "here")


def test_the_body_alone_is_an_inversion_problem(runs: dict[str, OpenRun]) -> None:
    task = Task((1, 8, 8), 10)
    knowledge = Knowledge(
        model=lambda: Mlp(hidden=(16,)).build(task), loss=task.loss, input_shape=(1, 8, 8), value_range=([0.0], [1.0])
    )
    problem = build_problem(Transcript(runs["fedrep"].path).update(1, 0), knowledge, body_alone=True)
    assert problem.parameter_names == ("1.weight", "1.bias")
    assert problem.unknown_names


# Refusals, before anything runs.


@pytest.mark.parametrize(
    ("name", "tables", "sentence"),
    [
        ("scaffold", {"strategy": {"name": "fedavg"}}, "strategy.name: algorithm 'scaffold' goes with 'scaffold', got"),
        ("fedavg", {"strategy": {"name": "scaffold"}}, "algorithm.name: strategy 'scaffold' goes with 'scaffold', got"),
        (
            "fedprox",
            {"strategy": {"name": "fedsgd", "learning_rate": 0.1},
             "training": {"learning_rate": None, "local_epochs": None, "local_steps": 1}},
            "strategy.name: clients of 'fedsgd' send the gradient of one mini-batch, and 'fedprox' takes local steps",
        ),
        ("ditto", {"strategy": {"name": "fedprox", "proximal_mu": 0.1}}, "'fedprox' adds a proximal term to what 'dit"),
        ("fedbn", {}, "fedbn keeps BatchNorm layers on the clients, and the model has none"),
        ("scaffold", {"training": {"momentum": 0.9}}, "training.momentum: scaffold .* expected 0.0, got 0.9; leave"),
        ("scaffold", {"secure_aggregation": {"groups": "all"}}, "secure_aggregation: 'scaffold' sends control var"),
        ("fedrep", {"partition": {}}, "partition.test_fraction: with 'fedrep' a part of the model stays with each"),
        ("fedrep", {"states": {"rounds": [1]}}, "states.rounds: with 'fedrep' the server never has the whole model"),
        ("fedprox", {"measure": [{"name": "gradient-norm"}]}, "measure: it measures messages of plain local training"),
        (
            "fedrep",
            {"defense": [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 1.0}]},
            "defense: dp-sgd accounts for the local steps of \\[training\\], and 'fedrep' takes more",
        ),
        (
            "fedprox",
            {"defense": [{"name": "gate", "measure": {"name": "gradient-norm"}, "quantity": "norm", "limit": 1.0}]},
            "gate",
        ),
        (
            "fedper",
            {"algorithm": {"name": "fedper", "head": ["4"]}},
            "algorithm.head: the model has no part '4'",
        ),
        (
            "fedper",
            {"algorithm": {"name": "fedper", "head": ["3", "3"]}},
            "algorithm: 'fedper' names '3.weight' twice; put each tensor into one part",
        ),
        (
            "fedper",
            {"algorithm": {"name": "fedper", "head": ["1", "3"]}},
            "algorithm: 'fedper' would keep the whole model on the clients",
        ),
        ("feddyn", {"strategy": {"name": "fedavg"}}, "strategy.name: algorithm 'feddyn' goes with 'feddyn', got"),
        ("feddyn", {"training": {"optimizer": "adam"}}, "training.optimizer: feddyn is for plain steps, .* got 'adam'"),
        ("feddyn", {"secure_aggregation": {"groups": "all"}}, "strategy: FedDyn counts the moves of all clients alike"),
        (
            "moon",
            {"defense": [{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 1.0}]},
            "defense: dp-sgd bounds the gradients of single examples, and 'moon' adds a term to their losses",
        ),
        ("moon", {"model": {"name": "linear"}}, "'moon' compares representations, and no trained layer of the model"),
        ("scafold", {}, "nothing is called 'scafold', did you mean 'scaffold'"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_an_algorithm_is_refused(name: str, tables: dict[str, Any], sentence: str) -> None:
    config = make_tiny_config(**{"algorithm": {"name": name}, **BASE, **ALGORITHMS.get(name, {}), **tables})
    with pytest.raises(FedsimError, match=sentence):
        check_config(config)


def check_config(config: Config) -> None:
    Experiment(resolve(config)).check()


def test_a_file_that_names_no_strategy_gets_that_of_the_algorithm() -> None:
    config = make_tiny_config(algorithm={"name": "scaffold"})
    without_strategy = Config.model_validate(config.model_dump(exclude={"strategy"}, exclude_none=True))
    assert resolve(without_strategy).strategy.name == "scaffold"
    plain = make_tiny_config(algorithm={"name": "ditto"}).model_dump(exclude={"strategy"}, exclude_none=True)
    assert resolve(Config.model_validate(plain)).strategy.name == "fedavg"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forgets(ClientAlgorithm):
    """Names a layer in no part."""

    private_parts: ClassVar[frozenset[str]] = frozenset({"head"})

    def divide_model(self, network: nn.Module) -> Mapping[str, Sequence[str]]:
        return {"body": ["1.weight", "1.bias"], "head": ["3.weight"]}

    def train_client(self, client: LocalClient) -> ClientResult:
        return ClientResult(model=client.train(client.model, name="only"))


def test_a_tensor_in_no_part_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'mine' names '3.bias' in no part; put each tensor into one part"):
        find_private_names(Forgets(), network(), "mine")


def test_a_private_parameter_is_not_sent_under_another_name() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(ConfigError, match=r"keeps a parameter on the clients that is sent as 0.weight or 2.weight"):
        find_private_names(FedPer(head=("2",)), tied, "fedper")


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (lambda client: ClientResult(model=client.train(client.model, name="only")), "no pass .* was without a name"),
        (lambda client: ClientResult(model={}), "'1.bias' was given or returned alone"),
        (lambda client: client.train(client.model), "expected a ClientResult back, got dict"),
        (lambda client: [client.train(client.model) for _ in range(2)], "trains twice under the name ''"),
    ],
)
def test_what_an_algorithm_does_wrong_is_told(result: Any, sentence: str) -> None:
    class Wrong(FedAvgClient):
        def train_client(self, client: LocalClient) -> ClientResult:
            answer: ClientResult = result(client)
            return answer

    with pytest.raises(RunError, match=sentence):
        train(Wrong(), copy_state(network()))


def test_the_result_of_an_undefended_pass_is_not_sent_under_a_promise() -> None:
    """The ledger would state an epsilon of messages that no defense touched; with Ditto it is kept, and not sent."""

    class SendsWrongPass(FedAvgClient):
        def train_client(self, client: LocalClient) -> ClientResult:
            client.train(client.model)
            return ClientResult(model=client.train(client.model, name="again", defended=False))

    for algorithm in (SendsWrongPass(), Ditto()):
        client = make_client(algorithm, copy_state(network()), on=network())
        assert run_algorithm(algorithm, client, (), {})
        client = make_client(algorithm, copy_state(network()), on=network())
        client = dataclasses.replace(client, defenses=(DpSgd(clip=1.0, noise_multiplier=1.0),))
        if isinstance(algorithm, Ditto):
            assert run_algorithm(algorithm, client, (), {})
            continue
        with pytest.raises(RunError, match=r"'1.weight' is sent as it is after a pass with defended = False, so the"):
            run_algorithm(algorithm, client, (), {})


def test_steps_for_which_no_accountant_accounts_are_not_taken() -> None:
    """The ledger would state the epsilon of one pass of messages that follow from two."""

    class TrainsOn(FedAvgClient):
        def train_client(self, client: LocalClient) -> ClientResult:
            return ClientResult(model=client.train(client.train(client.model), name="on"))

    client = make_client(TrainsOn(), copy_state(network()), on=network())
    assert run_algorithm(TrainsOn(), client, (), {})
    client = make_client(TrainsOn(), copy_state(network()), on=network())
    client = dataclasses.replace(client, defenses=(DpSgd(clip=1.0, noise_multiplier=1.0),))
    steps = client.num_steps
    with pytest.raises(
        RunError, match=f"takes {2 * steps} defended steps, and the defenses account for the {steps} of"
    ):
        run_algorithm(TrainsOn(), client, (), {})


def test_there_are_checks_of_strangers_algorithms() -> None:
    assert {check.__name__ for check in CHECKS} >= {"divides_models", "serves_many_clients", "draws_from_its_key"}
