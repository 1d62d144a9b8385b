"""`giml` beside its authors' released code on the same gradients of single images, image by image."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import runpy
import sys
import tempfile
import time
import urllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from adversaries.inversion import transcript_generator, transcript_prior
from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.transcript_generator import GeneratedImages, ImageGenerator
from adversaries.inversion.transcript_prior import TranscriptPrior
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.interfaces.attack import Attack, Progress, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.distances import Cosine
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import Recipe
from fedsim.inversion.restart import objective_terms
from studies.giml.study import CLIENTS, FLOOR, SEED, experiment_of, images_of, transcript_of
from studies.learned_parity.study import format_mean, on_processor
from studies.messages import image_knowledge, score_claim
from studies.running import Row
from studies.writing import column_values, group_rows, markdown_table, select_rows

DATA, VICTIMS = "cifar10", 6
SETTINGS = {"cost_fn": "sim", "num_images": 1, "restarts": 1, "tv": 1e-4, "bn_stat": 0, "image_norm": 0}
SETTINGS |= {"group_lazy": 0, "generative_model": "DCGAN-untrained", "gen_dataset": "C10", "gias_lr": 1e-3}
LEARNING, ATTACKING = {"lr": 3e-2, "z_norm": 1e-3}, {"lr": 0.1, "z_norm": 0}
"""Of scripts/meta_train.sh and scripts/meta_eval.sh, but for one image, in the latter also for one start, the whole
gradient, and the total variation, which is as in the former."""
METRICS = ("psnr", "ssim", "identified")
COMPARED = ("objectives apart", "gradients apart", "distances apart", "apart")
"""Columns of what differs where both begin with the same generator and latent vectors."""
THEIR_SETTINGS = {"step_size": 0.1, "tuning_step_size": 1e-3, "latent_weight": 0.0, "tv_weight": 2e-4}
"""Of their attack as ours names them; our total variation averages the directions, and theirs adds them."""
STARTED = "ours, their start"
LATENTS = 100
"""Of their generator."""


class TheirGenerator(nn.Module):
    """Their generator with our interface: images in [0, 1] of `example latent`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, latents: Tensor) -> Tensor:
        """Return the images."""
        images: Tensor = self.network(latents[:, :, None, None])
        return (images + 1) / 2


