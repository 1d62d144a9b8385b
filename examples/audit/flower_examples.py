"""Audit Flower's own example apps, unchanged: python flower_examples.py FLOWER [NAME ...]

FLOWER is your checkout of Flower's repository (https://github.com/adap/flower); nothing is fetched, and nothing in it
is changed. Each app runs two rounds over ten simulated clients in one process, once as it is and once watched by a
CuriousGrid. In the place of the data that it would download, each client gets five images of handwritten digits (from
scikit-learn), or as many rows of random numbers. What was recorded is attacked, and a line says what came of it:
whether the server sent the same bytes with and without the audit, what is recorded, and the first client's images.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import types
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLIENTS, HELD = 10, 5
TRAINED_ON = HELD * 4 // 5
"""Of what a client holds; the apps keep a fifth to test on."""
IMAGES = {"uoft-cs/cifar10": ("img", 3, 32), "ylecun/mnist": ("image", 1, 28)}
IMAGES["zalando-datasets/fashion_mnist"] = ("image", 1, 28)
"""Of each data set, what its images are called, their channels and size."""
MOVED = {
    "from flwr.common.typing import UserConfig": "UserConfig = dict",
    "flwr.client.typing": "flwr.clientapp.typing",
}
"""Names that examples of early 2026 import from where flwr 1.41 has them no more."""


@dataclass(frozen=True)
class App:
    """How an example is run and attacked.

    Attributes:
        package: where its code is.
        shape: of an input.
        ends: lowest and highest value of an input.
        classes: how many.
        model: what builds the network; by default the app's `Net`.
        settings: of its run_config, beside two rounds of one local epoch.
        knowledge: lines of [adversary.knowledge] beside the model, its inputs and classes.
        app: lines of [app].
        attack: lines of [[attack]].
        code: a module `said_by_auditor`, for what only the auditor knows.
    """

    package: str
    shape: tuple[int, ...] = (3, 32, 32)
    ends: tuple[float, float] = (-1.0, 1.0)
    classes: int = 10
    model: str = "task:Net"
    settings: dict[str, Any] = field(default_factory=dict)
    knowledge: str = ""
    app: str = ""
    attack: str = 'name = "inverting-gradients"\niterations = 1000\nstep_size = 0.1\nsigned = true'
    code: str = ""


MNIST = (-0.1307 / 0.3081, (1 - 0.1307) / 0.3081)
PROBABILITY = "import torch\n\ndef logit(probability, inputs):\n    return torch.logit(probability, 1e-6)\n"
VAE = """
    import torch

    def loss_of_each(returned, inputs):
        images, mean, logvar = returned
        far = (images - inputs).square().flatten(1).mean(1)
        return (far - 0.025 * (1 + logvar - mean.pow(2) - logvar.exp()).mean(1))[:, None]

    def loss(outputs, labels):
        return outputs.mean()
"""
TWIN = """
    from torch import nn

    def make():
        return nn.Linear(4, 3).double()
"""
MEAN_SQUARE = """
    from pytorchlightning_example.task import LitAutoEncoder

    class Decoded(LitAutoEncoder):
        def forward(self, images):
            flat = images.flatten(1)
            return (self.decoder(self.encoder(flat)) - flat).square().mean(1, keepdim=True)

    def loss(outputs, labels):
        return outputs.mean()
