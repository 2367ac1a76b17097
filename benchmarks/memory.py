"""docs/memory.md: what accumulation buys, measured on this CPU and predicted for GPUs.

    python benchmarks/memory.py              measure (minutes), then write the page
    python benchmarks/memory.py --page       write the page anew from the figures of the last measurement

Measured: windows of the real engine (ddp, one rank) in fp32 without activation checkpointing unless said, on a small
Llama with random weights and on SmolLM2-135M. Each case starts from the same weights and takes three steps on the same
rows; the third runs under the tracker of `tonnage.trace`, which books every tensor from birth to death. Figures go to
benchmarks/memory.json; the page is a function of that file and of the planner, and a test holds the two together.
"""

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

from tonnage.config.compose import compose_config
from tonnage.config.rules import resolve_layout
from tonnage.config.schema import Config
from tonnage.facts.architectures import Architecture
from tonnage.facts.gpus import gpu_of
from tonnage.plan.activations import layer_tape
from tonnage.plan.job import job_of
from tonnage.plan.memory import Memory, memory, style_of
from tonnage.plan.planner import Plan, architecture_of, make_plan, plan_layout
from tonnage.plan.verdict import DOES_NOT_FIT, FITS, FITS_BELOW

ROOT = Path(__file__).resolve().parents[1]
MEASURED, PAGE, PLOT = ROOT / "benchmarks" / "memory.json", ROOT / "docs" / "memory.md", ROOT / "docs" / "memory.png"
# hidden 256, 6 layers: the proportions of a 7B model
SMALL = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
         "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
SEQ_TOKENS = {"small": 256, "smollm2_135m": 64}
RANK, LEARNING_RATE, NUM_STEPS = 8, 1e-4, 3
CUTS = ((16, 1), (4, 4), (1, 16))  # micro-batch rows x accumulation steps: one window of 16 rows
ONE_AND_EIGHT = ((2, 1), (2, 8))  # the same micro-batch, one and eight to a window

GIB, NUM_GPUS = 2**30, 8
RUNS = (("llama8b", "lora"), ("llama8b", "full"), ("llama70b", "lora"))
GPU_NAMES = ("rtx4090", "a100_80gb", "h100")
MICRO_ROWS = (16, 8, 4, 2, 1)
ONE_CARD = ("model=llama7b", "gpu=rtx4090", "gpus=1")
def _over(gpus):
    return "strategy=fsdp", f"strategy.expert_gpus={gpus}"  # experts stay where they are


# what is said, of which run, and with how many rows of a micro-batch
RULES = (
    ("16B at 4-8 on one large GPU", ("model=deepseek16b", "gpu=a100_80gb", "gpus=1"), 8),
    ("", ("model=deepseek16b", "gpu=a100_80gb", "gpus=1", "data.seq_tokens=4096"), 8),
    ("236B at 2-4 on four", ("model=deepseek236b", "gpu=a100_80gb", "gpus=4"), 4),
    ("", ("model=deepseek236b", "gpu=a100_80gb", "gpus=4", "adapter=qlora", *_over(4)), 4),
    ("", ("model=deepseek236b", "gpu=h200", "gpus=4", *_over(4)), 4),
    ("", ("model=deepseek236b", "gpu=b200", "gpus=4"), 4),
    ("671B at 1-2 on eight", ("model=deepseek671b", "gpu=a100_80gb", "gpus=8"), 2),
    ("", ("model=deepseek671b", "gpu=a100_80gb", "gpus=8", "adapter=qlora", *_over(8)), 2),
    ("", ("model=deepseek671b", "gpu=h200", "gpus=8"), 2),
    ("", ("model=deepseek671b", "gpu=h200", "gpus=8", "adapter.quantise=fp8", *_over(8)), 2),
    ("", ("model=deepseek671b", "gpu=h200", "gpus=8", "strategy.offload=all"), 2),
    ("LLaMA-7B on one 24 GB card", ONE_CARD, 1),
    ("", (*ONE_CARD, "model.activation_checkpointing=none"), 1),
    ("", (*ONE_CARD, "adapter=full"), 1),
    ("", (*ONE_CARD, "adapter=full", "optimizer=adamw8bit"), 1),
)


