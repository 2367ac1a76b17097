"""What others measured, as questions to the planner: each published row is a `Published`, or a reason why not.

`python -m tonnage.plan.published` counts both. The rows and their grades: facts/published.csv.
"""

import csv
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from tonnage.errors import ConfigError
from tonnage.facts.shapes import is_stand_in, shape_of
from tonnage.plan.job import Job

_TARGETS = {
    "q,k,v,o": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "q,v": ("q_proj", "v_proj"),
    "k,q,v,up,down,gate (script default)": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
    "q,v,o + mlp": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "DEFAULT (c_attn / attention qkv)": ("q_proj", "k_proj", "v_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "c_attn,c_proj,w1,w2": ("all-linear",),
    "all-linear": ("all-linear",),
    "all": ("all-linear",),
    "*_proj (all linear)": ("all-linear",),
}
_GPUS = {
    "A100-80GB": "a100_80gb", "A100-80GB SXM": "a100_80gb", "A100": "a100_80gb", "A100-40GB": "a100_40gb",
    "A100-40GB SXM": "a100_40gb", "H100-80GB": "h100", "H100-80GB SXM": "h100", "H100 SXM": "h100", "H100": "h100",
    "H200": "h200", "B200": "b200", "B200 (183GB)": "b200", "GB200": "gb200", "MI300X": "mi300x", "L40S": "l40s",
    "RTX 3090": "rtx3090", "RTX 4090": "rtx4090", "H20-96GB": "h20", "A10G-24GB": "a10", "RTX A6000-48GB": "a6000",
}
_GPUS_PER_NODE = 8  # of every published cluster here


@dataclass(frozen=True)
class Row:
    """A line of published.csv: text as published, numbers parsed, None where there is none.

    `peak_gib` is of the fullest GPU; `peak_class` says what was measured: allocated and active are torch's tensors,
    reserved is its cache, device is nvidia-smi.
    """

    id: str
    source: str
    model: str
    method: str
    lora_rank: int | None
    lora_targets: str
    strategy: str
    world: int | None
    gpu: str
    seq_len: str
    micro_batch: str
    grad_accum: int | None
    precision: str
    optimizer: str
    act_ckpt: str
    attn: str
    fused_loss: str
    peak_gib: float | None
    peak_class: str
    tok_per_s_per_gpu: float | None
    notes: str

    @property
    def grade(self) -> str:
        """`A` of `[A-speed] ...`."""
        found = re.match(r"\[(.*?)\]", self.notes)
        return found[1] if found else ""

    @property
    def did_not_fit(self) -> bool:
        """Whether the run ended out of memory: such rows have a job too, and no peak."""
        return self.grade.endswith("OOM")

    @property
    def has_tensor_peak(self) -> bool:
        """Whether the row holds a peak of torch's own tensors, which is what memory is predicted in."""
        return self.peak_gib is not None and self.peak_class in ("allocated", "active")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row that can be predicted: its job, and what a job of Tonnage's own never has.

    `network_gb_s` is one way between nodes, per GPU. `profile` is a name of plan.profiles.PROFILES,
    `traits` are names of TRAITS there. `base` is the form of a frozen
    base: bf16, nf4 (4.5 bits), nf4_dq (4.127 bits) or gptq4. `logits`: plain (HF: bf16, and fp32 copies), fused_ce (a
    kernel on whole bf16 logits), chunked (`job.loss_chunk_tokens` at a time), none (never held: Liger, cut
    cross-entropy).
    """

    row: Row
    job: Job
    gpu: str | None
    network_gb_s: float | None
    profile: str
    base: str
    logits: str
    seq_is_longest: bool
    seq_is_bound: bool
    is_stand_in: bool
    traits: tuple[str, ...] = ()

    @property
    def predicts_memory(self) -> bool:
        """Whether the memory of `job` is that of the row: the peak is set by the longest sample, so that will do.

        Where the longest is only bounded, it is so if the peak does not depend on it, which plan.validate finds out.
        """
        return not self.is_stand_in and not self.seq_is_bound

    @property
    def predicts_speed(self) -> bool:
        """Whether the speed of `job` is that of the row: every sample as long as stated, on a GPU of the table, and nothing
        moved that a job does not move."""
        moves = {"inputs on host", "step in backward"} & set(self.traits)
        return self.row.tok_per_s_per_gpu is not None and self.gpu is not None and not self.seq_is_longest and not (
            moves or self.seq_is_bound)


@cache
def rows(path: Path | None = None) -> tuple[Row, ...]:
    """All rows of the file, in its order; of facts/published.csv by default.

    Raises:
        ConfigError: a file that cannot be read, or without the columns that say what was run and measured.
    """
    try:
        text = (path or files("tonnage.facts").joinpath("published.csv")).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--validate {path}: cannot be read: {error}") from error
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    lacking = sorted(NEEDED - set(next(csv.reader(lines[:1]), [])))
    if lacking:
        raise ConfigError(f"--validate {path}: has no column {', '.join(lacking)}; facts/published.csv shows all")
    return tuple(Row(**{name: _parsed(kind, line.get(name) or "") for name, kind in Row.__annotations__.items()})
                 for line in csv.DictReader(lines))


NEEDED = {"id", "model", "method", "strategy", "world", "gpu", "seq_len", "micro_batch", "peak_gib", "peak_class", "notes"}


def _parsed(kind, text):
    if kind is str:
        return text
    if kind == int | None:
        return int(text) if text.isdigit() else None
    try:
        return float(text) if text else None
    except ValueError:
        return None


def architecture_of(row: Row):
    """The architecture of the row's model, None where its family is not counted."""
    return shape_of(row.model)


def predictable(row: Row) -> Published | str:
    """The row as a question to the planner, or why it cannot be asked."""
    architecture, adapter = architecture_of(row), _adapter(row)
    length = re.fullmatch(r"~?(\d+)( max.*)?", row.seq_len)
    micro = re.match(r"(\d+)( \(global bs as labelled\))?$", row.micro_batch)
    parts = re.fullmatch(r"(none|DDP|FSDP|ZeRO)[^+]*( \+ CPU (?:param )?offload)?", re.sub(r" \(.*?\)", "", row.strategy))
    reasons = (
        ("not a measurement of a training run", row.grade in ("C", "D", "formula") or "fit" in row.grade
         or row.method.startswith("loss")),
        ("nothing measured", row.peak_gib is None and row.tok_per_s_per_gpu is None and not row.did_not_fit),
        ("tensor, pipeline, expert or context parallel",
         re.search(r"Megatron|\b(TP|PP|EP|CP|SP)\s?\d|model-parallel|device_map|naive", row.strategy)),
        ("model is not of a family that is counted", architecture is None),
        ("method is not one of Tonnage's", adapter is None),
        ("LoRA's rank or matrices not stated, or more than them trained",
         adapter != "full" and (row.lora_rank is None or row.lora_targets not in _TARGETS)),
        ("8-bit floating point or less in the products", re.search(r"fp8|float8|FP4", row.precision, re.I)),
        ("strategy not stated or mixed", not parts),
        ("number of GPUs not stated", row.world is None),
        ("no sequence length stated", not length and "orca" not in row.seq_len),
        ("lengths vary and the longest is not known", not length),
        ("micro-batch not stated per GPU", not micro),
        ("activation checkpointing not stated, selective, or offloaded in an unknown way", not _checkpointing(row)),
        ("optimizer is not one of Tonnage's", re.search(r"Muon|precision-aware|K=12", row.optimizer)),
    )
    for reason, applies in reasons:
        if applies:
            return reason
    seq_tokens, micro_rows = int(length[1]), int(micro[1]) // (row.world if micro[2] else 1)
    logits, chunk_tokens = _loss(row, architecture, micro_rows * seq_tokens)
    strategy, gpus = _strategy(row), row.world
    per_node = min(gpus, _GPUS_PER_NODE)
    job = Job(
        architecture=architecture, adapter=adapter, rank=row.lora_rank or 1, targets=_TARGETS.get(row.lora_targets, ()),
        strategy=strategy, gpus=gpus, gpus_per_node=per_node,
        shard_gpus={"ddp": 1, "hsdp": per_node}.get(strategy, gpus), reshard_after_forward=True,
        offload="none" if parts[2] is None else "optimizer" if strategy == "zero2" else "all",
        precision="fp16" if row.precision.startswith(("fp16", "float16")) else "bf16",
        optimizer="adamw8bit" if "8bit" in row.optimizer else "adamw", seq_tokens=seq_tokens, micro_rows=micro_rows,
        accumulation_steps=row.grad_accum or 1, checkpointing=_checkpointing(row),
        attention="eager" if row.attn.startswith("eager") else "flash" if "flash" in row.attn or "fa" in row.attn
        else "sdpa",
        loss="plain" if logits in ("plain", "fused_ce") else "chunked", loss_chunk_tokens=chunk_tokens,
        compile=_compiled(row))
    network = re.search(r"(\d+) ?Gbps node-node", row.notes)
    return Published(row=row, job=job, gpu=_GPUS.get(row.gpu), profile=_profile(row, adapter, strategy), base=_base(row),
                     network_gb_s=int(network[1]) / 8 / _GPUS_PER_NODE if network else None, logits=logits,
                     seq_is_longest=length[2] is not None,
                     seq_is_bound=bool(re.search("short|unpacked\\)|unpacked alpaca", row.seq_len)),
                     is_stand_in=is_stand_in(row.model),
                     traits=_traits(row, architecture))


def _adapter(row):
    word = re.match(r"full|lora|qlora|dora", row.method)
    if not word or "NVFP4" in row.method or re.search(r"[28]-?bit|int8|offload|min", row.method):
        return None
    return {"qlora": "lora"}.get(word[0], word[0])


def _base(row):
    if not row.method.startswith("qlora"):
        return "bf16"
    if "gptq" in row.method:
        return "gptq4"
    # IBM's benchmark, QLoRA's own settings and torchao (dtypes/nf4tensor.py) quantise the scales too
    return "nf4_dq" if re.search("dq|torchao", row.method, re.I) or row.id.startswith("fmsacc") else "nf4"


def _checkpointing(row):
    if row.act_ckpt.startswith("none"):
        return "none"
    offloads = "offload" in row.act_ckpt and not row.source.startswith("torchtune")
    return "full" if row.act_ckpt.startswith("full") and not offloads else None


def _compiled(row):
    return "compile" in row.precision.replace("no compile", "") or bool(re.search("compile on|, compile,", row.notes))


def _strategy(row):
    if row.strategy.startswith("ZeRO"):
        return f"zero{row.strategy[5]}"
    if row.strategy.startswith(("none", "DDP")) or row.world == 1:
        return "ddp"
    return "hsdp" if "HSDP" in row.strategy else "fsdp"


def _loss(row, architecture, tokens):
    """(what is held of the logits, tokens of a chunk)."""
    text = row.fused_loss
    if re.search("liger|linear|Cut", text):
        # Liger's own chunk: tokens / ceil(vocab / hidden), up to a power of two.
        # Source: linkedin/Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py
        chunk = -(-tokens // -(-architecture.vocab // architecture.hidden))
        return "none", 1 << (chunk - 1).bit_length()
    if "chunked" in text:
        size = re.search(r"\((\d+)\)", text)
        return "chunked", int(size[1]) if size else -(-tokens // 8)  # torchtune: num_output_chunks=8
    return "fused_ce" if "fused CE" in text else "plain", tokens


def _profile(row, adapter, strategy):
    """A name of PROFILES: by framework, and for transformers by precision and method."""
    frameworks = {"fsdpqlora": "fsdp_qlora", "litgpt": "litgpt_bf16_true", "tt": "torchtune_bf16",
                  "automodel": "automodel_bf16", "titan": "fsdp2_fp32_master", "ao": "fsdp2_fp32_master",
                  "foundry": "fsdp1_fp32_master", "fmsfsdp": "fsdp1_fp32_master", "colossal": "colossal_zero"}
    framework = frameworks.get(row.id.partition("-")[0])
    if framework or strategy.startswith("zero"):
        return framework or "deepspeed_zero"
    if adapter != "full":
        return "hf_qlora" if row.method.startswith("qlora") else "hf_lora"
    pure = strategy == "ddp" or "pure" in row.precision  # on one GPU nothing makes an fp32 copy of bf16 weights
    return "hf_pure_bf16" if pure else "hf_fsdp_mixed"


def _traits(row, architecture):
    """What the row's versions and options change of its profile, by names of plan.profiles.TRAITS."""
    settings = re.search(r"framework_config=([a-z-]+)", row.notes)
    settings = settings[1] if settings else ""
    # transformers 4.45.2, refs/requirements_liger.txt; the other's chart is of August 2024
    is_old = row.id.startswith("fmsacc-liger") or row.source.startswith("Liger-Kernel")
    found = {
        "fused kernels": "foak" in settings,
        "Liger's kernels": "liger" in row.fused_loss and not settings,
        "outside apart": row.source == "torchtune README table 1" and row.method == "full" and row.world > 1,
        "fused adapter": "bnb-foak" in settings,
        "autocast": "bf16 autocast" in row.precision or "fp16 autocast" in row.precision,
        "logits let go": is_old,
        "repeated keys": is_old and architecture.model_type in ("mistral", "mixtral", "qwen2"),
        "fp32 stream": settings == "baseline-peft-bnb" and row.world == 1,
        "compiled": _compiled(row),
        "inputs on host": "offload" in row.act_ckpt,
        "step in backward": "backward" in row.optimizer or "opt-in-backward" in row.notes,
        "states on host": row.optimizer.startswith("Paged"),
    }
    return tuple(name for name, applies in found.items() if applies)


def published(has=lambda row: True, among: tuple[Row, ...] | None = None) -> list[Published]:
    """The predictable rows among those that `has` accepts."""
    return [found for row in (rows() if among is None else among)
            if has(row) and isinstance(found := predictable(row), Published)]


def group_of(found: Published) -> tuple[str, str]:
    """(source, model family): rows of one group are alike, so that a group is fitted or untouched as a whole."""
    return found.row.source, found.job.architecture.model_type


def is_fitted(group: tuple[str, str], groups: list[tuple[str, str]]) -> bool:
    """Every second group in the order of their names, from the first, is fitted on."""
    return sorted(groups).index(group) % 2 == 0


def counts() -> dict[str, Counter]:
    """Of rows with a tensor peak, without room, with a speed: how many can be predicted, and why the rest cannot."""
    memory, oom, speed = Counter(), Counter(), Counter()
    for row in rows():
        found = predictable(row)
        if row.has_tensor_peak or row.did_not_fit:
            why = found if isinstance(found, str) else "predictable" if found.predicts_memory else (
                "shape is a stand-in" if found.is_stand_in else "lengths vary, up to a bound")
            (oom if row.did_not_fit else memory)[why] += 1
        if row.tok_per_s_per_gpu is not None:
            speed[found if isinstance(found, str) else "predictable" if found.predicts_speed else
                  "GPU is not in the table" if found.gpu is None else "lengths vary"] += 1
    return {"peak allocated or active": memory, "did not fit": oom, "speed": speed}


def main() -> None:
    """Print the counts."""
    for kind, counter in counts().items():
        print(f"{kind}: {counter.total()} rows")
        for reason, number in counter.most_common():
            print(f"  {number:4}  {reason}")
    used = Counter(found.profile for found in published(lambda row: row.has_tensor_peak) if found.predicts_memory)
    print("profiles of the rows with a peak:", ", ".join(f"{name} {number}" for name, number in used.most_common()))


if __name__ == "__main__":
    main()
