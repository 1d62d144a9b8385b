"""Attacks, local training, defenses and measures compute on the device they are given; none mixes the CPU in.

They run to their end on an accelerator that is not there (`conftest`). What comes of it is what comes of it on the CPU,
and the CPU waits for the accelerator only at the places that `host_reads.toml` lists.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.defenses.dp_sgd import DpSgd
from fedsim.audit.evaluation.guess_similarities import measure_guess_similarities
from fedsim.audit.evaluation.measurement_cache import MeasurementCache
from fedsim.audit.evaluation.perceptual_distance import PerceptualNetwork
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import AttackError, ConfigError
from fedsim.base.randomness import generator, seed_globals, use_one_thread
from fedsim.base.task import Task
from fedsim.contract.recordings import OTHER, VICTIM, TinyRecording, recordings_for
from fedsim.exposure.measure import Measure
from fedsim.interfaces.attack import Attack, Target, VictimTask
from fedsim.interfaces.defense import Defense, Participation
from fedsim.interfaces.findings import Finding, Reconstruction
from fedsim.interfaces.local_context import ClientRound
from fedsim.interfaces.modality import PublicExamples
from fedsim.plugins import registry
from fedsim.training.cohort import LocalData, local_updates
from fedsim.training.hooks import TrainingHooks
from fedsim.training.loop import evaluate, local_gradient, local_update
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining
from tests.support.recordings import build_update

ROOT = Path(__file__).parents[2]
LISTED = tomllib.loads((Path(__file__).parent / "host_reads.toml").read_text())
READS: dict[str, str] = {place: who for about in LISTED["reads"] for place, who in about["seen_in"].items()}
SLOW = {
    "attacks": {
        "aia-gradient",
        "cocktail-party",
        "lamp",
        "learned-inversion",
        "property-inference",
        "spear",
        "tableak",
        "tgias-ro",
        "tgias-ro-text",
    },
    "measures": {"angular-lipschitz", "expected-error", "jacobian-norm", "lavp", "lipschitz", "spectrum"},
    "models": {"alexnet", "convnet", "resnet18", "shufflenet-v2", "torchvision", "vit-april"},
}
THOROUGH = {
    "attacks": {
        *("dager", "dlg", "dlg-text", "idlg", "label-counts", "lmra-dummy-data", "map", "see-through-gradients"),
        *("spear-ica", "spear-ica-rounds", "tag", "unmixing", "lmra", "membership-white-box", "aia-model"),
        *("fedmia", "inverting-gradients-text", "sra-gradient"),
    },
    "defenses": {"dp-sgd"},
    "models": {"lstm", "resnet8", "transformer-decoder", "transformer-encoder", "vgg9", "vit"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "dp-sgd": {"epsilon": 5.0},
    "gate": {"measure": "gradient-norm", "above": 0.0},
    "giml": {
        "tasks": 2,
        "task_latent_steps": 2,
        "task_tuning_steps": 2,
        "latent_iterations": 3,
        "tuning_iterations": 3,
    },
    "lamp": {"candidates": 2, "every": 1, "tries": 4},
    "layer-freeze": {"layers": ["*bias"]},
    "learned-inversion": {"simulated": 20, "features": 10, "components": 5, "epochs": 1, "refinements": 2},
    "lmra": {"hidden": "16x2", "learning_rate": 1e-2, "epochs": 60, "minimise_epochs": 2},
    "lmra-dummy-data": {"training_iterations": 1},
    "property-inference": {"simulated": 10, "trees": 50},
    "see-through-gradients": {"bn_weight": 0.0},
    "tgias-ro": {"gradients": 2},
    "tgias-ro-text": {"gradients": 2, "refinements": 1},
}
AT_ONCE = ["dlfa", "inverting-gradients", "long-strides", "nl-sme", "sapag", "see-through-gradients", "sme"]
"""Attacks that compute several victims at once."""
TASKS = (
    Task((1, 8, 8), 7),
    Task((12,), 7),
    Task((20,), 7, vocabulary=30),
    Task((2, 32), 7),
    Task((1, 28, 28), 7),
    Task((3, 32, 32), 7),
    Task((3, 64, 64), 7),
    Task((1, 8, 8), 0, mask_classes=3),
)
TRAINING = LocalTraining(
    local_epochs=1, batch_size=2, learning_rate=0.05, momentum=0.9, weight_decay=0.01, proximal_mu=0.1
)


# Said of all that is loaded into a model on `meta`, whose values are kept here.
pytestmark = pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")


def ours(group: registry.Group) -> list[str]:
    owners = {name: registry.find_entry_point(group, name).dist for name in registry.registered_names(group)}
    return [name for name, owner in owners.items() if owner is not None and owner.name == "fedsim-curious"]


def subjects(group: registry.Group) -> list[Any]:
    marks = dict.fromkeys(THOROUGH.get(group, ()), pytest.mark.thorough)
    marks |= dict.fromkeys(SLOW.get(group, ()), pytest.mark.slow)
    return [pytest.param(name, marks=marks.get(name, ())) for name in ours(group)]


def build(group: registry.Group, name: str) -> Any:
    few = {"iterations": 1} if "iterations" in registry.setting_parameters(registry.load(group, name)) else {}
    return registry.build(group, name, few | SETTINGS.get(name, {}), name)


def check_reads(accelerator: Any, who: str) -> None:
    """That the CPU waited where it is listed, and at all places that are listed to be seen in the test of `who`."""
    assert accelerator.calls, "nothing was computed on the accelerator"
    unlisted = sorted(accelerator.reads - READS.keys())
    assert not unlisted, "the CPU waits for the device here; where it has to, list it in host_reads.toml"
    gone = sorted({place for place, seen_in in READS.items() if seen_in == who} - accelerator.reads)
    assert not gone, "the CPU no longer waits here; list it no more in host_reads.toml"


def check_same(here: Mapping[str, Tensor], there: Mapping[str, Tensor]) -> None:
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=1e-3, atol=1e-4, equal_nan=True)


def accepted(attack: Attack, folder: Path) -> Iterator[TinyRecording]:
    """The tiny recordings that `attack` can read, every second one without labels where it can count them."""
    for number, scene in enumerate(recordings_for(attack, folder)):
        if number % 2 and "labels" in attack.uses:
            scene = replace(scene, knowledge=replace(scene.knowledge, labels=None))
        if attack.needs <= set(scene.knowledge.granted_facts()):
            yield scene


@pytest.mark.parametrize("name", subjects("attacks"))
def test_an_attack_computes_on_the_device_that_it_is_told(name: str, accelerator: Any, tmp_path: Path) -> None:
    attack, works = cast("Attack", build("attacks", name)), 0
    for scene in accepted(attack, tmp_path):
        here = outcome(attack, scene)
        with accelerator:
            there = outcome(attack, replace(scene, knowledge=replace(scene.knowledge, device=accelerator.device)))
        if isinstance(here, str) or isinstance(there, str):
            assert here == there
            continue
        assert all(tensor.device.type == "cpu" for tensor in there.values())
        check_same(here, there)
        works += 1
        if works == 2:
            break
    assert works
    if name in LISTED["on_the_cpu"]:
        assert not accelerator.calls, "it computes on the device after all; list it no more in host_reads.toml"
    else:
        check_reads(accelerator, f"attack {name}")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("dlfa", "sme") else pytest.mark.thorough) for name in AT_ONCE]
)
def test_victims_are_computed_at_once_on_the_device(name: str, accelerator: Any, tmp_path: Path) -> None:
    attack = cast("Attack", build("attacks", name))
    scene = next(accepted(attack, tmp_path))

    def finding_tensors(device: torch.device) -> dict[str, Tensor]:
        known = replace(scene.knowledge, device=device)
        orders = [
            VictimTask(
                target=Target(transcript=scene.transcript, victim=client, knowledge=known, rng=generator(client))
            )
            for client in (VICTIM, OTHER)
        ]
        named: dict[str, Tensor] = {}
        for order, outcome in attack.run_several(orders):
            assert isinstance(outcome, Finding), outcome
            named |= {f"{key} of {order.target.victim}": tensor for key, tensor in outcome.tensors.items()}
        return {key: named[key] for key in sorted(named)}

    compare(finding_tensors, accelerator)
    check_reads(accelerator, f"victims {name}")


@pytest.mark.parametrize("name", subjects("models"))
def test_local_training_of_a_model_stays_on_its_device(name: str, accelerator: Any) -> None:
    before, task = fresh(name)
    inputs, labels = data(task)

    def trained(device: torch.device) -> dict[str, Tensor]:
        model = network(name, task).to(device)
        state = {name: tensor.to(device) for name, tensor in before.items()}
        given = inputs.to(device), labels.to(device)
        after, loss = local_update(model, state, *given, TRAINING, key=("devices",), loss=task.loss)
        gradient, beside, _ = local_gradient(model, state, *given, TRAINING, key=("devices",), loss=task.loss)
        measured = {"trained with": loss, **evaluate(model, after, *given, task.loss)}
        assert all(tensor.device == device for tensor in (*after.values(), *gradient.values(), *beside.values()))
        tensors = after | {f"gradient of {name}": tensor for name, tensor in gradient.items()}
        return on_cpu(tensors) | {name: torch.tensor(value) for name, value in measured.items()}

    compare(trained, accelerator)
    check_reads(accelerator, f"model {name}")


@pytest.mark.parametrize(
    ("layers", "defenses"),
    [([], []), ([nn.Conv2d(1, 2, 3, padding=1), nn.AvgPool2d(2)], []), ([], [DpSgd(noise_multiplier=1.0)])],
    ids=["linear", "convolution", "clipped"],
)
def test_clients_that_train_at_once_stay_on_the_device_of_the_model(
    layers: list[nn.Module], defenses: list[Defense], accelerator: Any
) -> None:
    task = TASKS[0]
    with seed_globals("devices", "cohort"):
        first = nn.Sequential(*deepcopy(layers), nn.Flatten())
        width = first(torch.zeros(1, *task.input_shape)).shape[1]
        start = nn.Sequential(first, nn.Linear(width, task.outputs))
    before, (inputs, labels) = copy_state(start), data(task)
    training = LocalTraining(local_epochs=2, batch_size=2, learning_rate=0.05, momentum=0.5)

    def trained(device: torch.device) -> dict[str, Tensor]:
        model, shares = deepcopy(start).to(device), []
        for count in (4, 1):
            about = ClientRound(key=(count,), broadcast=before)
            hooks = TrainingHooks(defenses, model, training, count, about) if defenses else None
            shares.append(LocalData(inputs=inputs[:count], labels=labels[:count], key=(count,), hooks=hooks))
        named: dict[str, Tensor] = {}
        for client, update in enumerate(local_updates(model, before, shares, training)):
            assert update is not None
            after, loss = update
            assert all(tensor.device == device for tensor in after.values())
            named |= {f"{name} of {client}": tensor for name, tensor in on_cpu(after).items()}
            named[f"loss of {client}"] = torch.tensor(loss)
        return named

    compare(trained, accelerator)
    steps = {"fedsim/training/cohort_clipping.py:clipped_gradients"} if defenses else set()
    assert accelerator.reads == {"fedsim/training/cohort.py:local_updates", *steps}


@pytest.mark.parametrize("name", subjects("defenses"))
def test_a_defense_acts_inside_training_on_its_device(name: str, accelerator: Any) -> None:
    client = Participation(num_examples=4, batch_size=2, steps=2, rounds=1, num_classes=7, value_range=((0.0,), (1.0,)))
    defense = cast("Defense", build("defenses", name)).of_client(client)
    task = TASKS[0]
    inputs, labels = data(task)
    before = copy_state(network("mlp", task))
    training = LocalTraining(local_epochs=1, batch_size=2, learning_rate=0.05)

    def trained(device: torch.device) -> dict[str, Tensor]:
        given = inputs.to(device), labels.to(device)
        model, key = network("mlp", task).to(device), ("devices",)
        state = {name: tensor.to(device) for name, tensor in before.items()}
        return on_cpu(local_update(model, state, *given, training, key=key, defenses=[defense], loss=task.loss)[0])

    compare(trained, accelerator)
    check_reads(accelerator, f"defense {name}")


@pytest.mark.thorough
@pytest.mark.parametrize("name", subjects("measures"))
def test_a_measure_is_taken_on_the_device_of_the_model(name: str, accelerator: Any) -> None:
    measure, task = cast("Measure", build("measures", name)), TASKS[0]
    inputs, labels = data(task)
    training = LocalTraining(local_epochs=1, batch_size=2, learning_rate=0.05)

    def taken(device: torch.device) -> dict[str, Tensor]:
        given = network("mlp", task).to(device), task.loss, inputs.to(device), labels.to(device)
        whole, update = measure.compute(*given), measure.compute(*given, training=training)
        named = {name: torch.tensor([value, update[name]]) for name, value in whole.items()}
        return named | {f"{name} of each": values for name, values in measure.compute_per_example(*given).items()}

    compare(taken, accelerator)
    check_reads(accelerator, f"measure {name}")


def test_similarities_are_computed_on_the_device_of_the_attack(accelerator: Any) -> None:
    """Of a recording made elsewhere, whose training is not known, and of a run of our own."""
    task = Task((3, 32, 32), 7)
    images, labels = data(task)
    before, rng = copy_state(network("sme-cnn", task)), generator("devices", "update")
    after = {name: tensor - 0.01 * torch.randn(tensor.shape, generator=rng) for name, tensor in before.items()}

    def similarities(device: torch.device) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for settings in (None, TRAINING):
            sent = AttackedUpdate(
                model=network("sme-cnn", task),
                loss=task.loss,
                update=build_update(before, after),
                value_range=(torch.zeros(3), torch.ones(3)),
                settings=settings,
                device=device,
            )
            at_broadcast = sent.similarity_at_broadcast(images, labels)
            coarse = sent.search_line(images, labels, at_broadcast, None).value
            on_line = sent.similarity_on_line(images, labels, at_broadcast)
            guesses = {"flipped": images.flip(3), "grey": torch.full_like(images, 0.5), "dark": 0.3 * images}
            measured = measure_guess_similarities(sent, guesses, labels, MeasurementCache())
            floors = [values[name] for values in measured.values() for name in ("l_sim", "l_sim_line")]
            named[f"{settings}"] = torch.tensor([at_broadcast, coarse, on_line, *map(float, floors)])
            assert sent._batch_checks == ({} if device.type == "cpu" else {"positions": "", "inputs": ""})
        return named

    compare(similarities, accelerator)
    check_reads(accelerator, "similarities")


class Fails(nn.Module):
    """A foreign model that cannot be computed."""

    def forward(self, inputs: Tensor) -> Tensor:
        raise ZeroDivisionError("by nought")


def test_guesses_for_a_model_that_raises_say_so_and_end_nothing(accelerator: Any) -> None:
    images, labels = data(Task((3, 8, 8), 7))
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 7), Fails())
    before = copy_state(model)
    update = build_update(before, {name: tensor + 0.01 for name, tensor in before.items()})
    unit = torch.zeros(3), torch.ones(3)
    with accelerator:
        sent = AttackedUpdate(
            model=model, loss=cross_entropy, update=update, value_range=unit, device=accelerator.device
        )
        guesses = {"flipped": images.flip(3), "dark": 0.3 * images}
        measured = measure_guess_similarities(sent, guesses, labels, MeasurementCache())
    assert [values["l_sim"] for values in measured.values()] == ["the model raised ZeroDivisionError: by nought"] * 2


class ScaledInBatches(nn.Module):
    """Gives other values for a batch of points than for each of them."""

    def forward(self, inputs: Tensor) -> Tensor:
        is_transformed = torch._C._functorch.maybe_current_level() is not None
        return inputs * (2 if is_transformed else 1)


class ReadsNumber(nn.Module):
    """Asks for a number, which there is not in a batch of points."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / (1 + inputs.detach().square().mean().item())


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (ScaledInBatches(), "the model gives other gradients in a batch"),
        (ReadsNumber(), "RuntimeError: vmap"),
        (nn.BatchNorm1d(16), "the model has buffers"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_similarities_of_a_model_that_cannot_be_batched_are_those_of_each_point(
    layer: nn.Module, reason: str, accelerator: Any
) -> None:
    with seed_globals("devices", "unbatched"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), layer, nn.Sigmoid(), nn.Linear(16, 7))
    images, labels = data(Task((3, 8, 8), 7))
    before = copy_state(model)
    rng = generator("devices", "unbatched")
    after = {name: tensor - 0.01 * torch.randn(tensor.shape, generator=rng) for name, tensor in before.items()}
    update = build_update(before, {name: after[name] if before[name].ndim else before[name] for name in before})

    def similarities(device: torch.device) -> dict[str, Tensor]:
        unit = torch.zeros(3), torch.ones(3)
        sent = AttackedUpdate(
            model=deepcopy(model),
            loss=cross_entropy,
            update=update,
            value_range=unit,
            settings=replace(TRAINING, batch_norm="eval"),
            device=device,
        )
        found = sent.similarities(images, labels)
        assert device.type == "cpu" or sent._batch_checks["positions"].startswith(reason)
        return {name: torch.tensor(value) for name, value in found.items()}

    compare(similarities, accelerator)


