"""TIGER's idea: texts by distance to spans of noised gradients, then by the message; and what is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.text.attention_span import attention_weight_names
from adversaries.text.dager import Dager
from adversaries.text.message_fit import MessageFit
from adversaries.text.tiger import Tiger, _cut_span, _find_deviation
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.findings import Texts
from fedsim.inversion.named_states import named_states
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.models.transformer import TransformerDecoder, TransformerEncoder
from tests.support.networks import compute_gradient

LENGTH, TASK = 6, Task((6,), 4, vocabulary=200, padding=0)
TRUE = torch.tensor([[7, 3, 121, 12, 29, 90], [2, 22, 9, 144, 61, 5], [70, 16, 11, 33, 8, 199]])
LABELS = torch.tensor([2, 0, 1])
DECODER, ENCODER = TransformerDecoder(dim=64, heads=2), TransformerEncoder(dim=64, heads=2)
LORA = TransformerDecoder(dim=64, heads=2, lora_rank=48)
ENCODER_LORA = TransformerEncoder(dim=64, heads=2, lora_rank=48)


def build(network: Any = DECODER) -> nn.Module:
    with seed_globals("test-tiger"):
        return network.build(TASK).eval()  # type: ignore[no-any-return]


def known(network: Any = DECODER, **facts: Any) -> Knowledge:
    return Knowledge(**{"model": lambda: build(network), "loss": cross_entropy, "input_shape": (LENGTH,)} | facts)


def make_update(
    noise: float, network: Any = DECODER, signal: float = 1.0, tokens: Tensor = TRUE, labels: Tensor = LABELS
) -> tuple[Update, float]:
    """Return the gradient of the texts with noise of `noise` times its norm, and the noise's deviation."""
    model, rng = build(network), generator("test-tiger", 1)
    gradient = compute_gradient(model, tokens, labels[: len(tokens)])
    size = sum(tensor.numel() for tensor in gradient.values())
    deviation = noise * math.sqrt(sum(float(tensor.square().sum()) for tensor in gradient.values()) / size)
    noised = {name: signal * t + deviation * torch.randn(t.shape, generator=rng) for name, t in gradient.items()}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    payload = Payload.from_dense(noised, "gradient")
    return Update(round=1, client=5, before=before, payload=payload, num_examples=len(tokens)), deviation


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Texts]:
    def attacked(update: Update, knowledge: Knowledge, attack: Attack | None = None) -> Texts:
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "transcript"
        Recorder(folder).write(update.round, [update])
        target = Target(transcript=Transcript(folder), victim=5, knowledge=knowledge, rng=generator(0))
        finding = (attack or Tiger()).run(target)
        assert isinstance(finding, Texts)
        return finding

    return attacked


def claims(finding: Texts) -> set[tuple[int, ...]]:
    return {tuple(text) for text in finding.tokens.tolist()}


def words_in_place(tokens: Tensor) -> float:
    return float((TRUE[:, None] == tokens[None]).double().mean(2).amax(1).mean())


EXACT = {tuple(text) for text in TRUE.tolist()}


@pytest.mark.parametrize(
    ("network", "noise", "is_granted"),
    [(DECODER, 0.0, False), (DECODER, 0.01, False), (DECODER, 0.01, True), (ENCODER, 0.1, False), (LORA, 0.01, False)],
    ids=["decoder, no noise", "decoder", "decoder, granted", "encoder", "adapters of the first round"],
)
def test_texts_come_back_under_noise_at_which_dager_refuses(
    run: Any, caplog: Any, network: Any, noise: float, is_granted: bool
) -> None:
    update, deviation = make_update(noise, network)
    facts = {"defenses": [UpdateNoise(noise_multiplier=deviation / 1e3, clip=1e3)]} if is_granted and noise else {}
    finding = run(update, known(network, **facts))
    assert claims(finding) == EXACT
    assert "missing or wrong" not in caplog.text
    labels = {tuple(text): label for text, label in zip(finding.tokens.tolist(), finding.labels.tolist(), strict=True)}
    assert [labels[tuple(text)] for text in TRUE.tolist()] == LABELS.tolist()
    if noise:
        with pytest.raises(AttackError, match="noise"):
            run(update, known(network), Dager())


