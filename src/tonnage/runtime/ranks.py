"""Which rank this process is, whoever started it; runtime/supervisor.py starts ranks where nobody did.

torchrun, deepspeed and our own launcher all speak through RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*
(https://docs.pytorch.org/docs/2.13/elastic/run.html#environment-variables), srun through SLURM_*
(https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES).
"""

import ctypes
import os
import re
import signal
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tonnage.errors import ConfigError
from tonnage.runtime import slurm
from tonnage.runtime.driver import driver_present

LAUNCHER_VARIABLE = "TONNAGE_LAUNCHER"
RUN_VARIABLE = "TONNAGE_RUN_FOLDER"
PREPARATION_LIMIT = timedelta(days=7)


@dataclass(frozen=True)
class Place:
    """Where this process stands. `launcher` is none, torchrun, deepspeed, srun or tonnage (our own)."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int


def current_place() -> Place:
    """Read the environment."""
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return _place_in_step() or Place("none", 0, 1, 0, 1)
    if LAUNCHER_VARIABLE in env:
        launcher = "tonnage"
    elif "TORCHELASTIC_RUN_ID" in env:
        launcher = "torchrun"
    else:
        launcher = "deepspeed"
    world_size = int(env["WORLD_SIZE"])
    local_size = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", world_size)))
    return Place(launcher, int(env["RANK"]), world_size, int(env.get("LOCAL_RANK", 0)), local_size)


def _place_in_step() -> Place | None:
    """The place that srun gave, if it started several tasks. SLURM_NTASKS is set in a batch script too, these are not."""
    env = os.environ
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks == 1:
        return None
    sizes = []  # 4(x2),3
    for size, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"]):
        sizes += [int(size)] * int(times or 1)
    return Place("srun", int(env["SLURM_PROCID"]), tasks, int(env["SLURM_LOCALID"]), sizes[int(env["SLURM_NODEID"])])


def started_by_deepspeed() -> bool:
    """Whether the deepspeed launcher is at the beginning of this process, directly or through our own."""
    return os.environ.get(LAUNCHER_VARIABLE, "") == "deepspeed" or current_place().launcher == "deepspeed"


def resolve_device(wanted: str) -> str:
    """`cuda` or `cpu`.

    Raises:
        ConfigError: a GPU is asked for, or there is a driver, and torch sees no GPU.
    """
    if wanted == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if driver_present():
        raise ConfigError(f"device={wanted}: a GPU driver is present, but torch {torch.__version__} sees no GPU "
                          f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); install a "
                          f"torch build for this driver, or set device=cpu")
    if wanted == "cuda":
        raise ConfigError("device=cuda: this machine has no GPU driver; set device=cpu or auto")
    return "cpu"


def resolve_gpus(wanted: int | str, device: str, place: Place) -> int:
    """Ranks of the run: as asked, else as started, else the visible GPUs (CPU: one)."""
    if wanted != "auto":
        return wanted
    if place.launcher != "none":
        return place.world_size
    return torch.cuda.device_count() if device == "cuda" else 1


def settle(place: Place, gpus: int, device: str) -> str:
    """What this process does: `run` as a rank, `start` the ranks, or step `aside` because others are enough.

    Raises:
        ConfigError: fewer ranks were started, or fewer GPUs are visible, than asked for.
    """
    if place.world_size == gpus and place.launcher != "none":
        return "run"
    if place.world_size > gpus and place.launcher != "none":
        if place.local_size != place.world_size:
            raise ConfigError(f"gpus={gpus}: {place.launcher} started {place.world_size} ranks on several nodes; "
                              f"set gpus={place.world_size} or start fewer")
        return "run" if place.rank < gpus else "aside"
    if place.launcher == "none":
        _require_a_job_of_one_task(gpus)
    if place.launcher == "none" or (place.world_size == 1 and device == "cpu"):
        visible = torch.cuda.device_count() if device == "cuda" else gpus
        if visible < gpus:
            raise ConfigError(f"gpus={gpus}: {visible} GPUs are visible here; set gpus={visible}, or start more nodes "
                              f"with torchrun or launch/submit.py")
        return "start" if gpus > 1 else "run"
    flag = {"torchrun": "--nproc-per-node", "srun": "--ntasks"}.get(place.launcher, "--num_gpus")
    raise ConfigError(f"gpus={gpus}: {place.launcher} started {place.world_size} ranks; start it with {flag} {gpus}, "
                      f"or set gpus={place.world_size}")


def _require_a_job_of_one_task(gpus):
    """One process in a job of several tasks would be all that trains, or be on no node of the job at all."""
    env = os.environ
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", 1)))
    nodes = int(env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_JOB_NUM_NODES", 1)))
    if tasks > 1 or nodes > 1:
        raise ConfigError(f"gpus={gpus}: job {env.get('SLURM_JOB_ID')} has {tasks} tasks on {nodes} nodes, and this one "
                          f"process was started; start it as srun python launch/train.py ..., or by launch/submit.py")


def join(place: Place, gpus: int, device: str, timeout_s: float, cpu_threads: int | str) -> None:
    """Make this process a rank of the group of `gpus` ranks, with its device and its share of the cores."""
    local_ranks = min(place.local_size, gpus)
    threads = max(1, (os.cpu_count() or 1) // local_ranks) if cpu_threads == "auto" else cpu_threads
    torch.set_num_threads(threads)
    backend, index = "gloo", place.local_rank
    if device == "cuda":
        # a scheduler may show each task one GPU only: the index is not the local rank then
        index = place.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        backend = "cpu:gloo,cuda:nccl"
    # DeepSpeed reads these itself, and takes LOCAL_RANK for the index of the device
    os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(gpus), "LOCAL_RANK": str(index)}
    if place.launcher == "srun":
        os.environ |= slurm.rendezvous(place.rank)
    if place.launcher == "none":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1,
                                timeout=timedelta(seconds=timeout_s))
    else:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def preparation_group() -> dist.ProcessGroup:
    """A CPU group for what one rank does while the others wait: it does not time out (7 days)."""
    return dist.new_group(backend="gloo", timeout=PREPARATION_LIMIT)


def die_with_parent() -> None:
    """Have the kernel kill this process when the launcher that started it dies (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
