"""The hooks by which one client's defenses act inside local training, in one round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from fedsim.base.errors import ConfigError, RunError
from fedsim.base.randomness import generator
from fedsim.interfaces.defense import Defense, Poisson, overrides, pair_with_keys, supports_ghost_clipping
from fedsim.interfaces.defense_calls import (
    apply_on_batch,
    apply_on_examples,
    apply_on_features,
    apply_on_gradient,
    apply_on_sum,
    describe_value,
)
from fedsim.interfaces.defense_checks import name_of_defense
from fedsim.interfaces.local_context import ClientRound, LocalContext, LocalStep
from fedsim.recording.wire_format import State
from fedsim.training.canaries import Canaries, CanaryInsertion
from fedsim.training.features import find_last_linear, outputs_with_features
from fedsim.training.ghost_clipping import ClippingFactors, can_clip
from fedsim.training.modes import find_mixing_batch_norm, forward
from fedsim.training.sampling import poisson_batches, shuffled_batches
from fedsim.training.settings import LocalTraining


class TrainingHooks:
    """Hooks of a client's defenses in local training, each with randomness of its own.

    Attributes:
        sees_examples: whether a defense sees the gradient of each example.
        clipping_factors: computes them from the norms of these gradients, where a defense needs no
            more of them; None where it has to see the gradients themselves.
        sampling: Poisson sampling that the defenses ask for; None leaves the batches to the
            settings.
    """

    def __init__(
        self,
        defenses: Sequence[Defense],
        model: nn.Module,
        settings: LocalTraining,
        count: int,
        client_round: ClientRound,
        canaries: Canaries | None = None,
    ) -> None:
        """Set up the hooks of a client.

        Args:
            count: number of its examples, without canaries.
            client_round: its randomness, memory and w_t in this round.
            canaries: gradients that are put among those of its examples.
        """
        self._settings, self._count, self._client_round = settings, count, client_round
        # For each hook, the defenses that define it, each with its context.
        self._users: dict[str, list[tuple[Defense, LocalContext]]] = {
            hook: [] for hook in ("on_batch", "on_features", "on_examples", "on_gradient")
        }
        for defense, defense_key in pair_with_keys(defenses):
            for hook, users in self._users.items():
                if overrides(defense, hook):
                    context = client_round.make_context(hook, defense_key, defense.draws_in_common)
                    users.append((defense, context))
        self.sees_examples = bool(self._users["on_examples"])
        # Check that they go together.
        self._check_examples(model)
        self._check_features(model)
        self._sampling_defense, self.sampling = _find_sampling(defenses, count, settings.batch_size)
        self._check_sampling(batches_are_drawn=not settings.continues_batches)
        self._canaries = None if canaries is None else CanaryInsertion(canaries, count)
        if canaries is not None:
            self._check_canaries(defenses)
        self.clipping_factors = self._choose_factors(model)

    def local_step(self, step: LocalStep) -> AbstractContextManager[None]:
        """Let the contexts of all hooks know the step that is under way; the next one follows."""
        contexts = [context for users in self._users.values() for _, context in users]
        return self._notify_contexts(contexts, step) if contexts else nullcontext()

    @staticmethod
    @contextmanager
    def _notify_contexts(contexts: Sequence[LocalContext], step: LocalStep) -> Iterator[None]:
        for context in contexts:
            context.local_step = step
        try:
            yield
        finally:
            for context in contexts:
                context.local_step = None
                context.step += 1

    def expected_batch_size(self, batch_size: int) -> float:
        """Return the expected size of a batch that happens to have `batch_size` examples."""
        return batch_size if self.sampling is None else self.sampling.rate * self._count

    def batch_order(self, given: Iterable[Tensor] | None) -> Iterable[Tensor]:
        """Return the examples of each step: those `given`, or drawn as defenses and settings ask."""
        if given is not None:
            self._check_sampling(batches_are_drawn=False)
            return given
        rng = generator(*self._client_round.key, "order")
        if self.sampling is None:
            return shuffled_batches(self._count, self._settings, rng)
        rate, steps = self.sampling.rate, self._settings.steps(self._count)
        if self._canaries is None:
            return poisson_batches(self._count, rate, steps, rng)
        sampled = poisson_batches(self._count + len(self._canaries), rate, steps, rng)
        return self._canaries.split_batches(sampled)

    def replace_batch(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch that is trained on in place of this one, which is not empty."""
        size = len(inputs)
        for defense, context in self._users["on_batch"]:
            inputs, labels = apply_on_batch(defense, inputs, labels, context)
            if len(inputs) != size and (self.sees_examples or self.sampling):
                raise RunError(
                    f"{type(defense).__name__}.on_batch: expected {size} examples back, got "
                    f"{len(inputs)}, but a defense sees the gradient of each or asks for Poisson "
                    "sampling; return as many as there are"
                )
        return inputs, labels

    def compute_outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Compute the outputs of `model`, with the features that defenses replace.

        The gradient of its last linear layer's weights is computed from the replaced features.
        """
        if not self._users["on_features"]:
            return forward(model, inputs)

        def replace(features: Tensor, inputs: Tensor) -> Tensor:
            for defense, context in self._users["on_features"]:
                features = apply_on_features(defense, features, inputs, context)
            return features

        return outputs_with_features(model, inputs, replace)

    def combine_examples(self, gradients: State, parameters: State) -> State:
        """Compute one gradient from the examples' gradients, by the defense that sees these."""
        ((defense, context),) = self._users["on_examples"]
        if self._canaries is not None:
            gradients = self._canaries.append_gradients(gradients)
        batch_size = len(next(iter(gradients.values())))
        with self._client_round.seed_globals(defense, "on_examples", context.step):  # as for `combine_sum`
            return apply_on_examples(defense, gradients, self.expected_batch_size(batch_size), parameters, context)

    def combine_sum(self, total: State, batch_size: int, parameters: State) -> State:
        """Compute the same gradient from the sum of gradients clipped by `clipping_factors`."""
        ((defense, context),) = self._users["on_examples"]
        # Clients that train at once are in no block in which global generators are seeded for one of them.
        with self._client_round.seed_globals(defense, "on_examples", context.step):
            return apply_on_sum(defense, total, self.expected_batch_size(batch_size), parameters, context)

    def replace_gradient(self, model: nn.Module) -> None:
        """Replace the gradient of each parameter that has one by what the defenses make of it."""
        if not self._users["on_gradient"]:
            return
        parameters = dict(model.named_parameters())
        gradient: State = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for defense, context in self._users["on_gradient"]:
            gradient = apply_on_gradient(defense, gradient, context)
        for name, value in gradient.items():
            parameters[name].grad = value

    def _check_sampling(self, *, batches_are_drawn: bool) -> None:
        if self.sampling is None or batches_are_drawn:
            return
        if self._settings.sends == "gradient":
            reason = (
                "clients that send gradients take one fixed mini-batch; choose a strategy whose clients send weights"
            )
        elif self._settings.batches == "fixed":
            reason = "training.batches is 'fixed'; set it to 'reshuffled'"
        else:
            reason = "the batches of each step are given; give none"
        raise ConfigError(
            f"defense: {self._sampling_defense} asks for Poisson sampling, but {reason}, or leave the defense out"
        )

    def _check_features(self, model: nn.Module) -> None:
        names = [name_of_defense(defense) for defense, _ in self._users["on_features"]]
        if names and self.sees_examples:
            name_of_seeing = name_of_defense(self._users["on_examples"][0][0])
            raise ConfigError(
                f"defense: {names[0]} replaces the features of a whole batch, and {name_of_seeing} "
                "sees the gradient of each example by itself; leave one of them out"
            )
        if names and find_last_linear(model) is None:
            raise ConfigError(
                f"defense: {names[0]} replaces the features that the model's last linear layer is "
                "given, but the last matrix that is trained is not the weights of one; choose "
                "another model, define its last linear layer after all others, or leave the "
                "defense out"
            )

    def _check_canaries(self, defenses: Sequence[Defense]) -> None:
        if not self.sees_examples or self.sampling is None:
            raise ConfigError(
                "canaries: they are put among examples that are drawn by Poisson sampling and "
                "whose gradients a defense sees one by one, and no defense here does both; add one "
                "as dp-sgd, or leave [canaries] out"
            )
        for defense in defenses:
            if defense.mixes:
                raise ConfigError(
                    f"canaries: {name_of_defense(defense)} makes one example out of several records, so a "
                    "canary would stand for no record; leave the defense or [canaries] out"
                )

    def _choose_factors(self, model: nn.Module) -> ClippingFactors | None:
        # A canary's gradient has to be among those that the defense sees, so none of them can be
        # left uncomputed.
        if self._canaries is not None or not self.sees_examples or not can_clip(model):
            return None
        ((defense, _),) = self._users["on_examples"]
        return defense.example_factors if supports_ghost_clipping(defense) else None

    def _check_examples(self, model: nn.Module) -> None:
        names = [name_of_defense(defense) for defense, _ in self._users["on_examples"]]
        if len(names) > 1:
            raise ConfigError(
                f"defense: {names[0]} and {names[1]} both make one gradient of those of single "
                "examples, but only one can; leave the other out"
            )
        if names and (layer := find_mixing_batch_norm(model, self._settings)):
            raise ConfigError(
                f"defense: {names[0]} is to see the gradient of each example, but {layer} "
                "normalises by the batch and so mixes examples; set training.batch_norm to 'eval' "
                "or 'frozen', or choose a model without BatchNorm"
            )


def _find_sampling(defenses: Sequence[Defense], count: int, batch_size: int) -> tuple[str, Poisson | None]:
    """Return the sampling that a defense asks for, after its name; '' and None without any."""
    name = ""
    sampling: Poisson | None = None
    for defense in defenses:
        requested = defense.sampling(count, batch_size)
        if requested is None:
            continue
        if not isinstance(requested, Poisson):
            raise RunError(
                f"{type(defense).__name__}.sampling: expected fedsim.interfaces.defense.Poisson or None back, "
                f"got {describe_value(requested)}"
            )
        if sampling not in (None, requested):
            raise ConfigError(
                f"defense: {name} asks for {sampling} and {name_of_defense(defense)} for {requested}, but a "
                "client draws its batches in one way; let them ask for the same, or leave one of "
                "them out"
            )
        name, sampling = name_of_defense(defense), requested
    return name, sampling