@pytest.mark.parametrize("network", [DECODER, ENCODER], ids=["decoder", "encoder"])
def test_the_ends_of_shorter_texts_are_found(run: Any, network: Any) -> None:
    short = TRUE.clone()
    short[0, 3:] = 0
    short[2, 5:] = 0
    finding = run(make_update(0.003, network, tokens=short)[0], known(network))
    assert claims(finding) == {tuple(text) for text in short.tolist()}


def test_texts_with_a_wrong_word_end_or_order_are_corrected_by_the_whole_message() -> None:
    """By the message alone: the noise of each number is a tenth of the gradient's root mean square."""
    update, _ = make_update(0.1, ENCODER)
    blocks, deviation = Tiger()._read_blocks(update, known(ENCODER), generator(0))
    fit = MessageFit(blocks)
    assert fit.unexplained_share(TRUE, LABELS) == pytest.approx(fit.noise_share(deviation), rel=0.35)
    wrong, wrong_labels = TRUE.clone(), torch.tensor([2, 0, 2])
    wrong[0, 1], wrong[1, 5] = 16, 0
    wrong[2, 0], wrong[2, 3] = TRUE[2, 3], TRUE[2, 0]
    assert fit.unexplained_share(wrong, LABELS) > 1.5 * fit.unexplained_share(TRUE, LABELS)
    tokens, labels = fit.refine_texts(wrong, wrong_labels)
    assert torch.equal(tokens, TRUE)
    assert torch.equal(labels, LABELS)
    pool = torch.cat([wrong, TRUE])
    tokens, labels = fit.select_texts(pool)
    assert sorted(tokens.tolist()) == sorted(TRUE.tolist())


def test_a_class_that_the_model_expects_too_often_is_tried_as_well() -> None:
    """With one text in six of a class of four, its bias can have a positive gradient, as if no text had it."""
    wide, labels = TransformerDecoder(dim=96, heads=2), torch.tensor([0, 0, 0, 3, 1, 2])
    tokens = torch.stack([torch.randperm(199, generator=generator("six", text))[:LENGTH] + 1 for text in range(6)])
    update, _ = make_update(0.003, wide, tokens=tokens, labels=labels)
    assert update.gradient is not None
    assert (update.gradient["linear.bias"] > 0).sum() == 2
    blocks, _ = Tiger()._read_blocks(update, known(wide), generator(0))
    found, classes = MessageFit(blocks).select_texts(tokens)
    assert dict(zip(map(tuple, found.tolist()), classes.tolist(), strict=True)) == dict(
        zip(map(tuple, tokens.tolist()), labels.tolist(), strict=True)
    )


def test_of_many_texts_those_that_fit_best_are_kept_so_that_memory_is_bounded(monkeypatch: Any) -> None:
    update, _ = make_update(0.1, ENCODER)
    blocks, _ = Tiger()._read_blocks(update, known(ENCODER), generator(0))
    fit, most, kept = MessageFit(blocks), 30, list[int]()
    monkeypatch.setattr("adversaries.text.message_fit._KEPT_NUMBERS", most * len(fit._message))
    few, find_gradients = MessageFit(blocks), MessageFit._gradients

    def count_gradients(self: MessageFit, choices: Any) -> Tensor:
        kept.append(len(choices))
        return find_gradients(self, choices)

    monkeypatch.setattr(MessageFit, "_gradients", count_gradients)
    wrong = TRUE.clone()
    wrong[0, 1], wrong[1, 5] = 16, 0
    others = torch.randint(1, 200, (20, LENGTH), generator=generator("others"))
    texts, labels = few.select_texts(torch.cat([others, wrong]))
    texts, labels = few.refine_texts(texts, labels)
    assert dict(zip(map(tuple, texts.tolist()), labels.tolist(), strict=True)) == dict(
        zip(map(tuple, TRUE.tolist()), LABELS.tolist(), strict=True)
    )
    assert sum(kept) > 4 * most
    assert max(kept) <= most


