"""Stop requests by signal and by file, windows that are put back, and what is said of a new layout."""

import os
import signal

import numpy as np
import pytest

from tonnage.config.batch import BatchCut
from tonnage.data.pack import Row
from tonnage.data.windows import Cursor
from tonnage.runtime import runs
from tonnage.train.run import layout_change
from tonnage.train.session import StopRequest
from tonnage.train.source import StreamSource


@pytest.fixture
def stop(tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield StopRequest(tmp_path, say=True)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_request_is_remembered_and_a_second_sigterm_changes_nothing(stop):
    stop.armed = True
    assert stop.asked(look=True) == 0
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
    assert stop.asked(look=False) == signal.SIGTERM and stop.reason(signal.SIGTERM) == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_twice_stops_now(stop):
    stop.armed = True
    signal.raise_signal(signal.SIGINT)
    assert stop.reason(stop.asked(look=False)) == "Ctrl-C"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_before_there_is_something_to_save_a_request_ends_the_process(stop, tmp_path):
    stop.look()
    runs.want_stop(tmp_path, "preempted")
    with pytest.raises(KeyboardInterrupt):
        stop.look()
    stop.look()  # one signal is enough


def test_the_file_counts_where_it_is_looked_for_and_its_first_line_is_the_reason(stop, tmp_path):
    stop.armed = True
    (tmp_path / "stop").write_text("time limit\nof the queue\n")
    assert stop.asked(look=False) == 0 and stop.asked(look=True) == StopRequest.BY_FILE
    assert stop.reason(StopRequest.BY_FILE) == "time limit"
    (tmp_path / "stop").write_text("")
    assert stop.reason(StopRequest.BY_FILE) == "file stop"
    runs.forget_stop(tmp_path)
    runs.forget_stop(tmp_path)
    assert stop.asked(look=True) == 0 and runs.stop_wanted(tmp_path) is None


def test_a_workers_signal_is_not_the_runs(stop):
    stop.armed = True
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM and not stop.requested


# ---- a stream's window that was not used

class Counting:
    """A stream of rows of 3, 4, 5, 3, 4, 5, ... tokens."""

    def __init__(self):
        self.read = 0

    def next_row(self):
        self.read += 1
        tokens = np.full(3 + (self.read - 1) % 3, self.read, np.int32)
        return Row(tokens, tokens, np.arange(len(tokens), dtype=np.int32))

    def state(self):
        return {"read": self.read}

    def restore(self, state):
        self.read = state["read"]


@pytest.mark.parametrize("cut", [BatchCut(3, None, 1, 3), BatchCut(None, 10, 1, None)])
def test_rows_that_were_put_back_come_again_also_behind_a_checkpoint(cut):
    def numbers(rows):
        return [int(row.tokens[0]) for row in rows]

    whole, source, cursor = StreamSource(Counting(), cut), StreamSource(Counting(), cut), Cursor()
    expected = [numbers(whole.next(cursor)[0]) for _ in range(5)]
    assert numbers(source.next(cursor)[0]) == expected[0]
    rows, _ = source.next(cursor)
    source.put_back(rows)
    again = StreamSource(Counting(), cut)
    again.restore(source.state())
    for one in (source, again):
        assert [numbers(one.next(cursor)[0]) for _ in range(4)] == expected[1:]


# ---- another layout

def test_another_cut_of_the_same_windows_is_told():
    def layout(gpus, micro, steps, rows=128, tokens=None):
        cut = {"global_rows": rows, "global_tokens": tokens, "micro_rows": micro, "accumulation_steps": steps}
        return {"gpus": gpus, "cut": cut}

    assert layout_change(layout(4, 2, 16), layout(4, 2, 16)) is None
    assert layout_change(layout(2, 4, 16), layout(4, 2, 16)) == (
        "4 ranks x 2 rows x 16 steps, was 2 x 4 x 16; the global batch is 128 rows as before")
    assert layout_change(layout(2, 4, None, None, 9000), layout(1, 4, None, None, 9000)) == (
        "1 rank x 4 rows, was 2 x 4; the global batch is up to 9,000 tokens as before")
    shared = layout(4, 2, 32) | {"sequence_gpus": 2}
    assert layout_change(layout(4, 2, 16), shared) == (
        "4 ranks x 2 rows x 32 steps, 2 to a row, was 4 x 2 x 16; the global batch is 128 rows as before")
    assert layout_change(shared, shared) is None
