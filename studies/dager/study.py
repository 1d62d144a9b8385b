"""One gradient of texts of Reuters R8, attacked; the tables and the picture of docs/studies/dager.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.text.dager import Dager
from adversaries.text.lamp import Lamp
from adversaries.text.tag import Tag
from adversaries.text.texts import TextInvertingGradients
from fedsim.audit.evaluation.statistics import confidence_interval
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import text_metrics
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, seed_globals
from fedsim.data import Dataset
from fedsim.data.reuters import ReutersR8
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.findings import Texts
from fedsim.training.model_state import copy_state
from fedsim.training.models.transformer import TransformerDecoder, TransformerEncoder
from studies.messages import attack_updates, data_folder, gradient_update, mean_gradient, score_claim, task_knowledge
from studies.running import Row
from studies.writing import column_values, group_rows, markdown_table, save_picture, select_rows, set_style

NETWORKS: dict[str, Callable[..., Any]] = {
    "encoder": TransformerEncoder,
    "decoder": TransformerDecoder,
    "decoder-lora": partial(TransformerDecoder, lora_rank=32),
}
WIDTHS, STEPS, BATCH, MOST_TEXTS, MOST_WORDS = (128, 256, 512), 100, 16, 16, 256
"""The width is the smallest that is more than size x length + 8, or the largest."""
ATTACKS: dict[str, Attack] = {
    "dager": Dager(attempts=2),
    "inverting-gradients-text": TextInvertingGradients(iterations=300, step_size=0.1),
    "tag": Tag(iterations=300),
    "lamp": Lamp(iterations=300, candidates=50, tries=10),
}
METRICS = ("exact", "floor", "rouge_1", "rouge_2", "labels")
Rows = Sequence[Mapping[str, str]]


def applies(cell: Row) -> bool:
    """Leave out batches of too many words."""
    return bool(cell["size"] * cell["length"] <= MOST_WORDS)


@cache
def load_texts(length: int) -> Dataset:
    """Load Reuters R8."""
    return ReutersR8(length=length).load(data_folder())


def text_order(data: Dataset, seed: int) -> Tensor:
    """Return an order of the training texts: the first ones are the client's, the others train the network."""
    return torch.randperm(len(data.train), generator=generator("dager", seed, "who"))


@cache
def build_network(name: str, weights: str, length: int, dim: int, seed: int) -> nn.Module:
    """Build a network whose weights depend on these alone."""
    data = load_texts(length)
    with seed_globals("dager", seed):
        model: nn.Module = NETWORKS[name](dim=dim).build(data.task)
    if weights == "trained":
        optimizer, rng = torch.optim.Adam(model.parameters(), 1e-3), generator("dager", seed, "train")
        for _ in range(STEPS):
            index = text_order(data, seed)[torch.randint(MOST_TEXTS, len(data.train), (BATCH,), generator=rng)]
            optimizer.zero_grad()
            cross_entropy(model(data.train.inputs(index)), data.train.labels[index]).backward()
            optimizer.step()
    return model.eval()


def measure(seed: int, size: int, length: int, network: str, weights: str, attack: str) -> Row:
    """Attack one gradient, and score what is found."""
    data = load_texts(length)
    dim = next((width for width in WIDTHS if width > size * length + 8), WIDTHS[-1])
    model = build_network(network, weights, length, dim, seed)
    mine = text_order(data, seed)[:size]
    tokens, labels = data.train.inputs(mine), data.train.labels[mine]
    knowledge = task_knowledge(lambda: model, data.task, learning_rate=1.0, local_epochs=1, batch_size=size)
    update = gradient_update(copy_state(model), mean_gradient(model, tokens, labels), size)
    try:
        finding, seconds = attack_updates(ATTACKS[attack], [update], knowledge, generator(seed))
    except AttackError as error:
        print(error)
        return {"dim": dim, "refused": 1, **dict.fromkeys(METRICS, ""), "seconds": 0.0}
    assert isinstance(finding, Texts)
    truth = Truth(data=tokens, labels=labels, padding=data.padding)
    scores = score_claim(finding, truth, generator(0), data.test)
    paired = text_metrics.pair_texts(finding.tokens, tokens, data.padding)
    rouge_scores = {f"rouge_{n}": float(rouge(paired, tokens, data.padding, n).mean()) for n in (1, 2)}
    exact = {"exact": scores["recovered"].value, "floor": scores["recovered"].floor}
    labels_right = scores["label_accuracy"].value
    return {"dim": dim, "refused": 0, **exact, **rouge_scores, "labels": labels_right, "seconds": round(seconds, 2)}


