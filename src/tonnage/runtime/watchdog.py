"""Where each rank is, and the end of a run in which nothing moves any more.

The loop says what it is about to do, `beat(...)`; a thread of each rank writes that to logs/rank-N.place now and then. When
a rank stays in one place for longer than cluster.hang_s, every rank leaves its stack in logs/rank-N.stack and its last
collective, by torch's flight recorder, in logs/rank-N.place; then the run ends, naming the rank that is behind.
Source: torch/csrc/distributed/c10d/FlightRecorder.hpp of torch 2.13, which records gloo's collectives as well as NCCL's
"""

import faulthandler
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from tonnage.runtime import runs
from tonnage.runtime.ranks import RUN_VARIABLE

LOOK_EVERY_S = 10.0
SILENT_LOOKS = 4  # a rank that has not written its place for so many looks does not run at all

_number, _where, _counting = 0, "start-up", False


def beat(where: str) -> None:
    """This rank is about to do `where`. Every rank does the same things in the same order, so numbers can be compared."""
    global _number, _where
    _number, _where = _number + 1, where


def first_step_done() -> None:
    """From now on a phase may take cluster.hang_s. Before, models are loaded, data tokenised, kernels compiled."""
    global _counting
    _counting = True


@contextmanager
def watching(folder: Path, rank: int, num_ranks: int, hang_s: float, look: Callable[[], None]) -> Iterator[None]:
    """Watch this rank until the block ends.

    Args:
        look: called every few seconds from the watching thread.
    """
    global _number, _where, _counting
    _number, _where, _counting = 0, "start-up", False
    ended = threading.Event()
    watch = _Watch(folder, rank, num_ranks, hang_s, look, ended)
    thread = threading.Thread(target=watch.run, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Watch:
    def __init__(self, folder, rank, num_ranks, hang_s, look, ended):
        self.folder, self.rank, self.num_ranks = folder, rank, num_ranks
        self.hang_s, self.look, self.ended = hang_s, look, ended
        self.every_s = min(LOOK_EVERY_S, hang_s / 8)

    def run(self):
        # looks are counted, not the clock's time: a process that a scheduler has suspended does not hang
        seen, idle_s = None, 0.0
        with suppress(OSError):
            write_place(self.folder, self.rank, idle_s)
        while not self.ended.wait(self.every_s):
            self.look()
            idle_s = idle_s + self.every_s if seen == _number and _counting else 0.0
            seen = _number
            with suppress(OSError):  # a full disk is found by those who must write
                write_place(self.folder, self.rank, idle_s)
            if idle_s >= self.hang_s:
                self._end(idle_s)

    def _end(self, idle_s):
        with suppress(OSError):
            write_place(self.folder, self.rank, idle_s, last_collective())
            with open(self.folder / "logs" / f"rank-{self.rank}.stack", "w") as file:
                faulthandler.dump_traceback(file)
        if self.ended.wait((SILENT_LOOKS + 1) * self.every_s):  # until the others have done the same; or it was only slow
            return
        places = read_places(self.folder, self.num_ranks, SILENT_LOOKS * self.every_s)
        text = f"nothing has moved for cluster.hang_s={self.hang_s:g} s: {verdict(places)}"
        with suppress(OSError):
            if runs.read_status(self.folder).get("state") == "running":
                runs.settle(self.folder, "failed", f"{text}; stacks: {self.folder}/logs/rank-*.stack; go on with "
                            f"run={self.folder}", cause="hang", exit_code=1)
        if RUN_VARIABLE not in os.environ:  # else the supervisor says it
            print(f"error: {text}", file=sys.stderr, flush=True)
        os._exit(1)  # the main thread is where nothing reaches it


def write_place(folder: Path, rank: int, idle_s: float, collective: dict | None = None) -> None:
    """Replace logs/rank-N.place, atomically."""
    place = {"rank": rank, "host": socket.gethostname(), "number": _number, "where": _where, "idle_s": round(idle_s, 1),
             "collective": collective}
    temporary = folder / "logs" / f".rank-{rank}.place"
    temporary.write_text(json.dumps(place) + "\n")
    temporary.replace(folder / "logs" / f"rank-{rank}.place")


def read_places(folder: Path, num_ranks: int, silent_s: float) -> list[dict]:
    """The places of all ranks, with `silent`: its file is older by `silent_s` than the newest, or there is none."""
    places, written = [], []
    for rank in range(num_ranks):
        file = folder / "logs" / f"rank-{rank}.place"
        try:
            places.append(json.loads(file.read_text()))
            written.append(file.stat().st_mtime)  # by the clock of the disk, which is one for all nodes
        except (OSError, ValueError):
            places.append({"rank": rank, "host": "unknown host", "number": -1, "where": "start-up", "collective": None})
            written.append(0.0)
    return [place | {"silent": max(written) - when > silent_s} for place, when in zip(places, written, strict=True)]


def verdict(places: list[dict]) -> str:
    """Which ranks are behind and where, and where the others wait."""
    silent = [place for place in places if place["silent"]]
    name = "rank {rank} ({host})".format_map
    # a rank that has not come as far, or has not entered the collective that the others wait in, holds them up
    order = [(place["number"], (place["collective"] or {}).get("id", -1)) for place in places]
    behind = [place for place, key in zip(places, order, strict=True) if key == min(order)]
    if silent:
        text = "; ".join(f"{name(place)} does not run any more, last in {place['where']}" for place in silent)
        held = [place for place in places if not place["silent"]]
    elif len(behind) == len(places):
        return f"no rank is behind; all are in {_doing(places[0])}"
    else:
        text = "; ".join(f"{name(place)} is behind, in {_doing(place)}" for place in behind)
        held = [place for place in places if place not in behind]
    return text + (f"; {_ranks(held)} in {_doing(held[0])}" if held else "")


def _ranks(places):
    numbers = [place["rank"] for place in places]
    if len(numbers) == 1:
        return f"rank {numbers[0]} waits"
    return f"{len(numbers)} others wait ({', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''})"


def _doing(place):
    last = place["collective"]
    if last is None:
        return place["where"]
    return f"{place['where']} ({'waits in' if last['pending'] else 'last collective'} {last['name']} number {last['id']})"


def last_collective() -> dict | None:
    """Name and state of the newest collective of this rank, and how many there were; None where nothing is recorded."""
    last, count = [], 0
    for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # GPU and CPU are recorded apart
        if hasattr(torch._C._distributed_c10d, dump):
            entries = json.loads(getattr(torch._C._distributed_c10d, dump)()).get("entries", [])
            if entries:
                last.append(max(entries, key=lambda one: one["record_id"]))
                count += 1 + last[-1]["record_id"]
    if not last:
        return None
    newest = max(last, key=lambda one: one["time_created_ns"])
    return {"name": newest["profiling_name"], "id": count, "pending": not newest["retired"]}
