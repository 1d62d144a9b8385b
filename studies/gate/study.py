"""Federations with a gate at each client, and with what does the same at random.

A gate's limit is chosen so that in round 1 it closes for a quarter, a half or three quarters of the clients
(`strength`); with `drop-examples` that share of the examples of each client is left out. What does the same at random
closes in each round as often as the gate did in that round. What leaks of a client is the mean, over all its examples,
of how far the PSNR of the claim is above the best guess, at least 0, and 0 of what was not sent. Silence and noise at
random leak what they leak on average over all choices, which is known exactly from the attacks on all clients; left out
examples are drawn once.

`withhold by quantile` follows each client's own past instead: it is to be silent in that share of its rounds
(`strength` is 1 - quantile). What leaks is then the mean over all rounds, and the most of any round (`most`), of a
client that alone has a gate: its values and what leaks of it are those of a federation without gates, attacked in each
round.

Which clients a gate closes on in round 1 is judged beside all choices of as many clients of the same federation, and
beside an oracle's: those of which the action saves most. Intervals over clients would not do, for clients differ more
than any choice among them can gain: that of the oracle itself would include 0.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

import fedsim
from clients.defenses.gate import Gate
from fedsim.audit.audit import Audit
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext, Memory
from fedsim.recording.wire_format import State
from fedsim.training.local_round import LocalRound
from studies.messages import attack_federation
from studies.running import Row, final_accuracy
from studies.writing import column_values, draw_places, format_drawn, markdown_table, select_rows

CLIENTS, ROUNDS, NOISE, RESAMPLED, PERMUTED = 16, 10, 0.002, 2000, 999
STRENGTHS = (0.25, 0.5, 0.75)
Rows = Sequence[Mapping[str, str]]
MEASURES: Mapping[str, dict[str, Any]] = {
    "gradient-norm": {"name": "gradient-norm"},
    "angular-lipschitz": {"name": "angular-lipschitz", "noises": 20},
    "expected-error": {"name": "expected-error", "steps": 8},
}
ROUNDED = 0.001
"""dB by which a sum over clients may differ as rows have four decimals."""
TURNED = "gradient-norm below"
GATES: Mapping[str, dict[str, Any]] = {
    "gradient-norm": {"measure": MEASURES["gradient-norm"]},
    TURNED: {"measure": MEASURES["gradient-norm"], "larger_means": "less"},
    "angular-lipschitz": {"measure": MEASURES["angular-lipschitz"]},
    "expected-error": {"measure": MEASURES["expected-error"]},
}
"""Settings of a gate by what rows call it; the second closes on small gradients, against the measure's direction."""
RANDOM_GATE = "studies.gate.study:RandomGate"
BY_QUANTILE, MOST = "withhold by quantile", "-most"
"""`MOST` after the name of an attack: what leaks in the round that leaks most."""
SETTINGS = {"iterations": 100, "step_size": 0.1, "tv_weight": 0.001}
ATTACKS = [{"name": "sme", **SETTINGS}, {"name": "inverting-gradients", "label": "ig", **SETTINGS}]
Numbers = NDArray[np.float64]
Leaks = dict[str, Numbers]
"""By attack, what leaks in dB: `client`, or `round client`."""