@dataclass(frozen=True)
class Case:
    """One run that is measured."""

    model: str
    adapter: str
    checkpointing: str
    micro_rows: int
    accumulation_steps: int

    def config(self) -> Config:
        """Its config; the small model's folder is not known yet."""
        model = ["model=custom", "model.path=small"] if self.model == "small" else [f"model={self.model}"]
        return compose_config([
            *model, f"adapter={self.adapter}", f"adapter.rank={RANK}", "strategy=ddp", "gpus=1", "device=cpu",
            "precision=fp32", f"model.activation_checkpointing={self.checkpointing}", "schedule=constant",
            "schedule.warmup_steps=0", f"data.seq_tokens={SEQ_TOKENS[self.model]}", "data.packing=false",
            f"batch.micro_rows={self.micro_rows}", f"batch.global_rows={self.micro_rows * self.accumulation_steps}"])


def cases() -> list[Case]:
    """All that is measured."""
    return [Case(model, adapter, checkpointing, *cut)
            for model, checkpointing in (("small", "none"), ("small", "full"), ("smollm2_135m", "none"))
            for adapter in ("lora", "full") for cut in (*CUTS, *ONE_AND_EIGHT)]


# ---- measuring


def measure_all(threads: int) -> dict:
    """Every case on this machine, as benchmarks/memory.json holds it."""
    import torch

    from tonnage.models.folder import resolve_folder
    from tonnage.runtime import ranks

    ranks.join(ranks.Place("none", 0, 1, 0, 1), 1, "cpu", 1800.0, threads)
    results = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__, "threads": threads,
               "cpu": f"{os.cpu_count()} cores, {platform.machine()}", "cases": []}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        make_small(folder)
        for case in cases():
            place = folder if case.model == "small" else resolve_folder(case.config().model)
            results["cases"].append(asdict(case) | measure(case, place))
            print(json.dumps(results["cases"][-1]), flush=True)
            gc.collect()
    return results | {"seconds": round(time.monotonic() - started)}


def make_small(folder: str) -> None:
    """Write the small Llama, in fp16: so every weight is converted as it is loaded, and none is a piece of the file."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).half().save_pretrained(folder)


def measure(case: Case, folder: str) -> dict:
    """Losses and CPU seconds of the steps, and the peaks of the last."""
    import torch
    import torch.distributed as dist

    from tonnage.data.collate import collate
    from tonnage.models.slices import WHOLE
    from tonnage.report.console import StepProgress
    from tonnage.trace.tracker import PHASES, Tracker
    from tonnage.trace.window import book_fsdp, loss_phase, tracked_window
    from tonnage.train.loop import run_window
    from tonnage.train.loss import LossHead
    from tonnage.train.routing import Routing
    from tonnage.train.session import engine_parts, make_engine

    config = case.config()
    layout = resolve_layout(config, 1, "cpu", 1, under_deepspeed=False)
    engine = make_engine(config, layout.strategy, 1, layout.cut, torch.device("cpu"))
    engine.prepare(engine_parts(config, folder, "sdpa"))
    head = LossHead(engine.model, config.train.loss, config.train.loss_chunk_tokens)
    rows = rows_of(case, folder)
    session = SimpleNamespace(config=config, cut=layout.cut, world_size=1, rank=0, pad_token=0, flat=False,
                              group=dist.group.WORLD, engine=engine, head=head,
                              slices=WHOLE, routing=Routing(engine.model, config), peak_rate=LEARNING_RATE,
                              num_steps=NUM_STEPS, progress=StepProgress(NUM_STEPS, 0, show=False),
                              stop_agreed=lambda: False)
    losses, step_cpu_s = [], []
    for step in range(1, NUM_STEPS):
        started = time.process_time()
        result = run_window(session, rows, step)
        step_cpu_s.append(time.process_time() - started)
        losses.append(result["loss"])
    tracker, labels = Tracker(), result["label_tokens"]
    batches = [collate(rows[i:i + case.micro_rows], 0) for i in range(0, len(rows), case.micro_rows)]
    with tracker, loss_phase(tracker, head):
        book_fsdp(tracker, engine)
        tracker.start()
        total = tracked_window(tracker, engine, head, batches, 1 / labels, LEARNING_RATE,
                               lambda _: book_fsdp(tracker, engine))
    engine.close()
    return {"losses": [*losses, float(total) / labels], "step_cpu_s": min(step_cpu_s),
            "peak_bytes": {phase: tracker.peak(phase).total for phase in PHASES}}


def rows_of(case: Case, folder: str) -> list:
    """Full rows with a label at every position but the first: the demo's text for SmolLM2, else random tokens."""
    import numpy as np

    from tonnage.data.pack import Row
    from tonnage.data.template import load_tokenizer

    size, number = SEQ_TOKENS[case.model], case.micro_rows * case.accumulation_steps
    if case.model == "small":
        tokens = np.random.default_rng(0).integers(0, SMALL["vocab_size"], number * size)
    else:
        text = (ROOT / "recipes" / "data" / "harbour_train.jsonl").read_text()[:20 * number * size]
        tokens = np.array(load_tokenizer(folder)(text)["input_ids"][:number * size])
    assert len(tokens) == number * size
    return [Row(row, row, np.arange(size, dtype=np.int32)) for row in tokens.astype(np.int32).reshape(number, size)]


