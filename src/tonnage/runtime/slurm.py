"""SLURM: the batch script of a run, what is asked of its commands, and where the ranks of a job step meet.

The script is written to be read: https://slurm.schedmd.com/sbatch.html. What it does at the end of a job follows from
three facts. SIGUSR1 kills torchrun and deepspeed and orphans their ranks, so it is sent to the batch shell alone. On
preemption SIGTERM goes to the steps and the batch shell hears nothing. torchrun returns 1 whatever its ranks return, so
status.json says how a run ended.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tonnage.config.compose import ROOT
from tonnage.config.schema import Config
from tonnage.errors import ConfigError

FIRST_PORT, NUM_PORTS = 10000, 20000  # below the ports that Linux gives to outgoing connections
OTHERS_END_S = 120  # for the other tasks of a step, once one has ended

ACCOUNT_OF_STARTS = """\
# ---- a line in `jobs` for each start; one that starts again and again without a new checkpoint is broken
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-$SLURM_JOB_ID}
newest=$(ls "$RUN/checkpoints" | grep '^step-' | tail -n 1)
echo "$(date -u +%FT%TZ) $JOB started on $SLURM_JOB_NODELIST at ${newest:-step 0}" >> "$RUN/jobs"
if [ "$(grep -c " $JOB started on .* at ${newest:-step 0}$" "$RUN/jobs")" -gt $STARTS ]; then
  echo "$JOB given up: $STARTS starts without a checkpoint after ${newest:-step 0}; see $RUN/logs" | tee -a "$RUN/jobs"
  exit 1
fi
"""

RENDEZVOUS = """\
# ---- ranks meet on the first node, at a port that follows from the job and is free there
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
[ -n "$MASTER_ADDR" ] || { echo "no first node in SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST"; exit 1; }
MASTER_PORT=$((FIRST_PORT + SLURM_JOB_ID % NUM_PORTS))
while (: < "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2> /dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done
export MASTER_ADDR MASTER_PORT
""".replace("FIRST_PORT", str(FIRST_PORT)).replace("NUM_PORTS", str(NUM_PORTS))

SIGNALS = """\
# ---- the ranks. Signals come to this shell, never to launchers, which would die and leave their ranks behind
limit=
trap 'limit=1; echo "the time limit is near" > "$RUN/stop"' USR1
trap 'echo "SLURM ends the job" > "$RUN/stop"' TERM
# what SLURM and the kernel say of memory, in logs that hold earlier starts too; this job's own log may be elsewhere
memory_kills() {
  { cat "$RUN"/logs/*.log; [ ! -f /proc/$$/fd/1 ] || cat /proc/$$/fd/1; } 2> /dev/null |
    grep -ci 'oom[-_ ]kill\\|error: .*: Out Of Memory$'
}
kills=$(memory_kills)
"""

WAIT = """\
ranks=$!
while kill -0 $ranks 2> /dev/null; do wait $ranks; done  # a signal ends `wait`, not the ranks
trap - TERM
"""

ENDING = """\
# ---- how it ended is in status.json, if this start of this job has written it; exit codes of launchers say nothing
status() { sed -n "s/^ \\"$1\\": \\"\\?\\([a-z0-9]*\\).*/\\1/p" "$RUN/status.json"; }
job_has() { scontrol show job -o "$JOB" | grep -q "$1"; }
again() {  # unless the job was cancelled meanwhile; SLURM ends this script in its sleep
  [ $REQUEUE = true ] && job_has ' JobState=RUNNING ' || { echo "$1"; return; }
  echo "$(date -u +%FT%TZ) $JOB requeued: $1" | tee -a "$RUN/jobs"
  scontrol requeue "$JOB" && sleep 600
}
if [ "$(status job)" != "$SLURM_JOB_ID" ] || [ ! "$RUN/status.json" -nt "$RUN/jobs" ]; then
  echo "the ranks did not start (or another job is at this run); see $RUN/logs"
  exit 1
fi
why=; [ "$(memory_kills)" = "$kills" ] || why="; a process was killed for want of memory on its host (cluster.memory_gib)"
case $(status state) in
  done) exit 0 ;;
  stopped) [ $limit ] && again "time limit"
    job_has ' PreemptTime=[0-9]' && again "preempted"
    exit 75 ;;  # somebody asked for it
  failed) case $(status cause) in connection | device | hang | lost)
      again "lost at step $(status step): $(status cause)$why" ;; esac
    code=$(status exit_code)
    exit "${code:-1}" ;;  # what is to be mended, or would be the same the next time
  *) again "the ranks ended without a word at step $(status step)$why"
    exit 1 ;;
