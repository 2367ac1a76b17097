"""Fine-tune a model: `python launch/train.py key=value ...`, or under deepspeed or torchrun; --help says more.

The launcher (or rank 0) composes and checks the config, prepares model and data, makes the run folder; ranks read what
it froze there.
"""

import os
import signal
import socket
import sys
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import _installed  # noqa: F401 - first
from _planning import require_fit, shape_of

from tonnage.config import rules
from tonnage.config.batch import BatchCut
from tonnage.config.compose import (
    CommandLine,
    compose_config,
    expand_sweep,
    groups,
    parse_command_line,
    recipes,
    schema_fields,
)
from tonnage.config.schema import Config
from tonnage.errors import (
    EXIT_DONE,
    EXIT_STOPPED_RESUMABLE,
    CheckpointError,
    ConfigError,
    NotFetched,
    TonnageError,
    UnknownFamily,
)
from tonnage.facts.gpus import gpu_of
from tonnage.plan import text
from tonnage.plan.planner import Plan, make_plan, settled_layout
from tonnage.report import measured
from tonnage.runtime import runs
from tonnage.runtime.driver import host_memory, known_gpu
from tonnage.runtime.entry import guarded, run_script
from tonnage.runtime.logs import log_to_folder, quiet_libraries
from tonnage.runtime.supervisor import restart_facts, start_ranks, supervise

HELP = """\
python launch/train.py [key=value ...]        starts its own ranks
torchrun --nproc-per-node N launch/train.py   or deepspeed launch/train.py: the same keys
  run=FOLDER [key=value ...]   go on with a run; run.fork=true starts a new one from its weights
  recipe=NAME                  a complete run: {recipes}
  -m key=a,b ...               one run for each combination of values
  --cfg                        print the composed config
  dry_run=true                 print layout, batch, steps and engine settings, and stop
groups: {groups}
keys: docs/config.md; e.g. {keys}"""


@dataclass(frozen=True)
class Start:
    """A run that is ready to start: its folder, the number of this attempt, its layout, and what it begins with."""

    folder: Path
    attempt: int
    model_folder: str
    layout: rules.Layout
    start_from: Path | None = None


def main(argv: list[str]) -> int:
    command = parse_command_line(argv)
    if command.help:
        print(HELP.format(recipes=", ".join(recipes()), groups=", ".join(groups()),
                          keys=", ".join(list(schema_fields())[:6])))
        return EXIT_DONE
    if command.multirun and command.print_config:
        raise ConfigError("--cfg: not with -m; print the config of one run")
    if command.multirun:
        return sweep(command)
    config = runs.config_of(command)
    if command.print_config:
        import yaml

        print(yaml.safe_dump(runs.redacted(asdict(config)), sort_keys=False), end="")
        return EXIT_DONE
    return launch(command, config)


def sweep(command: CommandLine) -> int:
    """One run after another, each in a process of its own; the worst exit code."""
    from tonnage.runtime.ranks import current_place

    if current_place().launcher != "none":
        raise ConfigError("-m: start a sweep by python launch/train.py -m ...; each run starts its own ranks")
    if command.run_folder is not None:
        raise ConfigError("run=: not with -m; a sweep makes new runs")
    points = expand_sweep(command.overrides)
    for point in points:
        compose_config(point)
    codes = []
    for number, point in enumerate(points, 1):
        print(f"run {number} of {len(points)}: {' '.join(point)}", flush=True)
        codes.append(run_script(Path(__file__), *point))
        if codes[-1] == EXIT_STOPPED_RESUMABLE:
            break
    return max(codes)


def launch(command: CommandLine, config: Config) -> int:
    """Be a rank, start the ranks, or step aside."""
    from tonnage.runtime import ranks

    place = ranks.current_place()
    device = ranks.resolve_device(config.device)
    gpus = config.gpus if config.dry_run and config.gpus != "auto" else ranks.resolve_gpus(config.gpus, device, place)
    machine = Machine(gpus, device, _local_gpus(place, device, gpus), ranks.started_by_deepspeed())
    planned = plan_run(config, machine)
    if config.dry_run:
        from tonnage.train.dry_run import print_dry_run

        if place.rank == 0:
            layout, plan = planned
            print(text.describe(config, plan) if plan else "no plan: the model's shape is known once it is fetched")
            print_dry_run(config, layout, command.overrides)
        return EXIT_DONE
    role = ranks.settle(place, gpus, device)
    if role == "aside":
        print(f"rank {place.rank}: not needed for gpus={gpus}; stepping aside", flush=True)
        return EXIT_DONE
    if place.rank == 0 and device == "cpu" and ranks.RUN_VARIABLE not in os.environ:
        print("no GPU driver on this machine: running on the CPU", flush=True)
    if role == "run" and place.launcher == "none" and config.cluster.max_restarts:
        role = "start"  # there must be somebody to start it again
    if role == "start":
        start, lock = begin(command, config, machine, planned)
        with lock:
            return supervise(lambda restart: _start(start.folder, gpus, restart), start.folder, config.cluster.max_restarts)
    return be_rank(command, config, machine, place, planned)


