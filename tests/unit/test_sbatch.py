"""The batch script and the manifest: their exact text, every key in them, and what bash makes of the end of a job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from scripts import load_script

from tonnage.config.compose import ROOT, compose_config, schema_fields
from tonnage.errors import ConfigError, DoesNotFit
from tonnage.runtime import runs, slurm

BASE = ["model=llama7b", "gpu=h100", "gpus=16", "cluster=slurm"]
DIRECTIVES = """\
#!/bin/bash
#SBATCH --job-name=x
#SBATCH --partition=gpu
#SBATCH --time=12:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --mem=64G
#SBATCH --output=/runs/x/logs/job-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
# Starts the run and goes on with it: sbatch this file again to resume. Written by launch/submit.py.
set -u
export RUN=/runs/x
"""
TORCHRUN = """\
srun --kill-on-bad-exit=0 --wait=120 --open-mode=append --output="$RUN/logs/%N.log" bash -c \\
  'exec "$PYTHON" -m torch.distributed.run --nnodes=2 --nproc-per-node=8 --node-rank="$SLURM_NODEID" \\
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --shutdown-timeout=300 launch/train.py "$@"' rank "run=$RUN" &
"""
DEEPSPEED = """\
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/ slots=8/" > "$RUN/logs/hosts"
srun --kill-on-bad-exit=0 --wait=120 --open-mode=append --output="$RUN/logs/%N.log" bash -c \\
  'exec "$PYTHON" -m deepspeed.launcher.runner --hostfile="$RUN/logs/hosts" --no_ssh --node_rank="$SLURM_NODEID" \\
  --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" launch/train.py "$@"' rank "run=$RUN" &
"""
SRUN = """\
srun --kill-on-bad-exit=0 --wait=120 --open-mode=append --output="$RUN/logs/%N.log" bash -c \\
  'exec "$PYTHON" launch/train.py "$@"' rank "run=$RUN" &
