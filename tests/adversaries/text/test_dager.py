"""DAGER: exact texts from the attention of transformers, checked against the networks; and what is refused."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.text.attention_blocks import AttentionBlocks
from adversaries.text.attention_span import AttentionSpan, attention_weight_names
from adversaries.text.dager import Dager
from adversaries.text.decoder_search import DecoderSearch
from adversaries.text.encoder_search import EncoderSearch
from adversaries.text.lamp import Lamp
from adversaries.text.texts import EmbeddingRows, TextInvertingGradients
from adversaries.text.tiger import Tiger
from adversaries.text.token_gradients import TokenGradients
from fedsim.base.errors import AttackError, ConfigError, TranscriptError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.findings import Texts
from fedsim.inversion.named_states import named_states
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.models.text_cnn import TextCnn
from fedsim.training.models.transformer import TransformerDecoder, TransformerEncoder
from tests.support.networks import compute_gradient

LENGTH, TASK = 6, Task((6,), 4, vocabulary=30, padding=0)
TRUE = torch.tensor([[7, 3, 21, 12, 29, 3], [2, 22, 9, 14, 0, 0], [7, 16, 11, 3, 8, 0]])
LABELS = torch.tensor([2, 0, 1])
DECODER, ENCODER = TransformerDecoder(dim=48, heads=2), TransformerEncoder(dim=48, heads=2)
NETWORKS = pytest.mark.parametrize("network", [DECODER, ENCODER], ids=["decoder", "encoder"])
ONE_NETWORK = pytest.mark.parametrize(
    "network", [DECODER, pytest.param(ENCODER, marks=pytest.mark.thorough)], ids=["decoder", "encoder"]
)


def build(network: Any, task: Task = TASK) -> nn.Module:
    with seed_globals("test-dager"):
        return network.build(task).eval()  # type: ignore[no-any-return]


def known(network: Any, **how: Any) -> Knowledge:
    facts = {"model": lambda: build(network), "loss": cross_entropy, "input_shape": (LENGTH,), "num_classes": 4}
    return Knowledge(**(facts | how))


def make_update(
    network: Any, tokens: Tensor = TRUE, labels: Tensor = LABELS, *, steps: int = 0, rate: float = 0.01
) -> Update:
    """The gradient of these texts, or the weights after so many steps on them."""
    model = build(network)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    payload = Payload.from_dense(compute_gradient(model, tokens, labels), "gradient")
    for _ in range(steps):
        slopes = compute_gradient(model, tokens, labels)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= rate * slopes[name]
    if steps:
        payload = Payload.from_dense({name: p.detach() for name, p in model.named_parameters()}, "weights")
    return Update(round=1, client=5, before=before, payload=payload, num_examples=len(tokens))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Texts]:
    def attacked(update: Update, knowledge: Knowledge, attack: Attack | None = None, seed: int = 0) -> Texts:
        folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "transcript"
        Recorder(folder).write(update.round, [update])
        finding = (attack or Dager()).run(
            Target(transcript=Transcript(folder), victim=5, knowledge=knowledge, rng=generator(seed))
        )
        assert isinstance(finding, Texts)
        return finding

    return attacked


def held(finding: Texts) -> list[tuple[list[int], int]]:
    return sorted(zip(finding.tokens.tolist(), finding.labels.tolist(), strict=True))


EXACT = sorted(zip(TRUE.tolist(), LABELS.tolist(), strict=True))


@NETWORKS
def test_texts_and_their_labels_are_read_exactly_from_one_gradient(run: Any, network: Any) -> None:
    first, again = (run(make_update(network), known(network), seed=seed) for seed in (0, 1))
    assert held(first) == EXACT
    assert torch.equal(first.tokens, again.tokens)


@ONE_NETWORK
def test_returned_weights_of_one_step_or_several_give_the_same_texts(run: Any, network: Any) -> None:
    for steps, rate in ((1, 0.1), (3, 0.001)):
        finding = run(make_update(network, steps=steps, rate=rate), known(network))
        assert sorted(finding.tokens.tolist()) == [tokens for tokens, _ in EXACT]


def test_a_text_that_the_client_has_twice_is_claimed_once(run: Any) -> None:
    twice, labels = torch.cat([TRUE, TRUE[:1]]), torch.cat([LABELS, LABELS[:1]])
    assert held(run(make_update(DECODER, twice, labels), known(DECODER))) == EXACT


def test_without_padding_all_texts_have_the_full_length(run: Any) -> None:
    task = dataclasses.replace(TASK, padding=None)
    full = torch.tensor([[7, 3, 21, 12, 0, 3], [2, 0, 9, 14, 26, 11]])
    decoder: Any = type("Unpadded", (), {"build": lambda self, _: DECODER.build(task)})()
    finding = run(make_update(decoder, full, LABELS[:2]), known(decoder))
    assert sorted(finding.tokens.tolist()) == sorted(full.tolist())


# What it computes with.


def blocks_of(network: Any, update: Update) -> AttentionBlocks:
    return AttentionBlocks.from_update(update, known(network))


@NETWORKS
def test_inputs_of_both_blocks_lie_in_the_spans_and_explain_the_gradient(network: Any) -> None:
    blocks = blocks_of(network, make_update(network))
    inputs, real = blocks.second_block_inputs(TRUE)
    assert real.equal(TRUE != 0)
    shared = network is DECODER  # both texts that begin with word 7 have the same first input there
    assert blocks.spans[1].rank == int(real.sum()) - shared
    assert float(blocks.spans[1].distances(inputs[real]).max()) < 1e-3
    assert blocks.unexplained_share(TRUE) < 1e-5 < 1e-2 < blocks.unexplained_share(TRUE[:2])
    wrong = TRUE.clone()
    wrong[0, 0] = 2
    assert float(blocks.misfits(wrong)[0]) > 0.02 > 1e-3 > float(blocks.misfits(TRUE).max())


def test_the_newest_place_of_a_decoder_is_that_of_the_network() -> None:
    blocks = blocks_of(DECODER, make_update(DECODER))
    search, words = DecoderSearch(blocks, 3), torch.arange(len(blocks.words))
    prefixes = torch.tensor([[0, 3], [4, 1]])
    found = search._last_word_distances(prefixes, words)
    for row, prefix in enumerate(prefixes):
        for word in words:
            inputs, _ = blocks.second_block_inputs(blocks.words[torch.cat([prefix, word[None]])][None])
            torch.testing.assert_close(found[row, word], blocks.spans[1].distances(inputs[0, -1]))


def test_what_is_left_without_a_text_is_the_gradient_of_the_others() -> None:
    whole = blocks_of(ENCODER, make_update(ENCODER)).subtract_text(TRUE[1])
    assert whole is not None
    rest = {n: g * 2 / 3 for n, g in compute_gradient(build(ENCODER), TRUE[[0, 2]], LABELS[[0, 2]]).items()}
    assert whole.states.gradient is not None
    for name, slope in rest.items():
        torch.testing.assert_close(whole.states.gradient[name].float(), slope, atol=1e-6, rtol=1e-4)
    assert whole.words.tolist() == sorted(set(TRUE[[0, 2]].flatten().tolist()) - {0})
    assert blocks_of(ENCODER, make_update(ENCODER)).subtract_text(torch.tensor([1, 4, 5, 6, 0, 0])) is None


def test_a_guess_asks_for_the_words_that_it_lacks_and_for_its_length() -> None:
    whole = torch.tensor([[7, 4, 21, 12, 29, 3]])
    for true, start in ((whole, [7, 4, 12, 12, 29, 4]), (TRUE[1:2], [2, 22, 9, 14, 9, 2])):
        blocks = blocks_of(ENCODER, make_update(ENCODER, true, LABELS[:1]))
        slopes = TokenGradients(blocks, EncoderSearch(blocks).position_scores)
        guesses = slopes.refine_guess(torch.searchsorted(blocks.words, torch.tensor(start)), 1)
        assert guesses[0].text.tolist() == true[0].tolist()
        assert guesses[0].fit == pytest.approx(1, abs=1e-3)


def test_a_text_that_the_model_is_sure_of_is_found_by_what_it_leaves(run: Any, caplog: Any) -> None:
    """Its part of the second block's gradient sinks in the rounding of the others', but not its words' rows."""
    model, features = build(ENCODER), list[Tensor]()
    hook = model.linear.register_forward_pre_hook(lambda _, given: features.append(given[0]))
    with torch.no_grad():
        model(TRUE)
        model.linear.weight[LABELS[0]] += 0.7 * (features[0][0] - features[0].mean(0)).sign()
    hook.remove()
    network = SimpleNamespace(build=lambda task: copy.deepcopy(model))
    assert float(blocks_of(network, make_update(network)).misfits(TRUE)[0].detach()) > 5e-3
    assert held(run(make_update(network), known(network))) == EXACT
    assert "do not fit" not in caplog.text