def _start(folder, gpus, restart):
    """Start the ranks of the last attempt, or of one more like it."""
    from tonnage.runtime import ranks

    if restart is not None:
        facts = runs.read_attempt(folder)
        del facts["number"]
        attempt = runs.add_attempt(folder, facts | {"time": f"{runs.now():%Y-%m-%dT%H:%M:%SZ}", "restart": restart})
        runs.settle(folder, "running", f"restart {restart['number']} of {restart['of']}", attempt=attempt,
                    step=restart["from_step"])
    launcher = "deepspeed" if ranks.started_by_deepspeed() else "tonnage"
    return start_ranks(__file__, sys.argv[1:], gpus, folder,
                       {ranks.RUN_VARIABLE: str(folder), ranks.LAUNCHER_VARIABLE: launcher})


@dataclass(frozen=True)
class Machine:
    """What a run has: ranks in all, the device they use, ranks of this node, and who started them."""

    gpus: int
    device: str
    local_gpus: int
    under_deepspeed: bool


Planned = tuple[rules.Layout, Plan | None]


def plan_run(config: Config, machine: Machine, model_folder: str | None = None) -> Planned:
    """The layout, and the plan where the model's shape and the memory are known; on a GPU it settles what is `auto`."""
    try:
        architecture = shape_of(config, model_folder)
    except (NotFetched, UnknownFamily):
        architecture = None
    gpu = _memory_of(config, machine)
    known = architecture is not None and gpu is not None
    if known and machine.device == "cuda":
        layout = settled_layout(config, *astuple(machine), architecture, gpu)
    else:  # on a CPU it is a test or a small run: the stated rules will do
        layout = rules.resolve_layout(config, *astuple(machine))
    return layout, make_plan(config, layout, architecture, gpu) if known else None


def _memory_of(config, machine):
    """The GPU of the plan: as configured, else the one that is here; on a CPU the host's memory."""
    if machine.device == "cpu":
        return host_memory(machine.local_gpus)
    return gpu_of(config.gpu.name, config.gpu.memory_gib, config.gpu.price_usd_h) or _gpu_here()


def _gpu_here():
    import torch

    found = torch.cuda.get_device_properties(0)
    return known_gpu(found.name, found.total_memory / 2**30)


def show_plan(config: Config, plan: Plan) -> None:
    """Print the plan of a run that is about to start.

    Raises:
        DoesNotFit: see `require_fit`.
    """
    if plan.layout.device == "cuda" and plan.gpu.name != _gpu_here().name:
        print(f"gpu={config.gpu.name}: planned for that, while this machine has {_gpu_here().title}", flush=True)
    print(text.describe(config, plan), flush=True)
    require_fit(config, plan, f"predicted peak {plan.memory.peak_bytes / 2**30:.2f} GiB of {plan.gpu.memory_gib:.2f} GiB "
                              f"({plan.gpu.title}); plan.refuse=false goes on anyway")


