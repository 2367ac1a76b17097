"""One attempt of a run on one rank: from its folder to a status that says how it ended."""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from tonnage.config.compose import compose_config
from tonnage.config.rules import Layout
from tonnage.config.schema import Config
from tonnage.data.formats import log_skipped
from tonnage.data.prepare import describe
from tonnage.errors import EXIT_DONE, EXIT_STOPPED_RESUMABLE, DataError, DoesNotFit
from tonnage.models.build import count_by_kind
from tonnage.report.console import count, memory_gib, number, table
from tonnage.runtime import runs
from tonnage.runtime.logs import LOG
from tonnage.train.loop import train
from tonnage.train.session import Session, open_session, prepare_data


def train_run(start, group: dist.ProcessGroup, layout: Layout, device: torch.device) -> int:
    """Train the run of `start` (folder, attempt, model_folder, start_from); returns the exit code (collective)."""
    config = run_config(start.folder, start.attempt)
    session = None
    try:
        rows = _prepared(config, start.model_folder, group)
        session = open_session(config, start.folder, start.model_folder, layout, start.attempt, group, device, rows,
                               start.start_from)
        return _train(session, layout, rows)
    except torch.OutOfMemoryError as error:
        fit = DoesNotFit(f"rank {dist.get_rank()} ran out of GPU memory ({str(error).splitlines()[0]}); lower "
                         f"batch.micro_rows={layout.cut.micro_rows} (the global batch stays what it is), set "
                         f"model.activation_checkpointing=full, or shard more: strategy=zero3|fsdp, more gpus")
        _note_failure(start, session, fit)
        raise fit from error
    except KeyboardInterrupt:
        if dist.get_rank() == 0:
            runs.write_status(start.folder, "stopped", "stopped at once: steps since the last checkpoint are lost; go on "
                              f"with run={start.folder}", attempt=start.attempt, resumable=True,
                              step=session.position.step if session else 0)
        raise
    except Exception as error:
        _note_failure(start, session, error)
        raise
    finally:
        if session is not None:
            session.progress.close()
            if session.metrics is not None:
                session.metrics.close()


def _prepared(config, model_folder, group):
    """Rows, by one rank of each node first, so that a node without the cache makes it once; equal on all ranks."""
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    rows = prepare_data(config, model_folder, progress=False) if first else None
    dist.barrier(group=group)
    rows = rows or prepare_data(config, model_folder, progress=False)
    prints = [None] * dist.get_world_size()
    dist.all_gather_object(prints, [one and one.fingerprint for one in rows], group=group)
    if any(one != prints[0] for one in prints):
        raise DataError(f"data.path={config.data.path}: ranks read different data (nodes hold different copies, or other "
                        f"tokenizer files); put them on a disk that all nodes share")
    return rows


def _note_failure(start, session, error):
    """The first failure of an attempt stays in status.json: what follows on other ranks is a lost connection."""
    if runs.read_status(start.folder).get("state") == "failed":
        return
    with suppress(OSError):  # a full disk must not hide what happened
        runs.write_status(start.folder, "failed", f"{type(error).__name__}: {error}", attempt=start.attempt, resumable=True,
                          step=session.position.step if session else 0)


def run_config(folder: Path, attempt: int) -> Config:
    """What a run's config.yaml and the overrides of one attempt make."""
    return compose_config(runs.read_attempt(folder, attempt)["overrides"], runs.read_config(folder))


def _train(s: Session, layout: Layout, rows) -> int:
    if s.rank == 0:
        _print_start(s, layout, rows[0])
    s.status("running", "started")
    if s.position.step == 0:
        if s.eval_rows is not None:
            s.evaluate()
        s.answers("before training")
    started = time.monotonic()
    outcome = train(s)
    s.progress.close()
    if outcome == "stopped":
        s.status("stopped", f"stopped on request after step {s.position.step}; go on with run={s.folder}",
                 exit_code=EXIT_STOPPED_RESUMABLE)
        LOG.info(f"stopped after step {s.position.step}, checkpoint written; go on with run={s.folder}")
        return EXIT_STOPPED_RESUMABLE
    s.answers("after training")
    s.status("done", f"finished after step {s.position.step}", exit_code=EXIT_DONE,
             best_metric=s.position.best_metric, best_step=s.position.best_step)
    took_s = time.monotonic() - started
    LOG.info(f"done: {count(s.position.step, 'step')}; in this start {s.input_tokens:,} input tokens in {took_s:.0f} s, "
             f"{number(s.input_tokens / took_s)} input tokens/s all in all; "
             f"peak memory of rank 0 {memory_gib(s.engine.device):.2f} GiB")
    return EXIT_DONE


def _print_start(s: Session, layout: Layout, train_rows) -> None:
    """The start-up table and what the data look like."""
    cut, model = s.cut, s.engine.model
    counts = count_by_kind(model)
    trained = sum(one for one, _ in counts.values())
    total = sum(one + other for one, other in counts.values())
    kinds = ", ".join(f"{kind} {number(one)} of {number(one + other)}" for kind, (one, other) in counts.items() if one)
    window = (count(cut.global_rows, "row") if cut.global_rows else f"up to {cut.global_tokens:,} tokens")
    steps = f" x {count(cut.accumulation_steps, 'accumulation step')}" if cut.accumulation_steps else ""
    data, epochs = "a stream", ""
    if train_rows is not None:
        data = (f"{count(len(train_rows), 'row')}, {int(train_rows.input_tokens.sum()):,} input tokens, "
                f"{int(train_rows.label_tokens.sum()):,} of them labels")
        an_epoch = s.source.num_windows(1)
        epochs = f": {count(s.num_steps / an_epoch, 'epoch')} of {count(an_epoch, 'step')}"
    name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
    lines = [
        ("model", f"{s.config.model.name} ({name.removeprefix('FSDP')}), {number(total)} parameters"),
        ("trained", f"{number(trained)} ({trained / total:.2%}): {kinds}"),
        ("world", f"{layout.gpus} x {layout.device}, {layout.gpus_per_node} a node, strategy {layout.strategy}, "
                  f"{s.config.precision.name}"),
        ("window", f"{window} of up to {s.config.data.seq_tokens:,} tokens = {count(layout.gpus, 'rank')} x "
                   f"{count(cut.micro_rows, 'row')}{steps}"),
        ("data", data),
        ("loss", f"{s.head.kind}, attention {model.config._attn_implementation}"),
        ("steps", f"{s.num_steps:,}{epochs}" + (f", from step {s.position.step + 1}" if s.position.step else "")),
        ("learning rate", f"{s.config.schedule.name}, peak {s.peak_rate:g}"),
        ("run", str(s.folder)),
    ]
    table("Tonnage", lines)
    # a split has one list for both parts
    for why in dict.fromkeys(why for one in (train_rows, s.eval_rows) if one is not None for why in one.bad_records):
        log_skipped(why)
    if train_rows is not None:
        print(describe(train_rows, s.tokenizer), flush=True)
    if layout.device == "cpu" and s.config.precision.name == "bf16":
        LOG.info("bf16 is slow on CPUs, where it has no fast backward: precision=fp32 is faster")
    if s.config.adapter.dropout:
        LOG.info("adapter.dropout is on: masks depend on the cut, so exactness across cuts is not claimed")
