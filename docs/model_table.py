"""Print a Markdown table of the registered networks: sizes, floating-point operations, the paper.

`python docs/model_table.py`; nothing is computed, since the networks are built without memory.
FLOPs are those of one forward pass of one example as `torch.utils.flop_counter` counts them:
two a multiplication with addition, in convolutions and matrix products only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedsim.base.task import Task
from fedsim.plugins import registry

FEMNIST = ("FEMNIST", Task((1, 28, 28), 62))
MNIST = ("MNIST", Task((1, 28, 28), 10))
CIFAR10 = ("CIFAR-10", Task((3, 32, 32), 10))
CIFAR100 = ("CIFAR-100", Task((3, 32, 32), 100))
IMAGENET = ("ImageNet", Task((3, 224, 224), 1000))
ADULT = ("Adult", Task((102,), 2))
FLIGHTS = ("Flight Prices", Task((31,), 0))
FACES = ("AT&T faces", Task((1, 80, 70), 40))
R8 = ("R8", Task((30,), 8, vocabulary=5000))
SHAKESPEARE = ("Shakespeare", Task((80,), 80, vocabulary=80))
WAVES = ("waves", Task((1, 64), 4))
SHAPES = ("shapes", Task((1, 16, 16), 0, mask_classes=4))

LAVP, LMRA, SME, TGIAS, ANGULAR = "LAVP", "LMRA", "SME", "TGIAs-RO", "angular Lipschitz"
DLG, NOBODY = "DLG", "–"

ROWS: list[tuple[str, Mapping[str, Any], tuple[str, Task], str]] = [
    ("linear", {}, FLIGHTS, LMRA),
    ("mlp", {"hidden": (1000, 1000)}, FEMNIST, SME),
    ("precode", {}, MNIST, "PRECODE"),
    ("mlp", {"hidden": (256, 256, 256)}, FLIGHTS, LMRA),
    ("mlp", {"hidden": (256, 256, 256)}, ADULT, LMRA),
    ("mlp", {"hidden": (256, 256, 256), "batch_norm": True}, ADULT, LMRA),
    ("mlp", {"hidden": (32, 32, 32)}, FACES, LMRA),
    ("sme-cnn", {}, FEMNIST, SME),
    ("sme-cnn", {"channels": (64, 128), "hidden": 200}, CIFAR100, SME),
    ("lenet", {}, FEMNIST, SME),
    ("lenet", {"layout": "dlg"}, CIFAR10, DLG),
    ("tgias-lenet", {}, MNIST, TGIAS),
    ("alexnet", {}, CIFAR10, TGIAS),
    ("alexnet", {}, IMAGENET, TGIAS),
    ("alexnet", {"batch_norm": False, "hidden": ()}, IMAGENET, TGIAS),
    ("vgg9", {}, CIFAR10, LAVP),
    ("resnet8", {}, FEMNIST, SME),
    ("resnet8", {"channels": (16, 32, 64), "pool": "global", "hidden": 0}, CIFAR10, LAVP),
    ("resnet18", {}, CIFAR100, ANGULAR),
    ("resnet18", {"preact": True}, CIFAR100, f"GradAttack, {ANGULAR}"),
    ("resnet18", {"width": 2}, CIFAR100, ANGULAR),
    ("resnet18", {"width": 4}, CIFAR100, ANGULAR),
    ("resnet18", {}, IMAGENET, f"{LAVP}, {TGIAS}"),
    ("convnet", {}, CIFAR100, f"IG, {ANGULAR}"),
    ("convnet", {"width": 64}, CIFAR100, f"IG, {ANGULAR}"),
    ("shufflenet-v2", {}, IMAGENET, LAVP),
    ("vit-april", {}, FEMNIST, SME),
    ("vit-april", {"patch": 4}, FEMNIST, NOBODY),
    ("vit", {}, CIFAR10, NOBODY),
    ("text-cnn", {}, R8, TGIAS),
    ("text-cnn", {"kernels": (3,)}, R8, TGIAS),
    ("lstm", {}, SHAKESPEARE, "LEAF"),
    ("transformer-encoder", {}, R8, NOBODY),
    ("transformer-decoder", {}, R8, NOBODY),
    ("transformer-decoder", {}, SHAKESPEARE, NOBODY),
    ("cnn-1d", {}, WAVES, NOBODY),
    ("u-net", {}, SHAPES, NOBODY),
    ("torchvision", {}, IMAGENET, NOBODY),
]


def costs(name: str, settings: Mapping[str, Any], task: Task) -> tuple[int, int]:
    """Parameters of a network, and FLOPs of one forward pass of one example."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = registry.build("models", name, settings, "model").build(task).eval()
        before = counter.get_total_flops()  # torchvision's are tried out when built
        if task.vocabulary:
            model(torch.zeros(1, *task.input_shape, dtype=torch.int64))
        else:
            model(torch.zeros(1, *task.input_shape))
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops() - before


def table() -> Iterator[str]:
    """Lines of the table."""
    yield "| model | settings | task | parameters | MFLOPs | paper |"
    yield "|---|---|---|---:|---:|---|"
    for name, settings, (place, task), paper in ROWS:
        parameters, flops = costs(name, settings, task)
        text = ", ".join(f"`{key} = {_toml(value)}`" for key, value in settings.items())
        shape = " x ".join(map(str, task.input_shape))
        size = f"{parameters:,}".replace(",", " ")
        millions = f"{flops / 1e6:,.0f}".replace(",", " ") if flops >= 1e8 else f"{flops / 1e6:.3g}"
        yield f"| `{name}` | {text} | {place}, {shape} | {size} | {millions} | {paper} |"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


if __name__ == "__main__":
    print("\n".join(table()))
