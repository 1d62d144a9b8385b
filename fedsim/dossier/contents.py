"""Contents of a dossier: the models of `dossier.json`, whose JSON schema is `dossier.schema.json`.

All numbers are kept as they were computed. JSON has no infinity, so that one is a text there.
"""

from __future__ import annotations

import datetime
import math
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT: Final = 1
LEAKS: Final = "leaks"
NOT_CONCLUDED: Final = "not concluded"
NO_LEAK: Final = "no leak shown"
NOTHING_KNOWN: Final = "nothing can be said"
INFINITE: Final = "infinite"
MINUS_INFINITE: Final = "-infinite"
REACHED: Final = "reached"
NOT_REACHED: Final = "not reached"
CANNOT_DECIDE: Final = "cannot be decided"
Number = float | Literal["infinite", "-infinite"] | None
"""A number; None where it is not known."""
DossierVerdict = Literal["leaks", "not concluded", "no leak shown", "nothing can be said"]
Outcome = Literal["reached", "not reached", "cannot be decided"]


def to_number(value: float | None) -> Number:
    """Return a float as JSON can hold it.

    >>> to_number(0.5), to_number(math.inf), to_number(math.nan)
    (0.5, 'infinite', None)
    """
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        return INFINITE if value > 0 else MINUS_INFINITE
    return float(value)


def to_float(number: Number) -> float:
    """Return a number of a dossier as a float, NaN where it is not known."""
    if isinstance(number, str):
        return math.inf if number == INFINITE else -math.inf
    return math.nan if number is None else number


def format_number(number: Number) -> str:
    """Format a number for a page.

    >>> format_number(0.123456), format_number("infinite"), format_number(None)
    ('0.1235', '∞', '–')
    """
    value = to_float(number)
    if math.isnan(value):
        return "–"
    return f"{value:.4g}".replace("inf", "∞")


def start_sentence(text: str) -> str:
    """Return a text with a capital at its beginning, unless that is the name of a file.

    >>> start_sentence("run 1: is whole"), start_sentence("manifest.json: is gone"), start_sentence("a/b is gone")
    ('Run 1: is whole', 'manifest.json: is gone', 'a/b is gone')
    """
    word = text.partition(" ")[0].rstrip(":;,.")
    return text if set("./\\_") & set(word) else text[:1].upper() + text[1:]


