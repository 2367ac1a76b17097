"""Where numbers go: metrics.jsonl always, and the chosen tracker."""

import importlib.util
import json
from pathlib import Path

from tonnage.config.schema import Tracker
from tonnage.errors import ConfigError


class Metrics:
    """Appends to metrics.jsonl and passes on to the tracker. Lines of a replayed step carry a later attempt."""

    def __init__(self, folder: Path, tracker: Tracker, attempt: int, config: dict):
        self.attempt, self.every_steps = attempt, tracker.every_steps
        self.file = open(folder / "metrics.jsonl", "a", buffering=1)
        self.tracker = _open_tracker(folder, tracker, config)

    def log(self, step: int, values: dict, always: bool = False) -> None:
        """One line, and every so many steps (or `always`) the tracker; values that are not finite stay as they are."""
        self.file.write(json.dumps({"step": step, "attempt": self.attempt, **values}) + "\n")
        if step % self.every_steps and not always:
            return
        self.tracker(step, {name: value for name, value in values.items() if isinstance(value, (int, float))})

    def close(self) -> None:
        """Flush everything."""
        self.file.close()
        self.tracker(None, {})


def require_tracker(tracker: Tracker) -> None:
    """Check before anything is started that the tracker can be imported.

    Raises:
        ConfigError: with the command that installs it.
    """
    if tracker.name != "none" and importlib.util.find_spec(tracker.name) is None:
        raise ConfigError(f"tracker={tracker.name}: the package is not installed; pip install {tracker.name}, or use "
                          f"tracker=tensorboard|none")


def _open_tracker(folder, tracker, config):
    """A function (step or None to close, values)."""
    if tracker.name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))
        return lambda step, values: (writer.close() if step is None else
                                     [writer.add_scalar(name, value, step) for name, value in values.items()])
    if tracker.name == "wandb":
        import wandb

        run = wandb.init(project=tracker.project, name=folder.name, id=folder.name, resume="allow", dir=str(folder),
                         config=config)
        return lambda step, values: run.finish() if step is None else run.log(values, step=step)
    if tracker.name == "mlflow":
        import mlflow

        mlflow.set_experiment(tracker.project)
        mlflow.start_run(run_name=folder.name)
        return lambda step, values: mlflow.end_run() if step is None else mlflow.log_metrics(values, step=step)
    return lambda step, values: None
