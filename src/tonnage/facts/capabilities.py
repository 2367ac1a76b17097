"""What combines with what: one table, used by validation, the search of the planner and the docs.

A row is a strategy, a column a choice that it limits; what a row does not list is refused with the nearest legal
choices. No torch here.
"""

from dataclasses import dataclass

ALL_ADAPTERS = ("full", "lora", "dora", "rslora")
ALL_OPTIMIZERS = ("adamw", "adamw8bit", "sgd")


@dataclass(frozen=True)
class Capability:
    """What one strategy runs. `engine` is the module of engines/ behind it; `why` says what keeps the rest out."""

    engine: str
    precision: tuple[str, ...]
    offload: tuple[str, ...]
    adapter: tuple[str, ...] = ALL_ADAPTERS
    optimizer: tuple[str, ...] = ALL_OPTIMIZERS
    compile: tuple[bool, ...] = (False, True)
    why: str = ""


CAPABILITIES: dict[str, Capability] = {
    "ddp": Capability("fsdp", ("bf16", "fp32", "fp16"), ("none",), why="ddp keeps everything on the GPU"),
    "zero0": Capability("deepspeed", ("fp32",), ("none",), optimizer=("adamw", "sgd"), compile=(False,),
                        why="DeepSpeed sums bf16 gradients in bf16 at stage 0; stages 1 to 3 sum them in fp32"),
    "zero1": Capability("deepspeed", ("bf16", "fp32", "fp16"), ("none", "optimizer"), optimizer=("adamw", "sgd"),
                        compile=(False,),
                        why="optimizer states can go to the host, weights not; 8-bit states cannot be read per tensor"),
    "zero2": Capability("deepspeed", ("bf16", "fp32", "fp16"), ("none", "optimizer"), optimizer=("adamw", "sgd"),
                        compile=(False,),
                        why="optimizer states can go to the host, weights not; 8-bit states cannot be read per tensor"),
    "zero3": Capability("deepspeed", ("bf16", "fp32", "fp16"), ("none", "optimizer", "all", "nvme"),
                        optimizer=("adamw", "sgd"), compile=(False,),
                        why="its gather hooks break compiled graphs, and 8-bit states cannot be read per tensor"),
    "fsdp": Capability("fsdp", ("bf16", "fp32", "fp16"), ("none", "all"),
                       why="FSDP2 moves weights, gradients and optimizer states to the host together"),
    "hsdp": Capability("fsdp", ("bf16", "fp32", "fp16"), ("none", "all"),
                       why="FSDP2 moves weights, gradients and optimizer states to the host together"),
}

AXES = {"precision": "precision", "offload": "strategy.offload", "adapter": "adapter", "optimizer": "optimizer",
        "compile": "model.compile"}


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
        messages.append(f"{AXES[axis]}={str(value).lower()}: not with strategy={strategy} ({row.why}); use {here}"
                        f"{there}")
    return messages


def _refused(row, chosen):
    return any(value not in getattr(row, axis) for axis, value in chosen.items())
