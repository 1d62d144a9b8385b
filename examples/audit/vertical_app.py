"""Audit a table held in halves: python vertical_app.py [GRADIENT_NOISE [EMBEDDING_NOISE]]

Two parties hold columns of the same people (UCI Adult where FEDSIM_DATA has it, else a table that is made here), and a
third one, the server, whether they earn much. First party 0 infers that from gradients of its embeddings. Then the
server claims columns of party 0 from the embeddings that it gets: knowing the weights that it sent in the first round,
and knowing 200 of 3000 people in full. Each is audited as the app of two numbers of noise, both 0 by default.
"""

import sys
import tempfile
from pathlib import Path

import torch
from flwr.app import ArrayRecord
from torch import nn

import fedsim
from clients.feature_party import make_feature_party
from fedsim.base.randomness import generator, seed_globals
from fedsim.data.tables import Adult
from fedsim.federation.data_folder import find_data_folder
from fedsim.federation.engines.serial import InProcessGrid
from strategies.split_learning import SplitLearning

ROWS, PUBLIC, UNITS, SEED = 3000, 1000, 16, 1
NOISE = [float(argument) for argument in sys.argv[1:3]] + [0.0] * (3 - len(sys.argv))


def load_table():
    """Rows, labels and the number of features of each column."""
    folder = find_data_folder()
    if folder is not None and (folder / "adult").is_dir():
        data = Adult(max_examples=ROWS + PUBLIC).load(folder)
        return data.train.inputs(), data.train.labels, [column.width for column in data.columns]
    numbers = torch.rand(ROWS + PUBLIC, 3, generator=generator(SEED, "numbers"))
    categories = torch.randint(0, 4, (ROWS + PUBLIC, 3), generator=generator(SEED, "categories"))
    inputs = torch.cat([numbers, torch.eye(4)[categories].flatten(1)], 1)
    return inputs, (numbers.sum(1) + 0.5 * categories[:, 0] > 2.8).long(), [1, 1, 1, 4, 4, 4]


INPUTS, LABELS, COLUMNS = load_table()
IDS = 1000 + 7 * torch.arange(ROWS)  # of people, which all parties know
HALVES = COLUMNS[: len(COLUMNS) // 2], COLUMNS[len(COLUMNS) // 2 :]


def load_rows(party, rows=slice(0, ROWS)):
    """The ids of people, and their columns that a party holds."""
    return IDS, torch.split(INPUTS, [sum(half) for half in HALVES], 1)[party][rows]


def build_bottom(party=0):
    with seed_globals(SEED, "bottom", party):
        return nn.Sequential(nn.Linear(sum(HALVES[party]), 32), nn.ReLU(), nn.Linear(32, UNITS))


ATTACKS = f"""
[adversary]
who = "{{who}}"
rounds = "all"
victims = [0]

[adversary.knowledge]
model = "vertical_app:build_bottom"
input_shape = [{sum(HALVES[0])}]
columns = {HALVES[0]}
value_range = [0.0, 1.0]
num_classes = 2
known_rows = 200

{{attacks}}

[truth]
"""
WHO = {"feature-party": ("label-norm", "label-direction"), "server": ("embedding-inversion", "embedding-regression")}


if __name__ == "__main__":
    with seed_globals(SEED, "head"):
        head = nn.Sequential(nn.Linear(2 * UNITS, 32), nn.ReLU(), nn.Linear(32, 2))
    strategy = SplitLearning(
        bottoms=[build_bottom(party) for party in range(2)],
        head=head,
        labels=dict(zip(IDS.tolist(), LABELS[:ROWS].tolist(), strict=True)),
        batch_size=100,
        learning_rate=0.3,
        gradient_noise=NOISE[0],
        seed=SEED,
    )
    app = make_feature_party(build_bottom, load_rows, learning_rate=0.3, embedding_noise=NOISE[1], seed=SEED)
    with tempfile.TemporaryDirectory() as folder:
        recording, file = Path(folder) / "recording", Path(folder) / "attack.toml"
        fedsim.Curious(strategy, recording).start(InProcessGrid(app, 2), ArrayRecord(), num_rounds=60)
        truth = fedsim.write_truth(
            Path(folder) / "truth",
            lambda party: (load_rows(party)[1], LABELS[:ROWS]),
            [0],
            public=(load_rows(0, slice(ROWS, ROWS + PUBLIC))[1], LABELS[ROWS:]),
            rows=lambda party: IDS,
        )
        for who, names in WHO.items():
            attacks = "".join(f'[[attack]]\nname = "{name}"\n' for name in names)
            text = ATTACKS.format(who=who, attacks=attacks)
            file.write_text(text + "".join(f'{key} = "{path}"\n' for key, path in truth.items()))
            run = fedsim.open(recording, file=file)
            for name in names:
                run.attack(name, victim=0)
        print(run.scores[["attack", "metric", "value", "floor"]].to_string(index=False))
