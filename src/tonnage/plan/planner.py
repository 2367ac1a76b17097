"""From a config to a plan: memory, verdict, host, disk, speed; and what `auto` stands for on a GPU that is known.

No torch here: a login node answers in less than a second.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tonnage.config.batch import micro_choices
from tonnage.config.rules import Layout, ladder, resolve_layout
from tonnage.config.schema import Config
from tonnage.errors import ConfigError, NotFetched, UnknownFamily
from tonnage.facts.architectures import Architecture
from tonnage.facts.capabilities import CAPABILITIES, chosen_of, violations
from tonnage.facts.gpus import Gpu
from tonnage.facts.models import MODELS
from tonnage.plan.host import Host, host
from tonnage.plan.job import Job, job_of
from tonnage.plan.memory import Memory, memory
from tonnage.plan.speed import NETWORK_GB_S, Speed, step_time
from tonnage.plan.verdict import DOES_NOT_FIT, FITS, verdict

GPUS_PER_NODE = 8  # where neither cluster.gpus_per_node nor a machine says so
# beyond this many tokens a micro-batch gains little speed: the matrix products fill the GPU
MOST_MICRO_TOKENS = 16384


@dataclass(frozen=True)
class Plan:
    """What a run will need. `share`: predicted peak of one GPU relative to the memory torch sees on it."""

    job: Job
    layout: Layout
    gpu: Gpu
    memory: Memory
    host: Host
    host_given_gib: float | None  # what cluster.memory_gib grants a node; None: nothing stated, or a CPU's
    speed: Speed | None

    @property
    def share(self) -> float:
        return self.memory.peak_bytes / 2**30 / self.gpu.memory_gib

    @property
    def lacks_host_memory(self) -> bool:
        return self.host_given_gib is not None and self.host.memory_gib > self.host_given_gib

    @property
    def verdict(self) -> str:
        """`fits`, `tight` or `does not fit`."""
        if self.lacks_host_memory:
            return DOES_NOT_FIT
        return verdict(self.memory.peak_bytes, self.gpu.memory_gib, self.layout.gpus)


def architecture_of(config: Config, folder: str | None = None) -> Architecture:
    """The shape of the config's model: by its name, else from the config.json in `folder` or at model.path.

    Raises:
        NotFetched: neither is known here.
        UnknownFamily: of a family that is not counted by hand.
        ConfigError: a config.json that cannot be used.
    """
    if config.model.name in MODELS:
        return MODELS[config.model.name].architecture
    folder = folder or config.model.path
    file = Path(folder or "") / "config.json"
    if not folder or not file.is_file():
        raise NotFetched(f"model.path={config.model.path}: a plan needs a model of docs/models.md, or a folder with a "
                          f"config.json")
    try:
        return Architecture.from_hf_config(json.loads(file.read_text()))
    except UnknownFamily:
        raise
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError, ConfigError) as error:
        raise ConfigError(f"model.path={folder}: its config.json cannot be used: {error}") from error


def make_plan(config: Config, layout: Layout, architecture: Architecture, gpu: Gpu) -> Plan:
    """The plan of a config on a layout of `gpu`s."""
    job = job_of(config, layout, architecture)
    network = config.cluster.network_gb_s
    every = config.checkpoint.keep_every_steps
    for_good = config.train.max_steps // every if every and config.train.max_steps else 0
    judged = bool(config.eval.path) or config.eval.holdout_fraction > 0
    kept = config.checkpoint.keep + (config.checkpoint.keep_best and judged) + for_good + 1
    cuda, given = layout.device == "cuda", config.cluster.memory_gib
    speed = None if config.precision.fp8_emulate else step_time(job, gpu, NETWORK_GB_S if network == "auto" else network)
    return Plan(job, layout, gpu, memory(job), host(job, kept, cuda), given if cuda and isinstance(given, float) else None,
                speed)


def plan_layout(config: Config, architecture: Architecture, gpu: Gpu, under_deepspeed: bool = False) -> Layout:
    """The layout of a run on GPUs that are not here: config.gpus of them (auto: one), 8 a node unless said otherwise.

    Raises:
        ConfigError: every rule that is broken.
    """
    gpus = 1 if config.gpus == "auto" else config.gpus
    per_node = min(gpus, GPUS_PER_NODE)
    return settled_layout(config, gpus, "cuda", per_node, under_deepspeed, architecture, gpu)


def settled_layout(config: Config, gpus: int, device: str, local_gpus: int, under_deepspeed: bool,
                   architecture: Architecture, gpu: Gpu) -> Layout:
    """`rules.resolve_layout` with strategy and micro-batch worked out for `gpu` where they are `auto`."""
    per_node = config.cluster.gpus_per_node
    per_node = min(gpus, local_gpus if per_node == "auto" else per_node)
    settled = settle_auto(config, gpus, per_node, under_deepspeed, architecture, gpu)
    return resolve_layout(settled, gpus, device, local_gpus, under_deepspeed)


def settle_auto(config: Config, gpus: int, per_node: int, under_deepspeed: bool, architecture: Architecture,
                gpu: Gpu) -> Config:
    """`config` with strategy and micro-batch worked out where they are `auto`.

    The strategy is the least sharding that fits with one row; the micro-batch the largest that fits then, within
    MOST_MICRO_TOKENS. Where nothing fits, the most sharding and one row.
    """
    def fits(candidate):
        layout = resolve_layout(candidate, gpus, "cuda", per_node, under_deepspeed)
        return verdict(memory(job_of(candidate, layout, architecture)).peak_bytes, gpu.memory_gib, gpus) == FITS

    for strategy in _strategies(config, gpus, per_node, under_deepspeed):
        *larger, smallest = _micro_batches(replace(config, strategy=replace(config.strategy, name=strategy)), gpus)
        if fits(smallest):
            return next((candidate for candidate in larger if fits(candidate)), smallest)
    return smallest


def _strategies(config: Config, gpus: int, per_node: int, under_deepspeed: bool) -> list[str]:
    """What `auto` may become, from the least sharding to the most."""
    if config.strategy.name != "auto":
        return [config.strategy.name]
    names = ladder(config, under_deepspeed)
    if gpus <= per_node or config.strategy.offload != "none":
        # within one node it is fsdp; on several each has a copy of what is offloaded in its memory, and moves more of it
        names = tuple(name for name in names if name != "hsdp")
    if gpus == 1:
        names = names[:2] if CAPABILITIES[names[0]].engine == "deepspeed" else names[:1]
    legal = [name for name in names if not violations(name, chosen_of(config))]
    return legal or [names[-1]]


def _micro_batches(config: Config, gpus: int) -> Iterator[Config]:
    """From the largest micro-batch to one row; the one that is given, if it is."""
    batch = config.batch
    if batch.micro_rows != "auto" or batch.accumulation_steps != "auto":
        yield config
        return
    for rows in micro_choices(batch, max(1, gpus // config.strategy.sequence_gpus), most_micro_rows(config)):
        yield replace(config, batch=replace(batch, micro_rows=rows))


def most_micro_rows(config: Config) -> int:
    """The largest micro-batch that `auto` takes: of MOST_MICRO_TOKENS a GPU."""
    return max(1, MOST_MICRO_TOKENS * config.strategy.sequence_gpus // config.data.seq_tokens)
