"""Judge texts that an attack claims the victim trained on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.display import ClaimedWord, Display, TextPair
from fedsim.audit.evaluation.evaluator import EvaluationContext, Evaluator, FindingMetadata, FindingSpec, Judgement
from fedsim.audit.evaluation.examples import check_kinds, judge_examples, true_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import text_metrics
from fedsim.interfaces import findings
from fedsim.interfaces.metric import describe_metric

log = logging.getLogger(__name__)

MAX_TEXTS, MAX_WORDS = 8, 300
"""Most texts of a finding on a page, and most words of a bag of words."""


@dataclass(frozen=True)
class TextEvaluator(Evaluator[findings.Texts]):
    """Judge of claimed texts, whose examples are tokens."""

    finding = findings.Texts

    def check_form(self, finding: findings.Texts, spec: FindingSpec) -> None:
        """Check that the texts have the federation's length, vocabulary and kind."""
        check_kinds(finding, spec)

    def truth(self, finding: findings.Texts, about: FindingMetadata, case: Case) -> Truth | None:
        """Return the true data of the clients whose texts are claimed."""
        return true_examples(finding, about, case)

    def judge(self, finding: findings.Texts, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score claimed texts, see `fedsim.audit.evaluation.scoring.score_examples`.

        L_sim is left out, because tokens have no gradient.
        """
        judgement = judge_examples(finding, about, context, message=None)
        truth = true_examples(finding, about, context.case) if judgement.scores else None
        if truth is None:
            return judgement
        # Empty texts do not count as examples.
        empty = int(text_metrics.are_empty(truth.data, truth.padding).sum())
        if empty:
            log.warning(
                "%s, client %s: %d of %d true texts have no token but padding, and are left out of the scores",
                *(about["attack"], about["victim"], empty, len(truth.data)),
            )
        return replace(judgement, examples=judgement.examples - empty)

    def show(self, finding: findings.Texts, truth: Truth | None, tokens: Sequence[str], metric: str) -> Display:
        """Display texts, or only words where the attack claims which words occur."""
        claims_words = bool(metric) and not describe_metric(metric).of_examples
        if claims_words:
            return _display_words(finding, truth, tokens)
        return _display_texts(finding, truth, tokens)


def _display_texts(finding: findings.Texts, truth: Truth | None, names: Sequence[str]) -> Display:
    pairs = []
    if truth is None:
        for text in finding.tokens.tolist():
            words = [ClaimedWord(text=_token_name(names, token), right=True) for token in text]
            pairs.append(TextPair(true="", claimed=words))
        return Display(examples=len(finding.tokens), has_truth=False, texts=pairs)
    claimed = text_metrics.pair_texts(finding.tokens, truth.data, truth.padding)
    for claimed_text, true_text in zip(claimed.tolist(), truth.data.tolist(), strict=True):
        words = []
        for token, true_token in zip(claimed_text, true_text, strict=True):
            # Where both end, there is nothing to show.
            if not token == true_token == truth.padding:
                words.append(ClaimedWord(text=_token_name(names, token), right=token == true_token))
        true_words = [_token_name(names, token) for token in true_text if token != truth.padding]
        pairs.append(TextPair(true=" ".join(true_words) or "(no token, not scored)", claimed=words))
    return Display(examples=len(truth.data), has_truth=True, texts=pairs)


def _display_words(finding: findings.Texts, truth: Truth | None, names: Sequence[str]) -> Display:
    """Display a bag of words: each word once, in the order in which they are claimed."""
    padding = truth.padding if truth else None
    claimed = _distinct_tokens(finding.tokens, padding)
    true = _distinct_tokens(truth.data, padding) if truth else []
    true_set = set(true)
    words = []
    for token in claimed[:MAX_WORDS]:
        is_right = truth is None or token in true_set
        words.append(ClaimedWord(text=_token_name(names, token), right=is_right))
    pair = TextPair(true=" ".join(_token_name(names, token) for token in true[:MAX_WORDS]), claimed=words)
    return Display(examples=len(claimed), has_truth=truth is not None, texts=[pair], is_bag_of_words=True)


def _distinct_tokens(texts: Tensor, padding: int | None) -> list[int]:
    tokens = [token for token in texts.flatten().tolist() if token != padding]
    return list(dict.fromkeys(tokens))


def _token_name(names: Sequence[str], token: int) -> str:
    """Return a token's name, its number where it has none, a dash where none is claimed."""
    if token == text_metrics.NO_TOKEN:
        return "–"
    return names[token] if token < len(names) else str(token)
