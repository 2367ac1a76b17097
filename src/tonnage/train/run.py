"""One attempt of a run on one rank: from its folder to a status that says how it ended."""

import hashlib
import json
import math
import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from tonnage.config.compose import compose_config
from tonnage.config.rules import Layout, hang_s
from tonnage.config.schema import Config
from tonnage.data.formats import log_skipped
from tonnage.data.prepare import describe
from tonnage.errors import EXIT_DONE, EXIT_STOPPED_RESUMABLE, DataError, DoesNotFit, RankLost
from tonnage.models.build import count_by_kind
from tonnage.report.console import count, memory_gib, number, table
from tonnage.runtime import runs
from tonnage.runtime.agreement import agree
from tonnage.runtime.logs import LOG
from tonnage.runtime.watchdog import read_places, watching, write_place
from tonnage.train.loop import train
from tonnage.train.session import Session, StopRequest, open_session, prepare_data


def train_run(start, group: dist.ProcessGroup, layout: Layout, device: torch.device) -> int:
    """Train the run of `start` (folder, attempt, model_folder, start_from); returns the exit code (collective)."""
    config = run_config(start.folder, start.attempt)
    stop = StopRequest(start.folder, say=dist.get_rank() == 0)
    with watching(start.folder, dist.get_rank(), dist.get_world_size(), hang_s(config), stop.look):
        return _guarded(start, config, group, layout, device, stop)


def _guarded(start, config, group, layout, device, stop):
    """Prepare and train; whatever ends it is said in status.json."""
    session = None
    try:
        agree(_hash(config), group)
        rows = _prepared(config, start.model_folder, group)
        session = open_session(config, start.folder, start.model_folder, layout, start.attempt, group, device, rows,
                               stop, start.start_from)
        stop.armed = True
        return _train(session, layout, rows)
    except torch.OutOfMemoryError as error:
        fit = DoesNotFit(f"rank {dist.get_rank()} ran out of GPU memory ({str(error).splitlines()[0]}); lower "
                         f"batch.micro_rows={layout.cut.micro_rows} (the global batch stays what it is), set "
                         f"model.activation_checkpointing=full, or shard more: strategy=zero3|fsdp, more gpus")
        _note_failure(start, session, fit)
        raise fit from error
    except KeyboardInterrupt:
        _note_stop(start, stop)
        raise
    except Exception as error:
        if not stop.armed and stop.asked(look=True):  # another rank was quicker to end, and took the connection with it
            _note_stop(start, stop)
            raise KeyboardInterrupt from error
        cause = _cause(error)
        if cause != "fault":
            lost = RankLost(f"{_first_sentence(error)}; last seen: {_places(start.folder)}")
            _note_failure(start, session, lost, cause)
            LOG.debug("lost", exc_info=error)
            raise lost from error
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


def _note_stop(start, stop):
    """This rank ends at once; rank 0 says so."""
    if dist.get_rank() == 0:
        lost = "steps since the last checkpoint are lost" if stop.armed else "before the first step of this start"
        runs.settle(start.folder, "stopped", f"stopped at once: {lost}; go on with run={start.folder}",
                    reason=stop.reason(stop.asked(look=True)), exit_code=EXIT_STOPPED_RESUMABLE)
        runs.forget_stop(start.folder)


def _note_failure(start, session, error, cause="fault"):
    """The first failure of an attempt stays in status.json: what follows on other ranks is a lost connection."""
    if runs.read_status(start.folder).get("state") != "running":
        return
    with suppress(OSError):  # a full disk must not hide what happened
        runs.settle(start.folder, "failed", f"{type(error).__name__}: {error}", cause=cause,
                    exit_code=getattr(error, "exit_code", 1), **({"step": session.position.step} if session else {}))


def _cause(error):
    """`connection` or `device` where starting again may help (see runtime/supervisor.py), else `fault`."""
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return "connection"
    return "device" if isinstance(error, torch.AcceleratorError) else "fault"


def _first_sentence(error):
    return (str(error).strip() or repr(error)).splitlines()[0].split(". ")[0]


def _places(folder):
    with suppress(OSError):
        write_place(folder, dist.get_rank(), 0.0)
    places = read_places(folder, dist.get_world_size(), silent_s=math.inf)
    return "; ".join(f"rank {one['rank']} ({one['host']}) in {one['where']}" for one in places)


