"""From samples to rows: cutting to length, best-fit-decreasing packing, and the arrays of a row.

Best fit puts each sample where it leaves the least room; worth reading: "Fewer Truncations Improve Language Modeling",
https://arxiv.org/abs/2404.10830. Samples of a row keep their own positions, so that they do not see each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tonnage.config.schema import Data
from tonnage.data.formats import Counts
from tonnage.data.template import Sample
from tonnage.errors import DataError

IGNORED = -100


class Row(NamedTuple):
    """What one row of a window holds: int32 arrays of shape [t], t <= seq_tokens, not padded.

    `labels` are the tokens where trained and -100 elsewhere, aligned with `tokens` (not shifted); `positions` restart
    at 0 with each packed sample, whose first label is always -100.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


def make_row(samples: Sequence[Sample]) -> Row:
    """One row of one or several samples, in this order."""
    tokens = np.concatenate([sample.tokens for sample in samples]).astype(np.int32)
    trained = np.concatenate([sample.trained for sample in samples])
    positions = np.concatenate([np.arange(len(sample.tokens), dtype=np.int32) for sample in samples])
    return Row(tokens, np.where(trained, tokens, np.int32(IGNORED)), positions)


def cut(sample: Sample, seq_tokens: int, truncate: str, counts: Counts) -> Sample | None:
    """The sample within `seq_tokens`, or None if it is dropped (too long, or no label left); `counts` says which."""
    counts.longest_tokens = max(counts.longest_tokens, len(sample.tokens))
    if len(sample.tokens) > seq_tokens:
        if truncate == "drop":
            counts.dropped_long += 1
            return None
        kept = slice(seq_tokens) if truncate == "end" else slice(len(sample.tokens) - seq_tokens, None)
        sample = Sample(sample.tokens[kept], sample.trained[kept].copy())
        sample.trained[:1] = False
        counts.truncated += 1
    if not sample.trained.any():
        counts.dropped_unlabelled += 1
        return None
    counts.kept += 1
    counts.tokens += len(sample.tokens)
    counts.label_tokens += int(sample.trained.sum())
    return sample


def check_dropped(counts: Sequence[Counts], data: Data, seq_tokens: int) -> None:
    """Stops where too few samples have something to learn.

    Raises:
        DataError: none is left, or more than `data.max_dropped_fraction` of the usable records were dropped.
    """
    usable = sum(count.read - count.bad for count in counts)
    unlabelled, too_long = (sum(getattr(count, name) for count in counts)
                            for name in ("dropped_unlabelled", "dropped_long"))
    dropped = unlabelled + too_long
    left = sum(count.kept for count in counts)
    if left and dropped <= data.max_dropped_fraction * usable:
        return
    longest = max((count.longest_tokens for count in counts), default=0)
    rule = f"the bound is data.max_dropped_fraction={data.max_dropped_fraction}" if left else "so there is no row left"
    raise DataError(f"{dropped} of {usable} samples were dropped, {rule}: {unlabelled} without a token to learn from "
                    f"within data.seq_tokens={seq_tokens}, {too_long} longer than it (longest: {longest} tokens), and "
                    f"{sum(count.bad for count in counts)} bad records skipped; raise data.seq_tokens, set "
                    "data.truncate=start to keep the answers, or check data.format and data.chat_template")


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing: bins of indices into `lengths`, each sum at most `capacity`; deterministic, O(n log n).

    Bins come in the order they are opened; of equal lengths the lower index goes first, and of bins with equal room the
    one last added to is filled.

    Raises:
        ValueError: a length below 1 or above the capacity.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if order and not 1 <= lengths[order[-1]] <= lengths[order[0]] <= capacity:
        raise ValueError(f"lengths must lie in 1..{capacity}, found {lengths[order[-1]]}..{lengths[order[0]]}")
    bins: list[list[int]] = []
    spaces = _Spaces(capacity)
    for index in order:
        space = spaces.smallest(lengths[index])
        if space is None:
            space = capacity
            bins.append([])
            number = len(bins) - 1
        else:
            number = spaces.take(space)
        bins[number].append(index)
        if space > lengths[index]:
            spaces.put(space - lengths[index], number)
    return bins


class _Spaces:
    """Open bins by the room they have left; a bit per node of a binary tree says whether a bin lies below it."""

    def __init__(self, capacity: int) -> None:
        self._size = 1 << capacity.bit_length()
        self._used = bytearray(2 * self._size)
        self._bins: dict[int, list[int]] = {}

    def put(self, space: int, number: int) -> None:
        self._bins.setdefault(space, []).append(number)
        node = self._size + space
        while node and not self._used[node]:
            self._used[node] = 1
            node >>= 1

    def take(self, space: int) -> int:
        numbers = self._bins[space]
        number = numbers.pop()
        node = self._size + space
        if not numbers:
            self._used[node] = 0
            node >>= 1
            while node and not self._used[2 * node] and not self._used[2 * node + 1]:
                self._used[node] = 0
                node >>= 1
        return number

    def smallest(self, at_least: int) -> int | None:
        """The smallest space in use that is at least this, or None."""
        node = self._size + at_least
        while not self._used[node]:
            while node & 1:  # a right child: nothing further right under this parent
                node >>= 1
            if not node:
                return None
            node += 1
        while node < self._size:
            node = 2 * node if self._used[2 * node] else 2 * node + 1
        return node - self._size
