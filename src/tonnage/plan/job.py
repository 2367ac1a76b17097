"""What the planner is asked about: one run as numbers, nothing `auto`, and what a framework keeps in which precision.

A job is made from a config (`job_of`) or from a published measurement (`plan.published`).
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil

from tonnage.config.rules import Layout, shape_faults, shard_gpus
from tonnage.config.schema import Config
from tonnage.errors import ConfigError
from tonnage.facts.architectures import Architecture
from tonnage.facts.bases import expert_parts, kept_bytes
from tonnage.facts.sizes import FLOAT8_MULTIPLE
from tonnage.facts.zero import ZeroLimits, zero_limits

COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2}  # fp8: outside of products, which have one of their own


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run on N GPUs.

    `targets` are the ends of the names of adapted matrices; `all-linear` is every matrix of a decoder layer but routers
    and routed experts, `experts` are these. `quantise`: how frozen matrices of layers are kept (facts.bases).
    `shard_gpus` share one copy of what the strategy shards. `accumulation_steps` is that of the busiest rank.
    `rows_per_step` are those of a whole window; 0: every micro-batch is full. `trains_embeddings`: embedding and head
    are trained beside an adapter, because tokens are new.
    `sequence_gpus` share the tokens of each row.
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
    quantise: str = "none"
    expert_gpus: int = 1
    checkpoint_every_layers: int = 1
    checkpoints_on_host: bool = False
    hpz_gpus: int = 1
    fp8_all_gather: bool = False
    sequence_gpus: int = 1

    def checkpointing_of(self, i: int) -> str:
        """How layer i is checkpointed: none, selective or full."""
        return self.checkpointing if i % self.checkpoint_every_layers == 0 else "none"

    @property
    def checkpointed_layers(self) -> int:
        """Layers that keep less than backward needs."""
        return 0 if self.checkpointing == "none" else ceil(self.architecture.num_layers / self.checkpoint_every_layers)

    @property
    def computed_again(self) -> float:
        """Share of the layers that run forward again in backward, of `selective` all but their products."""
        return self.checkpointed_layers / self.architecture.num_layers

    @property
    def multiplied_again(self) -> float:
        """Share of the layers whose products and attention are computed again."""
        return self.computed_again * (self.checkpointing == "full")

    @property
    def layers_on_host(self) -> int:
        """Layers whose inputs are kept on the host."""
        return self.checkpoints_on_host * self.checkpointed_layers

    @property
    def layer_input_bytes(self) -> int:
        """Bytes of one layer's input of one micro-batch on one GPU."""
        return self.micro_tokens * self.architecture.hidden * self.compute_bytes

    @property
    def slice_tokens(self) -> int:
        """Tokens of a row on one GPU: all, or a slice where `sequence_gpus` share it."""
        return ceil(self.seq_tokens / self.sequence_gpus)

    @property
    def micro_tokens(self) -> int:
        """Tokens of one micro-batch on one GPU, padding included."""
        return self.micro_rows * self.slice_tokens

    @property
    def compute_bytes(self) -> int:
        """Bytes of one number in forward and backward."""
        return COMPUTE_BYTES[self.precision]

    @property
    def float8_sums(self) -> tuple[int, int, int]:
        """(weights, inputs, outputs) of the matrices whose products are computed in FP8, summed over layers."""
        return _float8_sums(self.architecture) if self.precision == "fp8" else (0, 0, 0)

    @cached_property
    def float8_gathered(self) -> tuple[int, ...]:
        """Numbers in the matrices of each layer that are gathered in FP8."""
        a = self.architecture
        if not self.fp8_all_gather:
            return (0,) * a.num_layers
        return tuple(sum(inputs * outputs for name, (inputs, outputs) in a.linear_shapes(i).items()
                         if self.gathers_in_float8(name, inputs, outputs)) for i in range(a.num_layers))

    def gathers_in_float8(self, name: str, inputs: int, outputs: int) -> bool:
        """Whether a matrix of `Architecture.linear_shapes` is gathered in FP8: where its rows divide (models.float8)."""
        return self.fp8_all_gather and is_float8(name, inputs, outputs) and outputs % self.shard_gpus == 0

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step over all GPUs, padding included."""
        shares = self.gpus // self.sequence_gpus
        return self.seq_tokens * (self.rows_per_step or self.micro_rows * self.accumulation_steps * shares)

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
    def active_adapter_parameters(self) -> int:
        """Adapter parameters that one token uses."""
        a = self.architecture
        if self.trains_all or not a.num_experts or "experts" not in self.targets:
            return sum(self.adapter_parameters)
        experts = sum(self.expert_adapters)
        return sum(self.adapter_parameters) - experts + experts * a.experts_per_token // a.num_experts

    @cached_property
    def expert_adapters(self) -> tuple[int, ...]:
        """Those of `adapter_parameters` that belong to routed experts."""
        a = self.architecture
        if self.trains_all:
            return (0,) * a.num_layers
        return tuple(_expert_adapters(a, i, self.targets, self.rank) for i in range(a.num_layers))

    @cached_property
    def kept_experts(self) -> tuple[float, ...]:
        """Those of `kept_layers` that are of routed experts."""
        a = self.architecture
        if self.trains_all or not a.num_experts:
            return (0.0,) * a.num_layers
        return tuple(_kept_experts(a, i, self.quantise, self.compute_bytes) for i in range(a.num_layers))

    @cached_property
    def kept_layers(self) -> tuple[float, ...]:
        """Bytes of each layer's frozen weights as they are kept and gathered; 0 where every weight is trained."""
        if self.trains_all:
            return (0.0,) * self.architecture.num_layers
        return _kept_layers(self.architecture, self.quantise, self.compute_bytes)

    @cached_property
    def kept_bytes(self) -> float:
        """Bytes of all frozen weights as they are kept."""
        a = self.architecture
        if self.trains_all:
            return 0.0
        outside = a.num_parameters - sum(layer.total for layer in a.layers)
        return sum(self.kept_layers) + self.compute_bytes * outside

    @cached_property
    def trained_parameters(self) -> int:
        """Parameters that the optimizer updates."""
        a = self.architecture
        if self.trains_all:
            return a.num_parameters
        beside = a.embedding_parameters + a.head_parameters if self.trains_embeddings else 0
        return sum(self.adapter_parameters) + beside


