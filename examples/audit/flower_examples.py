"""Audit Flower's own apps, unchanged: python flower_examples.py FLOWER [NAME ...]

FLOWER is your checkout of Flower's repository (https://github.com/adap/flower); nothing is fetched, and nothing in it
is changed. Each app runs two rounds over ten simulated clients in one process, once as it is and once watched by a
CuriousGrid. In the place of the data that it would download, each client gets five images of handwritten digits (from
scikit-learn), or rows of random numbers. What was recorded is attacked, and a line says what came of it:
whether the server sent the same bytes with and without the audit (of an app that draws fresh keys in each run, the
same arrays), what is recorded, and the first client's examples.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

from flower_example_apps import APPS, App
from flower_example_data import CLIENTS, TRAINED_ON, make_examples, replace_downloads, write_files

MOVED = {
    "from flwr.common.typing import UserConfig": "UserConfig = dict",
    "flwr.client.typing": "flwr.clientapp.typing",
    "from flwr.client.client import": "from flwr.client import",
}
"""Names that examples of early 2026 import from where flwr 1.41 has them no more."""


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
        source = chosen.flower / APPS[name].folder / name
        if not source.is_dir():
            print(f"{name:30}not in this checkout: there is no {source}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder) / source.name
            print(f"{source.name:30}{audit(name, source, work)}", flush=True)
            if chosen.keep is not None and (work / "recording").is_dir():
                shutil.copytree(work / "recording", chosen.keep / source.name, dirs_exist_ok=True)


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
    same = compare_hashes(read_hashes(plain), read_hashes(watched), lambda: read_hashes(started(name, work)))
    from fedsim import Transcript

    if not any((work / "recording" / "run-1" / "transcript").glob("round-*")):
        app = APPS[name]
        found = f"not attacked: {app.refused}" if app.refused else attacked(app, work, '"#1"')
        return f"{same:12}{describe_messages(work):34} {found}"
    transcript = Transcript(work / "recording")
    update = transcript.recorded_update(1, transcript.clients(1)[0])
    count = sum(len(transcript.clients(number)) for number in transcript.rounds)
    what = f"sums of {len(update.members)} clients" if update.members else "updates"
    recorded = f"{count} {what}, N {update.num_examples}"
    if APPS[name].refused:
        return f"{same:12}{recorded:34}not attacked: {APPS[name].refused}"
    return f"{same:12}{recorded:34}{attacked(APPS[name], work, update.client)}"


def read_hashes(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the hashes of all arrays and of all settings that the server sent; apps print before them."""
    return last_line(done.stdout).split()


def compare_hashes(plain: list[str], watched: list[str], repeat: Callable[[], list[str]]) -> str:
    """Say whether the server sent the same with and without the audit, or where it does not do so by itself.

    Args:
        plain: hashes of a run without the audit.
        watched: of one with it.
        repeat: makes another run without it.
    """
    if plain == watched:
        return "yes"
    if plain[0] == watched[0] and repeat()[1] != plain[1]:  # as the fresh keys of secure aggregation
        return "arrays"
    return "NO"


def describe_messages(work: Path) -> str:
    """Count the answers that are no updates, by the kind of the message."""
    from fedsim.recording.messages import read_messages

    counts: dict[str, int] = {}
    for exchange in read_messages(work / "recording" / "run-1" / "messages"):
        counts[exchange.kind] = counts.get(exchange.kind, 0) + sum(not reply.error for reply in exchange.replies)
    return ", ".join(f"{count} answers to {kind}" for kind, count in counts.items())


def started(name: str, work: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """This script in a separate process, for one run of an app."""
    command = [sys.executable, str(Path(__file__).resolve()), str(work), "--run", name, *more]
    return subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)