@dataclass(frozen=True, kw_only=True)
class RandomGate(Defense):
    """Does what a gate does, but at random.

    Args:
        action: as of the gate.
        rates: in each round, how probably it closes.
        noise: as of the gate.
        fraction: as of the gate.
    """

    action: Literal["withhold", "noise", "drop-examples"]
    rates: tuple[float, ...] = ()
    noise: float = 0.0
    fraction: float = 0.0
    paper = Paper(title="none", authors="nobody", venue="none", year=2000)

    def on_data(self, local: LocalRound, context: LocalContext) -> Tensor:
        """See Defense."""
        count = len(local.labels)
        if self.action == "drop-examples":
            return torch.randperm(count, generator=context.rng)[int(self.fraction * count) :].sort().values
        number = int(context.memory.get("rounds", torch.tensor(0)))
        context.memory["rounds"] = torch.tensor(number + 1)
        context.memory["closed"] = torch.rand((), generator=context.rng) < self.rates[number]
        return torch.arange(count)[: 0 if context.memory["closed"] and self.action == "withhold" else count]

    def on_update(self, update: State, context: LocalContext) -> State:
        """See Defense."""
        if not (self.noise and context.memory["closed"]):
            return update
        noisy = {}
        for name, tensor in update.items():
            noisy[name] = tensor + self.noise * torch.randn(tensor.shape, generator=context.rng)
        return noisy


def measure(seed: int, action: str, measure: str, strength: float) -> list[Row]:
    """Return a row for each arm, attack and client."""
    if not strength:
        accuracy, _ = federate(seed, [])
        leaks = over_rounds(leaks_of(seed, "open rounds")) if action else leaks_of(seed, "plain")
        return arm_rows("none", 0.0, accuracy, leaks)
    if action == "drop-examples":
        rows, arms = list[Row](), {"gate": {"name": "gate", **GATES[measure]}, "random": {"name": RANDOM_GATE}}
        for arm, table in arms.items():
            defense = [table | {"action": action, "fraction": strength}]
            accuracy, _ = federate(seed, defense)
            rows += arm_rows(arm, strength, accuracy, first_round(attack_all(seed, defense)))
        return rows
    if action == BY_QUANTILE:
        return follow_past(seed, measure, strength)
    return close_past_limit(seed, action, measure, strength)


def close_past_limit(seed: int, action: str, measure: str, strength: float) -> list[Row]:
    """Measure a gate that withholds or adds noise past a limit, and what does so at random."""
    side, limit = find_limit(seed, measure, strength)
    noise = {"noise": NOISE} if action == "noise" else {}
    gate = {"name": "gate", **GATES[measure], "action": action, side: limit, **noise}
    accuracy, closed = federate(seed, [gate])
    plain = leaks_of(seed, "plain")
    protected = leaks_of(seed, "noisy") if action == "noise" else {name: 0 * leak for name, leak in plain.items()}
    leaks = {name: np.where(closed[0], protected[name], plain[name]) for name in plain}
    rows = arm_rows("gate", closed.mean(), accuracy, leaks)
    rates = closed.mean(1)
    accuracy, _ = federate(seed, [{"name": RANDOM_GATE, "action": action, "rates": rates.tolist(), **noise}])
    leaks = {name: rates[0] * protected[name] + (1 - rates[0]) * plain[name] for name in plain}
    return rows + arm_rows("random", rates.mean(), accuracy, leaks)


def follow_past(seed: int, measure: str, strength: float) -> list[Row]:
    """Measure a gate whose limit follows the client's own past; accuracy is that where all have it."""
    accuracy, closed = federate(seed, [{"name": "gate", **GATES[measure], "quantile": 1 - strength}])
    alone = silent_rounds(seed, Gate(**GATES[measure], quantile=1 - strength))
    open_rounds = leaks_of(seed, "open rounds")
    sent = {name: np.where(alone, 0, leaks) for name, leaks in open_rounds.items()}
    rows = arm_rows("gate", alone.mean(), accuracy, over_rounds(sent))
    rates = [float(closed.mean())] * ROUNDS
    accuracy, _ = federate(seed, [{"name": RANDOM_GATE, "action": "withhold", "rates": rates}])
    return rows + arm_rows("random", closed.mean(), accuracy, over_rounds(open_rounds, silent=float(alone.mean())))


