"""What decides SME's gain over IG in the cells that were missed; the tables of docs/studies/papers/sme.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.surrogate_curve import NonLinearSurrogate
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.base.randomness import generator
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.table_validation import validate_tables
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.wire_format import Update
from studies.messages import image_knowledge, invert_update, pair_psnr, weights_update
from studies.running import Row
from studies.writing import column_values, group_rows, markdown_table, select_rows

LEARNING_RATE = 0.004
MODELS: dict[str, dict[str, Any]] = {
    "CNN": {"name": "sme-cnn"},
    "ResNet8": {"name": "resnet8"},
    "ViT": {"name": "vit-april"},
}
METHODS = {"SME": SurrogateModelExtension, "NL-SME": NonLinearSurrogate, "IG": InvertingGradients}
WEIGHTS_OF_END = torch.linspace(0, 1, 11)
"""Places on the line from w_0 to w_T, as the weight of w_T."""
FORMS = {"psnr": ".1f", "l_sim": ".4f", "weight": ".2f"}
Rows = Sequence[Mapping[str, str]]


@cache
def make_experiment(network: str, clients: str) -> Experiment:
    """Return the experiment whose clients and first weights are taken."""
    tables = {
        "data": {"name": "femnist", "folder": "femnist-digits"},
        "partition": {"name": "iid", "samples_per_client": 10, "distinct_labels": clients == "distinct labels"},
        "model": MODELS[network],
        "training": {"local_epochs": 1},
        "federation": {"engine": "serial", "clients": 20, "rounds": 1, "seed": 1},
    }
    return Experiment(validate_tables(Config, tables, "sme_budget"))


@cache
def train_client(network: str, epochs: int, clients: str, client: int) -> tuple[Update, Tensor, Tensor]:
    """Train on all images in each step, BatchNorm in evaluation mode; return the message, images and labels."""
    experiment = make_experiment(network, clients)
    model = experiment.new_model().eval()
    before = {name: tensor.clone() for name, tensor in experiment.model.state_dict().items()}
    model.load_state_dict(before)
    images, labels = experiment.data.train(client)
    labels, order = labels.sort()
    images = images[order]
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for _ in range(epochs):
        optimizer.zero_grad()
        cross_entropy(model(experiment.data.to_model(images)), labels).backward()
        optimizer.step()
    after = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return weights_update(before, after, len(labels)), images, labels


def distances_on_line(problem: InversionProblem, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return L_sim of examples at places on the line from w_0 to w_T."""
    sent = torch.cat([tensor.flatten() for tensor in problem.direction])
    distances = []
    for weight in WEIGHTS_OF_END:
        pairs = zip(problem.before, problem.returned_weights, strict=True)
        point = [(start + weight * (end - start)).requires_grad_() for start, end in pairs]
        gradient = torch.cat([tensor.detach().flatten() for tensor in problem.gradient(point, inputs, labels)])
        distances.append(1 - torch.cosine_similarity(sent.double(), gradient.double(), dim=0))
    return torch.stack(distances)


def measure(network: str, epochs: int, clients: str, method: str, iterations: int, changes: str, client: int) -> Row:
    """Attack one client, or measure L_sim of its true images on the line."""
    update, images, labels = train_client(network, epochs, clients, client)
    experiment = make_experiment(network, clients)
    knowledge = image_knowledge(experiment, labels)
    if method == "true images":
        distances = distances_on_line(build_problem(update, knowledge), experiment.data.to_model(images), labels)
        best = int(distances.argmin())
        start, middle, least = (distances[place].item() for place in (0, len(distances) // 2, best))
        weight = WEIGHTS_OF_END[best].item()
        return {"psnr": "", "l_sim": least, "weight": weight, "start": start, "middle": middle}
    settings: dict[str, Any] = {"iterations": iterations}
    if network == "ViT":
        settings |= {"step_size": 0.1, "decay": False}  # the released code's for it
    if method == "SME":
        settings["alpha_every"] = 10
    for change in changes.split():
        name, _, value = change.partition("=")
        settings[name] = float(value)
    found = invert_update(METHODS[method](**settings), update, knowledge, generator(1, "sme_budget", client))
    last = {name: values[-1].item() for name, values in found.trace.items()}
    weight = 1 - last["alpha"] if "alpha" in last else 0.0
    psnr = pair_psnr(found.data, images)
    return {"psnr": psnr, "l_sim": last["l_sim"], "weight": weight, "start": "", "middle": ""}


def tables(rows: Rows) -> dict[str, str]:
    """Return L_sim of the clients' own images on the line, and what attacks get."""
    return {"line": line_table(rows), "attacks": attack_table(rows)}


def line_table(rows: Rows) -> str:
    """Format L_sim of the clients' own images at three places, means over clients."""
    lines = []
    groups = group_rows(select_rows(rows, method="true images"), "network", "epochs", "clients")
    for setting, group in groups.items():
        distances = [f"{column_values(group, name).mean():.4f}" for name in ("start", "middle", "l_sim")]
        lines.append([*setting, str(len(group)), *distances, f"{column_values(group, 'weight').mean():.2f}"])
    return markdown_table(
        ["network", "E", "labels", "clients", "at w_0", "halfway", "least", "weight of w_T there"], lines
    )


def attack_table(rows: Rows) -> str:
    """Format what SME and NL-SME get, and IG on the same clients after as many iterations, means over clients."""
    lines = []
    attacked = [row for row in rows if row["method"] in ("SME", "NL-SME")]
    groups = group_rows(attacked, "network", "epochs", "clients", "method", "iterations", "changes")
    for (network, epochs, clients, method, iterations, changes), group in groups.items():
        known = {row["client"] for row in group}
        reference = select_rows(
            rows, method="IG", network=network, epochs=epochs, clients=clients, iterations=iterations
        )
        reference = [row for row in reference if row["client"] in known]
        cells = [f"{column_values(group, name).mean():{form}}" for name, form in FORMS.items()]
        if len(reference) == len(group):
            ig_psnr, ig_loss = (column_values(reference, name).mean() for name in ("psnr", "l_sim"))
            gain = column_values(group, "psnr").mean() - ig_psnr
            cells = [f"{ig_psnr:.1f}", f"{ig_loss:.4f}", *cells, f"{gain:+.1f}"]
        else:
            cells = ["", "", *cells, ""]
        lines.append([network, epochs, clients, method, f"{iterations} {changes}".strip(), str(len(group)), *cells])
    head = [
        "network",
        "E",
        "labels",
        "attack",
        "iterations",
        "clients",
        "IG, dB",
        "L_sim",
        "PSNR, dB",
        "L_sim",
        "weight of w_T",
        "gain",
    ]
    return markdown_table(head, lines)
