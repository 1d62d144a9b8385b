"""`sratta` beside its authors' released code on the same sums, client by client."""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import OrthogonalMatchingPursuit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.exact.sratta import Sratta
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.data.digits import Digits
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.interfaces.findings import ExampleGroups
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from studies.running import Row
from studies.writing import markdown_table

CLIENTS, SIZE, UNITS, LEVELS = 3, 12, 1000, 16
EPOCHS, BATCH, RATE = 3, 4, 0.5
DIGITS = Digits().load(None)


def network() -> nn.Module:
    """Return the network at its first weights."""
    with seed_globals("sratta study"):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, UNITS), nn.ReLU(), nn.Linear(UNITS, 10))


@dataclass(frozen=True)
class RecordedSums:
    """Sums of several rounds, with what only the evaluator knows.

    Attributes:
        states: the broadcast state of each round, and the last one.
        activations: of each round, by unit the steps at which an example fired it, as `(client, step, example)`.
        inputs: `example pixel`; the first `SIZE` are of client 0.
    """

    states: Sequence[State]
    activations: Sequence[dict[int, list[tuple[int, int, int]]]]
    inputs: Tensor


def record_sums(rounds: int, seed: int) -> RecordedSums:
    """Train all clients for some rounds; return the mean of what they send in each."""
    rows = generator(seed, "sratta study").initial_seed() % 900 + torch.arange(CLIENTS * SIZE)
    inputs, labels = DIGITS.train.inputs(rows), DIGITS.train.labels[rows]
    model = network()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states, all_activations = [state], []
    for number in range(rounds):
        activations: dict[int, list[tuple[int, int, int]]] = {unit: [] for unit in range(UNITS)}
        returned = []
        for client in range(CLIENTS):
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), RATE)
            step = 0
            for epoch in range(EPOCHS):
                order = torch.randperm(SIZE, generator=generator(seed, "order", number, client, epoch))
                for batch in order.split(BATCH):
                    index = client * SIZE + batch
                    with torch.no_grad():
                        fired = model[1](inputs[index].flatten(1)) > 0  # type: ignore[index]
                    for example, unit in fired.nonzero().tolist():
                        activations[unit].append((client, step, int(batch[example])))
                    optimizer.zero_grad()
                    cross_entropy(model(inputs[index]), labels[index]).backward()
                    optimizer.step()
                    step += 1
            returned.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        state = {name: torch.stack([sent[name] for sent in returned]).mean(0) for name in state}
        states.append(state)
        all_activations.append(activations)
    return RecordedSums(states, all_activations, inputs.flatten(1))