def silent_rounds(seed: int, gate: Gate) -> NDArray[np.bool_]:
    """Return in which rounds a client would be silent that alone has the gate, `round client`."""
    values = exposures(seed, ROUNDS, tuple(MEASURES))
    chosen = values[(values["measure"] == gate._measure_name) & (values["quantity"] == gate._quantity_name)]
    by_round = chosen.pivot(index="round", columns="client", values="value").astype(float)
    closed = np.zeros((ROUNDS, CLIENTS), dtype=bool)
    for client in range(CLIENTS):
        memory: Memory = {}
        for place, value in enumerate(by_round[client]):
            closed[place, client] = bool(gate._is_past_limit(torch.tensor([value], dtype=torch.float64), memory))
    return closed


def find_limit(seed: int, measure: str, strength: float) -> tuple[str, float]:
    """Return by which setting and at which value a gate closes for that share of the clients in round 1."""
    values = exposures(seed, 1, (GATES[measure]["measure"]["name"],))
    first = values[values["quantity"] == values["quantity"].iloc[0]]
    more = GATES[measure].get("larger_means", first["larger_means"].iloc[0]) == "more"
    place = round(CLIENTS * (1 - strength if more else strength))
    limit = np.sort(first["value"].to_numpy(dtype=float))[place - 1 : place + 1].mean()
    return "above" if more else "below", float(limit)


@cache
def exposures(seed: int, rounds: int, names: tuple[str, ...]) -> pd.DataFrame:
    """Return what clients measure in each round where nothing defends."""
    tables = experiment_tables(seed, [], rounds) | {"measure": [MEASURES[name] for name in names]}
    with tempfile.TemporaryDirectory() as folder:
        return fedsim.run(tables, out=Path(folder) / "run").exposure


@cache
def leaks_of(seed: int, kind: str) -> Leaks:
    """Return what leaks of each client: `plain` in round 1, `noisy` where all gates add noise, or in `open rounds`."""
    if kind == "open rounds":
        return attack_all(seed, [], ROUNDS)
    gate = {"name": "gate", "measure": "gradient-norm", "above": 0.0, "action": "noise", "noise": NOISE}
    return first_round(attack_all(seed, [] if kind == "plain" else [gate]))


def experiment_tables(seed: int, defense: list[dict[str, Any]], rounds: int = ROUNDS) -> Row:
    """Return an experiment that records round 1."""
    return {
        "data": {"name": "mnist"},
        "partition": {"name": "iid", "samples_per_client": 8},
        "model": {"name": "mlp", "hidden": [100]},
        "training": {"local_epochs": 1, "batch_size": 4, "learning_rate": 0.1},
        "federation": {
            "engine": "serial", "clients": CLIENTS, "rounds": rounds, "seed": seed, "evaluate_every": rounds,
            "vectorise": False,
        },
        "recording": {"rounds": [1]},
        "adversary": {"when": "never"},
        "defense": defense,
    }  # fmt: skip


def federate(seed: int, defense: list[dict[str, Any]]) -> tuple[float, NDArray[np.bool_]]:
    """Return the accuracy after the last round, and `round client`, where gates closed."""
    closed: list[bool] = []
    decide = Gate._is_past_limit

    def note_decision(gate: Gate, values: Tensor, memory: Memory) -> Tensor:
        decision = decide(gate, values, memory)
        if len(values) == 1:
            closed.append(bool(decision))
        return decision

    with tempfile.TemporaryDirectory() as folder, patch.object(Gate, "_is_past_limit", note_decision):
        accuracy = final_accuracy(fedsim.run(experiment_tables(seed, defense), out=Path(folder) / "run"))
    trials = len(closed) % CLIENTS  # before the first round
    return accuracy, np.array(closed[trials:]).reshape(-1, CLIENTS)


def attack_all(seed: int, defense: list[dict[str, Any]], rounds: int = 1) -> Leaks:
    """Return what leaks of each client in the first rounds, `round client`."""
    with attack_federation(experiment_tables(seed, defense, rounds), ATTACKS, rounds) as (_, audit):
        found = leaks_by_victim(audit)
    leaks = {name: np.zeros((rounds, CLIENTS)) for name in ("sme", "ig")}
    for (attack, number, client), leak in found.items():
        leaks[attack][number - 1, client] = leak
    return leaks


