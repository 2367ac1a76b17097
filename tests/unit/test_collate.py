"""Rows to tensors: what is learnt at which position, padding, empty micro-batches, the flat layout."""

import numpy as np
import pytest
import torch

from tonnage.data.collate import collate
from tonnage.data.pack import Row

PAD = 99


def row(tokens, labels, positions=None):
    positions = range(len(tokens)) if positions is None else positions
    return Row(*(np.array(list(values), np.int32) for values in (tokens, labels, positions)))


def learnt(batch):
    """{(row, position): target}."""
    width = batch.input_ids_BT.shape[1]
    return {divmod(index, width): target
            for index, target in zip(batch.label_index_N.tolist(), batch.targets_N.tolist(), strict=True)}


def test_a_position_learns_the_next_token_and_the_first_label_of_a_row_has_no_position():
    batch = collate([row([5, 6, 7, 8], [5, -100, 7, 8])], PAD)
    assert learnt(batch) == {(0, 1): 7, (0, 2): 8}
    assert (batch.num_label_tokens, batch.num_input_tokens) == (2, 4)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8]] and batch.position_ids_BT.tolist() == [[0, 1, 2, 3]]


def test_padding_is_on_the_right_learns_nothing_and_counts_on():
    batch = collate([row([5, 6], [-100, 6]), row([1, 2, 3, 4, 5], [-100, 2, 3, 4, 5])], PAD)
    assert batch.input_ids_BT.tolist() == [[5, 6, PAD, PAD, PAD], [1, 2, 3, 4, 5]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    # the end of the short row does not learn the padding, nor the first token of the next row
    assert learnt(batch) == {(0, 0): 6, (1, 0): 2, (1, 1): 3, (1, 2): 4, (1, 3): 5}
    assert batch.num_input_tokens == 7


def test_a_label_that_equals_the_padding_token_is_still_learnt():
    assert learnt(collate([row([5, PAD], [-100, PAD]), row([1, 2, 3], [-100] * 3)], PAD)) == {(0, 0): PAD}


def test_packed_samples_do_not_learn_each_others_first_token():
    packed = row([5, 6, 7, 8, 9], [-100, 6, 7, -100, 9], [0, 1, 2, 0, 1])
    batch = collate([packed], PAD)
    assert learnt(batch) == {(0, 0): 6, (0, 1): 7, (0, 3): 9}
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1]]


def test_an_empty_micro_batch_has_a_forward_to_run_and_nothing_to_learn():
    for flat in (False, True):
        batch = collate([], PAD, flat)
        assert batch.input_ids_BT.shape == (1, 2) and batch.position_ids_BT.tolist() == [[0, 1]]
        assert batch.num_input_tokens == batch.num_label_tokens == len(batch.label_index_N) == len(batch.targets_N) == 0


def test_flat_lays_rows_end_to_end_and_learns_the_same():
    rows = [row([5, 6, 7], [5, 6, 7]), row([1, 2], [-100, 2]), row([3], [-100])]
    flat, padded = collate(rows, PAD, flat=True), collate(rows, PAD)
    assert flat.input_ids_BT.tolist() == [[5, 6, 7, 1, 2, 3]]
    assert flat.position_ids_BT.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert learnt(flat) == {(0, 0): 6, (0, 1): 7, (0, 3): 2}
    assert flat.targets_N.tolist() == padded.targets_N.tolist() == [6, 7, 2]
    assert flat.num_input_tokens == padded.num_input_tokens == 6


def test_tensors_are_int64_and_move_with_their_counts():
    batch = collate([row([5, 6], [5, 6])], PAD)
    moved = batch.to(torch.device("cpu"))
    for one in (batch, moved):
        assert {t.dtype for t in (one.input_ids_BT, one.position_ids_BT, one.label_index_N, one.targets_N)} == {torch.int64}
    assert (moved.num_input_tokens, moved.num_label_tokens) == (2, 1)


@pytest.mark.parametrize("num_slices", [2, 3, 4, 8])
def test_slices_laid_side_by_side_are_the_rows(num_slices):
    rows = [row([5, 6, 7, 8, 9], [5, -100, 7, 8, 9]), row([1, 2], [-100, 2]), row(range(11), range(11))]
    whole, parts = collate(rows, PAD), [collate(rows, PAD, False, number, num_slices) for number in range(num_slices)]
    width = -(-11 // num_slices)
    assert all(part.input_ids_BT.shape == (3, width) for part in parts)
    ids, positions = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("input_ids_BT", "position_ids_BT"))
    assert torch.equal(ids[:, :11], whole.input_ids_BT) and (ids[:, 11:] == PAD).all()
    assert positions.tolist() == [list(range(width * num_slices))] * 3
    shifted = {(i, number * width + position): target for number, part in enumerate(parts)
               for (i, position), target in learnt(part).items()}
    assert shifted == learnt(whole)  # the last token of a slice learns the first of the next
    for name in ("num_input_tokens", "num_label_tokens"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    assert [sum(tokens) for tokens in zip(*(part.row_tokens for part in parts), strict=True)] == [5, 2, 11]
    real = torch.cat([part.row_of_tokens().view(3, -1) for part in parts], 1)[:, :11]
    assert real.tolist() == whole.row_of_tokens().view(3, -1).tolist()


def test_a_dummy_row_has_slices_too():
    parts = [collate([], PAD, False, number, 3) for number in range(3)]
    assert [part.position_ids_BT.tolist() for part in parts] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert all(part.num_label_tokens == len(part.targets_N) == 0 and part.row_tokens == () for part in parts)