# ---- the page


def page(measured: dict) -> str:
    """docs/memory.md: the measured figures beside the planner's, and what the planner says of GPUs."""
    return "\n".join([*_heading(measured), *_measured(measured), *_predicted(), *_claims(measured), *_rules()]) + "\n"


def _heading(measured):
    return [
        "# What accumulation buys", "",
        "Written by `make docs-memory` (`python benchmarks/memory.py`; `--page` plans anew without measuring); edit there.",
        f"Measured {measured['date']} on a CPU without GPU ({measured['cpu']}, torch {measured['torch']}, "
        f"OMP_NUM_THREADS={measured['threads']}) in {measured['seconds'] / 60:.0f} minutes. Predictions are those of "
        "`launch/plan.py`: bytes of tensors, not yet measured on a GPU.", "",
        "A window of 16 rows can be run as one micro-batch of 16 rows (16x1), as 4x4 or as 1x16: the same step, and only "
        "one micro-batch's activations at a time. Weights, gradients and optimizer states stay, so the gain ends at that "
        "floor; and with more than one micro-batch the sum of gradients lives through the next forward.", ""]


def _measured(measured):
    by_case = _by_case(measured)
    lines = ["## Measured on a CPU", "",
             f"The real engine, `strategy=ddp` on one rank, fp32, LoRA of rank {RANK} on all linear layers; chunked loss. "
             f"Small: a Llama of hidden {SMALL['hidden_size']} and {SMALL['num_hidden_layers']} layers, rows of "
             f"{SEQ_TOKENS['small']} tokens; SmolLM2-135M: rows of {SEQ_TOKENS['smollm2_135m']} tokens. Peak: the most "
             "bytes of tensors alive in the third step, each booked from birth to death. Loss: that of the third step. "
             "Time: CPU seconds of a step relative to 16x1, the lesser of two steps; rough where other work runs.", ""]
    rows = []
    for case, found in by_case.items():
        if (case.micro_rows, case.accumulation_steps) not in CUTS:
            continue
        whole = by_case[_cut(case, *CUTS[0])]
        peak, predicted = _peak(found), predict(case).peak_bytes
        rows.append((*_names(case), f"{case.micro_rows}x{case.accumulation_steps}", f"{found['losses'][-1]:.6f}",
                     _mib(peak), _mib(predicted), f"{predicted / peak:.3f}", f"{1 - peak / _peak(whole):.0%}",
                     f"{found['step_cpu_s'] / whole['step_cpu_s']:.2f}"))
    lines += _table(("model", "trained", "checkpointing", "cut", "loss", "peak, MiB", "predicted", "predicted / peak",
                     "less than 16x1", "time"), rows)
    ratios = [predict(case).peak_bytes / _peak(found) for case, found in by_case.items()]
    lines += ["", f"Losses of all three steps agree across cuts within {_loss_spread(by_case):.0e} relative. Predicted "
              f"peaks are {min(ratios):.3f} to {max(ratios):.3f} of the measured ones.", "",
              "Accumulation 1 against 8 at the same micro-batch of 2 rows. What is added is the sum of gradients, fp32, 4 "
              "bytes a trained parameter (the plan's term *gradients*). In forward all of it is added; the peak grows less "
              "where it lies in backward, when the gradients of a single micro-batch are there too. What the difference "
              "leaves are token ids and positions of the other micro-batches, 32 bytes a token. So the percentage is "
              f"the adapter's share: rank 16 adds twice what rank {RANK} does; for llama8b on one card, rank 16, "
              f"micro-batch 2, the plan says {_one_to_eight():+.1%}.", ""]
    rows, shown = [], [case for case in by_case if (case.micro_rows, case.accumulation_steps) == ONE_AND_EIGHT[0]]
    for case in shown:
        one, eight = by_case[case], by_case[_cut(case, *ONE_AND_EIGHT[1])]
        grown = eight["peak_bytes"]["forward"] - one["peak_bytes"]["forward"]
        term = predict(case).phases["step"]["gradients"]
        rows.append((*_names(case), _mib(_peak(one)), _mib(_peak(eight)), f"{_peak(eight) / _peak(one) - 1:+.1%}",
                     _mib(grown), _mib(term), f"{grown / term - 1:+.1%}"))
    return lines + _table(("model", "trained", "checkpointing", "peak 2x1, MiB", "peak 2x8", "more", "more in forward, MiB",
                           "gradients by the plan", "difference"), rows) + [""]


