"""What the planner is asked about: one run as numbers, nothing `auto`, and what a framework keeps in which precision.

A job is made from a config (`job_of`) or from a published measurement (`plan.published`).
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from tonnage.config.rules import Layout, shard_gpus
from tonnage.config.schema import Config
from tonnage.errors import ConfigError
from tonnage.facts.architectures import Architecture
from tonnage.facts.zero import ZeroLimits, zero_limits

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run on N GPUs.

    `targets` are the ends of the names of adapted matrices; `all-linear` is every matrix of a decoder layer but
    routers and routed experts. `shard_gpus` share one copy of what the strategy shards. `accumulation_steps` is that
    of the busiest rank. `rows_per_step` are those of a whole window; 0: every micro-batch is full.
    `trains_embeddings`: embedding and head are trained beside an adapter, because tokens are new.
    """

    architecture: Architecture
    adapter: str
    rank: int
    targets: tuple[str, ...]
    strategy: str
    gpus: int
    gpus_per_node: int
    shard_gpus: int
    offload: str
    reshard_after_forward: bool
    precision: str
    optimizer: str
    seq_tokens: int
    micro_rows: int
    accumulation_steps: int
    checkpointing: str
    attention: str
    loss: str
    loss_chunk_tokens: int
    packing: bool = False
    rows_per_step: int = 0
    trains_embeddings: bool = False
    dropout: float = 0.0
    zero: ZeroLimits = ZeroLimits()
    compile: bool = False

    @property
    def micro_tokens(self) -> int:
        """Tokens of one micro-batch on one GPU, padding included."""
        return self.micro_rows * self.seq_tokens

    @property
    def compute_bytes(self) -> int:
        """Bytes of one number in forward and backward."""
        return COMPUTE_BYTES[self.precision]

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step over all GPUs, padding included."""
        return self.seq_tokens * (self.rows_per_step or self.micro_rows * self.accumulation_steps * self.gpus)

    @property
    def trains_head(self) -> bool:
        """Whether the head is trained."""
        return self.trains_all or self.trains_embeddings

    @property
    def trains_all(self) -> bool:
        """Whether every weight is trained."""
        return self.adapter == "full"

    @cached_property
    def adapter_parameters(self) -> tuple[int, ...]:
        """Adapter parameters of each layer: rank * (in + out) of every adapted matrix, dora's magnitudes besides.

        Source: arXiv 2106.09685, section 4.1; arXiv 2402.09353, section 4.
        """
        if self.trains_all:
            return (0,) * self.architecture.num_layers
        return _adapter_parameters(self.architecture, self.targets, self.rank, self.adapter == "dora")

    @cached_property
    def trained_parameters(self) -> int:
        """Parameters that the optimizer updates."""
        a = self.architecture
        if self.trains_all:
            return a.num_parameters
        beside = a.embedding_parameters + a.head_parameters if self.trains_embeddings else 0
        return sum(self.adapter_parameters) + beside


@lru_cache
def _adapter_parameters(architecture, targets, rank, dora):
    return tuple(sum(rank * (inputs + outputs) + dora * outputs for inputs, outputs in shapes)
                 for shapes in _adapted(architecture, targets))


@lru_cache
def _adapted(architecture, targets):
    return tuple(tuple(shape for name, shape in architecture.linear_shapes(i).items() if is_adapted(name, targets))
                 for i in range(architecture.num_layers))


def adapted_shapes(architecture: Architecture, targets: tuple[str, ...]) -> list[tuple[int, int]]:
    """(in, out) of every adapted matrix of the model."""
    return [shape for shapes in _adapted(architecture, targets) for shape in shapes]


def adapted_names(job: Job) -> frozenset[str]:
    """Names of the adapted matrices, dense layers and mixtures of experts together."""
    if job.trains_all:
        return frozenset()
    shapes = (job.architecture.linear_shapes(i) for i in (0, job.architecture.num_layers - 1))
    return frozenset(name for one in shapes for name in one if is_adapted(name, job.targets))


def is_adapted(name: str, targets: tuple[str, ...]) -> bool:
    """Whether the matrix `name` of `Architecture.linear_shapes` carries an adapter."""
    if name == "mlp.gate" or name.startswith("mlp.experts."):
        return False
    return any(word == "all-linear" or name == word or name.endswith("." + word) for word in targets)


def job_of(config: Config, layout: Layout, architecture: Architecture) -> Job:
    """The job of a config on a layout."""
    cut = layout.cut
    attention = config.model.attention
    nothing = not sum(_adapter_parameters(architecture, tuple(config.adapter.targets), 1, False))
    if config.adapter.name != "full" and nothing:
        raise ConfigError(f"adapter.targets={list(config.adapter.targets)}: matches no matrix of this model; there are "
                          f"{', '.join(sorted({name.rsplit('.', 1)[-1] for name in architecture.linear_shapes(0)}))}")
    if attention == "auto":  # flash is taken where flash-attn is installed; both hold the same tensors
        attention = "sdpa"
    return Job(
        architecture=architecture, adapter=config.adapter.name, rank=config.adapter.rank,
        targets=tuple(config.adapter.targets), strategy=layout.strategy, gpus=layout.gpus,
        gpus_per_node=layout.gpus_per_node, shard_gpus=_shard_gpus(config, layout), offload=config.strategy.offload,
        reshard_after_forward=config.strategy.reshard_after_forward, precision=config.precision.name,
        optimizer=config.optimizer.name, seq_tokens=config.data.seq_tokens, micro_rows=cut.micro_rows,

        accumulation_steps=cut.accumulation_steps or _steps_by_tokens(cut, config.data.seq_tokens, layout.gpus),
        rows_per_step=cut.global_rows or max(1, cut.global_tokens // config.data.seq_tokens),
        trains_embeddings=bool(config.model.new_tokens) and config.adapter.name != "full",
        dropout=config.adapter.dropout if config.adapter.name != "full" else 0.0,
        checkpointing=config.model.activation_checkpointing,
        attention=attention, loss="plain" if config.train.loss == "plain" else "chunked",
        loss_chunk_tokens=config.train.loss_chunk_tokens,
        packing=config.data.packing, zero=zero_limits(config.strategy.extra), compile=config.model.compile)


def _steps_by_tokens(cut, seq_tokens, gpus):
    """Micro-batches of a window that is bounded in tokens, if its rows are full."""
    rows = max(1, cut.global_tokens // seq_tokens)
    return ceil(ceil(rows / gpus) / cut.micro_rows)


def _shard_gpus(config, layout):
    if layout.strategy.startswith("zero"):
        return 1 if layout.strategy == "zero0" else layout.gpus
    return shard_gpus(config, layout.strategy, layout.gpus, layout.gpus_per_node)
