"""AdamW with 8-bit states, for all engines: torchao's, whose states are tensors of their own kind.

bitsandbytes' fail in DTensors. Source: https://arxiv.org/abs/2110.02861
"""

from collections.abc import Iterator

import torch
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit


class AdamW8bit(TorchaoAdamW8bit):
    """torchao's (0.18) with two differences: states that survive a save exactly, and parameters in pieces.

    Attributes:
        pieces: for a flat tensor that an engine gives to the step, the pieces with states of their own, as (start, view).
    """

    def __init__(self, groups: list[dict], **options):
        super().__init__(groups, **options)
        self.pieces: dict[torch.Tensor, list[tuple[int, torch.Tensor]]] = {}

    @staticmethod
    def _subclass_zeros(p, signed, block_size):
        state = OptimState8bit.zeros(p.shape, signed, block_size, p.device, dtype=p.dtype)
        if signed:
            # The map of the paper reaches from -0.993 to 1: a block whose largest value is negative would come back with
            # another scale, so other codes. With -1 quantising what was dequantised gives the same codes.
            state.qmap[0] = -1.0
        return state

    def split(self, flat: torch.Tensor, start: int, numel: int) -> list[torch.Tensor]:
        """Make `numel` elements of `flat` from `start` a parameter of its own, and return its pieces.

        They are the blocks that are full and the rest: torchao keeps the states of ragged tensors in fp32.
        """
        full = numel // self.block_size * self.block_size
        bounds = [(start, full), (start + full, numel - full)]
        added = [(begin, flat.detach().narrow(0, begin, size)) for begin, size in bounds if size]
        self.pieces.setdefault(flat, []).extend(added)
        return [view for _, view in added]

    def step(self, closure=None):
        whole = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [piece for flat in group["params"] for piece in self._ready(flat)]
        super().step(closure)
        for group, parameters in zip(self.param_groups, whole, strict=True):
            group["params"] = parameters

    def _ready(self, flat) -> Iterator[torch.Tensor]:
        """The pieces of `flat` with their gradients; itself where it has none."""
        if flat not in self.pieces:
            yield flat
        for start, piece in self.pieces.get(flat, ()):
            piece.grad = flat.grad.narrow(0, start, piece.numel())
            yield piece

    def read(self, pieces: list[torch.Tensor], name: str) -> torch.Tensor:
        """A state of `pieces`, one after another, flat and in fp32."""
        states = (self.state[piece][name] for piece in pieces)
        return torch.cat([(s.dequantize() if isinstance(s, OptimState8bit) else s).flatten() for s in states])

    def write(self, pieces: list[torch.Tensor], name: str, values: torch.Tensor, num_steps: int) -> None:
        """Store what `read` gave, after `num_steps` updates."""
        for piece, part in zip(pieces, values.split([piece.numel() for piece in pieces]), strict=True):
            state = self.state[piece]
            state.setdefault("step", torch.tensor(0.0)).fill_(num_steps)
            state[name] = self._new_buffer(piece, signed=name == "exp_avg")
            state[name].copy_(part.view(piece.shape).to(piece.device))
