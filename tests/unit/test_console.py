"""Progress: what is shown within a long step, and an estimate that a slow first step does not mislead."""

import time

import pytest

from tonnage.report.console import StepProgress


@pytest.fixture
def clock(monkeypatch):
    """A list whose one item is the time."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def steps(progress, clock, durations, micros=1):
    for step, duration in enumerate(durations, 1):
        for number in range(micros):
            clock[0] += duration / micros
            progress.micro(number + 1, micros)
        progress.update(step, "loss")


def test_the_time_left_leaves_out_the_slow_first_step(clock, capsys):
    steps(StepProgress(4, 0, show=True), clock, [600, 60, 60, 60])
    assert capsys.readouterr().out.splitlines() == [
        "step 1/4  loss", "step 2/4  loss  2.0 min left", "step 3/4  loss  1.0 min left", "step 4/4  loss"]


def test_one_slow_step_does_not_move_the_estimate(clock, capsys):
    steps(StepProgress(7, 0, show=True), clock, [60, 60, 60, 60, 600])
    assert capsys.readouterr().out.splitlines()[-1] == "step 5/7  loss  2.0 min left"


def test_a_long_step_shows_its_micro_batches_and_short_ones_do_not(clock, capsys):
    steps(StepProgress(2, 0, show=True), clock, [64, 4], micros=16)
    assert capsys.readouterr().out.splitlines() == [
        "step 1/2, micro-batch 4/16", "step 1/2, micro-batch 7/16", "step 1/2, micro-batch 10/16",
        "step 1/2, micro-batch 13/16", "step 1/2  loss", "step 2/2  loss"]


def test_other_ranks_show_nothing(clock, capsys):
    steps(StepProgress(2, 0, show=False), clock, [64, 64], micros=16)
    assert not capsys.readouterr().out
