"""Weights into a built model, whatever an engine has made of its parameters, and adapters from a seed.

A rank keeps a contiguous range of each parameter: all of it, some rows (FSDP2), a slice of the flattened tensor (ZeRO-3).
It reads the rows that cover this range, a few at a time, so the host holds little more than what it keeps.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tonnage.errors import ModelError
from tonnage.facts.sizes import READ_AT_ONCE_BYTES
from tonnage.models.build import full_shape
from tonnage.models.quantised import Kept, field_names
from tonnage.models.shards import Checkpoint, Source, find_sources

WRAPPERS = (".base_layer", ".original_module")
SHOW_BYTES = 1 << 31  # reading less takes no time to speak of


def load_weights(model: nn.Module, folder: str, device: torch.device, allow_pickle: bool = False) -> None:
    """Give storage to what is on meta, and fill every base parameter and buffer of `model` from the files of `folder`.

    Parameters may be DTensors or partitioned by ZeRO-3; those that no file is for (adapters) become zeros.

    Raises:
        ModelError: files that are missing or broken, a parameter that no file has, a shape that does not fit.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    materialise(model, device)
    targets = [target for target in _targets(base) if not _is_adapter(target[0])]
    plain = {name for name, *_ in targets}
    checkpoint = Checkpoint(folder, allow_pickle)
    sources = find_sources(checkpoint, base, plain)
    by_tensor = {}  # a tied weight has two names, and may be in the files under either
    for name, shape, tensors, kept in targets:
        by_tensor.setdefault(id(tensors[0]), []).append((name, shape, tensors, kept))
    missing = [named[0][0] for named in by_tensor.values() if not any(name in sources for name, *_ in named)]
    if missing:
        raise ModelError(f"model.path={folder}: {len(missing)} parameters are in no file, first {', '.join(missing[:3])}; "
                         f"the files are of another model or incomplete")
    total = sum(math.prod(named[0][1]) for named in by_tensor.values()) * 2
    with torch.no_grad(), _progress(total) as advance:
        for named in by_tensor.values():
            name, shape, tensors, kept = next(one for one in named if one[0] in sources)
            source = sources.pop(name)  # what it has computed goes with it
            if tuple(source.shape) != tuple(shape):
                raise ModelError(f"model.path={folder}: {name} has shape {list(source.shape)}, config.json says "
                                 f"{list(shape)}; weights and config.json do not belong together")
            try:
                _fill_kept(source, tensors, kept, device) if kept else _fill(source, tensors[0])
            except OSError as error:
                raise ModelError(f"model.path={folder}: {name} cannot be read: {error}") from error
            advance(math.prod(shape) * 2)
    _compute_buffers(base)


def materialise(model: nn.Module, device: torch.device, then: Callable[[nn.Module], None] | None = None) -> None:
    """Give storage, zeros, to parameters and buffers that are on meta; tied ones stay tied.

    Args:
        then: called with each module, behind those that it holds. It takes of the module's own parameters what is to be
            kept: the next module's get the same storage. Storage of their own, allocated and freed a thousand times, would
            leave as much again in holes.
    """
    made, shared = {}, _Shared(model, device) if then else None

    def real(tensor):
        if id(tensor) not in made:
            made[id(tensor)] = tensor, _real(tensor, device, shared)  # the old one is held, or another might get its id
        return made[id(tensor)][1]

    for module in reversed(list(model.modules())):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.device.type == "meta":
                    tensors[name] = real(tensor)
        if then:
            then(module)
            shared.used = 0


class _Shared:
    """Zeros for the parameters of one module after another."""

    def __init__(self, model: nn.Module, device: torch.device):
        size = max(sum(map(self._aligned, module.parameters(recurse=False))) for module in model.modules())
        self.bytes, self.used = torch.zeros(size, dtype=torch.uint8, device=device), 0

    @staticmethod
    def _aligned(tensor):
        return math.ceil(tensor.nbytes / 64) * 64

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        part = self.bytes[self.used:self.used + tensor.nbytes]
        self.used += self._aligned(tensor)
        return part.view(tensor.dtype).view(tensor.shape)


def _real(tensor, device, shared):
    if isinstance(tensor, DTensor):
        local = torch.zeros(tensor._local_tensor.shape, dtype=tensor.dtype, device=device)
        empty = DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
                                   stride=tensor.stride())
    elif shared is not None and isinstance(tensor, nn.Parameter):
        empty = shared.zeros_like(tensor)
    else:
        empty = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _is_adapter(name):
    return "lora_" in name or ".modules_to_save" in name


def _targets(base) -> Iterator[tuple[str, tuple[int, ...], list[torch.Tensor], Kept | None]]:
    """(plain name, whole shape, tensors that keep it, how it is quantised) of every parameter and stored buffer."""
    for path, module in base.named_modules():
        prefix = _plain_name(f"{path}." if path else "")
        for leaf, one in getattr(module, "kept", {}).items():
            yield prefix + leaf, one.shape, [module._parameters[name] for name in one.names(leaf).values()], one
        fields = field_names(module)
        for name, parameter in module._parameters.items():
            if parameter is not None and name not in fields:
                yield prefix + name, full_shape(parameter), [parameter], None
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer.shape, [buffer], None


