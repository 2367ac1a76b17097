"""Frozen weights in 4 or 8 bits under a trained adapter (QLoRA, https://arxiv.org/abs/2305.14314).

Codes and scales are plain frozen parameters, so that every engine shards, gathers, offloads and saves them like others.
They are integers for it: mixed precision casts what is a float, frozen or not. A weight is dequantised in forward and,
instead of being kept, again in backward; it gets no gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tonnage.facts.bases import FP8_BLOCK as BLOCK
from tonnage.facts.bases import NF4_BLOCK, NF4_GROUP, fields
from tonnage.models.shards import Source, dequantise_blocks

TYPES = {1: torch.uint8, 4: torch.int32}
AT_ONCE = 1 << 24  # weights that are dequantised in fp32 at a time


class Format(Protocol):
    """How weights [..., rows, columns] are kept; `parts`: matrices that lie below each other in the rows."""

    block_rows: int  # rows of a matrix that are quantised together

    def quantise(self, weight: torch.Tensor, parts: int) -> dict[str, torch.Tensor]:
        """The parameters that keep it, as in `facts.bases.fields`."""

    def dequantise(self, fields: dict[str, torch.Tensor], shape: tuple[int, ...], parts: int,
                   dtype: torch.dtype) -> torch.Tensor:
        """The weight."""


class Nf4:
    """4-bit normal floats in blocks of 64 weights of a row, whose largest values are kept in 8 bits: double quantisation.

    These are whole 255ths of the largest of 256 of them, so a row needs no other row: ranks quantise only what they
    keep. bitsandbytes takes them less their mean over the whole tensor instead. Its kernels do the rest.
    """

    block_rows, block, group = 1, NF4_BLOCK, NF4_GROUP

    def quantise(self, weight, parts):
        from bitsandbytes.functional import quantize_4bit

        *rows, columns = weight.shape
        blocks = math.ceil(columns / self.block)
        padded = nn.functional.pad(weight, (0, blocks * self.block - columns)).contiguous()
        codes, state = quantize_4bit(padded.flatten(), blocksize=self.block, quant_type="nf4", quant_storage=torch.uint8)
        grouped = self._grouped(state.absmax.float().reshape(*rows, blocks))
        scales = grouped.amax(-1, keepdim=True) / 255
        absmax = (grouped / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.uint8)
        return {"codes": codes.reshape(*rows, -1), "absmax": absmax.reshape(*rows, -1)[..., :blocks].contiguous(),
                "scales": scales.squeeze(-1).view(torch.int32)}

    def _grouped(self, absmax):
        """[..., blocks] as [..., groups, blocks of a group]; one group has no more blocks than there are."""
        blocks = absmax.shape[-1]
        size = min(self.group, blocks)
        return nn.functional.pad(absmax, (0, -blocks % size)).reshape(*absmax.shape[:-1], -1, size)

    def dequantise(self, fields, shape, parts, dtype):
        _library()
        *rows, columns = shape
        blocks = fields["absmax"].shape[-1]
        grouped = self._grouped(fields["absmax"].float()) * fields["scales"].view(torch.float32)[..., None]
        absmax = grouped.reshape(*rows, -1)[..., :blocks].flatten()
        flat = torch.ops.bitsandbytes.dequantize_4bit(fields["codes"].reshape(-1, 1), absmax, self.block, "nf4",
                                                      [absmax.numel() * self.block], dtype)
        return flat.reshape(*rows, blocks * self.block)[..., :columns]


class Int8:
    """A signed byte for each weight, whole 127ths of the largest of its row."""

    block_rows = 1

    def quantise(self, weight, parts):
        scales = weight.float().abs().amax(-1, keepdim=True) / 127
        codes = (weight.float() / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
        return {"codes": codes.view(torch.uint8), "scales": scales.view(torch.int32)}

    def dequantise(self, fields, shape, parts, dtype):
        return (fields["codes"].view(torch.int8) * fields["scales"].view(torch.float32)).to(dtype)


class Fp8:
    """e4m3 in blocks of 128 x 128 with an fp32 scale each, as DeepSeek-V3 is published: its files are kept as they are."""

    block_rows, largest = BLOCK, 448.0

    def quantise(self, weight, parts):
        codes, scales = zip(*(self._matrix(one) for one in self._matrices(weight, parts)), strict=True)
        shape, _ = fields("fp8", tuple(weight.shape), parts)["scales"]
        return self.of_blocks(torch.cat(codes).reshape(weight.shape), torch.cat(scales).reshape(shape))

    @staticmethod
    def of_blocks(codes, scales):
        """The fields of what `Source.blocks` gives."""
        return {"codes": codes.view(torch.uint8), "scales": scales.float().view(torch.int32)}

    def _matrix(self, weight):
        rows, columns = weight.shape
        padded = nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales = blocks.abs().amax((1, 3)).clamp_min(torch.finfo(torch.float32).tiny) / self.largest
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        return codes.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scales

    @staticmethod
    def _matrices(tensor, parts):
        """Each matrix of [..., parts * rows, columns]."""
        return tensor.reshape(-1, tensor.shape[-2] // parts, tensor.shape[-1])

    def dequantise(self, fields, shape, parts, dtype):
        codes = self._matrices(fields["codes"].view(torch.float8_e4m3fn), parts)
        scales = self._matrices(fields["scales"].view(torch.float32), parts)
        made = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        step = max(1, AT_ONCE // codes.shape[-1] // BLOCK) * BLOCK
        for matrix, matrix_codes, matrix_scales in zip(made, codes, scales, strict=True):
            for start in range(0, len(matrix), step):
                rows = slice(start, start + step)
                matrix[rows] = dequantise_blocks(matrix_codes[rows], matrix_scales[start // BLOCK:(start + step) // BLOCK],
                                                 dtype)
        return made.reshape(shape)


FORMATS: dict[str, Format] = {"nf4": Nf4(), "int8": Int8(), "fp8": Fp8()}


@cache
def _library():
    """bitsandbytes' kernels, which its import registers."""
    import bitsandbytes  # noqa: F401


