"""Exact inputs of updates after many local steps: independent components as the start, then the zeros of ReLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adversaries.exact.attack import FirstLayerAttack
from adversaries.exact.components import Looked, unmixing
from adversaries.exact.layer import Layer
from adversaries.exact.mixture import Mixture
from adversaries.exact.silence import drawn, followed, guided, trimmed
from fedsim.errors import ConfigError

_GUIDED, _MORE, _GUIDED_AT_MOST = 150, 6, 10_000


@dataclass(frozen=True, kw_only=True)
class SpearIca(FirstLayerAttack):
    """Find columns of the mixture from estimates of the inputs, take their inputs away, and go on with the rest.

    Each pass separates what is left of the update into independent components, which are rough estimates of the inputs
    that are not found yet. An estimate says which units are silent for its example, at w_0 and at w_T; the zeros of
    these units, without those that do not fit, give the column. A column counts only if its zeros certify it, so no
    pass can do harm, and the next one separates fewer inputs. Where no estimate leads on, units are drawn blindly, as
    in SPEAR; inputs whose columns were not found remain estimates.

    Args:
        passes: at most.
        patience: passes without a new column after which the rest remains estimates.
        draws: blind draws of sets of units, in all.

    References:
        Dimitrov et al.: SPEAR, NeurIPS 2024, for the zeros; Kariyappa et al.: Cocktail Party Attack, ICML 2023, for
        independent components. Differs: both are for one step, this reads local steps; the components are those of
        differences, silence comes from estimates, inputs are taken away as they are found, and some are certified.
    """

    passes: int = 40
    patience: int = 4
    draws: int = 20_000

    def __post_init__(self) -> None:
        for name, least in (("passes", 1), ("patience", 1), ("draws", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected at least {least}, got {getattr(self, name)}")

    @property
    def turns(self) -> int:
        """See `FirstLayerAttack`."""
        return self.passes

    def _columns(
        self, mixture: Mixture, layer: Layer, rng: torch.Generator, tell: Callable[[int], None]
    ) -> tuple[list[Tensor], Tensor]:
        found: list[Tensor] = []
        rest, stuck, drew = torch.eye(mixture.rank, dtype=torch.float64), 0, self.draws == 0
        for _ in range(self.passes):
            before = len(found)
            rest = self._estimates(mixture, layer, mixture.left(found), stuck)
            draws = min(_GUIDED * _MORE**stuck, _GUIDED_AT_MOST // (mixture.rank - before))
            self._search(mixture, _silence(mixture, layer, rest), rest, found, draws, rng)
            if len(found) == before and stuck == self.patience - 1 and not drew:
                drew = True
                for column in drawn(mixture, torch.arange(len(mixture.rows)), self.draws, rng, most=mixture.rank):
                    mixture.add(found, column)
            stuck = stuck + 1 if len(found) == before else 0
            tell(len(found))
            if len(found) == mixture.rank:
                return found, rest[:, :0]
            if stuck == self.patience:
                break
        return found, self._estimates(mixture, layer, mixture.left(found), 0)

    def _estimates(self, mixture: Mixture, layer: Layer, left: Tensor, stuck: int) -> Tensor:
        """`rank rest`, columns in the span of `left`, by independent components.

        Args:
            stuck: passes since the last new column. After each, other estimates are made than in the last one.
        """
        of: Looked = "differences" if len(layer.shape) == 3 and stuck % 2 == 0 else "values"
        return left @ unmixing(left.T @ mixture.inputs, layer.shape, of, stuck)

    def _search(
        self,
        mixture: Mixture,
        silence: Tensor,
        rest: Tensor,
        found: list[Tensor],
        draws: int,
        rng: torch.Generator,
    ) -> None:
        """Put columns into `found`, of examples whose silence, `example unit`, and column are estimated."""
        known, left = list(found), torch.ones(len(silence), dtype=torch.bool)
        for example, units in enumerate(silence):
            if (column := trimmed(mixture, units)) is not None:
                mixture.add(found, column)
                left[example] = False
        for column in followed(mixture, silence[left], rest[:, left], known):
            mixture.add(found, column)
        if len(found) == len(known):
            for units in silence:
                if (column := guided(mixture, units, draws, rng)) is not None:
                    mixture.add(found, column)


def _silence(mixture: Mixture, layer: Layer, rest: Tensor) -> Tensor:
    """`example unit`: see `Layer.silence`, of the inputs that these columns, `rank rest`, stand for."""
    left, mixed = torch.linalg.qr(rest)
    of_bias = left.T @ mixture.of_bias
    scales = torch.linalg.solve(mixed, of_bias)
    inputs = torch.linalg.solve(mixed * scales, left.T @ mixture.inputs)
    return layer.silence(layer.clamped(inputs))[:, mixture.units]
