"""The tensors of a model folder by name, read by rows: what a rank does not keep, it does not read.

A row is an index of the first dimension: an output feature of a linear layer, an expert of stacked experts. Names and
layouts in files are those of the hub; transformers' own table says which parameter they become.
"""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from tonnage.errors import ModelError
from tonnage.facts.bases import FP8_BLOCK as BLOCK

SCALE_SUFFIX = "_scale_inv"  # what the weight is multiplied by, all the same
FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def weight_files(folder: str, allow_pickle: bool = False) -> list[str]:
    """The weight files of a model folder, complete: safetensors, or pickles where there are only those and allowed.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    index = single = None
    for stem in ("model.safetensors", "pytorch_model.bin")[:1 + allow_pickle]:
        index, single = Path(folder) / f"{stem}.index.json", Path(folder) / stem
        if index.is_file() or single.is_file():
            break
    if not index.is_file():
        if not single.is_file():
            raise ModelError(f"model.path={folder}: no model.safetensors and no index of shards; point model.path at "
                             f"a folder with safetensors, or set model.allow_pickle=true for pickle files")
        return [str(single)]
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    missing = [name for name in names if not (Path(folder) / name).is_file()]
    if missing:
        raise ModelError(f"model.path={folder}: {len(missing)} of {len(names)} shards are missing: "
                         f"{', '.join(missing[:5])}; fetch them again")
    return [str(Path(folder) / name) for name in names]


class Checkpoint:
    """The weight files of a folder, opened: their headers are read and compared with their sizes.

    Raises:
        ModelError: a file is missing, cut short or not what its name says; it is named.
    """

    def __init__(self, folder: str, allow_pickle: bool = False):
        from safetensors import safe_open

        self.folder = folder
        self._handles: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        for file in weight_files(folder, allow_pickle):
            try:
                if file.endswith(".safetensors"):
                    handle = safe_open(file, "pt")
                    self._handles |= dict.fromkeys(handle.keys(), handle)
                else:
                    self._tensors |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # safetensors has a type of its own, pickle several
                raise ModelError(f"model.path={folder}: {Path(file).name} cannot be read, it is cut short or damaged "
                                 f"({str(error).splitlines()[0]}); fetch it again") from error

    def names(self) -> list[str]:
        return [*self._handles, *self._tensors]

    def __contains__(self, name: str) -> bool:
        return name in self._handles or name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._tensors:
            return tuple(self._tensors[name].shape)
        return tuple(self._handles[name].get_slice(name).get_shape())

    def fp8(self, name: str) -> torch.dtype | None:
        """The 8-bit float type of a tensor, None for another."""
        if name in self._tensors:
            return self._tensors[name].dtype if self._tensors[name].dtype in FP8.values() else None
        return FP8.get(self._handles[name].get_slice(name).get_dtype())

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor as they are stored; of a number without dimensions, [1]."""
        if not self.shape(name):
            return (self._tensors[name] if name in self._tensors else self._handles[name].get_tensor(name)).reshape(1)
        return (self._tensors[name] if name in self._tensors else self._handles[name].get_slice(name))[start:stop]


