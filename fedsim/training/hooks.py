"""The defenses of one client in one round, where they act inside local training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fedsim.defense import (
    Defense,
    Poisson,
    called,
    keyed,
    kind,
    of_examples,
    of_sum,
    overrides,
    replaced_batch,
    replaced_features,
    replaced_gradient,
    shortens,
)
from fedsim.errors import ConfigError, RunError
from fedsim.randomness import generator
from fedsim.training.canaries import Canaries, Insertion
from fedsim.training.features import last_linear, outputs_with_features
from fedsim.training.modes import forward, mixing_layer
from fedsim.training.sampling import batches, poisson_batches
from fedsim.training.settings import LocalTraining
from fedsim.training.shortened import Factors, fits
from fedsim.wire.messages import State


class Hooks:
    """What the defenses of a client do inside local training, each hook with randomness of its own.

    Attributes:
        sees_examples: whether a defense is to be shown one gradient an example.
        factors: how it shortens them, if that is all it has to see of them; None where it is to be shown them.
        sampling: what the defenses ask for; None leaves it to the settings.
    """

    def __init__(
        self,
        defenses: Sequence[Defense],
        model: nn.Module,
        settings: LocalTraining,
        count: int,
        key: tuple[int | str, ...],
        canaries: Canaries | None = None,
    ) -> None:
        """Of a client with `count` examples besides `canaries`, which draws by `key`.

        Raises:
            ConfigError: the defenses do not go together, or not with these settings or this model.
            RunError: one of them asks for sampling that there is not.
        """
        self._settings, self._count, self._key, self._step = settings, count, key, 0
        self._on: dict[str, list[tuple[Defense, torch.Generator]]] = {
            hook: [] for hook in ("on_batch", "on_features", "on_examples", "on_gradient")
        }
        for defense, own in keyed(defenses):
            for hook, users in self._on.items():
                if overrides(defense, hook):
                    users.append((defense, generator(*key, "defense", hook, *own)))
        self.sees_examples = bool(self._on["on_examples"])
        self._check_examples(model)
        self._check_features(model)
        self._asker, self.sampling = _asked(defenses, count, settings.batch_size)
        self._check_drawn(drawn=not settings.goes_on)
        self._canaries = None if canaries is None else Insertion(canaries, count)
        if canaries is not None:
            self._check_canaries(defenses)
        self.factors = self._factors(model)

    def expected(self, there: int) -> float:
        """How many examples are expected in a batch that has so many now."""
        return there if self.sampling is None else self.sampling.rate * self._count

    def order(self, given: Iterable[Tensor] | None) -> Iterable[Tensor]:
        """The examples of each step: those `given`, or else drawn as the defenses and the settings ask.

        Raises:
            ConfigError: batches are given, but a defense asks for Poisson sampling.
        """
        if given is not None:
            self._check_drawn(drawn=False)
            return given
        draw = generator(*self._key, "order")
        if self.sampling is None:
            return batches(self._count, self._settings, draw)
        rate, steps = self.sampling.rate, self._settings.steps(self._count)
        if self._canaries is None:
            return poisson_batches(self._count, rate, steps, draw)
        return self._canaries.apart(poisson_batches(self._count + len(self._canaries), rate, steps, draw))

    def batch(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """What is trained on in place of a batch, which has examples.

        Raises:
            RunError: a defense returned no batch, or another number of examples where that counts.
        """
        there = len(inputs)
        for defense, rng in self._on["on_batch"]:
            inputs, labels = replaced_batch(defense, inputs, labels, rng)
            if len(inputs) != there and (self.sees_examples or self.sampling):
                raise RunError(
                    f"{type(defense).__name__}.on_batch: expected {there} examples back, got {len(inputs)}, but "
                    "a defense sees the gradient of each or asks for Poisson sampling; return as many as there are"
                )
        return inputs, labels

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The outputs of `model`; the gradient of its last linear layer's weights is of what defenses make of features.

        Raises:
            RunError: a defense returned no features, or the model has none to replace.
        """
        if not self._on["on_features"]:
            return forward(model, inputs)

        def replace(features: Tensor, inputs: Tensor) -> Tensor:
            for defense, rng in self._on["on_features"]:
                features = replaced_features(defense, features, inputs, rng)
            return features

        return outputs_with_features(model, inputs, replace)

    def examples(self, gradients: State, parameters: State) -> State:
        """The gradient that the one defense that sees those of single examples makes of them."""
        ((defense, rng),) = self._on["on_examples"]
        if self._canaries is not None:
            gradients = self._canaries.beside(gradients)
        there = len(next(iter(gradients.values())))
        return of_examples(defense, gradients, self.expected(there), parameters, rng)

    def summed(self, total: State, there: int, parameters: State) -> State:
        """The gradient that the same defense makes of the sum over so many examples, shortened by its `factors`."""
        ((defense, rng),) = self._on["on_examples"]
        return of_sum(defense, total, self.expected(there), parameters, rng)

    def gradient(self, model: nn.Module) -> None:
        """Put in place of the gradient of each parameter, where it has one, what the defenses make of it."""
        if not self._on["on_gradient"]:
            return
        parameters = dict(model.named_parameters())
        gradient: State = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for defense, rng in self._on["on_gradient"]:
            gradient = replaced_gradient(defense, gradient, rng, parameters, self._step)
        self._step += 1
        for name, value in gradient.items():
            parameters[name].grad = value

    def _check_drawn(self, *, drawn: bool) -> None:
        if self.sampling is None or drawn:
            return
        if self._settings.sends == "gradient":
            how = "clients that send gradients take one fixed mini-batch; choose a strategy whose clients send weights"
        elif self._settings.batches == "fixed":
            how = "training.batches is 'fixed'; set it to 'reshuffled'"
        else:
            how = "the batches of each step are given; give none"
        raise ConfigError(f"defense: {self._asker} asks for Poisson sampling, but {how}, or leave the defense out")

    def _check_features(self, model: nn.Module) -> None:
        replacing = [called(defense) for defense, _ in self._on["on_features"]]
        if replacing and self.sees_examples:
            seeing = called(self._on["on_examples"][0][0])
            raise ConfigError(
                f"defense: {replacing[0]} replaces the features of a whole batch, and {seeing} sees the gradient of "
                "each example by itself; leave one of them out"
            )
        if replacing and last_linear(model) is None:
            raise ConfigError(
                f"defense: {replacing[0]} replaces the features that the model's last linear layer is given, but the "
                "last matrix that is trained is not the weights of one; choose another model, define its last linear "
                "layer after all others, or leave the defense out"
            )

    def _check_canaries(self, defenses: Sequence[Defense]) -> None:
        if not self.sees_examples or self.sampling is None:
            raise ConfigError(
                "canaries: they are put among examples that are drawn by Poisson sampling and whose gradients a "
                "defense sees one by one, and no defense here does both; add one as dp-sgd, or leave [canaries] out"
            )
        for defense in defenses:
            if defense.mixes:
                raise ConfigError(
                    f"canaries: {called(defense)} makes one example out of several records, so a canary would "
                    "stand for no record; leave the defense or [canaries] out"
                )

    def _factors(self, model: nn.Module) -> Factors | None:
        """Canaries are among the examples that are shown, so where there are any, they all are."""
        if self._canaries is not None or not self.sees_examples or not fits(model):
            return None
        ((defense, _),) = self._on["on_examples"]
        return defense.example_factors if shortens(defense) else None

    def _check_examples(self, model: nn.Module) -> None:
        seeing = [called(defense) for defense, _ in self._on["on_examples"]]
        if len(seeing) > 1:
            raise ConfigError(
                f"defense: {seeing[0]} and {seeing[1]} both make one gradient of those of single examples, but only "
                "one can; leave the other out"
            )
        if seeing and (layer := mixing_layer(model, self._settings)):
            raise ConfigError(
                f"defense: {seeing[0]} is to see the gradient of each example, but {layer} normalises by the batch and "
                "so mixes examples; set training.batch_norm to 'eval' or 'frozen', or choose a model without BatchNorm"
            )


def _asked(defenses: Sequence[Defense], count: int, batch_size: int) -> tuple[str, Poisson | None]:
    """Which of `defenses` asks for sampling, and for which; nobody may ask for none."""
    found: tuple[str, Poisson | None] = "", None
    for defense in defenses:
        got = defense.sampling(count, batch_size)
        if got is None:
            continue
        if not isinstance(got, Poisson):
            raise RunError(
                f"{type(defense).__name__}.sampling: expected fedsim.defense.Poisson or None back, got {kind(got)}"
            )
        if found[1] not in (None, got):
            raise ConfigError(
                f"defense: {found[0]} asks for {found[1]} and {called(defense)} for {got}, but a client draws its "
                "batches in one way; let them ask for the same, or leave one of them out"
            )
        found = called(defense), got
    return found
