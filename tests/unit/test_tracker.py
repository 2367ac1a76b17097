"""The ledger of storages: known allocations are booked once, un-booked when they die, and named."""

import pytest
import torch

from tonnage.trace.tracker import Tracker

MIB = 2**20


@pytest.fixture
def tracker():
    with Tracker() as one:
        one.enter("forward")
        yield one


def floats(mib):
    return torch.zeros(mib * MIB // 4)


def test_a_storage_counts_while_it_lives(tracker):
    a = floats(1)
    b = floats(2)
    assert tracker.total == 3 * MIB
    del a
    assert tracker.total == 2 * MIB
    del b
    assert tracker.total == 0 and tracker.peak("forward").total == 3 * MIB


def test_views_count_once_and_keep_their_storage(tracker):
    a = floats(1)
    view = a.view(2, -1)[1]
    assert tracker.total == MIB
    del a
    assert tracker.total == MIB
    del view
    assert tracker.total == 0


def test_a_resize_is_a_death_and_a_birth(tracker):
    a = floats(1)
    tracker.book(a, "gathered weights")
    a.untyped_storage().resize_(0)
    assert tracker.total == 0
    a.untyped_storage().resize_(2 * MIB)
    assert tracker.total == 2 * MIB and tracker.peak("forward").by_category["gathered weights"] == 2 * MIB


def test_what_was_there_before_counts_once_booked():
    a = floats(1)
    with Tracker() as tracker:
        a.add_(1)  # an operator's result, and so booked
        assert tracker.total == MIB
        tracker.book(a, "weights")
        assert tracker.total == MIB
    assert tracker.live and not a.untyped_storage().resize_(0)
    assert tracker.total == MIB  # outside it sees nothing


def test_meta_and_foreign_fake_tensors_are_nothing(tracker):
    from torch._subclasses.fake_tensor import FakeTensorMode

    held = [torch.zeros(1000, device="meta")]
    with FakeTensorMode():
        held.append(torch.zeros(1000))
    assert tracker.total == 0


def test_fake_tensors_count_as_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    with mode, Tracker(fake_mode=mode) as tracker:
        a = floats(2**14)  # 16 GiB
        b = a + 1
        assert tracker.total == 2**15 * MIB
        del a, b
        assert tracker.total == 0


def test_what_lives_into_backward_is_an_activation_and_the_rest_is_temporary(tracker):
    weight = floats(1).requires_grad_()
    tracker.book(weight, "weights")
    hidden = torch.exp(weight)       # exp keeps its result
    hidden = (hidden + 1).sum()      # the sum of a temporary
    tracker.enter("loss")
    tracker.enter("backward")
    hidden.backward()
    tracker.book(weight.grad, "gradients")
    forward, backward = tracker.peak("forward").by_category, tracker.peak("backward").by_category
    assert [forward[name] for name in ("weights", "activations", "temporaries")] == pytest.approx([MIB] * 3, abs=64)
    assert backward["gradients"] == MIB and tracker.total == pytest.approx(2 * MIB, abs=64)


def test_recomputed_activations_are_told_from_temporaries(tracker):
    from torch.utils.checkpoint import checkpoint

    weight = floats(1).requires_grad_()
    out = checkpoint(lambda x: torch.exp(torch.exp(x)), weight, use_reentrant=False).sum()
    tracker.enter("loss")
    tracker.enter("backward")
    out.backward()
    assert tracker.peak("backward").by_category["recomputed"] >= 2 * MIB


def test_start_forgets_what_was(tracker):
    held, gone = floats(1), floats(4)
    del gone
    tracker.start()
    tracker.enter("forward")
    assert tracker.peak("forward").total == MIB == held.untyped_storage().nbytes()
