"""What the training loop asks of an engine, the same for all of them.

The loop owns accumulation, scaling and the order of events; an engine owns how parameters are spread, how gradients
are summed over ranks, clipping, and the step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class StepOutcome:
    """`grad_norm`: global norm before clipping. `applied`: False where a gradient was not finite, weights untouched.

    `overflow`: it was not, and fp16's loss scale was above 1 and has been lowered: the scale's fault, not the data's.
    """

    grad_norm: float
    applied: bool
    overflow: bool = False


@dataclass(frozen=True)
class Parts:
    """How an engine gets a model, in this order.

    `build(trained_dtype)`: the empty model, called under the engine's own device context.
    `load(model, device)`: storage for what is on meta and the weights, once parameters are spread.
    `optimizer(model)`: over the trained parameters.
    `start(model, engine)`: what is trained from the beginning (adapters), by the engine's `whole` and `fill`.
    """

    build: Callable[[torch.dtype], nn.Module]
    load: Callable[[nn.Module, torch.device], None]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    start: Callable[[nn.Module, "Engine"], None]


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every group; compiled optimizers hold it in a tensor."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def is_eight_bit(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is `engines.eight_bit.AdamW8bit`, whose import takes torchao: told by what only that has."""
    return hasattr(optimizer, "pieces")


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; back to training however it is left."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


class Engine(Protocol):
    """One way to spread a model over ranks.

    Attributes:
        model: the model with its adapter, after `prepare`; forward goes through `forward`.
        device: where this rank's tensors live.
        loss_scale: factor on losses in fp16, 1 otherwise; may be set when a run goes on.
    """

    model: nn.Module
    device: torch.device
    loss_scale: float

    def prepare(self, parts: Parts) -> None:
        """Build, shard, load and wrap."""

    def forward(self, **inputs) -> Any:
        """The model's output."""

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Backward of one micro-batch; `last` of its window. `loss` is scaled so that its sum over ranks is meant."""

    def step(self, learning_rate: float) -> StepOutcome:
        """Clip, update, clear gradients; on a non-finite gradient clear them and update nothing, on all ranks."""

    def discard(self) -> None:
        """Throw away the gradients of a half-done window."""

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names (as the model has them) and parameters that are trained, in the same order on all ranks."""

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """The whole tensor of a parameter, trained ones in fp32 (collective)."""

    def fill(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        """Store this rank's part of a whole tensor (collective)."""

    def whole_states(self, parameter: nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole optimizer states of a parameter by name, fp32, one at a time (collective); none before the first step."""

    def fill_states(self, parameter: nn.Parameter, states: dict[str, torch.Tensor], num_steps: int) -> None:
        """Store this rank's part of whole optimizer states after `num_steps` updates (collective)."""

    def close(self) -> None:
        """Let go of what would outlive the engine."""
