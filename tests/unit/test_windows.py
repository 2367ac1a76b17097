"""Windows: the rows of a step are a function of data, seed and epoch, and of nothing else."""

from collections import Counter

import numpy as np
import pytest

from tonnage.data.windows import Cursor, Windows, cut_window, epoch_order


def windows(num_rows=10, fingerprint="f", seed=0, weights=None, tokens=None, **size):
    tokens = np.ones(num_rows, np.int64) if tokens is None else np.asarray(tokens)
    weights = np.ones(num_rows) if weights is None else np.asarray(weights)
    return Windows(fingerprint, seed, tokens, weights, **(size or {"global_rows": 4}))


def walk(source, cursor=None, epochs=1):
    """(cursor, rows) of every window from `cursor` until `epochs` are over."""
    cursor, seen = cursor or Cursor(), []
    while cursor.epoch < epochs:
        rows, behind = source.next(cursor)
        assert len(rows)  # or it would never end
        seen.append((cursor, rows.tolist()))
        cursor = behind
    return seen


def rows_of(seen, epoch=None):
    return [row for cursor, rows in seen if epoch in (None, cursor.epoch) for row in rows]


# ---- the order

def test_the_order_is_a_function_of_fingerprint_seed_and_epoch_only():
    def order(fingerprint="f", seed=3, epoch=1):
        return epoch_order(fingerprint, seed, epoch, np.ones(100)).tolist()
    first = order()
    np.random.seed(99)
    np.random.random(7)
    assert order() == first
    others = [order(fingerprint="g"), order(seed=4), order(epoch=2)]
    assert all(other != first and sorted(other) == list(range(100)) for other in others)
    assert len({tuple(other) for other in others}) == 3


def test_the_order_does_not_depend_on_what_was_asked_before():
    direct = windows(seed=5).next(Cursor(epoch=2, row=4))[0].tolist()
    source = windows(seed=5)
    for epoch in (0, 2, 1):
        source.order(epoch)
    assert source.next(Cursor(epoch=2, row=4))[0].tolist() == direct


# ---- an epoch

