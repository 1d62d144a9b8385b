"""Networks of the torchvision library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedsim.errors import ConfigError, did_you_mean, first_line
from fedsim.models import image_shape, unsuited
from fedsim.task import Task

# These two would give auxiliary outputs beside the main one, and warn unless told how to initialise.
_PLAIN = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


@dataclass(frozen=True, kw_only=True)
class TorchVision:
    """Any image classifier of torchvision, by its name there, with random weights.

    Weights have torchvision's own initialisation; `googlenet` and `inception_v3` come without their
    auxiliary outputs. Gradient matching differentiates a network twice, which torch (2.15, on a CPU)
    cannot do with the fused attention of `vit_...` and the hard sigmoids of `mobilenet_v3_...`.

    Args:
        architecture: name in `torchvision.models`, such as `resnet18`, `mobilenet_v3_small`, `vit_b_16`.
    """

    architecture: str = "resnet18"

    def build(self, task: Task) -> nn.Module:
        """See `ModelPlugin`. Images with three channels, of a size that the architecture can take.

        Raises:
            ConfigError: torchvision has no such classifier, or it cannot take images like those of `task`.
        """
        import torchvision

        known = torchvision.models.list_models(module=torchvision.models)
        if self.architecture not in known:
            raise ConfigError(
                f"model: torchvision has no classifier called '{self.architecture}', "
                f"{did_you_mean(self.architecture, known)}"
            )
        name = f"torchvision's {self.architecture}"
        channels, height, width = image_shape(task, name, smallest=1)
        if channels != 3:
            raise unsuited(task, name, "images with three channels")
        settings: dict[str, Any] = dict(_PLAIN.get(self.architecture, {}))
        if self.architecture.startswith("vit_"):
            if height != width:
                raise unsuited(task, name, "square images")
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
            raise unsuited(task, name, f"images of another size ({first_line(error)})") from error
        return model.train()
