"""Leakage against accuracy with a gate at each client, and with as much silence, noise or left out data at random.

In a federation of 16 clients all are attacked in round 1, by SME and IG. A gate's limit is chosen so that in round 1 it
closes for a quarter, a half or three quarters of them (`strength`); with `drop-examples` that share of the examples of
each client is left out. Its twin closes at random, in each round as often as the gate did in that round. What leaks of
a client is the mean, over all its examples, of how far the PSNR of the claim is above the best guess, at least 0, and 0
of what was not sent. Silence and noise at random leak what they leak on average over all choices, which is known
exactly from the attacks on all clients; left out examples are drawn once.

`withhold by quantile` follows each client's own past instead: it is to be silent in that share of its rounds
(`strength` is 1 - quantile). What leaks is then the mean over all rounds, and the most of any round (`most`), of a
client that alone has a gate: its values and what leaks of it are those of a federation without gates, attacked in each
round. Its twin is silent as often, in any round.

`python benchmarks/gate_study.py --data-dir DIR` takes about 20 minutes of one core for each seed, keeps what is done in
benchmarks/results/gate.csv and goes on from it; `--table` shows what was found.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from defense_study import without_slow_metrics
from numpy.typing import NDArray
from torch import Tensor

import fedsim
from clients.defenses.gate import Gate
from fedsim.audit.audit import open_audit
from fedsim.federation.config import AttackFile, validate_tables
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext, Memory
from fedsim.recording.wire_format import State
from fedsim.training.local_round import LocalRound

RESULTS = Path(__file__).parent / "results" / "gate.csv"
CLIENTS, ROUNDS, NOISE, RESAMPLED = 16, 10, 0.002, 2000
STRENGTHS = (0.25, 0.5, 0.75)
MEASURES: Mapping[str, dict[str, Any]] = {
    "gradient-norm": {},
    "angular-lipschitz": {"noises": 20},
    "expected-error": {"steps": 8},
}
BY_QUANTILE = "withhold by quantile"
MOST = "-most"
"""After the name of an attack: what leaks in the round that leaks most."""
ACTIONS = ("withhold", BY_QUANTILE, "noise", "drop-examples")
HOW = {"iterations": 100, "step_size": 0.1, "tv_weight": 0.001}
ATTACKS = [{"name": "sme", **HOW}, {"name": "inverting-gradients", "label": "ig", **HOW}]
COLUMNS = ("seed", "action", "measure", "strength", "arm", "closed", "accuracy", "attack", "client", "leak")
Action = Literal["withhold", "noise", "drop-examples"]
Row = Mapping[str, Any]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class AtRandom(Defense):
    """Do what a gate does, but at random.

    Args:
        action: as of the gate.
        rates: in each round, how probably it closes.
        noise: as of the gate.
        fraction: as of the gate.
    """

    action: Action
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


@dataclass(frozen=True)
class Cell:
    """A federation with gates of one kind, or with what does the same at random.

    Attributes:
        action: of the gate; empty without any, but where all rounds are attacked.
        measure: its name; empty where nothing is measured.
        strength: the share of clients, or of examples, that it is to act on in round 1.
        arm: `none`, `gate` or `random`.
    """

    action: str = ""
    measure: str = ""
    strength: float = 0.0
    arm: str = "none"

    @property
    def key(self) -> tuple[str, ...]:
        """As it is written down."""
        return self.action, self.measure, str(self.strength), self.arm


class Study:
    """The cells of one seed and of some actions."""

    def __init__(self, seed: int, done: Sequence[Row], actions: Sequence[str] = ACTIONS) -> None:
        self.seed, self.actions = seed, actions
        self._done = {tuple(row[name] for name in ("action", "measure", "strength", "arm")) for row in done}

    def rows(self) -> Iterator[list[dict[str, Any]]]:
        """Of each cell that is not done, a row for each attack and client."""
        for cell in (Cell(), Cell(BY_QUANTILE)):
            if cell.key not in self._done and cell.action in ("", *self.actions):
                accuracy, _ = self.federated([])
                leak = _over_rounds(self.open_rounds) if cell.action else self.plain
                yield self._leak_rows(cell, 0.0, accuracy, leak)
        for action in self.actions:
            for strength in STRENGTHS:
                for measure in MEASURES:
                    gate, twin = (Cell(action, measure, strength, arm) for arm in ("gate", "random"))
                    if action == "drop-examples":
                        twin = Cell(action, "", strength, "random")
                        yield from self._dropping(gate, twin)
                    elif not {gate.key, twin.key} <= self._done:
                        yield from (self._following if action == BY_QUANTILE else self._closing)(gate, twin)

    def _closing(self, gate: Cell, twin: Cell) -> Iterator[list[dict[str, Any]]]:
        """A gate that withholds or adds noise, and its twin."""
        way, limit = self.limit(gate.measure, gate.strength)
        table = {"name": "gate", "measure": {"name": gate.measure, **MEASURES[gate.measure]}, "action": gate.action}
        noise = {"noise": NOISE} if gate.action == "noise" else {}
        accuracy, closed = self.federated([{**table, way: limit, **noise}])
        protected = self.noisy if gate.action == "noise" else {name: 0 * leak for name, leak in self.plain.items()}
        leak = {name: np.where(closed[0], protected[name], self.plain[name]) for name in self.plain}
        yield self._leak_rows(gate, closed.mean(), accuracy, leak)
        rates = closed.mean(1)
        settings = {"name": "gate_study:AtRandom", "action": gate.action, "rates": rates.tolist(), **noise}
        accuracy, _ = self.federated([settings])
        leak = {name: rates[0] * protected[name] + (1 - rates[0]) * self.plain[name] for name in self.plain}
        yield self._leak_rows(twin, rates.mean(), accuracy, leak)

    def _following(self, gate: Cell, twin: Cell) -> Iterator[list[dict[str, Any]]]:
        """A gate whose limit follows the client's own past, and its twin; accuracy is that where all have it."""
        measure = {"name": gate.measure, **MEASURES[gate.measure]}
        table = {"name": "gate", "measure": measure, "quantile": 1 - gate.strength}
        accuracy, closed = self.federated([table])
        alone = self.silent_rounds(Gate(measure=measure, quantile=1 - gate.strength))
        sent = {name: np.where(alone, 0, leaks) for name, leaks in self.open_rounds.items()}
        yield self._leak_rows(gate, alone.mean(), accuracy, _over_rounds(sent))
        settings = {"name": "gate_study:AtRandom", "action": "withhold", "rates": [float(closed.mean())] * ROUNDS}
        accuracy, _ = self.federated([settings])
        yield self._leak_rows(twin, closed.mean(), accuracy, _over_rounds(self.open_rounds, silent=float(alone.mean())))

    def silent_rounds(self, gate: Gate) -> NDArray[np.bool_]:
        """In which rounds a client would be silent that alone has `gate`, `round client`."""
        values = self.values
        of = values[(values["measure"] == gate._measure_name) & (values["quantity"] == gate._quantity_name)]
        by_round = of.pivot(index="round", columns="client", values="value").astype(float)
        closed = np.zeros((ROUNDS, CLIENTS), dtype=bool)
        for client in range(CLIENTS):
            memory: Memory = {}
            for place, value in enumerate(by_round[client]):
                closed[place, client] = bool(gate._is_past_limit(torch.tensor([value], dtype=torch.float64), memory))
        return closed

    @cached_property
    def values(self) -> pd.DataFrame:
        """What clients measure in each round where nothing defends."""
        measures = [{"name": name, **settings} for name, settings in MEASURES.items()]
        with tempfile.TemporaryDirectory() as folder:
            return fedsim.run(self.tables([]) | {"measure": measures}, out=Path(folder) / "run").exposure

    @cached_property
    def open_rounds(self) -> dict[str, Numbers]:
        """By attack, what leaks in each round where nothing defends, `round client`."""
        return self.leaks([], rounds=ROUNDS)

    def _dropping(self, *cells: Cell) -> Iterator[list[dict[str, Any]]]:
        """A gate that leaves examples out, and its twin, which all measures share."""
        for cell in cells:
            if cell.key in self._done:
                continue
            name = "gate" if cell.measure else "gate_study:AtRandom"
            table = {"name": name, "action": cell.action, "fraction": cell.strength}
            if cell.measure:
                table["measure"] = {"name": cell.measure, **MEASURES[cell.measure]}
            accuracy, _ = self.federated([table])
            self._done.add(cell.key)
            yield self._leak_rows(cell, cell.strength, accuracy, _first(self.leaks([table])))

    @property
    def plain(self) -> dict[str, Numbers]:
        """What leaks of each client by each attack where nothing defends."""
        return self._leaks_of("plain")

    @property
    def noisy(self) -> dict[str, Numbers]:
        """The same where each gate closes and adds noise."""
        return self._leaks_of("noisy")

    @cache  # noqa: B019
    def _leaks_of(self, which: str) -> dict[str, Numbers]:
        gate = {"name": "gate", "measure": "gradient-norm", "above": 0.0, "action": "noise", "noise": NOISE}
        return _first(self.leaks([] if which == "plain" else [gate]))

    @cache  # noqa: B019
    def limit(self, measure: str, strength: float) -> tuple[str, float]:
        """By which setting and at which value a gate closes for that share of the clients in round 1."""
        with tempfile.TemporaryDirectory() as folder:
            tables = self.tables([], rounds=1) | {"measure": [{"name": measure, **MEASURES[measure]}]}
            exposure = fedsim.run(tables, out=Path(folder) / "run").exposure
        quantity = exposure["quantity"].iloc[0]
        chosen = exposure[exposure["quantity"] == quantity]
        values = np.sort(chosen["value"].to_numpy(dtype=float))
        more = chosen["larger_means"].iloc[0] == "more"
        place = round(CLIENTS * (1 - strength if more else strength))
        return "above" if more else "below", float(values[place - 1 : place + 1].mean())

    def tables(self, defense: list[dict[str, Any]], *, rounds: int = ROUNDS, recorded: int = 1) -> dict[str, Any]:
        """An experiment that records its first rounds."""
        return {
            "data": {"name": "mnist"},
            "partition": {"name": "iid", "samples_per_client": 8},
            "model": {"name": "mlp", "hidden": [100]},
            "training": {"local_epochs": 1, "batch_size": 4, "learning_rate": 0.1},
            "federation": {
                "engine": "serial",
                "clients": CLIENTS,
                "rounds": rounds,
                "seed": self.seed,
                "evaluate_every": rounds,
                "vectorise": False,
            },
            "recording": {"rounds": list(range(1, recorded + 1))},
            "adversary": {"when": "never"},
            "defense": defense,
        }

    def federated(self, defense: list[dict[str, Any]]) -> tuple[float, NDArray[np.bool_]]:
        """Accuracy after the last round, and `round client`, where gates closed."""
        closed: list[bool] = []
        decide = Gate._is_past_limit

        def watched(gate: Gate, values: Tensor, memory: Memory) -> Tensor:
            found = decide(gate, values, memory)
            if len(values) == 1:
                closed.append(bool(found))
            return found

        with tempfile.TemporaryDirectory() as folder, patch.object(Gate, "_is_past_limit", watched):
            metrics = fedsim.run(self.tables(defense), out=Path(folder) / "run").metrics
        tried = len(closed) % CLIENTS  # before the first round
        accuracy = float(metrics[metrics["client"] == "server"]["accuracy"].dropna().iloc[-1])
        return accuracy, np.array(closed[tried:]).reshape(-1, CLIENTS)

    def leaks(self, defense: list[dict[str, Any]], *, rounds: int = 1) -> dict[str, Numbers]:
        """By attack, what leaks of each client in the first rounds, `round client`, in dB."""
        with tempfile.TemporaryDirectory() as folder, without_slow_metrics():
            run = fedsim.run(self.tables(defense, rounds=rounds, recorded=rounds), out=Path(folder) / "run")
            adversary = {"victims": "all", "rounds": list(range(1, rounds + 1)), "workers": 1}
            spec = validate_tables(AttackFile, {"adversary": adversary, "attack": ATTACKS}, "gate")
            audit = open_audit(run.path, spec, trust=True)  # `AtRandom` is code that the run folder names
            if failures := audit.run():
                raise RuntimeError("; ".join(failures))
            scored = audit.score()
            every = pd.read_csv(audit.folder.images)
        each = every[every["metric"] == "psnr"].groupby(["attack", "round", "victim"])["value"]
        found = {name: np.zeros((rounds, CLIENTS)) for name in ("sme", "ig")}
        for row in scored:
            if row["metric"] == "psnr":
                number, client = int(row["round"]), int(row["victim"])
                values = each.get_group((row["attack"], number, client)).to_numpy(dtype=float)
                assert len(values) == 8
                found[row["attack"]][number - 1, client] = np.maximum(values - row["floor"], 0).mean()
        return found

    def _leak_rows(
        self, cell: Cell, closed: float, accuracy: float, leaks: Mapping[str, Numbers]
    ) -> list[dict[str, Any]]:
        about = {"seed": self.seed, **vars(cell), "closed": round(float(closed), 4), "accuracy": round(accuracy, 4)}
        return [
            {**about, "attack": attack, "client": client, "leak": round(float(value), 4)}
            for attack, leak in leaks.items()
            for client, value in enumerate(leak)
        ]