class Source(Protocol):
    """Where a parameter comes from."""

    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Values of rows start to stop, [stop - start, ...], in the files' precision."""

    def blocks(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same as FP8 codes and their scales (`BlockScaled`), None where the files hold none."""


@dataclass
class Stored:
    """One tensor of a file."""

    checkpoint: Checkpoint
    name: str
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self):
        self.shape = self.checkpoint.shape(self.name)

    def rows(self, start, stop):
        return self.checkpoint.rows(self.name, start, stop)

    def blocks(self, start, stop):
        return None


class BlockScaled(Stored):
    """FP8 codes [rows, columns] and a scale for each 128 x 128 of them, the last of a row or column for what is left.

    Source: https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md

    Raises:
        ModelError: another 8-bit type than e4m3; a scale that is missing, or not one for each block.
    """

    def __post_init__(self):
        super().__post_init__()
        found = self.checkpoint.fp8(self.name)
        if found != torch.float8_e4m3fn:
            raise ModelError(f"model.path={self.checkpoint.folder}: {self.name} is FP8 of type "
                             f"{str(found).removeprefix('torch.')}; only float8_e4m3fn is read")
        self.scale = self.name + SCALE_SUFFIX
        if self.scale not in self.checkpoint:
            raise ModelError(f"model.path={self.checkpoint.folder}: {self.name} is FP8 and {self.scale} is in no file; "
                             f"without it the weights are up to 448 times too large: fetch the files again")
        wanted = tuple(math.ceil(size / BLOCK) for size in self.shape)
        found = self.checkpoint.shape(self.scale)
        if found != wanted:
            raise ModelError(f"model.path={self.checkpoint.folder}: {self.scale} has shape {list(found)}; {self.name}, "
                             f"{list(self.shape)}, has {list(wanted)} blocks of {BLOCK} x {BLOCK}")

    def rows(self, start, stop):
        first = start // BLOCK
        scales = self.checkpoint.rows(self.scale, first, math.ceil(stop / BLOCK))
        return dequantise_blocks(super().rows(start, stop), scales, torch.float32, start - first * BLOCK)

    def blocks(self, start, stop):
        if start % BLOCK:
            raise AssertionError("blocks are read whole")
        return super().rows(start, stop), self.checkpoint.rows(self.scale, start // BLOCK, math.ceil(stop / BLOCK))


def dequantise_blocks(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, skip: int = 0) -> torch.Tensor:
    """FP8 codes [rows, columns] times their scales, in fp32, then `dtype`.

    Args:
        scales: [blocks of rows, blocks of columns].
        skip: rows of the first block that lie before the codes.
    """
    rows, columns = codes.shape
    by_row = scales.float().repeat_interleave(BLOCK, 0)[skip:skip + rows]
    return (codes.float() * by_row.repeat_interleave(BLOCK, 1)[:, :columns]).to(dtype)


class Stacked:
    """Matrices of experts as one parameter [experts, rows, columns]; `parts` of the files lie below each other in it."""

    def __init__(self, parts: list[list[Source]]):
        self.parts = parts
        shapes = [part[0].shape for part in parts]
        self.shape = (len(parts[0]), sum(shape[0] for shape in shapes), *shapes[0][1:])
        if len({len(part) for part in parts}) > 1 or any(one.shape != part[0].shape for part in parts for one in part):
            self.shape = (0, 0, 0)  # fits no parameter

    def rows(self, start, stop):
        return torch.stack([torch.cat([part[i].rows(0, part[i].shape[0]) for part in self.parts])
                            for i in range(start, stop)])

    def blocks(self, start, stop):
        made = [[part[i].blocks(0, part[i].shape[0]) for part in self.parts] for i in range(start, stop)]
        if any(one is None for expert in made for one in expert):
            return None
        return tuple(torch.stack([torch.cat([one[kind] for one in expert]) for expert in made]) for kind in (0, 1))


class Conversion:
    """Whatever else transformers makes of tensors of the files, on whole tensors."""

    def __init__(self, converter, model, target: str, sources: dict[str, dict[str, Source]]):
        self.converter, self.model, self.target, self.sources, self.made = converter, model, target, sources, None

    def tensor(self, name: str) -> torch.Tensor:
        if self.made is None:
            for pattern, named in self.sources.items():
                for source_name, source in named.items():
                    self.converter.add_tensor(self.target, source_name, pattern, source.rows(0, (*source.shape, 1)[0]))
            made = self.converter.convert(self.target, model=self.model, config=self.model.config)
            self.made = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        return self.made[name]


@dataclass
class Converted:
    """A parameter that a `Conversion` makes, beside others perhaps; its shape is known once it is made."""

    conversion: Conversion
    name: str

    @property
    def shape(self):
        return tuple(self.conversion.tensor(self.name).shape)

    def rows(self, start, stop):
        return self.conversion.tensor(self.name)[start:stop]

    def blocks(self, start, stop):
        return None


def find_sources(checkpoint: Checkpoint, model, expected: set[str]) -> dict[str, Source]:
    """Where the parameters and buffers of `model` are in its files, by transformers' conversion tables.

    Args:
        expected: their names in the plain model; what no name is expected for is left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, known = model.base_model_prefix, dict.fromkeys(expected, True)
    sources, collected = {}, {}
    for name in sorted(checkpoint.names(), key=dot_natural_key):
        if name.endswith(SCALE_SUFFIX):
            continue  # read with its weight
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if pattern is not None and _targets(by_pattern[pattern], target) & expected:
            collected.setdefault(target, {}).setdefault(pattern, {})[name] = _source(checkpoint, name)
        elif target in expected:
            sources[target] = _source(checkpoint, name)
    for target, found in collected.items():
        sources |= dict(_conversions(by_pattern[next(iter(found))], model, target, found))
    return sources


def _source(checkpoint, name):
    return BlockScaled(checkpoint, name) if checkpoint.fp8(name) else Stored(checkpoint, name)


def _targets(converter, target):
    return {target.replace(converter.target_patterns[0], pattern) for pattern in converter.target_patterns}


def _conversions(converter, model, target, found) -> Iterator[tuple[str, Source]]:
    from transformers.core_model_loading import Concatenate, MergeModulelist

    steps = [(type(step), step.dim) for step in converter.operations if hasattr(step, "dim")]
    stacks = len(steps) == len(converter.operations) and len(converter.target_patterns) == 1 and (
        steps == [(MergeModulelist, 0)] or steps == [(MergeModulelist, 0), (Concatenate, 1)])
    if stacks and len(found) == len(converter.source_patterns):
        yield target, Stacked([list(found[pattern].values()) for pattern in converter.source_patterns])
        return
    conversion = Conversion(copy.deepcopy(converter), model, target, found)
    for name in _targets(converter, target):
        yield name, Converted(conversion, name)
