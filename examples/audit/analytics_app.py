"""Audit an app of federated analytics, which trains nothing: python analytics_app.py [SETTING ...]

Twelve people count the digits that they wrote and add up their ink. Their answers go to the server in clear or, over
cohorts that change from round to round, as secure sums; some have one digit more in each round. The attack solves for
what each of them answered, and prints, for each setting, how many numbers it has exactly, beside a guess and what the
cohorts leave open.
"""

import logging
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedsim
from fedsim.data.handwriting import Handwriting
from fedsim.federation.privacy_tables import SecureAggregationTable
from strategies.secure_sum_grid import SecureSumGrid

CLIENTS = 12
SUMS = SecureAggregationTable(clip=8192.0, bits=22)
DIGITS = Handwriting().load(None).train
LABELS, WRITERS = DIGITS.labels.numpy(), DIGITS.groups.numpy()
INK = (DIGITS.inputs(slice(None)).reshape(len(LABELS), -1) > 0).sum(1).numpy()


@dataclass(frozen=True)
class Setting:
    """How the server asks, and how clients answer.

    Attributes:
        cohort: clients asked in each round, drawn anew.
        rounds: number of rounds.
        secure: whether the server sees sums alone.
        growing: whether each client has one digit more in each round.
        defense: what clients do to their answers.
        told: settings of the attack.
    """

    cohort: int = CLIENTS
    rounds: int = 4
    secure: bool = True
    growing: bool = False
    defense: fedsim.AnswerDefense | None = None
    told: dict[str, float] = field(default_factory=dict)


LAPLACE = fedsim.AnswerDefense(noise="laplace", scale=1.0)
SETTINGS = {
    "in clear, one digit more each round": Setting(secure=False, growing=True),
    "sums over all": Setting(),
    "sums over 8 of 12, 6 rounds": Setting(8, 6),
    "sums over 8 of 12, 20 rounds": Setting(8, 20),
    "sums over 8 of 12, 40 rounds": Setting(8, 40),
    "20 rounds, one digit more each round": Setting(8, 20, growing=True),
    "20 rounds, Laplace noise, told": Setting(8, 20, defense=LAPLACE, told={"noise": LAPLACE.standard_deviation}),
    "20 rounds, Laplace noise, not told": Setting(8, 20, defense=LAPLACE),
    "20 rounds, cells below 5 as 0, told": Setting(
        8, 20, defense=fedsim.AnswerDefense(smallest_cell=5.0), told={"smallest_cell": 5.0}
    ),
    "20 rounds, rounded to 5, told": Setting(
        8, 20, defense=fedsim.AnswerDefense(rounded_to=5.0), told={"rounded_to": 5.0}
    ),
}


def answer(client, number, growing):
    """What a client would answer in a round, and what its last digit adds to that."""
    mine = np.flatnonzero(np.unique(WRITERS)[client] == WRITERS)[: 40 + number * growing]

    def count(chosen):
        digits = np.bincount(LABELS[chosen], minlength=10).astype(np.float32)
        return {"digits": digits, "ink": np.array([INK[chosen].sum()], np.float32)}

    return count(mine), count(mine[-1:]), len(mine)


def make_app(setting):
    mods = [fedsim.partition_mod]
    if setting.defense is not None:
        mods.append(fedsim.answer_mod(setting.defense, np.random.default_rng(0)))
    app = ClientApp(mods=mods)

    def reply(message, context):
        number = message.content["config"]["server-round"]
        arrays, _, count = answer(context.node_config["partition-id"], number, setting.growing)
        # Under secure sums all weigh the same, so that the sum is that of the answers.
        metrics = MetricRecord({"num-examples": 1 if setting.secure else count})
        record = ArrayRecord({name: Array(values) for name, values in arrays.items()})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    app.train()(reply)
    app.query()(reply)
    return app


def record(setting, folder):
    """Ask the cohorts of all rounds; return what each client would have answered, and who joined."""
    clients = fedsim.InProcessGrid(make_app(setting), CLIENTS)
    partitions, rng = clients.partitions, np.random.default_rng(1)
    wire = SecureSumGrid(clients, SUMS, 0, partitions) if setting.secure else clients
    grid = fedsim.CuriousGrid(wire, folder, partitions=partitions)
    nothing = ArrayRecord({"digits": Array(np.zeros(10, np.float32)), "ink": Array(np.zeros(1, np.float32))})
    answers = {client: {} for client in range(CLIENTS)}
    people = {client: {} for client in range(CLIENTS)}
    for number in range(1, setting.rounds + 1):
        chosen = rng.choice(sorted(partitions), setting.cohort, replace=False).tolist()
        config = ConfigRecord({"server-round": number})
        content = RecordDict({"arrays": nothing, "config": config})
        list(grid.send_and_receive([Message(content, node, "train") for node in chosen]))
        for client in (partitions[node] for node in chosen):
            answers[client][number], people[client][number], _ = answer(client, number, setting.growing)
    return answers, people


def audit(setting, folder):
    """Return the scores of the attack on all clients."""
    answers, people = record(setting, folder / "recording")
    truth = fedsim.write_answers(folder / "truth", answers, people if setting.growing else None)
    table = "\n".join(f'{client} = "{path}"' for client, path in truth.items())
    (folder / "attack.toml").write_text(
        f'[adversary]\nrounds = "all"\n\n[adversary.knowledge]\nmodel = false\n\n'
        f'[[attack]]\nname = "differencing"\n\n[truth]\n{table}\n'
    )
    run = fedsim.open(folder / "recording", file=folder / "attack.toml")
    for client in range(CLIENTS):
        run.attack("differencing", victim=client, **setting.told)
    return run.scores


def main():
    logging.disable(logging.WARNING)
    titles = "setting", "exact", "guess", "ceiling", "error", "guess", "who joined", "wrong among sure"
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for name in sys.argv[1:] or SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            means = audit(SETTINGS[name], Path(folder)).groupby("metric")[["value", "floor", "ceiling"]].mean()
        exact, error = means.loc["answers_exact"], means.loc["answers_error"]
        joined = f"{means.loc['people_exact', 'value']:.3f}" if "people_exact" in means.index else "-"
        false_share = f"{means.loc['false_certificates', 'value']:.3f}" if "false_certificates" in means.index else "-"
        cells = [exact.value, exact.floor, exact.ceiling, error.value, error.floor]
        print(f"| {name} | {' | '.join(f'{cell:.3f}' for cell in cells)} | {joined} | {false_share} |", flush=True)


if __name__ == "__main__":
    main()
