"""Clients that keep a part of the model: it is optimised along, and read only where it is granted."""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from adversaries.exact.analytic import Analytic
from adversaries.exact.spear import Spear
from adversaries.inversion.deep_leakage import DeepLeakage
from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.audit.audit import open_audit
from fedsim.base.errors import AttackError, ConfigError
from fedsim.base.randomness import generator
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.inversion.batched_restarts import BatchEntry, batched_steps
from fedsim.inversion.inversion_task import InversionTask
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.restart import objective_terms
from fedsim.recording.transcript import Transcript
from tests.support.experiments import make_attack_file, make_tiny_config, run_serial
from tests.support.tensors import are_equal

HEAD = ["3.weight", "3.bias"]
VICTIM = 1


def config_of(name: str, **tables: Any) -> Config:
    """Return a federation whose clients take one step on all of their four examples."""
    return resolve(
        make_tiny_config(
            **{
                "algorithm": {"name": name},
                "partition": {"samples_per_client": 4},
                "model": {"hidden": [64]},
                "training": {"batch_size": 4},
                "federation": {"rounds": 2, "evaluate_every": 0},
                **tables,
            }
        )
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    return run_serial(config_of("fedper"), tmp_path_factory.mktemp("heads") / "run")


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return Experiment(config_of("fedper"))


def make_knowledge(experiment: Experiment, **facts: Any) -> Knowledge:
    """Return what a server knows: a network of the architecture, and no head of a client."""
    network = experiment.new_model("another draw")
    shape = experiment.dataset.task.input_shape
    return Knowledge(
        model=lambda: deepcopy(network),
        loss=cross_entropy,
        input_shape=shape,
        value_range=experiment.data.value_range(),
        **facts,
    )


def make_target(run: OpenRun, knowledge: Knowledge, number: int = 1) -> Target:
    transcript = Transcript(run.path).restrict_to([number])
    return Target(transcript=transcript, victim=VICTIM, knowledge=knowledge, rng=generator("heads"))


def prepare(run: OpenRun, knowledge: Knowledge, attack: InvertingGradients | None = None) -> InversionTask:
    target = make_target(run, knowledge)
    attack = attack or InvertingGradients(tv_weight=0.0)
    return attack._prepare_task(target.read_update(), knowledge, target.rng)


def distance_at(task: InversionTask, data: Tensor, labels: Tensor, head: dict[str, Tensor]) -> float:
    """Return the distance of the update of these data, labels and head from the recorded one."""
    scaling = task.problem.scaling
    values = {
        **task.restarts[0].values(),
        "dummy": (data - scaling.centre) / scaling.scale,
        "label_logits": 50 * torch.nn.functional.one_hot(labels, 10).float(),
        **{f"unknown/{name}": tensor for name, tensor in head.items()},
    }
    inputs = task.restarts[0].iteration_inputs(0)
    return float(objective_terms(task.recipe, task.problem, values, inputs, task.target)[1].detach())


def victim_data(experiment: Experiment) -> tuple[Tensor, Tensor]:
    (share,) = experiment.local_data([VICTIM], 1, experiment.training)
    return share.inputs, share.labels


def to_unit_range(experiment: Experiment, inputs: Tensor) -> Tensor:
    """Return `example pixel` in [0, 1] for inputs in model units."""
    low, high = (float(end[0]) for end in experiment.data.value_range())
    return ((inputs - low) / (high - low)).flatten(1)


# What the attack optimises.


@pytest.mark.parametrize("attack", [InvertingGradients(), SurrogateModelExtension()])
def test_the_head_and_the_labels_are_optimised_along_and_begin_without_the_client(
    attack: InvertingGradients, run: OpenRun, experiment: Experiment
) -> None:
    knowledge = make_knowledge(experiment)
    task = prepare(run, knowledge, dataclasses.replace(attack, restarts=2))
    assert task.problem.unknown_names == HEAD
    assert not set(HEAD) & {*task.problem.buffers, *task.problem.parameter_names}
    private = experiment.initial_private_state(VICTIM)
    first, second = (restart.values() for restart in task.restarts)
    names = first.keys() - {"alpha"}
    assert names == {"dummy", "label_logits", "unknown/3.weight", "unknown/3.bias"}
    assert {"unknown/3.weight", "unknown/3.bias"} <= {*task.restarts[0].gradient_names(0)}
    assert not torch.equal(first["unknown/3.weight"], second["unknown/3.weight"]), "each restart draws its own"
    for known_head in (private["3.weight"], knowledge.model().state_dict()["3.weight"]):  # type: ignore[misc]
        drawn = first["unknown/3.weight"]
        assert abs(float(torch.corrcoef(torch.stack([drawn.flatten(), known_head.flatten()]))[0, 1])) < 0.2
        torch.testing.assert_close(drawn.std(), known_head.std(), rtol=0.15, atol=0)


def test_at_the_truth_the_distance_is_zero_and_at_another_head_it_is_not(run: OpenRun, experiment: Experiment) -> None:
    task = prepare(run, make_knowledge(experiment))
    data, labels = victim_data(experiment)
    head = experiment.initial_private_state(VICTIM)
    assert distance_at(task, data, labels, head) < 1e-4
    assert distance_at(task, data, labels, experiment.initial_private_state(0)) > 0.1
    assert distance_at(task, data, labels.roll(1), head) > 0.1
    relabelled = {name: tensor.roll(1, 0) for name, tensor in head.items()}
    assert distance_at(task, data, (labels + 1) % 10, relabelled) < 1e-4, "which class is which is not told"


def test_the_dummy_data_are_beyond_the_floor_although_the_head_never_left(tmp_path: Path) -> None:
    """The floor is of guesses without the messages: for each example the best of all centres of public classes."""
    config = config_of("fedper", partition={"samples_per_client": 2}, federation={"rounds": 1, "evaluate_every": 0})
    run, experiment = run_serial(config, tmp_path / "run"), Experiment(config)
    mean, std = experiment.data.moments()
    knowledge = make_knowledge(experiment, input_mean=mean, input_std=std)
    finding = InvertingGradients(iterations=80).run(make_target(run, knowledge))
    truth = to_unit_range(experiment, victim_data(experiment)[0])
    public, labels = experiment.data.public_test(500)
    public = to_unit_range(experiment, experiment.data.to_model(public))
    centres = torch.stack([public[labels == label].mean(0) for label in range(10)])
    psnr, floor = (
        float(-10 * (torch.cdist(truth, guess).square().min(1).values / 64).log10().mean())
        for guess in (finding.data.flatten(1), centres)
    )
    assert psnr > floor + 6


def test_a_head_that_is_optimised_matches_better_than_one_that_stays_random(
    run: OpenRun, experiment: Experiment
) -> None:
    target = make_target(run, make_knowledge(experiment, labels=victim_data(experiment)[1].sort().values))
    objectives = []
    for step_size in (0.01, 1e-12):
        attack = InvertingGradients(iterations=60, tv_weight=0.0, unknown_step_size=step_size)
        trace = attack.run(dataclasses.replace(target, rng=generator("heads"))).trace
        objectives.append(float(trace["objective"][-1]))
    assert objectives[0] < 0.7 * objectives[1]


def test_restarts_with_unknown_heads_are_batched(run: OpenRun, experiment: Experiment) -> None:
    task = prepare(run, make_knowledge(experiment), InvertingGradients(restarts=2))
    (steps,) = batched_steps([BatchEntry.from_task(task)])
    assert steps is not None, "several at once give the values of each alone"
    curves = steps[0](0)
    assert set(curves) == {"objective", "l_sim"}, "no curve for each number of a head"


def test_clients_that_keep_batch_norm_are_matched_with_statistics_of_the_batch(tmp_path: Path) -> None:
    config = config_of(
        "fedbn", model={"hidden": [64], "batch_norm": True}, federation={"rounds": 1, "evaluate_every": 0}
    )
    experiment = Experiment(config)
    run = run_serial(config, tmp_path / "run")
    task = prepare(run, make_knowledge(experiment))
    assert task.problem.unknown_names == ["2.weight", "2.bias"]
    assert task.problem.uses_batch_statistics
    assert "label_logits" in task.restarts[0].values()
    scale = task.restarts[0].values()["unknown/2.weight"]
    assert torch.equal(scale, torch.ones(64)), "scales begin as in a fresh network"
    parts = experiment.initial_private_state(VICTIM)
    granted = prepare(run, make_knowledge(experiment, private_parts=parts))
    assert granted.problem.uses_batch_statistics
    assert {*granted.restarts[0].values()} == {"dummy", "label_logits"}


def test_an_attack_that_needs_all_of_the_model_is_refused(run: OpenRun, experiment: Experiment) -> None:
    facts = {"learning_rate": 0.1, "local_epochs": 1, "batch_size": 4, "num_classes": 10}
    target = make_target(run, make_knowledge(experiment, **facts))
    with pytest.raises(AttackError, match=r"'3.weight', '3.bias' of the model are in no message.*such as sme"):
        DeepLeakage(iterations=2).run(target)


# Heads that are granted.


def test_a_granted_head_is_fixed_and_reaches_the_truth(run: OpenRun, experiment: Experiment) -> None:
    head = experiment.initial_private_state(VICTIM)
    task = prepare(run, make_knowledge(experiment, private_parts=head))
    assert not task.problem.unknown_names
    assert {*task.restarts[0].values()} == {"dummy", "label_logits"}
    assert all(torch.equal(task.problem.buffers[name], head[name]) for name in HEAD)
    data, labels = victim_data(experiment)
    assert distance_at(task, data, labels, {}) < 1e-4
    other = prepare(run, make_knowledge(experiment, private_parts=experiment.initial_private_state(0)))
    assert distance_at(other, data, labels, {}) > 0.1


def test_an_audit_grants_the_head_that_the_victim_began_with(run: OpenRun, experiment: Experiment) -> None:
    spec = make_attack_file("inverting-gradients", rounds=[1], victims=[VICTIM], knowledge={"private_parts": True})
    audit = open_audit(run.path, spec)
    assert are_equal(audit.case.private_parts(VICTIM, is_first_round=True), experiment.initial_private_state(VICTIM))
    late = make_attack_file(
        {"name": "inverting-gradients", "iterations": 2},
        rounds=[2],
        victims=[VICTIM],
        knowledge={"private_parts": True},
    )
    (failure,) = open_audit(run.path, late).run()
    assert "client 1 took part before" in str(failure)


def test_clients_that_keep_nothing_have_no_part_to_grant(tmp_path: Path) -> None:
    run = run_serial(config_of("fedavg", federation={"rounds": 1, "evaluate_every": 0}), tmp_path / "run")
    spec = make_attack_file("inverting-gradients", knowledge={"private_parts": True})
    with pytest.raises(ConfigError, match=r"private_parts: clients of this run send the whole model"):
        open_audit(run.path, spec).run()


# Exact attacks read the body alone.


def test_exact_attacks_on_the_first_layer_need_no_head(run: OpenRun, experiment: Experiment) -> None:
    knowledge = make_knowledge(experiment)
    finding = Spear().run(make_target(run, knowledge))
    data, _ = victim_data(experiment)
    truth = to_unit_range(experiment, data)
    errors = torch.cdist(truth, finding.data.flatten(1)).min(1).values
    assert finding.data.shape == data.shape
    assert float(errors.max()) < 1e-3
    assert finding.certified is not None
    assert finding.certified.all()
    units = Analytic().run(make_target(run, knowledge)).data.flatten(1)
    assert int((torch.cdist(units, truth).min(0).values < 1e-3).sum()) == 3, "those that fire a unit alone"


def test_a_problem_of_the_body_does_not_hold_the_head(run: OpenRun, experiment: Experiment) -> None:
    update = Transcript(run.path).update(1, VICTIM)
    problem = build_problem(update, make_knowledge(experiment), body_alone=True)
    assert set(problem.parameter_names) == {"1.weight", "1.bias"}
    assert problem.unknown_parts == {}


def test_a_model_without_the_part_that_stays_is_not_said_to_be_of_another_architecture(run: OpenRun) -> None:
    audit = open_audit(run.path, make_attack_file("shared-model", "sra-model", victims=[0], rounds="all"))
    [failure] = audit.run()
    assert "'3.weight', '3.bias' of the model are in no message, as of a part that stays with the clients" in failure
    unscored: list[str] = []
    audit.score(unscored)
    assert len(unscored) == 1
    assert "of the model stay with each client, so that messages hold no whole local model" in unscored[0]
