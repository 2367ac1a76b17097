"""Everything a rank holds while it trains, and how it is put together."""

import importlib.util
import math
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tonnage.config.batch import BatchCut
from tonnage.config.rules import Layout, shard_gpus
from tonnage.config.schema import Config, DataSet
from tonnage.data.formats import check_path as check_data_path
from tonnage.data.prepare import Rows, prepare, prepare_split
from tonnage.data.stream import StreamRows
from tonnage.data.template import load_tokenizer, read_template
from tonnage.engines.base import Engine, Parts
from tonnage.errors import CheckpointError, DataError
from tonnage.facts.capabilities import CAPABILITIES
from tonnage.models import build, load
from tonnage.models.folder import check_path as check_model_path
from tonnage.models.slices import WHOLE, Slices, register_attention, require_sliceable
from tonnage.report.console import StepProgress
from tonnage.report.metrics import Metrics
from tonnage.runtime import runs
from tonnage.runtime.logs import LOG
from tonnage.train import checkpoint, probes
from tonnage.train.evaluate import answer, evaluate
from tonnage.train.loss import LossHead
from tonnage.train.optimizer import build_optimizer
from tonnage.train.routing import Routing
from tonnage.train.schedule import peak_learning_rate
from tonnage.train.source import PreparedSource, Source, StreamSource


class StopRequest:
    """SIGINT, SIGTERM or a file `stop` in the run folder: stop at the next micro-batch, with a checkpoint.

    SIGINT twice, or any of them before there is something to save (`armed` is False): stop now.

    Args:
        say: tell the user so, on rank 0.
    """

    BY_FILE = 1  # no signal of that number stops a run

    def __init__(self, folder: Path, say: bool):
        self.folder, self.say, self.requested, self.armed, self.process = folder, say, 0, False, os.getpid()
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number, _):
        if os.getpid() != self.process:  # a library's worker has inherited this: it ends, the run decides for itself
            os._exit(128 + number)
        again, self.requested = self.requested, self.requested or number
        if number == signal.SIGINT if again else not self.armed:
            raise KeyboardInterrupt
        if self.say and not again:
            # not print: the handler may have interrupted one, which must not be entered again. On a terminal the line
            # goes over the progress bar, which is drawn again below it
            over = "\r\x1b[2K" if os.isatty(2) else ""
            os.write(2, f"{over}stopping behind this micro-batch with a checkpoint; Ctrl-C again stops now, without one\n"
                     .encode())

    def asked(self, look: bool) -> int:
        """0, the number of the signal, or BY_FILE; only a rank that is to `look` asks the disk."""
        return self.requested or (self.BY_FILE if look and (self.folder / runs.STOP_FILE).exists() else 0)

    def look(self) -> None:
        """Before there is something to save, a stop file is as good as a signal; called beside the main thread."""
        if not self.armed and not self.requested and (self.folder / runs.STOP_FILE).exists():
            os.kill(self.process, signal.SIGTERM)

    def reason(self, asked: int) -> str:
        """Why the run stops, for status.json."""
        named = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}.get(asked, f"file {runs.STOP_FILE}")
        return runs.stop_wanted(self.folder) or named  # who asks by file may send a signal, too


