"""Proved ceilings of scores: what no attack exceeds if the mechanism is what it says.

A ceiling is claimed only where swapping a true record for another of those it is told from leaves
all else alike, so that the trade-off curve of one replaced record applies. Elsewhere the reason is
said, and no number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedsim.audit.evaluation.memberships import RATES
from fedsim.base.errors import name_rounds
from fedsim.interfaces.knowledge import HELD_OUT
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.ceilings import TradeOff, compute_trade_off
from fedsim.privacy.ledger import Row, collect_mechanisms, is_central, is_shared_noise
from fedsim.recording.adversary_role import AdversaryRole

FALSE_ALARMS = 1e-3
"""Probability that any score of a run is said to be above a ceiling that it keeps."""
_MEMBERSHIP_METRICS = ("membership_auc", "membership_accuracy", *RATES)
_LABEL_PARTITIONS = ("iid", "dirichlet", "pathological", "quantity-skew")
"""Partitions that look at labels and sizes alone, so that records of a class are exchangeable."""
_TELLING_FACTS = ("auxiliary", "candidates", "partial_records", "records")
"""Facts that tell the victim's examples from those that they are picked out of."""
_REASONS = {
    "attribute_accuracy": "how well a record's attribute is guessed without messages is known only from below",
    "attribute_balanced_accuracy": "how well a record's attribute is guessed without messages is known only from below",
    "source_accuracy": "a record that another client holds changes the messages of two clients",
}
_NO_PRIOR = "the score is not a choice among finitely many candidates, each as likely as the next"
_OTHER_RECORDS = "records of other clients enter messages as well, so that a swap changes those of two clients"


@dataclass(frozen=True, kw_only=True)
class ProvedCeiling:
    """One score beside the most that its defense lets any attack reach.

    Attributes:
        attack: title of the attack, and who made it where that was not the server.
        victim: id of the attacked client, or of its group.
        round: as in `scores.csv`.
        metric: name of the metric.
        value: the score.
        ceiling: largest expected value; NaN where none can be claimed.
        reason: why there is none, a phrase; empty where there is one.
        chance: of a score that high or higher from an attack that reaches the ceiling, candidates
            counted as independent; 1 where there is no ceiling.
        tests: number of scores of the run that have ceilings.
        curve: the trade-off curve behind it; None where there is none.
    """

    attack: str
    victim: str
    round: str
    metric: str
    value: float
    ceiling: float = math.nan
    reason: str = ""
    chance: float = 1.0
    tests: int = 1
    curve: TradeOff | None = field(default=None, repr=False)

    @property
    def is_exceeded(self) -> bool:
        """Return whether the score is significantly above its ceiling."""
        return self.value > self.ceiling and self.chance * self.tests <= FALSE_ALARMS

    @property
    def sentence(self) -> str:
        """Say what is wrong where the ceiling is exceeded."""
        return (
            f"{self.attack}: {self.metric} = {self.value:.4g} of client {self.victim} in {name_rounds(self.round)} is "
            f"above the proved ceiling of {self.ceiling:.4g} (by chance in at most {FALSE_ALARMS:g} of runs), so the "
            "mechanism, its accountant or the draw of candidates is broken; run `fedsim audit-defense` on the defense"
        )


