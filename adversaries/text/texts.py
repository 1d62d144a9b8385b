"""Attacks on texts: the dummy data are embeddings, and the words nearest to them are what is claimed.

The server knows the weights of the embedding. So the network behind it is attacked like one of numbers, whose
inputs are `dimension place` arrays, by any attack of this room; only its ends are here. The gradient of the embedding
itself is left out of the matching, for it lies before the dummy data. What it gives away by itself is what
`EmbeddingRows` claims.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from adversaries.engine.matching import MEAN_GRADIENT
from adversaries.inversion.deep_leakage import DeepLeakage
from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.tgias_ro import TemporalInversion
from adversaries.labels.updates import count_labels
from adversaries.named_states import named_states
from adversaries.scene import STEPPING, Scene
from adversaries.text.word_exchange import exchange
from fedsim.attacks import Attack, Knowledge, Paper, Progress, single_update
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding, Reconstruction, Texts
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update
from fedsim.wire.payloads import Payload

_Item = TypeVar("_Item")
log = logging.getLogger("fedsim." + __name__)
_NEEDS = frozenset({"model", "loss", "input_shape"})
_EXCHANGED_BY = 2
"""Gradients that an exchange of words is judged by; more take longer."""

Nearest = Literal["euclidean", "cosine"]
Words = Literal["vocabulary", "touched"]
Invert = Callable[[Transcript, Knowledge, int, torch.Generator, Progress], Finding]


@dataclass(frozen=True)
class Embedding:
    """The layer of a text model that turns tokens into vectors, at the weights that the server broadcast.

    Attributes:
        name: of the layer.
        vectors: `token dimension`.
        moved: `token dimension`, its part of the gradient or of the update.
        padding: the token that the layer never learns, or None.
    """

    name: str
    vectors: Tensor
    moved: Tensor
    padding: int | None

    @property
    def touched(self) -> Tensor:
        """`token`: whether the gradient in the token's row is not exactly zero, in ascending order.

        A text moves the rows of its own words and no others.
        """
        return (self.moved != 0).any(1)


@dataclass(frozen=True)
class Lexicon:
    """The words that may be claimed.

    Attributes:
        tokens: `candidate`, ascending.
        vectors: `candidate dimension`, their embeddings.
        by: how the nearest is found.
    """

    tokens: Tensor
    vectors: Tensor
    by: Nearest

    def read(self, points: Tensor) -> Tensor:
        """`...`, the token nearest to each of `... dimension` points."""
        flat, vectors = points.flatten(0, -2), self.vectors.to(points)
        if self.by == "cosine":
            flat, vectors = normalize(flat, dim=1), normalize(vectors, dim=1)
        nearest = torch.cdist(flat, vectors).argmin(1)
        return self.tokens.to(nearest.device)[nearest].reshape(points.shape[:-1])

    def written(self, tokens: Tensor) -> Tensor:
        """`... dimension`, the vectors of `...` tokens that are in the lexicon."""
        return self.vectors.to(tokens.device)[torch.searchsorted(self.tokens.to(tokens.device), tokens)]


class Behind(nn.Identity):
    """What stands in the place of an embedding in a network that takes vectors; knows the words."""

    def __init__(self, lexicon: Lexicon) -> None:
        super().__init__()
        self.lexicon = lexicon


class BehindEmbedding(Transcript):
    """The same recording of the part of a text model that follows its embedding.

    Args:
        transcript: what the server saw.
        model: the whole text model.
        layer: name of its embedding.
    """

    def __init__(self, transcript: Transcript, model: nn.Module, layer: str) -> None:
        super().__init__(transcript.folder, transcript.rounds, facts=False)
        self._whole, self._model, self._layer = transcript, model, layer

    def only(self, rounds: Any) -> Transcript:
        """See `Transcript`."""
        return BehindEmbedding(self._whole.only(rounds), self._model, self._layer)

    def update(self, number: int, client: int) -> Update:
        """See `Transcript`; without the embedding."""
        update = named(self._whole.update(number, client), self._model)
        return replace(
            update, before=self._without(update.before), payload=Payload(self._without(update.payload.tensors))
        )

    def _without(self, state: Mapping[str, _Item]) -> dict[str, _Item]:
        return {name: item for name, item in state.items() if name != f"{self._layer}.weight"}


def named(update: Update, model: nn.Module) -> Update:
    """`update` under the names of `model`, whatever the federation calls its arrays.

    Raises:
        TranscriptError: the update is not one of this model.
    """
    states = named_states(update, model, f"round {update.round}, client {update.client}")
    return replace(update, before=states.before, payload=states.payload)


def reads_tokens(knowledge: Knowledge) -> tuple[nn.Module, str]:
    """A text model, and the name of the embedding that its tokens go through.

    Raises:
        AttackError: the inputs are no texts, or the model does not begin with one `nn.Embedding`.
    """
    assert knowledge.model is not None
    assert knowledge.input_shape is not None
    if len(knowledge.input_shape) != 1:
        raise AttackError(
            f"input_shape: expected the length of a text, one number, got {tuple(knowledge.input_shape)}; attack data "
            "of numbers with another attack"
        )
    model = deepcopy(knowledge.model()).cpu().eval()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    reading = _reading(model, layers, knowledge.input_shape[0]) if layers else []
    if len(reading) != 1:
        told = f"{len(reading)} layers nn.Embedding read the tokens" if layers else "the model has no nn.Embedding"
        raise AttackError(f"{told}, expected one, whose vectors can be found; attack a text model that begins with one")
    return model, reading[0]


@torch.no_grad()
def _reading(model: nn.Module, layers: dict[str, nn.Embedding], length: int) -> list[str]:
    """Which of these layers the tokens go into; others may be of places."""
    fewest = min(layer.num_embeddings for layer in layers.values())
    tokens = torch.arange(length).flip(0).remainder(fewest)[None]
    reading: list[str] = []

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.equal(inputs[0], tokens):
            reading.append(name)

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in layers.items()]
    try:
        model(tokens)
    except (RuntimeError, ValueError, IndexError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise AttackError(
            f"the model does not take texts of {length} tokens ({line}); check input_shape, and that the model is that "
            "of the federation"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return reading


def embedding_of(update: Update, model: nn.Module, layer: str) -> Embedding:
    """The embedding as the server broadcast it, and what became of it.

    Raises:
        AttackError: it holds NaN or infinite values.
        TranscriptError: the update is not one of this model.
    """
    known = named(update, model)
    vectors = known.before[f"{layer}.weight"]
    if not vectors.isfinite().all():
        raise AttackError(
            f"round {update.round}, client {update.client}: {layer}.weight holds NaN or infinite values; choose "
            "another round"
        )
    module = model.get_submodule(layer)
    assert isinstance(module, nn.Embedding)
    return Embedding(
        name=layer,
        vectors=vectors,
        moved=known.pseudo_gradient[f"{layer}.weight"],
        padding=module.padding_idx,
    )


def behind(model: nn.Module, layer: str, lexicon: Lexicon) -> nn.Module:
    """A copy of `model` that takes `example dimension place` vectors where it took tokens."""
    own = deepcopy(model)
    own.set_submodule(layer, Behind(lexicon))
    own.register_forward_pre_hook(_places_first)
    return own


def _places_first(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (inputs[0].transpose(1, 2),)


def lexicon_of(scene: Scene) -> Lexicon:
    """The words of a scene whose model is one of `behind`."""
    return next(module.lexicon for module in scene.model.modules() if isinstance(module, Behind))


def among_numbers(knowledge: Knowledge, model: nn.Module, embedding: Embedding, lexicon: Lexicon) -> Knowledge:
    """What is known of the vectors that go into the network behind the embedding.

    They lie between the smallest and the largest value that the embedding has in each dimension. Mean and deviation
    are those over all tokens.
    """
    assert knowledge.input_shape is not None
    vectors = embedding.vectors.float()
    low, high = vectors.min(0).values, vectors.max(0).values
    return replace(
        knowledge,
        model=partial(behind, model, embedding.name, lexicon),
        input_shape=(vectors.shape[1], *knowledge.input_shape),
        value_range=(low.tolist(), torch.maximum(high, low + 1e-6).tolist()),
        input_mean=vectors.mean(0).tolist(),
        input_std=vectors.std(0).clamp_min(1e-6).tolist(),
    )


def on_texts(
    invert: Invert, nearest: Nearest, words: Words
) -> Callable[[Transcript, Knowledge, int, torch.Generator, Progress], Texts]:
    """An attack on numbers made one on texts.

    Args:
        invert: the attack on numbers.
        nearest: how the token nearest to a vector is found.
        words: `touched` claims no tokens but those whose row of the embedding's gradient is not zero.
    """

    def run(
        transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Texts:
        model, layer = reads_tokens(knowledge)
        first = next((number for number in transcript.rounds if victim in transcript.clients(number)), None)
        if first is None:
            raise AttackError(f"client {victim} is in none of the rounds {transcript.rounds}; choose another victim")
        embedding = embedding_of(transcript.update(first, victim), model, layer)
        lexicon = _lexicon(embedding, words, nearest, f"round {first}, client {victim}")
        numbers = among_numbers(knowledge, model, embedding, lexicon)
        found = invert(BehindEmbedding(transcript, model, layer), numbers, victim, rng, progress)
        assert isinstance(found, Reconstruction)
        assert numbers.value_range is not None
        low, high = (torch.tensor(end)[:, None] for end in numbers.value_range)
        points = (low + (high - low) * found.data).transpose(1, 2)
        return Texts(tokens=lexicon.read(points), labels=found.labels, trace=found.trace)

    return run


def _lexicon(embedding: Embedding, words: Words, nearest: Nearest, where: str) -> Lexicon:
    """The words that may be claimed."""
    tokens = torch.arange(len(embedding.vectors)) if words == "vocabulary" else _touched(embedding, where)
    return Lexicon(tokens=tokens, vectors=embedding.vectors[tokens], by=nearest)


def _touched(embedding: Embedding, where: str) -> Tensor:
    """The tokens whose rows moved, ascending."""
    touched = embedding.touched
    if not touched.any():
        raise AttackError(f"{where}: the embedding did not move, so it says nothing of words; try another attack")
    if embedding.padding is not None:
        touched[embedding.padding] = True
    return touched.nonzero()[:, 0]


@dataclass(frozen=True, kw_only=True)
class OnTexts(Attack):
    """Makes the attack on numbers that follows it among a class's bases one on texts.

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

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        run = on_texts(super()._run, self.nearest, self.words)  # type: ignore[safe-super]
        return run(transcript, knowledge, victim, rng, progress)


