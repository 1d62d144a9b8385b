"""TGIAs-RO's Fig. 6 (Li et al. 2023): gradients with noise N(0, 1e-4), or with 40 % of their entries masked.

    python benchmarks/tgias_defenses.py noise mask none --seeds 31 32 33 --data-dir DIR
    python benchmarks/kept_figures.py && python docs/paper_pages.py                       # the table

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

from fedsim.audit.plan import ADAPTIVE

RESULTS = HERE / "results" / "tgias-defenses.csv"
DEFENSES = {
    "none": "",
    "noise": '{name = "update-noise", clip = 1000.0, noise_multiplier = 1e-5}',
    "small noise": '{name = "update-noise", clip = 1000.0, noise_multiplier = 1e-7}',
    "mask": '{name = "random-mask", masked = 0.4}',
}
"""The clip is far above the norm of any gradient, so that it does nothing."""
TITLES = {
    "none": "no defense",
    "noise": "noise N(0, 1e-4)",
    "small noise": "noise of .0001",
    "mask": "40 % masked",
}
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


def table(scores: Scores) -> tuple[list[str], list[list[str]]]:
    """Head and lines: PSNR and SSIM of each defense and attack, over all seeds."""
    head = ["", "", "victims", "PSNR (dB): floor", "naive", "adaptive", "SSIM: floor", "naive", "adaptive"]
    lines = []
    for defense, title in TITLES.items():
        for attack in ATTACKS if (runs := _runs(scores, defense)) else ():
            every = [_values(scores, defense, one, "psnr", what) for one, what in _columns(attack)]
            every += [_values(scores, defense, one, "ssim", what) for one, what in _columns(attack)]
            texts = [cell(values) for values in every]
            texts[0], texts[3] = (texts[place].partition(" ±")[0] for place in (0, 3))
            lines.append([title, attack, str(len(runs)), *texts])
    return head, lines


def figures(scores: Scores) -> dict[str, dict[str, dict[str, str]]]:
    """What stands in the place of the paper's words on Fig. 6: SSIM under masks, naive and adaptive."""
    attacks = {"tgias": "T=10", "dlg": "dlg", "ig": "inverting-gradients"}
    return {
        name: {
            "40 % masked": {
                quantity: cell(_values(scores, "mask", f"{attack}{more}", "ssim", "value"))
                for quantity, attack in attacks.items()
            }
        }
        for name, more in (("naive", ""), ("adaptive", f" {ADAPTIVE}"))
    }


def _columns(attack: str) -> tuple[tuple[str, str], ...]:
    return (attack, "floor"), (attack, "value"), (f"{attack} {ADAPTIVE}", "value")


def _runs(scores: Scores, defense: str) -> list[str]:
    return [run for run in dict.fromkeys(run for run, *_ in scores) if run.startswith(f"{defense}, ")]


def _values(scores: Scores, defense: str, attack: str, metric: str, what: str) -> list[float | None]:
    return [value for run in _runs(scores, defense) for value in scores.get((run, attack, metric, what), [])]


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("defenses", nargs="+", help=", ".join(DEFENSES))
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


if __name__ == "__main__":
    main()