def test_directions_that_rounding_makes_are_not_counted() -> None:
    update = make_update(DECODER, steps=1, rate=1e-4)
    model = build(DECODER)
    span = AttentionSpan.from_message(
        attention_weight_names(model, 0), named_states(update, model, "here"), max_rank=18
    )
    assert 0 < span.rank <= int((TRUE != 0).sum())


# Refusals: one sentence each.


def test_more_words_than_the_model_tells_apart_are_refused(run: Any) -> None:
    many = torch.randint(1, 30, (12, LENGTH), generator=generator("many"))
    with pytest.raises(
        AttackError,
        match=r"span 47 of 48 dimensions, and those of up to 40 can be read: 12 texts of 6 words are too many for this "
        r"model, about 6 would not be, unless a defense has added directions that are not of texts; choose "
        r"'embedding-rows'",
    ):
        run(make_update(DECODER, many, torch.arange(12) % 4), known(DECODER))


def test_an_update_with_noise_is_refused(run: Any) -> None:
    update = make_update(DECODER)
    assert update.gradient is not None
    rng = generator("noise")
    noisy = {name: g + 1e-3 * torch.randn(g.shape, generator=rng) for name, g in update.gradient.items()}
    told = r"but 3 texts of 6 words span 18 at most: noise, compression, .* full-rank; choose 'tiger'"
    with pytest.raises(AttackError, match=told):
        run(dataclasses.replace(update, payload=Payload.from_dense(noisy, "gradient")), known(DECODER))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            TextCnn(kernels=(3,), channels=8, dimension=6),
            "the model is a TextCnnModule, expected one of transformer-enc",
        ),
        (
            TransformerEncoder(dim=48, blocks=1),
            "the transformer has 1 blocks, and 2 are needed",
        ),
        (TransformerDecoder(dim=48, heads=2, blocks=2), "the transformer has 2 blocks, and 3 are needed for"),
    ],
)
def test_a_model_whose_blocks_say_nothing_is_refused(run: Any, network: Any, message: str) -> None:
    with pytest.raises(AttackError, match=f"^round 1, client 5: {message}"):
        run(make_update(network), known(network))


