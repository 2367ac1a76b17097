"""Rules across sections, and what `auto` stands for once the machine is known."""

import math
import re
from dataclasses import asdict, dataclass, replace

from tonnage.config.batch import BatchCut, resolve_batch
from tonnage.config.deepspeed_json import deepspeed_json
from tonnage.config.schema import Config, DataSet
from tonnage.errors import ConfigError
from tonnage.facts.architectures import Architecture
from tonnage.facts.capabilities import CAPABILITIES, chosen_of, violations
from tonnage.facts.gpus import GPUS
from tonnage.facts.models import MODELS

# what may change when a run goes on: where and how it runs, not what is learned
CHANGEABLE = ("gpus", "device", "cpu_threads", "dry_run", "batch.micro_rows", "batch.accumulation_steps",
              "strategy.", "model.path", "model.attention", "model.compile", "model.activation_checkpointing",
              "model.checkpoint_every_layers", "model.checkpoints_on_host", "train.loss", "train.loss_chunk_tokens",
              "train.audit", "train.max_nonfinite_steps", "checkpoint.", "tracker.", "cluster.", "gpu.", "plan.",
              "eval.", "run.", "data.cache")


@dataclass(frozen=True)
class Layout:
    """A config on a machine: nothing is `auto` any more."""

    gpus: int
    gpus_per_node: int
    device: str
    strategy: str
    cut: BatchCut
    sequence_gpus: int = 1

    @property
    def shares(self) -> int:
        """Into how many the rows of a window are dealt: GPUs, or groups of them that share each row."""
        return self.gpus // self.sequence_gpus


def resolve_layout(config: Config, gpus: int, device: str, local_gpus: int, under_deepspeed: bool) -> Layout:
    """Check `config` against all rules for `gpus` ranks and work out what `auto` stands for.

    Args:
        local_gpus: ranks a launcher has started on this node, else the GPUs visible here.

    Raises:
        ConfigError: every rule that is broken, a line each.
    """
    strategy = config.strategy.name
    if strategy == "auto":
        names = [name for name in ladder(config, under_deepspeed) if name != "hsdp"]
        strategy = names[-1 if gpus > 1 else 0]
    per_node = config.cluster.gpus_per_node
    per_node = min(gpus, local_gpus) if per_node == "auto" else min(gpus, per_node)
    faults = _broken_rules(config, gpus, per_node, device, strategy)
    if faults:
        raise ConfigError("\n".join(faults))
    together = config.strategy.sequence_gpus
    cut = resolve_batch(config.batch, gpus, config.data.seq_tokens, together)
    if config.strategy.extra:
        deepspeed_json(config, strategy, cut.micro_rows)  # for its refusals
    return Layout(gpus, per_node, device, strategy, cut, together)


def ladder(config: Config, under_deepspeed: bool) -> tuple[str, ...]:
    """What strategy=auto may become, from the least sharding to the most."""
    if config.strategy.expert_gpus > 1:
        return tuple(name for name, row in CAPABILITIES.items() if row.expert_parallel)
    if config.strategy.hpz_gpus > 1:
        return ("zero3",)
    fsdp, zero = ("ddp", "hsdp", "fsdp"), ("zero1", "zero2", "zero3")
    first, second = (zero, fsdp) if under_deepspeed else (fsdp, zero)
    able = [tuple(name for name in names if config.strategy.offload in CAPABILITIES[name].offload)
            for names in (first, second)]
    return able[0] or able[1] or first