def checkpointing_words(how: str, every_layers: int, on_host: bool) -> str:
    """Checkpointing for people: `full in every 2nd layer, inputs on the host`."""
    endings = {} if every_layers % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}
    ordinal = f"{every_layers}{endings.get(every_layers % 10, 'th')}"
    every = f" in every {ordinal} layer" if every_layers > 1 else ""
    return f"{how}{every}{', inputs on the host' * on_host}"


@lru_cache
def _adapter_parameters(architecture, targets, rank, dora):
    return tuple(sum(rank * (inputs + outputs) + dora * outputs for inputs, outputs in _adapted(architecture, targets)[i])
                 + _expert_adapters(architecture, i, targets, rank) for i in range(architecture.num_layers))


def _expert_adapters(architecture, i, targets, rank):
    shapes = architecture.linear_shapes(i)
    return sum(architecture.num_experts * rank * (inputs + outputs) for name, (inputs, outputs) in shapes.items()
               if is_expert(name) and is_adapted(name, targets))


@lru_cache
def _adapted(architecture, targets):
    """(in, out) of the adapted matrices of each layer, routed experts left out."""
    return tuple(tuple(shape for name, shape in architecture.linear_shapes(i).items()
                       if is_adapted(name, targets) and not is_expert(name)) for i in range(architecture.num_layers))


@lru_cache
def _kept_layers(architecture, quantise, compute_bytes):
    kept = []
    for i, layer in enumerate(architecture.layers):
        size = compute_bytes * (layer.total - layer.routed_experts)
        for name, (inputs, outputs) in architecture.linear_shapes(i).items() if quantise != "none" else ():
            if name != "mlp.gate" and not is_expert(name):
                size += kept_bytes(quantise, (outputs, inputs)) - compute_bytes * inputs * outputs
        kept.append(size + _kept_experts(architecture, i, quantise, compute_bytes))
    return tuple(kept)


@lru_cache(maxsize=4096)
def _kept_experts(architecture, i, quantise, compute_bytes):
    if quantise == "none":
        return compute_bytes * architecture.layers[i].routed_experts
    return sum(architecture.num_experts * kept_bytes(quantise, (outputs, inputs), expert_parts(name))
               for name, (inputs, outputs) in architecture.linear_shapes(i).items() if is_expert(name))


