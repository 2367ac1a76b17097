"""The three numbers of a batch: two give the third, three must agree.

    accumulation_steps = ceil(ceil(global_rows / gpus) / micro_rows)

Any GPU count works: shares of a window differ by at most one row, and nothing is rounded away.
"""

from dataclasses import dataclass

from tonnage.config.schema import Batch
from tonnage.errors import ConfigError

DEFAULT_GLOBAL_ROWS = 128
AUTO_MICRO_TOKENS = 4096


@dataclass(frozen=True)
class BatchCut:
    """How a window is made and cut. `accumulation_steps` is None with `global_tokens`: windows differ in rows."""

    global_rows: int | None
    global_tokens: int | None
    micro_rows: int
    accumulation_steps: int | None


def resolve_batch(batch: Batch, gpus: int, seq_tokens: int) -> BatchCut:
    """Work out what `auto` stands for.

    Raises:
        ConfigError: three numbers that disagree (with the nearest triples that agree), global_rows with
            global_tokens, accumulation_steps that no micro-batch gives.
    """
    auto_micro = max(1, AUTO_MICRO_TOKENS // seq_tokens)
    if batch.global_tokens is not None:
        return _by_tokens(batch, auto_micro)
    rows, micro, steps = (None if value == "auto" else value for value in
                          (batch.global_rows, batch.micro_rows, batch.accumulation_steps))
    if None not in (rows, micro) and micro > rows:
        raise ConfigError(f"batch.micro_rows={micro}: more than batch.global_rows={rows}, the rows of a whole step; use at "
                          f"most {-(-rows // gpus)}, one GPU's share")
    if rows is None:
        rows = micro * steps * gpus if micro and steps else DEFAULT_GLOBAL_ROWS
    share = -(-rows // gpus)
    if micro is None:
        micro = -(-share // steps) if steps else min(share, auto_micro)
    needed = -(-share // micro)
    if steps not in (None, needed):
        raise ConfigError(_disagreement(rows, micro, steps, needed, gpus, share))
    return BatchCut(rows, None, min(micro, share), needed)


def micro_choices(batch: Batch, gpus: int, most_rows: int) -> list[int]:
    """Micro-batches from the largest within `most_rows` to one row; each is the smallest for its number of steps, so
    that the last micro-batch of a window is about as full as the others."""
    if batch.global_tokens is not None:
        return [2**power for power in reversed(range(most_rows.bit_length()))]
    share = -(-(DEFAULT_GLOBAL_ROWS if batch.global_rows == "auto" else batch.global_rows) // gpus)
    return sorted({rows for steps in range(1, share + 1) if (rows := -(-share // steps)) <= most_rows}, reverse=True)


def _by_tokens(batch, auto_micro):
    for name in ("global_rows", "accumulation_steps"):
        if getattr(batch, name) != "auto":
            raise ConfigError(f"batch.{name}={getattr(batch, name)}: not with batch.global_tokens="
                              f"{batch.global_tokens}, where the rows of a window vary; leave it auto")
    micro = auto_micro if batch.micro_rows == "auto" else batch.micro_rows
    return BatchCut(None, batch.global_tokens, micro, None)


def _disagreement(rows, micro, steps, needed, gpus, share):
    fitting_micro = -(-share // steps)
    triples = [(rows, micro, needed), (micro * steps * gpus, micro, steps)]
    if -(-share // fitting_micro) == steps:
        triples.insert(1, (rows, fitting_micro, steps))
    nearest = "; or ".join(f"batch.global_rows={r} batch.micro_rows={m} batch.accumulation_steps={a}"
                           for r, m, a in triples)
    return (f"batch.accumulation_steps={steps}: {rows} rows on {gpus} GPUs are up to {share} rows a GPU, in "
            f"micro-batches of {micro} that is {needed} steps; nearest that agree: {nearest}")