class _Part:
    """The range [start, stop) of a flattened tensor that this rank keeps, and where."""

    def __init__(self, tensor: torch.Tensor):
        if hasattr(tensor, "ds_tensor"):
            self.kept = tensor.ds_tensor.data
            self.start = self.kept.numel() * dist.get_rank()
            self.stop = min(self.start + self.kept.numel(), tensor.ds_numel)  # the last rank's is padded
        elif isinstance(tensor, DTensor):
            self.kept = tensor.to_local().view(-1)
            self.start, self.stop = (row * math.prod(tensor.shape[1:]) for row in shard_rows(tensor))
        else:
            self.kept = tensor.detach().view(-1)
            self.start, self.stop = 0, tensor.numel()

    def rows(self, row_numel: int) -> tuple[int, int]:
        """The rows that cover the range."""
        return (self.start // row_numel, math.ceil(self.stop / row_numel)) if self.stop > self.start else (0, 0)

    def put(self, start: int, values: torch.Tensor) -> None:
        """Copy what is kept of `values`, which begin at `start` of the flattened tensor."""
        first, last = max(start, self.start), min(start + values.numel(), self.stop)
        if last > first:
            self.kept[first - self.start:last - self.start].copy_(values.reshape(-1)[first - start:last - start])


def shard_rows(tensor: DTensor) -> tuple[int, int]:
    """The rows (of the first dimension) of a DTensor that this rank holds."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape[1:]) != tuple(tensor.shape[1:]):
        raise AssertionError(f"sharded over columns: {tensor.placements}")
    return (offset[0], offset[0] + shape[0]) if shape[0] else (0, 0)


def _fill(source: Source, tensor: torch.Tensor) -> None:
    part, shape = _Part(tensor), source.shape or (1,)
    row = math.prod(shape[1:])
    for start, stop in _steps(*part.rows(row), row, 1):
        part.put(start * row, source.rows(start, stop))


def _fill_kept(source: Source, tensors: list[torch.Tensor], kept: Kept, device: torch.device) -> None:
    """Quantise the rows of which this rank keeps codes or scales."""
    rows = kept.shape[0]
    fields = dict(zip(kept.names(""), tensors, strict=True))
    parts = {field: _Part(tensor) for field, tensor in fields.items()}
    block = kept.format.block_rows if len(kept.shape) == 2 else 1  # the rows of stacked experts are whole matrices
    row = {field: math.prod(full_shape(tensor)[1:]) for field, tensor in fields.items()}
    each = {field: 1 if full_shape(tensor)[0] == rows else block for field, tensor in fields.items()}
    ranges = [(first * each[field], last * each[field]) for field, part in parts.items()
              for first, last in [part.rows(row[field])] if last > first]
    if not ranges:
        return
    first, last = min(start for start, _ in ranges) // block * block, min(rows, max(stop for _, stop in ranges))
    for start, stop in _steps(first, last, math.prod(kept.shape[1:]), block):
        for field, values in kept.from_rows(source, start, min(rows, math.ceil(stop / block) * block), device).items():
            parts[field].put(start // each[field] * row[field], values)


def _steps(first: int, last: int, row_numel: int, block: int) -> Iterator[tuple[int, int]]:
    """[first, last) in pieces of whole blocks that take few bytes."""
    step = max(1, READ_AT_ONCE_BYTES // (2 * row_numel) // block) * block
    for start in range(first, last, step):
        yield start, min(start + step, last)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A function to say how many bytes more have been read, shown on rank 0 where it takes a while."""
    show = total > SHOW_BYTES and (not dist.is_initialized() or dist.get_rank() == 0)
    with Progress(transient=True, disable=not show) as bar:
        task = bar.add_task("reading weights", total=total)
        yield lambda amount: bar.advance(task, amount)


def _compute_buffers(base: nn.Module) -> None:
    """Set the buffers that no file holds (rotary frequencies), by the model class's own initialisation."""
    owners = {module for module in base.modules() if module._non_persistent_buffers_set}
    before = {}
    for module in base.modules():
        before[module] = getattr(module, "_is_hf_initialized", False)
        module._is_hf_initialized = module not in owners
    try:
        with torch.no_grad():
            base.initialize_weights()
    finally:
        for module, value in before.items():
            module._is_hf_initialized = value


def init_adapters(model: nn.Module, seed: int, fill) -> None:
    """Set every adapter matrix from (seed, its name): equal for any engine, layout and number of ranks.

    Args:
        fill: engine's function (parameter, whole fp32 tensor) that stores this rank's part of it.

    A is Kaiming-uniform and B zero, as in https://arxiv.org/abs/2106.09685; DoRA's magnitude is the row norm of the
    base weight, see `init_dora`.
    """
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            fill(parameter, kaiming_by_name(name, seed, full_shape(parameter)))
        elif "lora_B" in name:
            fill(parameter, torch.zeros(full_shape(parameter)))


def kaiming_by_name(name: str, seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Kaiming-uniform (a = sqrt 5) fp32 tensor [..., rank, in] drawn from a generator of its own."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


def init_dora(model: nn.Module, whole, fill) -> None:
    """Set DoRA's magnitudes to the row norms of the loaded base weights (B is zero, so W + BA = W).

    Args:
        whole: engine's function (parameter) -> whole tensor.
    """
    for module in model.modules():
        for adapter in getattr(module, "lora_magnitude_vector", {}):
            norm = torch.linalg.norm(whole(module.get_base_layer().weight).float(), dim=1)
            fill(module.lora_magnitude_vector[adapter].weight, norm)


def init_saved_modules(model: nn.Module, whole, fill) -> None:
    """Start peft's trained copies of embeddings and head from the loaded originals; see `init_dora` for the functions."""
    for module in model.modules():
        if hasattr(module, "original_module"):
            originals = {leaf: whole(parameter) for leaf, parameter in module.original_module.named_parameters()}
            for saved in module.modules_to_save.values():
                for leaf, parameter in saved.named_parameters():
                    fill(parameter, originals[leaf])


def _plain_name(name):
    for word in WRAPPERS:
        name = name.replace(word, "")
    return name
