"""Parts of a finding that the page of a run shows; the evaluator of its kind makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fedsim.base.errors import PluginError


@dataclass(frozen=True, kw_only=True)
class ImageGrid:
    """Claimed images to draw, with the true ones that they are assigned to and their captions.

    Attributes:
        claimed: `image channel height width` in [0, 1].
        true: likewise, in the same order; None where the truth is not known.
        psnr: in dB; empty where the truth is not known.
        certified: whether the attack is sure of each image; empty where it never says.
        steps: `step image channel height width`, dummy images at `iterations`; None where the
            attack kept none.
        iterations: of `steps`.
    """

    claimed: Tensor
    true: Tensor | None = None
    psnr: Sequence[float] = ()
    certified: Sequence[bool] = ()
    steps: Tensor | None = None
    iterations: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """Claimed rows of a table to show, with the true ones that they are assigned to.

    Attributes:
        claimed: `row feature` in [0, 1].
        true: likewise, in the same order; None where the truth is not known.
        entropy: `row column`, how unsure the attack is of a value; None where it never says.
        right: `row column`, whether a value counts as recovered; None where the columns are not
            known.
    """

    claimed: Tensor
    true: Tensor | None = None
    entropy: Tensor | None = None
    right: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ClaimedWord:
    """One claimed word.

    Attributes:
        right: whether the true text has it at this position, or anywhere for a set of words; True
            where the truth is not known.
    """

    text: str
    right: bool


@dataclass(frozen=True, kw_only=True)
class TextPair:
    """True text and the words of the claimed text assigned to it; or two sets of words.

    The true text is empty where it is not known.
    """

    true: str
    claimed: Sequence[ClaimedWord]


@dataclass(frozen=True, kw_only=True)
class RocCurve:
    """ROC curve of membership scores.

    Attributes:
        false_positive_rates: `point`, share of non-members at or above a threshold, ascending from
            0 to 1.
        true_positive_rates: `point`, share of members there.
    """

    false_positive_rates: Tensor
    true_positive_rates: Tensor

    def true_positive_rate(self, rate: float) -> float:
        """Return the highest true-positive rate at a false-positive rate of at most `rate`."""
        return float(self.true_positive_rates[self.false_positive_rates <= rate].max())


@dataclass(frozen=True, kw_only=True)
class DisplayTable:
    """Table of a finding, such as its claims beside the truth.

    Attributes:
        title: what it shows.
        columns: names of the columns.
        rows: the cells of each row, texts or numbers, one for each column.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows, 1):
            if len(row) != len(self.columns):
                raise PluginError(
                    f"table '{self.title}': row {number} has {len(row)} cells, expected {len(self.columns)}, one "
                    "for each column"
                )


@dataclass(frozen=True, kw_only=True)
class DisplayMatrix:
    """Matrix of a finding, which the page draws as a heat map.

    Attributes:
        title: what it shows, and what a darker cell means.
        values: `row column`.
        rows: names of the rows; by default their numbers.
        columns: names of the columns; likewise.
        corner: what rows and columns are, such as `true / claimed`.
    """

    title: str
    values: Tensor
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    corner: str = ""

    def __post_init__(self) -> None:
        if self.values.ndim != 2:
            raise PluginError(
                f"matrix '{self.title}': its values have shape {tuple(self.values.shape)}, expected rows and columns"
            )
        for side, names, size in zip(("rows", "columns"), (self.rows, self.columns), self.values.shape, strict=True):
            if names and len(names) != size:
                raise PluginError(f"matrix '{self.title}': {len(names)} names of {side}, expected {size}")


@dataclass(frozen=True, kw_only=True)
class Display:
    """Parts of a finding that a report page shows, besides the attack's own curves.

    Images, rows, texts and the ROC curve belong to kinds that the page knows. Numbers, tables and
    matrices suit any kind: the page shows them below the name of the attack, and escapes their
    texts.

    Attributes:
        examples: number of claimed examples; of a bag of words, number of claimed words.
        has_truth: whether the truth is shown beside them.
        images: to draw.
        rows: of a table.
        drawings: SVG of each example, claimed over true, that nothing else shows.
        texts: claimed and true; of a bag of words, one pair of sets, cut to the first words.
        is_bag_of_words: whether the attack claims which words occur, and no texts.
        is_typical: whether the finding claims what classes look like.
        roc: of membership scores; only the evaluator can compute it.
        curves: further ones that only the evaluator can compute: name to iterations and values.
        numbers: named numbers.
        tables: of any content.
        matrices: to draw as heat maps.
    """

    examples: int = 0
    has_truth: bool = False
    images: ImageGrid | None = None
    rows: TableRows | None = None
    drawings: Sequence[str] = ()
    texts: Sequence[TextPair] = ()
    is_bag_of_words: bool = False
    is_typical: bool = False
    roc: RocCurve | None = None
    curves: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    tables: Sequence[DisplayTable] = ()
    matrices: Sequence[DisplayMatrix] = ()
