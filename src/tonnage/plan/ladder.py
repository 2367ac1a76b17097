"""recipes/README.md: every recipe for GPUs as the planner sees it, and rungs that do not fit: `launch/plan.py --ladder`."""

from functools import cache

from tonnage.config.compose import compose_config, recipes
from tonnage.config.schema import Config
from tonnage.facts.gpus import gpu_of
from tonnage.facts.sizes import SAVE_GIB_S
from tonnage.plan.planner import Plan, architecture_of, make_plan, plan_layout
from tonnage.plan.search import method, remedies

GIB = 2**30
# what one might try instead of a recipe, and in vain
IN_VAIN = (
    ("model=llama7b", "adapter=full", "gpu=rtx4090", "gpus=1"),
    ("model=llama8b", "adapter=full", "gpu=h100", "gpus=1", "optimizer=adamw8bit"),
    ("model=deepseek16b", "gpu=rtx4090", "gpus=1"),
    ("model=qwen32b", "adapter=qlora", "gpu=rtx4090", "gpus=1"),
    ("model=llama70b", "adapter=qlora", "gpu=rtx4090", "gpus=2"),
    ("model=llama70b", "adapter=full", "gpu=h100", "gpus=16"),
    ("model=deepseek236b", "gpu=h100", "gpus=4"),
    ("model=llama405b", "gpu=h100", "gpus=8"),
    ("model=deepseek671b", "adapter.quantise=fp8", "gpu=h100", "gpus=8"),
    ("model=deepseek671b", "gpu=h200", "gpus=8"),
    ("model=deepseek671b", "gpu=h100", "gpus=32"),
    ("model=deepseek671b", "gpu=h100", "gpus=64"),
    ("model=deepseek671b", "adapter=full", "gpu=h200", "gpus=64"),
    ("model=deepseek671b", "adapter=full", "gpu=h200", "gpus=128"),
)
HEAD = """\
# The ladder: complete runs from 7B to 671B

Written by `python launch/plan.py --ladder > recipes/README.md`; edit nothing here. Every line is a file of this folder:

```bash
python launch/plan.py recipe=llama7b_qlora_1xrtx4090       # what it needs, in full
python launch/train.py recipe=llama7b_qlora_1xrtx4090 data=files data.path=my.jsonl
```

All figures are predicted, **none has been measured on a GPU yet**: rows of 2,048 tokens, 128 rows a step, activation
checkpointing everywhere; strategy and micro-batch are what `auto` comes to unless the recipe states them. *Micro x steps*
are rows of a GPU's micro-batch and how many of them make a step. *Peak*: the fullest phase of a step on one GPU, with the
terms that are largest in it; memory beside tensors is part of the verdict (`src/tonnage/plan/verdict.py`). *Host*: memory
of a node. *Checkpoint*: what is trained, with AdamW's states, and how long it takes at {speed:g} GiB/s to a shared disk;
*disk*: with those that are kept.
"""
IN_VAIN_HEAD = """
## What does not fit

The same without what makes a recipe fit; *instead* are words that the planner adds to the command line, nearest first.
A mixture's layer is gathered whole: one of DeepSeek-V3's takes {:.1f} GiB in bf16, {:.1f} in FP8, {:.1f} in
NF4, and FSDP2 holds the layer before it and a copy besides in forward (*gathered*); ZeRO-3 holds it once.

"""


@cache
def rungs() -> list[tuple[str, Config, Plan]]:
    """(name, config, plan) of every recipe that names a GPU, by size of the model, then by memory of all GPUs."""
    configs = {name: compose_config([f"recipe={name}"]) for name in recipes()}
    found = [(name, config, plan_of(config)) for name, config in configs.items() if config.gpu.name != "auto"]
    return sorted(found, key=lambda one: (one[2].job.architecture.num_parameters,
                                          one[2].layout.gpus * one[2].gpu.memory_gib))


def plan_of(config: Config) -> Plan:
    """The plan of a config that names a GPU."""
    gpu, architecture = gpu_of(config.gpu.name, config.gpu.memory_gib, config.gpu.price_usd_h), architecture_of(config)
    return make_plan(config, plan_layout(config, architecture, gpu), architecture, gpu)


def ladder_text() -> str:
    """The page."""
    largest = [max(plan_of(compose_config(["model=deepseek671b", f"adapter.quantise={base}", "gpu=h200"])).job.kept_layers)
               / GIB for base in ("none", "fp8", "nf4")]
    return "".join([
        HEAD.format(speed=SAVE_GIB_S), "\n",
        _table(("recipe", "GPUs", "trained", "strategy, offload", "micro x steps", "peak, GiB", "verdict", "tokens/s",
                "host, GiB", "checkpoint", "disk, GiB"), (_rung(*one) for one in rungs())),
        IN_VAIN_HEAD.format(*largest),
        _table(("tried", "peak, GiB", "instead"), map(_tried, IN_VAIN))])


def _rung(name, config, plan):
    layout, host = plan.layout, plan.host
    offload = "" if plan.job.offload == "none" else f", {plan.job.offload}"
    return (f"[{name}]({name}.yaml)", f"{layout.gpus} x {plan.gpu.title}", _trained(config), f"{layout.strategy}{offload}",
            f"{layout.cut.micro_rows} x {layout.cut.accumulation_steps}", _peak(plan), f"{plan.verdict}, {plan.share:.0%}",
            f"{plan.speed.tokens_per_s:,.0f}", f"{host.memory_gib:,.0f}",
            f"{host.checkpoint_gib:,.1f} GiB, {_duration(host.checkpoint_gib / SAVE_GIB_S)}", f"{host.disk_gib:,.1f}")


def _trained(config):
    return method(config.adapter) + (f", {config.optimizer.name}" if config.optimizer.name != "adamw" else "")


def _peak(plan):
    terms = plan.memory.phases[plan.memory.peak_phase]
    largest = sorted(terms.items(), key=lambda term: -term[1])[:2]
    return (f"{plan.memory.peak_bytes / GIB:.1f} in {plan.memory.peak_phase}: "
            + ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest))


def _duration(seconds):
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _tried(overrides):
    config = compose_config(overrides)
    plan = plan_of(config)
    return (f"`{' '.join(overrides)}`", f"{_peak(plan)}; {plan.share:.0%} of {plan.gpu.memory_gib:.1f}",
            ", or ".join(f"`{one.override}`" for one in remedies(config, plan)[:3]))


def _table(head, rows):
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *rows))