"""
CHANNELS_LAST = """
    from torch import nn

    class Rows(nn.Module):  # flattens as frameworks do that have their channels last
        def forward(self, images):
            return images.permute(0, 2, 3, 1).flatten(1)

    def keras():
        features = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        return nn.Sequential(*features, Rows(), nn.Dropout(), nn.Linear(2304, 10))

    def flax():
        layers = []
        for inputs, outputs in ((1, 6), (6, 16)):
            layers += [nn.Conv2d(inputs, outputs, 5, padding="same"), nn.ReLU(), nn.AvgPool2d(2)]
        layers += [Rows(), nn.Linear(784, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
        return nn.Sequential(*layers)
"""
BIAS_FIRST = [f"{layer}.{kind}" for layer in (0, 3, 7, 9, 11) for kind in ("bias", "weight")]
APPS = {
    "quickstart-pytorch": App("pytorchexample"),
    "advanced-pytorch": App("pytorch_example", (1, 28, 28), MNIST, settings={"fraction-train": 1.0}),
    "opacus": App("opacus_fl"),
    "custom-mods": App("custom_mods"),
    "federated-vae": App(
        "fedvaeexample",
        classes=0,
        knowledge='loss = "said_by_auditor:loss"\nlabels = true',
        app='outputs = "said_by_auditor:loss_of_each"',
        code=VAE,
    ),
    "fl-tabular": App(
        "fltabular",
        (14,),
        (-4.0, 4.0),
        2,
        "task:IncomeClassifier",
        knowledge='loss = "bce"\nlabels = true',
        app=f'outputs = "said_by_auditor:logit"\nnum_examples = {TRAINED_ON}',
        code=PROBABILITY,
    ),
    "quickstart-sklearn": App(
        "sklearnexample", (4,), (-4.0, 4.0), 3, "said_by_auditor:make", app='dtype = "float64"', code=TWIN
    ),
    "quickstart-pytorch-lightning": App(
        "pytorchlightning_example",
        (1, 28, 28),
        (0.0, 1.0),
        0,
        "said_by_auditor:Decoded",
        knowledge='loss = "said_by_auditor:loss"\nlabels = true',
        code=MEAN_SQUARE,
    ),
    "quickstart-tensorflow": App(
        "tfexample", ends=(0.0, 1.0), model="said_by_auditor:keras", app="transposed = true", code=CHANNELS_LAST
    ),
    "quickstart-jax": App(
        "jaxexample",
        (1, 28, 28),
        (0.0, 1.0),
        model="said_by_auditor:flax",
        settings={"batch-size": TRAINED_ON, "fraction-evaluate": 0.0},
        app=f"transposed = true\nnames = {BIAS_FIRST}",
        code=CHANNELS_LAST,
    ),
    "flower-secure-aggregation": App("secaggexample", settings={"is-demo": False}),
    "fl-dp-sa": App("fl_dp_sa", (1, 28, 28), settings={"num-sampled-clients": 5 * CLIENTS}),
}
"""By the name of their folder."""


def main() -> None:
    """Audit the apps that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flower", type=Path, help="a checkout of Flower's repository")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(APPS)}")
    parser.add_argument("--keep", type=Path, help="keep the recordings and reports in this folder")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        run(chosen.run, chosen.flower, watched=chosen.keep)
        return
    if unknown := set(chosen.names) - set(APPS):
        sys.exit(f"{unknown.pop()}: is none of {', '.join(APPS)}")
    print(f"{'app':30}{'same bytes':12}{'recorded':34}what the attack found")
    for name in chosen.names or APPS:
        source = chosen.flower / "examples" / name
        if not source.is_dir():
            print(f"{name:30}not in this checkout: there is no {source}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name:30}{audit(name, source, Path(folder) / name)}", flush=True)
            if chosen.keep is not None and (Path(folder) / name / "recording").is_dir():
                shutil.copytree(Path(folder) / name / "recording", chosen.keep / name, dirs_exist_ok=True)


def audit(name: str, source: Path, work: Path) -> str:
    """Run the app twice, and attack what was recorded; what came of it."""
    shutil.copytree(source, work)
    for file in work.rglob("*.py"):
        text = file.read_text()
        for old, new in MOVED.items():
            text = text.replace(old, new)
        file.write_text(text)
    plain, watched = (started(name, work, *more) for more in ([], ["--keep", str(work / "recording")]))
    if plain.returncode or watched.returncode:
        return f"does not run here: {last_line(plain.stderr or watched.stderr)}"
    same = "yes" if plain.stdout == watched.stdout else "NO"
    from fedsim import FedsimError, Transcript

    try:
        transcript = Transcript(work / "recording")
    except FedsimError as error:
        return f"{same:12}{error}"
    update = transcript.recorded_update(1, transcript.clients(1)[0])
    count = sum(len(transcript.clients(number)) for number in transcript.rounds)
    what = f"sums of {len(update.members)} clients" if update.members else "updates"
    recorded = f"{count} {what}, N {update.num_examples}"
    return f"{same:12}{recorded:34}{attacked(APPS[name], work, update.client)}"


def started(name: str, work: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """This script in a process of its own, for one run of an app."""
    command = [sys.executable, str(Path(__file__).resolve()), str(work), "--run", name, *more]
    return subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)


def attacked(app: App, work: Path, client: int) -> str:
    """The attack on the first update, and its score beside the floor, or the sentence with which it is refused."""
    (work / "said_by_auditor.py").write_text(textwrap.dedent(app.code))
    model = app.model if app.model.startswith("said") else f"{app.package}.{app.model}"
    classes = f"num_classes = {app.classes}" if app.classes else ""
    (work / "attack.toml").write_text(
        f'[adversary.knowledge]\nmodel = "{model}"\ninput_shape = {list(app.shape)}\nvalue_range = {list(app.ends)}\n'
        f"{classes}\n{app.knowledge}\n[app]\n{app.app}\n[[attack]]\n{app.attack}\n"
        f'[truth]\n{client} = "truth.safetensors"\n'
    )
    command = [
        str(Path(sys.executable).with_name("fedsim")),
        "attack",
        "-q",
        str(work / "recording"),
        str(work / "attack.toml"),
    ]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"refused: {last_line(done.stderr)}"
    import fedsim

    scores = fedsim.open(work / "recording").scores.set_index("metric")
    told = []
    for metric, unit in (("psnr", " dB"), ("mse", ""), ("label_accuracy", "")):
        if metric in scores.index:
            row = scores.loc[metric]
            floor = f" (floor {float(row['floor']):.2f})" if str(row["floor"]) not in ("", "nan") else ""
            told.append(f"{metric} {float(row['value']):.2f}{unit}{floor}")
    return ", ".join(told)


def last_line(text: str) -> str:
    """Of what a program said before it ended."""
    return (text.strip().splitlines() or ["no reason given"])[-1]


def run(name: str, work: Path, watched: Path | None) -> None:
    """Run an app in this process; prints a hash of all arrays that its server sent."""
    import numpy as np
    import torch
    from flwr.app import Context, RecordDict

    offline()
    sys.path.insert(0, str(work))
    config = tomllib.loads((work / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    settings = {**config.get("config", {}), **APPS[name].settings, "num-server-rounds": 2}
    if "local-epochs" in settings:
        settings["local-epochs"] = 1
    apps = []
    for kind in ("serverapp", "clientapp"):
        module, _, attribute = config["components"][kind].partition(":")
        apps.append(getattr(importlib.import_module(module), attribute))
    keras: Any = sys.modules.get("keras")
    for seed in (random.seed, np.random.seed, torch.manual_seed, *([keras.utils.set_random_seed] if keras else [])):
        seed(0)
    wire = a_wire(apps[1], settings)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings)
    if watched is None:
        apps[0](wire, context)
    else:
        import fedsim

        fedsim.record_app(apps[0], watched)(wire, context)
        write_truth(work / "truth.safetensors", name)
    sys.stdout.write(f"\n{wire.sent.hexdigest()}\n")


def a_wire(client_app: Any, settings: dict[str, Any]) -> Any:
    """A Grid to clients in this process; each gets a message of its own, as over a network."""
    from flwr.app import Message

    from fedsim.federation.engines.serial import InProcessGrid

    class Wire(InProcessGrid):
        sent = hashlib.sha256()

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            ids = []
            for message in messages:
                for record in message.content.array_records.values():
                    for array in record.values():
                        self.sent.update(array.data)
                (number,) = super().push_messages([deepcopy(message)])
                message.metadata.__dict__["_message_id"] = number
                ids.append(number)
            return ids

    wire = Wire(client_app, CLIENTS)
    for node in wire.get_node_ids():
        wire._contexts[node].run_config.update(settings)
    return wire


# The only thing that is changed in an app: where its data come from.


def offline() -> None:
    """Data of our own in the place of downloads, and nothing in the place of Weights & Biases."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "FLWR_TELEMETRY_ENABLED": "0"}
    import datasets
    import flwr_datasets

    flwr_datasets.FederatedDataset = Here
    split, batch = datasets.Dataset.train_test_split, datasets.Dataset.batch
    datasets.Dataset.train_test_split = lambda self, *given, **named: split(self, *given, **{"seed": 42} | named)
    datasets.Dataset.batch = lambda self, size, **named: batch(self, size, **named | {"num_proc": None})
    datasets.load_dataset = lambda name, split=None: shown(name, 0) if split else {"test": shown(name, 0)}
    wandb: Any = types.ModuleType("wandb")
    wandb.init = wandb.log = lambda *given, **named: None
    sys.modules.setdefault("wandb", wandb)


class Here:
    """Takes the place of `flwr_datasets.FederatedDataset`."""

    def __init__(self, dataset: str, **partitioners: Any) -> None:
        self.name = dataset

    def load_partition(self, partition: int, split: str | None = None) -> Any:
        """What a client holds."""
        return shown(self.name, partition)


def shown(name: str, partition: int) -> Any:
    """`HELD` examples under the names that the data set has for them."""
    import numpy as np
    from datasets import Dataset
    from PIL import Image
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(partition)
    if name in IMAGES:
        key, channels, size = IMAGES[name]
        digits = load_digits()
        mine = slice(partition * HELD, (partition + 1) * HELD)
        images = [
            Image.fromarray((image * 15.9).astype(np.uint8)).resize((size, size)) for image in digits.images[mine]
        ]
        images = [image.convert("RGB") if channels == 3 else image for image in images]
        return Dataset.from_dict({key: images, "label": digits.target[mine]})
    if "iris" in name:
        names = "petal_length", "petal_width", "sepal_length", "sepal_width"
        columns: dict[str, Any] = {key: rng.normal(size=HELD) for key in names}
        return Dataset.from_dict(columns | {"species": np.arange(HELD) % 3})
    columns = {f"column {k}": rng.normal(size=HELD) for k in range(14)}
    return Dataset.from_dict(columns | {"income": [["<=50K", ">50K"][k % 2] for k in range(HELD)]})


def write_truth(path: Path, name: str) -> None:
    """What the first client trained on, for the score alone."""
    import datasets
    import numpy as np
    import torch
    from safetensors.torch import save_file

    app = APPS[name]
    task = importlib.import_module(f"{app.package}.task")
    accepted = task.load_data.__code__.co_varnames[: task.load_data.__code__.co_argcount]
    given: dict[str, Any] = {"partition_id": 0, "num_partitions": CLIENTS, "batch_size": TRAINED_ON, "is_demo": False}
    held = task.load_data(**{key: value for key, value in given.items() if key in accepted})
    if isinstance(held[0], torch.utils.data.DataLoader | datasets.Dataset):
        pairs = [tuple(batch.values()) if isinstance(batch, dict) else batch for batch in held[0]]
        inputs, labels = (torch.cat([torch.as_tensor(np.asarray(pair[k])) for pair in pairs]) for k in (0, 1))
    else:
        inputs, labels = torch.as_tensor(held[0]), torch.as_tensor(held[1])
    if inputs.shape[1:] != app.shape and inputs.ndim > 2:
        inputs = inputs.reshape(len(inputs), *app.shape[1:], app.shape[0]).permute(0, 3, 1, 2)  # channels were last
    low, high = app.ends
    data = ((inputs.float() - low) / (high - low)).clamp(0, 1)
    save_file({"data": data.contiguous(), "labels": labels.reshape(-1).long().contiguous()}, path)


if __name__ == "__main__":
    main()
