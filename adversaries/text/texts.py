"""Attacks on texts that optimise dummy embeddings and claim the nearest words.

The server knows the weights of the embedding. So a gradient inversion attacks the network without
it (`embedding_space`), whose inputs are `dimension position` arrays, and the words are read from
its result. `EmbeddingRows` claims what the gradient of the embedding itself reveals.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.inversion.deep_leakage import DeepLeakage
from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.sent_gradients import ClientUpdates
from adversaries.inversion.tgias_ro import TemporalInversion
from adversaries.text.embedding import (
    ClaimableWords,
    NearestMetric,
    find_token_embedding,
    read_embedding,
    tokens_with_gradient,
)
from adversaries.text.embedding_space import EmbeddingSpace, problem_lexicon
from adversaries.text.word_exchange import exchange_words
from fedsim.base.constraints import NonNegativeInt
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Attack, Knowledge, Paper, Progress, Subject, Target
from fedsim.interfaces.findings import Reconstruction, Texts
from fedsim.inversion.descent import offset_progress
from fedsim.inversion.labels.updates import check_label_source, count_labels
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import MEAN_GRADIENT_FACTS
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS
from fedsim.recording.wire_format import Update

log = logging.getLogger("fedsim." + __name__)
TAG_PAPER = cite("Deng2021")
_NEEDS = frozenset({"model", "loss", "input_shape"})
_EXCHANGE_GRADIENTS = 2
"""Number of gradients by which exchanges of words are compared; more take longer."""


@dataclass(frozen=True, kw_only=True)
class TextAttack(Attack):
    """Base of the attacks that reconstruct embeddings and claim the nearest words.

    Args:
        nearest: metric of the nearest token, `euclidean` or `cosine`.
        words: which tokens may be claimed: the whole `vocabulary`, or those `touched`, whose row of
            the embedding's gradient is not zero.
    """

    nearest: NearestMetric = "cosine"
    words: ClaimableWords = "vocabulary"

    needs: ClassVar[frozenset[str]] = _NEEDS
    uses: ClassVar[frozenset[str]] = frozenset({"labels"})
    subject: ClassVar[Subject] = "texts"
    vector_targets: ClassVar[bool] = False  # labels are counted as classes

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse a network without an embedding of tokens."""
        super().check_facts(knowledge, num_examples, granted)
        find_token_embedding(knowledge)

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse what the inversion of vectors refuses."""
        space = EmbeddingSpace.from_update(update, knowledge, words=self.words, nearest=self.nearest)
        super().check_message(space.convert_update(update), space.knowledge)


@dataclass(frozen=True, kw_only=True)
class SingleUpdateTextAttack(TextAttack, GradientInversion):
    """Base of the attacks that invert one update of the network without its embedding."""

    def _run(self, target: Target, progress: Progress) -> Texts:
        update = target.read_update()
        space = EmbeddingSpace.from_update(update, target.knowledge, words=self.words, nearest=self.nearest)
        update = space.convert_update(update)
        return space.claim_texts(self.invert(update, space.knowledge, target.rng, progress))


@dataclass(frozen=True, kw_only=True)
class TemporalTextInversion(TextAttack, TemporalInversion):
    """Reconstruct one mini-batch of texts from several of its gradients, as TGIAs-RO does.

    Has the settings of `tgias-ro`, but estimates embeddings and claims the nearest words.

    Args:
        refinements: how often, after the last iteration, the estimate is set to its nearest words,
            texts of one label exchange words (see `adversaries.text.word_exchange`), and as many
            iterations follow from there, at half the step size; progress counts all,
            (1 + refinements) x iterations. The words with the smallest distance are claimed.

    References:
        [Li2023b], App. B.4.2.
        Differs: as `tgias-ro`; the embedding is assumed to be the same in all rounds, that of the
        first; estimates are kept within the embedding's values; the paper does not refine.
    """

    refinements: NonNegativeInt = 0

    def _run(self, target: Target, progress: Progress) -> Texts:
        messages = ClientUpdates.from_target(target)
        first = messages.read(messages.rounds[0])
        space = EmbeddingSpace.from_update(first, target.knowledge, words=self.words, nearest=self.nearest)
        messages = messages.map_updates(space.convert_update)
        return space.claim_texts(self.invert(messages, space.knowledge, target.rng, progress))

    def _optimise(self, problems: Sequence[InversionProblem], estimate: Tensor, progress: Progress) -> Reconstruction:
        """Alternate the optimisation of `TemporalInversion` with exchanges of words."""
        num_runs = 1 + self.refinements
        if num_runs == 1:
            return super()._optimise(problems, estimate, progress)
        log.info("%s: %d turns of %d iterations each, counted together", problems[0].where, num_runs, self.iterations)
        units, evaluate = problems[0].scaling, self._objective(problems[:_EXCHANGE_GRADIENTS])
        lexicon = problem_lexicon(problems[0])

        def embed(tokens: Tensor) -> Tensor:
            return (lexicon.token_vectors(tokens).to(estimate).transpose(1, 2) - units.centre) / units.scale

        def distance(tokens: Tensor) -> float:
            points = embed(tokens)
            values, _ = evaluate(points.expand(min(_EXCHANGE_GRADIENTS, len(problems)), *points.shape))
            return float(values.mean())

        claims, curves, attack = [], [], self
        for run in range(num_runs):
            run_progress = offset_progress(progress, run * self.iterations, num_runs * self.iterations)
            result = super(TemporalTextInversion, attack)._optimise(problems, estimate, run_progress)
            curves.append(result.trace["objective"])

            # Go to the nearest words, exchange words, and go on from there with half the step size.
            vectors = units.to_model(units.from_unit_range(result.data.to(estimate))).transpose(1, 2)
            tokens, token_distance = exchange_words(lexicon.nearest_tokens(vectors), problems[0].labels, distance)
            estimate, attack = embed(tokens), replace(self, step_size=self.step_size / 2)
            claims.append((token_distance, units.to_unit_range(estimate)))
        return replace(
            result,
            data=min(claims, key=itemgetter(0))[1],
            trace={"objective": torch.cat(curves)},
            snapshots=None,
            snapshot_iterations=None,
        )


@dataclass(frozen=True, kw_only=True)
class TextLeakage(SingleUpdateTextAttack, DeepLeakage):
    """Reconstruct texts and labels from one gradient, as DLG does.

    Has the settings of `dlg`, but optimises dummy embeddings and claims the nearest words.

    References:
        [Zhu2019], Sect. 4.3, where the gradient is that of BERT. Differs: as `dlg`.
    """

    needs: ClassVar[frozenset[str]] = _NEEDS | MEAN_GRADIENT_FACTS | {"num_classes"}
    uses: ClassVar[frozenset[str]] = OPTIMIZER_FACTS


@dataclass(frozen=True, kw_only=True)
class TextInvertingGradients(SingleUpdateTextAttack, InvertingGradients):
    """Reconstruct texts from one update by the cosine, as Inverting Gradients does.

    Has the settings of `inverting-gradients` (its total variation is for images only), but
    optimises dummy embeddings and claims the nearest words.

    References:
        [Geiping2020]. Differs: as `inverting-gradients`; the paper has no texts.
    """

    uses: ClassVar[frozenset[str]] = MEAN_GRADIENT_FACTS | OPTIMIZER_FACTS | {"labels"}


@dataclass(frozen=True, kw_only=True)
class EmbeddingRows(Attack):
    """Claim the words whose rows of the embedding's gradient are not zero, without optimisation.

    1. A word that does not occur has a row of exact zeros; rank the others by the norm of their
       row.
    2. Fill the positions of N texts with them in this order, repeating them if there are more
       positions than words. The attack does not determine which text a word is from, at which
       position, or how often it occurs.
    3. Take granted labels, or count them from the last layer.

    References:
        [Deng2021] (TAG), for texts from gradients. Differs: reads the embedding's rows, which that
        paper matches along with the rest.
    """

    paper: ClassVar[Paper] = TAG_PAPER
    needs: ClassVar[frozenset[str]] = _NEEDS
    uses: ClassVar[frozenset[str]] = MEAN_GRADIENT_FACTS | {"labels", "momentum", "optimizer"}
    subject: ClassVar[Subject] = "texts"
    main_metric: ClassVar[str] = "words_found"

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse a network without an embedding of tokens."""
        find_token_embedding(knowledge)

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse an embedding that is not sent, and labels that the last layer does not tell."""
        read_embedding(update, *find_token_embedding(knowledge))
        if knowledge.labels is None:
            space = EmbeddingSpace.from_update(update, knowledge, words="vocabulary", nearest="cosine")
            assert space.knowledge.model is not None
            check_label_source(space.convert_update(update), space.knowledge, space.knowledge.model())

    def _run(self, target: Target, progress: Progress) -> Texts:
        update, knowledge = target.read_update(), target.knowledge
        model, layer = find_token_embedding(knowledge)
        embedding = read_embedding(update, model, layer)

        # Rank the words with a gradient, and fill the texts with them.
        words = tokens_with_gradient(embedding, update.name)
        ranked = words[embedding.update[words].norm(dim=1).argsort(descending=True, stable=True)]
        assert knowledge.input_shape is not None
        positions = torch.arange(update.num_examples * knowledge.input_shape[0])
        tokens = ranked[positions % len(ranked)].reshape(update.num_examples, -1)
        progress(1, 1, {"objective": 0.0})

        if knowledge.labels is not None and len(knowledge.labels) == update.num_examples:
            return Texts(tokens=tokens, labels=knowledge.labels)
        space = EmbeddingSpace.from_update(update, knowledge, words="vocabulary", nearest="cosine")
        assert space.knowledge.model is not None
        rest, network = space.convert_update(update), space.knowledge.model()
        labels = count_labels(rest, space.knowledge, network, rest.before, rest.after or rest.before, target.rng)
        return Texts(tokens=tokens, labels=labels)
