"""Rows to the tensors of one micro-batch.

Shapes: B rows, T tokens of the longest row or of a slice of it, N label tokens of the micro-batch.

Padding is on the right and no attention mask is made: under a causal mask no real token sees what follows it. (In
transformers 5.24, samples of a packed row are isolated by positions only where attention_mask is None and use_cache is
False.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class MicroBatch:
    """One forward. `label_index_N` points into the flattened [B*T] positions whose next token is learnt.

    `row_tokens`: tokens of each row, without padding. Of slices all is of the slice, but positions are those in the row.
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    label_index_N: torch.Tensor
    targets_N: torch.Tensor
    num_input_tokens: int
    num_label_tokens: int
    row_tokens: tuple[int, ...] = ()

    def row_of_tokens(self) -> torch.Tensor:
        """The row of each of the [B*T] positions, -1 for padding."""
        shape, device = self.input_ids_BT.shape, self.input_ids_BT.device
        lengths = torch.tensor(self.row_tokens or (0,) * shape[0], device=device)
        rows = torch.arange(len(lengths), device=device)
        if len(lengths) > shape[0]:  # end to end in one
            return rows.repeat_interleave(lengths)
        return rows[:, None].where(torch.arange(shape[1], device=device) < lengths[:, None], -1).flatten()

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        moved = [tensor.to(device, non_blocking=True) for tensor in
                 (self.input_ids_BT, self.position_ids_BT, self.label_index_N, self.targets_N)]
        return MicroBatch(*moved, self.num_input_tokens, self.num_label_tokens, self.row_tokens)


def collate(rows: Sequence, pad_token: int, flat: bool = False, number: int = 0, num_slices: int = 1) -> MicroBatch:
    """A micro-batch of `rows` (`tokens`, `labels`, `positions`, each int[t]), or slice `number` of each of its rows.

    An empty list gives a dummy row without labels, weight zero: a rank without rows runs it so that collectives stay
    in step. `flat` lays all rows end to end in one row without padding (attention kernels that take their sequence
    borders from positions, such as flash attention). Rows that are sliced are padded to a multiple of `num_slices`; the
    slices of a micro-batch are of one width, and one may hold padding alone.
    """
    if not rows:
        zeros = np.zeros((1, 2 * num_slices), np.int64)
        batch = _tensors(zeros, np.arange(2 * num_slices)[None], zeros - 100, slice(2 * number, 2 * number + 2))
        return MicroBatch(*batch, num_input_tokens=0, num_label_tokens=0)
    if flat:
        ids, positions, labels = (np.concatenate([getattr(row, name) for row in rows]).astype(np.int64)[None]
                                  for name in ("tokens", "positions", "labels"))
        batch, tokens = _tensors(ids, positions, labels, slice(None)), [len(row.tokens) for row in rows]
    else:
        width = -(-max(len(row.tokens) for row in rows) // num_slices)
        longest = width * num_slices
        ids = np.full((len(rows), longest), pad_token, np.int64)
        labels = np.full((len(rows), longest), -100, np.int64)
        positions = np.zeros((len(rows), longest), np.int64)
        for i, row in enumerate(rows):
            size = len(row.tokens)
            ids[i, :size], labels[i, :size], positions[i, :size] = row.tokens, row.labels, row.positions
            # counting on keeps one causal segment a row, for which attention needs no mask at all
            positions[i, size:] = row.positions[-1] + 1 + np.arange(longest - size)
        part = slice(number * width, (number + 1) * width)
        batch = _tensors(ids, positions, labels, part)
        tokens = [min(max(len(row.tokens) - part.start, 0), width) for row in rows]
    return MicroBatch(*batch, num_input_tokens=sum(tokens), num_label_tokens=len(batch[-1]), row_tokens=tuple(tokens))


def _tensors(ids_BT, positions_BT, labels_BT, part):
    # the label of a position is the next token of its row; a row's first label has no position before it
    next_BT = np.full_like(labels_BT, -100)
    next_BT[:, :-1] = labels_BT[:, 1:]
    ids_BT, positions_BT, next_BT = (np.ascontiguousarray(one_BT[:, part]) for one_BT in (ids_BT, positions_BT, next_BT))
    flat = next_BT.reshape(-1)
    index = np.flatnonzero(flat != -100)
    return tuple(torch.from_numpy(array) for array in (ids_BT, positions_BT, index, flat[index]))
