"""Who is behind where nothing moves, and what ranks must have in common."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from tonnage.runtime import runs
from tonnage.runtime.agreement import code_version, differences, node_lines
from tonnage.runtime.watchdog import read_places, verdict


def at(rank, number=7, where="the update of step 3", collective=None, pending=True, silent=False):
    last = collective and {"name": "gloo:all_reduce", "id": collective, "pending": pending}
    return {"rank": rank, "host": f"n{rank // 2}", "number": number, "where": where, "collective": last, "silent": silent}


@pytest.mark.parametrize("places, expected", [
    ([at(0), at(1, number=6, where="the data of step 3")],
     "rank 1 (n0) is behind, in the data of step 3; rank 0 waits in the update of step 3"),
    ([at(0, collective=9), at(1, collective=8, pending=False), at(2, collective=9), at(3, collective=9)],
     "rank 1 (n0) is behind, in the update of step 3 (last collective gloo:all_reduce number 8); 3 others wait (0, 2, 3) "
     "in the update of step 3 (waits in gloo:all_reduce number 9)"),
    ([at(0), at(1), at(2, silent=True, where="evaluation, micro-batch 2 of 9")],
     "rank 2 (n1) does not run any more, last in evaluation, micro-batch 2 of 9; 2 others wait (0, 1) in the update of "
     "step 3"),
    ([at(0, collective=9), at(1, collective=9)],
     "no rank is behind; all are in the update of step 3 (waits in gloo:all_reduce number 9)"),
    ([at(0)], "no rank is behind; all are in the update of step 3")])
def test_the_verdict_names_the_rank_that_holds_the_others_up(places, expected):
    assert verdict(places) == expected


def test_a_rank_that_no_longer_writes_is_silent(tmp_path):
    (tmp_path / "logs").mkdir()
    for rank, age_s in ((0, 0), (1, 100)):
        file = tmp_path / "logs" / f"rank-{rank}.place"
        file.write_text(json.dumps(at(rank)))
        os.utime(file, (1e9 - age_s, 1e9 - age_s))
    assert [place["silent"] for place in read_places(tmp_path, 3, 50.0)] == [False, True, True]


WATCHED = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from tonnage.runtime.watchdog import beat, first_step_done, watching
    with watching(Path(sys.argv[1]), 0, 1, 0.8, lambda: None):
        time.sleep(1.5)          # before the first step nothing is counted
        first_step_done()
        for _ in range(10):      # longer than the limit in all, each below it
            beat("a micro-batch")
            time.sleep(0.2)
        beat(sys.argv[2])
        time.sleep(0 if sys.argv[2] == "end" else 60)
""")


@pytest.mark.parametrize("last, code", [("the update of step 2", 1), ("end", 0)])
def test_only_a_phase_that_takes_too_long_ends_the_run(tmp_path, last, code):
    folder = runs.create_run(str(tmp_path), "run", "label", {})
    runs.write_status(folder, "running", "step 1 of 9", step=1, num_steps=9)
    done = subprocess.run([sys.executable, "-c", WATCHED, str(folder), last], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    status = runs.read_status(folder)
    assert (status["state"], status["step"]) == ("failed" if code else "running", 1)
    if code:
        assert f"cluster.hang_s=0.8 s: no rank is behind; all are in {last}" in status["message"]
        assert status["cause"] == "hang" and '"<string>", line' in (folder / "logs" / "rank-0.stack").read_text()


# ---- agreement

def rank_of(host="a", device="CPU, 8.0 GiB", **facts):
    return {"host": host, "device": device, "facts": {"torch": "2.13.0", "config": "c1"} | facts}


def test_the_odd_ranks_are_named_with_their_hosts():
    assert differences([rank_of()] * 3) == []
    odd = rank_of("b", torch="2.12.0")
    assert differences([rank_of(), rank_of(), odd, odd, rank_of("c")]) == [
        "ranks 2, 3 (b): torch is 2.12.0, elsewhere 2.13.0"]
    assert differences([rank_of(config="c2"), rank_of(), rank_of()]) == ["rank 0 (a): config is c2, elsewhere c1"]


def test_a_node_is_one_line():
    h100 = "NVIDIA H100 79.1 GiB, driver 580"
    assert node_lines([rank_of("a", h100), rank_of("b"), rank_of("a", h100)]) == [
        f"node a: 2 ranks, {h100}", "node b: 1 rank, CPU, 8.0 GiB"]


def test_the_code_is_known_by_its_content():
    assert "source " in code_version() and code_version() == code_version()