def main() -> None:
    """Do what is not done yet, or show what is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDSIM_DATA"))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--actions", nargs="*", choices=ACTIONS, default=ACTIONS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if chosen.table:
        print(table(read(chosen.out)))
        return
    torch.set_num_threads(1)
    os.environ["FEDSIM_DATA"] = str(chosen.data_dir)
    for seed in chosen.seeds:
        done = [row for row in read(chosen.out) if row["seed"] == str(seed)]
        for rows in Study(seed, done, chosen.actions).rows():
            write(chosen.out, rows)
            print(rows[0]["action"], rows[0]["measure"], rows[0]["strength"], rows[0]["arm"], rows[0]["closed"],
                  rows[0]["accuracy"], flush=True)  # fmt: skip


def _first(leaks: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Those of round 1, `client`."""
    return {name: of[0] for name, of in leaks.items()}


def _over_rounds(leaks: Mapping[str, Numbers], *, silent: float = 0.0) -> dict[str, Numbers]:
    """The mean over rounds and the most of any, `client`; on average, if silence has that probability."""
    found = {name: (1 - silent) * of.mean(0) for name, of in leaks.items()}
    for name, of in leaks.items():
        first = (1 - silent) * silent ** np.arange(len(of))  # that the round that leaks k-th most is the first one sent
        found[f"{name}{MOST}"] = first @ -np.sort(-of, axis=0)
    return found


