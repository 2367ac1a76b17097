"""The run folder: one per run, whatever the number of ranks, and the single place that says what happened.

    config.yaml      written once, never changed after the first step
    run-id           what its checkpoints carry
    attempts/NNN.yaml  one per start: what was changed, where it ran, how the batch was cut; 000 is what was submitted
    status.json      queued, running, stopped, failed or done; the step; what to do next
    stop             made by whoever wants the run to stop; what is in it is the reason
    restart          what a supervisor above launchers tells the rank that begins next; gone once that has read it
    jobs             on a cluster, a line for each job and each of its starts
    metrics.jsonl    one line a step
    checkpoints/     step-00000100/ and so on
    logs/            one file a rank
"""

import fcntl
import json
import os
import re
import secrets
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import yaml

from tonnage.config import rules
from tonnage.config.compose import CommandLine, compose_config, to_schema
from tonnage.config.schema import Config
from tonnage.errors import ConfigError

REDACTED = "<not written>"
STOP_FILE = "stop"
SECRET_NAME = re.compile(r"(^|[._])(token|secret|password|passwd|apikey|key|credentials?)$", re.IGNORECASE)


def create_run(root: str, name: str | None, label: str, config: dict) -> Path:
    """Make a new run folder with its config.yaml.

    Args:
        label: <model>-<adapter>, for runs without a name.

    Raises:
        ConfigError: a run of that name exists.
    """
    folder = Path(root) / (name or f"{label}-{now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        if name is None:  # another run drew the same four digits in this second
            return create_run(root, name, label, config)
        raise ConfigError(f"run.name={name}: {folder} exists; go on with it by run={folder}, or choose another "
                          f"name") from error
    except OSError as error:
        raise ConfigError(f"run.root={root}: cannot make {folder}: {error.strerror}") from error
    for part in ("attempts", "checkpoints", "logs"):
        (folder / part).mkdir()
    _write_new(folder / "run-id", secrets.token_hex(8) + "\n")
    _write_new(folder / "config.yaml", yaml.safe_dump(redacted(config), sort_keys=False))
    return folder.resolve()


def claim_run(root: str, name: str | None, label: str, config: dict) -> tuple[Path, IO]:
    """A run folder and its lock: a new one, or that of `name` again where no step was ever taken.

    Such a folder keeps its attempts, logs and id; config.yaml becomes what this start asks for.

    Raises:
        ConfigError: a run of that name has been trained, or another process holds it.
    """
    folder = Path(root) / (name or "")
    if name is None or not untrained(folder):
        folder = create_run(root, name, label, config)
        return folder, lock_run(folder)
    lock = lock_run(folder)
    if not untrained(folder):  # it was, until another process that held it had ended
        lock.close()
        folder = create_run(root, name, label, config)  # says that it exists
    temporary = folder / f".config.{os.getpid()}"
    _write_new(temporary, yaml.safe_dump(redacted(config), sort_keys=False))
    temporary.replace(folder / "config.yaml")
    return folder.resolve(), lock


def untrained(folder: Path) -> bool:
    """Whether a run was started there and ended, however it ended, before its first step: nothing can be lost."""
    if not (folder / "config.yaml").is_file() or not (folder / "status.json").is_file():
        return False
    status = read_status(folder)
    if status.get("state") == "queued" or status.get("step") or any((folder / "checkpoints").glob("*")):
        return False
    # status.json is written once a second at most, metrics.jsonl at each step
    metrics = folder / "metrics.jsonl"
    return not (metrics.is_file() and re.search(r'^\{"step": [1-9]', metrics.read_text(), re.MULTILINE))


def run_id(folder: Path) -> str:
    """What a run's checkpoints carry; it stays when the folder is moved or renamed.

    Raises:
        ConfigError: the file is missing.
    """
    try:
        return (folder / "run-id").read_text().strip()
    except OSError as error:
        raise ConfigError(f"run={folder}: its file run-id cannot be read; copy run folders whole") from error


def _read(folder, file, parse):
    """A parsed file of a run folder; damage is the user's to mend and is named."""
    try:
        value = parse(file.read_text())
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"run={folder}: {file.name} is damaged ({reason}); put back a copy") from error
    if not isinstance(value, dict):
        raise ConfigError(f"run={folder}: {file.name} is damaged (no mapping in it); put back a copy")
    return value