def _predicted():
    lines = ["## Predicted for GPUs", "",
             f"128 rows of 2,048 tokens a step on {NUM_GPUS} GPUs, bf16, `strategy=fsdp`, LoRA of rank 16, activation "
             "checkpointing and chunked loss: 16 rows a GPU, cut from 16x1 to 1x16. A line is "
             f"`python launch/plan.py model=M adapter=A gpu=G gpus={NUM_GPUS} strategy=fsdp batch.micro_rows=N`; tokens/s "
             "are of all GPUs, in brackets where it is tight, - where it does not fit.", ""]
    rows = []
    for model, adapter in RUNS:
        for micro in MICRO_ROWS:
            plans = [plan_of(_run(model, adapter), micro, gpu) for gpu in GPU_NAMES]
            rows.append((model, adapter, f"{micro}x{plans[0].layout.cut.accumulation_steps}",
                         _gib(plans[0].memory.peak_bytes), *map(_speed, plans)))
    lines += _table(("model", "trained", "cut", "peak, GiB", *(f"{gpu}, tokens/s" for gpu in GPU_NAMES)), rows)
    return lines + [
        "", "![Predicted peak and speed against the micro-batch](memory.png)", "",
        "Over NVLink the plan finds that gathers hide behind the work of one row already, so that accumulation costs no "
        "time; it does not count that kernels get less efficient. Over PCIe (rtx4090) each micro-batch pays for gathering "
        "the weights again, so that there the largest micro-batch that fits is the fastest.", ""]


