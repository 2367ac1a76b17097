"""Send a run to a cluster: `python launch/submit.py key=value ... cluster=slurm`; --help says more.

Composes, checks and plans here, so that what cannot run never waits in a queue; freezes the run folder; does not wait.
"""

import json
import math
import os
import secrets
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import _installed  # noqa: F401 - first
from _planning import require_fit, shape_of

from tonnage.config import rules
from tonnage.config.compose import CommandLine, expand_sweep, parse_command_line
from tonnage.config.schema import Config
from tonnage.errors import EXIT_DONE, ConfigError, NotFetched, UnknownFamily
from tonnage.facts.gpus import gpu_of
from tonnage.facts.sizes import SAVE_GIB_S
from tonnage.plan import text
from tonnage.plan.planner import GPUS_PER_NODE, Plan, make_plan, plan_layout
from tonnage.runtime import kubernetes, runs, slurm
from tonnage.runtime.entry import guarded

HELP = """\
python launch/submit.py key=value ... cluster=slurm cluster.partition=gpu cluster.time=12:00:00 gpu=h100 gpus=16
  run=FOLDER [key=value ...]   go on with a run; sbatch FOLDER/submit.sbatch does so without other keys
  run=FOLDER --status          where its job is, what the run says
  run=FOLDER --cancel          cancel its job
  -m key=a,b ...               one job array, one run for each combination of values
  --print                      print what would be submitted, and stop; the only way for cluster=kubernetes
exit codes: 0 submitted, 2 for you to mend, 3 does not fit
docs/cluster.md; keys: docs/config.md, cluster.*"""
LEAD_S, SLURM_EARLY_S = 300, 60  # without a plan; a signal comes so much too early
HOST_MEMORY_FACTOR = 1.5


def main(argv: list[str]) -> int:
    flags = {word for word in argv if word in ("--print", "--status", "--cancel")}
    command = parse_command_line([word for word in argv if word not in flags])
    if command.help:
        print(HELP)
        return EXIT_DONE
    if flags & {"--status", "--cancel"}:
        if command.run_folder is None or len(flags) > 1 or command.overrides:
            raise ConfigError(f"{' '.join(sorted(flags))}: takes run=FOLDER and nothing else")
        return status(command.run_folder) if flags == {"--status"} else cancel(command.run_folder)
    if command.print_config:
        raise ConfigError("--cfg is launch/train.py's")
    if command.multirun and command.run_folder is not None:
        raise ConfigError("run=: not with -m; a sweep makes new runs")
    commands = [replace(command, overrides=tuple(point)) for point in expand_sweep(command.overrides)] \
        if command.multirun else [command]
    configs = [runs.config_of(one) for one in commands]
    kinds = {config.cluster.name for config in configs}
    if kinds == {"kubernetes"} and len(configs) == 1:
        return print_manifest(command, configs[0], "--print" in flags)
    if kinds != {"slurm"}:
        raise ConfigError(f"cluster={'|'.join(sorted(kinds))}: nothing to submit to; add cluster=slurm (or kubernetes, one "
                          f"run at a time), or run it here by launch/train.py")
    return submit(commands, configs, "--print" in flags)


def submit(commands: list[CommandLine], configs: list[Config], only_print: bool) -> int:
    """Plan every run, freeze its folder, submit one job or one array."""
    planned = [ready(config) for config in configs]
    shape = {(one.gpus, one.gpus_per_node, one.device) for _, one, _ in planned}
    if len(shape) > 1 or any(config.cluster != configs[0].cluster for config in configs):
        raise ConfigError("-m: the jobs of an array are alike; sweep over gpus, device or cluster.* in separate commands")
    made = not only_print and commands[0].run_folder is None
    refuse_twice(commands[0])
    folders = [freeze(*one, only_print) for one in zip(commands, planned, strict=True)]
    try:
        scripts = [script(folder, command, *one) for folder, command, one in zip(folders, commands, planned, strict=True)]
        if only_print:
            print(scripts[0] if len(folders) == 1 else array(folders, planned), end="")
            return EXIT_DONE
        for folder, lines in zip(folders, scripts, strict=True):
            (folder / "submit.sbatch").write_text(lines)
        file = folders[0] / "submit.sbatch"
        if len(folders) > 1:
            place = folders[0].parent / f"sweep-{runs.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
            (place / "logs").mkdir(parents=True)
            file = place / "submit.sbatch"
            file.write_text(array(folders, planned, place))
        job = slurm.command("sbatch", "--parsable", str(file)).split(";")[0]
    except ConfigError:
        for folder in folders if made else []:
            shutil.rmtree(folder)
        raise
    for number, folder in enumerate(folders):
        own = job if len(folders) == 1 else f"{job}_{number}"
        with open(folder / "jobs", "a") as lines:
            lines.write(f"{runs.now():%Y-%m-%dT%H:%M:%SZ} {own} submitted\n")
        print(f"job {own}: {os.path.relpath(folder)}")
    print(f"its log: {os.path.relpath(folders[0] / 'logs')}; how it stands: python launch/submit.py "
          f"run={os.path.relpath(folders[0])} --status; stop it: --cancel; go on by hand: sbatch {os.path.relpath(file)}")
    return EXIT_DONE


