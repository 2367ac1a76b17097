"""What fewer bits cost in held-out loss: LoRA on SmolLM2-135M, the base kept or multiplied in 4, 8, 16 and 32 bits.

    python benchmarks/precisions.py           measures every case (minutes), then writes docs/precisions.md

Each case is a session as launch/train.py opens it, on one CPU rank: the demo's data, order, adapter and learning rate, from
the same seed; only the keys in the table differ. CPUs are slow in bf16, so what is not in fewer bits is in fp32 in every
case but the last; on a GPU it would be bf16. FP8 products are emulated: numbers are rounded as on a GPU and multiplied in
fp32, so losses are told and speed is not. After so few steps a difference as large as that of bf16 from fp32 is noise.
"""

import argparse
import contextlib
import gc
import io
import json
import os
import platform
import signal
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from _one_rank import join_alone

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "precisions.md"
CASES = {
    "fp32": "precision=fp32",
    "base kept in NF4": "precision=fp32 adapter=qlora",
    "base kept in int8": "precision=fp32 adapter=qlora adapter.quantise=int8",
    "base kept in FP8 blocks": "precision=fp32 adapter=qlora adapter.quantise=fp8",
    "products in FP8, a scale a tensor": "precision=fp8 precision.fp8_emulate=true",
    "products in FP8, a scale a row": "precision=fp8 precision.fp8_emulate=true precision.fp8_recipe=rowwise",
    "bf16": "precision=bf16",
}
REFERENCE = "fp32"


def main() -> int:
    args = parse_arguments()
    group = join_alone(args.threads, args.work)
    from tonnage.errors import TonnageError

    found = {}
    try:
        for name in args.cases:
            found[name] = run_case(args, name, group)
            print(f"{name}: held-out loss {found[name]['before']:.4f} to {found[name]['after']:.4f}, "
                  f"{found[name]['step_s']:.1f} s a step", flush=True)
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(page(args, found))
            gc.collect()
    except TonnageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"written: {args.output}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--global-rows", type=int, default=4)
    parser.add_argument("--micro-rows", type=int, default=1)
    parser.add_argument("--seq-tokens", type=int, default=128)
    parser.add_argument("--eval-rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "precisions")
    parser.add_argument("--output", type=Path, default=PAGE)
    return parser.parse_args()


def run_case(args, name: str, group) -> dict[str, float]:
    """Train one case; held-out loss `before` and `after`, the last step's training loss, bytes of frozen weights of the
    decoder and seconds of a step."""
    import torch

    from tonnage.config import rules
    from tonnage.config.compose import compose_config
    from tonnage.config.schema import Precision
    from tonnage.models.build import decoder_layers
    from tonnage.models.folder import resolve_folder
    from tonnage.runtime import runs
    from tonnage.train import loop
    from tonnage.train import session as sessions

    config = compose_config([
        "model=smollm2_135m", "model.attention=sdpa", "model.activation_checkpointing=none", "strategy=ddp", "gpus=1",
        "device=cpu", "data=demo", f"data.seq_tokens={args.seq_tokens}", f"batch.global_rows={args.global_rows}",
        f"batch.micro_rows={args.micro_rows}", "optimizer.learning_rate=1.0e-3", "schedule=constant",
        "schedule.warmup_steps=2", "tracker=none", "train.audit=false", f"train.max_steps={args.steps}",
        "eval.path=recipes/data/harbour_heldout.jsonl", f"eval.max_rows={args.eval_rows}", *CASES[name].split()])
    layout = rules.resolve_layout(config, 1, "cpu", 1, False)
    run = runs.create_run(str(args.work), name.replace(" ", "-").replace(",", ""), "", asdict(rules.freeze(config, layout)))
    folder = resolve_folder(config.model)
    rows = sessions.prepare_data(config, folder, progress=False)
    # of FP8, what is not within products: fp32 here, see above
    outside = mock.patch.object(Precision, "dtype", "fp32") if config.precision.name == "fp8" else contextlib.nullcontext()
    with contextlib.redirect_stdout(io.StringIO()), outside:
        session = sessions.open_session(config, run, folder, layout, 1, group, torch.device("cpu"), rows,
                                        sessions.StopRequest(run, say=False))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # not a request to save: the end of the benchmark
        session.last_saved = session.num_steps  # its weights are not wanted
        session.evaluate()
        started = time.monotonic()
        loop.train(session)
        took_s = time.monotonic() - started
    session.metrics.close()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    frozen = sum(one.nbytes for one in decoder_layers(session.engine.model).parameters() if not one.requires_grad)
    session.engine.close()
    return {"before": held_out[0], "after": held_out[-1], "step_s": took_s / args.steps, "frozen_mib": frozen / 2**20,
            "loss": [line["loss"] for line in lines if "loss" in line][-1]}


def page(args, found: dict[str, dict[str, float]]) -> str:
    """docs/precisions.md."""
    base = found.get(REFERENCE)
    lines = ["| | keys beside `adapter=lora` | decoder's frozen weights, MiB | held-out loss before | after | "
             f"less {REFERENCE} | last step |", "|---|---|---:|---:|---:|---:|---:|"]
    for name, one in found.items():
        change = "" if base is None else f"{one['after'] - base['after']:+.4f}"
        lines.append(f"| {name} | `{CASES[name]}` | {one['frozen_mib']:.0f} | {one['before']:.4f} | {one['after']:.4f} | "
                     f"{change} | {one['loss']:.4f} |")
    names = ("torch", "torchao", "bitsandbytes", "transformers", "peft")
    libraries = ", ".join(f"{name} {version(name)}" for name in names)
    return "\n".join([
        "# Precisions", "",
        "Written by `make bench-precisions` (benchmarks/precisions.py), which says how it is measured.", "",
        f"SmolLM2-135M, LoRA of rank 16 on every linear layer, {args.steps} steps of {args.global_rows} rows of up to "
        f"{args.seq_tokens} tokens of the demo's data at a learning rate of 1e-3, one seed; held out: "
        f"{args.eval_rows} rows. Measured on {time.strftime('%Y-%m-%d')}, {_processor()}, {args.threads} threads; "
        f"{libraries}.", "", *lines, "",
        "What is not in fewer bits is in fp32 but for the case bf16. Products in FP8 are emulated: numbers are rounded as "
        "FP8 units take them and multiplied in fp32. The way through the units of a GPU (torch._scaled_mm) is tested layer "
        "by layer on the CPU, tensorwise; this project has not run it on a GPU and claims no speed. What `launch/plan.py "
        "precision=fp8` says of speed is counted, not measured: without `model.compile=true` casts take back what products "
        "gain.", "",
        "`precision=fp8` uses torchao's casts (`precision.fp8_recipe=tensorwise|rowwise`). Head, embeddings, norms, "
        "routers, routed experts, adapters and layers whose dimensions are no multiples of 16 stay out; the log says how "
        "many layers compute in FP8. A frozen base costs two products, not three. Weights are gathered in bf16, with "
        "`strategy.fp8_all_gather=true` in FP8 (fsdp, hsdp; tensorwise): half the bytes, cast once a shard, the same "
        "run to the bit. On what has no FP8 units it is refused, or emulated slowly (`precision.fp8_emulate=true`).", ""])


def _processor():
    """Model of the CPU and its number of cores here."""
    file = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in file.read_text().splitlines() if line.startswith("model name")
             ] if file.is_file() else []
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
