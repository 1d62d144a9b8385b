"""Texts that the attack claims the victim trained on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fedsim import findings
from fedsim.evaluation import text_metrics
from fedsim.evaluation.case import Case
from fedsim.evaluation.examples import check_kinds, judged, truth_of
from fedsim.evaluation.kind import About, Bench, Evaluator, Judgement, Owed, Pair, Shown, Word
from fedsim.evaluation.truth import Truth

log = logging.getLogger(__name__)

TEXTS, WORDS = 8, 300
"""Most texts of a finding on a page, and most words where it is a set of them."""


@dataclass(frozen=True)
class Texts(Evaluator[findings.Texts]):
    """Examples of tokens."""

    finding = findings.Texts

    def form(self, finding: findings.Texts, owed: Owed) -> None:
        """Of the federation's length, vocabulary and kind."""
        check_kinds(finding, owed)

    def truth(self, finding: findings.Texts, about: About, case: Case) -> Truth | None:
        """What those held whose texts are claimed."""
        return truth_of(finding, about, case)

    def judge(self, finding: findings.Texts, about: About, bench: Bench) -> Judgement:
        """See `fedsim.evaluation.scoring.score`; texts have no gradient of their tokens, and so no L_sim."""
        judgement = judged(finding, about, bench, message=None)
        if judgement.scores and (truth := truth_of(finding, about, bench.case)) is not None:
            empty = int(text_metrics.are_empty(truth.data, truth.padding).sum())
            if empty:
                log.warning(
                    "%s, client %s: %d of %d true texts have no token but padding, and are left out of the scores",
                    *(about["attack"], about["victim"], empty, len(truth.data)),
                )
            return replace(judgement, examples=judgement.examples - empty)
        return judgement

    def show(self, finding: findings.Texts, truth: Truth | None, tokens: Sequence[str], metric: str) -> Shown:
        """Texts beside the true ones; where the attack tells only which words occur, those words."""
        return (_bag if metric == "words_found" else _texts)(finding, truth, tokens)


def _texts(finding: findings.Texts, truth: Truth | None, names: Sequence[str]) -> Shown:
    """A finding of texts."""
    word = partial(_word, names)
    pairs = []
    if truth is None:
        for text in finding.tokens.tolist():
            pairs.append(Pair(true="", claimed=[Word(text=word(token), right=True) for token in text]))
    else:
        claimed = text_metrics.paired_texts(finding.tokens, truth.data, truth.padding)
        for text, own in zip(claimed.tolist(), truth.data.tolist(), strict=True):
            both = [(c, t) for c, t in zip(text, own, strict=True) if not c == t == truth.padding]
            words = [Word(text=word(c), right=c == t) for c, t in both]
            real = [token for token in own if token != truth.padding]
            pairs.append(Pair(true=" ".join(map(word, real)) or "(no token, not scored)", claimed=words))
    return Shown(examples=len(truth.data if truth else finding.tokens), known=truth is not None, texts=pairs)


def _bag(finding: findings.Texts, truth: Truth | None, names: Sequence[str]) -> Shown:
    """A finding of texts that tells only which words occur: each once, in the order in which they are claimed."""
    padding = truth.padding if truth else None
    claimed = list(dict.fromkeys(token for token in finding.tokens.flatten().tolist() if token != padding))
    true = list(dict.fromkeys(token for token in truth.data.flatten().tolist() if token != padding)) if truth else []
    held = set(true)
    words = [Word(text=_word(names, token), right=truth is None or token in held) for token in claimed[:WORDS]]
    pair = Pair(true=" ".join(_word(names, token) for token in true[:WORDS]), claimed=words)
    return Shown(examples=len(claimed), known=truth is not None, texts=[pair], bag=True)


def _word(names: Sequence[str], token: int) -> str:
    """What a token is called; one without a name is shown as its number, and where none is claimed a dash."""
    if token == text_metrics.NOTHING:
        return "–"
    return names[token] if token < len(names) else str(token)
