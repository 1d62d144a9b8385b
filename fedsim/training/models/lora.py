"""LoRA: low-rank adapters that are trained in addition to frozen layers, which everybody knows."""

from __future__ import annotations

from torch import Tensor, nn


class LoraLinear(nn.Module):
    """Frozen linear layer with a trained low-rank adapter: base(x) + B A x.

    B is 0 at first, so that nothing is added before training; A is initialised as a linear layer.
    The factor alpha / rank is 1. While B is 0, A has no gradient.

    Attributes:
        base: the frozen layer.
        down: A, `rank in`.
        up: B, `out rank`.

    References:
        [Hu2022], Sect. 4.1.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `... in` to `... out`."""
        outputs: Tensor = self.base(inputs) + self.up(self.down(inputs))
        return outputs


def freeze_parameters(network: nn.Module) -> None:
    """Freeze all parameters of `network`: they are neither trained nor part of any message.

    They become buffers that are not in `state_dict`, so a server and its clients must build the
    same ones.
    """
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach(), persistent=False)
