"""How a command ends: the exit code of each kind of error, and what is said."""

import errno
import sys

import pytest

from tonnage.errors import CheckpointError, ConfigError, DoesNotFit, TrainingError
from tonnage.runtime.entry import guarded
from tonnage.runtime.logs import LOG


def raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize("error, code", [(ConfigError("a"), 2), (CheckpointError("a"), 2), (DoesNotFit("a"), 3),
                                         (TrainingError("a"), 1), (KeyboardInterrupt(), 75),
                                         (OSError(errno.ENOSPC, "No space left on device", "f"), 2)])
def test_each_kind_of_error_has_its_exit_code_and_no_traceback(capsys, error, code):
    assert guarded(raising(error)) == code
    said = capsys.readouterr().err
    assert said and "Traceback" not in said


def test_a_fault_of_our_own_names_the_file_with_the_traceback(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LOG, "handlers", [])
    assert guarded(raising(ZeroDivisionError("x"))) == 1
    assert "fault: ZeroDivisionError: x" in capsys.readouterr().err
    assert "ZeroDivisionError" in (tmp_path / "tonnage-fault.log").read_text()


def test_a_reader_that_has_seen_enough_is_no_fault(monkeypatch):
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert guarded(raising(BrokenPipeError())) == 0


def test_the_other_ranks_stay_quiet(capsys):
    assert guarded(raising(ConfigError("a")), quiet=True) == 2
    assert not capsys.readouterr().err
