"""Starts the ranks of a run, and starts them again from the newest checkpoint where one was lost.

A rank is lost when a signal ends it, the kernel for want of memory, a connection, a GPU fault, or a hang. What the user
has to mend (2), what does not fit (3), a stop (75) and a fault of ours would be the same the next time: the end.

It stands above all ranks of a run, of all nodes, because they start again together. `python launch/train.py` is such a
place on one machine. On several nodes it is the batch script, around torchrun, whose own --max-restarts stays 0: it knows
neither exit codes nor progress.

    python -m tonnage.runtime.supervisor run=FOLDER restarts=2 -- srun torchrun ... launch/train.py run=FOLDER
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from tonnage.errors import EXIT_DOES_NOT_FIT, EXIT_DONE, EXIT_STOPPED_RESUMABLE, EXIT_USER_ERROR, ConfigError
from tonnage.runtime import runs
from tonnage.runtime.entry import guarded, read_options

RESTART_FILE = "restart"  # not a variable: over ssh launchers pass on few
END_AFTER_S, STOP_AFTER_S = 3.0, 60.0  # for the other ranks, once one has failed, or stopped as asked
LOST = ("connection", "device", "hang", "lost")  # causes in status.json that starting again may cure
MAX_IDLE_STARTS = 2  # in a row, without a new checkpoint: the third would end as they did


@dataclass(frozen=True)
class Ended:
    """How the ranks of a run have ended.

    Attributes:
        code: exit code of the run.
        reason: what happened, for a person; empty where status.json says it.
        lost: starting again may help.
    """

    code: int
    reason: str = ""
    lost: bool = False


def supervise(start: Callable[[dict | None], Ended], folder: Path, max_restarts: int) -> int:
    """Run `start`, and again while its ranks are lost, at most `max_restarts` times more; returns the exit code.

    Args:
        start: takes None, or the facts of a restart (number, reason) for attempts/NNN.yaml. It may start the run with other
            keys than before.
    """
    restart, idle = None, 0
    for number in count(1):
        before = runs.saved_step(folder)
        ended = start(restart)
        idle = 0 if runs.saved_step(folder) > before else idle + 1
        _note(folder, ended)
        wanted = runs.stop_wanted(folder) if ended.lost else None
        if wanted is not None:  # whoever asked has what he wanted; steps behind the checkpoint are done again
            runs.settle(folder, "stopped", f"stopped ({wanted}): {ended.reason}; go on with run={folder}", reason=wanted,
                        exit_code=EXIT_STOPPED_RESUMABLE)
            runs.forget_stop(folder)
            return EXIT_STOPPED_RESUMABLE
        if not ended.lost or number > max_restarts:
            return _conclude(folder, ended)
        if idle == MAX_IDLE_STARTS:
            reason = f"{ended.reason}; not started again: {idle} starts in a row ended before a new checkpoint"
            return _conclude(folder, replace(ended, reason=reason))
        step = max(0, runs.saved_step(folder))
        restart = {"number": number, "of": max_restarts, "reason": ended.reason, "from_step": step}
        print(f"{ended.reason}; restart {number} of {max_restarts}, from step {step}", file=sys.stderr, flush=True)


def start_ranks(script: str, argv: list[str], gpus: int, run_folder: Path, env: dict[str, str]) -> Ended:
    """Run `script argv` as `gpus` ranks on this machine until all have ended.

    Rank 0 keeps the console; the others write to logs/ of the run folder. The first rank that fails ends the rest.
    SIGINT and SIGTERM are passed on to every rank.
    """
    import torch.distributed as dist

    # the store lives here, so that its port cannot be taken between choosing and using it
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    signals, kills = [], _memory_kills()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: signals.append(received))
    ranks = [_start_rank(script, argv, rank, gpus, store.port, run_folder, env) for rank in range(gpus)]
    try:
        first, asked = _watch(ranks, signals)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
    if first is None:
        return Ended(EXIT_DONE)
    return ended_by(first, ranks[first].returncode, asked, _memory_kills() > kills, runs.read_status(run_folder))


def ended_by(rank: int, code: int, asked: bool, memory_kill: bool, status: dict) -> Ended:
    """What it means that `rank` was the first to end, with `code` (below 0: minus the signal).

    Args:
        asked: this process had been told to stop before.
        memory_kill: the kernel has killed a process of this machine meanwhile.
    """
    if code < 0:
        reason = f"rank {rank} was ended by {signal.Signals(-code).name}"
        if asked:  # while it was still importing, or by whoever could not wait
            return Ended(EXIT_STOPPED_RESUMABLE, f"stopped on request: {reason}")
        if memory_kill and -code == signal.SIGKILL:
            reason += (": the kernel killed it because this machine's memory was used up (not the GPU's); use fewer "
                       "gpus a machine, strategy.offload=none, or data.streaming=true")
        return Ended(128 - code, reason, lost=status.get("state") != "done")
    if code == 1 and not asked and status.get("cause") in LOST:
        return Ended(code, status["message"], lost=True)
    if code in (EXIT_STOPPED_RESUMABLE, EXIT_USER_ERROR, EXIT_DOES_NOT_FIT) or status.get("state") == "failed":
        return Ended(code)
    return Ended(code, f"rank {rank} ended with exit code {code}")


def _start_rank(script, argv, rank, gpus, port, run_folder, more):
    env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(gpus),
                        "LOCAL_WORLD_SIZE": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"} | more
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // gpus)))
    output = None if rank == 0 else open(run_folder / "logs" / f"rank-{rank}.out", "ab")
    return subprocess.Popen([sys.executable, script, *argv], env=env, stdout=output, stderr=output,
                            stdin=subprocess.DEVNULL, start_new_session=True)


def _watch(ranks, signals):
    """Wait for the ranks; when one fails, give the others a moment to end by themselves, then stop them.

    Returns (the rank whose end says what happened, None where none failed; whether this process was told to stop).
    """
    deadline, first, asked = None, None, False
    while None in [process.poll() for process in ranks]:  # every rank is asked, the first that runs hides no other
        while signals:
            received, asked = signals.pop(0), True
            for process in ranks:
                if process.poll() is None:
                    process.send_signal(received)
        failed = [rank for rank, process in enumerate(ranks) if process.returncode]
        if failed and deadline is None:
            first = _most_telling(ranks, failed)
            code = ranks[first].returncode
            patience_s = 0.0 if code < 0 else STOP_AFTER_S if code == EXIT_STOPPED_RESUMABLE else END_AFTER_S
            deadline = time.monotonic() + patience_s
        if deadline is not None and time.monotonic() > deadline:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
        time.sleep(0.05)
    failed = [rank for rank, process in enumerate(ranks) if process.returncode]
    # a rank that has something to say may end behind those that lost their connection to it
    telling = [rank for rank in failed if ranks[rank].returncode in (EXIT_USER_ERROR, EXIT_DOES_NOT_FIT)]
    if telling or first is None:
        first = _most_telling(ranks, telling or failed) if failed else None
    return first, asked


def _most_telling(ranks, failed):
    """A rank that says what is to be mended, or was ended by a signal, tells more than those that lost the connection."""
    place = {EXIT_USER_ERROR: 0, EXIT_DOES_NOT_FIT: 1, EXIT_STOPPED_RESUMABLE: 2}
    return min(failed, key=lambda rank: place.get(ranks[rank].returncode, 3 + (ranks[rank].returncode > 0)))


def _memory_kills():
    """Processes that the kernel of this machine has killed for want of memory since it was started; 0 where unknown."""
    try:
        lines = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(lines.get("oom_kill", 0))
    except (OSError, ValueError):
        return 0


def _note(folder, ended):
    """Say in status.json how the run ended, where its ranks could not, or knew less: the others lost a connection."""
    state = runs.read_status(folder).get("state", "running")
    if ended.code == EXIT_STOPPED_RESUMABLE and state in ("running", "failed"):
        runs.settle(folder, "stopped", f"{ended.reason or 'stopped on request'}; go on with run={folder}",
                    exit_code=ended.code, reason=runs.stop_wanted(folder) or "signal")
        runs.forget_stop(folder)
    elif ended.lost and ended.code > 128 or ended.code not in (EXIT_DONE, EXIT_STOPPED_RESUMABLE) and state == "running":
        runs.settle(folder, "failed", f"{ended.reason}; go on with run={folder}", exit_code=ended.code,
                    **({"cause": "lost"} if ended.lost else {}))


def _conclude(folder, ended):
    """Tell the user how the run ended where its ranks could not; returns the exit code."""
    if ended.code in (EXIT_DONE, EXIT_STOPPED_RESUMABLE):
        return ended.code
    log = folder / "logs" / "rank-0.log"
    further = (f"no step was taken (log: {log}); start again, under the same run.name if you like"
               if runs.untrained(folder) else f"see {folder}/logs, then go on with run={os.path.relpath(folder)}")
    text = f"error: {ended.reason}" if ended.reason else runs.read_status(folder).get("message", "")
    print(f"{text}\n{further}", file=sys.stderr)
    return ended.code


def restart_facts(folder: Path) -> tuple[bool, dict | None]:
    """For rank 0: (whether a supervisor above the launcher makes this start, which restart it is, None for a first start).

    It is told once: what is started later without a supervisor must not hear it.
    """
    try:
        facts = json.loads((folder / RESTART_FILE).read_text())
    except FileNotFoundError:
        return False, None
    (folder / RESTART_FILE).unlink(missing_ok=True)
    return True, facts


def start_command(words: list[str], folder: Path, restart: dict | None) -> Ended:
    """Run a command that starts the ranks of `folder` on other machines; how it ended is read in status.json.

    SIGTERM and SIGINT become the run's stop request: passed on, they would reach launchers before ranks.
    """
    before = _status_print(folder)
    (folder / RESTART_FILE).write_text(json.dumps(restart))
    process = subprocess.Popen(words, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: runs.want_stop(folder, signal.Signals(received).name))
    code = process.wait()
    (folder / RESTART_FILE).unlink(missing_ok=True)
    if code == 0:
        return Ended(EXIT_DONE)
    own_code = code if code > 0 else 128 - code
    if _status_print(folder) == before:
        return Ended(own_code, f"{words[0]} ended with exit code {code} before any rank ran")
    status = runs.read_status(folder)
    if status["state"] == "stopped":
        return Ended(EXIT_STOPPED_RESUMABLE)
    if status["state"] == "failed":
        return Ended(status.get("exit_code", 1), status["message"], lost=status.get("cause") in LOST)
    return Ended(own_code, f"the ranks ended without a word (exit code {code})", lost=status["state"] == "running")


def _status_print(folder):
    """Changes whenever a rank writes status.json; clocks of other machines do not matter."""
    file = folder / "status.json"
    return (file.stat().st_mtime_ns, file.stat().st_ino) if file.is_file() else None


def main(argv: list[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    options, words = read_options(argv[:cut], {"run": None, "restarts": "0"}, {}), argv[cut + 1:]
    if options["run"] is None or not options["restarts"].isdigit() or not words:
        raise ConfigError("python -m tonnage.runtime.supervisor run=FOLDER restarts=N -- COMMAND: each must be given")
    folder = Path(options["run"]).resolve()
    runs.read_config(folder)
    runs.forget_stop(folder)  # one that is made from now on counts
    return supervise(lambda restart: start_command(words, folder, restart), folder, int(options["restarts"]))


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