def _hash(config):
    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True, default=str).encode()).hexdigest()[:12]


def run_config(folder: Path, attempt: int) -> Config:
    """What a run's config.yaml and the overrides of one attempt make."""
    return compose_config(runs.read_attempt(folder, attempt)["overrides"], runs.read_config(folder))


def _train(s: Session, layout: Layout, rows) -> int:
    if s.rank == 0:
        _print_start(s, layout, rows[0])
        if s.position.step and s.attempt > 1:
            before, now = (runs.read_attempt(s.folder, number)["layout"] for number in (s.attempt - 1, s.attempt))
            if (change := layout_change(before, now)) is not None:
                LOG.info(change)
    s.status("running", "started")
    if s.position.step == 0:
        if s.eval_rows is not None:
            s.evaluate()
        s.answers("before training")
    started = time.monotonic()
    outcome = train(s)
    s.progress.close()
    if outcome == "stopped":
        s.status("stopped", f"stopped on request ({s.stopped_by}) after step {s.position.step}; go on with run={s.folder}",
                 reason=s.stopped_by, exit_code=EXIT_STOPPED_RESUMABLE)
        _forget_stop(s)
        dist.barrier(group=s.group)  # torchrun ends all ranks as soon as one has ended with 75
        LOG.info(f"stopped ({s.stopped_by}) after step {s.position.step}, checkpoint written; go on with run={s.folder}")
        return EXIT_STOPPED_RESUMABLE
    s.answers("after training")
    s.status("done", f"finished after step {s.position.step}", exit_code=EXIT_DONE,
             best_metric=s.position.best_metric, best_step=s.position.best_step)
    _forget_stop(s)
    took_s = time.monotonic() - started
    LOG.info(f"done: {count(s.position.step, 'step')}; in this start {s.input_tokens:,} input tokens in {took_s:.0f} s, "
             f"{number(s.input_tokens / took_s)} input tokens/s all in all; "
             f"peak memory of rank 0 {memory_gib(s.engine.device):.2f} GiB")
    return EXIT_DONE


def _forget_stop(s):
    if s.rank == 0:
        runs.forget_stop(s.folder)


def layout_change(before: dict, now: dict) -> str | None:
    """What is said where a run goes on with its windows cut in another way (layouts as attempts/NNN.yaml has them)."""
    if _cut_text(before) == _cut_text(now):
        return None
    cut = now["cut"]
    window = count(cut["global_rows"], "row") if cut["global_rows"] else f"up to {cut['global_tokens']:,} tokens"
    return f"{_cut_text(now, words=True)}, was {_cut_text(before)}; the global batch is {window} as before"


def _cut_text(layout, words=False):
    cut = layout["cut"]
    parts = [(layout["gpus"], "rank"), (cut["micro_rows"], "row"), (cut["accumulation_steps"], "step")]
    together = layout.get("sequence_gpus", 1)
    return (" x ".join(count(value, name) if words else str(value) for value, name in parts if value)
            + (f", {together} to a row" if together > 1 else ""))


def _print_start(s: Session, layout: Layout, train_rows) -> None:
    """The start-up table and what the data look like."""
    cut, model = s.cut, s.engine.model
    counts = count_by_kind(model)
    trained = sum(one for one, _ in counts.values())
    total = sum(one + other for one, other in counts.values())
    kinds = ", ".join(f"{kind} {number(one)} of {number(one + other)}" for kind, (one, other) in counts.items() if one)
    window = (count(cut.global_rows, "row") if cut.global_rows else f"up to {cut.global_tokens:,} tokens")
    steps = f" x {count(cut.accumulation_steps, 'accumulation step')}" if cut.accumulation_steps else ""
    together = f", {layout.sequence_gpus} ranks to a row" if layout.sequence_gpus > 1 else ""
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
                   f"{count(cut.micro_rows, 'row')}{steps}{together}"),
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
    if s.config.precision.name == "fp8":
        LOG.info(f"{model.float8}; scales are of a micro-batch, so exactness across cuts is not claimed")
    if s.config.adapter.dropout:
        LOG.info("adapter.dropout is on: masks depend on the cut, so exactness across cuts is not claimed")