def _claims(measured):
    by_case = _by_case(measured)
    savings = [1 - _peak(by_case[_cut(case, 4, 4)]) / _peak(by_case[case]) for case in by_case
               if (case.micro_rows, case.accumulation_steps) == CUTS[0]]
    table, saved = [], {}
    for adapter in ("lora", "full"):
        for checkpointing in ("none", "full"):
            cells = []
            for loss in ("chunked", "plain"):
                extra = (f"model.activation_checkpointing={checkpointing}", f"train.loss={loss}", "gpu=h100")
                whole, four = (plan_of((*_run("llama7b", adapter), *extra), rows).memory.peak_bytes for rows in (16, 4))
                saved[adapter, checkpointing, loss] = 1 - four / whole
                cells += [f"{_gib(whole)} to {_gib(four)}", f"{1 - four / whole:.0%}"]
            table.append((adapter, checkpointing, *cells))
    within = [" ".join((*key[:1], "checkpointing", key[1], key[2])) for key, part in saved.items() if 0.3 <= part <= 0.5]
    next_cut = [plan_of(ONE_CARD, rows).memory.peak_bytes for rows in (4, 1)]
    floor = plan_of(ONE_CARD, 1)
    small = [plan_of(("model=smollm2_135m", *ONE_CARD[1:]), rows).memory.peak_bytes for rows in (128, 32)]
    over = sum(part > 0.4 for part in saved.values())
    return [
        "## Claims, checked", "",
        f"Four micro-batches of 4 rows instead of one of 16, llama7b on {NUM_GPUS} GPUs, as above (GiB and what is saved):",
        "", *_table(("trained", "checkpointing", "chunked loss", "saved", "plain loss", "saved"), table), "",
        *_table(("claim", "what was found", "verdict"), [
            ("30-50 % lower peak", f"Measured, 16x1 to 4x4: {min(savings):.0%} to {max(savings):.0%} (table above). "
             f"Predicted: {min(saved.values()):.0%} to {max(saved.values()):.0%}; within 30-50 %: {', '.join(within)}. "
             f"Cutting a small one gains less: llama7b with LoRA on one 24 GB card goes from {_gib(next_cut[0])} GiB at 4 "
             f"rows to {_gib(next_cut[1])} at 1 ({1 - next_cut[1] / next_cut[0]:.0%}).",
             "no constant: what is saved is activations; it can be more and less"),
            ("16 GB to under 8 GB", f"LLaMA-7B in bf16 with LoRA: {_gib(floor.memory.peak_bytes)} GiB at one row, of them "
             f"{_gib(_frozen(floor))} frozen weights, which no cut makes smaller; under 8 GB takes a base of at most "
             f"{_bits(floor, 8 * 1e9):.1f} bits a weight. SmolLM2-135M goes from {_gib(small[0])} GiB at 128 rows to "
             f"{_gib(small[1])} at 32.", "false for a 7B model with a bf16 base, true where weights are small"),
            ("accumulate 4: over 40 %", f"Predicted in {over} of the {len(saved)} settings above: "
             f"{min(saved.values()):.0%} to {max(saved.values()):.0%}.",
             "true with LoRA or without checkpointing; for full training with checkpointing only with the plain loss"
             if saved["full", "full", "chunked"] <= 0.4 < saved["full", "full", "plain"]
             and over == len(saved) - 1 else "see the table"),
        ]), ""]


def _rules():
    rows = []
    for say, words, rule_rows in RULES:
        plan, most = plan_of(words, rule_rows), most_rows(words)
        found = f"holds, up to {most} rows" if plan.verdict == FITS else plan.verdict
        rows.append((say, f"`{' '.join((*words, f'batch.micro_rows={rule_rows}'))}`", _gib(plan.memory.peak_bytes),
                     f"{plan.share:.0%}", found))
    return [
        "## Rules of thumb, checked", "",
        "Each line is `python launch/plan.py` and the words shown: LoRA of rank 16 on a bf16 base unless said, rows of "
        "2,048 tokens, activation checkpointing. Up to 128 rows were tried.", "",
        *_table(("rule", "words", "peak, GiB", "of the GPU", "the plan says"), rows), "", *_fp8()]


