"""Checkpoints: whole named tensors in safetensors, whatever engine and layout wrote them.

    step-00000100/
      trained-r000-000.safetensors   `name` (fp32 weight), `name|exp_avg`, ...; tensors are dealt out to ranks to write
      stream.safetensors             data.streaming: shuffle and pack buffers
      trainer.json                   step, data position, counts, best metric
      manifest.json                  written last: every file's size and hash, every tensor's shape

The folder is written under a temporary name, checked, and renamed, so a folder with its final name is complete. One
tensor is whole in memory at a time, so a save needs no room for the model. Dropout needs no saved state: the random
state of a window is a function of (seed, step, rank).
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from tonnage.data.windows import Cursor
from tonnage.engines.base import Engine
from tonnage.errors import CheckpointError
from tonnage.facts.sizes import SAVE_FILE_BYTES
from tonnage.models.build import full_shape, moved_buffers
from tonnage.runtime.logs import LOG
from tonnage.runtime.watchdog import beat


@dataclass
class Position:
    """Where a run stands after its last step. `num_updates` counts steps that were applied."""

    step: int = 0
    num_updates: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    label_tokens: int = 0
    nonfinite_steps: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    loss_scale: float = 1.0

    @classmethod
    def from_dict(cls, values: dict) -> "Position":
        """Back from `asdict`."""
        return cls(**values | {"cursor": Cursor(**values["cursor"])})


def checkpoint_bytes(engine: Engine, num_states: int) -> int:
    """Bytes of one checkpoint: fp32 weights and optimizer states of what is trained."""
    return sum(4 * (1 + num_states) * full_shape(p).numel() for _, p in engine.trained())


def require_space(folder: Path, needed_bytes: int, num_kept: int) -> None:
    """Check that `num_kept` checkpoints and the one being written fit on the file system of `folder`.

    Raises:
        CheckpointError: with both numbers.
    """
    present = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free
    wanted = needed_bytes * (num_kept + 1) - present
    if wanted > free:
        raise CheckpointError(f"checkpoint.keep={num_kept}: {num_kept + 1} checkpoints of {needed_bytes / 2**30:.3f} GiB "
                              f"do not fit into the {free / 2**30:.3f} GiB free at {folder}; free space, lower "
                              f"checkpoint.keep, or set run.root to a larger disk")


def save(folder: Path, engine: Engine, position: Position, run_id: str, source_state: dict,
         group: dist.ProcessGroup) -> Path:
    """Write the checkpoint of `position` into `folder` (collective). Returns its path.

    Args:
        group: a CPU group for agreeing; it should not time out while one rank writes.

    Raises:
        CheckpointError: on every rank, if any could not write (the partial checkpoint is removed).
    """
    final = folder / f"step-{position.step:08d}"
    temporary = folder / f".writing-{final.name}"
    rank = dist.get_rank()
    try:
        _agree(group, lambda: rank == 0 and _clear(temporary))
        parts = _agree(group, lambda: _write_tensors(temporary, engine, position))
        _agree(group, lambda: rank == 0 and _finish(temporary, final, engine, position, run_id, source_state, parts))
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def newest_complete(folder: Path, run_id: str) -> Path | None:
    """The complete checkpoint of this run with the highest step; broken ones are named and passed over."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        fault = fault_of(path, run_id)
        if fault is None:
            return path
        LOG.warning(f"{path}: passed over: {fault}")
    return None


def read_position(path: Path) -> tuple[Position, dict]:
    """Position and data-source state of a complete checkpoint."""
    trainer = json.loads((path / "trainer.json").read_text())
    state = trainer["source"]
    if (path / "stream.safetensors").is_file():
        state |= load_arrays(path / "stream.safetensors")
    return Position.from_dict(trainer["position"]), state