@dataclass
class OfficialRun:
    """What one of their scripts did.

    Attributes:
        variables: of the script at its end.
        claims: images in [0, 1], one for each call of their attack, `1 channel row column`.
        starts: the latent vectors that each began with.
        distances: 1 - cosine at the end of each.
        seconds: of the processor, for each.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    claims: list[Tensor] = field(default_factory=list)
    starts: list[Tensor] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@cache
def official_library() -> ModuleType:
    """Return their package.

    Raises:
        ConfigError: OFFICIAL names no checkout.
    """
    if not (folder := os.environ.get("OFFICIAL")):
        raise ConfigError("OFFICIAL is not set; point it at a checkout of the authors' repository")
    # They import six to download data that nobody asks for.
    stubs = {"six": ModuleType("six"), "six.moves": ModuleType("six.moves")}
    vars(stubs["six.moves"])["urllib"] = urllib
    missing = {name: stub for name, stub in stubs.items() if name not in sys.modules}
    sys.modules.update(missing)
    try:
        with patch.object(sys, "path", [folder, *sys.path]):
            library = import_module("inversefed")
            generator_class = import_module("inversefed.genmodels.cifar10_dcgan.dcgan").Generator
    finally:
        for name in missing:
            del sys.modules[name]
    # Their attack tunes this part of a StyleGAN; a DCGAN has no other.
    generator_class.G_synthesis = property(lambda self: self)
    return library


def run_official_script(name: str, mode: str, settings: Mapping[str, object]) -> OfficialRun:
    """Run one of their scripts on our network and images, whose gradients are what our clients sent.

    Raises:
        RuntimeError: their script computed another gradient.
    """
    experiment, kept = experiment_of(DATA), OfficialRun()
    words = [word for key, value in (SETTINGS | dict(settings)).items() for word in (f"--{key}", str(value))]
    model = experiment.new_model()
    model.load_state_dict(experiment.initial_state())
    low, high = (torch.tensor(end) for end in experiment.data.value_range())
    images = [images_of(DATA, 1, client) for client in range(CLIENTS)]
    examples = [(experiment.data.to_model(image)[0], int(label)) for image, label in images]
    examples *= 10  # clients are visited in turns
    library, _ = official_library(), sent_gradients()  # before the folder changes
    with on_processor(), tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
        machine = library.GradientReconstructor
        reconstruct, draw = machine.reconstruct, machine.init_dummy_z

        def keep_claim(self: Any, gradient: list[Any], labels: Tensor, **more: Any) -> Any:
            check_message(gradient[0] if isinstance(gradient[0], list) else gradient, len(kept.claims))
            started = time.process_time()
            image, stats = reconstruct(self, gradient, labels, **more)
            kept.seconds.append(time.process_time() - started)
            kept.claims.append((image - low[:, None, None]) / (high - low)[:, None, None])
            kept.distances.append(stats["opt"])
            return image, stats

        def keep_start(self: Any, *arguments: Any) -> Tensor:
            start: Tensor = draw(self, *arguments)
            kept.starts.append(start.detach().flatten(1).clone())
            return start

        loss = import_module("inversefed.data.loss").Classification()
        idle = SimpleNamespace(zero_grad=lambda: None, step=lambda: None)
        source = (loss, None, SimpleNamespace(dataset=examples))
        replaced: list[tuple[Any, str, Any]] = [
            (library, "construct_dataloaders", lambda *_, **__: source),
            (library, "construct_model", lambda *_, **__: (copy.deepcopy(model), 0)),
            (library.consts, "cifar10_mean", (-low / (high - low)).tolist()),
            (library.consts, "cifar10_std", (1 / (high - low)).tolist()),
            (torch.optim, "SGD", lambda *_, **__: idle),  # which moves the network after each 50 messages
            (machine, "reconstruct", keep_claim),
            (machine, "init_dummy_z", keep_start),
            (sys, "argv", [name, "--unsigned", f"--{mode}", *words]),
        ]
        for folder in ("results", "images", "tables"):
            Path(folder).mkdir()
        with contextlib.ExitStack() as patches, seed_globals("giml_parity"):
            for place, attribute, value in replaced:
                patches.enter_context(patch.object(place, attribute, value))
            kept.variables = runpy.run_path(str(Path(str(library.__file__)).parents[1] / name), run_name="__main__")
    return kept


def check_message(gradient: Sequence[Tensor], number: int) -> None:
    """Compare the gradient of their script's attack of this number with the recorded one.

    Raises:
        RuntimeError: it is another one.
    """
    sent, theirs = sent_gradients()[number % CLIENTS], flatten_tensors(gradient)
    if (theirs - sent).norm() > 1e-4 * sent.norm():
        raise RuntimeError(f"their gradient of client {number % CLIENTS} is not the recorded one")


@cache
def sent_gradients() -> list[Tensor]:
    """Return what each client sent, as one vector."""
    transcript, vectors = transcript_of(DATA, 1, "none"), []
    for client in range(CLIENTS):
        update = transcript.update(1, client)
        vectors.append(flatten_tensors(update.payload.values("gradient", update.before).values()))
    return vectors


def flatten_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Return all entries as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def draw_official_generator() -> nn.Module:
    """Return their generator before it learns."""
    with seed_globals("giml_parity"):
        network: nn.Module = import_module("inversefed.porting").load_decoder_dcgan_untrained({}, "cpu")
    return network


@cache
def attack_by_official_code(tasks: int, task_steps: str, rate: float, steps: str) -> tuple[OfficialRun, float]:
    """Return what their scripts claim of the first clients' images, and the processor time of their learning."""
    official_library()
    network, seconds = draw_official_generator(), 0.0
    if tasks:
        settings = LEARNING | name_steps("max_iterations", "gias_iterations", task_steps)
        learning = run_official_script("train_gen.py", "giml", settings | {"num_exp": tasks, "meta_lr": rate})
        network, seconds = learning.variables["G"], sum(learning.seconds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "generator.pkl"
        path.write_bytes(pickle.dumps((network, None)))
        settings = ATTACKING | name_steps("max_iterations", "gias_iterations", steps)
        victims = {"num_exp": VICTIMS, "checkpoint_path": path}
        return run_official_script("rec_mult.py", "gias", settings | victims), seconds


@dataclass(frozen=True, kw_only=True)
class ThroughTheirGenerator(TranscriptPrior):
    """Our attack through their network, which learns as ours does."""

    def _find_generator(self, target: Target, shape: tuple[int, ...], progress: Progress) -> ImageGenerator:
        official_library()
        network = TheirGenerator(draw_official_generator())
        with patch.object(transcript_prior, "draw_generator", lambda *_: network.requires_grad_(False)):
            return super()._find_generator(target, shape, progress)


def measure(code: str, tasks: int, task_steps: str, steps: str) -> list[Row]:
    """Return a row for each of the first clients; seconds are of the processor, and learning is for all of them."""
    test, rows = experiment_of(DATA).dataset.test, list[Row]()
    for victim, row in enumerate(attack_clients(code, tasks, task_steps, steps)):
        images, labels = images_of(DATA, 1, victim)
        finding = Reconstruction(data=row.pop("claim"), labels=labels)
        truth = Truth(data=images, labels=labels)
        scores = score_claim(finding, truth, generator(SEED, "floors", victim), test, FLOOR, labels_granted=True)
        for metric in METRICS:
            row |= {metric: scores[metric].value, f"{metric} floor": scores[metric].floor}
        rows.append({"client": victim, **dict.fromkeys(COMPARED, "")} | row)
    return rows


def attack_clients(code: str, tasks: int, task_steps: str, steps: str) -> list[Row]:
    """Return the claim for each of the first clients, its distance, and how long it took."""
    if code.startswith("theirs"):
        rate = float(code.split()[-1]) if tasks else 0.0
        run, learning = attack_by_official_code(tasks, task_steps if tasks else "", rate, steps)
        columns = zip(run.claims, run.distances, run.seconds, strict=True)
        return [{"claim": claim, "distance": d, "learning": learning, "attack": s} for claim, d, s in columns]
    with contextlib.ExitStack() as patches:
        folder = patches.enter_context(tempfile.TemporaryDirectory())  # what was learnt before would take no time
        patches.enter_context(patch.dict("os.environ", FEDSIM_CACHE=folder))
        patches.enter_context(patch.dict("fedsim.inversion.public_fits._fits", clear=True))
        if code != "ours":
            patches.enter_context(patch.object(transcript_generator, "_LATENTS", LATENTS))
        return attack_by_our_code(code, tasks, task_steps, steps)


def attack_by_our_code(code: str, tasks: int, task_steps: str, steps: str) -> list[Row]:
    """Return what our attack claims, through its own generator or through theirs."""
    attack: Attack = InvertingGradients(iterations=sum(name_steps("", " ", steps).values()), step_size=0.1)
    if code != "pixels":
        make = TranscriptPrior if code == "ours" else ThroughTheirGenerator
        generator_steps = name_steps("task_latent_steps", "task_tuning_steps", task_steps)
        attack = make(tasks=tasks, **generator_steps, **name_steps("latent_iterations", "tuning_iterations", steps))
    starts: list[Tensor] = []
    if code == STARTED:
        attack = replace(attack, **THEIR_SETTINGS)
        theirs, _ = attack_by_official_code(0, "", 0.0, steps)
        network = TheirGenerator(draw_official_generator())
        starts = theirs.starts
    rows = list[Row]()
    for victim in range(VICTIMS):
        _, labels = images_of(DATA, 1, victim)
        knowledge = image_knowledge(experiment_of(DATA), labels)
        rng = generator(SEED, "giml study", victim)
        target = Target(transcript=transcript_of(DATA, 1, "none"), victim=victim, knowledge=knowledge, rng=rng)
        clock = [time.process_time()]
        if isinstance(attack, TranscriptPrior) and tasks:
            attack._find_generator(target, tuple(knowledge.input_shape or ()), lambda *_: None)
        clock.append(time.process_time())
        with begin_with(starts[victim]) if starts else contextlib.nullcontext():
            found: Any = attack.run(target)
        clock.append(time.process_time())
        row = {"claim": found.data, "distance": float(found.trace["l_sim"][-1])}
        row |= {"attack": clock[2] - clock[1], "learning": rows[0]["learning"] if rows else clock[1] - clock[0]}
        if starts:
            with torch.no_grad():
                image = network(starts[victim])
            row |= compare_objectives(image, target) | {
                "apart": metrics.psnr(found.data, theirs.claims[victim]).item(),
                "distances apart": abs(row["distance"] - theirs.distances[victim]),
            }
        rows.append(row)
    return rows


def begin_with(latents: Tensor) -> AbstractContextManager[Any]:
    """Let our attack begin with these latent vectors."""
    return patch.object(GeneratedImages, "start", lambda *_: latents)


def compare_objectives(image: Tensor, target: Target) -> Row:
    """Return the relative differences between their objective and ours for an image, and between their gradients."""
    library, labels = official_library(), target.knowledge.labels
    assert labels is not None
    problem = replace(build_problem(target.read_update(1), target.knowledge), labels=labels)
    dummy = problem.scaling.from_unit_range(image).requires_grad_(True)
    recipe = Recipe(priors=[(THEIR_SETTINGS["tv_weight"], TotalVariation())])
    ours, _, _ = objective_terms(
        recipe, problem, {"dummy": dummy}, (torch.tensor(1.0), dummy), Cosine().target(problem)
    )
    (our_gradient,) = torch.autograd.grad(ours, [dummy])
    model = experiment_of(DATA).new_model()
    model.load_state_dict(experiment_of(DATA).initial_state())
    settings = {"total_variation": 1e-4, "bn_stat": 0, "image_norm": 0, "group_lazy": 0}
    machine = library.GradientReconstructor(model, config=settings)
    copied = dummy.detach().clone().requires_grad_(True)
    update = target.read_update(1)
    sent = list(update.payload.values("gradient", update.before).values())
    optimizer = torch.optim.SGD([copied], lr=0.1)
    theirs = machine._gradient_closure(optimizer, copied, [sent], problem.labels, [0] * 4)()
    assert copied.grad is not None
    difference = (our_gradient - copied.grad).norm() / copied.grad.norm()
    return {"objectives apart": ((ours - theirs).abs() / theirs).item(), "gradients apart": difference.item()}


def name_steps(latent: str, tuning: str, steps: str) -> dict[str, int]:
    """Return numbers of steps by the names of the settings.

    >>> name_steps("first", "then", "100 + 200")
    {'first': 100, 'then': 200}
    """
    return dict(zip((latent, tuning), map(int, steps.split(" + ")), strict=True))


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table of agreement from one start, and that of claims: how much more ours has for the same images."""
    started = group_rows(select_rows(rows, code=STARTED), "steps")
    lines = []
    for (steps,), cell in started.items():
        largest = [f"{column_values(cell, name).max():.0e}" for name in COMPARED[:3]]
        lines.append([steps, *largest, format_values(cell, "apart", "{:.1f} ± {:.1f}")])
    head = ["steps", "objective", "its gradient", "distance at the end", "PSNR of one claim to the other"]
    return {"start": markdown_table(head, lines), "claims": compare_claims(rows)}


def compare_claims(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table of claims."""
    lines = []
    for (code, tasks, task_steps, steps), cell in group_rows(rows, "code", "tasks", "task_steps", "steps").items():
        if code == STARTED:
            continue
        learnt = code in ("ours", "pixels") or int(tasks)
        line = [code if learnt else "theirs", f"{tasks} of {task_steps}" if int(tasks) else "none", steps]
        line += [format_values(cell, "psnr", "{:.1f} ± {:.1f}"), f"{column_values(cell, 'ssim').mean():.2f}"]
        line += [f"{column_values(cell, 'distance').mean():.3f}"]
        line += [f"{column_values(cell[:1], 'learning')[0]:.0f}", f"{column_values(cell, 'attack').mean():.0f}"]
        most = max((row["tasks"] for row in select_rows(rows, code="ours")), key=int, default=tasks)
        ours = select_rows(rows, code="ours", steps=steps, tasks=most if code == "pixels" else tasks)
        if code == "ours" or not ours:
            lines.append([*line, "–"])
            continue
        more = column_values(ours, "psnr") - column_values(cell, "psnr")
        pairs = [{"client": row["client"], "more": str(value)} for row, value in zip(cell, more, strict=True)]
        ahead = f"{(more > 0).sum()} of {len(more)}"
        lines.append([*line, f"{format_values(pairs, 'more', '{:+.1f} ± {:.1f}')}, {ahead}"])
    head = ["code", "messages to learn", "steps on the victim", "PSNR, dB", "SSIM", "distance"]
    return markdown_table([*head, "seconds to learn", "seconds a victim", "ours: more"], lines)


def format_values(rows: Sequence[Mapping[str, str]], column: str, form: str) -> str:
    """Format the mean of a column over clients with its 95 % interval."""
    return format_mean({row["client"]: float(row[column]) for row in rows}, form)


def applies(cell: Row) -> bool:
    """Tell whether a cell is asked for: an attack on pixels learns nothing."""
    return cell["code"] != "pixels" or not cell["tasks"]
