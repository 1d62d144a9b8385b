"""Skeleton, an attack for fedsim.

Check it with `fedsim check fedsim.skeletons.attack:Skeleton`, and compare it with another attack
with `fedsim run skeleton.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.func import functional_call
from torch.nn.functional import cosine_similarity

from fedsim.base.constraints import PositiveFloat, PositiveInt
from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import Attack, Paper, Progress, RoundsNeeded, Target
from fedsim.interfaces.findings import Finding, Reconstruction


@dataclass(frozen=True, kw_only=True)
class Skeleton(Attack):
    """Optimise dummy inputs until their gradient points in the direction of the victim's update.

    Args:
        iterations: steps of Adam.
        step_size: step size of Adam, as a share of the range of the inputs.

    References:
        Authors: Title, Venue, Year, Equation. Differs: say where you depart from it, and why.
    """

    # The fields are the settings. An experiment file sets them by the same names. Their types say
    # which values are accepted; `fedsim.base.constraints` has more of them.
    iterations: PositiveInt = 100
    step_size: PositiveFloat = 0.05

    # What the report cites.
    paper: ClassVar[Paper] = Paper(title="Skeleton", authors="Nobody yet", venue="unpublished", year=2026)
    # Without these facts the attack is refused before any work. Facts that are named neither here
    # nor in `uses` are None in `target.knowledge`, even where the experiment grants them.
    # fedsim/interfaces/knowledge.py lists all facts.
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "input_shape", "value_range", "labels"})
    # Further facts that the attack reads where they are granted.
    uses: ClassVar[frozenset[str]] = frozenset()
    # It reads one round of its victim. `ALL` would be all rounds to be attacked, at once.
    rounds_needed: ClassVar[RoundsNeeded] = 1

    def _run(self, target: Target, progress: Progress) -> Finding:
        # The victim's update: the broadcast weights w_t, the pseudo-gradient w_t - w_T or gradient,
        # and N.
        update, knowledge = target.read_update(), target.knowledge
        # All facts in `needs` are granted, which a type checker cannot know.
        assert knowledge.model is not None
        assert knowledge.loss is not None
        assert knowledge.input_shape is not None
        assert knowledge.value_range is not None
        assert knowledge.labels is not None
        model = knowledge.model().eval()
        names = [name for name, _ in model.named_parameters()]
        direction = torch.cat([update.pseudo_gradient[name].flatten() for name in names])
        if not direction.any():
            raise AttackError(f"client {target.victim} sent no change, so there is nothing to match")

        # The dummy inputs are in [0, 1], as in a finding; the model gets them in its own units.
        axes = [-1] + [1] * (len(knowledge.input_shape) - 1)
        low, high = (torch.as_tensor(end).reshape(axes) for end in knowledge.value_range)
        dummy = torch.rand((update.num_examples, *knowledge.input_shape), generator=target.rng).requires_grad_()
        weights = {name: update.before[name].clone().requires_grad_() for name in names}
        optimizer = torch.optim.Adam([dummy], lr=self.step_size)
        objectives = []
        for iteration in range(1, self.iterations + 1):
            outputs = functional_call(model, {**update.before, **weights}, (low + (high - low) * dummy,))
            loss = knowledge.loss(outputs, knowledge.labels)
            gradient = torch.autograd.grad(loss, list(weights.values()), create_graph=True, materialize_grads=True)
            distance = 1 - cosine_similarity(torch.cat([part.flatten() for part in gradient]), direction, dim=0)
            (dummy.grad,) = torch.autograd.grad(distance, [dummy])
            optimizer.step()
            with torch.no_grad():
                dummy.clamp_(0, 1)
            objectives.append(distance.item())
            progress(iteration, self.iterations, {"objective": distance.item()})

        # An attack never sees the true inputs. An evaluator compares them with the finding.
        trace = {"objective": torch.tensor(objectives)}  # the report draws it as a curve
        return Reconstruction(data=dummy.detach(), labels=knowledge.labels, trace=trace)
