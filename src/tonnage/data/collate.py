"""Rows to the tensors of one micro-batch.

Shapes: B rows, T tokens of the longest row, N label tokens of the micro-batch.

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

    `row_tokens`: tokens of each row, without padding.
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


def collate(rows: Sequence, pad_token: int, flat: bool = False) -> MicroBatch:
    """A micro-batch of `rows` (`tokens`, `labels`, `positions`, each int[t]).

    An empty list gives a dummy row without labels, weight zero: a rank without rows runs it so that collectives stay
    in step. `flat` lays all rows end to end in one row without padding (attention kernels that take their sequence
    borders from positions, such as flash attention).
    """
    if not rows:
        zeros = np.zeros(2, np.int64)
        batch = _tensors(zeros[None], np.arange(2)[None], np.full((1, 2), -100))
        return MicroBatch(*batch, num_input_tokens=0, num_label_tokens=0)
    num_tokens = sum(len(row.tokens) for row in rows)
    if flat:
        ids, positions, labels = (np.concatenate([getattr(row, name) for row in rows]).astype(np.int64)[None]
                                  for name in ("tokens", "positions", "labels"))
    else:
        longest = max(len(row.tokens) for row in rows)
        ids = np.full((len(rows), longest), pad_token, np.int64)
        labels = np.full((len(rows), longest), -100, np.int64)
        positions = np.zeros((len(rows), longest), np.int64)
        for i, row in enumerate(rows):
            size = len(row.tokens)
            ids[i, :size], labels[i, :size], positions[i, :size] = row.tokens, row.labels, row.positions
            # counting on keeps one causal segment a row, for which attention needs no mask at all
            positions[i, size:] = row.positions[-1] + 1 + np.arange(longest - size)
    batch = _tensors(ids, positions, labels)
    return MicroBatch(*batch, num_input_tokens=num_tokens, num_label_tokens=len(batch[-1]),
                      row_tokens=tuple(len(row.tokens) for row in rows))


def _tensors(ids_BT, positions_BT, labels_BT):
    # the label of a position is the next token of its row; a row's first label has no position before it
    next_BT = np.full_like(labels_BT, -100)
    next_BT[:, :-1] = labels_BT[:, 1:]
    flat = next_BT.reshape(-1)
    index = np.flatnonzero(flat != -100)
    return tuple(torch.from_numpy(array) for array in (ids_BT, positions_BT, index, flat[index]))
