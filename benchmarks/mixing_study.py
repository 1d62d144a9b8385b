"""What mixing leaves to an adversary: mixup and InstaHide, inverted by attacks that know them and by such that do not.

    FEDSIM_DATA=... python benchmarks/mixing_study.py [--data mnist] [--model mlp] [--victims 4] [--out table.csv]

Victims hold N images of different classes and send, in each round, the gradient of all of them at the same random
weights. One line a defense and N: mean PSNR in dB over all images of all victims, of the mean training image (the
floor), of the mixtures themselves, of `ig` without and with knowledge of the defense, and of `unmixing` with it after
1, 2, 4 and 8 rounds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
from torch import Tensor, nn

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.unmixing import Unmixing
from clients.defenses.instahide import InstaHide
from clients.defenses.mixup import Mixup
from fedsim.base.errors import AttackError
from fedsim.base.metrics import pair_examples, psnr
from fedsim.base.randomness import generator, seed_globals
from fedsim.data import Dataset
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.defense import Defense, Participation
from fedsim.interfaces.findings import Reconstruction
from fedsim.plugins import registry
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_gradient
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining

ROUNDS = 8
CASES: Sequence[tuple[Defense | None, int]] = (
    (None, 4),
    (None, 5),
    (Mixup(), 4),
    (Mixup(), 5),
    (Mixup(), 8),
    (Mixup(alpha=1.0), 4),
    (InstaHide(k=2), 4),
    (InstaHide(k=4), 4),
    (InstaHide(k=4), 8),
)
IG = InvertingGradients(step_size=0.1, tv_weight=0.001, iterations=2000, restarts=3)


class Study:
    """One data set and model."""

    def __init__(self, data: str, model: str, folder: Path) -> None:
        self.dataset: Dataset = registry.build("datasets", data, {}, "data").load(Path(os.environ["FEDSIM_DATA"]))
        self.folder = folder
        self.plugin = registry.build("models", model, {"hidden": [64]} if model == "mlp" else {}, "model")
        self.mean, self.std = (moment.reshape(-1, 1, 1) for moment in self.dataset.standardisation)

    def network(self) -> nn.Module:
        """At random weights, always the same."""
        with seed_globals("mixing", "model"):
            return self.plugin.build(self.dataset.task)

    def victim(self, number: int, count: int) -> tuple[Tensor, Tensor]:
        """Images in [0, 1] of different classes, and their labels."""
        rows: dict[int, int] = {}
        for row in torch.randperm(len(self.dataset.train), generator=generator("victim", number)).tolist():
            rows.setdefault(int(self.dataset.train.labels[row]), row)
        index = torch.tensor(list(rows.values())[:count])
        return self.dataset.train.inputs(index), self.dataset.train.labels[index]

    def record_rounds(self, defense: Defense | None, images: Tensor, labels: Tensor, number: int) -> Transcript:
        """The gradients of `ROUNDS` rounds."""
        count, low, high = len(labels), (0 - self.mean) / self.std, (1 - self.mean) / self.std
        client = Participation(
            num_examples=count,
            batch_size=count,
            steps=1,
            rounds=ROUNDS,
            num_classes=self.dataset.num_classes,
            value_range=(tuple(low.flatten().tolist()), tuple(high.flatten().tolist())),
        )
        own = [] if defense is None else [defense.of_client(client)]
        plan = LocalTraining(local_steps=1, batch_size=count, sends="gradient")
        folder = self.folder / f"{defense}-{count}-{number}"
        recorder = Recorder(folder)
        for place in range(1, ROUNDS + 1):
            before, inputs = copy_state(self.network()), (images - self.mean) / self.std
            gradient, _, _ = local_gradient(
                self.network(), before, inputs, labels, plan, key=(number, "train", place, 0), defenses=own
            )
            update = Update(
                round=place,
                client=0,
                before=before,
                payload=Payload.from_dense(gradient, "gradient"),
                num_examples=count,
            )
            recorder.write(place, [update])
        return Transcript(folder)

    def knowledge(self, defense: Defense | None, *, known: bool) -> Knowledge:
        """All that the server knows; labels are withheld."""
        task = self.dataset.task
        low, high = (((end - self.mean) / self.std).flatten().tolist() for end in (0, 1))
        return Knowledge(
            model=self.network,
            loss=task.loss,
            input_shape=task.input_shape,
            num_classes=task.num_classes,
            value_range=(low, high),
            input_mean=[0.0] * len(low),
            input_std=[1.0] * len(low),
            defenses=(defense,) if known and defense is not None else None,
        )

    def psnr_of(self, attack: Attack, transcript: Transcript, knowledge: Knowledge, images: Tensor) -> float:
        """Mean over the images; not a number where the attack gives up."""
        try:
            found = attack.run(Target(transcript=transcript, victim=0, knowledge=knowledge, rng=generator("attack")))
        except AttackError as error:
            print(f"  {error}")
            return float("nan")
        assert isinstance(found, Reconstruction)
        return psnr(pair_examples(found.data, images), images).mean().item()

    def line(self, defense: Defense | None, count: int, victims: int) -> dict[str, object]:
        """One line of the table."""
        each: list[dict[str, float]] = []
        floor = self.dataset.train.inputs(slice(0, 5000)).mean(0)
        for number in range(victims):
            images, labels = self.victim(number, count)
            transcript = self.record_rounds(defense, images, labels, number)
            naive, adaptive = (self.knowledge(defense, known=known) for known in (False, True))
            first = transcript.restrict_to([1])
            own = {
                "floor": psnr(floor.expand_as(images), images).mean().item(),
                "naive": self.psnr_of(IG, first, naive, images),
                "adaptive": self.psnr_of(IG, first, adaptive, images),
            }
            for rounds in (1, 2, 4, ROUNDS) if defense is not None else ():
                seen = transcript.restrict_to(list(range(1, rounds + 1)))
                own[f"unmixing, {rounds} rounds"] = self.psnr_of(Unmixing(), seen, adaptive, images)
            each.append(own)
        means = {name: round(fmean(one[name] for one in each), 1) for name in each[0]}
        return {"defense": str(defense), "N": count, **means}


def main() -> None:
    """Print the table, and write it where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--victims", type=int, default=4)
    parser.add_argument("--case", type=int, action="append", help="which of the cases; all by default")
    parser.add_argument("--recordings", type=Path, required=True, help="an empty folder for the recordings")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    study, lines = Study(options.data, options.model, options.recordings), []
    for case in options.case or range(len(CASES)):
        lines.append(study.line(*CASES[case], options.victims))
        print(lines[-1], flush=True)
    table = pd.DataFrame(lines)
    print(table.to_string(index=False))
    if options.out is not None:
        table.to_csv(options.out, index=False)


if __name__ == "__main__":
    main()