@dataclass(frozen=True, kw_only=True)
class TemporalTextInversion(OnTexts, TemporalInversion):
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

    def _invert(self, scenes: Sequence[Scene], estimate: Tensor, progress: Progress) -> Reconstruction:
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
            found = super(TemporalTextInversion, attack)._invert(scenes, estimate, self._onward(progress, turn))
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

    def _onward(self, progress: Progress, turn: int) -> Progress:
        """Tell `progress` of iterations that follow those of earlier turns."""
        before, total = turn * self.iterations, (1 + self.refinements) * self.iterations
        return lambda iteration, _, values: progress(before + iteration, total, values)


@dataclass(frozen=True, kw_only=True)
class TextLeakage(OnTexts, DeepLeakage):
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
class TextInvertingGradients(OnTexts, InvertingGradients):
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
    they are claimed again. Which text a word is from, where in it, and how often it occurs, the attack does not say.
    No optimisation. Labels are granted, or counted from the last layer.

    References:
        Deng et al.: TAG: Gradient Attack on Transformer-based Language Models, 2021, for texts from gradients. Differs:
        reads the embedding's rows, which that paper matches along with the rest.
    """

    paper: ClassVar[Paper] = Paper(
        title="TAG: Gradient Attack on Transformer-based Language Models",
        authors="Deng, Wang, Li, Wang, Shang, Liu, Rajasekaran, Ding",
        venue="Findings of EMNLP",
        year=2021,
        url="https://arxiv.org/abs/2103.06819",
    )
    needs: ClassVar[frozenset[str]] = _NEEDS
    uses: ClassVar[frozenset[str]] = MEAN_GRADIENT | {"labels", "momentum", "optimizer"}
    texts: ClassVar[bool] = True
    main_metric: ClassVar[str] = "words_found"

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Texts:
        model, layer = reads_tokens(knowledge)
        update = single_update(transcript, victim)
        where = f"round {update.round}, client {victim}"
        embedding = embedding_of(update, model, layer)
        touched = _touched(embedding, where)
        ranked = touched[embedding.moved[touched].norm(dim=1).argsort(descending=True, stable=True)]
        assert knowledge.input_shape is not None
        places = torch.arange(update.num_examples * knowledge.input_shape[0])
        tokens = ranked[places % len(ranked)].reshape(update.num_examples, -1)
        progress(1, 1, {"objective": 0.0})
        if knowledge.labels is not None and len(knowledge.labels) == update.num_examples:
            return Texts(tokens=tokens, labels=knowledge.labels)
        rest = BehindEmbedding(transcript, model, layer).update(update.round, victim)
        lexicon = _lexicon(embedding, "vocabulary", "cosine", where)
        numbers, network = among_numbers(knowledge, model, embedding, lexicon), behind(model, layer, lexicon)
        labels = count_labels(rest, numbers, network, rest.before, rest.after or rest.before, rng)
        return Texts(tokens=tokens, labels=labels)
