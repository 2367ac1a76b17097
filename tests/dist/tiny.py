"""A tiny Llama, ragged rows with random masks, and sessions of the real loop on them."""

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from tonnage.config.compose import compose_config
from tonnage.config.rules import resolve_layout
from tonnage.data.pack import Row
from tonnage.models.slices import Slices
from tonnage.report.console import StepProgress
from tonnage.train import checkpoint, loop
from tonnage.train.loss import LossHead
from tonnage.train.routing import Routing
from tonnage.train.schedule import peak_learning_rate
from tonnage.train.session import Session, engine_parts, make_engine, resolve_attention
from tonnage.train.source import PreparedSource

NUM_ROWS, GLOBAL_ROWS = 16, 7  # windows of 7, 7 and 2 rows


def make_model(folder: Path, tied: bool = False, hidden: int = 32, kv_heads: int = 2, layers: int = 2) -> str:
    """A Llama with random weights, saved as a Hugging Face folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                         num_attention_heads=4, num_key_value_heads=kv_heads, max_position_embeddings=128, tie_word_embeddings=tied,
                         initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


class RaggedRows:
    """Rows of 4 to 29 tokens, about half of them labels, at least one."""

    fingerprint = "ragged"

    def __init__(self, num_rows: int = NUM_ROWS, seed: int = 1):
        rng = np.random.default_rng(seed)
        self.rows = []
        for _ in range(num_rows):
            size = int(rng.integers(4, 30))
            tokens = rng.integers(3, 96, size).astype(np.int32)
            labels = np.where(rng.random(size) < 0.5, tokens, -100).astype(np.int32)
            labels[0], labels[-1] = -100, tokens[-1]
            self.rows.append(Row(tokens, labels, np.arange(size, dtype=np.int32)))
        self.input_tokens = np.array([len(row.tokens) for row in self.rows], np.int32)
        self.label_tokens = np.array([(row.labels != -100).sum() for row in self.rows], np.int32)
        self.weights = np.ones(num_rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


class Recorder:
    """Stands in for metrics: keeps what is logged."""

    every_steps = 1

    def __init__(self):
        self.lines = []

    def log(self, step: int, values: dict, always: bool = False) -> None:
        self.lines.append({"step": step, **values})


def config_for(strategy: str, *overrides: str):
    """A config as from the command line; tiny parameters are partitioned too under ZeRO-3."""
    fixed = [f"strategy={strategy}", "device=cpu", "model=custom", "model.path=none", "model.activation_checkpointing=none",
             "precision=fp32", "schedule=constant", "schedule.warmup_steps=0", "adapter.rank=4", "optimizer.clip_norm=0.5",
             f"batch.global_rows={GLOBAL_ROWS}", "data.seq_tokens=128", "train.audit=false"]
    if strategy == "zero3":
        fixed.append("strategy.extra={zero_optimization: {stage3_param_persistence_threshold: 0}}")
    if strategy == "hsdp":
        fixed.append("strategy.shard_gpus=2")
    return compose_config([*fixed, *overrides])


def open_tiny(config, folder: str, rows=None, run_folder: Path | None = None, group=None) -> Session:
    """A session of the real engine and loop on tiny data, without run folder, tokenizer and trackers."""
    world = dist.get_world_size()
    layout = resolve_layout(replace(config, model=replace(config.model, path=folder)), world, "cpu", world, False)
    rows = rows or RaggedRows()
    engine = make_engine(config, layout.strategy, layout.gpus_per_node, layout.cut, torch.device("cpu"))
    engine.prepare(engine_parts(config, folder, resolve_attention(config.model.attention, "cpu", config.precision.name)))
    source = PreparedSource(rows, config.seed, layout.cut)
    num_steps = source.num_windows(config.train.epochs)
    return Session(
        config=config, folder=run_folder or Path(tempfile.mkdtemp(prefix="tonnage-tiny-")), run_id="tiny", group=group or dist.group.WORLD,
        patient_group=group or dist.group.WORLD, cut=layout.cut, engine=engine,
        head=LossHead(engine.model, config.train.loss, 16),
        routing=Routing(engine.model, config), source=source, tokenizer=SimpleNamespace(pad_token_id=0),
        flat=False, eval_rows=None, num_steps=num_steps,
        peak_rate=peak_learning_rate(config.optimizer, config.adapter.name, layout.cut.global_rows), attempt=1,
        metrics=Recorder(), progress=StepProgress(num_steps, 0, show=False),
        stop=SimpleNamespace(asked=lambda look: 0, reason=lambda asked: "asked"),
        slices=Slices.over(layout.sequence_gpus, 120.0),
        # nothing to save: the loop takes the last step as saved already
        last_saved=num_steps if run_folder is None else None)


def go_to_newest(s: Session, checkpoints: Path, run_id: str = "tiny") -> bool:
    """Put a session where the newest complete checkpoint stands; False where there is none (collective)."""
    newest = checkpoint.newest_complete(checkpoints, run_id)
    if newest is None:
        return False
    s.position, state = checkpoint.read_position(newest)
    checkpoint.load(newest, s.engine, s.position.num_updates)
    s.source.restore(state)
    return True


def go_on(s: Session, run_folder: Path, until: int) -> list[float]:
    """From the newest checkpoint in `run_folder` to step `until`, saved there; losses of the steps (collective)."""
    go_to_newest(s, run_folder)
    s.num_steps = s.last_saved = until  # the loop's own save is not wanted
    loop.train(s)
    checkpoint.save(run_folder, s.engine, s.position, "tiny", s.source.state(), dist.group.WORLD)
    return [line["loss"] for line in s.metrics.lines]


def whole_weights(engine) -> dict[str, torch.Tensor]:
    """Copies of all trained tensors by their plain names."""
    return {name: engine.whole(parameter).detach().clone() for name, parameter in engine.trained()}


def make_chat_model(folder: Path) -> str:
    """The tiny Llama with a tokenizer and chat template, as launch/train.py wants it."""
    import toy_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = toy_tokenizers.byte_level()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                         eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_chats(file: Path, num_samples: int) -> str:
    """Short chats of uneven length, one a line."""
    import json

    rng = np.random.default_rng(0)
    words = ["the", "cat", "sat", "on", "mat", "yes", "no", "one", "two"]
    with open(file, "w") as out:
        for _ in range(num_samples):
            texts = [" ".join(rng.choice(words, int(rng.integers(1, 9)))) for _ in range(2)]
            messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
            out.write(json.dumps({"messages": messages}) + "\n")
    return str(file)
