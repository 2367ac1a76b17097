"""Runs that are told to stop, lose a rank, or hang: how they end, and that what they go on to learn is the same to the byte."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from kill import ROOT, command, descendants, finish, wait_for, weights
from tiny import config_for, go_to_newest, make_chat_model, make_chats, open_tiny, whole_weights

from tonnage.errors import EXIT_STOPPED_RESUMABLE, ConfigError
from tonnage.runtime import runs
from tonnage.runtime.agreement import agree
from tonnage.runtime.runs import read_status
from tonnage.runtime.watchdog import beat, first_step_done, last_collective, read_places, watching
from tonnage.train import checkpoint, loop

# ---- in the middle of a window -----------------------------------------------------------------------------------

ASKS_A_WINDOW = 4  # 7 rows on 2 ranks, 1 a micro-batch


def states(engine):
    found = whole_weights(engine)
    for name, parameter in engine.trained():
        found |= {f"{name}|{key}": value.clone() for key, value in engine.whole_states(parameter)}
    return found


def train_until(folder, strategy, adapter, run_folder, stop_at):
    """Train, told to stop at the `stop_at`-th question (rank 1 alone hears it); (outcome, step, questions, states)."""
    config = config_for(strategy, f"adapter={adapter}", "batch.micro_rows=1", "train.epochs=2", "checkpoint.every_steps=null")
    s = open_tiny(config, folder, run_folder=Path(run_folder))
    if go_to_newest(s, Path(run_folder) / "checkpoints"):
        s.last_saved = s.position.step
    asked = []

    def answer(look):
        asked.append(look)
        return signal.SIGTERM if len(asked) == stop_at and s.rank == 1 else 0

    s.stop = SimpleNamespace(asked=answer, reason=lambda number: signal.Signals(number).name)
    outcome = loop.train(s)
    found = outcome, s.position.step, len(asked), s.stopped_by, states(s.engine)
    s.engine.close()
    return found


@pytest.mark.parametrize("strategy, adapter", [
    ("fsdp", "lora"), ("zero2", "full"),
    *(pytest.param(*cell, marks=pytest.mark.slow) for cell in [
        ("zero3", "lora"), ("fsdp", "full"), ("zero2", "lora"), ("zero3", "full"), ("ddp", "lora"), ("zero0", "full"), ("zero1", "full")])])
def test_a_window_that_was_cut_short_is_done_again(pools, tiny_folder, tmp_path, strategy, adapter):
    for name in ("whole", "stopped"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    expected = pools(2).run(train_until, tiny_folder, strategy, adapter, str(tmp_path / "whole"), 0)[0][-1]
    at = ASKS_A_WINDOW + 3  # behind the second of four micro-batches of window 2
    ends = pools(2).run(train_until, tiny_folder, strategy, adapter, str(tmp_path / "stopped"), at)
    assert [end[:4] for end in ends] == [("stopped", 1, at, "SIGTERM")] * 2  # at the same place on both ranks
    assert (tmp_path / "stopped" / "checkpoints" / "step-00000001" / "manifest.json").is_file()
    outcome, step, _, _, found = pools(2).run(train_until, tiny_folder, strategy, adapter, str(tmp_path / "stopped"), 0)[0]
    assert (outcome, step) == ("done", 6)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# ---- what ranks agree on -----------------------------------------------------------------------------------------

def agree_as(config_hashes):
    try:
        agree(config_hashes[dist.get_rank()], dist.group.WORLD)
    except ConfigError as error:
        return str(error)


def test_ranks_that_differ_are_named_before_anything_is_loaded(pools):
    assert pools(2).run(agree_as, ["a", "a"]) == [None, None]
    for said in pools(2).run(agree_as, ["a", "b"]):
        assert "rank 1 (" in said and "config is b, elsewhere a" in said


# ---- a rank that stays where it is -------------------------------------------------------------------------------

def wait_in_a_collective(run_folder):
    """Rank 1 comes a second late to the second of two collectives; what each wrote of where it was meanwhile."""
    from tonnage.runtime.watchdog import write_place

    with watching(Path(run_folder), dist.get_rank(), 2, 600.0, lambda: None):
        first_step_done()
        dist.barrier()
        beat("the update of step 7")
        work = None
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            time.sleep(0.5)
        else:
            time.sleep(0.3)  # the recorder lags behind a little
        write_place(Path(run_folder), dist.get_rank(), 1.0, last_collective())
        if dist.get_rank() == 1:
            time.sleep(1.0)
            work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()
        dist.barrier()
    return read_places(Path(run_folder), 2, 60.0)


def test_the_flight_recorder_tells_who_has_not_entered_a_collective(pools, tmp_path):
    (tmp_path / "logs").mkdir()
    ahead, behind = pools(2).run(wait_in_a_collective, str(tmp_path))[0]
    assert ahead["number"] == behind["number"] and ahead["where"] == "the update of step 7"
    assert ahead["collective"]["id"] == behind["collective"]["id"] + 1
    assert "all_reduce" in ahead["collective"]["name"] and ahead["collective"]["pending"]
    assert not behind["collective"]["pending"]


# ---- whole runs --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guard")
    make_chat_model(folder / "model")
    make_chats(folder / "chats.jsonl", 32)
    return folder


def words(place, name, *more, strategy="fsdp"):
    """A run of 48 steps of 4 micro-batches on 2 ranks."""
    return ["model=custom", f"model.path={place}/model", "data=files", f"data.path={place}/chats.jsonl", "gpus=2", "device=cpu",
            f"strategy={strategy}", "adapter=full", "precision=fp32", "batch.global_rows=8", "batch.micro_rows=1",
            "data.seq_tokens=64", "train.epochs=12", "tracker=none", "optimizer.learning_rate=1e-3", "checkpoint.every_steps=2",
            f"data.cache={place}/cache", f"run.root={place}", f"run.name={name}", *more]


def begin(*arguments):
    return subprocess.Popen(list(arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def at_step(run, process, step, attempt=1):
    """Wait for that step of that attempt; metrics.jsonl has each, status.json one a second."""
    def reached():
        text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
        lines = text[:text.rfind("\n") + 1].splitlines()[-3:]  # the last may be half written
        taken = [line for line in map(json.loads, lines) if line["attempt"] == attempt]
        return process.poll() is not None or (bool(taken) and taken[-1]["step"] >= step)
    wait_for(reached, 120)


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def whole(place):
    """`whole(strategy)`: the states of a run that nothing happened to."""
    kept = {}

    def states_of(strategy):
        if strategy not in kept:
            finish(command(*words(place, f"whole-{strategy}", strategy=strategy)))
            kept[strategy] = weights(place / f"whole-{strategy}")
        return kept[strategy]
    return states_of


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3"])
def test_a_killed_rank_is_replaced_and_a_stop_file_ends_the_run_until_it_goes_on(place, whole, strategy):
    run = place / f"guarded-{strategy}"
    process = begin(*command(*words(place, run.name, "cluster.max_restarts=1", strategy=strategy)))
    at_step(run, process, 3)
    ranks = [pid for pid in descendants(process.pid) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(ranks[-1], signal.SIGKILL)
    wait_for(lambda: (run / "attempts" / "002.yaml").exists() or process.poll() is not None, 60)
    restart = yaml.safe_load((run / "attempts" / "002.yaml").read_text())["restart"]
    assert restart["number"] == 1 and restart["reason"].endswith("was ended by SIGKILL")
    at_step(run, process, restart["from_step"] + 1, attempt=2)
    (run / "stop").write_text("preempted\n")
    _, errors = process.communicate(timeout=120)
    status = read_status(run)
    assert process.returncode == EXIT_STOPPED_RESUMABLE, errors
    assert (status["state"], status["reason"], status["resumable"]) == ("stopped", "preempted", True)
    assert not (run / "stop").exists() and (run / "checkpoints" / f"step-{status['step']:08d}").is_dir()
    finish(command(f"run={run}"))
    assert read_status(run)["state"] == "done" and same(weights(run), whole(strategy))


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ends_the_run(place):
    run = place / "hanging"
    process = begin(sys.executable, str(ROOT / "tests" / "dist" / "hanging.py"), *words(place, run.name, "cluster.hang_s=4"))
    at_step(run, process, 2)
    stuck = time.monotonic()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert time.monotonic() - stuck < 25
    status = read_status(run)
    assert status["state"] == "failed" and status["cause"] == "hang" and status["exit_code"] == 1
    message = status["message"]
    assert "cluster.hang_s=4" in message and "rank 1 (" in message and "is behind, in the data of step 3" in message
    assert "rank 0 waits in" in message
    assert "hanging.py" in (run / "logs" / "rank-1.stack").read_text()


@pytest.mark.slow
def test_a_stop_during_the_first_evaluation_or_the_start_ends_it(place):
    for name, when in (("early", "config.yaml"), ("evaluating", "logs/rank-0.place")):
        run = place / name
        process = begin(*command(*words(place, name, f"eval.path={place}/chats.jsonl")))
        wait_for(lambda: (run / when).exists(), 120)  # noqa: B023
        runs.want_stop(run, "time limit")
        _, errors = process.communicate(timeout=60)
        assert process.returncode == EXIT_STOPPED_RESUMABLE, errors
        status = read_status(run)
        assert (status["state"], status["reason"]) == ("stopped", "time limit") and not (run / "stop").exists()
        shutil.rmtree(run)
