"""What a person sees: the start-up table, the progress of a run, its end. Rank 0 only."""

import resource
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

LINE_EVERY_S = 10.0


def table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print a table of two columns."""
    grid = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows:
        grid.add_row(name, value)
    # a pipe or a log file has no width of its own; nothing is to be cut off there
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(grid, markup=False)


def number(value: float) -> str:
    """12,345 or 1.23e-05, whichever is short."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.4g}"


def memory_gib(device) -> float:
    """Peak memory of this rank on a torch.device: allocated on the GPU, resident on the CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class StepProgress:
    """A bar with the latest figures on a terminal; a line every few seconds elsewhere."""

    def __init__(self, num_steps: int, first_step: int, show: bool):
        self.num_steps, self.show, self.bar = num_steps, show, None
        self.first_step, self.started, self.printed = first_step, time.monotonic(), float("-inf")
        if show and sys.stdout.isatty():
            self.bar = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
                                TimeRemainingColumn())
            self.bar.start()
            self.task = self.bar.add_task("", total=num_steps, completed=first_step)

    def update(self, step: int, text: str) -> None:
        """Show that `step` steps are done."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=text)
            return
        now = time.monotonic()
        if self.show and (now - self.printed >= LINE_EVERY_S or step == self.num_steps):
            left_s = (now - self.started) / (step - self.first_step) * (self.num_steps - step)
            print(f"step {step}/{self.num_steps}  {text}  {left_s / 60:.1f} min left", flush=True)
            self.printed = now

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()