def _broken_rules(config, gpus, per_node, device, strategy):
    faults = violations(strategy, chosen_of(config))
    rules = [
        (gpus % per_node != 0, f"cluster.gpus_per_node={per_node}: must divide gpus={gpus}; use "
                               f"cluster.gpus_per_node={_divisor(gpus, per_node)}"),
        (config.strategy.extra and CAPABILITIES[strategy].engine != "deepspeed",
         f"strategy.extra: only for DeepSpeed, and strategy={strategy} is PyTorch's FSDP2; use strategy=zero1|zero2|zero3"),
        (CAPABILITIES[strategy].engine == "fsdp" and config.strategy.offload == "all" and device == "cpu",
         f"strategy.offload=all: with strategy={strategy} it moves states from a GPU to the host, and device=cpu has no "
         f"GPU; use strategy.offload=none, or strategy=zero3"),
        (config.data.streaming and config.train.max_steps is None,
         "train.max_steps: must be set for data.streaming=true, where the length of an epoch is not known"),
        (config.data.path is not None and bool(config.data.sets),
         f"data.path={config.data.path}: not together with data.sets; " + (
            "data=files data.sets=[...] leaves out the path of data=demo" if config.data.name == "demo" else "give one")),
        (not config.data.path and not config.data.sets,
         "data.path: must be given for data=files: a file, a folder or a hub id"),
        (hang_s(config) >= config.cluster.timeout_s,
         f"cluster.hang_s={config.cluster.hang_s}: must be below cluster.timeout_s={config.cluster.timeout_s:g}, or the "
         f"time-out ends the run before the rank at fault is named; use auto"),
        (config.gpu.name == "other" and config.gpu.memory_gib is None,
         "gpu.memory_gib: must be given for gpu=other: what torch sees of its memory, in GiB"),
        (config.adapter.quantise != "none" and config.adapter.name in ("full", "dora"),
         f"adapter.quantise={config.adapter.quantise}: not with adapter={config.adapter.name}, which "
         f"{'trains' if config.adapter.name == 'full' else 'needs the norms of'} the weights themselves; use adapter=lora, "
         f"rslora or qlora"),
        (config.adapter.quantise == "none" and config.adapter.name == "qlora",
         "adapter.quantise=none: adapter=qlora is LoRA on quantised weights; use adapter=lora"),
        ("experts" in config.adapter.targets and config.adapter.name == "dora",
         "adapter.targets=experts: not with adapter=dora; use adapter=lora"),
        (config.adapter.targets == ["experts"],
         "adapter.targets=[experts]: adapts experts beside linear layers; use adapter.targets=[all-linear,experts]"),
        ("experts" in config.adapter.targets and config.adapter.rank % (4 if config.precision.name == "fp32" else 8) > 0,
         f"adapter.rank={config.adapter.rank}: with adapter.targets=experts the product over all experts takes rows of "
         f"whole 16 bytes; use a multiple of {4 if config.precision.name == 'fp32' else 8}"),
        (not config.adapter.targets, "adapter.targets=[]: names nothing to adapt; use adapter.targets=[all-linear]"),
        (len(set(config.model.new_tokens)) < len(config.model.new_tokens) or "" in config.model.new_tokens,
         f"model.new_tokens={config.model.new_tokens}: must be different and not empty"),
        (config.run.name is not None and not re.fullmatch(r"[\w.-]*\w[\w.-]*", config.run.name),
         f"run.name={config.run.name}: must be a plain folder name of letters, digits, dots, dashes and underscores; "
         f"run.root says where it is made"),
        (bool(config.eval.path) and config.eval.holdout_fraction > 0,
         "eval.holdout_fraction: not together with eval.path; give one"),
        (config.eval.holdout_fraction >= 1, "eval.holdout_fraction=1: leaves nothing to train on"),
        (config.data.streaming and config.eval.holdout_fraction > 0,
         "eval.holdout_fraction: not with data.streaming=true; give eval.path"),
        (config.model.activation_checkpointing == "none" and config.model.checkpoint_every_layers > 1,
         f"model.checkpoint_every_layers={config.model.checkpoint_every_layers}: nothing is checkpointed by "
         f"model.activation_checkpointing=none; use full or selective"),
        (config.model.activation_checkpointing == "none" and config.model.checkpoints_on_host,
         "model.checkpoints_on_host=true: nothing is checkpointed by model.activation_checkpointing=none; use full or "
         "selective"),
        (config.model.checkpoints_on_host and device == "cpu",
         "model.checkpoints_on_host=true: moves tensors from a GPU to the host, and device=cpu has no GPU; use "
         "model.checkpoints_on_host=false"),
        (config.model.compile and config.model.checkpoints_on_host,
         "model.checkpoints_on_host=true: not with model.compile=true, which leaves out the hooks that move tensors; use "
         "one of the two"),
        (config.model.attention == "flash" and device == "cpu",
         "model.attention=flash: runs on GPUs only; use model.attention=sdpa"),
        (config.model.attention == "flash" and config.precision.name == "fp32",
         "model.attention=flash: works in bf16 and fp16; use precision=bf16 or model.attention=sdpa"),
        (config.model.attention == "flex" and device == "cpu",
         "model.attention=flex: has no backward on CPUs; use model.attention=sdpa"),
        (config.model.attention == "flex" and config.model.activation_checkpointing == "selective",
         "model.activation_checkpointing=selective: does not see within the compiled kernels of model.attention=flex, and "
         "would compute them again; use model.activation_checkpointing=full, or model.attention=sdpa"),
        (config.precision.name == "fp8" and config.adapter.quantise != "none",
         f"adapter.quantise={config.adapter.quantise}: not with precision=fp8, which rounds the weights of each product "
         f"itself; use adapter.quantise=none (adapter=lora), or precision=bf16"),
        (config.precision.name == "fp8" and not config.precision.fp8_emulate and device == "cpu",
         "precision=fp8: CPUs have no FP8 units; use precision=bf16, or precision.fp8_emulate=true, which is slow"),
        (config.precision.name == "fp8" and not config.precision.fp8_emulate and device == "cuda"
         and config.gpu.name in GPUS and GPUS[config.gpu.name].fp8_tflops is None,
         f"precision=fp8: gpu={config.gpu.name} has no FP8 units; use precision=bf16"),
        (config.precision.name != "fp8" and (config.precision.fp8_emulate or config.precision.fp8_recipe != "tensorwise"),
         f"precision.fp8_recipe, precision.fp8_emulate: only for precision=fp8, not precision={config.precision.name}; "
         f"leave them out"),
        (config.strategy.fp8_all_gather and (config.precision.name, config.precision.fp8_recipe) != ("fp8", "tensorwise"),
         f"strategy.fp8_all_gather=true: gathers what precision=fp8 precision.fp8_recipe=tensorwise multiplies, not "
         f"precision={config.precision.name} precision.fp8_recipe={config.precision.fp8_recipe}; leave it out"),
        (config.strategy.fp8_all_gather and (strategy not in ("fsdp", "hsdp") or config.strategy.offload != "none"),
         f"strategy.fp8_all_gather=true: is for strategy=fsdp|hsdp strategy.offload=none, not strategy={strategy} "
         f"strategy.offload={config.strategy.offload}; leave it out"),
        (config.optimizer.scale_lr != "none" and config.batch.global_tokens is not None,
         f"optimizer.scale_lr={config.optimizer.scale_lr}: needs batch.global_rows; with batch.global_tokens set "
         f"optimizer.learning_rate itself"),
        (bool(config.model.new_tokens) and config.adapter.name != "full" and config.adapter.targets != ["all-linear"]
         and any("head" in target for target in config.adapter.targets),
         "adapter.targets: the head is trained whole where model.new_tokens are added; leave it out"),
    ]
    faults += [text for broken, text in rules if broken]
    faults += _model_rules(config) + _shard_rules(config, gpus, per_node, strategy) + sequence_faults(config, gpus)
    return faults


