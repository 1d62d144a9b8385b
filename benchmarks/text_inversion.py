"""TGIAs-RO on texts beside the paper's Table X: Reuters R8, TextCNN, recover rate.

    python benchmarks/text_inversion.py                            # all cells of the table
    python benchmarks/text_inversion.py --kernels 3 --sizes 8 --gradients 10 --seeds 3

Prints one row a cell: the mean over seeds of the recover rate (right words in the right places), of the tokens found
(wherever they stand), and of the words found (which words occur at all), in percent, and CPU seconds a text batch. Data
come from FEDSIM_DATA. The victim holds `b` texts of `--length` words at least; each round it sends the gradient of
them, and the server takes a step of `--rate` along the mean of that and of other clients' gradients; with `--every 12`
eleven more along others' follow before its next. `--warm` steps are taken before the first gradient. Labels are
granted, and words outside the vocabulary are one word. The paper's rates are multiples of 1 / (32 b), so each seems to
be that of one mini-batch of texts of 32 words, though the table's caption says 30.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.text.texts import EmbeddingRows, TemporalTextInversion
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.randomness import generator, seed_globals
from fedsim.data.reuters import ReutersR8
from fedsim.federation.build import find_data_folder
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.findings import Texts
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.models.text_cnn import TextCnn


class Federation:
    """Texts without padding, and networks for them."""

    def __init__(self, options: argparse.Namespace) -> None:
        if (folder := find_data_folder()) is None:
            raise SystemExit("FEDSIM_DATA is not set; point it at the folder with the data sets")
        self.data = ReutersR8(length=options.length, vocabulary=options.vocabulary).load(folder)
        full = (self.data.train.raw != 0).all(1)
        self.texts, self.labels = self.data.train.inputs()[full], self.data.train.labels[full]
        self.options = options

    def model(self, kernels: tuple[int, ...], *key: int) -> nn.Module:
        """A network in evaluation mode whose weights depend on `key` alone."""
        o = self.options
        network = TextCnn(kernels=kernels, channels=o.channels, dimension=o.dimension, pool=o.pool)
        with seed_globals("model", *key):
            model = network.build(self.data.task).eval()
            for name, p in model.named_parameters():
                if o.spread and "embedding" not in name:
                    nn.init.uniform_(p, -o.spread, o.spread)
            return model

    def gradient(self, model: nn.Module, index: Tensor) -> dict[str, Tensor]:
        """Of the mean loss over these texts."""
        loss = cross_entropy(model(self.texts[index]), self.labels[index])
        names, parameters = zip(*model.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    def step(self, model: nn.Module, index: Tensor) -> None:
        """What the server does with the mean gradient over these texts."""
        slopes = self.gradient(model, index)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(self.options.rate * slopes[name])

    def record(self, folder: Path, kernels: tuple[int, ...], size: int, count: int, seed: int) -> Tensor:
        """Write `count` gradients of one mini-batch; returns which texts are in it."""
        rng = generator(seed, "who")
        order = torch.randperm(len(self.texts), generator=rng)
        mine, others = order[:size], order[size:]
        recorder, model = Recorder(folder / "transcript"), self.model(kernels, seed)
        for _ in range(self.options.warm):
            self.step(model, others[torch.randint(0, len(others), (size * self.options.clients,), generator=rng)])
        for number in range(1, count + 1):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            gradient = self.gradient(model, mine)
            update = Update(
                round=number,
                client=0,
                before=before,
                payload=Payload.from_dense(gradient, "gradient"),
                num_examples=size,
            )
            recorder.write(number, [update])
            for turn in range(self.options.every):
                crowd = size * (self.options.clients - (turn == 0))
                index = others[torch.randint(0, len(others), (crowd,), generator=rng)]
                self.step(model, torch.cat([mine, index]) if turn == 0 else index)
        return mine


def cell(federation: Federation, attack: Attack, kernels: tuple[int, ...], size: int, count: int, seed: int) -> Row:
    """Recover rate, tokens found, words found, CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        mine = federation.record(Path(folder), kernels, size, count, seed)
        started = time.process_time()
        finding = attack.run(
            Target(
                transcript=Transcript(Path(folder)),
                victim=0,
                knowledge=Knowledge(
                    model=lambda: federation.model(kernels, 0),
                    loss=cross_entropy,
                    input_shape=tuple(federation.texts.shape[1:]),
                    num_classes=federation.data.num_classes,
                    labels=federation.labels[mine].sort().values,
                ),
                rng=generator(seed, "attack"),
            )
        )
        seconds = time.process_time() - started
    assert isinstance(finding, Texts)
    truth = Truth(data=federation.texts[mine], labels=federation.labels[mine])
    scores = {
        s.metric: s.value for s in score_examples(finding, truth, public=None, rng=generator(0), labels_granted=True)
    }
    return scores["recover_rate"], scores["tokens_found"], scores["words_found"], seconds