def leaks_by_victim(audit: Audit) -> dict[tuple[str, int, int], float]:
    """Return what leaks in dB by attack, round and client, of those that an attack was made on."""
    scores, examples = list(audit.score()), pd.read_csv(audit.folder.images)
    psnr = examples[examples["metric"] == "psnr"].groupby(["attack", "round", "victim"])["value"]
    leaks = {}
    for score in scores:
        if score["metric"] == "psnr":
            victim = score["attack"], int(score["round"]), int(score["victim"])
            leaks[victim] = float(np.maximum(psnr.get_group(victim).to_numpy(dtype=float) - score["floor"], 0).mean())
    return leaks


def first_round(leaks: Leaks) -> Leaks:
    """Return what leaks in round 1."""
    return {name: by_round[0] for name, by_round in leaks.items()}


def over_rounds(leaks: Leaks, *, silent: float = 0.0) -> Leaks:
    """Return the mean over rounds and the most of any; on average, if silence has that probability."""
    found = {name: (1 - silent) * by_round.mean(0) for name, by_round in leaks.items()}
    for name, by_round in leaks.items():
        # The probability that the round that leaks k-th most is the first one sent.
        first = (1 - silent) * silent ** np.arange(len(by_round))
        found[f"{name}{MOST}"] = first @ -np.sort(-by_round, axis=0)
    return found


def arm_rows(arm: str, closed: float, accuracy: float, leaks: Leaks) -> list[Row]:
    """Return the rows of one arm."""
    rows = []
    for attack, by_client in leaks.items():
        for client, leak in enumerate(by_client):
            about = {"arm": arm, "closed": float(closed), "accuracy": accuracy}
            rows.append(about | {"attack": attack, "client": client, "leak": float(leak)})
    return rows


def tables(rows: Rows) -> dict[str, str]:
    """Return what each gate leaks beside chance, and by limits on clients beside an oracle."""
    head = ["action", "measure", "strength", "clients", "closed", "accuracy (random)"]
    choices = [*head, "SME (random, oracle)", "of the oracle's gain", "IG (random, oracle)", "of the oracle's gain"]
    paired = [*head, "SME (random)", "difference", "IG (random)", "difference"]
    by_limit = [*action_lines(select_rows(rows, action=""), "none")]
    for action in ("withhold", "noise"):
        by_limit += action_lines(select_rows(rows, action=action), action, compare=compare_choices)
    examples = action_lines(select_rows(rows, action="drop-examples"), "drop-examples")
    same = select_rows(rows, action=BY_QUANTILE)
    by_quantile = [*action_lines(same, BY_QUANTILE), *action_lines(same, f"{BY_QUANTILE}, most", MOST)]
    return {
        "limits": markdown_table(choices, by_limit),
        "examples": markdown_table(paired, examples),
        "quantiles": markdown_table(paired, by_quantile),
    }


