"""One noised gradient of texts of Reuters R8, attacked; the table of noise in docs/studies/dager.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adversaries.text.dager import Dager
from adversaries.text.tiger import Tiger
from clients.defenses.update_noise import UpdateNoise
from fedsim.audit.evaluation.statistics import confidence_interval
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.findings import Texts
from fedsim.training.model_state import copy_state
from studies.dager.study import build_network, load_texts, text_order
from studies.messages import attack_updates, gradient_update, mean_gradient, score_claim, task_knowledge
from studies.running import Row
from studies.writing import column_values, group_rows, markdown_table, select_rows

LENGTH, WIDTH, LEAST_WORDS = 8, 128, 3
"""Texts whose ends are padded have from LEAST_WORDS to LENGTH words."""
ATTACKS: dict[str, Attack] = {"dager": Dager(), "tiger": Tiger()}
METRICS = {"exact": "recovered", "words": "tokens_found"}


def measure(network: str, weights: str, ends: str, size: int, noise: float, seed: int, knows: str, attack: str) -> Row:
    """Attack one gradient with Gaussian noise of `noise` times its norm in all, and score what is found."""
    data = load_texts(LENGTH)
    model = build_network(network, weights, LENGTH, WIDTH, seed)
    mine = text_order(data, seed)[:size]
    tokens, labels = data.train.inputs(mine), data.train.labels[mine]
    if ends == "padded":
        assert data.padding is not None
        lengths = torch.randint(LEAST_WORDS, LENGTH + 1, (size,), generator=generator("text-noise", seed, "ends"))
        tokens = torch.where(torch.arange(LENGTH) < lengths[:, None], tokens, data.padding)
    gradient = mean_gradient(model, tokens, labels)

    # Add noise to each number, as update-noise does with a bound that clips nothing.
    norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in gradient.values()))
    deviation = noise * norm / math.sqrt(sum(tensor.numel() for tensor in gradient.values()))
    rng = generator("text-noise", seed)
    noised = {name: t + deviation * torch.randn(t.shape, generator=rng) for name, t in gradient.items()}
    facts: dict[str, Any] = {"learning_rate": 1.0, "local_epochs": 1, "batch_size": size}
    if knows == "noise":
        facts["defenses"] = [UpdateNoise(noise_multiplier=deviation / norm, clip=norm)]
    knowledge = task_knowledge(lambda: model, data.task, **facts)
    update = gradient_update(copy_state(model), noised, size)
    try:
        finding, seconds = attack_updates(ATTACKS[attack], [update], knowledge, generator(seed))
    except AttackError as error:
        print(error)
        return {"refused": 1, **dict.fromkeys(METRICS, ""), "exact_floor": "", "words_floor": "", "seconds": 0.0}
    assert isinstance(finding, Texts)
    truth = Truth(data=tokens, labels=labels, padding=data.padding)
    scores = score_claim(finding, truth, generator(0), data.test)
    row: dict[str, Any] = {"refused": 0}
    for name, metric in METRICS.items():
        row |= {name: scores[metric].value, f"{name}_floor": scores[metric].floor}
    return row | {"seconds": round(seconds, 2)}


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return a line for each network, number of texts, noise and attack, shares in percent, means over victims."""
    head = ["network", "weights", "ends", "b", "noise", "attack", "victims"]
    head += ["exact %", "guess %", "words %", "guess %", "seconds"]
    keys = ("network", "weights", "ends", "size", "noise", "attack", "knows")
    groups = group_rows(sorted(rows, key=lambda row: [row[key] for key in keys]), *keys)
    lines = []
    for (network, weights, ends, size, noise, attack, knows), victims in groups.items():
        title = f"`{attack}`" + (", noise known" if knows == "noise" else "")
        answered = select_rows(victims, refused=0)
        count = f"{len(victims)} ({len(victims) - len(answered)} refused)"
        cells = ["-"] * 5
        if answered:
            cells = []
            for name in METRICS:
                values = column_values(answered, name)
                text = f"{100 * values.mean():.0f}"
                if len(values) > 1:
                    low, high = confidence_interval(values, share=True)
                    text += f" ({100 * low:.0f} to {100 * high:.0f})"
                cells += [text, f"{100 * column_values(answered, name + '_floor').mean():.0f}"]
            cells.append(f"{column_values(answered, 'seconds').mean():.1f}")
        lines.append([network, weights, ends, size, noise, title, count, *cells])
    return {"": markdown_table(head, lines, "---:")}
