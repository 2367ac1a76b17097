"""Logging: our own lines on the console of rank 0, everything of every library in logs/rank-N.log."""

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from tonnage.runtime.driver import driver_present

LOG = logging.getLogger("tonnage")
NOISY = ("DeepSpeed", "transformers", "peft", "datasets", "bitsandbytes", "torch", "torchao", "huggingface_hub",
         "accelerate", "httpx", "filelock")


def quiet_libraries() -> None:
    """Keep libraries off the console and set what they read from the environment; call before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ.setdefault("BITSANDBYTES_NOWELCOME", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that are remembered, for runtime/watchdog.py
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    # deprecation notes that torchao causes; advice on how meshes of experts are gathered
    os.environ.setdefault("TORCH_LOGS", "-torch.utils._pytree,-torch.distributed.tensor._redistribute")
    if driver_present():
        # rows of uneven length fragment the allocator until a late out-of-memory error
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    LOG.setLevel(logging.DEBUG)
    LOG.propagate = False
    if not LOG.handlers:
        LOG.addHandler(_console())
    for name in ("py.warnings", *NOISY):
        redirect(name)


def redirect(name: str) -> None:
    """Send a library's logger to the log file alone; again after an import that gave it a handler of its own."""
    logger = logging.getLogger(name)
    files = [handler for handler in LOG.handlers if isinstance(handler, logging.FileHandler)]
    logger.handlers = files or [logging.NullHandler()]
    logger.propagate = False


@contextmanager
def library_prints() -> Iterator[None]:
    """Send what libraries print to the log file instead of the console."""
    text = io.StringIO()
    with redirect_stdout(text):
        yield
    LOG.debug(text.getvalue())


def log_to_folder(folder: Path, rank: int) -> None:
    """From now on write everything to logs/rank-N.log; ranks other than 0 leave the console alone."""
    file = logging.FileHandler(folder / "logs" / f"rank-{rank}.log")
    file.setLevel(logging.DEBUG)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for handler in list(LOG.handlers):
        if rank != 0:
            LOG.removeHandler(handler)
    LOG.addHandler(file)
    # NCCL's last collectives, when one times out: read when they are written
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "logs" / "collectives-rank-"))
    logging.getLogger().addHandler(file)
    for name in ("py.warnings", *NOISY):
        redirect(name)


def _console():
    handler = logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