esac
"""


@dataclass(frozen=True)
class Job:
    """What a batch script is made from. `runs`: one folder, or those of a sweep; `words`: overrides of a resume."""

    name: str
    runs: tuple[Path, ...]
    logs: Path
    gpus: int
    gpus_per_node: int
    device: str
    lead_s: int
    memory_gib: int | None
    words: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        return self.gpus // self.gpus_per_node


def check(config: Config) -> None:
    """What only a cluster asks of a config.

    Raises:
        ConfigError: every rule that is broken.
    """
    cluster, limit_s = config.cluster, seconds(config.cluster.time)
    names = [name for name in cluster.environment if not re.fullmatch(r"[A-Za-z_]\w*", name)]
    rules = [
        (config.gpus == "auto", f"gpus=auto: must be given with cluster={cluster.name}: the ranks of all nodes together"),
        (bool(names), f"cluster.environment: {', '.join(names)}: not the name of a variable"),
        (any("\n" in str(value) for value in cluster.environment.values()), "cluster.environment: a value is one line"),
        (cluster.gpu_type is not None and config.device == "cpu", "cluster.gpu_type: not with device=cpu"),
        (limit_s is not None and cluster.lead_s != "auto" and cluster.lead_s >= limit_s,
         f"cluster.lead_s={cluster.lead_s}: must be below cluster.time={cluster.time}")]
    faults = [text for broken, text in rules if broken]
    if faults:
        raise ConfigError("\n".join(faults))


def seconds(limit: str | None) -> int | None:
    """`1-02:00:00` in seconds."""
    if limit is None:
        return None
    days, _, clock = limit.rpartition("-")
    hours, minutes, rest = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def sbatch_text(config: Config, job: Job) -> str:
    """The batch script: `sbatch` it, and again to go on."""
    cluster = config.cluster
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in _directives(config, job)),
             "# Starts the run and goes on with it: sbatch this file again to resume. Written by launch/submit.py.",
             "set -u", *_which_run(job), f"export PYTHON={shlex.quote(sys.executable)}",
             f"STARTS={cluster.starts_without_checkpoint} REQUEUE={str(cluster.requeue).lower()}",
             f"cd {shlex.quote(str(ROOT))}", ""]
    if _exports(cluster) or cluster.setup:
        lines += ["# ---- environment", *cluster.setup, *_exports(cluster), ""]
    return "\n".join([*lines, ACCOUNT_OF_STARTS, RENDEZVOUS, SIGNALS + _ranks(config, job) + WAIT, ENDING])


def _directives(config, job):
    cluster = config.cluster
    tasks = job.gpus_per_node if cluster.launcher == "srun" else 1
    cpus = cluster.cpus_per_gpu and cluster.cpus_per_gpu * (job.gpus_per_node // tasks)
    gpus = f"{cluster.gpu_type}:{job.gpus_per_node}" if cluster.gpu_type else job.gpus_per_node
    sweep = len(job.runs) > 1
    array = f"0-{len(job.runs) - 1}" + (f"%{cluster.array_limit}" if cluster.array_limit else "")
    options = {
        "job-name": job.name, "array": array if sweep else None, "partition": cluster.partition,
        "account": cluster.account, "qos": cluster.qos, "constraint": cluster.constraint, "exclude": cluster.exclude,
        "begin": cluster.begin, "time": cluster.time, "nodes": job.num_nodes, "ntasks-per-node": tasks,
        "cpus-per-task": cpus,
        "gres": f"gpu:{gpus}" if job.device == "cuda" and cluster.gpu_request == "gres" else None,
        "gpus-per-node": gpus if job.device == "cuda" and cluster.gpu_request == "gpus-per-node" else None,
        "mem": f"{job.memory_gib}G" if job.memory_gib else None,
        "output": f"{job.logs}/job-{'%A_%a' if sweep else '%j'}.log", "open-mode": "append",
        "signal": f"B:USR1@{job.lead_s}"}
    given = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    return [*given, *["--exclusive"] * cluster.exclusive, "--requeue" if cluster.requeue else "--no-requeue",
            *cluster.sbatch_lines]


def _which_run(job):
    if len(job.runs) == 1:
        return [f"export RUN={shlex.quote(str(job.runs[0]))}"]
    return ["RUNS=(", *(f"  {shlex.quote(str(run))}" for run in job.runs), ")",
            "export RUN=${RUNS[$SLURM_ARRAY_TASK_ID]}"]


def _exports(cluster):
    chosen = {"GLOO_SOCKET_IFNAME": cluster.interface, "NCCL_SOCKET_IFNAME": cluster.interface} if cluster.interface else {}
    return [f"export {name}={shlex.quote(str(value))}" for name, value in (chosen | cluster.environment).items()]


def _ranks(config, job):
    """The one `srun`: a launcher on each node, or each rank; under the supervisor where it may start them again."""
    cluster = config.cluster
    script = 'launch/train.py "$@"'
    launchers = {
        "torchrun": f'-m torch.distributed.run --nnodes={job.num_nodes} --nproc-per-node={job.gpus_per_node} '
                    f'--node-rank="$SLURM_NODEID" \\\n  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" '
                    f'--shutdown-timeout={job.lead_s} {script}',
        "deepspeed": f'-m deepspeed.launcher.runner --hostfile="$RUN/logs/hosts" --no_ssh --node_rank="$SLURM_NODEID" \\\n'
                     f'  --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" {script}',
        "srun": script}
    hosts = (f'scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/ slots={job.gpus_per_node}/" > "$RUN/logs/hosts"\n'
             if cluster.launcher == "deepspeed" else "")
    words = " ".join(['"run=$RUN"', *map(shlex.quote, job.words)])
    extra = "".join(f" {shlex.quote(word)}" for word in cluster.srun_args)
    container = f" {cluster.container}" if cluster.container else ""
    above = (f'"$PYTHON" -m tonnage.runtime.supervisor run="$RUN" restarts={cluster.max_restarts} -- \\\n  '
             if cluster.max_restarts else "")
    return (f'{hosts}{above}srun --kill-on-bad-exit=0 --wait={OTHERS_END_S} --open-mode=append '
            f'--output="$RUN/logs/%N.log"{extra}{container} bash -c \\\n'
            f"  'exec \"$PYTHON\" {launchers[cluster.launcher]}' rank {words} &\n")


# ---- SLURM's commands

def command(*words: str) -> str:
    """What a command of SLURM prints.

    Raises:
        ConfigError: it is not here, or refuses, in its own words.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigError(f"cluster=slurm: {words[0]} is not on this machine; submit from a login node of the cluster, or "
                          f"see the script with --print") from error
    if done.returncode:
        raise ConfigError(f"{words[0]} refused: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def last_job(run: Path) -> str | None:
    """The job that was last submitted for a run, or that started it last."""
    file = run / "jobs"
    ids = re.findall(r"^\S+ ([\d_]+) (?:submitted|started)", file.read_text(), re.MULTILINE) if file.is_file() else []
    return ids[-1] if ids else None


# ---- where the tasks of `srun python launch/train.py` meet

def rendezvous(rank: int, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT of this job step: as exported, else its first node and a port that follows from its ids.

    Raises:
        ConfigError: they cannot be found out, or the port is taken; never the local host instead.
    """
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        if env["MASTER_ADDR"].startswith(("localhost", "127.")) and int(env["SLURM_STEP_NUM_NODES"]) > 1:
            raise ConfigError(f"MASTER_ADDR={env['MASTER_ADDR']}: is another machine on each of the "
                              f"{env['SLURM_STEP_NUM_NODES']} nodes of this step; unset it, or name the first node")
        return {}
    nodes = command("scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]).split()
    port = FIRST_PORT + (int(env["SLURM_JOB_ID"]) + 97 * int(env.get("SLURM_STEP_ID", 0))) % NUM_PORTS
    if rank == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                raise ConfigError(f"MASTER_PORT: {port}, which follows from job {env['SLURM_JOB_ID']}, is taken on "
                                  f"{nodes[0]}; export MASTER_ADDR={nodes[0]} and a free MASTER_PORT") from error
    return {"MASTER_ADDR": nodes[0], "MASTER_PORT": str(port)}