@pytest.mark.parametrize("num_rows, global_rows", [(10, 4), (12, 4), (3, 4), (4, 4), (1, 4), (5, 4), (1000, 300)])
def test_an_epoch_drops_nothing_repeats_nothing_and_its_last_window_is_short(num_rows, global_rows):
    source = windows(num_rows, global_rows=global_rows)
    seen = walk(source, epochs=2)
    for epoch in (0, 1):
        sizes = [len(rows) for cursor, rows in seen if cursor.epoch == epoch]
        assert sorted(rows_of(seen, epoch)) == list(range(num_rows))
        assert sizes == [global_rows] * (num_rows // global_rows) + [num_rows % global_rows] * (num_rows % global_rows > 0)
        assert source.num_windows(epoch) == len(sizes)
    assert [cursor.window for cursor, _ in seen] == list(range(len(seen)))


def test_weights_are_multiplicities_of_an_epoch():
    weights = np.repeat([1.0, 2.0, 0.5, 1.5], 10)  # rows 0-9, 10-19, 20-29, 30-39
    source = windows(40, weights=weights, global_rows=7)
    total = Counter()
    for epoch in range(4):
        seen = Counter(source.order(epoch).tolist())
        assert [seen[row] for row in range(20)] == [1] * 10 + [2] * 10
        assert sum(seen[row] for row in range(20, 30)) == 5 and max(seen[row] for row in range(20, 30)) == 1
        assert sorted(seen[row] for row in range(30, 40)) == [1] * 5 + [2] * 5
        assert sum(seen.values()) == 10 + 20 + 5 + 15
        assert sorted(rows_of(walk(source, Cursor(epoch=epoch), epoch + 1))) == sorted(seen.elements())
        total += seen
        if epoch % 2:  # two epochs are a round: each half has had its turn
            assert {total[row] for row in range(20, 30)} == {(epoch + 1) // 2}
            assert {total[row] for row in range(30, 40)} == {3 * (epoch + 1) // 2}


@pytest.mark.parametrize("num_rows, weight", [(1, 0.5), (3, 0.5), (7, 0.25), (5, 0.3), (10, 0.7), (3, 1.1), (2, 0.1)])
def test_over_many_epochs_a_weight_is_met_exactly(num_rows, weight):
    # beside a plain data set, so that no epoch is empty
    weights = np.array([1.0] * 2 + [weight] * num_rows)
    seen = Counter()
    for epoch in range(100):
        seen.update(epoch_order("f", 0, epoch, weights).tolist())
    assert sum(seen[row] for row in range(2, 2 + num_rows)) == round(100 * weight * num_rows)
    counts = [seen[row] for row in range(2, 2 + num_rows)]
    assert max(counts) - min(counts) <= 1


# ---- the cursor

def test_a_resume_at_every_cursor_goes_on_as_the_whole_run():
    for size in ({"global_rows": 4}, {"global_tokens": 30}):
        def make(size=size):
            return windows(12, tokens=np.arange(3, 15), weights=np.repeat([1.0, 0.5], 6), seed=2, **size)
        whole = walk(make(), epochs=3)
        for number, (cursor, _) in enumerate(whole):
            assert walk(make(), cursor, epochs=3) == whole[number:]


def test_a_larger_global_batch_changes_later_slices_only():
    small, large = windows(20, global_rows=3), windows(20, global_rows=5)
    seen = walk(small)
    cursor = seen[2][0]
    before, after = rows_of(seen[:2]), rows_of(walk(large, cursor))
    assert before + after == small.order(0).tolist()
    assert [len(rows) for _, rows in walk(large, cursor)] == [5, 5, 4]


# ---- windows by tokens

@pytest.mark.parametrize("limit", [1, 50, 64, 100, 333, 10**6])
def test_a_window_holds_as_many_rows_as_stay_within_the_tokens(limit):
    tokens = np.random.default_rng(0).integers(1, 65, 200)
    source = windows(200, tokens=tokens, global_tokens=limit)
    order, seen, start = source.order(0).tolist(), walk(source), 0
    for cursor, rows in seen:
        assert cursor.row == start and rows == order[start:start + len(rows)]
        used = sum(int(tokens[row]) for row in rows)
        assert used <= limit or len(rows) == 1
        start += len(rows)
        if start < 200:  # one row more would be too many
            assert used + tokens[order[start]] > limit
    assert start == 200 and source.num_windows(0) == len(seen)


# ---- cutting

@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 7, 8, 16, 64])
def test_cuts_are_fair_complete_and_in_step(num_ranks):
    random = np.random.default_rng(num_ranks)
    for num_rows in (1, 2, 3, 5, 8, 63, 64, 127, 128):
        lengths = random.integers(1, 100, num_rows).tolist()
        for micro_rows in (1, 2, 4, 100):
            cut = cut_window(lengths, num_ranks, micro_rows)
            shares = [sum(map(len, micros)) for micros in cut]
            assert len(cut) == num_ranks and max(shares) - min(shares) <= 1
            assert {len(micros) for micros in cut} == {-(-max(shares) // micro_rows)}
            assert all(len(micro) <= micro_rows for micros in cut for micro in micros)
            assert sorted(row for micros in cut for micro in micros for row in micro) == list(range(num_rows))
            assert cut == cut_window(list(lengths), num_ranks, micro_rows)


def test_ranks_are_busy_equally_long_and_rows_of_a_micro_batch_are_of_like_length():
    cut = cut_window([10, 80, 20, 70, 30, 60, 40, 50], num_ranks=2, micro_rows=2)
    lengths = [[[[10, 80, 20, 70, 30, 60, 40, 50][row] for row in micro] for micro in micros] for micros in cut]
    assert lengths == [[[80, 60], [40, 20]], [[70, 50], [30, 10]]]
