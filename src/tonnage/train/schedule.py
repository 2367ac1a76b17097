"""The learning rate as a pure function of the step: the same for any cut of the batch, and after a resume."""

import math

from tonnage.config.schema import Optimizer, Schedule

AUTO_WARMUP_FRACTION = 0.03


def peak_learning_rate(optimizer: Optimizer, adapter_name: str, global_rows: int | None) -> float:
    """The learning rate after warm-up. Source of the scaling rules: https://arxiv.org/abs/2405.14578."""
    rate = optimizer.learning_rate
    if rate == "auto":
        rate = 1e-5 if adapter_name == "full" else 2e-4
    if optimizer.scale_lr == "none":
        return rate
    ratio = global_rows / optimizer.base_rows
    return rate * (ratio if optimizer.scale_lr == "linear" else math.sqrt(ratio))


def learning_rate(schedule: Schedule, peak: float, step: int, num_steps: int) -> float:
    """Learning rate of update `step` (from 1) of `num_steps`. The last step has the planned last rate, unless the
    warm-up takes the whole run.

    wsd: https://arxiv.org/abs/2404.06395; cosine: https://arxiv.org/abs/1608.03983.
    """
    warmup = schedule.warmup_steps
    if warmup == "auto":
        warmup = math.ceil(AUTO_WARMUP_FRACTION * num_steps)
    if step <= warmup:
        return peak * step / warmup
    start = warmup
    if schedule.name == "wsd":
        start = max(warmup, num_steps - math.ceil(schedule.decay_fraction * num_steps))
    if schedule.name == "constant" or step <= start:
        return peak
    progress = min(1.0, (step - start) / max(1, num_steps - start))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.name == "cosine" else 1 - progress
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * shape)
