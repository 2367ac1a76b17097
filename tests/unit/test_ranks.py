"""Which rank a process is, what it does about the number of GPUs, and the device it takes."""

import datetime
import os

import pytest
import torch

from tonnage.errors import ConfigError
from tonnage.runtime import ranks
from tonnage.runtime.ranks import current_place, resolve_device, resolve_gpus, settle, started_by_deepspeed

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "TORCHELASTIC_RUN_ID",
             ranks.LAUNCHER_VARIABLE, ranks.RUN_VARIABLE, "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_TASKS",
             "SLURM_STEP_NUM_NODES")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch):
    """Sets the environment that a launcher gives rank `rank` of `world`, `local` of them on this node."""
    def start(launcher, rank=0, world=1, local=None):
        local = local or world
        env = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local}
        env |= {"torchrun": {"LOCAL_WORLD_SIZE": local, "TORCHELASTIC_RUN_ID": "x"}, "deepspeed": {"LOCAL_SIZE": local},
                "tonnage": {"LOCAL_WORLD_SIZE": local, ranks.LAUNCHER_VARIABLE: "own"}, "none": {}}[launcher]
        for name, value in env.items() if launcher != "none" else ():
            monkeypatch.setenv(name, str(value))
        return current_place()
    return start


@pytest.fixture
def gpus_visible(monkeypatch):
    def show(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    return show


# ---- the place

def test_places(started):
    assert started("none") == ranks.Place("none", 0, 1, 0, 1)
    assert started("torchrun", 5, 8, local=4) == ranks.Place("torchrun", 5, 8, 1, 4)


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "tonnage"])
def test_a_launcher_is_told_by_its_environment(started, launcher):
    assert started(launcher, 1, 2) == ranks.Place(launcher, 1, 2, 1, 2)
    assert started_by_deepspeed() == (launcher == "deepspeed")


def test_ranks_that_a_process_under_deepspeed_starts_are_deepspeeds_too(started, monkeypatch):
    started("tonnage", 0, 2)
    monkeypatch.setenv(ranks.LAUNCHER_VARIABLE, "deepspeed")
    assert started_by_deepspeed() and current_place().launcher == "tonnage"


@pytest.mark.parametrize("sizes, node, local_size", [("8(x2)", 1, 8), ("3,2", 1, 2), ("4(x2),2", 2, 2), ("4(x2),2", 1, 4)])
def test_tasks_of_srun_are_ranks(monkeypatch, sizes, node, local_size):
    step = {"STEP_NUM_TASKS": 16, "PROCID": 9, "LOCALID": 1, "NODEID": node, "STEP_TASKS_PER_NODE": sizes}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert current_place() == ranks.Place("srun", 9, 16, 1, local_size)
    assert settle(current_place(), 16, "cpu") == "run"
    with pytest.raises(ConfigError, match="gpus=32: srun started 16 ranks; start it with --ntasks 32, or set gpus=16"):
        settle(current_place(), 32, "cpu")
    monkeypatch.setenv("RANK", "3")  # a launcher in the task
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert current_place().launcher == "deepspeed"


@pytest.mark.parametrize("env", [{"SLURM_NTASKS": 16}, {"SLURM_NTASKS": 1, "SLURM_JOB_NUM_NODES": 2}])
def test_one_process_in_a_job_of_several_tasks_is_refused(monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, str(value))
    for gpus in (1, 16):
        with pytest.raises(ConfigError, match="this one process was started; start it as srun python"):
            settle(current_place(), gpus, "cpu")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # a step of one task on one node of the job
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    assert settle(current_place(), 1, "cpu") == "run"


# ---- how many

def test_gpus_are_as_asked_else_as_started_else_as_visible(started, gpus_visible):
    gpus_visible(6)
    assert resolve_gpus(4, "cuda", started("none")) == 4
    assert resolve_gpus("auto", "cuda", started("none")) == 6
    assert resolve_gpus("auto", "cpu", started("none")) == 1
    # the ranks that were started count, not the GPUs in the box
    assert resolve_gpus("auto", "cuda", started("torchrun", 0, 2)) == 2


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "tonnage"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_as_many_ranks_as_asked_for_all_run(started, gpus_visible, launcher, device):
    gpus_visible(8)
    assert [settle(started(launcher, rank, 4), 4, device) for rank in range(4)] == ["run"] * 4
    # 16 ranks on two nodes
    assert [settle(started(launcher, rank, 16, local=8), 16, device) for rank in (0, 7, 8, 15)] == ["run"] * 4


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_of_eight_ranks_four_run_and_four_step_aside(started, gpus_visible, launcher, device):
    gpus_visible(8)
    roles = [settle(started(launcher, rank, 8), 4, device) for rank in range(8)]
    assert roles == ["run"] * 4 + ["aside"] * 4


def test_on_several_nodes_nobody_steps_aside(started, gpus_visible):
    gpus_visible(8)
    for rank in (0, 15):
        with pytest.raises(ConfigError, match="gpus=4: torchrun started 16 ranks on several nodes; set gpus=16"):
            settle(started("torchrun", rank, 16, local=8), 4, "cuda")


