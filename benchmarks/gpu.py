"""What real steps take on one large GPU, beside what the planner says: memory, tokens/s, MFU. Not run on a GPU yet.

    benchmarks/gpu.sh                                        all parts, in less than 8 minutes; see there for WHEELS=
    python benchmarks/gpu.py --parts lora qlora              some of them
    python benchmarks/gpu.py --device cpu --tiny             a rehearsal at toy size, whose figures mean nothing

Models have their published widths and random weights, so nothing is fetched. A part is one run: the project's own engine
(strategy=ddp, one rank), loss and window, two micro-batches of full rows to a step. The first step is left out; peak is the
most that torch has allocated in the others, time the median of theirs. Each part is a process of its own with a time-out
of its own; one that cannot be run says why. Results: build/gpu.json, and the same as a table in build/gpu.md.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
NUM_STEPS = 4
CPU_PATIENCE = 10  # times the limits of a GPU
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "hydra-core", "bitsandbytes", "torchao")
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
        "num_key_value_heads": 4, "max_position_embeddings": 128}
TINY_MOE = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 32,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


class NotRun(Exception):
    """Why a part cannot be run here."""


@dataclass(frozen=True)
class Part:
    """One run. `layers` of the model's, None for all; `limit_s`: wall time, start of the process included."""

    name: str
    title: str
    model: str
    overrides: tuple[str, ...]
    micro_rows: int
    limit_s: int
    layers: int | None = None


PARTS = {part.name: part for part in (
    Part("lora", "8B, LoRA", "llama8b", ("adapter=lora",), 8, 60),
    Part("full", "8B, full, states in 8 bits", "llama8b", ("adapter=full", "optimizer=adamw8bit"), 4, 110),
    Part("full-half", "8B, full, 16 of 32 layers", "llama8b", ("adapter=full",), 4, 45, layers=16),
    Part("qlora", "8B, LoRA on NF4", "llama8b", ("adapter=qlora",), 8, 65),
    Part("loss-chunked", "2 layers, 128k words, chunked loss", "llama8b", ("train.loss=chunked",), 8, 35, layers=2),
    Part("loss-plain", "2 layers, 128k words, plain loss", "llama8b", ("train.loss=plain",), 8, 35, layers=2),
    Part("moe", "16B mixture, LoRA", "deepseek16b", ("adapter=lora",), 8, 60),
    Part("fp8", "8B, LoRA, products in FP8 (beside lora)", "llama8b", ("adapter=lora", "precision=fp8"), 8, 60))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy widths")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu.json", help="results; the table is beside it")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)  # one part, in this process
    args = parser.parse_args()
    if args.only:
        try:
            print(json.dumps(measure(PARTS[args.only], args.device, args.tiny)))
        except NotRun as why:
            print(json.dumps({"not_run": str(why)}))
        return 0
    results = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "rehearsal": args.device == "cpu" or args.tiny,
               "versions": versions(), "parts": {}}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for name in args.parts:
        started = time.monotonic()
        found = in_a_process(PARTS[name], args.device, args.tiny) | {"wall_s": round(time.monotonic() - started, 1)}
        results["parts"][name] = found
        said = f"not run: {found['not_run']}" if "not_run" in found else "done"
        print(f"{name}: {said} ({found['wall_s']} s)", flush=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n")  # what is there stays, whatever comes
    args.output.with_suffix(".md").write_text(table(results))
    print(table(results))
    return 0 if any("not_run" not in found for found in results["parts"].values()) else 1


def versions() -> dict[str, str | None]:
    """Of this Python and of the libraries, None where one is missing; nothing is imported."""
    found = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def in_a_process(part: Part, device: str, tiny: bool) -> dict:
    """What the part's own process has measured, or why there is nothing."""
    command = [sys.executable, __file__, "--only", part.name, "--device", device, *["--tiny"] * tiny]
    limit_s = part.limit_s * (1 if device == "cuda" else CPU_PATIENCE)
    environment = os.environ | ({"TORCHDYNAMO_DISABLE": "1"} if tiny else {})  # to compile takes longer than a toy does
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment)
    except subprocess.TimeoutExpired:
        return {"not_run": f"took longer than {limit_s} s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing said"]
        return {"not_run": f"exit code {done.returncode}: {said[-1][:300]}", "stderr": done.stderr[-4000:]}
    return json.loads(done.stdout.splitlines()[-1])


