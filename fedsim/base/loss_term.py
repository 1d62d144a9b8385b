"""A term that a network adds to the loss of each example, as the KL divergence of a variational bottleneck."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsim.base.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedsim.base.task import Loss

_ATTRIBUTE = "loss_term"


def with_loss_term(outputs: Tensor, term: Tensor) -> Tensor:
    """Return the outputs of a network with a term that its training adds to the loss of each example.

    A network that calls this at the end of `forward`, in training and in evaluation, says so by an attribute
    `adds_loss_term = True`, its own or that of a part. Clients then minimise the loss of the task plus the term, and
    attacks that are granted the loss match its gradients with the term.

    Args:
        outputs: `example ...`, of one pass.
        term: `example`, of the same pass, already weighted, in the units of the loss.

    Raises:
        RunError: there is not one number for each example.

    >>> import torch
    >>> loss = add_model_term(torch.nn.functional.mse_loss, torch.nn.Identity())  # adds none
    >>> loss is torch.nn.functional.mse_loss
    True
    """
    from torch import Tensor  # which takes a second to import, and commands that only read tables import this module

    if not isinstance(term, Tensor) or term.shape != outputs.shape[:1]:
        got = tuple(term.shape) if isinstance(term, Tensor) else type(term).__name__
        raise RunError(
            f"with_loss_term: expected a number for each of {len(outputs)} examples, got {got}; add up "
            "what an example has"
        )
    setattr(outputs, _ATTRIBUTE, term)
    return outputs


@dataclass(frozen=True)
class LossWithTerm:
    """Loss of the task plus the term that comes with the outputs.

    Attributes:
        of_predictions: the loss without the term.
    """

    of_predictions: Any

    def __call__(self, outputs: Tensor, targets: Tensor, /, *, reduction: str = "mean") -> Tensor:
        """Return the `mean` or `sum` of the examples' losses, or with `none` each of them.

        Raises:
            RunError: the outputs do not come from the network as it gave them, so that the term is lost.
        """
        term = loss_term_of(outputs)
        if term is None:
            raise RunError(
                "the loss has a term of the network, which came without it; call fedsim.with_loss_term in evaluation, "
                "too, and choose no attack, measure or defense that changes or makes up outputs"
            )
        if reduction == "none":
            each: Tensor = self.of_predictions(outputs, targets, reduction=reduction) + term
            return each
        # A loss of the user takes outputs and targets alone, and returns their mean.
        arguments = {} if reduction == "mean" else {"reduction": reduction}
        loss: Tensor = self.of_predictions(outputs, targets, **arguments)
        total: Tensor = loss + (term.sum() if reduction == "sum" else term.mean())
        return total


def select_examples(outputs: Tensor, index: Tensor) -> Tensor:
    """Return the outputs of some examples, with their terms where they carry any."""
    selected, term = outputs[index], loss_term_of(outputs)
    return selected if term is None else with_loss_term(selected, term[index])


def prediction_loss(loss: Any) -> Any:
    """Return the loss without the term of a network, for what judges or counts outputs that it made up."""
    return loss.of_predictions if isinstance(loss, LossWithTerm) else loss


def adds_loss_term(network: nn.Module) -> bool:
    """Return whether a network, or a part of one, says that it adds a term to the loss."""
    return any(getattr(module, "adds_loss_term", False) for module in network.modules())


def loss_term_of(outputs: Any) -> Tensor | None:
    """Return the term, `example`, that outputs carry; None where they carry none."""
    term: Tensor | None = getattr(outputs, _ATTRIBUTE, None)
    return term


def has_loss_term(outputs: Any) -> bool:
    """Return whether outputs carry a term."""
    return loss_term_of(outputs) is not None


def describe_undeclared_term(network: nn.Module, outputs: Any) -> str:
    """Return what is wrong where outputs carry a term and the network does not say so, or the reverse; else nothing.

    >>> import torch
    >>> outputs = with_loss_term(torch.zeros(2, 3), torch.zeros(2))
    >>> describe_undeclared_term(torch.nn.Identity(), outputs).partition(",")[0]
    'does not say by adds_loss_term that it adds a term to the loss'
    """
    if adds_loss_term(network) == has_loss_term(outputs):
        return ""
    says, does = ("does not say", "adds") if has_loss_term(outputs) else ("says", "does not add")
    return (
        f"{says} by adds_loss_term that it adds a term to the loss, and {does} one in forward; let both agree "
        "(fedsim.with_loss_term)"
    )


def add_model_term(loss: Any, network: nn.Module) -> Loss:
    """Return the loss that clients minimise, with the term of a network that adds one."""
    completed: Loss = loss if isinstance(loss, LossWithTerm) or not adds_loss_term(network) else LossWithTerm(loss)
    return completed
