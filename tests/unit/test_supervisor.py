"""Starting ranks, how their end is read, and what is started again."""

import signal
import subprocess
import sys
import time

import pytest

from tonnage.errors import EXIT_DOES_NOT_FIT, EXIT_STOPPED_RESUMABLE, EXIT_USER_ERROR
from tonnage.runtime import runs
from tonnage.runtime.supervisor import Ended, ended_by, restart_facts, start_command, start_ranks, supervise

# ---- starting ranks

SCRIPT = """
import os, sys, time
rank = int(os.environ["RANK"])
folder = os.environ["TONNAGE_RUN_FOLDER"]
told = [os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")]
open(f"{folder}/rank-{rank}", "w").write(" ".join(told + sys.argv[1:]))
if sys.argv[1] == "hang" and rank != int(sys.argv[3]):
    time.sleep(60)
if sys.argv[2] == "-9":
    os.kill(os.getpid(), 9)
sys.exit(int(sys.argv[2]))
"""


def told_by(folder):
    return {"TONNAGE_RUN_FOLDER": str(folder)}


@pytest.fixture
def script(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


@pytest.fixture(autouse=True)
def signals_put_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("code", [0, 75])
def test_ranks_are_started_with_their_places_on_a_free_port(script, tmp_path, code):
    assert start_ranks(script, ["go", str(code)], 2, tmp_path, told_by(tmp_path)).code == code
    told = [(tmp_path / f"rank-{rank}").read_text().split() for rank in (0, 1)]
    assert [words[:3] for words in told] == [["2", "0", "2"], ["2", "1", "2"]]
    assert told[0][3] == told[1][3] and all(words[4:] == ["go", str(code)] for words in told)


@pytest.mark.parametrize("failing, code, expected", [(1, 3, 3), (0, -9, 137)])
def test_whichever_rank_fails_ends_the_others_and_its_code_is_returned(script, tmp_path, failing, code, expected):
    started = time.monotonic()
    assert start_ranks(script, ["hang", str(code), str(failing)], 2, tmp_path, told_by(tmp_path)).code == expected
    assert time.monotonic() - started < 20  # the other would sleep for 60 s


# ---- how an end is read

@pytest.mark.parametrize("code, asked, memory_kill, status, expected, words, lost", [
    (-9, False, False, {}, 137, "rank 1 was ended by SIGKILL", True),
    (-9, False, True, {}, 137, "the kernel killed it because this machine's memory was used up", True),
    (-11, False, True, {}, 139, "rank 1 was ended by SIGSEGV", True),
    (-15, True, False, {}, EXIT_STOPPED_RESUMABLE, "stopped on request", False),
    (-6, False, False, {"state": "done"}, 134, "SIGABRT", False),
    (1, False, False, {"state": "failed", "cause": "connection", "message": "closed"}, 1, "closed", True),
    (1, False, False, {"state": "failed", "cause": "hang", "message": "rank 3"}, 1, "rank 3", True),
    (1, False, False, {"state": "failed", "cause": "fault", "message": "ours"}, 1, "", False),
    (1, False, False, {"state": "running"}, 1, "rank 1 ended with exit code 1", False),
    (EXIT_USER_ERROR, False, False, {"state": "failed", "cause": "connection"}, EXIT_USER_ERROR, "", False),
    (EXIT_DOES_NOT_FIT, False, False, {"state": "failed"}, EXIT_DOES_NOT_FIT, "", False),
    (EXIT_STOPPED_RESUMABLE, False, False, {"state": "stopped"}, EXIT_STOPPED_RESUMABLE, "", False)])
def test_only_a_lost_rank_is_worth_another_start(code, asked, memory_kill, status, expected, words, lost):
    ended = ended_by(1, code, asked, memory_kill, status)
    assert (ended.code, ended.lost) == (expected, lost) and words in ended.reason


# ---- starting again

@pytest.fixture
def folder(tmp_path):
    folder = runs.create_run(str(tmp_path), "run", "label", {})
    runs.write_status(folder, "running", "starting")
    return folder


def play(folder, *script, max_restarts):
    """Supervise starts that end as `script` says, each (how it ended, step of the checkpoint it leaves or None)."""
    seen, left = [], list(script)

    def start(restart):
        seen.append(restart)
        ended, step = left.pop(0)
        runs.write_status(folder, "done" if ended.code == 0 else "running", "as played")
        if step is not None:
            (folder / "checkpoints" / f"step-{step:08d}").mkdir()
            (folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{}")
        return ended
    return supervise(start, folder, max_restarts), seen


KILLED, DONE = Ended(137, "rank 1 was ended by SIGKILL", lost=True), Ended(0)


def test_a_lost_rank_is_started_again_as_often_as_allowed(folder, capsys):
    code, seen = play(folder, (KILLED, 2), (KILLED, 4), (DONE, 6), max_restarts=2)
    assert code == 0 and runs.read_status(folder)["state"] == "done"
    assert [one and (one["number"], one["from_step"], one["reason"]) for one in seen] == [
        None, (1, 2, KILLED.reason), (2, 4, KILLED.reason)]
    assert "restart 2 of 2, from step 4" in capsys.readouterr().err


def test_the_default_is_not_to_start_again(folder, capsys):
    code, seen = play(folder, (KILLED, 2), max_restarts=0)
    assert code == 137 and seen == [None] and "error: rank 1 was ended by SIGKILL" in capsys.readouterr().err
    status = runs.read_status(folder)
    assert status["state"] == "failed" and status["exit_code"] == 137 and "go on with run=" in status["message"]
    assert status["cause"] == "lost"  # by which a batch script knows that another job may go on


def test_two_starts_without_a_new_checkpoint_are_the_end(folder, capsys):
    code, seen = play(folder, (KILLED, 2), (KILLED, None), (KILLED, None), max_restarts=9)
    assert code == 137 and len(seen) == 3
    assert "not started again: 2 starts in a row ended before a new checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("code", [EXIT_USER_ERROR, EXIT_DOES_NOT_FIT, EXIT_STOPPED_RESUMABLE, 1])
def test_what_would_end_the_same_way_is_not_started_again(folder, code):
    assert play(folder, (Ended(code), 2), max_restarts=9) == (code, [None])


def test_a_stop_request_goes_before_a_restart(folder):
    runs.want_stop(folder, "preempted\nand more")
    assert play(folder, (KILLED, 2), max_restarts=9) == (EXIT_STOPPED_RESUMABLE, [None])
    status = runs.read_status(folder)
    assert (status["state"], status["reason"], status["resumable"]) == ("stopped", "preempted", True)
    assert runs.stop_wanted(folder) is None


# ---- a command that starts ranks elsewhere

STATUS = """
import json, os, sys
from tonnage.runtime import runs
from tonnage.runtime.supervisor import restart_facts
from pathlib import Path
folder = Path(sys.argv[1])
runs.write_status(folder, sys.argv[2], "message", cause=sys.argv[3], restart=restart_facts(folder))
sys.exit(1)  # as torchrun does
"""


@pytest.mark.parametrize("state, cause, expected", [
    ("stopped", "", Ended(EXIT_STOPPED_RESUMABLE)), ("failed", "fault", Ended(1, "message")),
    ("failed", "hang", Ended(1, "message", lost=True)),
    ("running", "", Ended(1, "the ranks ended without a word (exit code 1)", lost=True))])
def test_a_launcher_that_returns_1_for_all_is_read_by_status(folder, state, cause, expected):
    ended = start_command([sys.executable, "-c", STATUS, str(folder), state, cause], folder, {"number": 3})
    assert ended == expected and runs.read_status(folder)["restart"] == [True, {"number": 3}]


@pytest.mark.parametrize("state", ["stopped", "failed", "running"])
def test_what_an_earlier_start_has_said_is_not_taken_for_this_one(folder, state):
    runs.write_status(folder, state, "of yesterday", cause="connection")
    assert start_command(["false"], folder, None) == Ended(1, "false ended with exit code 1 before any rank ran")


def test_a_restart_is_told_to_the_rank_that_begins_and_to_nobody_later(folder):
    start_command(["sh", "-c", f"cp {folder}/restart {folder}/told"], folder, None)
    assert (folder / "told").read_text() == "null" and restart_facts(folder) == (False, None)
    (folder / "told").rename(folder / "restart")
    assert [restart_facts(folder), restart_facts(folder)] == [(True, None), (False, None)]


def test_a_signal_to_the_batch_script_becomes_a_stop_request(folder):
    words = [sys.executable, "-m", "tonnage.runtime.supervisor", f"run={folder}", "restarts=3", "--", "sh", "-c",
             f"touch {folder}/status.json {folder}/begun; until test -e {folder}/stop; do sleep 0.1; done; exit 1"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (folder / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED_RESUMABLE, errors
    assert runs.read_status(folder)["reason"] == "SIGTERM"
