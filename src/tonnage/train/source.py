"""Where windows come from: prepared rows in a seeded order, or a stream. Both know nothing of ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from tonnage.config.batch import BatchCut
from tonnage.data.pack import Row
from tonnage.data.prepare import Rows
from tonnage.data.stream import StreamRows
from tonnage.data.windows import Cursor, Windows
from tonnage.errors import CheckpointError


class Source(Protocol):
    """Gives the rows of the next window, the same on every rank."""

    def next(self, cursor: Cursor) -> tuple[Sequence[Row], Cursor]:
        """Rows of the window at `cursor`, and the cursor behind it."""

    def put_back(self, rows: Sequence[Row]) -> None:
        """The window last given was not used: `rows` come again, and belong to the state until then."""

    def num_windows(self, epochs: int) -> int | None:
        """Windows of that many epochs; None where the data has no known end."""

    def state(self) -> dict:
        """What a resume needs besides the cursor: arrays and JSON values by name."""

    def restore(self, state: dict) -> None:
        """Go on from `state`."""


class PreparedSource:
    """Rows on disk: the cursor is all the state there is."""

    def __init__(self, rows: Rows, seed: int, cut: BatchCut):
        self.rows = rows
        self.windows = Windows(rows.fingerprint, seed, rows.input_tokens, rows.weights, cut.global_rows,
                               cut.global_tokens)

    def next(self, cursor: Cursor) -> tuple[Sequence[Row], Cursor]:
        numbers, behind = self.windows.next(cursor)
        return [self.rows[int(number)] for number in numbers], behind

    def put_back(self, rows: Sequence[Row]) -> None:
        pass  # the cursor has not moved

    def num_windows(self, epochs: int) -> int:
        return sum(self.windows.num_windows(epoch) for epoch in range(epochs))

    def state(self) -> dict:
        return {"fingerprint": self.rows.fingerprint}

    def restore(self, state: dict) -> None:
        if state["fingerprint"] != self.rows.fingerprint:
            raise CheckpointError("the data are not those this run was started with (files, tokenizer, template or "
                                  "settings changed); put them back, or start a new run from its weights with "
                                  "run.fork=true")


class StreamSource:
    """Rows as they come; every rank reads the whole stream, so a window does not depend on the number of ranks."""

    def __init__(self, stream: StreamRows, cut: BatchCut):
        self.stream, self.cut = stream, cut
        self._held: list[Row] = []  # read, but not used yet

    def next(self, cursor: Cursor) -> tuple[Sequence[Row], Cursor]:
        rows, tokens = [], 0
        while len(rows) != self.cut.global_rows:
            row = self._held.pop(0) if self._held else self.stream.next_row()
            tokens += len(row.tokens)
            if rows and self.cut.global_tokens and tokens > self.cut.global_tokens:
                self._held.insert(0, row)
                break
            rows.append(row)
        return rows, replace(cursor, row=cursor.row + len(rows), window=cursor.window + 1)

    def put_back(self, rows: Sequence[Row]) -> None:
        self._held[:0] = rows

    def num_windows(self, epochs: int) -> None:
        return None

    def state(self) -> dict:
        return self.stream.state() | {f"held.{number}.{name}": getattr(row, name)
                                      for number, row in enumerate(self._held) for name in Row._fields}

    def restore(self, state: dict) -> None:
        num_held = sum(name.startswith("held.") for name in state) // len(Row._fields)
        self._held = [Row(*(state[f"held.{number}.{name}"] for name in Row._fields)) for number in range(num_held)]
        self.stream.restore({name: value for name, value in state.items() if not name.startswith("held.")})
