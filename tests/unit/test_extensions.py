"""Locks of builds that were killed."""

import os
import time

import pytest

from tonnage.runtime import extensions
from tonnage.runtime.extensions import clear_lock, held_here, own_folder, settle_builds
from tonnage.runtime.logs import LOG


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(LOG, "warning", lines.append)
    return lines


@pytest.fixture
def lock(tmp_path):
    """As torch leaves it when a build is killed."""
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    return tmp_path / "cpu_adam" / "lock"


def test_a_planted_lock_goes_from_a_private_folder_with_a_word(lock, said, monkeypatch):
    monkeypatch.setattr(extensions, "own_folder", lambda: lock.parents[1])
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1]))
    settle_builds()
    assert not lock.exists() and "a build that was killed" in said[0] and str(lock) in said[0]


def test_torch_builds_again_where_a_lock_was_planted(lock, said):
    from torch.utils.file_baton import FileBaton

    clear_lock(lock, private=True)
    assert FileBaton(str(lock)).try_acquire()  # it would have waited for ever


def test_a_lock_that_is_held_stays(lock, said):
    handle = os.open(lock, os.O_RDONLY)
    try:
        assert held_here(lock)
        clear_lock(lock, private=True)
        assert lock.exists() and not said
    finally:
        os.close(handle)
    assert not held_here(lock)


def test_where_other_machines_build_too_a_lock_is_given_its_time(lock, said, monkeypatch):
    monkeypatch.setattr(extensions, "BUILD_LIMIT_S", 1.0)
    clear_lock(lock, private=False, look_every_s=0.1)
    assert not lock.exists() and "in case another machine builds there" in said[0] and "removed" in said[1]
    lock.touch()
    os.utime(lock, (time.time() - 60,) * 2)
    clear_lock(lock, private=False)
    assert not lock.exists() and len(said) == 3


def test_the_folder_is_of_this_host_and_these_versions(monkeypatch):
    monkeypatch.setenv("TONNAGE_CACHE", "/somewhere")
    assert str(own_folder()).startswith("/somewhere/extensions/") and "-torch2" in own_folder().name