def load(path: Path, engine: Engine, num_updates: int, with_states: bool = True) -> None:
    """Fill trained weights and (`with_states`) optimizer states (collective).

    Raises:
        CheckpointError: a trained tensor that the checkpoint lacks, or of another shape.
    """
    tensors = StoredTensors(path)
    for name, parameter in engine.trained():
        shape = full_shape(parameter)
        stored = tensors.shapes.get(name)
        if stored != list(shape):
            raise CheckpointError(f"{path}: {name} is {stored or 'missing'} there and {list(shape)} in this model; the "
                                  f"checkpoint is of another model or adapter")
        engine.fill(parameter, tensors[name])
        if with_states and num_updates:
            engine.fill_states(parameter, tensors.states(name), num_updates)
    for name, buffer in moved_buffers(engine.model).items():
        stored = tensors.shapes.get(name)
        if stored != list(buffer.shape):
            raise CheckpointError(f"{path}: {name} is {stored or 'missing'} there and {list(buffer.shape)} in this model; "
                                  f"the checkpoint is of another model")
        buffer.copy_(tensors[name])


def rotate(saved: Path, run_id: str, newest: int, best_step: int | None, every_steps: int | None) -> None:
    """Remove this run's checkpoints but the `newest` newest up to `saved`, the best and each `every_steps`-th.

    What has a higher step than the one just saved was passed over as broken when the run went on; it counts for none.
    """
    own = [path for path in sorted(saved.parent.glob("step-*")) if path.name <= saved.name and _run_id(path) == run_id]
    for path in own[:-newest]:
        step = int(path.name.removeprefix("step-"))
        if step != best_step and not (every_steps and step % every_steps == 0):
            shutil.rmtree(path)


class StoredTensors:
    """The tensors of a checkpoint by name, read on demand."""

    def __init__(self, path: Path):
        manifest = json.loads((path / "manifest.json").read_text())
        self.shapes = manifest["tensors"]
        self._handles = {}
        for file in manifest["files"]:
            if file.startswith("trained-"):
                handle = safe_open(path / file, "pt")
                self._handles |= dict.fromkeys(handle.keys(), handle)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._handles[name].get_tensor(name)

    def names(self) -> list[str]:
        """Names of trained weights."""
        return [name for name in self.shapes if "|" not in name]

    def states(self, name: str) -> dict[str, torch.Tensor]:
        """Optimizer states of a weight."""
        prefix = name + "|"
        return {key.removeprefix(prefix): self[key] for key in self.shapes if key.startswith(prefix)}


def _agree(group, action: Callable) -> list:
    """Run `action` on each rank, gather what it returned; a failure on one rank is a CheckpointError on all.

    An action with collectives of its own must not fail between them; _write_tensors sees to that.
    """
    try:
        mine = (action(), None)
    except OSError as error:
        mine = (None, f"{error.strerror or error} ({error.filename or 'checkpoint'})")
    except (CheckpointError, SafetensorError) as error:  # safetensors reports a full disk in its own way
        mine = (None, str(error))
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    faults = [fault for _, fault in everyone if fault]
    if faults:
        raise CheckpointError(f"the checkpoint could not be written: {faults[0]}; earlier checkpoints are untouched")
    return [value for value, _ in everyone]