def read(path: Path) -> list[dict[str, str]]:
    """All rows of earlier runs."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Row]) -> None:
    """Add rows."""
    new = not path.exists()
    path.parent.mkdir(exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def table(rows: Sequence[Row]) -> str:
    """What each gate leaks, and how much less that is than at random, with 95 % intervals over clients and seeds."""
    lines = [
        "| action | measure | strength | clients | closed | accuracy (random) | SME (random) | difference | "
        "IG (random) | difference |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for action in ("", *ACTIONS):
        same = [row for row in rows if row["action"] == action]
        lines += _lines(same, action or "none")
        if action == BY_QUANTILE:
            lines += _lines(same, f"{action}, most", MOST)
    return "\n".join(lines)


def _lines(rows: Sequence[Row], title: str, suffix: str = "") -> Iterator[str]:
    """Of one action, by the attacks whose names end in `suffix`."""
    attacks = [f"{name}{suffix}" for name in ("sme", "ig")]
    if plain := [row for row in rows if row["arm"] == "none"]:
        sme, ig = (np.mean([float(row["leak"]) for row in plain if row["attack"] == name]) for name in attacks)
        about = f"{title} |{'' if title == 'none' else ' none'} | | {len({(r['seed'], r['client']) for r in plain})}"
        yield f"| {about} | 0 | {_mean(plain, 'accuracy'):.3f} | {sme:.2f} | | {ig:.2f} | |"
    for measure, strength in product(MEASURES, STRENGTHS):
        same = [row for row in rows if row["strength"] == str(strength)]
        gate = [row for row in same if row["arm"] == "gate" and row["measure"] == measure]
        twin = [row for row in same if row["arm"] == "random" and row["measure"] in ("", measure)]
        seeds = {row["seed"] for row in gate} & {row["seed"] for row in twin}
        gate, twin = ([row for row in rows if row["seed"] in seeds] for rows in (gate, twin))
        if seeds:
            told = " | ".join(_compared(gate, twin, attack) for attack in attacks)
            yield (
                f"| {title} | {measure} | {strength} | {len(seeds) * CLIENTS} | {_mean(gate, 'closed'):.2f} | "
                f"{_mean(gate, 'accuracy'):.3f} ({_mean(twin, 'accuracy'):.3f}) | {told} |"
            )


def _mean(rows: Sequence[Row], column: str) -> float:
    return float(np.mean([float(row[column]) for row in rows]))


def _compared(gate: Sequence[Row], twin: Sequence[Row], attack: str) -> str:
    one, other = (
        {(row["seed"], row["client"]): float(row["leak"]) for row in rows if row["attack"] == attack}
        for rows in (gate, twin)
    )
    apart = np.array([one[key] - other[key] for key in one])
    random = np.random.default_rng(0)
    means = apart[random.integers(len(apart), size=(RESAMPLED, len(apart)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    a, b = np.mean(list(one.values())), np.mean(list(other.values()))
    return f"{a:.2f} ({b:.2f}) | {apart.mean():+.2f} [{low:+.2f}, {high:+.2f}]"


if __name__ == "__main__":
    main()