def _fp8():
    """What FP8 could shrink: bytes a row, the part of them that only matrix products save, and the base."""
    lines = []
    for adapter, checkpointing in (("lora", "full"), ("full", "full"), ("full", "none")):
        words = (*_run("llama8b", adapter), "gpu=h100", f"model.activation_checkpointing={checkpointing}", "accumulation=2")
        eight, row = _a_row(words)
        layer = layer_tape(eight.job.architecture, 0, 1, eight.job.seq_tokens, style_of(eight.job))
        times = eight.job.architecture.num_layers if checkpointing == "none" else 1
        inputs = times * sum(layer.sizes[name] for name in _only_products(layer))
        lines.append((adapter, checkpointing, f"{row / GIB:.2f}", f"{inputs / GIB:.2f}",
                      f"{row / (row - inputs / 2) - 1:+.0%}"))
    words = ("model=llama8b", "gpu=rtx4090", "gpus=1")
    most, with_fp8 = most_rows(words), most_rows((*words, "adapter.quantise=fp8"))
    return [
        "*FP8 lets the micro-batch grow by about 30 %*: that takes a row whose bytes fall by 23 %. What FP8 products can "
        "shrink are the inputs that only they save; with a frozen base they save none. `model=llama8b gpu=h100 "
        "gpus=8 strategy=fsdp accumulation=2`, GiB a row, from the difference of 8 and 16 rows:", "",
        *_table(("trained", "checkpointing", "a row", "inputs of products", "rows if they were 8 bits"), lines), "",
        f"So computing in FP8 does not give 30 % here. Storing a frozen base in 8 bits frees half of its bytes, which can "
        f"be far more: `{' '.join(words)}` fits {most} rows, and {with_fp8} with `adapter.quantise=fp8`. The gain is that "
        "of the room left beside the weights, and no constant."]


def _a_row(words):
    """(the plan with micro-batches of 8 rows, bytes that a row more adds)."""
    eight, sixteen = (plan_of(words, rows) for rows in (8, 16))
    return eight, (sixteen.memory.peak_bytes - eight.memory.peak_bytes) / 8


def _only_products(tape):
    """Names of tensors that nothing but matrix products of trained weights save, the layer's input apart."""
    products = {name for op in tape.ops if op.weight for name in op.saves}
    others = {name for op in tape.ops if not op.weight for name in op.saves}
    return products - others - {"x"}


# ---- the plot


def plot() -> None:
    """docs/memory.png: peak and speed against the micro-batch; one column a run."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    figure, axes = pyplot.subplots(2, len(RUNS), figsize=(12, 6.4), sharex=True, sharey="row", layout="constrained")
    for (model, adapter), (above, below) in zip(RUNS, axes.T, strict=True):
        for checkpointing, style in (("full", "-"), ("none", "--")):
            words = (*_run(model, adapter), f"model.activation_checkpointing={checkpointing}")
            plans = {(gpu, rows): plan_of(words, rows, gpu)
                     for gpu in GPU_NAMES for rows in MICRO_ROWS}
            above.plot(MICRO_ROWS, [plans[GPU_NAMES[0], rows].memory.peak_bytes / GIB for rows in MICRO_ROWS], f"ko{style}",
                       label=f"peak, checkpointing {checkpointing}", markersize=4)
            for gpu, color in zip(GPU_NAMES, ("C1", "C0", "C2"), strict=True):
                speeds = [plans[gpu, rows].speed.tokens_per_s if plans[gpu, rows].verdict != DOES_NOT_FIT else None
                          for rows in MICRO_ROWS]
                below.plot(MICRO_ROWS, [float("nan") if one is None else one for one in speeds], f"o{style}", color=color,
                           label=gpu if style == "-" else None, markersize=4)
        for gpu, color in zip(GPU_NAMES, ("C1", "C0", "C2"), strict=True):
            above.axhline(FITS_BELOW * gpu_of(gpu).memory_gib, color=color, alpha=0.6, label=f"fits {gpu}, up to")
        above.set(title=f"{model}, {adapter}, {NUM_GPUS} GPUs", yscale="log", xscale="log", ylabel="GiB on one GPU")
        below.set(yscale="log", xlabel="rows of a micro-batch (128 rows a step)", ylabel="tokens/s, where it fits")
        below.set_xticks(MICRO_ROWS, MICRO_ROWS, minor=False)
        below.minorticks_off()
        above.set_yticks((5, 10, 20, 50, 100, 200, 500))
        above.yaxis.set_major_formatter(ScalarFormatter())
    axes[0, 0].legend(fontsize=7)
    axes[1, 0].legend(fontsize=7)
    figure.savefig(PLOT, dpi=80, metadata={"Software": None})


# ---- plans


@lru_cache
def _composed(words):
    return compose_config(list(words))


@lru_cache
def plan_of(words: tuple[str, ...], rows: int, gpu: str = "") -> Plan:
    """The plan of `python launch/plan.py words batch.micro_rows=rows`, with gpu=`gpu` if given."""
    config = _composed(words)
    config = replace(config, batch=replace(config.batch, micro_rows=rows), gpu=replace(config.gpu, name=gpu or
                                                                                       config.gpu.name))
    found, architecture = gpu_of(config.gpu.name), architecture_of(config)
    return make_plan(config, plan_layout(config, architecture, found), architecture, found)


def most_rows(words: tuple[str, ...], limit: int = 128) -> int:
    """The largest micro-batch that fits, up to `limit` rows a GPU; 0 if none does."""
    several = (*words, "accumulation=2")
    return bisect_left(range(1, limit + 1), True, key=lambda rows: plan_of(several, rows).verdict != FITS)


def predict(case: Case) -> Memory:
    """The planner's memory of a measured case."""
    config = case.config()
    architecture = (Architecture.from_hf_config({"model_type": "llama", **SMALL}) if case.model == "small" else
                    architecture_of(config))
    return memory(job_of(config, resolve_layout(config, 1, "cpu", 1, under_deepspeed=False), architecture))


