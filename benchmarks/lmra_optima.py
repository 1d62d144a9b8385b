"""How far apart optima of two starts are: python benchmarks/lmra_optima.py RUN ... (runs with scored local models).

Means over clients and runs of distances relative to the norm of the optimum from w_0: of w_0 and of the optimum from
other random weights; and the share of the client's own examples that both optima put in the same class. How alike they
answer is `zest_of_optima` (lmra_tables.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from fedsim.audit.audit import open_audit
from fedsim.federation.config import AttackFile, validate_tables
from fedsim.recording.wire_format import State
from fedsim.training.model_state import load_state
from fedsim.training.modes import forward, set_evaluation_modes

NOBODY = validate_tables(AttackFile, {"attack": [{"name": "shared-model"}]}, "lmra_optima")


def flat(state: State) -> Tensor:
    """All weights of a model."""
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


def main(paths: list[str]) -> None:
    """Print one line."""
    started, apart, same = [], [], []
    for path in paths:
        audit = open_audit(Path(path), NOBODY)
        experiment = audit.experiment
        assert experiment is not None
        model, first = experiment.new_model(), flat(experiment.initial_state())
        for client in range(experiment.config.federation.clients):
            states = audit.optimum(client), audit.optimum(client, other_start=True)
            one, other = map(flat, states)
            started.append(float((one - first).norm() / one.norm()))
            apart.append(float((one - other).norm() / one.norm()))
            inputs = experiment.data.to_model(experiment.data.train(client)[0])
            answers = []
            for state in states:
                load_state(model, state)
                set_evaluation_modes(model, state)
                with torch.no_grad():
                    answers.append(forward(model, inputs))
            if experiment.dataset.num_classes:
                same.append((answers[0].argmax(1) == answers[1].argmax(1)).double().mean().item())
    told = f", the same class for {fmean(same):.3f}" if same else ""
    print(f"{len(apart)} optima: w_0 at {fmean(started):.3f}, the other optimum at {fmean(apart):.3f}{told}")


if __name__ == "__main__":
    main(sys.argv[1:])