def begin(command: CommandLine, config: Config, machine: Machine, planned: Planned) -> tuple[Start, object]:
    """Show the plan, prepare model and data, make or reopen the run folder, write the attempt; it and the run's lock."""
    from tonnage.models.folder import folder_identity, resolve_folder
    from tonnage.report.metrics import require_tracker
    from tonnage.train.checkpoint import newest_complete
    from tonnage.train.session import prepare_data

    require_tracker(config.tracker)
    start_from = forked_from = None
    resumed = command.run_folder is not None and not config.run.fork
    if command.run_folder is not None and config.run.fork:
        forked_from = command.run_folder.resolve()
        start_from = newest_complete(forked_from / "checkpoints", runs.run_id(forked_from))
        if start_from is None:
            raise ConfigError(f"run={command.run_folder}: has no complete checkpoint to fork from")
    if resumed and runs.read_status(command.run_folder).get("state") == "done":
        raise ConfigError(f"run={command.run_folder}: is finished; export it with launch/export.py run=..., or train on "
                          f"in a new run with run.fork=true")
    lock = runs.lock_run(command.run_folder) if resumed else None
    supervised, restart = restart_facts(command.run_folder) if resumed else (False, None)
    if resumed and not supervised:
        runs.forget_stop(command.run_folder)  # whoever goes on with a run does not want it to stop for what was
    if resumed:
        before = runs.read_attempt(command.run_folder)
        start_from, forked_from = before["start_from"], before["forked_from"]  # a fork without a checkpoint of its own
        own = command.run_folder / "checkpoints"
        if start_from and not Path(start_from).is_dir() and not newest_complete(own, runs.run_id(command.run_folder)):
            raise CheckpointError(f"run={command.run_folder}: has no complete checkpoint, and {start_from}, which it was "
                                  f"forked from, is gone; put it back, or fork anew with run.fork=true")
    layout, plan = planned
    if plan is not None:
        show_plan(config, plan)  # before weights are fetched
    model_folder = resolve_folder(config.model)
    identity = folder_identity(model_folder, config.model.allow_pickle)
    if resumed and identity != before.get("model_identity", identity):  # a run that was only submitted has none yet
        raise ConfigError(f"model.path={config.model.path}: the weights there are not those this run was started with; "
                          f"give the same ones by model.path= or model.revision=, or start a new run with run.fork=true")
    if plan is None:
        layout, plan = plan_run(config, machine, model_folder)
        if plan is None:
            print(f"no plan: the shape of {config.model.name} or the memory of this machine is not known", flush=True)
        else:
            show_plan(config, plan)
    prepare_data(config, model_folder, progress=True)
    if resumed:
        folder = command.run_folder.resolve()
    else:
        label = f"{config.model.name}-{config.adapter.name}"
        folder, lock = runs.claim_run(config.run.root, config.run.name, label, asdict(rules.freeze(config, layout)))
    attempt = runs.add_attempt(folder, {
        "overrides": list(command.overrides) if resumed else [], "command": list(command.overrides),
        "model_folder": model_folder, "model_identity": identity, "start_from": str(start_from) if start_from else None,
        "forked_from": str(forked_from) if forked_from else None, "time": f"{runs.now():%Y-%m-%dT%H:%M:%SZ}",
        "layout": asdict(layout), "restart": restart})
    if plan is not None:
        measured.write(folder, attempt, text.as_dict(config, plan))
    runs.write_status(folder, "running", "starting", attempt=attempt, resumable=True)
    print(f"run folder: {os.path.relpath(folder)}", flush=True)
    return Start(folder, attempt, model_folder, layout, Path(start_from) if start_from else None), lock


def be_rank(command: CommandLine, config: Config, machine: Machine, place, planned: Planned) -> int:
    """Join the group, agree on the run folder, train."""
    import torch
    import torch.distributed as dist

    from tonnage.runtime import ranks
    from tonnage.train.run import train_run

    if ranks.RUN_VARIABLE in os.environ:
        ranks.die_with_parent()
    ranks.join(place, machine.gpus, machine.device, config.cluster.timeout_s, config.cpu_threads)
    lock = None
    try:
        group = ranks.preparation_group()
        shared = [None]
        if place.rank == 0:
            try:
                if ranks.RUN_VARIABLE in os.environ:
                    shared = [_attempt(Path(os.environ[ranks.RUN_VARIABLE]))]
                else:
                    start, lock = begin(command, config, machine, planned)
                    shared = [start]
            except TonnageError as error:
                shared = [error]
        dist.broadcast_object_list(shared, src=0, group=group)
        start = shared[0]
        if isinstance(start, TonnageError):
            raise start
        if not start.folder.is_dir():
            raise ConfigError(f"run.root={config.run.root}: {start.folder} is not visible on {socket.gethostname()}; run "
                              f"folders must be on a disk that all nodes share")
        log_to_folder(start.folder, place.rank)
        cuda = machine.device == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        code = train_run(start, group, start.layout, device)
        if place.rank == 0:
            measured.compare(start.folder, start.attempt)
        return code
    finally:
        dist.destroy_process_group()  # also before the first step: threads of a group that is left abort the process
        if lock is not None:
            lock.close()


def _attempt(folder):
    facts = runs.read_attempt(folder)
    start_from, layout = facts["start_from"], facts["layout"]
    return Start(folder, facts["number"], facts["model_folder"],
                 rules.Layout(**layout | {"cut": BatchCut(**layout["cut"])}), Path(start_from) if start_from else None)


def _local_gpus(place, device, gpus):
    """Ranks a launcher has started on this node, else the GPUs visible here."""
    import torch

    if place.launcher in ("torchrun", "deepspeed", "srun") and place.world_size > 1:
        return min(place.local_size, gpus)
    return gpus if device == "cpu" else max(1, torch.cuda.device_count())


if __name__ == "__main__":
    quiet_libraries()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until a rank knows better: nothing can be lost yet
    sys.exit(guarded(lambda: main(sys.argv[1:]), quiet=os.environ.get("RANK", "0") != "0"))
