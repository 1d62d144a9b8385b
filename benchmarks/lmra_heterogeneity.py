"""How far apart clients are: LMRA's Table 2 and Fig. 5, from a run of one of benchmarks/lmra-*.toml.

    python benchmarks/lmra_heterogeneity.py RUN

Prints for each client how many examples it holds and |theta_c* - theta| / |theta|, its optimal local model beside the
global model of the last recorded round; then the matrix |theta_i* - theta_j*| / |theta_j*|, a row for each i. All
parameters count as one vector. A client's optimal model takes some ten seconds of one core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from fedsim.audit.evaluation.local_optimum import local_optimum
from fedsim.base.randomness import use_one_thread
from fedsim.federation.build import Experiment
from fedsim.federation.reading import load_config
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State


def main(run: Path) -> None:
    """Print the table and the matrix."""
    experiment, transcript = Experiment(load_config(run / "experiment.toml")), Transcript(run)
    first, last = transcript.rounds[0], transcript.rounds[-1]
    start, whole = (transcript.update(number, transcript.clients(number)[0]).before for number in (first, last))
    names = [name for name, _ in experiment.model.named_parameters()]

    def flat(state: State) -> Tensor:
        return torch.cat([state[name].flatten().double() for name in names])

    optima, server = [], flat(whole)
    print(f"client  examples  to the global model of round {last}")
    for client in range(experiment.config.federation.clients):
        ((inputs, labels),) = experiment.data.model_examples([client])
        optimum = local_optimum(experiment.model, start, inputs, labels, experiment.dataset.task.loss)
        optima.append(flat(optimum))
        print(f"{client:6}  {len(labels):8}  {(optima[-1] - server).norm() / server.norm():.1%}", flush=True)
    print("\nclient  " + " ".join(f"{j:5}" for j in range(len(optima))))
    for i, one in enumerate(optima):
        print(f"{i:6}  " + " ".join(f"{(one - other).norm() / other.norm():5.2f}" for other in optima))


if __name__ == "__main__":
    with use_one_thread():
        main(Path(sys.argv[1]))
