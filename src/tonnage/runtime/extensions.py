"""Where torch compiles C++ and CUDA code at run time (DeepSpeed's operators), and locks that a killed build has left.

torch.utils.cpp_extension holds an open file `lock` in the folder of an operator while it builds, and waits without end for
one that is there, whoever made it (torch/utils/file_baton.py).
"""

import os
import socket
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from tonnage.runtime.cache import cache_root
from tonnage.runtime.logs import LOG

BUILD_LIMIT_S = 1800.0  # DeepSpeed's largest operators take minutes
VARIABLE = "TORCH_EXTENSIONS_DIR"


def own_folder() -> Path:
    """A folder for builds of this host and these versions alone: no other machine can hold a lock there."""
    return cache_root() / "extensions" / f"{socket.gethostname()}-torch{version('torch')}-deepspeed{version('deepspeed')}"


def settle_builds() -> None:
    """Say where to build, unless TORCH_EXTENSIONS_DIR does, and wait until no lock there is stale.

    Call on every rank, and let all meet before the first build.
    """
    folder = Path(os.environ.setdefault(VARIABLE, str(own_folder())))
    private = folder == own_folder()
    for lock in folder.glob("**/lock"):
        clear_lock(lock, private)


def clear_lock(lock: Path, private: bool, look_every_s: float = 5.0) -> None:
    """Remove a lock that no process holds; return at once from one that is held here: torch waits for that in order.

    Args:
        private: only this host uses the folder; otherwise a lock may be held elsewhere until BUILD_LIMIT_S have passed.
    """
    told = False
    while lock.exists() and not held_here(lock):
        try:
            age_s = time.time() - lock.stat().st_mtime
        except FileNotFoundError:  # another rank was first
            return
        if private or age_s > BUILD_LIMIT_S:
            lock.unlink(missing_ok=True)
            LOG.warning(f"{lock}: removed; a build that was killed {age_s / 60:.0f} min ago had left it, and every later "
                        f"one would wait for it")
            return
        if not told:
            LOG.warning(f"{lock}: no process of this machine holds it; waiting until it is {BUILD_LIMIT_S / 60:.0f} min "
                        f"old (now {age_s / 60:.0f}) in case another machine builds there. Remove it if none does, or "
                        f"unset {VARIABLE}, so that each machine has a folder of its own")
            told = True
        time.sleep(look_every_s)


def held_here(lock: Path) -> bool:
    """Whether a process of this user on this machine has the file open."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            for handle in (process / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(handle) == str(lock.resolve()):
                        return True
    return False