def measure(rounds: int, seed: int) -> list[Row]:
    """Return for each client how many of its examples both recover, and of all pairs how many are right."""
    sums = record_sums(rounds, seed)
    ours, theirs = group_by_our_code(sums, seed), group_by_official_code(sums)
    rows = list[Row]()
    for client in range(CLIENTS):
        row: Row = {"client": client}
        for name, groups in (("ours", ours), ("theirs", theirs)):
            held = [index for group in groups for index in group if index // SIZE == client]
            largest = max((sum(index // SIZE == client for index in group) for group in groups), default=0)
            row |= {f"{name}: recovered": len(held), f"{name}: in one group": largest}
            mixed = [group for group in groups if len({index // SIZE for index in group}) > 1]
            row[f"{name}: in mixed groups"] = sum(index // SIZE == client for group in mixed for index in group)
        both = {index for group in ours for index in group} & {index for group in theirs for index in group}
        row["recovered by both"] = sum(index // SIZE == client for index in both)
        rows.append(row)
    return rows


def group_by_our_code(sums: RecordedSums, seed: int) -> list[list[int]]:
    """Return groups of indices of examples, as `sratta` claims them."""
    members = tuple(range(CLIENTS))
    knowledge = Knowledge(
        model=network, loss=cross_entropy, input_shape=(1, 8, 8), value_range=([0.0], [1.0]), num_classes=10
    )
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "transcript")
        for number, (before, after) in enumerate(itertools.pairwise(sums.states), start=1):
            payload, total = Payload.from_dense(dict(after), "weights"), CLIENTS * SIZE
            update = Update(round=number, client=0, before=before, payload=payload, num_examples=total, members=members)
            recorder.write(number, [update])
        transcript = Transcript(Path(folder) / "transcript")
        rng = generator(seed, "sratta attack")
        target = Target(transcript=transcript, victim=0, members=members, knowledge=knowledge, rng=rng)
        finding = Sratta().run(target)
    assert isinstance(finding, ExampleGroups)
    errors, nearest = (finding.data.flatten(1)[:, None] - sums.inputs).abs().amax(2).min(1)
    groups: dict[int, list[int]] = {}
    for error, index, client in zip(errors.tolist(), nearest.tolist(), finding.clients.tolist(), strict=True):
        if error < 1 / LEVELS / 20:  # their measure of what is recovered
            groups.setdefault(client, []).append(index)
    return list(groups.values())


class PixelOracle:
    """The data set that their code asks: which candidates may be images, and which are those of a client."""

    name, num_centers = "digits", CLIENTS

    def __init__(self, inputs: Tensor) -> None:
        self.list_data_per_center = inputs.reshape(CLIENTS, SIZE, -1).numpy()

    def oracle(self, candidate: Any) -> bool:
        """Return whether all values are levels of a pixel, within their precision."""
        levels = candidate * LEVELS
        is_level = np.abs(levels - np.around(levels)) <= 1 / 20
        return bool(is_level.all() and candidate.min() > -0.01 and candidate.max() < 1.01)

    def compare_candidate(self, candidate: Any, list_bank: Any) -> list[bool]:
        """Tell for each image whether the candidate is the same."""
        return [bool(np.allclose(candidate, other, rtol=1e-9, atol=1 / LEVELS / 20)) for other in list_bank]

    def project_candidate(self, candidate: Any) -> Any:
        """Round a candidate to levels."""
        return (np.around(candidate * LEVELS) / LEVELS).astype(np.float32)


@contextmanager
def official_steps() -> Iterator[dict[str, ModuleType]]:
    """Import the steps of the authors' attack; what only logs is replaced by nothing.

    Raises:
        ConfigError: OFFICIAL names no checkout.
    """
    if not (folder := os.environ.get("OFFICIAL")):
        raise ConfigError("OFFICIAL is not set; point it at a checkout of the authors' repository")
    sys.path.insert(0, folder)
    silent = SimpleNamespace(info=lambda *_: None)
    stubs: dict[str, dict[str, Any]] = {
        "mlflow": {"log_metric": lambda *_, **__: None}, "loguru": {"logger": silent}
    }  # fmt: skip
    for name, members in stubs.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)
    names = ("sample_recovery", "sample_matching", "construction_overbar_A", "build_relationships", "building_graph")
    steps = {name: importlib.import_module(f"sratta.attack_pipeline.attack_steps.{name}") for name in names}
    # scikit-learn no longer takes `normalize`, which is False there.
    steps["sample_matching"].OrthogonalMatchingPursuit = (  # type: ignore[attr-defined]
        lambda normalize, **settings: OrthogonalMatchingPursuit(**settings)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield steps


def group_by_official_code(sums: RecordedSums) -> list[list[int]]:
    """Return groups of indices of examples, as the authors' code finds them from one training."""
    rounds = len(sums.activations)
    parameters = SimpleNamespace(
        num_trainings=1, num_rounds=rounds, num_centers=CLIENTS, num_hidden_neurons=UNITS, dataset_size=SIZE,
        max_sample=5, abs_detection_treshold=1e-7, rel_detection_treshold=1e-2,
    )  # fmt: skip
    config, oracle = SimpleNamespace(parameters=parameters), PixelOracle(sums.inputs)
    weights = [list(state.values()) for state in sums.states]
    changes = [[a - b for a, b in zip(after, before, strict=True)] for before, after in itertools.pairwise(weights)]
    model = SimpleNamespace(linear_1=nn.Linear(64, UNITS))
    model.parameters = model.linear_1.parameters
    with tempfile.TemporaryDirectory() as folder, official_steps() as steps:
        for name, content in {
            "list_updates": changes,
            "list_models_weights": weights,
            "list_of_samples_activating_neuron_per_round": sums.activations,
        }.items():
            Path(folder, f"{name}_0.pkl").write_bytes(pickle.dumps(content))
        samples, centers, indices = steps["sample_recovery"].recover_samples(config, oracle, 0, folder)
        if not samples:
            return []
        active, complete, used = steps["sample_matching"].run_sample_matching(config, samples, oracle, folder)
        before = steps["construction_overbar_A"].construction_overbar_A(config, model, samples, indices, used, folder)
        links = steps["build_relationships"].build_relationships(config, complete, samples, before, used, active)
        groups = steps["building_graph"].exploit_relationship(links, centers, indices)
    return [[SIZE * indices[node][0] + int(indices[node][1]) for node in group] for group in groups]


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table: a line for each run and client."""
    lines = []
    for row in rows:
        line = [row["rounds"], row["seed"], row["client"]]
        for code in ("ours", "theirs"):
            line += [row[f"{code}: {column}"] for column in ("recovered", "in one group", "in mixed groups")]
        lines.append([*line, row["recovered by both"]])
    counts = ["recovered", "largest group", "in mixed groups"]
    head = ["rounds", "seed", "client", *counts, *(f"theirs: {count}" for count in counts), "recovered by both"]
    return {"": markdown_table(head, lines)}
