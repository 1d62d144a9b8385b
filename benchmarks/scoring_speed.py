"""What it costs to score what an attack claims of a victim: CPU seconds, and seconds on the device.

    python benchmarks/scoring_speed.py [--victims 4] [--count 50] [--device cpu] [--parts] [--out FILE.json]

SME's CNN for images of 3 x 32 x 32 and 100 classes. Each victim trains for 20 epochs in batches of 10 at a rate of
.004 on smooth random images; its claims are these images with noise, and the public images are like them. Scores that
findings share are computed once a victim, as in an audit. `--parts` says where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time

import torch
from measuring import Row, make_parser, publish_rows
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate

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

    def __init__(self, client: int, count: int, device: torch.device) -> None:
        rng = generator("victim", client)
        self.truth = Truth(data=draw_images(count, rng), labels=torch.randint(100, (count,), generator=rng))
        with seed_globals("scoring speed"):
            model = SmeCnn(channels=(64, 128), hidden=200).build(TASK)
        before, low = copy_state(model), VALUE_RANGE[0].reshape(-1, 1, 1)
        inputs = low - 2 * low * self.truth.data
        after, _ = local_update(model, before, inputs, self.truth.labels, SETTINGS, key=(client,))
        update = weights_update(before, after, count, client)
        self.message = AttackedUpdate(
            model=model, loss=cross_entropy, update=update, value_range=VALUE_RANGE, settings=SETTINGS, device=device
        )
        noise = torch.randn(self.truth.data.shape, generator=rng)
        claims = (self.truth.data + NOISE * noise).clamp(0, 1)
        self.finding = Reconstruction(data=claims, labels=self.truth.labels)

    def score(self, public: PublicExamples, cache: MeasurementCache) -> dict[str, tuple[float, float]]:
        """Return value and floor of each metric."""
        rng = generator("guesses", self.message.update.client)
        with use_one_thread():
            scores = score_examples(
                self.finding, self.truth, public=public, rng=rng, message=self.message, labels_granted=True, cache=cache
            )
        return {score.metric: (score.value, score.floor) for score in scores}


def score_victims(options: argparse.Namespace) -> list[Row]:
    """Score one victim after the other; the first one is not counted."""
    rng, device = generator("public"), torch.device(options.device)
    public = PublicExamples(data=draw_images(PUBLIC, rng), labels=torch.arange(PUBLIC) % 100)
    cache, rows, profile = MeasurementCache(), list[Row](), cProfile.Profile(time.process_time)
    for client in range(options.victims + 1):
        victim = Victim(client, options.count, device)
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
    if options.parts:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(70)
    return rows


def main() -> None:
    """Score victims and print what each one took."""
    parser = make_parser(__doc__)
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--count", type=int, default=50, help="examples of a victim")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", action="store_true", help="profile the functions, to the standard error output")
    options = parser.parse_args()
    keep_freed_memory()  # as the commands do
    torch.set_num_threads(1)
    publish_rows(score_victims(options), options.out)


if __name__ == "__main__":
    main()