@dataclass
class Session:
    """One rank's state. `metrics` is None on ranks other than 0.

    `group` is a CPU group for agreeing within cluster.timeout_s; `patient_group` waits while one rank reads or writes.
    """

    config: Config
    folder: Path
    run_id: str
    group: dist.ProcessGroup
    patient_group: dist.ProcessGroup
    cut: BatchCut
    engine: Engine
    head: LossHead
    routing: Routing
    source: Source
    tokenizer: object
    flat: bool
    eval_rows: Rows | None
    num_steps: int
    peak_rate: float
    attempt: int
    metrics: Metrics | None
    progress: StepProgress
    stop: StopRequest
    position: checkpoint.Position = field(default_factory=checkpoint.Position)
    slices: Slices = WHOLE
    last_saved: int | None = None
    input_tokens: int = 0  # of this attempt
    stopped_by: str = ""
    _status_at: float = 0.0

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def pad_token(self) -> int:
        return self.tokenizer.pad_token_id or 0

    def status(self, state: str, message: str, at_most_every_s: float = 0.0, **facts) -> None:
        """Rank 0 writes status.json."""
        if self.rank == 0 and time.monotonic() - self._status_at >= at_most_every_s:
            self._status_at = time.monotonic()
            runs.write_status(self.folder, state, message, step=self.position.step, num_steps=self.num_steps,
                              attempt=self.attempt, resumable=state != "done", **facts)

    def stop_agreed(self) -> bool:
        """Whether any rank has been asked to stop (collective, at the same place on all ranks).

        134 us on two busy CPU ranks. Ranks do not wait long: cut_window gives their micro-batches rows of like length.
        """
        asked = torch.tensor(self.stop.asked(look=self.rank == 0))
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.group)
        if asked and not self.stopped_by:
            self.stopped_by = self.stop.reason(int(asked))
        return bool(asked)

    def evaluate(self) -> None:
        """Held-out loss now; logs it and remembers the best. A stop request ends it early."""
        limit = min(len(self.eval_rows), self.config.eval.max_rows or len(self.eval_rows))
        started = time.monotonic()
        loss = evaluate(self.engine, self.head, self.eval_rows, limit, self.cut.micro_rows, self.pad_token, self.flat,
                        self.group, self.stop_agreed, self.slices)
        if loss is None:
            return
        position = self.position
        # the untrained model is no candidate: nothing is saved of it
        if position.step and math.isfinite(loss) and (position.best_metric is None or loss < position.best_metric):
            position.best_metric, position.best_step = loss, position.step
        LOG.info(f"step {position.step}: held-out {self.config.eval.metric} {loss:.4f} over {limit} rows "
                 f"({time.monotonic() - started:.0f} s)")
        if self.metrics is not None:
            self.metrics.log(position.step, {"eval_loss": loss, "eval_rows": limit}, always=True)

    def answers(self, title: str) -> None:
        """Print answers to eval.prompts."""
        for prompt in self.config.eval.prompts:
            if self.stop_agreed():
                return
            text = answer(self.engine, self.tokenizer, prompt, self.config.data.system, self.config.eval.prompt_tokens)
            LOG.info(f"{title}\n  > {prompt}\n  {text}")


def run_tokenizer(config: Config, folder: str):
    """The tokenizer with the chat template the run trains on, for answers and exports too."""
    tokenizer = load_tokenizer(folder)
    if config.data.chat_template:
        tokenizer.chat_template = read_template(config.data.chat_template)
    return tokenizer


def data_sets(config: Config) -> list[DataSet]:
    """The training sets: data.sets, or the one that data.path is short for."""
    return list(config.data.sets) or [DataSet(path=config.data.path or "", format=config.data.format)]


def prepare_data(config: Config, folder: str, progress: bool) -> tuple[Rows | None, Rows | None]:
    """Training rows (None when streaming) and held-out rows (None without), from the cache or newly made.

    Raises:
        DataError, ConfigError: see data.prepare.
    """
    options = {"seq_tokens": config.data.seq_tokens, "progress": progress}
    held_out = None
    if config.eval.path:
        with _about_eval():
            held_out = prepare([_eval_set(config)], config.data, folder, packing=False, **options)
    if config.data.streaming:
        return None, held_out
    if held_out is None and config.eval.holdout_fraction:
        return prepare_split(data_sets(config), config.data, folder, packing=config.data.packing,
                             fraction=config.eval.holdout_fraction, seed=config.seed, **options)
    return prepare(data_sets(config), config.data, folder, packing=config.data.packing, **options), held_out