def rouge(claimed: Tensor, true: Tensor, padding: int | None, words: int) -> Tensor:
    """Return `text`, ROUGE-n: the F1 of the n-grams that both texts of a pair have, as multisets.

    Padding and positions for which nothing is claimed are left out. Where neither text has an n-gram, it is 0.

    Args:
        claimed: `text position`, in the order of the true ones, see `pair_texts`.
        true: `text position`.
        words: n, the length of an n-gram.

    References:
        [Lin2004], Sect. 2; without stemming.

    >>> true, claimed = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]]), torch.tensor([[1, 2, 2, 3], [-1, -1, -1, -1]])
    >>> rouge(claimed, true, 0, 1), rouge(claimed, true, 0, 2), rouge(true, true, 0, 2)
    (tensor([0.8571, 0.0000]), tensor([0.8000, 0.0000]), tensor([1., 1.]))
    """
    scores = []
    for pair in zip(claimed.tolist(), true.tolist(), strict=True):
        claimed_counts, true_counts = (count_ngrams(text, padding, words) for text in pair)
        total = claimed_counts.total() + true_counts.total()
        scores.append(2 * (claimed_counts & true_counts).total() / max(1, total))
    return torch.tensor(scores)


def count_ngrams(text: list[int], padding: int | None, length: int) -> Counter[tuple[int, ...]]:
    """Count the n-grams of a text of tokens."""
    tokens = [token for token in text if token not in (padding, text_metrics.NO_TOKEN)]
    return Counter(zip(*(tokens[start:] for start in range(length)), strict=False))


def tables(rows: Rows) -> dict[str, str]:
    """Return a table for each attack and network, shares and ROUGE in percent, means over batches."""
    head = ["b", "length", "width", "batches", "whole", "exact %", "floor %"]
    head += ["ROUGE-1", "ROUGE-2", "labels %", "seconds"]
    parts = []
    for (attack, network, weights), same in sorted(group_rows(rows, "attack", "network", "weights").items()):
        lines = [setting_line(batches) for batches in group_batches(same).values()]
        parts.append(f"`{attack}`, {network}, {weights} weights:\n\n{markdown_table(head, lines, '---:')}")
    return {"": "\n\n".join(parts)}


def group_batches(rows: Rows) -> dict[tuple[int, int], Rows]:
    """Return the batches by length and number of texts, ascending."""
    groups = group_rows(rows, "length", "size").items()
    return dict(sorted(((int(length), int(size)), batches) for (length, size), batches in groups))


def setting_line(rows: Rows) -> list[str]:
    """Format the line of one setting."""
    refused = len(select_rows(rows, refused=1))
    exact, *others = (column_values(rows, metric) for metric in METRICS)
    text = f"{100 * exact.mean():.0f}"
    if len(exact) > 1:
        low, high = confidence_interval(exact, share=True)
        text += f" ({100 * low:.0f} to {100 * high:.0f})"
    count = f"{len(rows)} ({refused} refused)" if refused else str(len(rows))
    means = [f"{100 * values.mean():.0f}" for values in others]
    setting = [rows[0]["size"], rows[0]["length"], rows[0]["dim"]]
    return [*setting, count, str(sum(exact == 1)), text, *means, f"{column_values(rows, 'seconds').mean():.1f}"]


def draw(rows: Rows) -> None:
    """Draw what comes back against the number of texts, for each length."""
    set_style()
    figure, axes = plt.subplots(1, 4, figsize=(9, 2.8), sharey=True)
    for axis, (network, weights) in zip(axes, product(("decoder", "encoder"), ("fresh", "trained")), strict=True):
        settings = group_batches(select_rows(rows, attack="dager", network=network, weights=weights))
        for length, marker, colour in zip((8, 16, 32), "os^", ("C0", "C1", "C2"), strict=True):
            by_size = {size: batches for (of_length, size), batches in settings.items() if of_length == length}
            for metric, line in (("exact", "-"), ("rouge_1", ":")):
                means = [column_values(batches, metric).mean() for batches in by_size.values()]
                label = f"{length} words" if metric == "exact" else None
                axis.plot(list(by_size), means, line, marker=marker, color=colour, label=label, markersize=4)
        axis.set_xscale("log", base=2)
        axis.set_xticks((1, 2, 4, 8, 16), ["1", "2", "4", "8", "16"])
        axis.set_xlim(0.9, 18)
        axis.set_title(f"{network}, {weights}", fontsize=9)
        axis.set_xlabel("texts b")
    axes[0].set_ylabel("share")
    axes[0].set_ylim(-0.03, 1.05)
    axes[0].legend(frameon=False)
    axes[-1].plot([], [], "k-", label="exact")
    axes[-1].plot([], [], "k:", label="ROUGE-1")
    axes[-1].legend(frameon=False, handles=axes[-1].get_lines()[-2:])
    save_picture(figure, "dager.svg")
