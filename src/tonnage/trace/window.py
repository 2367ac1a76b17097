"""One window under a tracker: the loop's order of events (train/loop.py) with the phases told to the ledger.

Shared by the trace on fake tensors and by measurements of real steps, so that both speak of the same phases.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule

from tonnage.data.collate import MicroBatch
from tonnage.engines.base import Engine
from tonnage.trace.tracker import Tracker
from tonnage.train.loss import LossHead, loss_sum


def full_batch(rows: int, seq_tokens: int) -> MicroBatch:
    """A micro-batch without padding in which each position has a label: the most that a step of this shape needs; of
    slices, `seq_tokens` of one."""
    ids = torch.zeros(rows, seq_tokens, dtype=torch.int64)
    positions = torch.arange(seq_tokens).repeat(rows, 1)
    return MicroBatch(ids, positions, torch.arange(rows * seq_tokens), torch.zeros_like(ids).flatten(), rows * seq_tokens,
                      rows * seq_tokens)


@contextmanager
def loss_phase(tracker: Tracker, head: LossHead) -> Iterator[None]:
    """Within, the phase `loss` lasts from the head's input to the gradient of that input."""
    def arrived(module, inputs):
        tracker.enter("loss")
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: tracker.enter("backward"))

    handle = head.head.register_forward_pre_hook(arrived, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def tracked_window(tracker: Tracker, engine: Engine, head: LossHead, batches: Iterable[MicroBatch], scale: float,
                   learning_rate: float, note: Callable[[str], None]) -> torch.Tensor:
    """Forward, loss and backward of each micro-batch, then the step; returns the sum of token losses.

    Args:
        note: called with what is behind, after each backward and after the step, to book what is known by identity.
    """
    batches = list(batches)
    for batch in batches:
        tracker.book_all((value for value in vars(batch).values() if torch.is_tensor(value)), "inputs")
    total = torch.zeros((), device=engine.device)
    for i, batch in enumerate(batches):
        tracker.enter("forward")
        loss = loss_sum(engine.forward, head, batch)
        total += loss.detach()
        engine.backward(loss * scale, last=i == len(batches) - 1)
        del loss
        note(f"micro-batch {i + 1} of {len(batches)}")
    tracker.enter("step")
    engine.step(learning_rate)
    note("step")
    tracker.enter("rest")
    return total


def book_fsdp(tracker: Tracker, engine: Engine) -> None:
    """Book what an FSDP2 engine holds, each as what it is."""
    model, optimizer = engine.model, engine.optimizer
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # torch 2.13: private, and the only way to what no parameter leads to
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if group._partial_reduce_output is not None:  # gradients that are summed over replicas once a window
                    tracker.book(group._partial_reduce_output, "gradients")
                tracker.book_all((parameter._sharded_param_data for parameter in group.fsdp_params), "weights")
    tracker.book_all(model.parameters(), "weights")
    tracker.book_all(model.buffers(), "weights")
    tracker.book_all((parameter.grad for parameter in model.parameters()), "gradients")
    tracker.book_all((value for states in optimizer.state.values() for value in states.values()
                      if torch.is_tensor(value)), "optimizer states")
