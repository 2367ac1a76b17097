"""Jobs on a real SLURM of two nodes: submitted, stopped by every means there is, requeued, resumed; `make test-cluster`.

A node is a set of namespaces of this machine (slurm_up.sh), ranks talk over gloo. What is interrupted must end with the
weights and optimizer states of a run that never was, byte by byte.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from tiny import make_chat_model, make_chats

from tonnage.errors import EXIT_STOPPED_RESUMABLE, EXIT_USER_ERROR
from tonnage.runtime.runs import read_status
from tonnage.train.checkpoint import StoredTensors, newest_complete

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
STEPS = 16
SLOW_S = 1.0  # a step, where something is to happen meanwhile
pytestmark = pytest.mark.skipif(os.environ.get("TONNAGE_TEST_CLUSTER") != "1",
                                reason="make test-cluster sets up a SLURM for them")


class Cluster:
    """The SLURM of these tests, and a folder that its nodes share."""

    def __init__(self, place: Path, state: Path):
        self.place, self.state, self.started = place, state, time.monotonic()
        words = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
        self.env = {name: value for name, value in os.environ.items() if name not in words and not name.startswith("SLURM")}
        self.env |= {"PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(state / "etc" / "slurm.conf"),
                     "TONNAGE_CACHE": str(place / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                     "PYTHONPATH": f"{HERE / 'hook'}:{ROOT / 'src'}"}

    def run(self, *words, **env):
        return subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=self.place, timeout=120,
                              env=self.env | env)

    def output(self, *words, **env):
        done = self.run(*words, **env)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def on(self, node, log, *words):
        """A command begun on a node, without SLURM and its variables, in the folder of `log`."""
        env = {name: value for name, value in self.env.items() if name != "SLURM_CONF"}
        with open(log, "a") as output:
            return subprocess.Popen([self.state / "node_run", node, *map(str, words)], env=env, cwd=log.parent,
                                    stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def say(self, text):
        print(f"  {time.monotonic() - self.started:5.0f} s  {text}", flush=True)

    def keys(self, *words):
        """Overrides of a run of STEPS steps on two nodes."""
        return ["model=custom", f"model.path={self.place}/model", "data=files", f"data.path={self.place}/chats.jsonl",
                "data.seq_tokens=64", "device=cpu", "adapter=full", "precision=fp32", "strategy=fsdp", "gpus=2",
                "cluster.gpus_per_node=1", "batch.global_rows=6", "batch.micro_rows=2", "train.epochs=2", "tracker=none",
                "schedule=constant", "schedule.warmup_steps=0", "checkpoint.every_steps=1000",
                f"run.root={self.place}/outputs", *words]

    def launch(self, *words, step_s=0.0, code=0):
        """What launch/submit.py prints."""
        slow = {"TONNAGE_TEST_STEP_S": str(step_s)} if step_s else {}
        done = self.run(sys.executable, ROOT / "launch" / "submit.py", *words, **slow)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def submit(self, name, *words, step_s=0.0):
        """(run folder, job) of a new run."""
        run = self.place / "outputs" / name
        return run, self.submitted(run, *self.keys(f"run.name={name}", "cluster=slurm", *words), step_s=step_s)

    def submitted(self, run, *words, step_s=0.0):
        """The job of what was given to launch/submit.py."""
        job = re.match(r"job (\d+): ", self.launch(*words, step_s=step_s))[1]
        self.say(f"{run.name}: job {job} submitted")
        return job

    def job(self, job, field):
        return re.search(rf"\b{field}=(\S+)", self.output("scontrol", "show", "job", job))[1]

    def wait(self, what, condition, limit_s=120):
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {limit_s} s for: {what}\n{self.output('squeue')}\n{self.logs()}")
            time.sleep(0.2)

    def logs(self):
        files = sorted((self.place / "outputs").glob("*/logs/*.log"), key=os.path.getmtime)[-4:]
        return "\n".join(f"== {file}\n{file.read_text()[-1500:]}" for file in files)

    def ended(self, run, job, state="COMPLETED", limit_s=180):
        """Wait for the end of a job; what it did, for the reader."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        self.wait(f"the end of job {job} of {run.name}", lambda: self.job(job, "JobState") in over, limit_s)
        found = self.job(job, "JobState")
        for line in (run / "jobs").read_text().splitlines():
            self.say(f"{run.name}: {line}")
        self.say(f"{run.name}: {found}, exit code {self.job(job, 'ExitCode')}, {read_status(run)['message']}")
        assert found == state, self.logs()

    def until_step(self, run, step):
        self.wait(f"step {step} of {run.name}", lambda: read_status(run).get("step", 0) >= step)