def _divisor(number, most):
    """The largest divisor of `number` that is at most `most`."""
    return max(size for size in range(1, most + 1) if number % size == 0)


def _model_rules(config):
    facts = MODELS.get(config.model.name)
    if facts is None:
        return []
    longest = facts.architecture.max_positions_tokens
    if config.data.seq_tokens > longest:
        return [f"data.seq_tokens={config.data.seq_tokens}: {config.model.name} has positions for {longest:,} tokens; "
                f"use at most that"]
    return shape_faults(config, facts.architecture)


def shard_gpus(config: Config, strategy: str, gpus: int, per_node: int) -> int:
    """Ranks that share one copy of the weights under an FSDP2 strategy."""
    if strategy != "hsdp":
        return {"ddp": 1, "fsdp": gpus}[strategy]
    return per_node if config.strategy.shard_gpus == "auto" else config.strategy.shard_gpus


def _shard_rules(config, gpus, per_node, strategy):
    experts, row = config.strategy.expert_gpus, CAPABILITIES[strategy]
    if experts > 1 and (not row.expert_parallel or config.strategy.offload != "none"):
        others = "|".join(name for name, other in CAPABILITIES.items() if other.expert_parallel)
        return [f"strategy.expert_gpus={experts}: not with strategy={strategy}, strategy.offload={config.strategy.offload} "
                f"({row.why['expert_parallel']}); use strategy.expert_gpus=1, or strategy={others} strategy.offload=none"]
    if experts > 1 and config.model.compile:
        return [f"strategy.expert_gpus={experts}: not with model.compile=true (how many tokens travel is read back in each "
                f"layer); use model.compile=false"]
    if experts > 1 and gpus % experts:
        return [f"strategy.expert_gpus={experts}: must divide gpus={gpus}; try {_divisor(gpus, min(experts, gpus))}"]
    hpz = config.strategy.hpz_gpus
    if hpz > 1 and (strategy != "zero3" or config.strategy.offload != "none"):
        return [f"strategy.hpz_gpus={hpz}: a second copy on the GPUs is for strategy=zero3 strategy.offload=none, not "
                f"strategy={strategy} strategy.offload={config.strategy.offload}; use strategy.hpz_gpus=1, or "
                f"strategy=hsdp, which keeps a copy in each node under FSDP2"]
    if hpz > 1 and per_node % hpz:
        return [f"strategy.hpz_gpus={hpz}: must divide the {per_node} GPUs of a node; try "
                f"{_divisor(per_node, min(hpz, per_node))}"]
    if strategy != "hsdp":
        return []
    shard = shard_gpus(config, strategy, gpus, per_node)
    if gpus % shard:
        return [f"strategy.shard_gpus={shard}: must divide gpus={gpus}; try {_divisor(gpus, min(shard, gpus))}"]
    return []