class Part(BaseModel):
    """Part of a dossier; it has no other fields, and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HashedFile(Part):
    """File that a dossier was computed from."""

    file: str = Field(description="path in the folder of the run or sweep")
    sha256: str


class Evidence(Part):
    """What a dossier was computed from."""

    folder: str = Field(description="folder of the run or sweep, relative to that of the dossier")
    run: str = Field(description="id of the run in its manifest; empty for a sweep, or where there is no manifest")
    files: list[HashedFile] = Field(description="the manifest, which has the hashes of all other files, or the tables")
    integrity: str = Field(description="whether the files are those that were written")
    is_intact: bool
    data: str = Field(description="SHA-256 of examples and partition; empty where it was not noted")
    settings: str = Field(description="SHA-256 of all settings; empty where they are not known")
    code: dict[str, str] = Field(description="table to the hash of the code of plug-ins of other packages than fedsim")


class ObservingParty(Part):
    """Party of a federation."""

    who: str
    sees: str
    is_examined: bool
    remark: str


class Aim(Part):
    """What an attack can be after, and who tried that."""

    aim: str
    attacks: list[str]
    why_not: str = Field(description="why it was not tried; empty where it was")


class MissingAttack(Part):
    """Attack that was asked for and has no result."""

    attack: str
    why: str
    is_failure: bool = Field(
        description="whether it was requested and failed; otherwise it was ruled out by the threat model or the data, "
        "or it was not requested"
    )


class Coverage(Part):
    """What was attacked."""

    clients: int = Field(description="clients whose messages are recorded")
    victims: list[int] = Field(description="clients that were attacked, each member of an attacked sum among them")
    rounds: list[str] = Field(description="attacked rounds; `1-3+7`, `1-5 by 2` for an attack on several at once")
    attacked_rounds: list[int] = Field(description="each attacked round")
    recorded_rounds: int
    granted: list[str] = Field(description="what the adversary was granted besides the messages, as usual")
    unusual: list[str] = Field(description="what it was granted beyond that")
    victim_data: list[str] = Field(description="which parts of the victims' own data these are")
    withheld: list[str] = Field(description="what it is usually granted and was not")


class WorstScore(Part):
    """Worst score of any client, round and random start."""

    client: int
    round: str
    value: Number
    floor: Number = Field(description="what the best guess without any message gets of the same client")
    is_exact: bool = Field(description="whether all examples that it is about were recovered exactly")


class Result(Part):
    """Scores of one attack by one metric."""

    setting: str = Field(description="setting of a sweep; empty for a run")
    is_defended: bool
    attack: str
    metric: str = Field(description="name, as thresholds use it")
    title: str = Field(description="its name in a text, with its unit")
    higher_is_better: bool = Field(description="whether a higher value means that more leaked")
    mean: Number
    low: Number = Field(description="where the 95 % confidence interval of the mean begins")
    high: Number
    floor: Number = Field(description="mean of what the best guess gets")
    floor_guess: str
    victims: int
    unscored: int = Field(description="further victims without a score")
    verdict: str
    remark: str
    is_baseline: bool = Field(description="whether it does not count as an attack")
    is_first: bool = Field(description="whether it is the metric by which the attack is judged first")
    open_reason: str = Field(description="why it leaves open that something leaks; empty where it does not")
    worst: WorstScore | None


class Proof(Part):
    """Guarantee of one defense."""

    setting: str
    defense: str
    epsilon: Number = Field(description="of the client that spent most; infinite where nothing is proved")
    delta: Number
    neighbours: str = Field(description="unit and adjacency: which two inputs cannot be distinguished")
    accountant: str
    client: int | None = Field(description="the client that spent most")
    rounds: int
    against: str = Field(description="against whom it holds, and what it does not cover")
    promise: str = Field(description="how much protection an epsilon of this size gives, in a word")


class MeasuredEpsilon(Part):
    """Lower bound of epsilon that was measured."""

    setting: str
    client: int | None
    defense: str
    measured: Number
    proved: Number
    delta: Number
    correct: int | None
    guesses: int | None
    canaries: int | None
    confidence: Number
    uses_curve: bool = Field(description="whether the bound is that of noise of the declared kind alone")
    is_broken: bool = Field(description="whether more was measured than is proved")


class ExposedClient(Part):
    """Client that is exposed most by one measure, before anything was sent."""

    quantity: str
    meaning: str
    client: int
    value: Number
    clients: int = Field(description="clients that measured it")


class Accuracy(Part):
    """What the model is worth."""

    sentence: str
    accuracy: Number = Field(description="on public test examples, or as clients reported it, at the last evaluation")
    guess: Number = Field(description="what always answering the most frequent class gets")
    examples: int | None
    no_learning: str = Field(description="that the model has not learnt; empty where it has")


class SettingAnswer(Part, from_attributes=True):
    """Row of a sweep's answer."""

    name: str
    is_defended: bool
    verdict: str
    reason: str
    leakage: str
    difference: str
    accuracy: str
    accuracy_change: str
    proved: str
    promise: str
    measured: str
    no_learning: str


class Caution(Part):
    """Pitfall of the evaluation."""

    title: str
    detail: str
    reason: str


class Reference(Part):
    """Text that auditors refer to."""

    name: str
    asks: str
    answered_in: str


class ThresholdResult(Part):
    """Threshold of the user, and whether it was reached."""

    threshold: str
    outcome: Outcome
    why: str
    observed: Number


class Dossier(Part):
    """Dossier of a run or a sweep."""

    format: Literal[1] = FORMAT
    kind: Literal["run", "sweep"]
    name: str
    written: datetime.date
    versions: dict[str, str] = Field(description="of fedsim and what it computes with, when this was written")
    review_by: datetime.date | None
    verdict: DossierVerdict
    answer: list[str] = Field(description="the summary in a few sentences")
    facts: dict[str, str] = Field(description="what was run, term by term")
    observers: list[ObservingParty]
    coverage: Coverage
    aims: list[Aim]
    missing: list[MissingAttack]
    results: list[Result]
    settings: list[SettingAnswer] = Field(description="of a sweep; none for a run")
    no_proof: str = Field(description="why nothing is proved; empty where something is")
    proofs: list[Proof]
    measured: list[MeasuredEpsilon]
    exposed: list[ExposedClient]
    accuracy: Accuracy | None = Field(description="None for a sweep, whose settings have it")
    cautions: list[Caution]
    no_cautions: str = Field(description="why pitfalls were not looked for; empty where they were")
    changes: list[str] = Field(description="what would change the verdict")
    validity: list[str]
    references: list[Reference]
    notes: list[str] = Field(description="what is damaged or could not be read")
    thresholds: list[ThresholdResult]
    evidence: Evidence


class SealedDossier(Part):
    """`dossier.json`: a dossier with its seal."""

    seal: dict[str, str] = Field(description="`sha256` of the dossier, and `hmac-sha256` where it is signed")
    dossier: Dossier