def read_config(folder: Path) -> dict:
    """config.yaml of a run.

    Raises:
        ConfigError: the folder is not a run.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"run={folder}: no config.yaml there; a run folder is what launch/train.py made under "
                          f"run.root")
    return _read(folder, file, yaml.safe_load)


def config_of(command: CommandLine) -> Config:
    """The config of a command line; for a run that goes on, its own with the overrides on top."""
    if command.run_folder is None:
        return compose_config(command.overrides)
    base = read_config(command.run_folder)
    config = compose_config(command.overrides, base)
    if config.run.fork:
        rules.check_fork(asdict(to_schema(base)), asdict(config))
        named = any(word.startswith("run.name=") for word in command.overrides)
        return config if named else replace(config, run=replace(config.run, name=None))
    rules.check_resume(asdict(to_schema(base)), asdict(config))
    return config


def add_attempt(folder: Path, facts: dict, number: int | None = None) -> int:
    """Write attempts/NNN.yaml with the next number, or `number`; returns it."""
    number = 1 + max(_last_attempt(folder), 0) if number is None else number
    _write_new(folder / "attempts" / f"{number:03d}.yaml", yaml.safe_dump(redacted(facts), sort_keys=False))
    return number


def read_attempt(folder: Path, number: int | None = None) -> dict:
    """The facts of one attempt, by default the last, with its `number`.

    Raises:
        ConfigError: the run was never started.
    """
    number = _last_attempt(folder) if number is None else number
    if number < 0:
        raise ConfigError(f"run={folder}: was never started; go on with it by launch/train.py run={folder}")
    return _read(folder, folder / "attempts" / f"{number:03d}.yaml", yaml.safe_load) | {"number": number}


def _last_attempt(folder):
    return max((int(file.stem) for file in (folder / "attempts").glob("*.yaml")), default=-1)


def write_status(folder: Path, state: str, message: str, **facts) -> None:
    """Replace status.json, atomically. `state`: queued, running, stopped, failed or done."""
    job = {"job": os.environ["SLURM_JOB_ID"]} if "SLURM_JOB_ID" in os.environ else {}
    status = {"state": state, "message": message, "time": f"{now():%Y-%m-%dT%H:%M:%SZ}", "pid": os.getpid(), **job, **facts}
    temporary = folder / f".status.{os.getpid()}"
    temporary.write_text(json.dumps(status, indent=1) + "\n")
    temporary.replace(folder / "status.json")


def read_status(folder: Path) -> dict:
    """status.json, or an empty dict before the first start."""
    file = folder / "status.json"
    return _read(folder, file, json.loads) if file.is_file() else {}


def settle(folder: Path, state: str, message: str, **facts) -> None:
    """Write status.json for an attempt that has ended; the step it had come to stays."""
    status = read_status(folder)
    kept = {key: status[key] for key in ("step", "num_steps", "attempt") if key in status}
    write_status(folder, state, message, **kept | {"resumable": True} | facts)


def stop_wanted(folder: Path) -> str | None:
    """Why the run is to stop, by its file `stop`; None without one."""
    try:
        lines = (folder / STOP_FILE).read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return None
    return lines[0].strip()[:200] or f"file {STOP_FILE}"


def want_stop(folder: Path, reason: str) -> None:
    """Ask the run to stop."""
    (folder / STOP_FILE).write_text(reason + "\n")


def forget_stop(folder: Path) -> None:
    """The request was met, or came too late."""
    (folder / STOP_FILE).unlink(missing_ok=True)


def saved_step(folder: Path) -> int:
    """Step of the newest finished checkpoint by its name, -1 without one; whether it is whole is found when it is read."""
    return max((int(path.parent.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*/manifest.json")),
               default=-1)


def lock_run(folder: Path):
    """Hold the run for this process; the kernel lets go when it dies, however it dies. Keep what is returned.

    Raises:
        ConfigError: another process holds it.
    """
    handle = open(folder / ".lock", "w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"run={folder}: another process is running it ({read_status(folder).get('pid', 'unknown')}"
                          f"); wait for it or stop it") from error
    return handle


def now() -> datetime:
    """UTC."""
    return datetime.now(UTC)


def redacted(value, name: str = ""):
    """`value` without tokens and keys, by their names, in overrides (`a.api_key=...`) too: no run folder holds secrets."""
    if isinstance(value, dict):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item, name) for item in value]
    if isinstance(value, str):
        if SECRET_NAME.search(name):
            return REDACTED
        left, equals, _ = value.partition("=")
        override = equals and re.fullmatch(r"[\w.+~/]+", left)
        return f"{left}={REDACTED}" if override and SECRET_NAME.search(left) else value
    return value


def _write_new(file, text):
    with open(file, "x") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
