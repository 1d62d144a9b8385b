"""What DAGER reads from one gradient of a transformer, by number and length of texts: Reuters R8.

`nice -n 10 python benchmarks/dager_study.py` runs what is not done yet, the cheapest first, on one core, for
`--minutes` at most, and keeps it in benchmarks/results/dager.csv; benchmarks/dager_tables.py shows it. Data come from
FEDSIM_DATA.

One client sends the gradient of `b` texts of `length` words at most (FedSGD) of a network with fresh weights, or after
`STEPS` steps of Adam on other texts. The width is the smallest of `WIDTHS` that is more than b x length + 8, or the
largest. Floors are those of the evaluator, from the test texts. Batches are measured up to `MOST` words.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from resumed import go_on
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.text.dager import Dager
from adversaries.text.lamp import Lamp
from adversaries.text.tag import Tag
from adversaries.text.texts import TextInvertingGradients
from fedsim.audit.evaluation import text_metrics
from fedsim.audit.evaluation.score import PublicExamples
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, seed_globals
from fedsim.data import Dataset
from fedsim.data.reuters import ReutersR8
from fedsim.federation.build import find_data_folder
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.findings import Texts
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.models.transformer import TransformerDecoder, TransformerEncoder

RESULTS = Path(__file__).parent / "results" / "dager.csv"
NETWORKS: dict[str, Callable[..., Any]] = {
    "encoder": TransformerEncoder,
    "decoder": TransformerDecoder,
    "decoder-lora": partial(TransformerDecoder, lora_rank=32),
}
SIZES, LENGTHS, WIDTHS, SEEDS = (1, 2, 4, 8, 16), (8, 16, 32), (128, 256, 512), range(1, 11)
FEW = 5
"""Batches of those that match gradients, which take longer."""
STEPS, BATCH = 100, 16
MOST = 256
"""Most words of a batch that is measured."""
ATTACKS: dict[str, Attack] = {
    "dager": Dager(attempts=2),
    "inverting-gradients-text": TextInvertingGradients(iterations=300, step_size=0.1),
    "tag": Tag(iterations=300),
    "lamp": Lamp(iterations=300, candidates=50, tries=10),
}
"""Beside `dager` those that match gradients, with fewer steps than their papers take."""
METRICS = ("exact", "floor", "rouge_1", "rouge_2", "labels")


@dataclass(frozen=True)
class Cell:
    """One setting."""

    attack: str
    network: str
    weights: str
    size: int
    length: int
    seed: int

    @property
    def words(self) -> int:
        """Of all texts, at most."""
        return self.size * self.length

    @property
    def cost(self) -> tuple[int, bool, bool]:
        """What is measured first: few words, and of these decoders, then baselines."""
        return self.words, self.network == "encoder", self.attack != "dager"


def cells() -> Iterator[Cell]:
    """All of them, the cheapest first."""
    yield from sorted(every_cell(), key=lambda cell: cell.cost)


def every_cell() -> Iterator[Cell]:
    """In any order."""
    for seed, size, length in product(SEEDS, SIZES, LENGTHS):
        for network, weights in product(NETWORKS, ("fresh", "trained")):
            if size * length <= MOST and (network != "decoder-lora" or (size == 4 and length < LENGTHS[-1])):
                yield Cell("dager", network, weights, size, length, seed)
        if length == LENGTHS[0] and size in (1, 4) and seed <= FEW:
            for attack, network in product(list(ATTACKS)[1:], ("encoder", "decoder")):
                yield Cell(attack, network, "fresh", size, length, seed)


@cache
def texts(length: int) -> Dataset:
    """Reuters R8."""
    if (folder := find_data_folder()) is None:
        raise SystemExit("FEDSIM_DATA is not set; point it at the folder with the data sets")
    return ReutersR8(length=length).load(folder)


@cache
def network(name: str, weights: str, length: int, dim: int, seed: int) -> nn.Module:
    """One whose weights depend on these alone."""
    data = texts(length)
    with seed_globals("dager", seed):
        model = NETWORKS[name](dim=dim).build(data.task)
    if weights == "trained":
        optimizer, rng = torch.optim.Adam(model.parameters(), 1e-3), generator("dager", seed, "train")
        for _ in range(STEPS):
            index = order(data, seed)[torch.randint(SIZES[-1], len(data.train), (BATCH,), generator=rng)]
            optimizer.zero_grad()
            cross_entropy(model(data.train.inputs(index)), data.train.labels[index]).backward()
            optimizer.step()
    return model.eval()


def order(data: Dataset, seed: int) -> Tensor:
    """Of the training texts: the first ones are the client's, the others train the network."""
    return torch.randperm(len(data.train), generator=generator("dager", seed, "who"))


def measure_cell(cell: Cell) -> dict[str, Any]:
    """A row."""
    data = texts(cell.length)
    dim = next((width for width in WIDTHS if width > cell.words + 8), WIDTHS[-1])
    model = network(cell.network, cell.weights, cell.length, dim, cell.seed)
    mine = order(data, cell.seed)[: cell.size]
    tokens, labels = data.train.inputs(mine), data.train.labels[mine]
    slopes = torch.autograd.grad(cross_entropy(model(tokens), labels), list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradient = Payload.from_dense(dict(zip(names, slopes, strict=True)), "gradient")
    known = Knowledge(
        model=lambda: model,
        loss=cross_entropy,
        input_shape=(cell.length,),
        num_classes=8,
        learning_rate=1.0,
        local_epochs=1,
        batch_size=cell.size,
    )
    attack = ATTACKS[cell.attack]
    row: dict[str, Any] = dict(zip(Cell.__dataclass_fields__, astuple(cell), strict=True)) | {"dim": dim}
    with tempfile.TemporaryDirectory() as folder:
        update = Update(round=1, client=0, before=before, payload=gradient, num_examples=cell.size)
        Recorder(Path(folder) / "transcript").write(1, [update])
        started = time.process_time()
        try:
            found = attack.run(
                Target(
                    transcript=Transcript(Path(folder) / "transcript"),
                    victim=0,
                    knowledge=known,
                    rng=generator(cell.seed),
                )
            )
        except AttackError as error:
            print(error)
            return row | {"refused": 1, "seconds": round(time.process_time() - started, 2)}
        seconds = time.process_time() - started
    assert isinstance(found, Texts)
    truth = Truth(data=tokens, labels=labels, padding=data.padding)
    public = PublicExamples(data=data.test.inputs(), labels=data.test.labels)
    scores = {s.metric: s for s in score_examples(found, truth, public=public, rng=generator(0))}
    paired = text_metrics.pair_texts(found.tokens, tokens, data.padding)
    row |= {"refused": 0, "exact": scores["recovered"].value, "floor": scores["recovered"].floor}
    row |= {f"rouge_{n}": float(text_metrics.rouge(paired, tokens, data.padding, n).mean()) for n in (1, 2)}
    row["labels"] = scores["label_accuracy"].value
    return row | {"seconds": round(seconds, 2)}


def main() -> None:
    """Run what is not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    columns = [*Cell.__dataclass_fields__, "dim", "refused", *METRICS, "seconds"]
    go_on(cells(), measure_cell, chosen.out, columns, chosen.minutes, rounded=lambda value: round(value, 4))


if __name__ == "__main__":
    main()
