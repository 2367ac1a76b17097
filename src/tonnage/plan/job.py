"""What the planner is asked about: one run as numbers, nothing `auto`, and what a framework keeps in which precision.

A job is made from a config (`job_of`) or from a published measurement (`plan.published`).
"""

from dataclasses import dataclass
from functools import cached_property

from tonnage.config.rules import Layout, shard_gpus
from tonnage.config.schema import Config
from tonnage.facts.architectures import Architecture

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run on N GPUs.

    `targets` are the ends of the names of adapted matrices; `all-linear` is every matrix of a decoder layer but
    routers and routed experts. `shard_gpus` share one copy of what the strategy shards. `accumulation_steps` is that
    of the busiest rank.
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
        return tuple(sum(self.rank * (inputs + outputs) + (outputs if self.adapter == "dora" else 0)
                         for name, (inputs, outputs) in self.architecture.linear_shapes(i).items()
                         if is_adapted(name, self.targets))
                     for i in range(self.architecture.num_layers))

    @cached_property
    def trained_parameters(self) -> int:
        """Parameters that the optimizer updates."""
        return self.architecture.num_parameters if self.trains_all else sum(self.adapter_parameters)


def is_adapted(name: str, targets: tuple[str, ...]) -> bool:
    """Whether the matrix `name` of `Architecture.linear_shapes` carries an adapter."""
    if name == "mlp.gate" or name.startswith("mlp.experts."):
        return False
    return any(word == "all-linear" or name == word or name.endswith("." + word) for word in targets)


def job_of(config: Config, layout: Layout, architecture: Architecture) -> Job:
    """The job of a config on a layout."""
    cut = layout.cut
    attention = config.model.attention
    if attention == "auto":  # flash is taken where flash-attn is installed; both hold the same tensors
        attention = "sdpa"
    return Job(
        architecture=architecture, adapter=config.adapter.name, rank=config.adapter.rank,
        targets=tuple(config.adapter.targets), strategy=layout.strategy, gpus=layout.gpus,
        gpus_per_node=layout.gpus_per_node, shard_gpus=_shard_gpus(config, layout), offload=config.strategy.offload,
        reshard_after_forward=config.strategy.reshard_after_forward, precision=config.precision.name,
        optimizer=config.optimizer.name, seq_tokens=config.data.seq_tokens, micro_rows=cut.micro_rows,
        accumulation_steps=cut.accumulation_steps or 1, checkpointing=config.model.activation_checkpointing,
        attention=attention, loss="plain" if config.train.loss == "plain" else "chunked",
        loss_chunk_tokens=config.train.loss_chunk_tokens,
        packing=config.data.packing, compile=config.model.compile)


def _shard_gpus(config, layout):
    if layout.strategy.startswith("zero"):
        return 1 if layout.strategy == "zero0" else layout.gpus
    return shard_gpus(config, layout.strategy, layout.gpus, layout.gpus_per_node)
