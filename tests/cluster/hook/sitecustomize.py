"""In the ranks of a cluster test, before anything else: steps that last until something has happened to the job.

Each step of a job's first start takes TONNAGE_TEST_STEP_S longer; what is learned stays the same, byte by byte.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path


def slow_down(step_s: float) -> None:
    while not hasattr(sys.modules.get("tonnage.train.loop"), "_save"):  # its last function
        time.sleep(0.02)
    loop = sys.modules["tonnage.train.loop"]
    run_window = loop.run_window

    def slow(*args):
        time.sleep(step_s)
        return run_window(*args)
    loop.run_window = slow


def pass_on_stop(file: Path) -> None:
    """Stands in for ranks that look at <run>/stop themselves, where they do not yet."""
    file.unlink(missing_ok=True)  # of an earlier start
    while "tonnage.runtime.runs" not in sys.modules or "tonnage.train.loop" not in sys.modules:
        time.sleep(0.1)
    if hasattr(sys.modules["tonnage.runtime.runs"], "stop_wanted"):
        return
    while not (file.exists() and "RANK" in os.environ and callable(signal.getsignal(signal.SIGTERM))):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    file.unlink(missing_ok=True)


if "RUN" in os.environ and sys.argv[:1] != ["-m"]:
    threading.Thread(target=pass_on_stop, args=(Path(os.environ["RUN"]) / "stop",), daemon=True).start()
    if "TONNAGE_TEST_STEP_S" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
        threading.Thread(target=slow_down, args=(float(os.environ["TONNAGE_TEST_STEP_S"]),), daemon=True).start()