"""


def job(*runs_, **changes):
    facts = {"name": "x", "runs": tuple(map(Path, runs_ or ("/runs/x",))), "logs": Path("/runs/x/logs"), "gpus": 16,
             "gpus_per_node": 8, "device": "cuda", "lead_s": 300, "memory_gib": 64} | changes
    return slurm.Job(**facts)


def script(*overrides, **changes):
    """The text of a two-node job; bash can read it."""
    text = slurm.sbatch_text(compose_config([*BASE, *overrides]), job(*changes.pop("runs", ()), **changes))
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    return text


@pytest.fixture(scope="module")
def submit():
    return load_script("launch/submit")


# ---- the text

@pytest.mark.parametrize("launcher, command, tasks", [("torchrun", TORCHRUN, 1), ("deepspeed", DEEPSPEED, 1),
                                                      ("srun", SRUN, 8)])
def test_the_whole_text(launcher, command, tasks):
    text = script("cluster.partition=gpu", "cluster.time=12:00:00", f"cluster.launcher={launcher}")
    head = DIRECTIVES.replace("ntasks-per-node=1", f"ntasks-per-node={tasks}")
    head += f"export PYTHON={sys.executable}\nSTARTS=3 REQUEUE=true\ncd {ROOT}\n\n"
    parts = [head + slurm.ACCOUNT_OF_STARTS, slurm.RENDEZVOUS, slurm.SIGNALS + command + slurm.WAIT, slurm.ENDING]
    assert text == "\n".join(parts)
    assert max(map(len, text.splitlines())) < 130 and len(text.splitlines()) < 80


@pytest.mark.parametrize("override, expected", [
    ("cluster.partition=a", "#SBATCH --partition=a\n"), ("cluster.account=b", "#SBATCH --account=b\n"),
    ("cluster.qos=c", "#SBATCH --qos=c\n"), ("cluster.constraint='a100&nvlink'", "#SBATCH --constraint='a100&nvlink'\n"),
    ("cluster.exclude='n[1-3]'", "#SBATCH --exclude='n[1-3]'\n"),
    ("cluster.time=1-02:00:00", "#SBATCH --time=1-02:00:00\n"),
    ("cluster.begin=20:00", "#SBATCH --begin=20:00\n"), ("cluster.exclusive=true", "#SBATCH --exclusive\n"),
    ("cluster.gpu_request=gres", "#SBATCH --gres=gpu:8\n"), ("cluster.gpu_type=h100", "#SBATCH --gpus-per-node=h100:8\n"),
    ("cluster.cpus_per_gpu=12", "#SBATCH --cpus-per-task=96\n"), ("cluster.setup=['module load cuda/12']",
                                                                "# ---- environment\nmodule load cuda/12\n"),
    ("cluster.environment={A: it's $HOME, B: 1}", "export A='it'\"'\"'s $HOME'\nexport B=1\n"),
    ("cluster.interface=ib0", "export GLOO_SOCKET_IFNAME=ib0\nexport NCCL_SOCKET_IFNAME=ib0\n"),
    ("cluster.container='apptainer exec --nv a.sif'", "/%N.log\" apptainer exec --nv a.sif bash -c"),
    ("cluster.srun_args=['--mpi=none','--container-image=my image']", " --mpi=none '--container-image=my image' bash -c"),
    ("cluster.sbatch_lines=['--mail-type=FAIL','--mem=0']",
     "#SBATCH --requeue\n#SBATCH --mail-type=FAIL\n#SBATCH --mem=0\n"),
    ("cluster.requeue=false", "#SBATCH --no-requeue\n"),
    ("cluster.max_restarts=2", 'tonnage.runtime.supervisor run="$RUN" restarts=2 -- \\\n  srun --kill-on-bad-exit=0'),
    ("cluster.starts_without_checkpoint=7", "STARTS=7 REQUEUE=true\n")])
def test_every_key_reaches_the_script(override, expected):
    key, _, value = override.partition("=")
    quoted = f'{key}="{value}"' if " " in value and value[0] not in "['{\"" else override
    if value.startswith("{"):
        quoted = 'cluster.environment={A: "it\'s $HOME", B: 1}'
    assert expected in script(quoted)


def test_no_key_of_the_cluster_is_forgotten(submit, tmp_path):
    elsewhere = {"name", "gpus_per_node", "network_gb_s", "timeout_s", "hang_s", "launcher", "memory_gib",
                 "lead_s", "array_limit"}
    tested = Path(__file__).read_text()
    keys = {name.removeprefix("cluster.") for name in schema_fields() if name.startswith("cluster.")}
    for_kubernetes = {"image", "namespace", "volume_claim", "volume_path"}
    assert {key for key in keys - elsewhere - for_kubernetes if f"cluster.{key}=" not in tested} == set()


def test_ranks_without_gpus_ask_for_none_and_a_sweep_is_an_array():
    assert "gpus-per-node" not in script(device="cpu") and "gres" not in script("cluster.gpu_request=gres", device="cpu")
    text = script("cluster.array_limit=2", runs=("/runs/a b", "/runs/c"))
    assert "#SBATCH --array=0-1%2\n" in text and "/logs/job-%A_%a.log" in text
    assert "RUNS=(\n  '/runs/a b'\n  /runs/c\n)\nexport RUN=${RUNS[$SLURM_ARRAY_TASK_ID]}\n" in text


def test_overrides_of_a_resume_come_to_the_ranks_as_they_were_typed(tmp_path):
    words = ("data.path=it's a file", 'strategy.extra={a: "$HOME"}', "gpus=16")
    text = script(words=words)
    line = text[text.index("srun "):text.index(" &\n")]
    (tmp_path / "srun").write_text('#!/bin/bash\nwhile [ "$1" != bash ]; do shift; done\nexec "$@"\n')
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env={
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python"), "RUN": "/runs/a b",
        "SLURM_NODEID": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "123"})
    assert done.stdout.splitlines()[-4:] == ["run=/runs/a b", *words]
    assert "--node-rank=1" in done.stdout and "--master-addr=n1" in done.stdout


@pytest.mark.parametrize("overrides, expected", [
    (["gpus=auto"], "gpus=auto: must be given with cluster=slurm"),
    (["cluster.environment={a-b: 1}"], "cluster.environment: a-b: not the name of a variable"),
    (["cluster.time=00:10:00", "cluster.lead_s=600"], "cluster.lead_s=600: must be below cluster.time=00:10:00"),
    (["device=cpu", "cluster.gpu_type=h100"], "cluster.gpu_type: not with device=cpu")])
def test_what_a_cluster_asks_of_a_config(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        slurm.check(compose_config([*BASE, *overrides]))


@pytest.mark.parametrize("value", ["60", "12:00", "'1 day'"])
def test_a_time_has_one_form(value):
    with pytest.raises(ConfigError, match="cluster.time=.*: must be a time like '12:00:00' or '2-00:00:00'"):
        compose_config([f"cluster.time={value}"])


# ---- the end of a job: status.json, not exit codes, decides

@pytest.fixture
def ending(tmp_path):
    """Runs the last part of the script behind `before`, with a stub of scontrol; (exit code, what was requeued)."""
    def run(status, before="", job="JobState=RUNNING PreemptTime=None", requeue="true"):
        (tmp_path / "jobs").write_text("")
        if status is not None:
            state = {"message": "it says \"state\": \"done\"", "job": "7", **status}
            runs.write_status(tmp_path, state.pop("state"), state.pop("message"), **state)
            os.utime(tmp_path / "jobs", (1, 1))
        (tmp_path / "scontrol").write_text(
            f'#!/bin/bash\n[ $1 = requeue ] && {{ echo $2 > {tmp_path}/requeued; exit 1; }}\necho "JobId=1 {job} X=1"\n')
        (tmp_path / "scontrol").chmod(0o755)
        (tmp_path / "requeued").unlink(missing_ok=True)
        text = f"set -u\nJOB=7 SLURM_JOB_ID=7 REQUEUE={requeue} RUN={tmp_path}\n{slurm.SIGNALS}{before}\n{slurm.ENDING}"
        done = subprocess.run(["bash", "-c", text], capture_output=True, text=True,
                              env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
        requeued = tmp_path / "requeued"
        return done.returncode, requeued.read_text().strip() if requeued.exists() else None
    return run


STOPPED = {"state": "stopped", "step": 5, "resumable": True, "exit_code": 75}


@pytest.mark.parametrize("status, changes, expected", [
    ({"state": "done"}, {}, (0, None)),
    (STOPPED, {}, (75, None)),  # by hand
    (STOPPED, {"before": "limit=1"}, (75, "7")),
    (STOPPED, {"before": "limit=1", "requeue": "false"}, (75, None)),
    (STOPPED, {"job": "JobState=RUNNING PreemptTime=2026-12-01T00:00:00"}, (75, "7")),
    (STOPPED, {"job": "JobState=CANCELLED PreemptTime=None", "before": "limit=1"}, (75, None)),
    ({"state": "failed", "step": 5, "exit_code": 2, "cause": "fault"}, {}, (2, None)),
    ({"state": "failed", "step": 5}, {}, (1, None)),
    ({"state": "failed", "step": 5, "exit_code": 1, "cause": "connection"}, {}, (1, "7")),
    ({"state": "failed", "step": 5, "exit_code": 137, "cause": "lost"}, {}, (137, "7")),  # the supervisor gave up
    ({"state": "failed", "step": 5, "cause": "hang"}, {"requeue": "false"}, (1, None)),
    ({"state": "running", "step": 5}, {}, (1, "7")),
    ({"state": "running", "step": 5, "job": "6"}, {}, (1, None)),  # another job is at it
    ({"state": "running", "step": 5}, {"job": "JobState=CANCELLED PreemptTime=None"}, (1, None)),
    (None, {}, (1, None))])  # this start wrote none
def test_the_end_of_a_job(ending, status, changes, expected):
    assert ending(status, **changes) == expected


@pytest.mark.parametrize("said, named", [
    ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.", True),
    ("slurmstepd: error: Detected 1 oom-kill event(s) in step 7.0 cgroup.", True),
    ("srun: error: node1: task 0: Out Of Memory", True),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", False)])
@pytest.mark.parametrize("status", [{"state": "running", "step": 5},
                                    {"state": "failed", "step": 5, "exit_code": 1, "cause": "connection"}])
def test_a_memory_kill_of_this_start_is_named(ending, tmp_path, said, named, status):
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "node1.log"
    log.write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=6.0.\n")  # of an earlier start
    assert ending(status) == (1, "7") and "memory" not in (tmp_path / "jobs").read_text()
    assert ending(status, before=f"echo '{said}' >> {log}") == (1, "7")
    assert ("a process was killed for want of memory" in (tmp_path / "jobs").read_text()) == named


def test_a_status_of_an_earlier_start_decides_nothing(ending, tmp_path):
    runs.write_status(tmp_path, "stopped", "before", job="7")
    os.utime(tmp_path / "status.json", (1, 1))
    assert ending(None, before="limit=1") == (1, None)


def test_a_status_names_its_job(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    runs.write_status(tmp_path, "running", "x")
    assert runs.read_status(tmp_path)["job"] == "41"


def test_a_job_that_starts_again_and_again_without_a_checkpoint_is_given_up(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    text = f"set -u\nRUN={tmp_path} STARTS=2 SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2]\n{slurm.ACCOUNT_OF_STARTS}"

    def start():
        return subprocess.run(["bash", "-c", text], capture_output=True, text=True).returncode
    assert [start(), start(), start()] == [0, 0, 1]
    (tmp_path / "checkpoints" / "step-00000010").mkdir()
    (tmp_path / "checkpoints" / ".writing-1").mkdir()
    assert [start(), start(), start()] == [0, 0, 1]
    assert slurm.last_job(tmp_path) == "7"


# ---- launch/submit.py

def test_print_writes_nothing_and_a_plan_that_does_not_fit_is_refused(submit, capsys, tmp_path):
    words = [*BASE, f"run.root={tmp_path}", "run.name=x", "cluster.time=12:00:00"]
    assert submit.main([*words, "--print"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("#!/bin/bash\n#SBATCH --job-name=x\n") and "fits: peak" in printed.err
    assert "--nodes=2" in printed.out and "--mem=" in printed.out and list(tmp_path.iterdir()) == []
    assert submit.main(["-m", *words[:-2], "optimizer.learning_rate=1e-4,2e-4", "--print"]) == 0
    assert "#SBATCH --array=0-1\n" in capsys.readouterr().out
    with pytest.raises(DoesNotFit, match="not submitted(.|\n)*what fits"):
        submit.main([*words, "gpu=rtx4090", "adapter=full", "strategy=ddp"])
    for change, expected in ((["gpu=auto"], "gpu=auto: must be given"),
                             (["cluster=local"], "cluster=local: nothing to submit"),
                             (["cluster.time=00:02:00"], "cluster.time=00:02:00: the run is asked to stop")):
        with pytest.raises(ConfigError, match=expected):
            submit.main([*words, *change])
    with pytest.raises(ConfigError, match="jobs of an array are alike"):
        submit.main(["-m", *words[:-2], "gpus=8,16", "--print"])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Stubs of SLURM's commands, first on PATH."""
    def stub(**bodies):
        for name, body in bodies.items():
            (tmp_path / "bin").mkdir(exist_ok=True)
            (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
            (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return stub


def test_a_submission_freezes_the_run_and_a_refusal_leaves_nothing(submit, sbatch, capsys, tmp_path):
    words = [*BASE, f"run.root={tmp_path}/outputs", "run.name=x"]
    sbatch(sbatch="echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1", squeue="echo 'PENDING (Priority)'",
           scancel="exit 0")
    with pytest.raises(ConfigError, match="sbatch refused: sbatch: error: invalid partition specified: nope"):
        submit.main([*words, "cluster.partition=nope"])
    assert list((tmp_path / "outputs").iterdir()) == []
    sbatch(sbatch="echo 41")
    assert submit.main(words) == 0
    run = tmp_path / "outputs" / "x"
    assert "job 41: " in capsys.readouterr().out
    assert {file.name for file in run.iterdir()} >= {"config.yaml", "submit.sbatch", "status.json", "jobs", "attempts"}
    assert runs.read_status(run)["state"] == "queued" and not runs.untrained(run)
    assert yaml.safe_load((run / "config.yaml").read_text())["device"] == "cuda"
    assert runs.read_attempt(run)["number"] == 0 and runs.add_attempt(run, {}) == 1
    with pytest.raises(ConfigError, match="exists"):
        submit.main(words)
    with pytest.raises(ConfigError, match="its job 41 is PENDING"):
        submit.main([f"run={run}"])
    assert submit.main([f"run={run}", "--status"]) == 0 and "job 41: PENDING (Priority)" in capsys.readouterr().out
    assert submit.main([f"run={run}", "--cancel"]) == 0 and runs.read_status(run)["state"] == "stopped"
    sbatch(sbatch="echo 42", squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert submit.main([f"run={run}", "gpus=8"]) == 0
    assert '"run=$RUN" gpus=8 &' in (run / "submit.sbatch").read_text() and slurm.last_job(run) == "42"
    with pytest.raises(ConfigError, match="changed|was"):
        submit.main([f"run={run}", "seed=3"])


# ---- where ranks meet

STEP = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}


def test_ranks_of_a_step_meet_on_its_first_node(sbatch):
    sbatch(scontrol="echo n1; echo n2")
    assert slurm.rendezvous(1, STEP) == {"MASTER_ADDR": "n1", "MASTER_PORT": "10041"}
    assert slurm.rendezvous(0, STEP | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] == "10138"
    assert slurm.rendezvous(0, STEP | {"MASTER_ADDR": "n1", "MASTER_PORT": "9"}) == {}
    with pytest.raises(ConfigError, match="MASTER_ADDR=localhost: is another machine on each of the 2 nodes"):
        slurm.rendezvous(0, STEP | {"MASTER_ADDR": "localhost", "MASTER_PORT": "9"})


def test_a_port_that_is_taken_is_said(sbatch):
    import socket

    sbatch(scontrol="echo n1; echo n2")
    with socket.socket() as other:
        other.bind(("", 10041))
        other.listen()
        with pytest.raises(ConfigError, match="MASTER_PORT: 10041.* is taken on n1"):
            slurm.rendezvous(0, STEP)


def test_without_scontrol_there_is_no_local_host_instead(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="scontrol is not on this machine"):
        slurm.rendezvous(1, STEP)


# ---- Kubernetes

KUBERNETES = ["model=llama7b", "gpu=h100", "gpus=16", "cluster=kubernetes", "run.name=tide", "cluster.image=me/tonnage:1",
              "cluster.volume_claim=shared", "cluster.namespace=ml", "cluster.interface=eth0", "cluster.memory_gib=200"]
CONTAINER = {"name": str, "image": str, "command": [str], "env": [{"name": str, "value": str}],
             "resources": {"limits": dict, "requests": dict}, "volumeMounts": [{"name": str, "mountPath": str}]}
REPLICAS = {"replicas": int, "restartPolicy": str,
            "template": {"spec": {"containers": [CONTAINER], "volumes": [{"name": str}]}}}
MANIFEST = {"apiVersion": str, "kind": str, "metadata": {"name": str, "namespace": str},
            "spec": {"runPolicy": {"backoffLimit": int, "cleanPodPolicy": str},
                     "pytorchReplicaSpecs": {"Master": REPLICAS, "Worker": REPLICAS}}}


def missing(value, shape, at="."):
    """Paths where `value` has not the fields and types of `shape`."""
    if isinstance(shape, type):
        return [] if isinstance(value, shape) else [at]
    if isinstance(shape, list):
        return [at] if not isinstance(value, list) else [
            fault for i, one in enumerate(value) for fault in missing(one, shape[0], f"{at}[{i}]")]
    return [fault for key, inner in shape.items()
            for fault in ([f"{at}{key}"] if key not in value else missing(value[key], inner, f"{at}{key}."))]


def test_a_manifest_has_what_the_operator_needs(submit, capsys, tmp_path):
    assert submit.main([*KUBERNETES, "cluster.volume_path=/mnt", "data.system=\"it's\"", "--print"]) == 0
    text = capsys.readouterr().out
    job = yaml.safe_load(text)
    assert missing(job, MANIFEST) == [] and "&id" not in text and json.dumps(job)
    assert (job["apiVersion"], job["kind"], job["metadata"]) == ("kubeflow.org/v1", "PyTorchJob",
                                                                 {"name": "tide", "namespace": "ml"})
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert [specs[role]["replicas"] for role in ("Master", "Worker")] == [1, 1]
    assert all(one["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode") for one in specs.values())
    pod = specs["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch" and container["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "200Gi"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert {"name": "GLOO_SOCKET_IFNAME", "value": "eth0"} in container["env"]
    # a first start makes the run, a second goes on with it
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "23456"}
    *shell, folder = container["command"][:4]
    first = subprocess.run(container["command"], capture_output=True, text=True, env=env).stdout.splitlines()
    assert folder == "/mnt/outputs/tide" and first[-2:] == ["run.root=/mnt/outputs", "run.name=tide"]
    assert "data.system=\"it's\"" in first and "--node-rank=1" in first and "--nproc-per-node=8" in first
    (tmp_path / "config.yaml").write_text("")
    second = subprocess.run([*shell, str(tmp_path), "seed=1"], capture_output=True, text=True, env=env).stdout.splitlines()
    assert second[-1] == f"run={tmp_path}"


@pytest.mark.parametrize("change, expected", [
    ("run.name=null", "run.name=None: must be given"), ("run.name=Big_One", "small letters, digits and dashes"),
    ("cluster.image=null", "cluster.image: must be given"), ("cluster.volume_claim=null", "cluster.volume_claim: must be"),
    ("cluster.launcher=srun", "cluster.launcher=srun: there is only torchrun")])
def test_what_a_manifest_cannot_do_without(submit, change, expected):
    with pytest.raises(ConfigError, match=expected):
        submit.main([*KUBERNETES, change, "--print"])
    with pytest.raises(ConfigError, match="is only printed"):
        submit.main(KUBERNETES)
