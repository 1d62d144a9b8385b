"""Run studies, and write what follows from their rows.

    python -m studies                         # what there is
    python -m studies dager --minutes 10      # run what is not done yet; the rows go to studies/dager/results.csv
    python -m studies dager --only size=4 network=encoder
    python -m studies dager --write           # tables and pictures of docs/, published figures of fedsim/api/reproduce

Data come from FEDSIM_DATA, or from --data-dir.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

import torch

from studies.running import Study, run_study, study_names
from studies.writing import write_study


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m studies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *study_names()], metavar="NAME")
    parser.add_argument("--only", nargs="+", default=[], metavar="COLUMN=VALUE", help="cells that have these values")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after so long")
    parser.add_argument("--out", type=Path, help="the file of rows, in place of the study's results.csv")
    parser.add_argument("--write", action="store_true", help="write tables and figures, run nothing")
    parser.add_argument("--pictures", action="store_true", help="with --write, draw pictures too")
    parser.add_argument("--data-dir", help="folder of data sets")
    chosen = parser.parse_args()
    if chosen.data_dir:
        os.environ["FEDSIM_DATA"] = str(Path(chosen.data_dir).resolve())
    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s")
    for name in chosen.names or study_names():
        study = Study.open(name)
        if chosen.write:
            write_study(study, pictures=chosen.pictures)
        elif chosen.names:
            only = dict(choice.split("=", 1) for choice in chosen.only)
            run_study(study, chosen.out or study.results, only, chosen.minutes)
        else:
            print(f"{name}: {study.file.about.strip()}\n")


if __name__ == "__main__":
    main()
