"""What combines with what: one table, used by validation, the search of the planner and the docs.

A row is a strategy, a column a choice that it limits; what a row does not list is refused with the nearest legal
choices. No torch here.
"""

from dataclasses import dataclass

ALL_ADAPTERS = ("full", "lora", "dora", "rslora", "qlora")
ALL_OPTIMIZERS = ("adamw", "adamw8bit", "sgd")


EVERY_PRECISION = ("bf16", "fp32", "fp16", "fp8")

# why a strategy leaves something out, by axis
DEEPSPEED_WHY = {
    "compile": "DeepSpeed's hooks break compiled graphs",
    "offload": "stage 0 moves nothing to the host, 1 and 2 optimizer states, 3 weights too; to nvme, DeepSpeed 0.19.8 "
               "fails on frozen weights: already assigned swap buffer",
    "expert_parallel": "DeepSpeed 0.19.8's AutoEP fails with transformers 5.24: _CanRecordRegistry.get() takes 2 "
                       "positional arguments",
    "precision": "DeepSpeed sums bf16 gradients in bf16 at stage 0; stages 1 to 3 sum them in fp32",
}
FSDP_WHY = {"offload": "FSDP2 moves weights, gradients and optimizer states to the host together",
            "expert_parallel": "experts are spread over all GPUs, and replicas and the host are not built in"}


@dataclass(frozen=True)
class Capability:
    """What one strategy runs. `engine` is the module of engines/ behind it; `why` says what keeps the rest out."""

    engine: str
    why: dict[str, str]
    precision: tuple[str, ...] = EVERY_PRECISION
    offload: tuple[str, ...] = ("none",)
    adapter: tuple[str, ...] = ALL_ADAPTERS
    optimizer: tuple[str, ...] = ALL_OPTIMIZERS
    compile: tuple[bool, ...] = (False, True)
    expert_parallel: bool = False


def _deepspeed(**limits):
    return Capability("deepspeed", DEEPSPEED_WHY, compile=(False,), **limits)


CAPABILITIES: dict[str, Capability] = {
    "ddp": Capability("fsdp", {"offload": "ddp keeps everything on the GPU",
                               "expert_parallel": "ddp keeps all experts on every GPU"}),
    "zero0": _deepspeed(precision=("fp32",)),
    "zero1": _deepspeed(offload=("none", "optimizer")),
    "zero2": _deepspeed(offload=("none", "optimizer")),
    "zero3": _deepspeed(offload=("none", "optimizer", "all")),
    "fsdp": Capability("fsdp", FSDP_WHY, offload=("none", "all"), expert_parallel=True),
    "hsdp": Capability("fsdp", FSDP_WHY, offload=("none", "all")),
}

AXES = {"precision": "precision", "offload": "strategy.offload", "adapter": "adapter", "optimizer": "optimizer",
        "compile": "model.compile"}


def chosen_of(config) -> dict[str, object]:
    """What a config (config.schema.Config) chooses on each axis."""
    return {"precision": config.precision.name, "offload": config.strategy.offload, "adapter": config.adapter.name,
            "optimizer": config.optimizer.name, "compile": config.model.compile}


def violations(strategy: str, chosen: dict[str, object]) -> list[str]:
    """One message for each choice that `strategy` does not run, with the nearest legal ones.

    Args:
        chosen: value per axis of `AXES`.
    """
    row, messages = CAPABILITIES[strategy], []
    for axis, value in chosen.items():
        legal = getattr(row, axis)
        if value in legal:
            continue
        others = [name for name, other in CAPABILITIES.items() if not _refused(other, chosen)]
        here = " or ".join(f"{AXES[axis]}={str(choice).lower()}" for choice in legal)
        there = f", or strategy={'|'.join(others)}" if others else ""
        messages.append(f"{AXES[axis]}={str(value).lower()}: not with strategy={strategy} ({row.why[axis]}); use {here}"
                        f"{there}")
    return messages


def _refused(row, chosen):
    return any(value not in getattr(row, axis) for axis, value in chosen.items())