def tensors(run):
    stored = StoredTensors(sorted((run / "checkpoints").glob("step-*"))[-1])
    return {name: stored[name] for name in stored.shapes}


def equal(run, other):
    one, two = tensors(run), tensors(other)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def losses(run):
    """Step -> loss, of the last attempt at each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def hosts_of(run):
    """Hosts of a run's ranks, by their order, as its log has them."""
    return re.findall(r"node (\S+): 1 rank", (run / "logs" / "rank-0.log").read_text())


def rank_of(run, rank):
    """Process id of a rank: nodes share the processes of this machine."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words, env = (place / "cmdline").read_text().split("\0"), (place / "environ").read_text().split("\0")
        except OSError:  # it has ended
            continue
        named = f"run={run}" in words or f"run.name={run.name}" in words
        if f"RANK={rank}" in env and named and any(word.endswith("launch/train.py") for word in words[:3]):
            return int(place.name)
    raise AssertionError(f"no rank {rank} of {run}")


def done_after(run, starts, steps=STEPS, hosts=2):
    """Whether a run is finished in one folder, with every step in its metrics, after so many starts."""
    status = read_status(run)
    assert (status["state"], status["step"], sorted(losses(run))) == ("done", steps, list(range(1, steps + 1)))
    assert len(list((run / "attempts").glob("*.yaml"))) == starts + 1  # 000 is what was submitted
    assert len(list((run / "logs").glob("node?.log"))) >= hosts
    assert not (run / "stop").exists()
    return True


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Set up, and taken down whatever happens. Where it cannot be had, the tests fail: they were asked for."""
    place, state = tmp_path_factory.mktemp("cluster"), Path(tempfile.mkdtemp(prefix="tn-"))
    up = subprocess.run(["bash", str(HERE / "slurm_up.sh"), str(state)], capture_output=True, text=True)
    try:
        if up.returncode:
            pytest.fail(f"no SLURM could be set up: {up.stderr}", pytrace=False)
        made = Cluster(place, state)
        make_chat_model(place / "model")
        make_chats(place / "chats.jsonl", 48)
        yield made
    finally:
        subprocess.run(["bash", str(HERE / "slurm_down.sh"), str(state)])
        shutil.rmtree(state, ignore_errors=True)


@pytest.fixture(scope="module")
def limited(cluster):
    """A run that its time limit will end in the middle: submitted first, looked at last, since it mostly sleeps."""
    return cluster.submit("limited", "cluster.time=00:02:00", "cluster.lead_s=30", step_s=6.0)