@dataclasses.dataclass(frozen=True)
class Shared:
    """A network that uses a part of itself twice."""

    base: Any
    share: Callable[[Any], None]

    def build(self, task: Task) -> nn.Module:
        model = self.base.build(task)
        self.share(model)
        return model  # type: ignore[no-any-return]


def _share_block(model: Any) -> None:
    model.blocks[1] = model.blocks[0]


def _share_weight(model: Any) -> None:
    model.blocks[1].attention.value.weight = model.blocks[0].attention.value.weight


def _share_attention_with_the_last(model: Any) -> None:
    model.blocks[-1].attention = model.blocks[0].attention


def _share_embedding(model: Any) -> None:
    model.linear = nn.Linear(*reversed(model.embedding.weight.shape))
    model.linear.weight = model.embedding.weight


def _apply_twice(model: Any) -> None:
    block = type(model.blocks[0])
    twice = {"forward": lambda self, states, mask: block.forward(self, block.forward(self, states, mask), mask)}
    model.blocks[0].__class__ = type("Twice", (block,), twice)


@NETWORKS
@pytest.mark.parametrize(
    "share", [_share_block, _share_weight, _share_attention_with_the_last, _share_embedding, _apply_twice]
)
def test_a_network_that_uses_a_part_twice_is_refused_in_one_sentence(run: Any, network: Any, share: Any) -> None:
    shared = Shared(network, share)
    for attack in (Dager(), Tiger()):
        with pytest.raises(AttackError, match="a block or a weight is used twice, or its inputs are others") as caught:
            run(make_update(shared), known(shared), attack)
        assert "\n" not in str(caught.value)


def test_what_does_not_change_the_spans_may_be_shared(run: Any) -> None:
    def share_norms(model: Any) -> None:
        model.blocks[1].norm1, model.blocks[2].perceptron = model.blocks[0].norm1, model.blocks[0].perceptron

    shared = Shared(DECODER, share_norms)
    assert held(run(make_update(shared), known(shared))) == EXACT


def test_another_vocabulary_is_refused(run: Any) -> None:
    other = known(DECODER, model=lambda: build(DECODER, dataclasses.replace(TASK, vocabulary=31)))
    with pytest.raises(
        TranscriptError, match=r"have embedding.weight of shape \(30, 48\), the model \(31, 48\); attack"
    ):
        run(make_update(DECODER), other)


def test_a_client_that_does_not_say_how_many_texts_it_has_is_refused(run: Any) -> None:
    with pytest.raises(AttackError, match="N is 0, so nothing says how many texts to look for"):
        run(dataclasses.replace(make_update(DECODER), num_examples=0), known(DECODER))