def find_trade_off(
    ledger: Sequence[Row], clients: Sequence[int], last_round: int, attacker: str | Sequence[int | str] = "server"
) -> TradeOff | str:
    """Return the trade-off curve of what clients sent up to a round, or why there is none.

    A round's broadcast depends on what a client sent before, so all its rounds count. Its server
    knows when it took part, so nothing is amplified by the sampling of clients. Other clients'
    messages are no matter: they depend on its data through the broadcast alone. The noise of a trusted
    server counts for others than it. They are taken to know who took part, so that amplification is
    left out for them, too.
    """
    curves: dict[tuple[Mechanism, ...], TradeOff | None] = {}
    reason = "no defense proves a guarantee"
    role = AdversaryRole.parse(attacker)
    if role.reads_messages and any(map(is_central, ledger)):
        reason = f"central_privacy holds for those who see the models alone, and this adversary is {role}"
        ledger = [row for row in ledger if not is_central(row)]
    if role.colluders and any(map(is_shared_noise, ledger)):
        reason = "clients that attack know their own shares of the noise, which does not count for them"
        ledger = [row for row in ledger if not is_shared_noise(row)]
    for defense in dict.fromkeys(row["defense"] for row in ledger):
        kinds = set()
        for client in clients:
            kinds.add(collect_mechanisms(ledger, defense, client, last_round))
        if len(kinds) > 1:
            reason = "the clients of the sum have different mechanisms"
            continue
        [mechanisms] = kinds
        if mechanisms is None:
            reason = f"{defense} declares no mechanism, only an epsilon"
        elif mechanisms:
            curves[mechanisms] = compute_trade_off(mechanisms)
    proved = [curve for curve in curves.values() if curve is not None]
    if proved:
        return min(proved, key=lambda curve: curve.accuracy)
    return "noise so small proves nothing below 1" if curves else reason


def compute_ceiling(
    row: Mapping[str, Any], knowledge: Mapping[str, Any], partition: str, curve: TradeOff | str
) -> tuple[float, str]:
    """Return the ceiling of a score, or NaN and the reason why none can be claimed."""
    metric = str(row["metric"])
    if isinstance(curve, str):
        return math.nan, curve
    if metric in _REASONS:
        return math.nan, _REASONS[metric]
    if metric != "identified" and metric not in _MEMBERSHIP_METRICS:
        return math.nan, _NO_PRIOR
    if partition not in _LABEL_PARTITIONS:
        return math.nan, f"a client's records may differ from others by the partition '{partition}' alone"
    if row.get("doubt"):
        return math.nan, "the score is in doubt"
    if metric == "identified":
        telling = [fact for fact in _TELLING_FACTS if knowledge.get(fact)]
        if telling:
            return math.nan, f"the attack was granted {telling[0]}, which distinguishes true records from others"
        return float(curve.true_positive_rate(float(row["floor"]))), ""
    if knowledge.get("candidates") != HELD_OUT:
        return math.nan, _OTHER_RECORDS
    if metric == "membership_auc":
        return curve.area, ""
    if metric == "membership_accuracy":
        return curve.accuracy, ""
    return float(curve.true_positive_rate(RATES[metric])), ""


def compute_chance(row: Mapping[str, Any], ceiling: float, curve: TradeOff) -> float:
    """Bound the probability of so high a score from an attack that reaches the ceiling.

    Candidates are counted as independent. Balanced accuracy claims half of them, so that members
    and others are right together: the members alone are a binomial count. A rate's threshold is
    where the next non-member would pass, so its true false-positive rate is at most the upper
    limit of a binomial share. An area under the curve is a U-statistic, for which Hoeffding's
    inequality holds.
    """
    from scipy.stats import beta, binom

    metric, value, count = str(row["metric"]), float(row["value"]), int(float(row["examples"]))
    members = count if metric == "identified" else count // 2
    if members < 1 or not value > ceiling:
        return 1.0
    if metric == "membership_auc":
        return math.exp(-2 * members * (value - ceiling) ** 2)
    hits = math.ceil(value * members - 1e-9)
    if metric not in RATES:
        return float(binom.sf(hits - 1, members, ceiling))
    # Half of the error is for the threshold's false-positive rate, half for the hits above it.
    missed = math.floor(members * RATES[metric])
    highest_rate = float(beta.ppf(1 - FALSE_ALARMS / 1000, missed + 1, members - missed))
    highest_share = float(curve.true_positive_rate(highest_rate))
    return FALSE_ALARMS / 1000 + float(binom.sf(hits - 1, members, highest_share))