def check_paths(config: Config) -> None:
    """Refuse what `resolve_folder` and `prepare_data` would, as far as this disk can tell: nothing is fetched or made.

    Raises:
        ModelError, DataError, ConfigError: as these.
    """
    check_model_path(config.model)
    if config.eval.path:
        with _about_eval():
            check_data_path(_eval_set(config))
    for one in data_sets(config):
        check_data_path(one)
    if config.data.chat_template:
        read_template(config.data.chat_template)


def _eval_set(config):
    return DataSet(path=config.eval.path, format=config.eval.format, split=config.eval.split)


@contextmanager
def _about_eval():
    """Errors about data name eval.path."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("data.path", "eval.path")) from error


def resolve_attention(wanted: str, device: str, precision: str, sequence_gpus: int = 1) -> str:
    """auto: flash where flash-attn is installed and a GPU is used in 16 bits, else sdpa, as for rows that are shared."""
    if wanted != "auto":
        return wanted
    if sequence_gpus > 1:
        return "sdpa"
    return "flash" if device == "cuda" and precision != "fp32" and importlib.util.find_spec("flash_attn") else "sdpa"


def make_engine(config: Config, strategy: str, gpus_per_node: int, cut: BatchCut, device: torch.device) -> Engine:
    """The engine of a (resolved) strategy."""
    clip = config.optimizer.clip_norm
    if CAPABILITIES[strategy].engine == "deepspeed":
        from tonnage.config.deepspeed_json import deepspeed_json
        from tonnage.engines.deepspeed import DeepSpeedEngine

        settings = deepspeed_json(config, strategy, cut.micro_rows)
        return DeepSpeedEngine(settings=settings, precision=config.precision.dtype, clip_norm=clip, device=device)
    from tonnage.engines.fsdp import FsdpEngine

    shard = shard_gpus(config, strategy, dist.get_world_size(), gpus_per_node)
    return FsdpEngine(shard_gpus=shard, expert_gpus=config.strategy.expert_gpus, precision=config.precision.dtype,
                      offload=config.strategy.offload == "all", clip_norm=clip,
                      float8_gathers=config.strategy.fp8_all_gather,
                      reshard_after_forward=config.strategy.reshard_after_forward,
                      compile_layers=config.model.compile, timeout_s=config.cluster.timeout_s, device=device)


def engine_parts(config: Config, folder: str, attention: str) -> Parts:
    """What an engine needs to make the model of `folder`.

    Raises:
        ConfigError: strategy.sequence_gpus with a model whose rows cannot be shared.
    """
    model, adapter = config.model, config.adapter
    frozen_dtype = build.DTYPES[config.precision.dtype]
    float8 = config.precision if config.precision.name == "fp8" else None
    together = config.strategy.sequence_gpus
    if together > 1:
        attention = "sliced"
        require_sliceable(build.read_config(folder, model.trust_remote_code), together, config.data.seq_tokens)
        register_attention()

    def start(built, engine):
        if adapter.name != "full":
            load.init_adapters(built, config.seed, engine.fill)
            load.init_saved_modules(built, engine.whole, engine.fill)
        if adapter.name == "dora":
            load.init_dora(built, engine.whole, engine.fill)

    return Parts(
        build=lambda trained: build.build_model(folder, model, adapter, attention, frozen_dtype, trained, float8),
        load=lambda built, device: load.load_weights(built, folder, device, model.allow_pickle),
        optimizer=lambda built: build_optimizer(built, config.optimizer),
        start=start)


def open_session(config: Config, run_folder: Path, model_folder: str, layout: Layout, attempt: int,
                 patient_group: dist.ProcessGroup, device: torch.device, rows: tuple[Rows | None, Rows | None],
                 stop: StopRequest, start_from: Path | None = None) -> Session:
    """Build engine, data source and reporting, and go to where the newest complete checkpoint stands (collective).

    Args:
        start_from: checkpoint of another run whose weights a forked run begins with.
    """
    cut = layout.cut
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.cluster.timeout_s))
    tokenizer = run_tokenizer(config, model_folder)
    attention = resolve_attention(config.model.attention, device.type, config.precision.name, layout.sequence_gpus)
    flat = attention == "flash"
    train_rows, eval_rows = rows
    if train_rows is None:
        source = StreamSource(StreamRows(data_sets(config), config.data, model_folder, seq_tokens=config.data.seq_tokens,
                                         packing=config.data.packing, seed=config.seed), cut)
    else:
        source = PreparedSource(train_rows, config.seed, cut)
    windows, most = source.num_windows(config.train.epochs), config.train.max_steps
    num_steps = min(count for count in (windows, most) if count is not None)

    if config.precision.name == "fp8" and not config.precision.fp8_emulate:
        from tonnage.models.float8 import require_units

        require_units(device)
    engine = make_engine(config, layout.strategy, layout.gpus_per_node, layout.cut, device)
    engine.prepare(engine_parts(config, model_folder, attention))
    head = LossHead(engine.model, config.train.loss, config.train.loss_chunk_tokens)
    routing = Routing(engine.model, config)
    vocab = engine.model.config.get_text_config().vocab_size
    probes.probe_loss(engine, head, vocab, config.precision.dtype, flat)  # both in the same scales of FP8
    slices = Slices.over(layout.sequence_gpus, config.cluster.timeout_s)
    if slices.count > 1:
        probes.probe_slices(engine, slices, vocab, config.precision.name)
    if config.data.packing or flat:
        probes.probe_packing(engine, vocab, config.precision.name, attention, flat)

    checkpoints = run_folder / "checkpoints"
    run_id = runs.run_id(run_folder)
    position, last_saved = _restore(checkpoints, run_id, engine, source, patient_group, start_from)
    main = dist.get_rank() == 0
    num_states = {"sgd": 1}.get(config.optimizer.name, 2)
    if main:
        checkpoint.require_space(checkpoints, checkpoint.checkpoint_bytes(engine, num_states),
                                 config.checkpoint.keep + (config.checkpoint.keep_best and eval_rows is not None))
    return Session(
        config=config, folder=run_folder, run_id=run_id, group=group,
        patient_group=patient_group, cut=cut, engine=engine, head=head, routing=routing, source=source,
        tokenizer=tokenizer, flat=flat, eval_rows=eval_rows, num_steps=num_steps,
        peak_rate=peak_learning_rate(config.optimizer, config.adapter.name, cut.global_rows), attempt=attempt,
        metrics=Metrics(run_folder, config.tracker, attempt, runs.read_config(run_folder)) if main else None,
        progress=StepProgress(num_steps, position.step, show=main), stop=stop, position=position,
        slices=slices, last_saved=last_saved)


def _restore(checkpoints, run_id, engine, source, group, start_from):
    """(position, step of the checkpoint it was read from); rank 0 chooses the checkpoint for all."""
    choice = [None]
    if dist.get_rank() == 0:
        choice = [checkpoint.newest_complete(checkpoints, run_id)]
    dist.broadcast_object_list(choice, src=0, group=group)
    if choice[0] is None:
        broken = len(list(checkpoints.glob("step-*")))
        if broken:
            raise CheckpointError(f"{checkpoints}: none of its {broken} checkpoints can be used (see above); put back a "
                                  f"whole one, or remove them to begin anew")
        if start_from is not None:
            checkpoint.load(start_from, engine, 0, with_states=False)
        return checkpoint.Position(), None
    position, state = checkpoint.read_position(choice[0])
    checkpoint.load(choice[0], engine, position.num_updates)
    if position.step:
        engine.loss_scale = position.loss_scale
    try:
        source.restore(state)
    except (KeyError, AssertionError) as error:
        raise CheckpointError(f"{choice[0]}: holds no position of this kind of data source ({error})") from error
    LOG.info(f"resumed after step {position.step} from {choice[0].name}")
    return position, position.step