def action_lines(
    rows: Rows, title: str, suffix: str = "", *, compare: Callable[[Rows, Rows], tuple[str, str]] | None = None
) -> Iterator[list[str]]:
    """Yield the lines of one action, by the attacks whose names end in `suffix`.

    Args:
        rows: of one action.
        title: what the action is called.
        suffix: of the names of attacks.
        compare: returns what leaks with a gate and at random, and how they compare; by default client by client.
    """
    attacks = [f"{name}{suffix}" for name in ("sme", "ig")]
    if undefended := select_rows(rows, arm="none"):
        clients = len({(row["seed"], row["client"]) for row in undefended})
        leaks = [mean_text(select_rows(undefended, attack=name), "leak") for name in attacks]
        measure, accuracy = "" if title == "none" else "none", mean_text(undefended, "accuracy", ".3f")
        yield [title, measure, "", str(clients), "0", accuracy, leaks[0], "", leaks[1], ""]
    for measure, strength in product(GATES, STRENGTHS):
        same = select_rows(rows, strength=strength)
        gate = select_rows(same, arm="gate", measure=measure)
        # A measure's own control is made by the same commit; the first measures share one.
        own = select_rows(rows, arm="random", measure=measure)
        controls = own or select_rows(rows, arm="random", measure="")
        random = select_rows(controls, strength=strength)
        seeds = {row["seed"] for row in gate} & {row["seed"] for row in random}
        gate, random, controls = ([row for row in arm if row["seed"] in seeds] for arm in (gate, random, controls))
        if seeds:
            accuracy = f"{mean_text(gate, 'accuracy', '.3f')} ({mean_text(random, 'accuracy', '.3f')})"
            leaks = []
            for name in attacks:
                of_gate, of_random = select_rows(gate, attack=name), select_rows(random, attack=name)
                if compare is None:
                    leaks += compare_arms(of_gate, of_random)
                else:
                    leaks += compare(of_gate, select_rows(controls, attack=name))
            clients = len(seeds) * CLIENTS
            yield [title, measure, str(strength), str(clients), mean_text(gate, "closed"), accuracy, *leaks]


def mean_text(rows: Rows, column: str, form: str = ".2f") -> str:
    """Format the mean of a column."""
    return f"{column_values(rows, column).mean():{form}}"


def compare_choices(gate: Rows, random: Rows) -> tuple[str, str]:
    """Format what leaks with a gate, at random and by an oracle, and the share of the oracle's gain with its p.

    p is how often a random choice of as many clients of each federation gains as much.

    Args:
        gate: rows of a gate with one strength.
        random: rows of its random control with all strengths. What leaks is there
            (1 - strength) x undefended + strength x protected, so two strengths tell what the action saves.
    """
    strength, low, high = float(gate[0]["strength"]), STRENGTHS[0], STRENGTHS[-1]
    at_low, at_high = (leak_grid(select_rows(random, strength=value)) for value in (low, high))
    saved = (at_low - at_high) / (high - low)
    undefended = at_low + low * saved
    count = round(strength * CLIENTS)
    best = np.sort(saved, axis=1)[:, CLIENTS - count :].sum(1).mean()
    by_chance, gained = saved.mean() * count, (undefended - leak_grid(gate)).sum(1).mean()
    rng = np.random.default_rng(0)
    permuted = np.array([rng.permuted(saved, axis=1)[:, :count].sum(1).mean() for _ in range(PERMUTED)])
    probability = (1 + (permuted >= gained - ROUNDED).sum()) / (1 + PERMUTED)
    at_random, oracle = undefended.mean() - strength * saved.mean(), undefended.mean() - best / CLIENTS
    means_text = f"{mean_text(gate, 'leak')} ({at_random:.2f}, {oracle:.2f})"
    return means_text, f"{(gained - by_chance) / (best - by_chance):+z.2f} (p {probability:.3f})"


def leak_grid(rows: Rows) -> Numbers:
    """Return what leaks as `federation client`."""
    table = pd.DataFrame(rows).astype({"leak": float, "client": int})
    return np.asarray(table.pivot(index="seed", columns="client", values="leak"), dtype=float)


def compare_arms(gate: Rows, random: Rows) -> tuple[str, str]:
    """Format what leaks with a gate and at random, and the difference by drawing clients anew."""
    leak_at_random = {(row["seed"], row["client"]): float(row["leak"]) for row in random}
    differences = np.array([float(row["leak"]) - leak_at_random[row["seed"], row["client"]] for row in gate])
    means = differences[draw_places(len(differences), RESAMPLED)].mean(1)
    means_text = f"{mean_text(gate, 'leak')} ({mean_text(random, 'leak')})"
    return means_text, format_drawn(means, "{:+.2f} [{:+.2f}, {:+.2f}]")