@pytest.mark.thorough
def test_texts_of_an_encoder_that_do_not_fit_are_said_to_be_guesses(run: Any, caplog: Any) -> None:
    run(make_update(ENCODER), known(ENCODER))
    assert "do not fit" not in caplog.text
    run(
        make_update(DECODER), known(TransformerEncoder(dim=48, heads=2, blocks=3)), Dager(attempts=1)
    )  # of the same shapes
    assert " of 3 texts do not fit the gradients; they" in caplog.text


def test_texts_of_a_decoder_that_leave_much_of_the_gradient_over_are_said_to_be_too_few(run: Any, caplog: Any) -> None:
    short = torch.tensor([[7, 3], [2, 22], [9, 14]])
    update = make_update(DECODER, torch.cat([short, torch.zeros(3, 4, dtype=torch.int64)], 1))
    run(update, known(DECODER))
    assert "gradient over" not in caplog.text
    run(dataclasses.replace(update, num_examples=2), known(DECODER))
    assert "% of the second block's gradient over, so some are missing or wrong" in caplog.text


def test_a_length_or_an_output_of_another_task_is_refused(run: Any) -> None:
    with pytest.raises(AttackError, match=r"takes texts of 6 tokens, and input_shape is \(4,\); grant"):
        run(make_update(DECODER), known(DECODER, input_shape=(4,)))
    one: Any = type("One", (), {"build": lambda self, _: DECODER.build(dataclasses.replace(TASK, num_classes=1))})()
    with pytest.raises(AttackError, match="the model predicts one number, expected a logit for each class"):
        run(make_update(one, labels=torch.zeros(3, dtype=torch.int64)), known(one))


def changed(update: Update, of: Callable[[str, Tensor], Tensor]) -> Update:
    """The same message, of whose arrays a defense makes something."""
    assert update.gradient is not None
    gradient = {name: of(name, slope) for name, slope in update.gradient.items()}
    return dataclasses.replace(update, payload=Payload.from_dense(gradient, "gradient"))


def largest(slope: Tensor, share: float) -> Tensor:
    return torch.where(slope.abs() >= slope.abs().quantile(1 - share), slope, 0.0)


