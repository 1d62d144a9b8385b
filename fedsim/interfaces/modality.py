"""Interface of modalities: what one kind of examples is, such as images, rows of a table, or series.

A data set names its modality (`Dataset.modality`), and `Task.modality` hands the name on. Code
that has to know what the axes of an example mean asks the modality of that name, a plug-in of the
group `fedsim.modalities`, and never the number of axes. A metric names the modalities that it is for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsim.base import metrics


@dataclass(frozen=True, kw_only=True)
class PublicExamples:
    """Public examples of the same kind as the victim's data.

    Attributes:
        data: `example ...` in [0, 1], or `example position` tokens.
        labels: `example`, class indices.
    """

    data: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class GuessMaterial:
    """All that a guess about a victim's data may be made from; nothing of it is an update.

    Attributes:
        count: number of examples to guess.
        shape: of one example.
        labels: `claim`, the claimed class indices or targets; never more than `count`.
        public: public examples of the same kind; None where none are known.
        rng: draws whatever is random.
        padding: the token that fills up short texts; None where there is none.
    """

    count: int
    shape: tuple[int, ...]
    labels: Tensor
    public: PublicExamples | None
    rng: torch.Generator
    padding: int | None = None


@dataclass(frozen=True)
class Modality(ABC):
    """Kind of examples: what their axes mean, what guesses get, and how a page shows them.

    A modality is a frozen dataclass without fields, because a data set names it and gives it no
    settings. Examples are numbers in [0, 1] wherever a method gets them, or tokens.

    Attributes:
        axes: names of the axes of one example, in the order in which models get them. Along the
            first one values may have ranges, means and deviations of their own.
        noun: what one example is called.
        plural: what several are called.
        has_tokens: whether inputs are integers below a vocabulary; otherwise they are numbers in
            the data set's value range.
        smooth_axes: those of `axes` along which neighbouring values are alike. The matching engine
            takes its total variation along them; without any, that prior is 0.
        trial_shape: a small shape that an example can have, by which `fedsim check` tries it; by
            default each axis has 8 entries.
        shown_as: what a page makes of claimed examples: a grid of `images`, `rows` of a table,
            `texts`, or `drawings` by `draw_example`.
    """

    axes: ClassVar[tuple[str, ...]]
    noun: ClassVar[str] = "example"
    plural: ClassVar[str] = "examples"
    has_tokens: ClassVar[bool] = False
    smooth_axes: ClassVar[tuple[str, ...]] = ()
    trial_shape: ClassVar[tuple[int, ...]] = ()
    shown_as: ClassVar[Literal["images", "rows", "texts", "drawings"]] = "drawings"

    @classmethod
    def describe_facts(cls) -> list[str]:
        """Return what `fedsim show` prints besides the docstring, a line each."""
        values = "tokens" if cls.has_tokens else "numbers"
        facts = [f"axes: {', '.join(cls.axes)}; inputs are {values}", f"shown as: {cls.shown_as}"]
        if cls.smooth_axes:
            facts.append(f"neighbours are alike along: {', '.join(cls.smooth_axes)}")
        return facts

    @abstractmethod
    def guess_examples(self, material: GuessMaterial) -> Mapping[str, Tensor]:
        """Return guesses that use no update, by name: `count` examples each.

        The best of them by a metric is the floor of a score. `fedsim.modalities.guesses` has the
        general ones, such as noise and public examples.
        """

    def misfits(self, claimed: Tensor, true: Tensor) -> Tensor:
        """Return `true claimed`, how badly each claim fits each true example.

        Claims are assigned one-to-one to the true examples so that the sum is least. By default it
        is the mean squared error.
        """
        return metrics.mean_squared_errors(claimed, true)

    def assign_claims(self, claimed: Tensor, true: Tensor) -> Tensor:
        """Return `true`, the index of the claim assigned to each true example; -1 for none."""
        return metrics.assign_examples(claimed, true, self.misfits)

    def pair_claims(self, claimed: Tensor, true: Tensor) -> Tensor:
        """Return the claim assigned to each true example; the middle of the range where none is."""
        return metrics.reorder_claims(claimed, true, self.assign_claims(claimed, true))

    def similarity(self, claimed: Tensor, examples: Tensor) -> Tensor:
        """Return `claim example`, the similarity of each claim and each example; higher is more similar.

        It decides which example a claim identifies, so it should tolerate the usual faults of claims: low
        contrast, wrong brightness and noise. By default it is the correlation over all values; that of
        an example whose values are all the same is 0.
        """
        return metrics.correlations(claimed, examples)

    def draw_example(self, claimed: Tensor, true: Tensor | None) -> str:
        """Return an SVG of one claimed example, over the true one where it is known.

        Only a modality that is `shown_as` drawings has to do this. Scripts and links are refused.
        """
        del claimed, true
        raise NotImplementedError(f"{type(self).__name__} draws no example; write draw_example")
