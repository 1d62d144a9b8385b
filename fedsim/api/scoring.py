"""Score claims of one's own, such as another program's reconstructions, beside what guesses get; no run is needed."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Column, Table

from fedsim.api.claimed_examples import (
    find_modality_name,
    is_in_other_units,
    read_claim,
    read_examples,
    read_labels,
    read_public,
)
from fedsim.api.in_memory import value_bounds
from fedsim.audit.evaluation.claim_units import doubt_units
from fedsim.audit.evaluation.doubts import collect_doubts
from fedsim.audit.evaluation.identification import IDENTIFIED
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.scoring import claimed_data, score_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.scores import score_row
from fedsim.base.randomness import generator, serialize_calls, use_one_thread
from fedsim.federation.data_folder import find_weights_folder
from fedsim.interfaces.findings import Reconstruction, Texts
from fedsim.report.verdicts import score_readings

if TYPE_CHECKING:
    import pandas as pd  # at run time where a frame is made, as it takes a third of a second

log = logging.getLogger(__name__)

_WIDTH = 100
"""Columns of the table."""


@dataclass(frozen=True)
class ClaimScores(Mapping[str, Score]):
    """Scores by metric; as a text a short table.

    Attributes:
        frame: a row for each metric: its `value` and `floor`, the guess `floor_guess` that gets it, and the `verdict`
            with `why` it is so, as in a report on one victim.
        doubt: why the scores may say less, or more, than they seem to; empty where nothing speaks against them.
    """

    frame: pd.DataFrame
    scores: Mapping[str, Score]
    doubt: str = ""

    def __getitem__(self, metric: str) -> Score:
        return self.scores[metric]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    def __repr__(self) -> str:
        table = Table("metric", "score", "best guess", Column("verdict", overflow="fold"), box=None, pad_edge=False)
        for row in self.frame.to_dict("records"):
            value = "–" if math.isnan(row["value"]) else f"{row['value']:.4g}"
            floor = "–" if math.isnan(row["floor"]) else f"{row['floor']:.4g} {row['floor_guess']}"
            table.add_row(row["metric"], value, floor, ": ".join(filter(None, (row["verdict"], row["why"]))))
        text = StringIO()
        console = Console(file=text, width=_WIDTH, markup=False, emoji=False, highlight=False, color_system=None)
        console.print(table)
        if self.doubt:
            console.print(self._doubt_sentence)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _repr_html_(self) -> str:
        html: str = self.frame.to_html(index=False, float_format="{:.4g}".format)
        return f"{html}<p>{escape(self._doubt_sentence)}</p>" if self.doubt else html

    @property
    def _doubt_sentence(self) -> str:
        return f"The scores are in doubt: {self.doubt}."


@serialize_calls
@use_one_thread()
def score(
    claimed: Reconstruction | Texts | Any,
    truth: Any,
    *,
    labels: Any = None,
    true_labels: Any = None,
    public: Any = None,
    public_labels: Any = None,
    value_range: tuple[Any, Any] = (0.0, 1.0),
    modality: str = "",
    padding: int | None = None,
    seed: int = 0,
) -> ClaimScores:
    """Score claimed examples against the true ones by all metrics, beside the floor: what the best guess gets.

    Args:
        claimed: `claim ...`, numbers or tokens, in any order and number; or a finding, whose values are in [0, 1].
        truth: `example ...`, what the client held.
        labels: `claim`, the claimed classes or targets; they are scored, too.
        true_labels: `example`, the true ones, from which guesses know the classes.
        public: `example ...`, public examples of the same kind, in the same units; those that equal a true one are
            left out. From them come the best guesses, and how often claims
            identify an example by chance; a verdict needs at least twenty times as many as the client held.
        public_labels: `example`, their classes or targets; needed where there are `true_labels`.
        value_range: lowest and highest value, one pair or one value a channel.
        modality: name of the kind of examples; by default it follows from the number of axes.
        padding: the token that fills short texts up.
        seed: of guesses that are drawn at random.

    Raises:
        ConfigError: the examples differ in kind or shape, or leave the range.
    """
    bounds = value_bounds(value_range, "score") or ([0.0], [1.0])
    true = read_examples("truth", truth, bounds)
    modality = find_modality_name(modality, true)
    finding = read_claim(claimed, bounds, true)
    if finding is not claimed and is_in_other_units(claimed_data(finding), true):
        log.warning("score: claimed: varies far less than the truth; if its unit is another, use that of value_range")
    # Without labels all examples count as of one class; labels that are not claimed count as known.
    claimed_labels, true_classes = read_labels(claimed, labels, true_labels, len(true), len(claimed_data(finding)))
    has_labels, is_labelled = true_classes is not None, claimed_labels is not None
    if true_classes is None:
        true_classes = torch.zeros(len(true), dtype=torch.int64)
    if claimed_labels is None:
        claimed_labels = true_classes[torch.arange(len(claimed_data(finding))) % len(true)]
    scored_truth = Truth(data=true, labels=true_classes, padding=padding, modality=modality)
    scores = score_examples(
        dataclasses.replace(finding, labels=claimed_labels),
        scored_truth,
        public=read_public(public, public_labels, bounds, true, true_classes if has_labels else None),
        rng=generator(seed, "score"),
        weights=find_weights_folder(),
        labels_granted=not is_labelled,
    )
    count = len(scored_truth.without_empty_texts().labels)
    scores = [_explain_no_others(item) if public is None and count else item for item in scores]
    with collect_doubts() as doubts:
        if true.is_floating_point():
            doubt_units(claimed_data(finding), true, "score: claimed")
    return ClaimScores(_make_frame(scores, count), {item.metric: item for item in scores}, "; ".join(doubts))


def _explain_no_others(item: Score) -> Score:
    """Say of identification, where there are no public examples, what is missing here."""
    if item.metric != IDENTIFIED:
        return item
    return Score.from_reason(IDENTIFIED, "hand over public examples, among which the true ones are to be identified")


def _make_frame(scores: Sequence[Score], count: int) -> pd.DataFrame:
    """Return the table of scores of `count` examples of one victim, with verdicts."""
    import pandas as pd

    facts = {"attack": "claims", "victim": 0, "round": 1, "repeat": 0, "variant": "", "settings": "{}", "granted": ""}
    readings = score_readings([facts | score_row(item, count) for item in scores], {})
    rows = []
    for reading in readings:
        item = reading.summary
        values = {"metric": item.metric, "value": item.mean, "floor": item.floor, "floor_guess": item.floor_guess}
        rows.append(values | {"verdict": reading.verdict, "why": reading.remark})
    return pd.DataFrame(rows)
