"""TGIAs-RO's Fig. 6 (Li et al. 2023): gradients with noise N(0, 1e-4), or with 40 % of their entries masked.

    python benchmarks/tgias_defenses.py noise mask none --seeds 31 32 33 --data-dir DIR
    python benchmarks/tgias_defenses.py      # prints what has been measured, runs nothing

Through the round loop, with the defenses of fedsim: the cell b = 4 of tgias-table3-mnist.toml, one victim a seed, whose
data and first weights are those of the seed. The variance of the noise is 1e-4, as Sect. 4.4.2 says, so its standard
deviation .01; `small noise` is for those who read .0001. Each attack is made naively, and by an adversary who knows
the defense. What each scored goes to `results/tgias-defenses.csv`; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kept_scores import Scores, cell, read, scored, write
from lmra_sweeps import HERE, fedsim

from fedsim.auditing.plan import ADAPTIVE

RESULTS = HERE / "results" / "tgias-defenses.csv"
DEFENSES = {
    "none": "",
    "noise": '{name = "update-noise", clip = 1000.0, noise_multiplier = 1e-5}',
    "small noise": '{name = "update-noise", clip = 1000.0, noise_multiplier = 1e-7}',
    "mask": '{name = "random-mask", masked = 0.4}',
}
"""The clip is far above the norm of any gradient, so that it does nothing."""
ATTACKS = ("T=10", "T=10 with total variation", "T=1", "dlg", "inverting-gradients")


def measure(defense: str, seed: int, folder: Path, data_dir: str) -> Path:
    """The run folder of one victim, recorded and attacked: T = 10 in the run, single gradients after it."""
    run = folder / f"{defense.replace(' ', '-')}-{seed}"
    moved = {
        "federation.seed": seed,
        "federation.evaluate_every": 0,
        "adversary.victims": [0],
        "adversary.knowledge.defenses": "true",
        "defense": f"[{DEFENSES[defense]}]",
    }
    changes = [word for name, value in moved.items() for word in ("--set", f"{name}={value}")]
    begin = [str(HERE / "tgias-table3-mnist.toml"), "--out", str(run), *changes]
    beside = ["--quiet", "--data-dir", data_dir]
    fedsim("run", *(["--resume", str(run)] if (run / "experiment.toml").exists() else begin), *beside, may_fail=True)
    fedsim("attack", str(run), str(HERE / "tgias-fig6-single.toml"), *beside, may_fail=True)
    return run


def print_table(scores: Scores) -> None:
    """PSNR and SSIM of each defense and attack, over all seeds, in Markdown."""
    print("| | n | PSNR, dB: floor | naive | adaptive | SSIM: floor | naive | adaptive |")
    print("|---" * 8 + "|")
    for defense in DEFENSES:
        runs = [run for run in dict.fromkeys(run for run, *_ in scores) if run.startswith(f"{defense}, ")]
        for attack in ATTACKS if runs else ():
            texts = []
            for metric in ("psnr", "ssim"):
                for title, what in ((attack, "floor"), (attack, "value"), (f"{attack} {ADAPTIVE}", "value")):
                    every = [value for run in runs for value in scores.get((run, title, metric, what), [])]
                    texts.append(cell(every).partition(" ±")[0] if what == "floor" else cell(every))
            print(f"| {defense}, {attack} | {len(runs)} | {' | '.join(texts)} |")


def main() -> None:
    """Measure what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("defenses", nargs="*", help=f"{', '.join(DEFENSES)}; none prints what was measured")
    parser.add_argument("--seeds", type=int, nargs="+", default=[31, 32, 33])
    parser.add_argument("--data-dir", default=os.environ.get("FEDSIM_DATA", "."))
    parser.add_argument("--folder", type=Path, default=Path("runs/tgias-defenses"))
    options = parser.parse_args()
    if strange := set(options.defenses) - set(DEFENSES):
        parser.error(f"defenses: expected {', '.join(DEFENSES)}, got {', '.join(sorted(strange))}")
    for seed in options.seeds:
        for defense in options.defenses:
            name, kept = f"{defense}, {seed}", read(RESULTS)
            if not any(run == name for run, *_ in kept):
                write(RESULTS, kept | scored(name, measure(defense, seed, options.folder, options.data_dir)))
    print_table(read(RESULTS))


if __name__ == "__main__":
    main()
