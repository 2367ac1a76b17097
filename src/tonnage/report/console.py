"""What a person sees: the start-up table, the progress of a run, its end. Rank 0 only."""

import resource
import statistics
import sys
import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

LINE_EVERY_S = 10.0
BAR_EVERY_S = 1.0
RECENT_STEPS = 20


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


def count(value: float, noun: str) -> str:
    """`1 row`, `1,200 rows`, `0.7 epochs`."""
    return f"{value:,.3g} {noun}s" if value != int(value) else f"{value:,.0f} {noun}{'' if value == 1 else 's'}"


def memory_gib(device) -> float:
    """Peak memory of this rank on a torch.device: allocated on the GPU, resident on the CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class StepProgress:
    """A bar with the latest figures on a terminal; a line every few seconds elsewhere, within a long step too."""

    def __init__(self, num_steps: int, first_step: int, show: bool):
        self.num_steps, self.step, self.show, self.bar = num_steps, first_step, show, None
        self.first_line, self.shown, self.begun, self.text = first_step + 1, 0.0, 0.0, ""
        self.ended, self.recent_s = None, deque(maxlen=RECENT_STEPS)
        self.every_s = LINE_EVERY_S
        if show and sys.stdout.isatty():
            # on a narrow terminal the figures are cut off at their end, not the count
            fixed, cut = Column(min_width=2 * len(str(num_steps)) + 1), Column(no_wrap=True)
            self.bar = Progress(TextColumn("step", table_column=Column(min_width=4)),
                                MofNCompleteColumn(table_column=fixed),
                                BarColumn(bar_width=10), TextColumn("{task.description}", table_column=cut))
            self.every_s = BAR_EVERY_S
            self.bar.start()
            self.task = self.bar.add_task("", total=num_steps, completed=first_step)

    def micro(self, num_done: int, num_micros: int) -> None:
        """Show how far a step is, if nothing has been shown for a while; called once a micro-batch, so it is cheap."""
        if not self.show:
            return
        now = time.monotonic()
        if num_done == 1:
            self.begun = now
        if now - max(self.begun, self.shown) < self.every_s or num_done == num_micros:
            return
        self.shown, where = now, f"micro-batch {num_done}/{num_micros}"
        if self.bar is not None:
            self.bar.update(self.task, description=f"{where}  {self.text}")
        else:
            print(f"step {self.step + 1}/{self.num_steps}, {where}", flush=True)

    def update(self, step: int, text: str) -> None:
        """Show that `step` steps are done."""
        now = time.monotonic()
        if self.ended is not None:  # the first step is not counted: memory, caches and kernels are made in it
            self.recent_s.append(now - self.ended)
        self.step, self.ended = step, now
        left = self._left()
        self.text = f"{text}  {left}".rstrip()
        if self.bar is not None:
            self.text = f"{left}  {text}".lstrip()
            self.bar.update(self.task, completed=step, description=self.text)
        elif self.show and (now - self.shown >= LINE_EVERY_S or step in (self.first_line, self.num_steps)):
            print(f"step {step}/{self.num_steps}  {self.text}", flush=True)
        else:
            return
        self.shown = now

    def _left(self):
        """Time left by the median of recent steps; unknown behind the first."""
        if not self.recent_s or self.step == self.num_steps:
            return ""
        return f"{statistics.median(self.recent_s) * (self.num_steps - self.step) / 60:.1f} min left"

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()
