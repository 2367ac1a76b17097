"""In the ranks of a cluster test, before anything else: steps that last until something has happened to the job.

Each step of a job's first start takes TONNAGE_TEST_STEP_S longer; what is learned stays the same, byte by byte.
"""

import os
import sys
import threading
import time


def slow_down(step_s: float) -> None:
    while not hasattr(sys.modules.get("tonnage.train.loop"), "_save"):  # its last function
        time.sleep(0.02)
    loop = sys.modules["tonnage.train.loop"]
    run_window = loop.run_window

    def slow(*args):
        time.sleep(step_s)
        return run_window(*args)
    loop.run_window = slow


first_start = ("RUN" in os.environ or "RANK" in os.environ) and "SLURM_RESTART_COUNT" not in os.environ
if first_start and sys.argv[:1] != ["-m"] and "TONNAGE_TEST_STEP_S" in os.environ:
    threading.Thread(target=slow_down, args=(float(os.environ["TONNAGE_TEST_STEP_S"]),), daemon=True).start()