def sequence_faults(config: Config, gpus: int) -> list[str]:
    """Why `gpus` cannot share rows as strategy.sequence_gpus says, whatever the model; see `slicing_obstacle`."""
    together, model = config.strategy.sequence_gpus, config.model
    if together == 1:
        return []
    where = f"strategy.sequence_gpus={together}"
    rules = [
        (gpus % together != 0, f"{where}: must divide gpus={gpus}; try {_divisor(gpus, min(together, gpus))}"),
        (model.attention not in ("auto", "sdpa"),
         f"model.attention={model.attention}: not with {where}, where heads travel to sdpa; use model.attention=sdpa"),
        (config.data.packing,
         f"data.packing=true: not with {where} (a rank sees a slice of a row, and the mask of its samples takes all); "
         f"use data.packing=false, or strategy.sequence_gpus=1"),
        (model.compile, f"model.compile=true: not with {where} (not tested); use model.compile=false")]
    return [text for broken, text in rules if broken]


def shape_faults(config: Config, architecture: Architecture) -> list[str]:
    """Why GPUs cannot share rows or experts of a model of this shape as the config says."""
    sliced = slicing_obstacle(config.strategy.sequence_gpus, config.data.seq_tokens, architecture.num_heads,
                              architecture.attention_window_tokens, architecture.moving_rope)
    spread = expert_obstacle(config.strategy.expert_gpus, architecture.num_experts)
    return [text for text in (sliced, spread) if text is not None]


def expert_obstacle(expert_gpus: int, num_experts: int) -> str | None:
    """The error where `num_experts` of a layer cannot be spread over `expert_gpus`, or None."""
    if expert_gpus == 1 or num_experts and num_experts % expert_gpus == 0:
        return None
    where = f"strategy.expert_gpus={expert_gpus}"
    if not num_experts:
        return f"{where}: this model has no routed experts; use strategy.expert_gpus=1"
    return f"{where}: must divide the {num_experts} experts of a layer; try {_divisor(num_experts, expert_gpus)}"


