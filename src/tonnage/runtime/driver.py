"""Is there a GPU driver? Asked of the machine, before any library is imported."""

import subprocess
from pathlib import Path

from tonnage.facts.gpus import GPUS, Gpu
from tonnage.facts.sizes import PROCESS_WITHOUT_CUDA_GIB


def driver_present() -> bool:
    """Whether this machine has an NVIDIA or AMD driver, whatever torch thinks of it."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/kfd"))


def first_gpu() -> Gpu | None:
    """The first GPU that nvidia-smi lists, as the table has it or with its name and memory only; None without one."""
    try:
        answer = subprocess.run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
                                capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, mebibytes = answer.splitlines()[0].rpartition(",")
    return known_gpu(name.strip(), float(mebibytes) / 1024)


def host_memory(ranks: int) -> Gpu | None:
    """The memory that is free on this machine for each of `ranks` processes, where tensors live there; None if unknown."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free_gib = int(lines["MemAvailable"].split()[0]) / 2**20
    except (OSError, KeyError, ValueError):
        return None
    return Gpu(name="host", title=f"this machine's memory, a share of {ranks}", source="/proc/meminfo",
               memory_gib=max(0.1, free_gib / ranks - PROCESS_WITHOUT_CUDA_GIB))


def known_gpu(name: str, memory_gib: float) -> Gpu:
    """The GPU that a driver calls `name`: of the table, if a name there is in it and its memory is within 10 %."""
    words = name.lower().replace("-", " ").split()
    for gpu in GPUS.values():
        model = gpu.name.split("_")[0].removeprefix("rtx")
        if model in words and abs(gpu.memory_gib / memory_gib - 1) < 0.1:
            return gpu
    return Gpu(name="other", title=name, memory_gib=memory_gib, source="the driver")