def attacked(app: App, work: Path, client: int | str) -> str:
    """The attack on the first update, and its score beside the floor, or the sentence with which it is refused."""
    (work / "said_by_auditor.py").write_text(textwrap.dedent(app.code))
    truths = [f'{client} = "truth.safetensors"'] if (work / "truth.safetensors").exists() else []
    truths += ['public = "public.safetensors"'] if (work / "public.safetensors").exists() else []
    (work / "attack.toml").write_text("\n".join([app.describe_attack(), "[truth]", *truths]))
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
    for metric, unit in (
        ("psnr", " dB"),
        ("mse", ""),
        ("columns_right", ""),
        ("label_accuracy", ""),
        ("label_distance", ""),
        ("row_label_auc", ""),
    ):
        if metric in scores.index:
            row = scores.loc[metric]
            floor = f" (floor {float(row['floor']):.2f})" if str(row["floor"]) not in ("", "nan") else ""
            told.append(f"{metric} {float(row['value']):.2f}{unit}{floor}")
    return ", ".join(told) or "attacked, not scored"


def last_line(text: str) -> str:
    """Of what a program said before it ended."""
    return (text.strip().splitlines() or ["no reason given"])[-1]


def run(name: str, work: Path, watched: Path | None) -> None:
    """Run an app in this process; prints hashes of all arrays and settings that its server sent."""
    import numpy as np
    import torch
    from flwr.app import Context, RecordDict

    import fedsim
    from fedsim.federation.app_file import flatten_run_config
    from fedsim.federation.app_replies import order_legacy_clients

    replace_downloads()
    write_files(name, APPS[name].clients)
    sys.path.insert(0, str(work))
    config = tomllib.loads((work / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    settings = {**flatten_run_config(config.get("config", {})), **APPS[name].settings}
    if "num-server-rounds" in settings:
        settings["num-server-rounds"] = 2
    if "local-epochs" in settings:
        settings["local-epochs"] = 1
    apps = []
    for kind in ("serverapp", "clientapp"):
        module, _, attribute = config["components"][kind].partition(":")
        apps.append(getattr(importlib.import_module(module), attribute))
    keras: Any = sys.modules.get("keras")
    mlx: Any = sys.modules.get("mlx.core")
    seeds = [random.seed, np.random.seed, torch.manual_seed]
    seeds += [keras.utils.set_random_seed] if keras else []
    seeds += [mlx.random.seed] if mlx else []
    for seed in seeds:
        seed(0)
    wire = a_wire(apps[1], settings, APPS[name].clients, work)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=settings)
    with order_legacy_clients():
        server = apps[0] if watched is None else fedsim.record_app(apps[0], watched)
        server(wire, context)
    if watched is not None:
        write_truth(work, name)
    sys.stdout.write(f"\n{wire.array_hash.hexdigest()} {wire.setting_hash.hexdigest()}\n")


def a_wire(client_app: Any, settings: dict[str, Any], clients: int, work: Path) -> Any:
    """A Grid to clients in this process; each gets a message of its own, as over a network."""
    from flwr.app import Message

    from fedsim.federation.engines.serial import InProcessGrid

    class Wire(InProcessGrid):
        array_hash, setting_hash = hashlib.sha256(), hashlib.sha256()

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            ids = []
            for message in messages:
                for record in message.content.array_records.values():
                    for array in record.values():
                        self.array_hash.update(array.data)
                for record in message.content.config_records.values():
                    self.setting_hash.update(repr(sorted(map(without_time, record.items()))).encode())
                (number,) = super().push_messages([deepcopy(message)])
                message.metadata.__dict__["_message_id"] = number
                ids.append(number)
            return ids

    wire = Wire(client_app, clients, settings)
    for node, partition in wire.partitions.items():  # apps for devices are told where their data are
        wire._contexts[node].node_config["dataset-path"] = f"{data_set_of(work)}#{partition}"
        wire._contexts[node].node_config["db-url"] = f"sqlite:///{work}/people-{partition}.db"
    return wire


def without_time(item: tuple[str, Any]) -> tuple[str, Any]:
    """Return a setting; of a model of CatBoost without when it was trained."""
    key, value = item
    if isinstance(value, bytes) and value.startswith(b"{"):
        return key, sorted((name, part) for name, part in json.loads(value).items() if name != "model_info")
    return key, value


def data_set_of(work: Path) -> str:
    """Return the data set of an app that loads its own from a disk."""
    return "ylecun/mnist" if work.name == "embedded-devices" else "uoft-cs/cifar10"


def write_truth(work: Path, name: str) -> None:
    """Write what the first client trained on, for the score alone."""
    import datasets
    import numpy as np
    import torch

    app = APPS[name]
    if app.refused or app.loader == "unknown":
        return
    if app.loader == "survived":  # a party with features has the rows, and others have their labels
        labels = torch.tensor(make_examples("titanic", 0)["Survived"])
        save_rows(work / "truth.safetensors", app, torch.zeros(len(labels), *app.shape), labels)
        return
    if app.loader == "rows":
        for file, rows in (
            ("truth", make_examples("higgs", 0).train_test_split(test_size=0.2, seed=42)["train"]),
            ("public", make_examples("higgs", CLIENTS)),
        ):
            inputs, labels = torch.tensor(rows["inputs"]), torch.tensor(rows["label"])
            save_rows(work / f"{file}.safetensors", app, inputs, labels)
        return
    if not app.loader:
        held = load_as_baseline(name)
        save_rows(work / "truth.safetensors", app, *held)
        return
    task = importlib.import_module(f"{app.package}.task")
    load = getattr(task, app.loader)
    accepted = load.__code__.co_varnames[: load.__code__.co_argcount]
    given: dict[str, Any] = {"partition_id": 0, "num_partitions": CLIENTS, "batch_size": TRAINED_ON, "is_demo": False}
    given |= {"path": f"{data_set_of(work)}#0", "dataset_name": "nelorth/oxford-flowers"}
    held = load(**{key: value for key, value in given.items() if key in accepted})
    if isinstance(held, datasets.Dataset):  # the app crops its images at random, so that only labels are compared
        held = torch.zeros(len(held), *app.shape), held["label"]
    if isinstance(held[0], torch.utils.data.DataLoader | datasets.Dataset):
        pairs = [tuple(batch.values()) if isinstance(batch, dict) else batch for batch in held[0]]
        inputs, labels = (torch.cat([torch.as_tensor(np.asarray(pair[k])) for pair in pairs]) for k in (0, 1))
    else:
        inputs, labels = torch.as_tensor(held[0]), torch.as_tensor(held[1])
    if inputs.shape[1:] != app.shape and inputs.ndim > 2:
        inputs = inputs.reshape(len(inputs), *app.shape[1:], app.shape[0]).permute(0, 3, 1, 2)  # channels were last
    save_rows(work / "truth.safetensors", app, inputs, labels)


def load_as_baseline(name: str) -> tuple[Any, Any]:
    """Load what the first client of a baseline trained on, whose loader takes settings of its own."""
    import torch

    app = APPS[name]
    module = importlib.import_module(f"{app.package}.dataset")
    if name == "fedprox":
        rows = make_examples("ylecun/mnist", 0).train_test_split(test_size=0.2, seed=42)["train"]
        rows, key = rows.with_transform(module.apply_transforms), "image"
    else:
        share = {"train_size": 0.8} if name == "fedrep" else {"test_size": 0.2}
        rows = make_examples("uoft-cs/cifar10", 0).train_test_split(**share, seed=42 if name == "fedrep" else 0)[
            "train"
        ]
        transform = module.apply_transforms if name == "floco" else None
        rows, key = (rows.with_transform(transform) if transform else rows), "img"
    images = [row[key] for row in rows]
    if not isinstance(images[0], torch.Tensor):
        from torchvision.transforms.functional import to_tensor

        images = [2 * to_tensor(image) - 1 for image in images]
    return torch.stack(images), torch.tensor([row["label"] for row in rows])


def save_rows(path: Path, app: Any, inputs: Any, labels: Any) -> None:
    """Write examples in [0, 1]."""
    from safetensors.torch import save_file

    low, high = app.ends
    data = ((inputs.float() - low) / (high - low)).clamp(0, 1).reshape(len(inputs), *app.shape)
    save_file({"data": data.contiguous(), "labels": labels.reshape(-1).long().contiguous()}, path)


if __name__ == "__main__":
    main()