def ready(config: Config) -> tuple[Config, rules.Layout, Plan | None]:
    """The config with its device settled, its layout and plan.

    Raises:
        ConfigError: a key is missing or wrong.
        DoesNotFit: with what does.
    """
    slurm.check(config)
    if config.device == "cpu":
        print("no plan for device=cpu", file=sys.stderr)
        return config, rules.resolve_layout(config, config.gpus, "cpu", config.gpus, _by_deepspeed(config)), None
    config = replace(config, device="cuda")  # nodes without a working driver must not train on their CPUs
    gpu = gpu_of(config.gpu.name, config.gpu.memory_gib, config.gpu.price_usd_h)
    if gpu is None:
        raise ConfigError("gpu=auto: must be given, since the plan is made here: gpu=h100 or another of docs/config.md, or "
                          "gpu=other gpu.memory_gib=...")
    try:
        architecture = shape_of(config)
    except (NotFetched, UnknownFamily):
        print(f"no plan: the shape of {config.model.path} is not known here; launch/prefetch.py fetches it",
              file=sys.stderr)
        per_node = min(config.gpus, GPUS_PER_NODE)
        return config, rules.resolve_layout(config, config.gpus, "cuda", per_node, _by_deepspeed(config)), None
    layout = plan_layout(config, architecture, gpu, _by_deepspeed(config))
    plan = make_plan(config, layout, architecture, gpu)
    print(text.describe(config, plan), file=sys.stderr)
    require_fit(config, plan, "it would not fit, so it is not submitted; plan.refuse=false submits it anyway")
    return config, layout, plan


def _by_deepspeed(config):
    return config.cluster.launcher == "deepspeed"


def refuse_twice(command: CommandLine) -> None:
    """Refuse to go on with a run that is finished, or whose job is still there."""
    if command.run_folder is None or runs.read_config(command.run_folder) is None:
        return
    if runs.read_status(command.run_folder).get("state") == "done":
        raise ConfigError(f"run={command.run_folder}: is finished; export it with launch/export.py run=...")
    job = slurm.last_job(command.run_folder)
    if job and queue(job):
        raise ConfigError(f"run={command.run_folder}: its job {job} is {queue(job)}; --cancel it first")


def freeze(command: CommandLine, planned: tuple, only_print: bool) -> Path:
    """The folder of the run: that of run=, or a new one with config.yaml and what was asked for in attempts/000.yaml."""
    config, layout, _ = planned
    label = f"{config.model.name}-{config.adapter.name}"
    if command.run_folder is not None and not config.run.fork:
        return command.run_folder.resolve()
    if only_print:
        return (Path(config.run.root) / (config.run.name or f"{label}-<UTC>")).resolve()
    start_from = None
    if config.run.fork:
        from tonnage.train.checkpoint import newest_complete

        start_from = newest_complete(command.run_folder.resolve() / "checkpoints", runs.run_id(command.run_folder))
        if start_from is None:
            raise ConfigError(f"run={command.run_folder}: has no complete checkpoint to fork from")
    folder, lock = runs.claim_run(config.run.root, config.run.name, label, asdict(rules.freeze(config, layout)))
    runs.add_attempt(folder, {
        "overrides": [], "command": list(command.overrides), "time": f"{runs.now():%Y-%m-%dT%H:%M:%SZ}",
        "start_from": str(start_from) if start_from else None,
        "forked_from": str(command.run_folder.resolve()) if start_from else None, "layout": asdict(layout)}, number=0)
    runs.write_status(folder, "queued", "submitted to SLURM", resumable=True)
    lock.close()
    return folder