@ONE_NETWORK
@pytest.mark.parametrize(
    ("of", "message"),
    [
        (lambda _, slope: slope.half().float(), "span 48 dimensions, but 3 texts of 6 words span 18 at most: noise,"),
        pytest.param(
            lambda _, slope: slope.sign() * slope.abs().mean(),
            "but 3 texts of 6 words span 18 at most: noise, compress",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            lambda _, slope: largest(slope, 0.1),
            "but 3 texts of 6 words span 18 at most: noise, compression",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            lambda name, slope: 0 * slope if name.startswith("blocks.0") else slope,
            "the input weights of attention did not change in both of the first two blocks, so they do not reveal",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["half", "signs", "top-k", "held block"],
)
def test_a_message_that_a_defense_has_changed_is_refused_and_others_go_on(
    run: Any, network: Any, of: Any, message: str
) -> None:
    update = changed(make_update(network), of)
    with pytest.raises(AttackError, match=message) as caught:
        run(update, known(network))
    assert "\n" not in str(caught.value)
    assert run(update, known(network), EmbeddingRows()).tokens.shape == TRUE.shape
    assert run(update, known(network), Lamp(iterations=1, candidates=1, tries=1)).tokens.shape == TRUE.shape


@NETWORKS
def test_a_held_embedding_keeps_no_text(run: Any, network: Any) -> None:
    held_back = partial(changed, of=lambda name, slope: 0 * slope if name == "embedding.weight" else slope)
    assert held(run(held_back(make_update(network)), known(network))) == EXACT


def test_texts_of_an_encoder_come_back_from_its_adapters_alone(run: Any) -> None:
    """The embedding has no gradient; padded ends and words that stand twice are in the batch."""
    encoder = TransformerEncoder(dim=48, heads=2, lora_rank=32)
    assert held(run(make_update(encoder), known(encoder))) == EXACT


@NETWORKS
def test_without_the_last_layer_texts_are_found_and_labels_are_said_to_be_guesses(
    run: Any, network: Any, caplog: Any
) -> None:
    found = run(
        changed(make_update(network), lambda name, slope: 0 * slope if "linear" in name else slope), known(network)
    )
    assert sorted(found.tokens.tolist()) == [tokens for tokens, _ in EXACT]
    assert "the last layer was not sent; labels are guesses" in caplog.text


@pytest.mark.parametrize("settings", [{"tolerances": ()}, {"tolerances": (0.0,)}, {"attempts": 0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^(tolerances(\.\d)?|attempts): expected "):
        Dager(**settings)


# Beside it.


@ONE_NETWORK
def test_attacks_that_match_gradients_run_on_transformers(run: Any, network: Any) -> None:
    matched = run(make_update(network), known(network), TextInvertingGradients(iterations=1))
    assert matched.tokens.shape == TRUE.shape
    words = run(make_update(network), known(network), EmbeddingRows())
    assert set(words.tokens.flatten().tolist()) == set(TRUE.flatten().tolist())


# Adapters (LoRA): the base is held; B's gradient spans A times the inputs, and A's the inputs once B is not 0.


@dataclasses.dataclass(frozen=True)
class Begun:
    """A decoder whose adapters have been trained a little: B is not 0 any more."""

    rank: int

    def build(self, task: Task) -> nn.Module:
        model = TransformerDecoder(dim=48, heads=2, lora_rank=self.rank).build(task)
        for name, parameter in model.named_parameters():
            if name.endswith("up.weight"):
                nn.init.normal_(parameter, std=0.1)
        return model


def test_adapters_that_have_been_trained_give_texts_and_labels_away(run: Any) -> None:
    update = make_update(Begun(8))
    assert all("embedding" not in name and "base" not in name for name in update.before)
    assert held(run(update, known(Begun(8)))) == EXACT
    assert held(run(make_update(Begun(8), steps=1, rate=0.1), known(Begun(8)))) == EXACT


def test_adapters_of_the_first_round_give_texts_away_by_their_second_matrices(run: Any) -> None:
    fresh = TransformerDecoder(dim=48, heads=2, lora_rank=32)
    update = make_update(fresh)
    assert update.gradient is not None
    assert all(bool(slope.any()) == ("down" not in name) for name, slope in update.gradient.items() if "query" in name)
    assert held(run(update, known(fresh))) == EXACT
    assert held(run(make_update(fresh, steps=1, rate=0.1), known(fresh))) == EXACT


def test_words_that_adapters_may_show_are_those_of_the_texts_and_few_others() -> None:
    task = dataclasses.replace(TASK, vocabulary=2000)
    network: Any = type("Large", (), {"build": lambda self, _: Begun(8).build(task)})()
    words = set(AttentionBlocks.from_update(make_update(network), known(network)).words.tolist())
    assert set(TRUE.flatten().tolist()) - {0} <= words
    assert len(words) < 100


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            TransformerDecoder(dim=48, heads=2, lora_rank=8),
            r"span 8 of 8 dimensions, of adapters of rank 8, and those of up to 0 can be read: 3 texts of 6 words are "
            "too many for this model, and even one is",
        ),
        (Begun(4), r"span 12 of 12 dimensions, of adapters of rank 4, and those of up to 11 can be read: 3 texts of 6"),
        (TransformerEncoder(dim=48, heads=2, lora_rank=8), "span 8 of 8 dimensions, of adapters of rank 8, and those"),
    ],
)
def test_adapters_that_say_too_little_are_refused_and_matching_goes_on(run: Any, network: Any, message: str) -> None:
    with pytest.raises(AttackError, match=message):
        run(make_update(network), known(network))
    with pytest.raises(AttackError, match="the embedding did not move, so it says nothing of words"):
        run(make_update(network), known(network), EmbeddingRows())
    assert run(make_update(network), known(network), TextInvertingGradients(iterations=1)).tokens.shape == TRUE.shape


def test_directions_just_below_the_rounding_of_a_gradient_are_kept_and_count_for_no_rank() -> None:
    """Of single precision, rounding is 1.2e-7 of the largest singular value; what is above an eighth of it stays."""
    generator = torch.Generator().manual_seed(5)
    left, _ = torch.linalg.qr(torch.randn(40, 24, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(24, 24, generator=generator, dtype=torch.float64))
    sizes = torch.zeros(24, dtype=torch.float64)
    sizes[:4] = torch.tensor([1.0, 0.5, 3e-8, 1e-9])
    weight = left @ torch.diag(sizes) @ right.T
    states: Any = SimpleNamespace(
        direction=lambda name, dtype: weight, before={"w": weight.float()}, gradient={"w": weight}, delta=None
    )
    span = AttentionSpan.from_message(["w"], states, max_rank=10)
    assert (span.rank, len(span.basis)) == (2, 3)
    assert float((span.basis @ right[:, 2]).abs().max()) > 0.99
