"""`learned-inversion` beside its authors' released code on the same gradients and public images, image by image."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from adversaries.inversion.learned_inversion import LearnedInversion
from adversaries.simulated import SimulatedClients
from fedsim.audit.evaluation.identification import score_identification
from fedsim.audit.evaluation.matches import Pool
from fedsim.audit.evaluation.statistics import mean_and_margin
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config
from fedsim.interfaces.attack import Records
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import Knowledge
from fedsim.interfaces.modality import PublicExamples
from fedsim.recording.wire_format import Update
from studies.messages import attack_updates, image_knowledge, score_claim
from studies.running import RUNS, Row, run_or_resume
from studies.writing import column_values, group_rows, markdown_table

CLIENTS, PUBLIC = 20, 3000
EXPERIMENT = {
    "data": {"name": "cifar10"},
    "partition": {"name": "iid", "samples_per_client": 1},
    "model": {"name": "lenet", "layout": "dlg"},
    "training": {"local_steps": 1, "batch_size": 1},
    "strategy": {"name": "fedsgd", "learning_rate": 0.1},
    "federation": {"engine": "serial", "clients": CLIENTS, "rounds": 1, "seed": 1},
    "adversary": {"when": "never"},
}
OURS = {"ours, not refined": LearnedInversion(refinements=0), "ours": LearnedInversion()}


@dataclass(frozen=True)
class RecordedGradients:
    """What the clients of a run sent, each the gradient of one image, and what is known to attack them.

    Attributes:
        updates: by client, under the number 0.
        truths: by client.
        public: images in [0, 1] that no client holds, `image channel row column`.
        knowledge: what the server knows, the public images included.
        experiment: the run's.
    """

    updates: Sequence[Update]
    truths: Sequence[Truth]
    public: Tensor
    knowledge: Knowledge
    experiment: Experiment


@cache
def record_gradients() -> RecordedGradients:
    """Return the first round of a run, which is made where it is not there."""
    path = RUNS / "learned_parity"
    run = run_or_resume(EXPERIMENT, path)
    experiment = Experiment(load_config(path / "experiment.toml"))
    updates, truths = [], []
    for client in range(CLIENTS):
        sent = run.transcript.update(1, client)
        updates.append(Update(round=1, client=0, before=sent.before, payload=sent.payload, num_examples=1))
        data, labels = experiment.data.train(client)
        truths.append(Truth(data=data, labels=labels))
    test = experiment.data.dataset.test
    public, labels = test.inputs(slice(0, PUBLIC)), test.labels[:PUBLIC]
    records = Records(inputs=experiment.data.to_model(public), labels=labels)
    plan = {"local_steps": 1, "batch_size": 1, "learning_rate": experiment.training.learning_rate}
    knowledge = replace(image_knowledge(experiment, labels, **plan), labels=None, auxiliary=records)
    return RecordedGradients(updates, truths, public, knowledge, experiment)


def measure(code: str, width: int, epochs: int) -> list[Row]:
    """Return for each client the scores of what one code claims, and its processor time for all clients."""
    recorded = record_gradients()
    started = time.process_time()
    claims = (
        invert_by_official_code(recorded, width, epochs) if code == "theirs" else invert_by_our_code(recorded, code)
    )
    seconds = time.process_time() - started
    test, rows = recorded.experiment.data.dataset.test, list[Row]()
    others = PublicExamples(data=test.inputs(slice(PUBLIC, None)), labels=test.labels[PUBLIC:])
    for client, (claim, truth) in enumerate(zip(claims, recorded.truths, strict=True)):
        found = Reconstruction(data=claim[None], labels=truth.labels)
        psnr = score_claim(found, truth, generator("floor", client), test, PUBLIC, labels_granted=True)["psnr"]
        identified = score_identification(found.data, truth, Pool.from_truth(truth, others))
        row = {"client": client, "psnr": psnr.value, "floor": psnr.floor, "identified": identified.value}
        rows.append(row | {"seconds": seconds})
    return rows


def invert_by_our_code(recorded: RecordedGradients, code: str) -> list[Tensor]:
    """Return the claimed image of each client; what this process trained for another cell is trained anew."""
    claims = []
    with patch.dict("fedsim.inversion.public_fits._fits", clear=True):
        for client, update in enumerate(recorded.updates):
            found, _ = attack_updates(OURS[code], [update], recorded.knowledge, generator("attack", client))
            assert isinstance(found, Reconstruction)
            claims.append(found.data[0])
    return claims


def invert_by_official_code(recorded: RecordedGradients, width: int, epochs: int) -> list[Tensor]:
    """Return what the authors' network claims after its last epoch; it learns from the gradients of public images.

    Raises:
        ConfigError: OFFICIAL names no checkout.
    """
    if not (folder := os.environ.get("OFFICIAL")):
        raise ConfigError("OFFICIAL is not set; point it at a checkout of the authors' repository")
    clients, records = SimulatedClients(recorded.knowledge), recorded.knowledge.auxiliary
    assert records is not None
    public = [
        clients.simulate_update(recorded.updates[0], inputs[None], label[None], ("public", number))
        for number, (inputs, label) in enumerate(zip(records.inputs, records.labels, strict=True))
    ]
    gradients = {
        "train_features": torch.stack(public),
        "train_targets": recorded.public.flatten(1),
        "test_features": torch.stack([clients.flatten_update(update) for update in recorded.updates]),
        "test_targets": torch.cat([truth.data for truth in recorded.truths]).flatten(1),
    }
    settings = {"dataset": "CIFAR10", "shared_model": "LeNet", "model": f"MLP-{width}", "leak_mode": "None"}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work), seed_globals("learned_parity"):
        for name in ("data", "checkpoint"):
            Path(name).mkdir()
        torch.save(gradients, "data/CIFAR10_LeNet_grad_to_img.pl")  # which their code makes where it is not there
        path, command = [folder, *sys.path], ["main_learn_dlg.py", *words, "--epochs", str(epochs)]
        with on_processor(), patch.object(sys, "path", path), patch.object(sys, "argv", command):
            runpy.run_path(str(Path(folder) / "main_learn_dlg.py"), run_name="__main__")
        (kept,) = Path("checkpoint").glob("*_256.pt")
        return list(torch.load(kept)["reconstructed_imgs"])


@contextlib.contextmanager
def on_processor() -> Iterator[None]:
    """Let code that moves all to a GPU compute on the processor, and print nothing."""
    move, convert = nn.Module.to, Tensor.to

    def move_elsewhere(module: nn.Module, *args: Any, **more: Any) -> nn.Module:
        return module if names_gpu(args) else move(module, *args, **more)

    def convert_here(tensor: Tensor, *args: Any, **more: Any) -> Tensor:
        return tensor if names_gpu(args) else convert(tensor, *args, **more)

    def names_gpu(args: Sequence[Any]) -> bool:
        return bool(args) and str(args[0]).startswith("cuda")

    def stay(tensor_or_module: Any) -> Any:
        return tensor_or_module

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(Tensor, "cuda", stay))
        patches.enter_context(patch.object(nn.Module, "cuda", stay))
        patches.enter_context(patch.object(nn.Module, "to", move_elsewhere))
        patches.enter_context(patch.object(Tensor, "to", convert_here))
        patches.enter_context(contextlib.redirect_stderr(io.StringIO()))
        patches.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table: a line for each code, and how much more each of ours has for the same images."""
    cells = group_rows(rows, "code", "width", "epochs")
    ours = {
        code: {row["client"]: float(row["psnr"]) for row in cell} for (code, *_), cell in cells.items() if code in OURS
    }
    lines = []
    for (code, width, epochs), cell in cells.items():
        psnr = {row["client"]: float(row["psnr"]) for row in cell}
        gains = {row["client"]: float(row["psnr"]) - float(row["floor"]) for row in cell}
        identified = column_values(cell, "identified").sum()
        seconds = column_values(cell[:1], "seconds")[0]
        line = [f"theirs, MLP-{width}, {epochs} epochs" if code == "theirs" else code]
        line += [format_mean(psnr, "{:.1f} ± {:.1f}"), format_mean(gains, "{:+.1f} ± {:.1f}")]
        line += [f"{identified:.0f} of {len(cell)}", f"{seconds:.0f}"]
        for ours_psnr in ours.values():
            more = {client: ours_psnr[client] - value for client, value in psnr.items()}
            ahead = sum(value > 0 for value in more.values())
            text = f"{format_mean(more, '{:+.1f} ± {:.1f}')}, {ahead} of {len(more)}"
            line.append("–" if code in OURS else text)
        lines.append(line)
    head = ["code", "PSNR, dB", "beyond the floor", "identified", "seconds", *(f"{code}: more" for code in ours)]
    return {"": markdown_table(head, lines)}


def format_mean(values: Mapping[str, float], form: str) -> str:
    """Format the mean over clients with its 95 % interval."""
    return form.format(*mean_and_margin({(client, "1"): value for client, value in values.items()}))