def _run(model, adapter):
    return f"model={model}", f"adapter={adapter}", f"gpus={NUM_GPUS}", "strategy=fsdp"


def _frozen(plan):
    return plan.memory.phases[plan.memory.peak_phase].get("frozen weights", 0.0)


def _bits(plan, room):
    """Bits a weight of the frozen base may take for the peak to stay within `room` bytes."""
    return 8 * (room - plan.memory.peak_bytes + _frozen(plan)) * plan.job.shard_gpus / plan.job.architecture.num_parameters


# ---- words and figures


def _by_case(measured):
    names = Case.__dataclass_fields__
    return {Case(**{name: one[name] for name in names}): one for one in measured["cases"]}


def _cut(case, micro_rows, accumulation_steps):
    return replace(case, micro_rows=micro_rows, accumulation_steps=accumulation_steps)


def _one_to_eight():
    """What accumulation 8 adds to the predicted peak of accumulation 1: llama8b with LoRA on one card."""
    words = ("model=llama8b", *ONE_CARD[1:])
    one, eight = (plan_of((*words, f"batch.global_rows={rows}"), 2).memory.peak_bytes for rows in (2, 16))
    return eight / one - 1


def _peak(found):
    return max(found["peak_bytes"].values())


def _loss_spread(by_case):
    """The largest relative difference of a loss between cuts of the same window."""
    whole = {case: found for case, found in by_case.items() if (case.micro_rows, case.accumulation_steps) == CUTS[0]}
    return max(abs(other / loss - 1) for case, found in whole.items() for cut in (*CUTS, ONE_AND_EIGHT[1])
               for loss, other in zip(found["losses"], by_case[_cut(case, *cut)]["losses"], strict=True))


def _names(case):
    return {"small": "small", "smollm2_135m": "SmolLM2-135M"}[case.model], case.adapter, case.checkpointing


def _speed(plan):
    tokens = f"{plan.speed.tokens_per_s:,.0f}"
    return {FITS: tokens, DOES_NOT_FIT: "-"}.get(plan.verdict, f"({tokens})")


def _gib(size):
    return f"{size / GIB:.1f}"


def _mib(size):
    return f"{size / 2**20:.1f}"


def _table(head, rows):
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="measure nothing: the page from the figures there are")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    args = parser.parse_args()
    if not args.page:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # before torch is imported
        from tonnage.runtime.logs import quiet_libraries

        quiet_libraries()
        MEASURED.write_text(json.dumps(measure_all(args.threads), indent=1) + "\n")
    PAGE.write_text(page(json.loads(MEASURED.read_text())))
    plot()
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
