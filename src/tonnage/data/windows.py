"""The window: the rows of one optimizer step, a function of data, seed and epoch that knows nothing of GPUs.

The order of an epoch is a permutation seeded by (data fingerprint, seed, epoch). A window is the next slice of it. How
a window is cut into shares and micro-batches is decided afterwards and may change at any window.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Cursor:
    """Where the data stands: `row` rows of epoch `epoch` have been used, in `window` windows since the start."""

    epoch: int = 0
    row: int = 0
    window: int = 0


def epoch_order(fingerprint: str, seed: int, epoch: int, weights: np.ndarray) -> np.ndarray:
    """Row numbers of one epoch in order, int64[n].

    Row i appears floor(weights[i]) times; of the fractional part of the weight, that share of the rows appears once
    more, other rows each epoch. Weights are equal within a data set.
    """
    rng = np.random.default_rng(_seed(fingerprint, seed, epoch))
    whole = np.floor(weights).astype(np.int64)
    rows = [np.repeat(np.arange(len(weights)), whole)]
    for weight in np.unique(weights):
        members = np.flatnonzero(weights == weight)
        rows.append(_turn(members, weight - np.floor(weight), fingerprint, seed, epoch))
    return rng.permutation(np.concatenate(rows))


def _turn(members, share, fingerprint, seed, epoch):
    """The `share` of `members` whose turn it is: successive slices of one fixed shuffle, so that each gets its turn."""
    if not share:
        return members[:0]
    order = np.random.default_rng(_seed(fingerprint, seed, "turns")).permutation(members)
    # ends are rounded, not sizes: one row of weight 0.5 has its turn every other epoch, not never
    first, end = (round(number * share * len(members)) for number in (epoch, epoch + 1))
    return np.take(order, np.arange(first, end), mode="wrap")


def _seed(*parts):
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8])


class Windows:
    """The windows of a data set of known size.

    Args:
        input_tokens: non-padding input tokens of each row, int[rows]; used with `global_tokens`.
        weights: times each row is seen per epoch, float[rows].
        global_rows, global_tokens: size of a window; exactly one is given.
    """

    def __init__(self, fingerprint: str, seed: int, input_tokens: np.ndarray, weights: np.ndarray,
                 global_rows: int | None = None, global_tokens: int | None = None):
        assert (global_rows is None) != (global_tokens is None)
        self.fingerprint, self.seed, self.weights = fingerprint, seed, weights
        self.input_tokens, self.global_rows, self.global_tokens = input_tokens, global_rows, global_tokens
        self._order = (-1, None)

    def order(self, epoch: int) -> np.ndarray:
        """Row numbers of `epoch` in order; the last one asked for is kept."""
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.fingerprint, self.seed, epoch, self.weights))
        return self._order[1]

    def next(self, cursor: Cursor) -> tuple[np.ndarray, Cursor]:
        """Row numbers of the window at `cursor`, and the cursor behind it. The last window of an epoch is short."""
        order = self.order(cursor.epoch)
        rows = order[cursor.row:cursor.row + self._num_rows(order, cursor.row)]
        behind = replace(cursor, row=cursor.row + len(rows), window=cursor.window + 1)
        if behind.row == len(order):
            behind = replace(behind, epoch=cursor.epoch + 1, row=0)
        return rows, behind

    def _num_rows(self, order, start):
        if self.global_rows is not None:
            return self.global_rows
        # a row has at least one token, so this many rows are enough to look at
        tokens = np.cumsum(self.input_tokens[order[start:start + self.global_tokens]])
        return max(1, int(np.searchsorted(tokens, self.global_tokens, side="right")))

    def num_windows(self, epoch: int) -> int:
        """Windows of `epoch`: the steps it takes."""
        if self.global_rows is not None:
            return -(-len(self.order(epoch)) // self.global_rows)
        count, cursor = 0, Cursor(epoch=epoch)
        while cursor.epoch == epoch:
            _, cursor = self.next(cursor)
            count += 1
        return count


def cut_window(lengths: Sequence[int], num_ranks: int, micro_rows: int) -> list[list[list[int]]]:
    """Shares and micro-batches: `[rank][micro-batch]` -> positions in the window.

    Rows are dealt out from the longest to the shortest, so that shares differ by at most one row, rows of a
    micro-batch are of like length, and ranks are busy equally long. Every rank gets the same number of micro-batches,
    ceil(largest share / micro_rows); those without rows are empty lists. Equal input gives equal output.
    """
    longest_first = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    shares = [longest_first[rank::num_ranks] for rank in range(num_ranks)]
    num_micros = -(-len(shares[0]) // micro_rows)
    return [[share[i * micro_rows:(i + 1) * micro_rows] for i in range(num_micros)] for share in shares]
