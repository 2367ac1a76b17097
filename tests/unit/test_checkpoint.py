"""Checkpoints on one rank with an engine of plain tensors: what is written is read, what is broken is passed over."""

import errno
import json
import os
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file

from tonnage.data.windows import Cursor
from tonnage.errors import CheckpointError
from tonnage.runtime.logs import LOG
from tonnage.train import checkpoint
from tonnage.train.checkpoint import Position, newest_complete, read_position, require_space, rotate

RUN = "run-a"


class PlainEngine:
    """Whole tensors and AdamW-like states in dicts."""

    def __init__(self, seed=0, **shapes):
        shapes = shapes or {"layer.lora_A.weight": (2, 3), "layer.lora_B.weight": (4, 2), "norm": (5,)}
        generator = torch.Generator().manual_seed(seed)
        self.parameters = {name: torch.nn.Parameter(torch.randn(shape, generator=generator))
                           for name, shape in shapes.items()}
        self.states = {id(p): {key: torch.randn(p.shape, generator=generator) for key in ("exp_avg", "exp_avg_sq")}
                       for p in self.parameters.values()}
        self.num_steps, self.model = None, torch.nn.Module()

    def trained(self):
        return iter(self.parameters.items())

    def whole(self, parameter):
        return parameter.detach()

    def fill(self, parameter, tensor):
        parameter.data.copy_(tensor)

    def whole_states(self, parameter):
        return iter(self.states[id(parameter)].items())

    def fill_states(self, parameter, states, num_steps):
        self.states[id(parameter)], self.num_steps = states, num_steps


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.fixture
def said():
    """The warnings that were logged."""
    import logging

    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    LOG.addHandler(handler)
    yield lines
    LOG.removeHandler(handler)


def position(step):
    return Position(step=step, num_updates=step, cursor=Cursor(epoch=1, row=7, window=step), label_tokens=100 * step,
                    best_metric=2.5, best_step=3)


def save(folder, step, engine=None, run_id=RUN, state=None):
    return checkpoint.save(folder, engine or PlainEngine(), position(step), run_id, state or {"fingerprint": "f"},
                           dist.group.WORLD)