@dataclass(frozen=True)
class Kept:
    """A weight of a module that is kept quantised: its shape [..., rows, columns], and the type it is used in."""

    base: str
    shape: tuple[int, ...]
    parts: int
    dtype: torch.dtype

    @property
    def format(self) -> Format:
        return FORMATS[self.base]

    @property
    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of the parameters that keep it."""
        return {name: (shape, TYPES[size]) for name, (shape, size) in fields(self.base, self.shape, self.parts).items()}

    def names(self, leaf: str) -> dict[str, str]:
        """Name of the module's parameter for each field."""
        return {field: f"{leaf}_{field}" for field in self.fields}

    def from_rows(self, source: Source, start: int, stop: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Fields of rows (of the first dimension) start to stop; FP8 files stay what they are."""
        blocks = source.blocks(start, stop) if isinstance(self.format, Fp8) else None
        if blocks is not None:
            return self.format.of_blocks(*blocks)
        return self.format.quantise(source.rows(start, stop).to(device), self.parts)


class Quantised(nn.Module):
    """A module some of whose weights are kept quantised; `kept` says which. Attributes of their names are dequantised."""

    kept: dict[str, Kept]

    def dequantised(self, leaf: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As whole as its codes are: of stacked experts those that are here."""
        kept = self.kept[leaf]
        fields = {field: self._parameters[name].detach() for field, name in kept.names(leaf).items()}
        fields = {field: tensor.to_local() if isinstance(tensor, DTensor) else tensor for field, tensor in fields.items()}
        shape = (len(fields["codes"]), *kept.shape[1:])
        return kept.format.dequantise(fields, shape, kept.parts, dtype or kept.dtype)


def field_names(module: nn.Module) -> set[str]:
    """Names of the parameters of `module` that keep quantised weights."""
    return {name for leaf, kept in getattr(module, "kept", {}).items() for name in kept.names(leaf).values()}


def quantise_module(module: nn.Module, kind: type[Quantised], leaves: list[str], base: str,
                    parts: Callable[[str], int] = lambda leaf: 1) -> None:
    """Make `module` a `kind` of its class that keeps `leaves` in format `base`, empty, on their device."""
    module.kept, module.plain_class = {}, type(module)
    for leaf in leaves:
        old = module._parameters.pop(leaf)
        kept = module.kept[leaf] = Kept(base, tuple(old.shape), parts(leaf), old.dtype)
        for field, (shape, dtype) in kept.fields.items():
            empty = torch.empty(shape, dtype=dtype, device=old.device)
            module.register_parameter(kept.names(leaf)[field], nn.Parameter(empty, requires_grad=False))
    module.__class__ = _class(kind, type(module), tuple(leaves))


def dequantise_module(module: Quantised) -> None:
    """Undo `quantise_module`: what the codes stand for is an ordinary frozen weight."""
    weights = {leaf: module.dequantised(leaf).clone() for leaf in module.kept}
    for leaf in weights:
        for name in module.kept[leaf].names(leaf).values():
            del module._parameters[name]
    module.__class__ = module.plain_class
    del module.kept, module.plain_class
    for leaf, weight in weights.items():
        module.register_parameter(leaf, nn.Parameter(weight, requires_grad=False))


@cache
def _class(kind, plain, leaves):
    bases = (plain,) if issubclass(plain, kind) else (kind,) if issubclass(kind, plain) else (kind, plain)
    return type(plain.__name__, bases, {leaf: property(lambda self, leaf=leaf: self.dequantised(leaf)) for leaf in leaves})


class _FrozenMatmul(torch.autograd.Function):
    """x [..., in] times the transpose of a weight [out, in] that is dequantised for it."""

    @staticmethod
    def forward(ctx, x, module, leaf):
        ctx.module, ctx.leaf = module, leaf
        return nn.functional.linear(x, module.dequantised(leaf, x.dtype))

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.module.dequantised(ctx.leaf, grad.dtype), None, None


class QuantisedLinear(Quantised, nn.Linear):
    """A linear layer [out, in] whose weight is kept quantised; peft adapts it as it does any other."""

    def forward(self, x):
        out = _FrozenMatmul.apply(x, self, "weight")
        return out if self.bias is None else out + self.bias
