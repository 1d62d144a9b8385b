"""Attacks on texts: the dummy data are embeddings, and the words nearest to them are what is claimed.

The server knows the weights of the embedding. So an attack on numbers is given the network behind it (`behind`), whose
inputs are `dimension place` arrays, and the words are read from what it finds. What the gradient of the embedding
itself gives away is what `EmbeddingRows` claims.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.engine.descent import following
from adversaries.engine.matching import GradientInversion
from adversaries.engine.recipe import MEAN_GRADIENT
from adversaries.inversion.deep_leakage import DeepLeakage
from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.sent_gradients import Messages
from adversaries.inversion.tgias_ro import TemporalInversion
from adversaries.labels.updates import count_labels
from adversaries.scene import STEPPING, Scene
from adversaries.text.behind import BehindEmbedding, lexicon_of
from adversaries.text.embedding import Nearest, Words, embedding_of, reads_tokens, touched_tokens
from adversaries.text.word_exchange import exchange
from fedsim.attacks import Attack, Knowledge, Paper, Progress, single_update
from fedsim.errors import ConfigError
from fedsim.findings import Reconstruction, Texts
from fedsim.recording.transcript import Transcript

log = logging.getLogger("fedsim." + __name__)
TAG = Paper(
    title="TAG: Gradient Attack on Transformer-based Language Models",
    authors="Deng, Wang, Li, Wang, Shang, Liu, Rajasekaran, Ding",
    venue="Findings of EMNLP",
    year=2021,
    url="https://arxiv.org/abs/2103.06819",
)
_NEEDS = frozenset({"model", "loss", "input_shape"})
_EXCHANGED_BY = 2
"""Gradients that an exchange of words is judged by; more take longer."""


@dataclass(frozen=True, kw_only=True)
class TextAttack(Attack):
    """Settings of the attacks that find vectors first and then the words nearest to them.

    Args:
        nearest: how the token nearest to a found vector is looked up: by `euclidean` distance or by `cosine`.
        words: which tokens may be claimed: those of the whole `vocabulary`, or those `touched`, whose row of the
            embedding's gradient is not zero.
    """

    nearest: Nearest = "cosine"
    words: Words = "vocabulary"

    needs: ClassVar[frozenset[str]] = _NEEDS
    uses: ClassVar[frozenset[str]] = frozenset({"labels"})
    texts: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class FromOneUpdate(TextAttack, GradientInversion):
    """Base of the attacks that match one update: hands the network behind the embedding to an attack on numbers."""

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Texts:
        update = single_update(transcript, victim)
        behind = BehindEmbedding.of(update, knowledge, words=self.words, nearest=self.nearest)
        return behind.texts(self.invert(behind.update(update), behind.knowledge, rng, progress))


@dataclass(frozen=True, kw_only=True)
class TemporalTextInversion(TextAttack, TemporalInversion):
    """TGIAs-RO on texts: one mini-batch of them from the gradients that a FedSGD client sent in several rounds.

    As `tgias-ro`, whose settings these are, but the estimate is of embeddings, and what is claimed are the words
    nearest to them.

    Args:
        refinements: how often, after the last iteration, the estimate is set to the words nearest to it, texts of one
            label exchange words (see `adversaries.text.word_exchange`), and as many iterations follow from there, at
            half the step size; progress counts all, (1 + refinements) x iterations. The words with the smallest
            distance are claimed.

    References:
        Li et al.: Temporal Gradient Inversion Attacks with Robust Optimization, 2023, App. B.4.2. Differs: as
        `tgias-ro`; the embedding of a word is taken to be the same in all rounds, that of the first; estimates are kept
        within the embedding's values; the paper does not refine.
    """

    refinements: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refinements < 0:
            raise ConfigError(f"refinements: expected at least 0, got {self.refinements}")

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Texts:
        messages = Messages.of(transcript, victim)
        first = messages.read(messages.rounds[0])
        behind = BehindEmbedding.of(first, knowledge, words=self.words, nearest=self.nearest)
        return behind.texts(self.invert(messages.changed(behind.update), behind.knowledge, rng, progress))

    def _optimise(self, scenes: Sequence[Scene], estimate: Tensor, progress: Progress) -> Reconstruction:
        """See `TemporalInversion`."""
        units, evaluate = scenes[0].units, self._objective(scenes[:_EXCHANGED_BY])
        lexicon = lexicon_of(scenes[0])

        def standing_for(tokens: Tensor) -> Tensor:
            return (lexicon.written(tokens).to(estimate).transpose(1, 2) - units.centre) / units.scale

        def distance(tokens: Tensor) -> float:
            points = standing_for(tokens)
            values, _ = evaluate(points.expand(min(_EXCHANGED_BY, len(scenes)), *points.shape))
            return float(values.mean())

        if self.refinements:
            turns = 1 + self.refinements
            log.info("%s: %d turns of %d iterations each, counted together", scenes[0].where, turns, self.iterations)
        claims, curves, attack = [], [], self
        for turn in range(1 + self.refinements):
            onward = following(progress, turn * self.iterations, (1 + self.refinements) * self.iterations)
            found = super(TemporalTextInversion, attack)._optimise(scenes, estimate, onward)
            if not self.refinements:
                return found
            curves.append(found.trace["objective"])
            tokens = lexicon.read(units.to_model(units.from_unit_range(found.data.to(estimate))).transpose(1, 2))
            tokens, now = exchange(tokens, scenes[0].labels, distance)
            estimate, attack = standing_for(tokens), replace(self, step_size=self.step_size / 2)
            claims.append((now, units.to_unit_range(estimate)))
        return replace(
            found,
            data=min(claims, key=itemgetter(0))[1],
            trace={"objective": torch.cat(curves)},
            snapshots=None,
            snapshot_iterations=None,
        )


@dataclass(frozen=True, kw_only=True)
class TextLeakage(FromOneUpdate, DeepLeakage):
    """DLG on texts: their embeddings and labels from one gradient.

    As `dlg`, whose settings these are, but the dummy data are embeddings, and what is claimed are the words nearest
    to them.

    References:
        Zhu, Liu, Han: Deep Leakage from Gradients, NeurIPS 2019, Sect. 4.3, where the gradient is that of BERT.
        Differs: as `dlg`.
    """

    needs: ClassVar[frozenset[str]] = _NEEDS | MEAN_GRADIENT | {"num_classes"}
    uses: ClassVar[frozenset[str]] = STEPPING


@dataclass(frozen=True, kw_only=True)
class TextInvertingGradients(FromOneUpdate, InvertingGradients):
    """Inverting Gradients on texts: their embeddings from one update, by the cosine.

    As `inverting-gradients`, whose settings these are (its total variation is for images only), but the dummy data are
    embeddings, and what is claimed are the words nearest to them.

    References:
        Geiping et al.: Inverting Gradients, NeurIPS 2020. Differs: as `inverting-gradients`; the paper has no texts.
    """

    uses: ClassVar[frozenset[str]] = MEAN_GRADIENT | STEPPING | {"labels"}


@dataclass(frozen=True, kw_only=True)
class EmbeddingRows(Attack):
    """Read off the embedding's gradient which words the victim's texts hold.

    A word that does not occur has a row of exact zeros. The rows that are not zero are claimed, those that moved most
    first, one after the other, over as many texts as the victim has; where there are more places than such words,
    they are claimed again. The attack does not say which text a word is from, at which place, or how often it occurs.
    No optimisation. Labels are granted, or counted from the last layer.

    References:
        Deng et al.: TAG: Gradient Attack on Transformer-based Language Models, 2021, for texts from gradients. Differs:
        reads the embedding's rows, which that paper matches along with the rest.
    """

    paper: ClassVar[Paper] = TAG
    needs: ClassVar[frozenset[str]] = _NEEDS
    uses: ClassVar[frozenset[str]] = MEAN_GRADIENT | {"labels", "momentum", "optimizer"}
    texts: ClassVar[bool] = True
    main_metric: ClassVar[str] = "words_found"

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Texts:
        update = single_update(transcript, victim)
        model, layer = reads_tokens(knowledge)
        embedding = embedding_of(update, model, layer)
        touched = touched_tokens(embedding, f"round {update.round}, client {victim}")
        ranked = touched[embedding.moved[touched].norm(dim=1).argsort(descending=True, stable=True)]
        assert knowledge.input_shape is not None
        places = torch.arange(update.num_examples * knowledge.input_shape[0])
        tokens = ranked[places % len(ranked)].reshape(update.num_examples, -1)
        progress(1, 1, {"objective": 0.0})
        if knowledge.labels is not None and len(knowledge.labels) == update.num_examples:
            return Texts(tokens=tokens, labels=knowledge.labels)
        behind = BehindEmbedding.of(update, knowledge, words="vocabulary", nearest="cosine")
        assert behind.knowledge.model is not None
        rest, network = behind.update(update), behind.knowledge.model()
        labels = count_labels(rest, behind.knowledge, network, rest.before, rest.after or rest.before, rng)
        return Texts(tokens=tokens, labels=labels)