def steps(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def everything(folder):
    """Every file below `folder` with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- there and back

def test_weights_states_and_position_come_back_to_the_bit(folder):
    engine, other = PlainEngine(1), PlainEngine(2)
    path = save(folder, 5, engine)
    assert path == folder / "step-00000005" == newest_complete(folder, RUN)
    assert read_position(path) == (position(5), {"fingerprint": "f"})
    checkpoint.load(path, other, 5)
    assert other.num_steps == 5
    for name, parameter in engine.trained():
        assert torch.equal(other.parameters[name], parameter)
        for key, value in engine.whole_states(parameter):
            assert torch.equal(other.states[id(other.parameters[name])][key], value)


def test_a_checkpoint_is_readable_without_us(folder):
    engine = PlainEngine(1)
    path = save(folder, 5, engine)
    tensors = load_file(path / "trained-r000-000.safetensors")
    assert set(tensors) == {name + suffix for name in engine.parameters for suffix in ("", "|exp_avg", "|exp_avg_sq")}
    assert torch.equal(tensors["norm"], engine.parameters["norm"])
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["run_id"], manifest["step"]) == (RUN, 5)
    assert manifest["files"].keys() == {file.name for file in path.iterdir()} - {"manifest.json"}


def test_large_checkpoints_are_written_in_several_files(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "SAVE_FILE_BYTES", 50)
    engine, other = PlainEngine(1), PlainEngine(2)
    path = save(folder, 5, engine)
    assert len(list(path.glob("trained-*"))) == 3
    checkpoint.load(path, other, 5)
    assert all(torch.equal(other.parameters[name], p) for name, p in engine.trained())


def test_a_fork_takes_the_weights_and_leaves_the_states(folder):
    path, other = save(folder, 5, PlainEngine(1)), PlainEngine(2)
    before = {key: dict(value) for key, value in other.states.items()}
    checkpoint.load(path, other, 0, with_states=False)
    assert torch.equal(other.parameters["norm"], PlainEngine(1).parameters["norm"])
    assert other.num_steps is None
    assert all(torch.equal(value, before[key][name]) for key, states in other.states.items()
               for name, value in states.items())


def test_the_state_of_a_stream_comes_back(folder):
    state = {"rows": np.arange(6).reshape(2, 3), "shard": 3, "name": "x"}
    found = read_position(save(folder, 5, state=state))[1]
    assert found.keys() == state.keys() and (found["rows"] == state["rows"]).all()
    assert (found["shard"], found["name"]) == (3, "x")


@pytest.mark.parametrize("shapes, named", [({"other": (2,)}, "other is missing there and \\[2\\]"),
                                           ({"norm": (6,)}, "norm is \\[5\\] there and \\[6\\]")])
def test_a_checkpoint_of_another_model_is_refused(folder, shapes, named):
    with pytest.raises(CheckpointError, match=named):
        checkpoint.load(save(folder, 5), PlainEngine(**shapes), 5)


def test_a_step_that_is_saved_again_is_replaced(folder):
    save(folder, 5, PlainEngine(1))
    save(folder, 5, PlainEngine(2))
    engine = PlainEngine(3)
    checkpoint.load(newest_complete(folder, RUN), engine, 5)
    assert steps(folder) == [5] and torch.equal(engine.parameters["norm"], PlainEngine(2).parameters["norm"])


# ---- which one is read

def test_the_newest_is_the_one_with_the_highest_step_whatever_the_clock_says(folder):
    for step in (1000, 99, 900):
        path = save(folder, step)
        os.utime(path, (2000 - step, 2000 - step))
    assert newest_complete(folder, RUN).name == "step-00001000"


def test_no_checkpoint_is_none(folder):
    assert newest_complete(folder, RUN) is None and newest_complete(folder / "missing", RUN) is None


def truncated(path):
    file = path / "trained-r000-000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def one_bit(path):
    file = path / "trained-r000-000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def rewritten(name, text):
    return lambda path: (path / name).write_text(text)


def without(name):
    return lambda path: (path / name).unlink()


@pytest.mark.parametrize("damage, named", [
    (truncated, "trained-r000-000.safetensors is not what was written"),
    (one_bit, "trained-r000-000.safetensors is not what was written"),
    (without("trained-r000-000.safetensors"), "trained-r000-000.safetensors is missing"),
    (without("trainer.json"), "trainer.json is missing"), (rewritten("trainer.json", "{"), "trainer.json is not what"),
    (without("manifest.json"), "manifest.json is missing"), (rewritten("manifest.json", ""), "cannot be read"),
    (rewritten("manifest.json", "\0" * 64), "cannot be read"), (rewritten("manifest.json", "{}"), "cannot be read"),
    (rewritten("manifest.json", "[1]"), "cannot be read"), (rewritten("manifest.json", "null"), "cannot be read"),
    (rewritten("manifest.json", f'{{"run_id": "{RUN}", "files": []}}'), "cannot be read"),
    (shutil.rmtree, None)])
def test_what_is_broken_is_passed_over_with_a_word(folder, said, damage, named):
    save(folder, 5)
    path = save(folder, 10)
    damage(path)
    assert newest_complete(folder, RUN) == folder / "step-00000005"
    assert [named in line and str(path) in line and "passed over" in line for line in said] == [True] * (named is not None)


def test_a_checkpoint_of_another_run_is_not_read(folder, said):
    save(folder, 5)
    save(folder, 500, run_id="run-b")
    assert newest_complete(folder, RUN).name == "step-00000005" and "belongs to another run" in said[0]


# ---- which are kept

def test_rotation_keeps_the_highest_steps_whatever_the_clock_says(folder):
    for step in (900, 950, 1000, 1050, 1100):
        os.utime(save(folder, step), (2000 - step, 2000 - step))
    rotate(folder / "step-00001100", RUN, 3, None, None)
    assert steps(folder) == [1000, 1050, 1100]
    rotate(folder / "step-00001100", RUN, 3, None, None)
    assert steps(folder) == [1000, 1050, 1100]


def test_the_best_and_every_nth_are_kept_too(folder):
    for step in range(1, 11):
        saved = save(folder, step)
    rotate(saved, RUN, 1, 3, 4)
    assert steps(folder) == [3, 4, 8, 10]


def test_checkpoints_of_another_run_are_neither_removed_nor_counted(folder):
    for step in (5, 6, 500, 600):
        save(folder, step, run_id="run-b")
    (folder / "step-00000007").mkdir()  # nobody's
    for step in (11, 12, 13):
        saved = save(folder, step)
        rotate(saved, RUN, 1, None, None)
        assert steps(folder) == [5, 6, 7, step, 500, 600]


def test_the_one_just_written_stays_where_a_broken_one_has_a_higher_step(folder):
    save(folder, 20)
    truncated(save(folder, 30))
    # the run went on from 20 and was stopped at 25
    rotate(save(folder, 25), RUN, 1, None, None)
    assert newest_complete(folder, RUN) == folder / "step-00000025" and steps(folder) == [25, 30]


# ---- what cannot be written

def disk_full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "trained-r000-000.safetensors")


def disk_full_by_safetensors(*_, **__):
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("name", ["save_file", "save_arrays", "_write_json", "_file_facts"])
@pytest.mark.parametrize("failure", [disk_full, disk_full_by_safetensors])
def test_a_full_disk_leaves_the_former_checkpoint_and_everything_else(folder, monkeypatch, name, failure):
    save(folder, 5)
    save(folder, 3, run_id="run-b")
    before = everything(folder)
    state = {"rows": np.arange(3)}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, name, failure)
        with pytest.raises(CheckpointError, match="No space left on device.*earlier checkpoints are untouched"):
            save(folder, 10, state=state)
    after = everything(folder)
    assert {file: after[file] for file in before} == before and steps(folder) == [3, 5]
    assert all(file.startswith(".writing-") for file in after.keys() - before.keys())
    assert newest_complete(folder, RUN).name == "step-00000005"
    save(folder, 10, state=state)  # and with room again it goes on
    assert newest_complete(folder, RUN).name == "step-00000010"


def test_leftovers_of_a_save_that_died_are_removed_at_the_next(folder):
    for name in (".writing-step-00000004", ".writing-step-00000005"):
        (folder / name).mkdir()
        (folder / name / "trained-r000-000.safetensors").write_text("half")
    save(folder, 5)
    assert [path.name for path in folder.iterdir()] == ["step-00000005"]
    assert newest_complete(folder, RUN) is not None


def test_a_save_that_dies_before_the_rename_leaves_no_checkpoint(folder, monkeypatch):
    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed
    save(folder, 5)
    monkeypatch.setattr(type(folder), "rename", die)
    with pytest.raises(Killed):
        save(folder, 10)
    assert newest_complete(folder, RUN).name == "step-00000005"


def test_an_empty_tensor_is_refused(folder):
    engine = PlainEngine()
    engine.whole = lambda parameter: torch.empty(0)
    with pytest.raises(CheckpointError, match=r"layer.lora_A.weight: gathered as \[0\], expected \[2, 3\]"):
        save(folder, 5, engine)
    assert steps(folder) == []
    with pytest.raises(CheckpointError, match=r"w: gathered as \[0, 3\]"):
        save(folder, 5, PlainEngine(w=(0, 3)))


def test_a_part_of_a_tensor_is_refused(folder):
    engine = PlainEngine()
    engine.whole = lambda parameter: parameter.detach()[:1]
    with pytest.raises(CheckpointError, match=r"layer.lora_A.weight: gathered as \[1, 3\], expected \[2, 3\]"):
        save(folder, 5, engine)


def test_an_adapter_that_learnt_nothing_is_refused_but_for_the_first_checkpoint(folder):
    engine = PlainEngine()
    engine.parameters["layer.lora_B.weight"].data.zero_()
    save(folder, 0, engine)  # before the first update it is zero by construction
    with pytest.raises(CheckpointError, match="layer.lora_B.weight: all zero after 5 updates"):
        save(folder, 5, engine)
    engine.parameters["layer.lora_B.weight"].data[3, 1] = 1e-9
    save(folder, 5, engine)
    assert steps(folder) == [0, 5]


# ---- room on the disk

def test_the_size_of_a_checkpoint_is_fp32_weights_and_states(folder):
    engine = PlainEngine()
    assert checkpoint.checkpoint_bytes(engine, 2) == 4 * 3 * (6 + 8 + 5)
    assert checkpoint.checkpoint_bytes(engine, 1) == 4 * 2 * (6 + 8 + 5)
    file = save(folder, 5, engine) / "trained-r000-000.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size - header == checkpoint.checkpoint_bytes(engine, 2)


@pytest.mark.parametrize("free, present, fits", [(30, 0, True), (29, 0, False), (19, 11, True), (18, 11, False)])
def test_room_for_one_more_than_are_kept_is_wanted(folder, monkeypatch, free, present, fits):
    gib = 2**30
    (folder / "step-00000001").mkdir()
    with open(folder / "step-00000001" / "file", "wb") as file:
        file.truncate(present * gib)  # sparse
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100 * gib, 0, free * gib))
    if fits:
        require_space(folder, 10 * gib, 2)
        return
    with pytest.raises(CheckpointError) as error:
        require_space(folder, 10 * gib, 2)
    assert all(part in str(error.value) for part in ("checkpoint.keep=2", "3 checkpoints of 10.000 GiB", "run.root",
                                                     f"{free}.000 GiB free", str(folder)))