def test_claims_and_guesses_are_measured_on_the_device_of_the_attack(accelerator: Any, tmp_path: Path) -> None:
    lpips_network = PerceptualNetwork("squeeze")
    torch.save(lpips_network.state_dict(), tmp_path / "squeezenet1_1-random.pth")
    images, labels = data(Task((3, 32, 32), 7))
    truth = Truth(data=images, labels=labels)
    public = PublicExamples(data=images.flip(2, 3).repeat(4, 1, 1, 1), labels=labels.repeat(4))
    finding = Reconstruction(data=(0.9 * images + 0.05).flip(0), labels=labels)

    def scores(device: torch.device) -> dict[str, Tensor]:
        rng = generator("devices", "guesses")
        found = score_examples(finding, truth, public=public, rng=rng, weights=tmp_path, device=device)
        assert not [score.missing for score in found if score.missing]
        return {score.metric: torch.tensor([score.value, score.floor, score.nearest_public]) for score in found}

    compare(scores, accelerator)
    check_reads(accelerator, "scores")


def test_the_accelerator_refuses_what_cuda_refuses(accelerator: Any) -> None:
    with accelerator:
        there, here = torch.ones(3, device=accelerator.device), torch.ones(3)
        assert (there + 1.0 * torch.ones(())).sum().item() == 6
        for mixed in (
            lambda: there + here,
            lambda: there @ here,
            lambda: torch.cat([there, here]),
            lambda: torch.stack([there.sum(), here.sum()]),
            lambda: here[there.long()],
            lambda: there.index_add(0, torch.arange(3), there),
            lambda: torch.nn.functional.linear(there, here.repeat(2, 1)),
            lambda: torch.randn(3, generator=generator(0), device=accelerator.device),
            lambda: there.normal_(generator=generator(0)),
        ):
            with pytest.raises(accelerator.mixed):
                mixed()
        assert there[torch.tensor([0, 2])].shape == (2,)


