"""Is there a GPU driver? Asked of the machine, before any library is imported."""

from pathlib import Path


def driver_present() -> bool:
    """Whether this machine has an NVIDIA or AMD driver, whatever torch thinks of it."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/kfd"))
