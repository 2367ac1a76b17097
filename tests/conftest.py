"""Fixtures for all tests: quiet libraries, one pool of ranks per world size, one tiny model."""

import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent / "dist"), str(Path(__file__).parent)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tonnage.runtime.logs import quiet_libraries  # noqa: E402

quiet_libraries()


@pytest.fixture(scope="session")
def pools():
    """`pools(world)`: ranks that stay for the session."""
    from pool import Pool

    kept = {}
    yield lambda world: kept.setdefault(world, Pool(world))
    for pool in kept.values():
        pool.close()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A Hugging Face folder of a tiny Llama."""
    from tiny import make_model

    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory):
    """The same with tied embeddings."""
    from tiny import make_model

    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory):
    """One whose matrices are large enough for 8-bit states (4,096 elements of a shard and more)."""
    from tiny import make_model

    return make_model(tmp_path_factory.mktemp("wide"), hidden=96)
