"""What a run would be: printed from the config alone, without GPUs or network; paths on this disk are looked at."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from tonnage.config.deepspeed_json import deepspeed_json
from tonnage.config.rules import Layout, shard_gpus
from tonnage.config.schema import Config
from tonnage.data.formats import Counts
from tonnage.data.formats import Source as Records
from tonnage.errors import DataError
from tonnage.facts.capabilities import CAPABILITIES
from tonnage.facts.models import MODELS
from tonnage.report.console import count, table
from tonnage.runtime.ranks import current_place
from tonnage.train.schedule import peak_learning_rate
from tonnage.train.session import check_paths, data_sets


def print_dry_run(config: Config, layout: Layout, overrides: Sequence[str]) -> None:
    """World, cut of a window, steps, engine settings, and the command that runs it.

    Raises:
        ModelError, DataError, ConfigError: a path that the run would refuse.
    """
    check_paths(config)
    cut = layout.cut
    nodes = layout.gpus // layout.gpus_per_node
    share = None if cut.global_rows is None else -(-cut.global_rows // layout.shares)
    together = f", each row on {layout.sequence_gpus} ranks" if layout.sequence_gpus > 1 else ""
    lines = [
        ("model", _model(config)),
        ("world", f"{layout.gpus} ranks on {nodes} node{'s' if nodes > 1 else ''} of {layout.gpus_per_node}, "
                  f"{layout.device}, strategy {layout.strategy}, {config.precision.name}"),
        ("window", f"{cut.global_rows} rows: {layout.shares} shares of up to {share}{together}, {cut.accumulation_steps} "
                   f"micro-batches of up to {cut.micro_rows} rows" if cut.global_rows else
                   f"whole rows within {cut.global_tokens:,} tokens, in micro-batches of up to {cut.micro_rows} rows"
                   f"{together}"),
        ("tokens per step", f"up to {cut.global_rows * config.data.seq_tokens:,}" if cut.global_rows
         else f"up to {cut.global_tokens:,}"),
        ("steps", _steps(config, cut)),
        ("optimizer", f"{config.optimizer.name}, learning rate {config.schedule.name}, peak {_peak(config, cut):g}"),
        ("command", _command(layout, overrides, current_place().launcher)),
    ]
    table("dry run: nothing was started", lines)
    if CAPABILITIES[layout.strategy].engine == "deepspeed":
        print("The loop accumulates and scales; DeepSpeed sees a step's micro-batches one by one, so it is told "
              "gradient_accumulation_steps 1.")
        print("DeepSpeed JSON:")
        print(json.dumps(deepspeed_json(config, layout.strategy, cut.micro_rows), indent=2))
    else:
        print("FSDP plan:")
        print("\n".join(f"  {line}" for line in _fsdp_plan(config, layout)))


def _model(config):
    facts = MODELS.get(config.model.name)
    size = f", {facts.architecture.num_parameters:,} parameters" if facts else ""
    origin = "as shipped with an installed package" if config.model.path == "auto" else f"from {config.model.path}"
    return f"{config.model.name} {origin}{size}, {config.adapter.name}"


def _peak(config, cut):
    return peak_learning_rate(config.optimizer, config.adapter.name, cut.global_rows)


def _steps(config, cut):
    """Counted from the records; exact numbers come with tokenising, which drops what has no label."""
    train = config.train
    most = "" if train.max_steps is None else f"at most {train.max_steps:,} (train.max_steps); "
    if config.data.streaming:
        return f"{train.max_steps:,} (train.max_steps) of a stream"
    if config.data.packing or cut.global_rows is None:
        return f"{most}an epoch's are known once the data are tokenised"
    if not all(Path(one.path).exists() for one in data_sets(config)):
        return f"{most}an epoch's are known once the data are fetched"
    try:
        samples = sum(one.weight * sum(1 for _ in Records(one).records(config.data.on_bad, Counts(), skipped=len))
                      for one in data_sets(config))
    except DataError as error:
        return f"not known: {error}"
    held_out = 0.0 if config.eval.path else config.eval.holdout_fraction
    rows = int(samples * (1 - held_out))
    epoch = -(-rows // cut.global_rows)
    whole = train.epochs * epoch
    steps = min(whole, train.max_steps or whole)
    limit = f"train.max_steps={train.max_steps} of " if steps < whole else ""
    return (f"{steps:,}: {limit}{count(train.epochs, 'epoch')} of {epoch:,} ({count(rows, 'sample')} each, before any is "
            f"dropped)")


def _fsdp_plan(config, layout):
    facts = MODELS.get(config.model.name)
    layers = f"{facts.architecture.num_layers} decoder layers" if facts else "each decoder layer"
    shard = shard_gpus(config, layout.strategy, layout.gpus, layout.gpus_per_node)
    again = "gathered again in backward" if config.strategy.reshard_after_forward else "kept until backward"
    managed = "trained weights only, frozen ones are whole on each rank" if shard == 1 else "all weights"
    return [f"mesh: {layout.gpus // shard} replicas x {shard} shards",
            f"units: {layers}, the embedding where it is not tied, the rest; freed after forward, {again}"
            if shard > 1 else f"units: {layers}, the rest; nothing to gather",
            f"manages: {managed}",
            f"precision: {config.precision.name} compute, fp32 trained weights, sums and optimizer states",
            f"offload: {config.strategy.offload}"]


def _command(layout, overrides, launcher):
    """What runs it: the launcher that this was started with, since auto means another strategy under another."""
    words = [word for word in overrides if not word.startswith("dry_run")]
    nodes, per_node = layout.gpus // layout.gpus_per_node, layout.gpus_per_node
    if launcher == "deepspeed":
        sized = any(word.startswith("gpus=") for word in words)
        flags = [f"--hostfile=$HOSTS --num_nodes={nodes}"] * (nodes > 1) + [f"--num_gpus={per_node}"] * (
            nodes > 1 or not (sized or layout.gpus == 1))
        start = ["deepspeed", *flags]
    elif launcher == "torchrun" or (layout.device != "cpu" and nodes > 1):
        start = ["torchrun"] + ([f"--nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint "
                                 "$HEAD:29500"] if nodes > 1 else [f"--nproc-per-node {per_node}"])
    else:
        start = ["python"]
    return " ".join([*start, str(Path("launch") / "train.py"), shlex.join(words)]).strip()