# ---- one part


def measure(part: Part, device: str, tiny: bool) -> dict:
    """Peaks and speed of the part's steps beside the planned ones.

    Raises:
        NotRun: a library, a GPU or a choice of the config is not there, or the plan says that it cannot fit.
    """
    try:
        import torch

        from tonnage.errors import ConfigError
        from tonnage.runtime import ranks
        from tonnage.runtime.driver import first_gpu
        from tonnage.runtime.logs import quiet_libraries
    except ImportError as error:
        raise NotRun(f"{error}") from error
    if device == "cuda" and not torch.cuda.is_available():
        raise NotRun("torch sees no GPU")
    quiet_libraries()
    if not torch.distributed.is_initialized():
        ranks.join(ranks.Place("none", 0, 1, 0, 1), 1, device, 1800.0, "auto" if device == "cuda" else 1)
    try:
        with tempfile.TemporaryDirectory(prefix="tonnage-gpu-") as folder:
            return steps_of(part, shaped(part, tiny, Path(folder)), device, tiny, first_gpu() if device == "cuda" else None)
    except (ImportError, ConfigError) as error:
        raise NotRun(" ".join(str(error).split())) from error


def shaped(part: Part, tiny: bool, folder: Path) -> str:
    """`folder` with the config.json of the part's model."""
    from tonnage.facts.models import MODELS

    shape = MODELS[part.model].hf_config
    if part.layers:
        shape["num_hidden_layers"] = part.layers
    if tiny:
        shape |= TINY | (TINY_MOE if "n_routed_experts" in shape else {})
        shape.pop("rope_scaling", None)
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def steps_of(part: Part, folder: str, device: str, tiny: bool, gpu) -> dict:
    """Plan, build and run; see `measure`."""
    import torch
    import torch.distributed as dist

    from tonnage.config.compose import compose_config
    from tonnage.config.rules import resolve_layout
    from tonnage.facts.gpus import Gpu
    from tonnage.models.slices import WHOLE
    from tonnage.plan.planner import architecture_of, make_plan
    from tonnage.plan.speed import flops_per_token
    from tonnage.plan.verdict import DOES_NOT_FIT
    from tonnage.report.console import StepProgress
    from tonnage.train.loop import run_window
    from tonnage.train.loss import LossHead
    from tonnage.train.routing import Routing
    from tonnage.train.session import engine_parts, make_engine, resolve_attention

    emulated = ["precision.fp8_emulate=true"] if device == "cpu" and "precision=fp8" in part.overrides else []
    rows, seq_tokens = (2, 64) if tiny else (part.micro_rows, 2048)
    config = compose_config(["model=custom", f"model.path={folder}", "strategy=ddp", "gpus=1", f"device={device}",
                             f"data.seq_tokens={seq_tokens}", f"batch.micro_rows={rows}", f"batch.global_rows={2 * rows}",
                             "schedule=constant", "schedule.warmup_steps=0", "model.attention=sdpa", *part.overrides,
                             *emulated])
    layout, architecture = resolve_layout(config, 1, device, 1, under_deepspeed=False), architecture_of(config)
    gpu = gpu or Gpu(name="host", title="this machine", memory_gib=64.0, source="a rehearsal")
    plan = make_plan(config, layout, architecture, gpu)
    if plan.verdict == DOES_NOT_FIT:
        raise NotRun(f"does not fit: planned {plan.memory.peak_bytes / GIB:.1f} GiB of {gpu.memory_gib:.1f}")
    engine = make_engine(config, layout.strategy, 1, layout.cut, torch.device(device))
    attention = resolve_attention(config.model.attention, device, config.precision.name)
    engine.prepare(with_random_weights(engine_parts(config, folder, attention)))
    session = SimpleNamespace(
        config=config, cut=layout.cut, world_size=1, rank=0, pad_token=0, flat=False, group=dist.group.WORLD, engine=engine,
        head=LossHead(engine.model, config.train.loss, config.train.loss_chunk_tokens),
        slices=WHOLE, routing=Routing(engine.model, config), peak_rate=1e-5,
        num_steps=NUM_STEPS, progress=StepProgress(NUM_STEPS, 0, show=False), stop_agreed=lambda: False)
    window, step_s, losses = random_rows(architecture.vocab, 2 * rows, seq_tokens), [], []
    for step in range(1, NUM_STEPS + 1):
        started = time.perf_counter()
        losses.append(run_window(session, window, step)["loss"])  # reading the loss waits for the GPU
        step_s.append(time.perf_counter() - started)
        if step == 1 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
    tokens_per_s = 2 * rows * seq_tokens / median(step_s[1:])
    in_steps = {phase: sum(terms.values()) for phase, terms in plan.memory.phases.items() if phase not in ("load", "save")}
    peak = gpu.bf16_tflops and gpu.bf16_tflops * 1e12
    return {
        "part": asdict(part), "gpu": gpu.title, "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "micro_rows": rows, "seq_tokens": seq_tokens, "parameters": architecture.num_parameters, "losses": losses,
        "step_s": step_s, "tokens_per_s": tokens_per_s,
        "planned_tokens_per_s": plan.speed and plan.speed.tokens_per_s,
        "mfu": peak and flops_per_token(plan.job).model * tokens_per_s / peak,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "planned_peak_bytes": max(in_steps.values()), "planned_phases": in_steps}