@lru_cache
def adapted_shapes(architecture: Architecture, targets: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """(in, out) of every adapted matrix of the model that a token goes through."""
    shapes = [shape for shapes in _adapted(architecture, targets) for shape in shapes]
    for i in range(architecture.num_layers):
        shapes += [shape for name, shape in architecture.linear_shapes(i).items() if is_expert(name)
                   and is_adapted(name, targets) for _ in range(architecture.experts_per_token)]
    return tuple(shapes)


def adapted_names(job: Job) -> frozenset[str]:
    """Names of the adapted matrices, dense layers and mixtures of experts together."""
    if job.trains_all:
        return frozenset()
    shapes = (job.architecture.linear_shapes(i) for i in (0, job.architecture.num_layers - 1))
    return frozenset(name for one in shapes for name in one if is_adapted(name, job.targets))


def is_adapted(name: str, targets: tuple[str, ...]) -> bool:
    """Whether the matrix `name` of `Architecture.linear_shapes` carries an adapter."""
    if name == "mlp.gate":
        return False
    if is_expert(name):
        return "experts" in targets
    return any(word == "all-linear" or name == word or name.endswith("." + word) for word in targets)


@lru_cache
def _float8_sums(architecture):
    shapes = [shape for i in range(architecture.num_layers) for name, shape in architecture.linear_shapes(i).items()
              if is_float8(name, *shape)]
    return (sum(inputs * outputs for inputs, outputs in shapes), sum(inputs for inputs, _ in shapes),
            sum(outputs for _, outputs in shapes))


def is_float8(name: str, inputs: int, outputs: int) -> bool:
    """Whether precision=fp8 multiplies with the matrix `name` of `Architecture.linear_shapes` in FP8 (models.float8)."""
    fits = inputs % FLOAT8_MULTIPLE == 0 and outputs % FLOAT8_MULTIPLE == 0
    return fits and name != "mlp.gate" and not is_expert(name)


def is_expert(name: str) -> bool:
    """Whether a name of `Architecture.linear_shapes` stands for routed experts."""
    return name.startswith("mlp.experts.")


def job_of(config: Config, layout: Layout, architecture: Architecture) -> Job:
    """The job of a config on a layout."""
    cut = layout.cut
    attention = config.model.attention
    nothing = not sum(_adapter_parameters(architecture, tuple(config.adapter.targets), 1, False))
    if config.adapter.name != "full" and nothing:
        raise ConfigError(f"adapter.targets={list(config.adapter.targets)}: matches no matrix of this model; there are "
                          f"{', '.join(sorted({name.rsplit('.', 1)[-1] for name in architecture.linear_shapes(0)}))}")
    if faults := shape_faults(config, architecture):
        raise ConfigError("\n".join(faults))
    if attention == "auto":  # flash is taken where flash-attn is installed; both hold the same tensors
        attention = "sdpa"
    return Job(
        architecture=architecture, adapter=config.adapter.name, rank=config.adapter.rank,
        targets=tuple(config.adapter.targets), strategy=layout.strategy, gpus=layout.gpus,
        gpus_per_node=layout.gpus_per_node, shard_gpus=_shard_gpus(config, layout), offload=config.strategy.offload,
        reshard_after_forward=config.strategy.reshard_after_forward, precision=config.precision.name,
        optimizer=config.optimizer.name, seq_tokens=config.data.seq_tokens, micro_rows=cut.micro_rows,
        accumulation_steps=cut.accumulation_steps or _steps_by_tokens(cut, config.data.seq_tokens, layout.shares),
        rows_per_step=cut.global_rows or max(1, cut.global_tokens // config.data.seq_tokens),
        trains_embeddings=bool(config.model.new_tokens) and config.adapter.name != "full",
        dropout=config.adapter.dropout if config.adapter.name != "full" else 0.0,
        checkpointing=config.model.activation_checkpointing,
        checkpoint_every_layers=config.model.checkpoint_every_layers, checkpoints_on_host=config.model.checkpoints_on_host,
        attention=attention, loss="plain" if config.train.loss == "plain" else "chunked",
        loss_chunk_tokens=config.train.loss_chunk_tokens,
        packing=config.data.packing, zero=zero_limits(config.strategy.extra), compile=config.model.compile,
        quantise=config.adapter.quantise, expert_gpus=config.strategy.expert_gpus,
        hpz_gpus=config.strategy.hpz_gpus, fp8_all_gather=config.strategy.fp8_all_gather,
        sequence_gpus=layout.sequence_gpus)


def _steps_by_tokens(cut, seq_tokens, shares):
    """Micro-batches of a window that is bounded in tokens, if its rows are full."""
    rows = max(1, cut.global_tokens // seq_tokens)
    return ceil(ceil(rows / shares) / cut.micro_rows)


def _shard_gpus(config, layout):
    if layout.strategy.startswith("zero"):
        return 1 if layout.strategy == "zero0" else layout.gpus
    return shard_gpus(config, layout.strategy, layout.gpus, layout.gpus_per_node)
