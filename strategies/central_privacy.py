"""Central differential privacy of clients around a strategy that averages.

Flower has strategies for this (`DifferentialPrivacyServerSideFixedClipping` and its relatives).
They are not used, since with them less would hold than is promised:

- the wrapped strategy weights clipped updates by N, so a client may move the mean by more than
  clip / clients, for which the noise is made, unless Flower's own accountant is set, which refuses
  unequal weights;
- with adaptive clipping the noise follows the clip of the next round, which may be smaller than the
  one that was used, and the count that adapts it is divided by the clients that answered;
- an update of zeros ends in a division by 0, integers are not clipped, and a round in which a
  client fails is lost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Strategy

from fedsim.base.errors import RunError
from fedsim.base.randomness import numpy_generator
from fedsim.federation.experiment import Experiment
from fedsim.privacy.central import CentralPrivacy
from fedsim.privacy.server_canaries import choose_canary_sign
from fedsim.training.canaries import CANARY_VALUE
from fedsim.training.modes import trained_shapes
from strategies.message_content import single_record
from strategies.round_noise import RoundNoise, Vector

log = logging.getLogger("fedsim." + __name__)
_GRADIENT = "gradient/"


class CentrallyPrivate(Strategy):
    """Give the wrapped strategy a single reply a round: the noisy mean of clipped updates.

    1. The update of each client, w_T - w_t or its gradient, is clipped to L2 norm C, all tensors
       together. One with NaN or infinite values adds nothing.
    2. Gaussian noise of standard deviation z C is added to the sum.
    3. The sum is divided by the number of clients that the round is meant to have. So neither N nor
       the number of those that answered is released; a client that drops out adds 0.
       The noise of rounds is fresh or correlated, see `strategies.round_noise`.
    4. With a quantile, the clip of the next round follows from a noisy count of the updates that
       were not clipped, C <- C exp(-eta (share - quantile)).

    A round in which nobody answers releases noise alone, for whoever sees that the model stays
    would know. Tensors of integers stay as they are.

    Args:
        strategy: it gets the noisy mean, which it may use as it likes.
        privacy: the mechanism.
        seed: seed of the run.
        gradients: names of the parameters of which clients send the gradient.
        canaries: by number the coordinate, as tensor and flat index, of further clients that measure
            what the mechanism lets through. Each is asked as others are, in its turn or in each
            round of a fixed number of clients, and its update is one large number at its coordinate,
            of a sign that `choose_canary_sign` says.

    References:
        [McMahan2018b], Algorithm 1, with the estimator of a fixed denominator; [Andrew2021],
        Algorithm 1, for the clip that adapts; [Kairouz2021], Sec. 4 and App. D, for noise of a tree
        that begins anew, without Honaker's variance reduction; [ChoquetteChoo2023] for banded noise,
        whose bands are the first of [Kalinin2024].
    """

    def __init__(
        self,
        strategy: FedAvg,
        privacy: CentralPrivacy,
        seed: int,
        gradients: Iterable[str] = (),
        canaries: Mapping[int, tuple[str, int]] | None = None,
    ) -> None:
        self.strategy = strategy
        self.clip = privacy.clip
        self._privacy, self._seed, self._gradients = privacy, seed, frozenset(gradients)
        self._noise = RoundNoise(privacy, seed)
        if privacy.rate is not None or privacy.cycle is not None:
            strategy.fraction_train = 1.0  # all are drawn from, see `configure_train`
        self._canaries = dict(canaries or {})
        # Set only within a round, so a checkpoint need not hold them.
        self._broadcast: ArrayRecord | None = None
        self._asked_canaries: Sequence[int] = ()

    @classmethod
    def wrap(cls, strategy: Strategy, experiment: Experiment) -> Strategy:
        """Return `strategy`, wrapped if the experiment wants central privacy."""
        privacy = experiment.central_privacy
        if privacy is None:
            return strategy
        assert isinstance(strategy, FedAvg), "check_central_privacy was not called"
        gradients: list[str] = []
        if experiment.training.sends == "gradient":
            gradients = [name for name, _ in experiment.model.named_parameters(remove_duplicate=False)]
        coordinates: dict[int, tuple[str, int]] = {}
        if (canaries := experiment.server_canaries) is not None:
            drawn = canaries.draw_coordinates(trained_shapes(experiment.model, experiment.training))
            coordinates = {canary: drawn[canary] for canary in canaries.is_included.nonzero().flatten().tolist()}
        return cls(strategy, privacy, experiment.seed, gradients, coordinates)

    def summary(self) -> None:
        """Log the settings of the wrapped strategy."""
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the wrapped strategy, or each of them with the same probability."""
        self._broadcast = arrays
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        messages.sort(key=lambda message: message.metadata.dst_node_id)
        if self._privacy.cycle is not None:
            self._check_all_take_turns(len(messages), server_round)
            turns = numpy_generator(self._seed, "client turns").permutation(len(messages)) % self._privacy.cycle
            now = (server_round - 1) % self._privacy.cycle
            self._asked_canaries = [
                canary for canary in self._canaries if choose_canary_sign(canary, server_round, self._privacy.cycle)
            ]
            return [message for message, turn in zip(messages, turns, strict=True) if turn == now]
        if self._privacy.rate is None:
            self._asked_canaries = list(self._canaries)
            return messages
        rng, rate = numpy_generator(self._seed, "client sampling", server_round), self._privacy.rate
        drawn_messages = [message for message in messages if rng.random() < rate]
        self._asked_canaries = [canary for canary in self._canaries if rng.random() < rate]
        return drawn_messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return what the wrapped strategy makes of the noisy mean of clipped updates."""
        broadcast, self._broadcast = self._broadcast, None
        assert broadcast is not None
        before = self._read_broadcast(broadcast)
        total = {name: np.zeros(values.shape) for name, values in before.items()}
        count = 0.0
        for reply in replies:
            if not reply.has_error():
                update = _read_update(single_record(reply.content, ArrayRecord), before)
                count += self._add_clipped(update, total, reply.metadata.src_node_id)
        for canary in self._asked_canaries:
            self._add_canary(canary, server_round, total)
        noise = self._noise.draw(total, server_round, self.clip)
        mean = {name: (values + noise[name]) / self._privacy.expected for name, values in total.items()}
        self._adapt_clip(count, server_round)
        return self.strategy.aggregate_train(server_round, [self._make_reply(broadcast, before, mean)])

    def _check_all_take_turns(self, asked: int, server_round: int) -> None:
        """Raise RunError where the strategy asks some clients alone, so that turns would be others in each round."""
        if asked != self._privacy.clients:
            raise RunError(
                f"round {server_round}: under cyclic sampling all {self._privacy.clients} clients take turns, and the "
                f"strategy asks {asked} of them; choose one that asks all, or central_privacy.sampling = 'fixed'"
            )

    def _read_broadcast(self, broadcast: ArrayRecord) -> Vector:
        """Return, by the name of what clients send, the values from which updates count."""
        before: Vector = {}
        for name, array in broadcast.items():
            values = array.numpy()
            if not np.issubdtype(values.dtype, np.floating):
                continue
            if name in self._gradients:
                before[_GRADIENT + name] = np.zeros(values.shape)
            else:
                before[name] = values.astype(np.float64)
        return before

    def _add_clipped(self, update: Vector, total: Vector, client: int) -> float:
        """Add a clipped update to the sum; return 1/2 if it was not clipped, else -1/2."""
        norm = math.sqrt(sum(float(np.vdot(values, values)) for values in update.values()))
        if not math.isfinite(norm):
            log.warning("client %d sent NaN or infinite values, which cannot be clipped; it adds nothing", client)
            return 0.0
        factor = min(1.0, self.clip / norm) if norm else 1.0
        for name, values in update.items():
            total[name] += factor * values
        return 0.5 if norm <= self.clip else -0.5

    def _add_canary(self, canary: int, server_round: int, total: Vector) -> None:
        """Add the clipped update of a canary, which is one large number."""
        name, coordinate = self._canaries[canary]
        sent_name = _GRADIENT + name if name in self._gradients else name
        values = np.zeros(total[sent_name].shape)
        sign = choose_canary_sign(canary, server_round, self._privacy.cycle)
        values.flat[coordinate] = sign * CANARY_VALUE
        self._add_clipped({sent_name: values}, total, client=-1)

    def _adapt_clip(self, count: float, server_round: int) -> None:
        """Move the clip towards the quantile, by the noisy share of updates that were not clipped.

        Raises:
            RunError: noise moves it out of the range of numbers.
        """
        privacy = self._privacy
        if privacy.quantile is None or privacy.count_noise is None:
            return
        rng = numpy_generator(self._seed, "count noise", server_round)
        share = 0.5 + (count + rng.normal(0.0, privacy.count_noise)) / privacy.expected
        with np.errstate(over="ignore"):
            self.clip *= float(np.exp(-privacy.clip_learning_rate * (share - privacy.quantile)))
        if not 0 < self.clip < math.inf:
            raise RunError(
                f"central_privacy: after round {server_round} the clip is {self.clip:g}, moved by the noise of the "
                "count; lower central_privacy.count_noise or clip_learning_rate"
            )
        log.info("the clip of the next round is %.4g", self.clip)

    def _make_reply(self, broadcast: ArrayRecord, before: Vector, mean: Vector) -> Message:
        """Return the reply of a client that would have sent the noisy mean."""
        arrays: dict[str, Array] = {}
        for name, array in broadcast.items():
            sent_name = _GRADIENT + name if name in self._gradients else name
            values = array.numpy()
            if sent_name in mean:
                values = (before[sent_name] + mean[sent_name]).astype(values.dtype)
            arrays[sent_name] = Array(np.asarray(values))
        metrics: Mapping[str, Any] = {self.strategy.weighted_by_key: 1}
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord(dict(metrics))})
        return Message(content, dst_node_id=0, message_type=MessageType.TRAIN)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the wrapped strategy."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the metrics that the wrapped strategy aggregates; they are not released."""
        return self.strategy.aggregate_evaluate(server_round, replies)


def _read_update(record: ArrayRecord, before: Vector) -> Vector:
    """Return an update: gradients as they are, and weights less those that were sent."""
    return {name: record[name].numpy().astype(np.float64) - values for name, values in before.items()}
