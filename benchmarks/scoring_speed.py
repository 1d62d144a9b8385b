"""What it costs to score what an attack claims of a victim: CPU seconds, and seconds on the device.

    python benchmarks/scoring_speed.py [--victims 4] [--count 50] [--device cpu] [--parts] [--out FILE.json]
    python benchmarks/scoring_speed.py --exact --victims 20 --count 10
    python benchmarks/scoring_speed.py --device meta --victims 2 --count 10

SME's CNN for images of 3 x 32 x 32 and 100 classes. Each victim trains for 20 epochs in batches of 10 at a rate of
.004 on smooth random images; its claims are these images with noise, and the public images are like them. Scores that
findings share are computed once a victim, as in an audit. `--parts` says where the time goes. `--exact` also searches
the line of each guess exactly, and tells by how much the floor is above the least value that this finds.

Without an accelerator, `--device meta` counts: how many kernels start on one, and how often the CPU waits for it. The
accelerator is that of the tests, which computes on the CPU.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from batched_victims import OperationCount
from measuring import Row, make_parser, publish_rows
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate
from torch.utils._pytree import tree_leaves

from fedsim.audit.evaluation import scoring
from fedsim.audit.evaluation.guess_similarities import measure_guess_similarities
from fedsim.audit.evaluation.measurement_cache import MeasurementCache
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.randomness import generator, seed_globals, use_one_thread
from fedsim.base.task import Task
from fedsim.cli.allocator import keep_freed_memory
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.modality import PublicExamples
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.sme import SmeCnn
from fedsim.training.settings import LocalTraining
from studies.messages import weights_update
from tests.devices.conftest import Accelerator

TASK, PUBLIC = Task((3, 32, 32), 100), 2000
SETTINGS = LocalTraining(local_epochs=20, batch_size=10, learning_rate=0.004)
VALUE_RANGE = torch.full((3,), -2.0), torch.full((3,), 2.0)
NOISE = 0.1
"""Standard deviation of what claims are off by."""


def draw_images(count: int, rng: torch.Generator) -> Tensor:
    """Draw smooth images in [0, 1]."""
    return interpolate(torch.rand((count, 3, 6, 6), generator=rng), size=(32, 32), mode="bicubic").clamp(0, 1)


class Victim:
    """A client, its update, and what an attack claims of it."""

    def __init__(self, client: int, count: int) -> None:
        rng = generator("victim", client)
        self.truth = Truth(data=draw_images(count, rng), labels=torch.randint(100, (count,), generator=rng))
        with seed_globals("scoring speed"):
            model = SmeCnn(channels=(64, 128), hidden=200).build(TASK)
        before, low = copy_state(model), VALUE_RANGE[0].reshape(-1, 1, 1)
        inputs = low - 2 * low * self.truth.data
        after, _ = local_update(model, before, inputs, self.truth.labels, SETTINGS, key=(client,))
        update = weights_update(before, after, count, client)
        self.message = AttackedUpdate(
            model=model, loss=cross_entropy, update=update, value_range=VALUE_RANGE, settings=SETTINGS
        )
        noise = torch.randn(self.truth.data.shape, generator=rng)
        claims = (self.truth.data + NOISE * noise).clamp(0, 1)
        self.finding = Reconstruction(data=claims, labels=self.truth.labels)

    def move(self, device: torch.device) -> None:
        """Have scores computed on a device."""
        self.message = replace(self.message, device=device)

    def score(self, public: PublicExamples, cache: MeasurementCache) -> dict[str, tuple[float, float]]:
        """Return value and floor of each metric."""
        rng = generator("guesses", self.message.update.client)
        with use_one_thread():
            scores = score_examples(
                self.finding,
                self.truth,
                public=public,
                rng=rng,
                message=self.message,
                labels_granted=True,
                cache=cache,
                device=self.message.device,
            )
        return {score.metric: (score.value, score.floor) for score in scores}

    def search_exactly(self, public: PublicExamples) -> float:
        """Return the least similarity on the line of all guesses, each of which is searched exactly."""
        sent, values = self.message, []

        def search_guesses(message: AttackedUpdate, guesses: Any, labels: Tensor, cache: MeasurementCache) -> Any:
            for guess in guesses.values():
                at_broadcast = sent.similarity_at_broadcast(guess, labels)
                values.append(sent.similarity_on_line(guess, labels, at_broadcast))
            return measure_guess_similarities(message, guesses, labels, cache)

        with patch.object(scoring, "measure_guess_similarities", search_guesses):
            self.score(public, MeasurementCache())
        return min(values)


class DeviceCount(OperationCount):
    """Count of the kernels that start on the accelerator of the tests."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; count it if a tensor of it is on the accelerator."""
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class WaitCount(Accelerator):
    """The accelerator of the tests, which counts how often the CPU waits for it."""

    waits = 0

    def note(self) -> None:
        """See `Accelerator`."""
        self.waits += 1


def score_victims(options: argparse.Namespace) -> list[Row]:
    """Score one victim after the other; the first one is not counted."""
    rng, device = generator("public"), torch.device(options.device)
    public = PublicExamples(data=draw_images(PUBLIC, rng), labels=torch.arange(PUBLIC) % 100)
    cache, rows, profile = MeasurementCache(), list[Row](), cProfile.Profile(time.process_time)
    for client in range(options.victims + 1):
        victim = Victim(client, options.count)
        victim.move(device)
        if options.parts and client:
            profile.enable()
        started, started_cpu = time.perf_counter(), time.process_time()
        scores = victim.score(public, cache)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        profile.disable()
        similarities = {}
        for metric in ("l_sim", "l_sim_line"):
            similarities[metric], similarities[f"floor of {metric}"] = scores[metric]
        if client:
            rows.append({"victim": client, "CPU s": cpu_seconds, "s": seconds, **similarities})
            if options.exact:
                rows[-1]["floor above exact"] = scores["l_sim_line"][1] - victim.search_exactly(public)
    if options.parts:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(70)
    return rows


def count_operations(options: argparse.Namespace) -> list[Row]:
    """Score one victim after the other on the accelerator of the tests; the first one is not counted."""
    rng = generator("public")
    public = PublicExamples(data=draw_images(PUBLIC, rng), labels=torch.arange(PUBLIC) % 100)
    cache, rows = MeasurementCache(), list[Row]()
    for client in range(options.victims + 1):
        victim = Victim(client, options.count)
        accelerator = WaitCount()
        with accelerator, DeviceCount() as operations:
            victim.move(accelerator.device)
            victim.score(public, cache)
        if client:
            rows.append({"victim": client, "kernels": operations.kernels, "waits": accelerator.waits})
    return rows


def main() -> None:
    """Score victims and print what each one took."""
    parser = make_parser(__doc__)
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--count", type=int, default=50, help="examples of a victim")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--exact", action="store_true", help="compare floors with exact searches of all guesses")
    parser.add_argument("--parts", action="store_true", help="profile the functions, to the standard error output")
    options = parser.parse_args()
    keep_freed_memory()  # as the commands do
    torch.set_num_threads(1)
    rows = count_operations(options) if options.device == "meta" else score_victims(options)
    publish_rows(rows, options.out)


if __name__ == "__main__":
    main()