def test_what_is_listed_is_seen_in_a_test() -> None:
    tested = {f"{group[:-1]} {name}" for group in ("attacks", "models", "defenses", "measures") for name in ours(group)}
    assert set(READS.values()) <= tested | {f"victims {name}" for name in AT_ONCE} | {"similarities", "scores"}
    assert LISTED["on_the_cpu"].keys() <= set(ours("attacks"))


def outcome(attack: Attack, scene: TinyRecording) -> Mapping[str, Tensor] | str:
    """What the attack finds, or why it refuses."""
    with use_one_thread():
        try:
            return attack.run(scene.make_target(scene.knowledge, generator(0))).tensors
        except AttackError as refused:
            return str(refused)


def fresh(name: str) -> tuple[dict[str, Tensor], Task]:
    """The first weights of a model, and the smallest task that it takes."""
    for task in TASKS:
        try:
            return copy_state(network(name, task)), task
        except ConfigError:
            continue
    raise AssertionError(f"{name} takes none of the tasks")


def network(name: str, task: Task) -> nn.Module:
    with seed_globals("devices", "model"):
        return cast("nn.Module", registry.build("models", name, {}, name).build(task))


def data(task: Task) -> tuple[Tensor, Tensor]:
    shape, rng = (4, *task.input_shape), generator("devices", "data")
    if task.vocabulary:
        return torch.randint(task.vocabulary, shape, generator=rng), torch.arange(4)
    labels = torch.arange(4).reshape(4, *[1] * len(task.target_shape)) % task.outputs
    return torch.rand(shape, generator=rng), labels.expand(4, *task.target_shape).clone()


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def compare(compute: Any, accelerator: Any) -> None:
    """That `compute` gives the same on both devices."""
    with use_one_thread():
        here = compute(torch.device("cpu"))
        with accelerator:
            there = compute(accelerator.device)
    check_same(here, there)
