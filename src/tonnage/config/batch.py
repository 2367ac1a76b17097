"""The three numbers of a batch: two give the third, three must agree.

    accumulation_steps = ceil(ceil(global_rows / shares) / micro_rows), shares = gpus / sequence_gpus

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


def resolve_batch(batch: Batch, gpus: int, seq_tokens: int, sequence_gpus: int = 1) -> BatchCut:
    """Work out what `auto` stands for.

    Args:
        sequence_gpus: GPUs that share the tokens of each row, and so one share of the rows.

    Raises:
        ConfigError: three numbers that disagree (with the nearest triples that agree), global_rows with
            global_tokens, accumulation_steps that no micro-batch gives.
    """
    shares, auto_micro = gpus // sequence_gpus, max(1, AUTO_MICRO_TOKENS * sequence_gpus // seq_tokens)
    if batch.global_tokens is not None:
        return _by_tokens(batch, auto_micro)
    rows, micro, steps = (None if value == "auto" else value for value in
                          (batch.global_rows, batch.micro_rows, batch.accumulation_steps))
    if None not in (rows, micro) and micro > rows:
        raise ConfigError(f"batch.micro_rows={micro}: more than batch.global_rows={rows}, the rows of a whole step; use at "
                          f"most {-(-rows // shares)}, one GPU's share")
    if rows is None:
        rows = micro * steps * shares if micro and steps else DEFAULT_GLOBAL_ROWS
    share = -(-rows // shares)
    if micro is None:
        micro = -(-share // steps) if steps else min(share, auto_micro)
    needed = -(-share // micro)
    if steps not in (None, needed):
        raise ConfigError(_disagreement(rows, micro, steps, needed, gpus, sequence_gpus))
    return BatchCut(rows, None, min(micro, share), needed)


def micro_choices(batch: Batch, shares: int, most_rows: int) -> list[int]:
    """Micro-batches from the largest within `most_rows` to one row; each is the smallest for its number of steps, so
    that the last micro-batch of a window is about as full as the others."""
    if batch.global_tokens is not None:
        return [2**power for power in reversed(range(most_rows.bit_length()))]
    share = -(-(DEFAULT_GLOBAL_ROWS if batch.global_rows == "auto" else batch.global_rows) // shares)
    return sorted({-(-share // -(-share // rows)) for rows in range(1, min(most_rows, share) + 1)}, reverse=True)


def _by_tokens(batch, auto_micro):
    for name in ("global_rows", "accumulation_steps"):
        if getattr(batch, name) != "auto":
            raise ConfigError(f"batch.{name}={getattr(batch, name)}: not with batch.global_tokens="
                              f"{batch.global_tokens}, where the rows of a window vary; leave it auto")
    micro = auto_micro if batch.micro_rows == "auto" else batch.micro_rows
    return BatchCut(None, batch.global_tokens, micro, None)


def _disagreement(rows, micro, steps, needed, gpus, sequence_gpus):
    shares = gpus // sequence_gpus
    share = -(-rows // shares)
    fitting_micro = -(-share // steps)
    triples = [(rows, micro, needed), (micro * steps * shares, micro, steps)]
    if -(-share // fitting_micro) == steps:
        triples.insert(1, (rows, fitting_micro, steps))
    together = f", {sequence_gpus} to a row," if sequence_gpus > 1 else ""
    nearest = "; or ".join(f"batch.global_rows={r} batch.micro_rows={m} batch.accumulation_steps={a}"
                           for r, m, a in triples)
    return (f"batch.accumulation_steps={steps}: {rows} rows on {gpus} GPUs{together} are up to {share} rows a GPU, in "
            f"micro-batches of {micro} that is {needed} steps; nearest that agree: {nearest}")