def _clear(temporary):
    for leftover in temporary.parent.glob(".writing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()


def _write_tensors(temporary, engine, position):
    """Write this rank's turns of the trained tensors; returns {file: facts}, {tensor: shape}.

    Gathering goes on after a failed write, so that no rank waits for another; the failure is raised at the end.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    writer, failure = _ShardWriter(temporary, rank), None
    for number, (name, parameter) in enumerate(engine.trained()):
        beat(f"the checkpoint of step {position.step}, {name}")
        tensors = {}
        for key, value in _whole_tensors(engine, name, parameter):
            if number % size == rank and not failure:
                tensors[key] = value.detach().to("cpu", copy=True).contiguous()
            del value  # or it is held while the next is gathered
        if not tensors:
            continue
        try:
            _check_tensor(name, tensors[name], full_shape(parameter), position.num_updates)
            writer.add(tensors)
        except (OSError, SafetensorError, CheckpointError) as error:
            failure = error
    if failure is None:
        try:
            if rank == 0:
                writer.add({name: buffer.to("cpu", copy=True) for name, buffer in moved_buffers(engine.model).items()})
            writer.flush()
        except (OSError, SafetensorError) as error:
            failure = error
    if failure is not None:
        raise failure if isinstance(failure, (OSError, CheckpointError)) else CheckpointError(str(failure))
    return writer.files, writer.shapes


def _whole_tensors(engine, name, parameter):
    """A weight and its optimizer states by name, one at a time: those of stacked experts are large."""
    yield name, engine.whole(parameter)
    for key, value in engine.whole_states(parameter):
        yield f"{name}|{key}", value
        del value


def _check_tensor(name, tensor, shape, num_updates):
    if tensor.shape != shape or tensor.numel() == 0:
        raise CheckpointError(f"{name}: gathered as {list(tensor.shape)}, expected {list(shape)}")
    if num_updates and "lora_B" in name and not tensor.any():
        raise CheckpointError(f"{name}: all zero after {num_updates} updates, so this adapter has learnt nothing")


class _ShardWriter:
    """Collects tensors and writes a file whenever SAVE_FILE_BYTES are reached."""

    def __init__(self, folder, rank):
        self.folder, self.rank, self.pending, self.size = folder, rank, {}, 0
        self.files, self.shapes = {}, {}

    def add(self, tensors):
        self.pending |= tensors
        self.size += sum(tensor.nbytes for tensor in tensors.values())
        if self.size >= SAVE_FILE_BYTES:
            self.flush()

    def flush(self):
        if self.pending:
            file = self.folder / f"trained-r{self.rank:03d}-{len(self.files):03d}.safetensors"
            save_file(self.pending, file, {"format": "pt"})
            self.files[file.name] = _file_facts(file, sync=True)
            self.shapes |= {name: list(tensor.shape) for name, tensor in self.pending.items()}
        self.pending, self.size = {}, 0


def _finish(temporary, final, engine, position, run_id, source_state, parts):
    files, shapes = {}, {}
    for part_files, part_shapes in parts:
        files |= part_files
        shapes |= part_shapes
    missing = [name for name, _ in engine.trained() if name not in shapes]
    if missing:
        raise CheckpointError(f"{len(missing)} trained tensors were not written, first {missing[0]}")
    arrays = {key: value for key, value in source_state.items() if isinstance(value, np.ndarray)}
    scalars = {key: value for key, value in source_state.items() if key not in arrays}
    if arrays:
        save_arrays(arrays, temporary / "stream.safetensors")
        files["stream.safetensors"] = _file_facts(temporary / "stream.safetensors", sync=True)
    _write_json(temporary / "trainer.json", {"position": asdict(position), "source": scalars})
    files["trainer.json"] = _file_facts(temporary / "trainer.json")
    _write_json(temporary / "manifest.json", {"run_id": run_id, "step": position.step, "files": files,
                                              "tensors": dict(sorted(shapes.items()))})
    if final.exists():  # written before by an attempt that died, or replayed after a fall-back to an older one
        shutil.rmtree(final)
    temporary.rename(final)
    _sync_folder(final.parent)


def _write_json(file, value):
    with open(file, "w") as handle:
        json.dump(value, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())


def _sync_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _file_facts(file, sync=False):
    digest = xxhash.xxh3_128()
    with open(file, "rb") as handle:
        if sync:
            os.fsync(handle.fileno())
        while block := handle.read(1 << 22):
            digest.update(block)
    return {"bytes": file.stat().st_size, "xxh3_128": digest.hexdigest()}


def fault_of(path: Path, run_id: str) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if manifest["run_id"] != run_id:
            return "it belongs to another run"
        for name, facts in manifest["files"].items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if _file_facts(path / name) != facts:
                return f"{name} is not what was written"
        json.loads((path / "trainer.json").read_text())
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest or trainer.json cannot be read ({error})"
    return None


def _run_id(path):
    try:
        return json.loads((path / "manifest.json").read_text())["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
