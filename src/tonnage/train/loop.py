"""The training loop: one window a step, the same for all engines.

    window -> this rank's micro-batches -> label tokens of the window, known on all ranks before the first backward
           -> forward, backward of each, scaled in this one place -> clip and step

The loss of a step is the sum of token losses over the window / label tokens of the window, for any cut.
"""

import hashlib
import math
import time

import torch
import torch.distributed as dist

from tonnage.data.collate import collate
from tonnage.data.windows import cut_window
from tonnage.errors import TrainingError
from tonnage.report.console import memory_gib, number
from tonnage.runtime.logs import LOG
from tonnage.runtime.watchdog import beat, first_step_done
from tonnage.train import checkpoint
from tonnage.train.loss import loss_sum
from tonnage.train.probes import audit_gradients
from tonnage.train.schedule import learning_rate
from tonnage.train.session import Session


def train(s: Session) -> str:
    """Run to the last step or to a stop request; returns `done` or `stopped`."""
    position, config = s.position, s.config
    while position.step < s.num_steps:
        if s.stop_agreed():
            _save(s)
            return "stopped"
        started = time.monotonic()
        beat(f"the data of step {position.step + 1}")
        rows, cursor = s.source.next(position.cursor)
        result = run_window(s, rows, position.step + 1)
        if result is None:  # asked to stop half way: the window was not, and will be done again
            s.source.put_back(rows)
            _save(s)
            return "stopped"

        # ---- the window is behind us: count it, whether or not the update was applied
        position.step, position.cursor = position.step + 1, cursor
        position.label_tokens += result["label_tokens"]
        s.input_tokens += result["input_tokens"]
        position.num_updates += result["applied"]
        position.nonfinite_steps = 0 if result["applied"] else position.nonfinite_steps + (not result["overflow"])
        position.loss_scale = s.engine.loss_scale
        _report(s, result, time.monotonic() - started)
        if position.nonfinite_steps >= config.train.max_nonfinite_steps:
            raise TrainingError(f"train.max_nonfinite_steps={config.train.max_nonfinite_steps}: that many steps in a row "
                                f"had a gradient that is not finite; weights were not changed by them. Lower "
                                f"optimizer.learning_rate, or look at the data of the last windows")
        if config.train.audit and position.num_updates == 2 and result["applied"]:
            audit_gradients(s.engine)

        # ---- held-out loss and checkpoint
        last = position.step == s.num_steps
        if s.eval_rows is not None and (last or _due(position.step, config.eval.every_steps)):
            s.evaluate()
        best = config.checkpoint.keep_best and position.best_step == position.step
        if last or best or _due(position.step, config.checkpoint.every_steps):
            _save(s)
    if position.num_updates == 0:
        raise TrainingError(f"none of the {position.step} steps had a finite gradient, so nothing was learned; lower "
                            f"optimizer.learning_rate, or look at the data")
    return "done"


def run_window(s: Session, rows, step: int) -> dict | None:
    """One optimizer step on the rows of a window (collective); its figures, or None if a stop request ended it."""
    lengths = [len(row.tokens) for row in rows]
    micros = cut_window(lengths, s.slices.num_shares, s.cut.micro_rows)[s.slices.share]
    batches = [collate([rows[i] for i in micro], s.pad_token, s.flat, s.slices.number, s.slices.count) for micro in micros]
    counts = torch.tensor([sum(batch.num_label_tokens for batch in batches),
                           sum(batch.num_input_tokens for batch in batches)], dtype=torch.int64)
    dist.all_reduce(counts, group=s.group)
    label_tokens, input_tokens = counts.tolist()
    if label_tokens == 0:
        raise TrainingError(f"window {step} has no label token; preparation should have dropped such rows")

    seed_window(s.config.seed, step, s.rank)
    s.routing.begin_window(len(rows), s.engine.device)
    # engines average gradients over ranks; with this factor the average is the sum over the window / its label tokens
    scale = s.world_size / label_tokens
    total = torch.zeros((), device=s.engine.device)
    for i, batch in enumerate(batches):
        if i and s.stop_agreed():
            s.engine.discard()
            return None
        beat(f"forward and backward of micro-batch {i + 1} of {len(batches)}, step {step}")
        batch = batch.to(s.engine.device)
        s.routing.begin(batch, s.world_size * s.engine.loss_scale)
        with s.slices.held():
            loss = loss_sum(s.engine.forward, s.head, batch)
            s.routing.forward_done()
            total += loss.detach()
            s.engine.backward(loss * scale, last=i == len(batches) - 1)
        s.routing.end()
        s.progress.micro(i + 1, len(batches))
    beat(f"the update of step {step}")
    rate = learning_rate(s.config.schedule, s.peak_rate, step, s.num_steps)
    outcome = s.engine.step(rate)
    dist.all_reduce(total)
    first_step_done()
    routing = s.routing.end_window(outcome.applied, s.group)
    return {"loss": float(total) / label_tokens, "grad_norm": outcome.grad_norm, "applied": outcome.applied,
            "overflow": outcome.overflow, "learning_rate": rate, "label_tokens": label_tokens,
            "input_tokens": input_tokens, "rows": len(rows), "accumulation_steps": len(batches), **routing}


def seed_window(seed: int, step: int, rank: int) -> None:
    """Set dropout's generator from (seed, step, rank): ranks draw different masks, a resume draws the same again."""
    digest = hashlib.sha256(f"{seed}:{step}:{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8]) >> 1)


def _due(step, every):
    return every is not None and step % every == 0


def _report(s, result, step_s):
    """Write the step's line and show it."""
    position = s.position
    clip = s.config.optimizer.clip_norm
    if not result["applied"]:
        LOG.warning(f"step {position.step}: gradient norm {result['grad_norm']}: skipped on all ranks "
                    f"({position.nonfinite_steps} in a row)")
    if s.metrics is None:
        return
    values = {**result, "step_s": step_s, "input_tokens_per_s": result["input_tokens"] / step_s,
              "label_tokens_per_s": result["label_tokens"] / step_s, "epoch": position.cursor.epoch,
              "clipped_norm": min(result["grad_norm"], clip or math.inf), "memory_gib": memory_gib(s.engine.device),
              "total_label_tokens": position.label_tokens}
    s.metrics.log(position.step, values, always=position.step == s.num_steps)
    s.progress.update(position.step, f"loss {result['loss']:.4f}  {number(values['input_tokens_per_s'])} input tokens/s  "
                                     f"{step_s:.2f} s/step  {values['memory_gib']:.2f} GiB")
    s.status("running", f"step {position.step} of {s.num_steps}", at_most_every_s=1.0)


def _save(s):
    """Checkpoint, then make room. A metric is only kept as best if it was measured at this step."""
    if s.last_saved == s.position.step:
        return
    path = checkpoint.save(s.folder / "checkpoints", s.engine, s.position, s.run_id, s.source.state(), s.patient_group)
    s.last_saved = s.position.step
    if s.rank == 0:
        keep = s.config.checkpoint
        best = s.position.best_step if keep.keep_best else None
        checkpoint.rotate(path, s.run_id, keep.keep, best, keep.keep_every_steps)
