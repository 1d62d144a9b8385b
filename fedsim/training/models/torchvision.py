"""Networks of the torchvision library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedsim.base.errors import ConfigError, did_you_mean, first_line
from fedsim.base.task import Task
from fedsim.training.models import image_shape, task_mismatch

# By default these two return auxiliary outputs too, and warn that their initialisation will change.
_EXTRA_SETTINGS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


@dataclass(frozen=True, kw_only=True)
class TorchVision:
    """Any image classifier of torchvision, by its name there, with random weights.

    Weights have torchvision's initialisation; `googlenet` and `inception_v3` have no auxiliary
    outputs. Gradient matching differentiates a network twice, which torch (2.15, on a CPU) cannot
    do with the fused attention of `vit_...` and the hard sigmoids of `mobilenet_v3_...`.

    Args:
        architecture: name in `torchvision.models`, such as `resnet18`, `mobilenet_v3_small`,
            `vit_b_16`.
    """

    architecture: str = "resnet18"

    def build(self, task: Task) -> nn.Module:
        """Build the network for images with three channels, of a size that it accepts."""
        import torchvision

        names = torchvision.models.list_models(module=torchvision.models)
        if self.architecture not in names:
            raise ConfigError(
                f"model: torchvision has no classifier called '{self.architecture}', "
                f"{did_you_mean(self.architecture, names)}"
            )
        name = f"torchvision's {self.architecture}"
        channels, height, width = image_shape(task, name, smallest=1)
        if channels != 3:
            raise task_mismatch(task, name, "images with three channels")
        settings: dict[str, Any] = dict(_EXTRA_SETTINGS.get(self.architecture, {}))
        if self.architecture.startswith("vit_"):
            if height != width:
                raise task_mismatch(task, name, "square images")
            settings["image_size"] = height
        if self.architecture.startswith("maxvit_"):
            settings["input_size"] = (height, width)
        try:
            model: nn.Module = torchvision.models.get_model(
                self.architecture, weights=None, num_classes=task.outputs, **settings
            )
            with torch.no_grad():
                model.eval()(torch.zeros(1, *task.input_shape))
        except (AssertionError, RuntimeError, ValueError) as error:
            raise task_mismatch(task, name, f"images of another size ({first_line(error)})") from error
        return model.train()