@pytest.mark.parametrize("launcher, flag", [("torchrun", "--nproc-per-node 4"), ("deepspeed", "--num_gpus 4")])
@pytest.mark.parametrize("world, device", [(2, "cpu"), (2, "cuda"), (1, "cuda"), (3, "cuda")])
def test_too_few_ranks_are_refused_naming_the_flag(started, gpus_visible, launcher, flag, world, device):
    gpus_visible(8)
    with pytest.raises(ConfigError) as error:
        settle(started(launcher, 0, world), 4, device)
    message = str(error.value)
    assert message.startswith(f"gpus=4: {launcher} started {world} ranks")
    assert flag in message and f"set gpus={world}" in message


def test_without_a_launcher_one_rank_runs_and_more_are_started(started, gpus_visible):
    gpus_visible(4)
    assert settle(started("none"), 1, "cuda") == settle(started("none"), 1, "cpu") == "run"
    assert settle(started("none"), 4, "cuda") == settle(started("none"), 3, "cpu") == "start"
    with pytest.raises(ConfigError, match="gpus=5: 4 GPUs are visible here; set gpus=4"):
        settle(started("none"), 5, "cuda")


def test_one_process_under_deepspeed_on_a_cpu_starts_the_ranks(started):
    # plain `deepspeed` starts one process where there is no GPU
    assert settle(started("deepspeed", 0, 1), 2, "cpu") == "start"
    assert settle(started("deepspeed", 0, 1), 1, "cpu") == "run"


# ---- the device

@pytest.mark.parametrize("wanted, driver, visible, expected", [
    ("auto", True, 2, "cuda"), ("cuda", True, 2, "cuda"), ("cpu", True, 2, "cpu"), ("auto", False, 0, "cpu"),
    ("cpu", False, 0, "cpu"), ("cpu", True, 0, "cpu"), ("auto", False, 2, "cuda")])
def test_device(monkeypatch, gpus_visible, wanted, driver, visible, expected):
    gpus_visible(visible)
    monkeypatch.setattr(ranks, "driver_present", lambda: driver)
    assert resolve_device(wanted) == expected


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_driver_that_torch_cannot_see_is_an_error(monkeypatch, gpus_visible, wanted):
    gpus_visible(0)
    monkeypatch.setattr(ranks, "driver_present", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError) as error:
        resolve_device(wanted)
    assert all(part in str(error.value) for part in (f"device={wanted}", "a GPU driver is present", torch.__version__,
                                                     "CUDA_VISIBLE_DEVICES=7", "set device=cpu"))


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error(monkeypatch, gpus_visible):
    gpus_visible(0)
    monkeypatch.setattr(ranks, "driver_present", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda: this machine has no GPU driver; set device=cpu or auto"):
        resolve_device("cuda")


# ---- joining

@pytest.fixture
def joined(monkeypatch, started):
    """Joins as a rank with the process group and torch's switches recorded instead of set."""
    def join(launcher, rank, world, gpus, device, visible=1, local=None, cpu_threads="auto"):
        seen = {}
        monkeypatch.setenv("WORLD_SIZE", "")  # put back afterwards
        monkeypatch.setattr(os, "cpu_count", lambda: 16)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: seen.update(threads=count))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.update(index=index))
        monkeypatch.setattr(ranks.dist, "init_process_group",
                            lambda backend, **keys: seen.update(backend=backend, **keys))
        ranks.join(started(launcher, rank, world, local), gpus, device, 60.0, cpu_threads)
        return seen | {"world": os.environ["WORLD_SIZE"]}
    return join


@pytest.mark.parametrize("rank, visible, index", [(0, 8, 0), (5, 8, 5), (5, 1, 0), (0, 1, 0), (3, 2, 1)])
def test_the_device_index_is_within_what_is_visible(joined, rank, visible, index):
    seen = joined("torchrun", rank, 8, 8, "cuda", visible)
    assert seen["index"] == index and "nccl" in seen["backend"] and "cpu:gloo" in seen["backend"]


@pytest.mark.parametrize("launcher, world, gpus, cpu_threads, threads", [
    ("torchrun", 8, 8, "auto", 2), ("torchrun", 8, 4, "auto", 4), ("none", 1, 1, "auto", 16), ("torchrun", 4, 4, 3, 3),
    ("torchrun", 32, 32, "auto", 1)])
def test_ranks_share_the_cores_and_the_group_is_as_large_as_asked(joined, launcher, world, gpus, cpu_threads, threads):
    seen = joined(launcher, 0, world, gpus, "cpu", cpu_threads=cpu_threads)
    assert (seen["threads"], seen["world"], seen["backend"]) == (threads, str(gpus), "gloo")
    assert seen["timeout"] == datetime.timedelta(seconds=60)
    assert seen.get("world_size") == (1 if launcher == "none" else None)  # else the environment says
