"""What a run would be: printed from the config alone, without GPUs or network; paths on this disk are looked at."""

import json
from collections.abc import Sequence
from pathlib import Path

from tonnage.config.rules import Layout, shard_gpus
from tonnage.config.schema import Config
from tonnage.data.formats import Counts
from tonnage.data.formats import Source as Records
from tonnage.engines.deepspeed_json import deepspeed_json
from tonnage.errors import DataError
from tonnage.facts.capabilities import CAPABILITIES
from tonnage.facts.models import MODELS
from tonnage.report.console import table
from tonnage.train.session import check_paths, data_sets


def print_dry_run(config: Config, layout: Layout, overrides: Sequence[str]) -> None:
    """World, cut of a window, steps, engine settings, and the command that runs it.

    Raises:
        ModelError, DataError, ConfigError: a path that the run would refuse.
    """
    check_paths(config)
    cut = layout.cut
    nodes = layout.gpus // layout.gpus_per_node
    share = None if cut.global_rows is None else -(-cut.global_rows // layout.gpus)
    lines = [
        ("model", _model(config)),
        ("world", f"{layout.gpus} ranks on {nodes} node{'s' if nodes > 1 else ''} of {layout.gpus_per_node}, "
                  f"{layout.device}, strategy {layout.strategy}, {config.precision.name}"),
        ("window", f"{cut.global_rows} rows: {layout.gpus} shares of up to {share}, {cut.accumulation_steps} "
                   f"micro-batches of up to {cut.micro_rows} rows" if cut.global_rows else
                   f"whole rows within {cut.global_tokens:,} tokens, in micro-batches of up to {cut.micro_rows} rows"),
        ("tokens per step", f"up to {cut.global_rows * config.data.seq_tokens:,}" if cut.global_rows
         else f"up to {cut.global_tokens:,}"),
        ("steps per epoch", _steps(config, cut)),
        ("command", _command(layout, overrides)),
    ]
    table("dry run: nothing was started", lines)
    if CAPABILITIES[layout.strategy].engine == "deepspeed":
        print("DeepSpeed JSON:")
        print(json.dumps(deepspeed_json(config, int(layout.strategy.removeprefix("zero")), cut.micro_rows), indent=2))
    else:
        print("FSDP plan:")
        print("\n".join(f"  {line}" for line in _fsdp_plan(config, layout)))


def _model(config):
    facts = MODELS.get(config.model.name)
    size = f", {facts.architecture.num_parameters:,} parameters" if facts else ""
    return f"{config.model.name} from {config.model.path}{size}, {config.adapter.name}"


def _steps(config, cut):
    """Counted from the records; exact numbers come with tokenising, which drops what has no label."""
    if config.data.streaming:
        return "not known for a stream"
    if config.data.packing or cut.global_rows is None:
        return "known once the data are tokenised"
    if not all(Path(one.path).exists() for one in data_sets(config)):
        return "known once the data are fetched"
    try:
        rows = sum(one.weight * sum(1 for _ in Records(one).records(config.data.on_bad, Counts()))
                   for one in data_sets(config))
    except DataError as error:
        return f"not known: {error}"
    return f"{-(-int(rows) // cut.global_rows):,} ({int(rows):,} samples, before any is dropped)"


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


def _command(layout, overrides):
    words = " ".join(word for word in overrides if not word.startswith("dry_run"))
    script = Path("launch") / "train.py"
    nodes = layout.gpus // layout.gpus_per_node
    if layout.device == "cpu" or nodes == 1:
        return f"python {script} {words}".strip()
    return (f"torchrun --nnodes {nodes} --nproc-per-node {layout.gpus_per_node} --rdzv-backend c10d --rdzv-endpoint "
            f"$HEAD:29500 {script} {words}").strip()
