"""What benchmarks of a single rank on this CPU begin with."""

import os
import shutil
from pathlib import Path


def join_alone(threads: int, work: Path):
    """Be the only rank, with an empty folder `work`; before torch is imported. Returns a group for preparing data."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from tonnage.runtime import ranks
    from tonnage.runtime.logs import quiet_libraries

    quiet_libraries()
    shutil.rmtree(work, ignore_errors=True)
    ranks.join(ranks.Place("none", 0, 1, 0, 1), 1, "cpu", 1800.0, threads)
    return ranks.preparation_group()