def script(folder: Path, command: CommandLine, config: Config, layout: rules.Layout, plan: Plan | None) -> str:
    """The batch script of one run."""
    resumed = command.run_folder is not None and not config.run.fork
    return slurm.sbatch_text(config, _job((folder,), folder.name, folder / "logs", config, layout, plan,
                                          command.overrides if resumed else ()))


def array(folders: list[Path], planned: list, place: Path | None = None) -> str:
    """The batch script of a sweep: what its hungriest run needs."""
    place = place or folders[0].parent / "sweep-<UTC>"
    jobs = [_job(tuple(folders), place.name, place / "logs", *one) for one in planned]
    return slurm.sbatch_text(planned[0][0], replace(
        jobs[0], lead_s=max(job.lead_s for job in jobs), memory_gib=max(job.memory_gib or 0 for job in jobs) or None))


def _job(folders, name, logs, config, layout, plan, words=()):
    memory = config.cluster.memory_gib
    if memory == "auto":
        memory = plan and HOST_MEMORY_FACTOR * plan.host.memory_gib
    return slurm.Job(name, folders, logs, layout.gpus, layout.gpus_per_node, layout.device, lead_s(config, plan),
                     memory and math.ceil(memory), tuple(words))


def lead_s(config: Config, plan: Plan | None) -> int:
    """How long before the time limit the run is asked to stop: twice a micro-step and a save, and what SLURM is early."""
    if config.cluster.lead_s != "auto":
        return config.cluster.lead_s
    if plan is None or plan.speed is None:
        lead = LEAD_S
    else:
        micro_s = plan.speed.step_s / (plan.layout.cut.accumulation_steps or 1)
        lead = math.ceil(2 * (micro_s + plan.host.checkpoint_gib / SAVE_GIB_S)) + 2 * SLURM_EARLY_S
    limit = slurm.seconds(config.cluster.time)
    if limit is not None and lead >= limit:
        raise ConfigError(f"cluster.time={config.cluster.time}: the run is asked to stop {lead} s earlier, so that its "
                          f"checkpoint is written in time; give it longer, or set cluster.lead_s")
    return lead


def queue(job: str) -> str:
    """The state and reason of a job that waits or runs; empty once it is over."""
    try:
        return slurm.command("squeue", "-h", "-j", job, "-o", "%T (%R)")
    except ConfigError as error:
        if "Invalid job id" in str(error):
            return ""
        raise


def status(folder: Path) -> int:
    """Print where the job and the run stand."""
    runs.read_config(folder)
    job = slurm.last_job(folder)
    print(f"job {job}: {queue(job) or 'over'}" if job else "no job has been submitted for it")
    now = runs.read_status(folder)
    print(f"run: {now.get('state')}, {now.get('message')} (step {now.get('step', 0)}, {now.get('time')})")
    print((folder / "jobs").read_text() if job else "", end="")
    metrics = folder / "metrics.jsonl"
    if metrics.is_file() and metrics.read_text().splitlines():
        last = json.loads(metrics.read_text().splitlines()[-1])
        print("last: " + ", ".join(f"{name} {last[name]:.4g}" for name in ("step", "loss", "input_tokens_per_s")
                                   if isinstance(last.get(name), (int, float))))
    return EXIT_DONE


def cancel(folder: Path) -> int:
    """scancel; SLURM gives the ranks KillWait (mostly 30 s) to write a checkpoint."""
    job = slurm.last_job(folder)
    if not job or not queue(job):
        raise ConfigError(f"run={folder}: has no job that waits or runs")
    slurm.command("scancel", job)
    if runs.read_status(folder).get("state") == "queued":
        runs.write_status(folder, "stopped", f"job {job} was cancelled before it started", resumable=True)
    print(f"job {job} cancelled; go on with sbatch {os.path.relpath(folder / 'submit.sbatch')}")
    return EXIT_DONE


def print_manifest(command: CommandLine, config: Config, only_print: bool) -> int:
    """Print the PyTorchJob of a run; kubectl is yours."""
    if not only_print:
        raise ConfigError("cluster=kubernetes: is only printed: ... --print | kubectl apply -f -")
    config, layout, _ = ready(config)
    print(kubernetes.manifest(config, layout, command.overrides), end="")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