def slicing_obstacle(sequence_gpus: int, seq_tokens: int, num_heads: int, attention_window_tokens: int | None,
                     moving_rope: str | None) -> str | None:
    """The error where the tokens of a row cannot be shared by `sequence_gpus`, or None.

    Args:
        attention_window_tokens, moving_rope: as `facts.architectures.row_facts` has them.
    """
    where = f"strategy.sequence_gpus={sequence_gpus}"
    if sequence_gpus == 1:
        return None
    if num_heads % sequence_gpus:
        return (f"{where}: must divide the {num_heads} attention heads of the model; try "
                f"{math.gcd(num_heads, sequence_gpus)}")
    if attention_window_tokens is not None and attention_window_tokens < seq_tokens:
        return (f"{where}: the model attends within {attention_window_tokens} tokens, and data.seq_tokens={seq_tokens}: "
                f"the mask of a window takes whole rows; use strategy.sequence_gpus=1, or "
                f"data.seq_tokens={attention_window_tokens}")
    if moving_rope is not None:
        return (f"{where}: its rotary embeddings ({moving_rope}) depend on the length of a row, of which a rank sees a "
                f"slice; use strategy.sequence_gpus=1")
    return None


def hang_s(config: Config) -> float:
    """Seconds one phase of a rank may take."""
    return config.cluster.timeout_s * 2 / 3 if config.cluster.hang_s == "auto" else config.cluster.hang_s


def freeze(config: Config, layout: Layout) -> Config:
    """What config.yaml keeps: the global batch is fixed, how it is cut is left to each attempt."""
    batch = replace(config.batch, accumulation_steps="auto", global_rows=layout.cut.global_rows or "auto")
    if config.batch.accumulation_steps != "auto":
        batch = replace(batch, micro_rows=layout.cut.micro_rows)  # which gives the steps that were asked for
    return replace(config, batch=batch, dry_run=False, run=replace(config.run, fork=False))


def check_resume(old: dict, new: dict) -> None:
    """Compare a run's config with the one it is to go on with (nested dicts).

    Raises:
        ConfigError: names every key whose change would make it another run.
    """
    before, after = dict(_leaves(old)), dict(_leaves(new))
    changed = [key for key in after if before.get(key) != after[key]
               and not any(key == name or (name.endswith(".") and key.startswith(name)) for name in CHANGEABLE)]
    if changed:
        lines = [f"{key}={after[key]}: was {before.get(key)}" for key in changed]
        raise ConfigError("\n".join(lines) + "\nthese decide what is learned and cannot change when a run goes on; "
                          "run.fork=true starts a new run from its weights")


def check_fork(parent: dict, new: dict) -> None:
    """Compare a fork's config with that of the run whose weights it begins with (nested dicts).

    Raises:
        ConfigError: a change would hold out other samples of the same data, some of which the parent has trained on.
    """
    before, after = _split(parent), _split(new)
    shared = {key: value for key, value in after.items() if key in before}
    if not new["eval"]["holdout_fraction"] or not any(key.startswith("data.sets") for key in shared):
        return
    changed = [f"{key}={value}: was {before[key]}" for key, value in shared.items() if value != before[key]]
    if changed:
        raise ConfigError("\n".join(changed) + "\nthese decide which samples are held out, and the run that is forked has "
                          "trained on the others; leave them as they were, or set eval.holdout_fraction=0 and name "
                          "held-out data by eval.path")


def _split(config):
    """What decides which samples are held out: the seed, and a sample's number among those of its set that are kept."""
    data = config["data"]
    sets, places = data["sets"] or [{"path": data["path"], "format": data["format"]}], {}
    for number, one in enumerate(sets):
        place = asdict(replace(DataSet(**one), weight=1.0)) | {"set": number}
        places.setdefault(f"data.sets ({place.pop('path')})", []).append(place)
    kept = ("seq_tokens", "truncate", "train_on", "system", "chat_template", "on_bad")
    return {"seed": config["seed"], "eval.holdout_fraction": config["eval"]["holdout_fraction"],
            **{f"data.{key}": data[key] for key in kept}, **places}


def _leaves(mapping, prefix=""):
    for name, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value