def test_a_text_beyond_those_that_the_client_has_is_said_to_be_a_guess(run: Any, caplog: Any) -> None:
    update, _ = make_update(0.1, ENCODER)
    run(update, known(ENCODER), Tiger(words=30))
    assert "guess" not in caplog.text
    finding = run(dataclasses.replace(update, num_examples=4), known(ENCODER), Tiger(words=30, attempts=1))
    assert claims(finding) >= EXACT
    assert "1 of 4 texts explain no more of the message than some text does of noise, so they are" in caplog.text


def test_where_noise_is_most_of_the_message_words_are_not_said_to_be_right(run: Any, caplog: Any) -> None:
    update, deviation = make_update(1.2, ENCODER)
    facts = known(ENCODER, defenses=[UpdateNoise(noise_multiplier=deviation / 1e3, clip=1e3)])
    run(update, facts, Tiger(attempts=1, words=20))
    assert "noise is about 75 % of the message, so the residual does not show whether" in caplog.text


def test_texts_that_leave_more_than_noise_are_said_to_be_wrong(run: Any, caplog: Any) -> None:
    update, _ = make_update(0.01)
    run(dataclasses.replace(update, num_examples=2), known())
    assert "% of the message over, where noise would leave about 1 %, so some are missing or wrong" in caplog.text


def test_pure_noise_is_refused_or_where_noise_is_thought_smaller_gives_no_text(run: Any) -> None:
    update, deviation = make_update(0.01, signal=0.0)
    with pytest.raises(AttackError, match="no direction of the attention's gradients is above the noise"):
        run(update, known())
    smaller = [UpdateNoise(noise_multiplier=deviation / 2e3, clip=1e3)]
    finding = run(update, known(defenses=smaller), Tiger(beam=2, attempts=1, words=30))
    assert not claims(finding) & EXACT
    assert words_in_place(finding.tokens) < 0.25


def test_the_estimated_noise_is_the_true_one_and_that_of_known_defenses_is_to_the_digit() -> None:
    update, deviation = make_update(0.01)
    model = build()
    states, names = named_states(update, model, "here"), attention_weight_names(model, 0)  # type: ignore[arg-type]
    estimate = _find_deviation(names, states, update, known(), TRUE.numel(), generator(0))
    assert estimate == pytest.approx(deviation, rel=0.35)
    facts = known(defenses=[UpdateNoise(noise_multiplier=deviation / 1e3, clip=1e3)])
    assert _find_deviation(names, states, update, facts, TRUE.numel(), generator(0)) == pytest.approx(
        deviation, rel=1e-5
    )
    span = _cut_span(names, states, TRUE.numel(), deviation)
    assert 1 <= span.rank == len(span.basis) <= TRUE.numel()


def test_texts_that_span_more_than_half_of_the_dimensions_are_not_taken_for_noise(run: Any) -> None:
    narrow = TransformerDecoder(dim=32, heads=2)
    update, _ = make_update(0.0, narrow)
    assert claims(run(update, known(narrow))) == EXACT


def test_without_embedding_and_last_layer_words_near_the_first_span_are_tried(run: Any, caplog: Any) -> None:
    update, _ = make_update(0.001)
    assert update.gradient is not None
    held = "embedding.weight", "linear.weight", "linear.bias"
    gradient = {name: t * (name not in held) for name, t in update.gradient.items()}
    finding = run(dataclasses.replace(update, payload=Payload.from_dense(gradient, "gradient")), known())
    assert claims(finding) & EXACT
    assert "the last layer was not sent; labels are guesses" in caplog.text


def test_adapters_of_an_encoder_give_texts_away_and_under_noise_some(run: Any, caplog: Any) -> None:
    assert claims(run(make_update(0.0, ENCODER_LORA)[0], known(ENCODER_LORA), Tiger(words=30, attempts=1))) == EXACT
    assert "missing or wrong" not in caplog.text
    noised = make_update(0.01, ENCODER_LORA)[0]
    assert claims(run(noised, known(ENCODER_LORA), Tiger(words=30, attempts=1))) & EXACT
    assert "so some are missing or wrong" in caplog.text


def test_a_client_without_n_is_refused_in_one_sentence(run: Any) -> None:
    with pytest.raises(AttackError, match="N is 0, so nothing says how many texts"):
        run(dataclasses.replace(make_update(0.01)[0], num_examples=0), known())