Row = tuple[float, float, float, float]


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, nargs="+", action="append", help="one network; may be given again")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8], help="b")
    parser.add_argument("--gradients", type=int, nargs="+", default=[1, 5, 10], help="T")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--pool", type=int, default=2, help="of TextCNN; 0 pools over all places")
    parser.add_argument("--length", type=int, default=32, help="words of a text")
    parser.add_argument("--vocabulary", type=int, default=5000)
    parser.add_argument("--channels", type=int, default=100)
    parser.add_argument("--dimension", type=int, default=300)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--step-size", type=float, default=0.1)
    parser.add_argument("--optimizer", choices=["adam", "lbfgs"], default="adam")
    parser.add_argument("--distance", choices=["cosine", "l2"], default="cosine")
    parser.add_argument("--aggregation", default="mean")
    parser.add_argument("--layers", default="relative")
    parser.add_argument("--nearest", choices=["cosine", "euclidean"], default="cosine")
    parser.add_argument("--words", choices=["vocabulary", "touched"], default="vocabulary")
    parser.add_argument("--refinements", type=int, default=0)
    parser.add_argument("--rows", action="store_true", help="the embedding's rows alone, of one gradient")
    parser.add_argument("--spread", type=float, default=0.0, help="weights start uniformly in plus or minus this")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--warm", type=int, default=0, help="steps of training before the first gradient")
    parser.add_argument("--rate", type=float, default=0.01)
    options = parser.parse_args()
    torch.set_num_threads(1)
    federation = Federation(options)
    for kernels in map(tuple, options.kernels or [(3,), (3, 4, 5)]):
        for size in options.sizes:
            for count in [1] if options.rows else options.gradients:
                attack: Attack = EmbeddingRows() if options.rows else ours(options, count)
                seeds = range(options.first_seed, options.first_seed + options.seeds)
                rows = [cell(federation, attack, kernels, size, count, seed) for seed in seeds]
                rate, tokens, words, seconds = (statistics.fmean(column) for column in zip(*rows, strict=True))
                each = " ".join(f"{100 * row[0]:.1f}" for row in rows)
                found = f"tokens found {100 * tokens:5.1f}, words found {100 * words:5.1f}"
                name = f"{len(kernels)} blocks, T = {count:2}, b = {size}"
                print(f"{name}: recover rate {100 * rate:5.1f} [{each}], {found}, {seconds:.0f} s", flush=True)


def ours(options: argparse.Namespace, count: int) -> TemporalTextInversion:
    """The attack as it is measured."""
    return TemporalTextInversion(
        gradients=count,
        iterations=options.iterations,
        optimizer=options.optimizer,
        distance=options.distance,
        layers=options.layers,
        step_size=options.step_size,
        aggregation=options.aggregation,
        align=False,
        nearest=options.nearest,
        words=options.words,
        refinements=options.refinements,
    )


if __name__ == "__main__":
    main()