def over_ssh(cluster):
    """`deepspeed --hostfile` on node1: a variable of .deepspeed_env, a stop, then a rank that dies under the supervisor."""
    place = cluster.place / "ssh"
    place.mkdir()
    run, log = cluster.place / "outputs" / "ssh", place / "log"
    (place / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    # ssh brings nothing else of cluster.env but PYTHONPATH
    (place / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in {
        **{name: cluster.env[name] for name in ("TONNAGE_CACHE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")},
        "TONNAGE_TEST_STEP_S": "0.5"}.items()))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile=hosts", "--master_port=29501",
               ROOT / "launch" / "train.py"]
    keys = cluster.keys("run.name=ssh", "strategy=zero2", "checkpoint.every_steps=4", "model.name=of two words")
    first = cluster.on("node1", log, *command, *keys)
    cluster.until_step(run, 1)
    env = (Path("/proc") / str(rank_of(run, 1)) / "environ").read_text().split("\0")
    assert f"TONNAGE_CACHE={cluster.env['TONNAGE_CACHE']}" in env and not any(word.startswith("SLURM") for word in env)
    (run / "stop").write_text("enough\n")
    assert first.wait(120) == EXIT_STOPPED_RESUMABLE, log.read_text()[-3000:]
    status = read_status(run)
    cluster.say(f"ssh: {status['message']}")
    assert status["state"] == "stopped" and hosts_of(run) == ["node1", "node2"]
    supervisor = [sys.executable, "-m", "tonnage.runtime.supervisor", f"run={run}", "restarts=1", "--"]
    second = cluster.on("node1", log, *supervisor, *command, f"run={run}")
    cluster.until_step(run, max(6, status["step"] + 1))
    os.kill(rank_of(run, 1), signal.SIGKILL)
    cluster.say("ssh: rank 1 is dead")
    assert second.wait(180) == 0, log.read_text()[-3000:]
    restart = yaml.safe_load((run / "attempts" / "003.yaml").read_text())["restart"]
    cluster.say(f"ssh: {restart}")
    assert (restart["number"], restart["of"]) == (1, 1) and restart["from_step"] >= 4
    assert read_status(run)["state"] == "done" and len(list((run / "attempts").glob("*.yaml"))) == 3
    return run