def with_random_weights(parts):
    """The same parts, with normal numbers for the weights of matrices and ones for those of norms instead of files.

    Rotary frequencies stay zero: to turn by no angle costs the same.
    """
    import torch

    from tonnage.engines.base import Parts
    from tonnage.models.load import materialise

    def fill(module):
        kept = getattr(module, "kept", {})
        for leaf, one in kept.items():
            weight = torch.randn(one.shape, dtype=one.dtype, device=next(module.parameters()).device) * 0.02
            for field, values in one.format.quantise(weight, one.parts).items():
                module._parameters[one.names(leaf)[field]].data.copy_(values)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                local = getattr(parameter, "_local_tensor", parameter).data
                local.fill_(1.0) if parameter.ndim < 2 else local.normal_(std=0.02)

    def load(model, device):
        torch.manual_seed(0)
        materialise(model, device, fill)

    return Parts(parts.build, load, parts.optimizer, parts.start)


def random_rows(vocab: int, number: int, size: int) -> list:
    """Full rows of random tokens, with a label at every position but the first."""
    import numpy as np

    from tonnage.data.pack import Row

    tokens = np.random.default_rng(0).integers(0, vocab, (number, size)).astype(np.int32)
    return [Row(row, row, np.arange(size, dtype=np.int32)) for row in tokens]


# ---- the table


def table(results: dict) -> str:
    """The results as markdown."""
    devices = {found["device"] for found in results["parts"].values() if "device" in found}
    lines = [f"{'REHEARSAL, the figures mean nothing: ' * results['rehearsal']}{', '.join(devices) or 'nothing run'}, "
             f"{results['date']}; {', '.join(f'{name} {version}' for name, version in results['versions'].items())}", "",
             "| part | rows | peak, GiB | planned | planned / peak | tokens/s | planned | MFU |", "| --- " * 8 + "|"]
    for name, found in results["parts"].items():
        title = PARTS[name].title
        if "not_run" in found:
            lines.append(f"| {title} | not run: {found['not_run']} |" + " |" * 6)
            continue
        peak, planned, speed = found["peak_bytes"], found["planned_peak_bytes"], found["planned_tokens_per_s"]
        cells = (title, f"2 x {found['micro_rows']}", f"{peak / GIB:.2f}" if peak else "-", f"{planned / GIB:.2f}",
                 f"{planned / peak:.3f}" if peak else "-", f"{found['tokens_per_s']:,.0f}",
                 f"{speed:,.0f}" if speed else "-", f"{found['mfu']:.0%}" if found["mfu"] else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
