"""Packing puts every sample in exactly one bin, and cutting never leaves a sample without labels."""

import numpy as np
import pytest

from tonnage.config.schema import Data
from tonnage.data.formats import Counts
from tonnage.data.pack import best_fit, check_dropped, cut, make_row
from tonnage.data.template import Sample
from tonnage.errors import DataError


def slow_best_fit(lengths, capacity):
    """The same rule, written as it is said."""
    bins = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = [one for one in bins if sum(lengths[i] for i in one) + lengths[index] <= capacity]
        if fitting:
            max(fitting, key=lambda one: sum(lengths[i] for i in one)).append(index)
        else:
            bins.append([index])
    return bins


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_once_no_bin_over_capacity_and_as_tight_as_the_rule_says(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 200))
    lengths = rng.integers(1, capacity + 1, size=int(rng.integers(0, 120))).tolist()
    bins = best_fit(lengths, capacity)
    assert sorted(index for one in bins for index in one) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in one) <= capacity for one in bins)
    fills = sorted(sum(lengths[index] for index in one) for one in bins)
    assert fills == sorted(sum(lengths[index] for index in one) for one in slow_best_fit(lengths, capacity))
    assert bins == best_fit(lengths, capacity)


def test_known_packing():
    assert best_fit([4, 8, 1, 4, 2, 1], 10) == [[1, 2, 5], [0, 3, 4]]
    assert best_fit([], 10) == []


@pytest.mark.parametrize("lengths", [[0, 3], [3, 11]])
def test_lengths_out_of_range(lengths):
    with pytest.raises(ValueError, match=r"1..10"):
        best_fit(lengths, 10)


def test_large_inputs_do_not_take_quadratic_time():
    lengths = np.random.default_rng(0).integers(1, 100_000, size=20_000).tolist()
    bins = best_fit(lengths, 100_000)
    assert sum(map(len, bins)) == 20_000


def sample(length, first_trained):
    trained = np.arange(length) >= first_trained
    trained[0] = False
    return Sample(np.arange(length, dtype=np.int32) + 10, trained)


def test_row_positions_restart_and_no_sample_predicts_the_next_one():
    row = make_row([sample(3, 0), sample(4, 2)])
    assert row.tokens.tolist() == [10, 11, 12, 10, 11, 12, 13]
    assert row.labels.tolist() == [-100, 11, 12, -100, -100, 12, 13]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert {array.dtype for array in row} == {np.dtype(np.int32)}


def test_cut():
    counts = Counts()
    assert cut(sample(6, 3), 4, "end", counts).tokens.tolist() == [10, 11, 12, 13]
    kept = cut(sample(6, 1), 4, "start", counts)
    assert kept.tokens.tolist() == [12, 13, 14, 15] and kept.trained.tolist() == [False, True, True, True]
    assert cut(sample(6, 3), 4, "drop", counts) is None
    assert cut(sample(6, 4), 4, "end", counts) is None  # the prompt fills the row
    assert cut(sample(4, 3), 4, "drop", counts) is not None
    assert (counts.truncated, counts.dropped_long, counts.dropped_unlabelled, counts.kept) == (3, 1, 1, 3)
    assert (counts.tokens, counts.label_tokens, counts.longest_tokens) == (12, 1 + 3 + 1, 6)


def test_dropped_share():
    data = Data(max_dropped_fraction=0.25)
    check_dropped([Counts(read=5, bad=1, dropped_unlabelled=1, kept=3)], data, 16)
    with pytest.raises(DataError, match=r"1 of 3 samples.*max_dropped_fraction=0.25.*seq_tokens=16.*truncate=start"):
        check_dropped([Counts(read=3, dropped_unlabelled=1, kept=2)], data, 16)
    with pytest.raises(DataError, match="2 of 2 samples were dropped, so there is no row left"):
        check_dropped([Counts(read=2, dropped_long=2)], Data(max_dropped_fraction=1.0), 16)