@pytest.fixture(scope="module")
def ssh_run(cluster, limited):
    """The run of `over_ssh`, which goes on beside the tests before the one that asks for it."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(over_ssh, cluster)


@pytest.fixture(scope="module")
def whole(cluster, limited, ssh_run):
    """(a), (g): uninterrupted, by torchrun; on the same nodes at the same time one by srun."""
    first, second = cluster.submit("torchrun"), cluster.submit("srun", "cluster.launcher=srun")
    for run, job in (first, second):
        cluster.ended(run, job)
        assert done_after(run, 1)
    return first[0], second[0]


def test_a_wrong_partition_is_refused_in_slurms_words_and_leaves_nothing(cluster):
    words = cluster.keys("run.name=refused", "cluster=slurm", "cluster.partition=nope")
    said = cluster.launch(*words, code=EXIT_USER_ERROR)
    cluster.say(said.strip().splitlines()[-1])
    assert "sbatch refused" in said and "invalid partition specified: nope" in said and "Traceback" not in said
    assert not (cluster.place / "outputs" / "refused").exists()


def test_a_second_job_for_a_run_that_is_running_ends_without_harm(cluster, limited):
    run, job = limited
    cluster.until_step(run, 1)
    second = cluster.output("sbatch", "--parsable", run / "submit.sbatch")
    cluster.wait("the second job", lambda: cluster.job(second, "JobState") in ("FAILED", "COMPLETED"))
    assert (cluster.job(second, "ExitCode"), cluster.job(job, "JobState")) == ("1:0", "RUNNING")
    said = (run / "logs" / f"job-{second}.log").read_text()
    cluster.say(f"{run.name}: job {second}, {said.strip().splitlines()[-1]}")
    assert "another job is at this run" in said
    assert "another process is running it" in (run / "logs" / "node1.log").read_text()


def test_torchrun_and_srun_on_the_same_nodes_at_once_learn_the_same(whole):
    assert equal(*whole)


def test_the_deepspeed_launcher(cluster, whole):
    run, job = cluster.submit("deepspeed", "cluster.launcher=deepspeed", "strategy=zero2", "train.max_steps=5")
    cluster.ended(run, job)
    assert done_after(run, 1, steps=5)
    layout = yaml.safe_load((run / "attempts" / "001.yaml").read_text())["layout"]
    assert (layout["strategy"], layout["gpus"], layout["gpus_per_node"]) == ("zero2", 2, 1)
    found, expected = losses(run), losses(whole[0])
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-4)


def test_srun_by_hand_and_one_process_alone_is_refused(cluster, whole):
    train = [sys.executable, ROOT / "launch" / "train.py", *cluster.keys("run.name=by-hand", "train.max_steps=2")]
    cluster.output("srun", "-N2", "-n2", *train)
    assert read_status(cluster.place / "outputs" / "by-hand")["state"] == "done"
    alone = " ".join(map(str, [*train, "run.name=alone"]))
    job = cluster.output("sbatch", "--parsable", "-N2", "-n2", f"--output={cluster.place}/alone.log", "--wrap", alone)
    cluster.wait("the refusal", lambda: cluster.job(job, "JobState") in ("FAILED", "COMPLETED"))
    said = (cluster.place / "alone.log").read_text()
    cluster.say(said.strip().splitlines()[-1])
    assert "has 2 tasks on 2 nodes, and this one process was started" in said and "srun python" in said
    assert not (cluster.place / "outputs" / "alone").exists()


def test_torchrun_by_hand_meets_by_c10d(cluster, whole):
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
             "--rdzv-endpoint=node1:29500", ROOT / "launch" / "train.py",
             *cluster.keys("run.name=c10d", "train.max_steps=3")]
    logs = [cluster.place / f"c10d-{node}.log" for node in ("node1", "node2")]
    started = [cluster.on(log.stem[5:], log, *words) for log in logs]
    assert [process.wait(120) for process in started] == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    run = cluster.place / "outputs" / "c10d"
    assert read_status(run)["state"] == "done" and set(hosts_of(run)) == {"node1", "node2"}
    expected = losses(whole[0])
    assert losses(run) == pytest.approx({step: expected[step] for step in (1, 2, 3)}, rel=1e-6)


def test_a_sweep_is_an_array_and_a_point_that_loses_a_rank_is_requeued_alone(cluster, whole):
    printed = cluster.launch("-m", *cluster.keys("cluster=slurm", "gpus=1", "train.max_steps=4", "cluster.array_limit=2",
                                                 "optimizer.learning_rate=1e-4,2e-4"), step_s=SLOW_S)
    jobs = re.findall(r"^job (\d+_\d): (\S+)$", printed, re.MULTILINE)
    assert [job.split("_")[1] for job, _ in jobs] == ["0", "1"]
    killed = cluster.place / jobs[0][1]
    cluster.until_step(killed, 1)
    os.kill(rank_of(killed, 0), signal.SIGKILL)  # as the kernel does for want of memory
    for job, run in jobs:
        cluster.ended(cluster.place / run, job)
        assert done_after(cluster.place / run, 2 if run == jobs[0][1] else 1, steps=4, hosts=1)
        again = f"{job} requeued: the ranks ended without a word at step " in (cluster.place / run / "jobs").read_text()
        assert again == (run == jobs[0][1])
        assert f"{job} started on node" in (cluster.place / run / "jobs").read_text()
    configs = [yaml.safe_load((cluster.place / run / "config.yaml").read_text()) for _, run in jobs]
    assert [config["optimizer"]["learning_rate"] for config in configs] == [1e-4, 2e-4]


def test_a_preempted_job_is_requeued_and_resumes(cluster, whole):
    run, job = cluster.submit("preempted", "cluster.partition=low", "cluster.cpus_per_gpu=2", step_s=SLOW_S)
    cluster.until_step(run, 3)
    words = ("-p", "high", "-N2", "-n2", "-c3", "--output=/dev/null", "--wrap", "sleep 1")
    high = cluster.output("sbatch", "--parsable", *words)
    cluster.say(f"job {high} in partition high wants the nodes")
    cluster.ended(run, job)
    assert cluster.job(high, "JobState") == "COMPLETED"
    assert f"{job} requeued: preempted" in (run / "jobs").read_text()
    assert done_after(run, 2) and equal(run, whole[0])


def test_a_cancelled_job_writes_a_checkpoint_stays_away_and_is_resumed_by_hand(cluster, whole):
    run, job = cluster.submit("cancelled", step_s=SLOW_S)
    cluster.until_step(run, 3)
    cluster.launch(f"run={run}", "--cancel")
    cluster.ended(run, job, "CANCELLED")
    status = read_status(run)
    assert (status["state"], status["exit_code"]) == ("stopped", EXIT_STOPPED_RESUMABLE)
    assert newest_complete(run / "checkpoints", (run / "run-id").read_text().strip()) is not None
    assert "requeued" not in (run / "jobs").read_text()
    again = cluster.output("sbatch", "--parsable", run / "submit.sbatch")
    cluster.ended(run, again)
    assert done_after(run, 2) and equal(run, whole[0])


def test_a_run_goes_on_with_one_node_and_then_with_two_and_learns_the_same(cluster, whole):
    run, job = cluster.submit("elastic", step_s=SLOW_S)
    for resumed_with, stopped_behind in (("gpus=1", 2), ("gpus=2", 5)):
        cluster.until_step(run, stopped_behind)
        (run / "stop").write_text("other nodes\n")
        cluster.ended(run, job, "FAILED")  # 75 is not 0
        assert cluster.job(job, "ExitCode") == f"{EXIT_STOPPED_RESUMABLE}:0"
        job = cluster.submitted(run, f"run={run}", resumed_with, step_s=SLOW_S if resumed_with == "gpus=1" else 0)
    cluster.ended(run, job)
    jobs = (run / "jobs").read_text()
    assert re.findall(r"started on (\S+) at", jobs) == ["node[1-2]", "node1", "node[1-2]"] and "requeued" not in jobs
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, STEPS + 1))  # none twice
    assert losses(run) == pytest.approx(losses(whole[0]), rel=1e-5)
    said = (run / "logs" / "rank-0.log").read_text()
    for line in ("1 rank x 2 rows x 3 steps, was 2 x 2 x 2; the global batch is 6 rows as before",
                 "2 ranks x 2 rows x 2 steps, was 1 x 2 x 3; the global batch is 6 rows as before"):
        assert line in said
        cluster.say(f"{run.name}: {line}")
    assert done_after(run, 3)


def test_deepspeed_over_ssh_with_a_variable_a_stop_and_a_rank_that_dies(ssh_run, whole):
    assert losses(ssh_run.result(300)) == pytest.approx(losses(whole[0]), rel=1e-4)


def test_a_node_dies_and_the_job_goes_on_from_the_newest_checkpoint(cluster, whole):
    run, job = cluster.submit("node-lost", "checkpoint.every_steps=4", step_s=SLOW_S)
    cluster.until_step(run, 6)
    subprocess.run([cluster.state / "node_kill", "node2"], check=True)
    cluster.say("node2 is dead")
    cluster.wait("the requeue", lambda: cluster.job(job, "JobState") == "PENDING")
    subprocess.run([cluster.state / "node_start", "node2"], check=True)
    cluster.ended(run, job)
    assert "at step-00000004" in (run / "jobs").read_text()
    assert done_after(run, 2) and equal(run, whole[0])


def test_a_rank_dies_and_is_started_again_within_the_job(cluster, whole):
    run, job = cluster.submit("rank-lost", "cluster.max_restarts=1", "checkpoint.every_steps=4", step_s=SLOW_S)
    cluster.until_step(run, 6)
    os.kill(rank_of(run, 1), signal.SIGKILL)
    cluster.say("rank 1 is dead")
    cluster.ended(run, job)
    assert "requeued" not in (run / "jobs").read_text()
    restart = yaml.safe_load((run / "attempts" / "002.yaml").read_text())["restart"]
    assert (restart["number"], restart["of"], restart["from_step"]) == (1, 1, 4)
    assert done_after(run, 2) and equal(run, whole[0])


def test_the_time_limit_becomes_a_checkpoint_and_a_requeue(cluster, limited, whole):
    run, job = limited
    cluster.ended(run, job, limit_s=240)
    jobs = (run / "jobs").read_text()
    assert f"{job} requeued: time limit" in jobs and jobs.count(f" {job} started on node[1-2] at ") == 2
    assert done_after(run, 2) and equal(run, whole[0])


def test_status_says_where_a_run_stands(cluster, limited):
    printed = cluster.launch(f"run={limited[0]}", "--status")
    assert f"run: done, finished after step {STEPS}" in printed and f"last: step {STEPS}, loss " in printed
