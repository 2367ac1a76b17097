"""Tonnage against TRL's SFTTrainer: useful tokens per second and peak memory of the same LoRA fine-tuning on a CPU.

    python benchmarks/trl.py                     12 steps (packed: an epoch, which is less), two runs a side; 20 minutes
    python benchmarks/trl.py --steps 4 --repeats 1 --modes unpacked

Both sides: SmolLM2-135M-Instruct from one folder, LoRA of one rank on all linear layers of the decoder, recipes/data/
harbour_train.jsonl with a loss on the answers only, rows up to --seq-tokens, the same micro-batch and global batch,
fused AdamW with the same settings at a constant rate, clipping at 1.0, SDPA attention, no activation checkpointing,
one process with --threads threads. SmolLM2's chat template has no {% generation %} marks and TRL ships no training
template for it, so assistant_only_loss=True fails there; Tonnage's data code tokenises for both, and TRL gets
input_ids and labels. Unpacked, TRL reads the rows in Tonnage's order (sequential sampler), so step n has the same rows
on both sides; that the label tokens of every step are equal is checked, and that the first loss is, is printed. Packed,
each side packs the same samples by its own best fit (TRL: packing_strategy="bfd"), so rows differ and totals are equal.

Precision bf16 is bf16=True on a base loaded in bf16 (SFTTrainer alone would load it in fp32). Trained weights, their
gradients and AdamW states are fp32 on both sides. Tonnage computes in bf16 throughout but for norms, softmax and loss;
TRL under autocast. The dtypes of the parameters are read off the models and printed.

A measurement is a process of its own. Tonnage's is launch/train.py as a user starts it, timed by the step_s of its
metrics.jsonl, which includes making the batch; TRL's goes from on_step_begin to on_step_end, which does not. Loading,
saving and the first step (--warmup-steps) are not counted. Peak memory is the resident peak of the whole process
as the kernel gives it at its end. Runs alternate, Tonnage TRL Tonnage TRL. The machine must be idle: threads that wait
in turn for a core that is busy elsewhere slow a step several times, on whichever side it happens.

On a CPU TRL's loss goes over every position; on GPUs with Triton, like Tonnage's, over those with labels only.

TRL lives in an environment of its own, build/trl-venv, made on first use from benchmarks/trl_requirements.txt.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "benchmarks" / "trl_requirements.txt"
ALPHA, BETAS, EPS, CLIP = 32, (0.9, 0.95), 1e-8, 1.0
# name of a figure -> (title, decimals)
FIGURES = {"label_tokens_per_s": ("label tokens/s", 1), "input_tokens_per_s": ("tokens/s", 1),
           "step_s": ("median s/step", 3), "peak_gib": ("peak memory GiB", 3)}


class BenchmarkError(Exception):
    """Something that makes the comparison fail; the text is for the user."""


def main() -> int:
    args = parse_arguments()
    if args.worker:
        spec = json.loads(Path(args.worker[1]).read_text())
        {"export": export_samples, "trl": train_with_trl}[args.worker[0]](spec)
        return 0
    try:
        compare(args)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=("unpacked", "packed"), default=["unpacked", "packed"])
    parser.add_argument("--repeats", type=int, default=2, help="runs of each side (default 2)")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run at most; 0: the whole epoch (default 12)")
    parser.add_argument("--warmup-steps", type=int, default=1, help="first steps that are not counted (default 1)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--micro-rows", type=int, default=4)
    parser.add_argument("--global-rows", type=int, default=8)
    parser.add_argument("--seq-tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16, help="LoRA rank (default 16)")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--threads", type=int, default=2, help="threads of each process (default 2)")
    parser.add_argument("--strategy", default="ddp", help="Tonnage's strategy (default ddp)")
    parser.add_argument("--trl-python", type=Path, help="a Python that has TRL (default: build/trl-venv, made if needed)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "trl", help="folder for runs and logs")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "trl.json", help="results as JSON")
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "SPEC"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.global_rows % args.micro_rows:
        parser.error("--global-rows must be a multiple of --micro-rows: SFTTrainer knows no other global batch")
    if 0 < args.steps <= args.warmup_steps:
        parser.error("--steps must be above --warmup-steps")
    return args


# ---- the driver: standard library only, and small, since a child's peak begins with its parent's size


def compare(args: argparse.Namespace) -> None:
    """Run both sides in turn for each mode, print the tables, write the JSON."""
    args.work = args.work.resolve()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    trl_python = args.trl_python or make_environment(ROOT / "build" / "trl-venv")
    data = {mode: worker(sys.executable, "export", spec(args, mode), args, f"export-{mode}")[0] for mode in args.modes}
    results = {"settings": {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()
                            if key != "worker"}, "machine": machine(), "modes": {}}
    for mode in args.modes:
        runs = {"tonnage": [], "trl": []}
        for repeat in range(args.repeats):
            for side in runs:
                name = f"{side}-{mode}-{repeat}"
                run = (run_tonnage(args, mode, name) if side == "tonnage" else
                       run_trl(args, mode, name, trl_python, data[mode]["windows"]))
                run |= figures(run["steps"][args.warmup_steps:]) | {"load_1m": round(os.getloadavg()[0], 2)}
                runs[side].append(run)
                print(f"{mode} {repeat + 1}/{args.repeats} {side:8}{run['label_tokens_per_s']:9.1f} label tokens/s"
                      f"{run['input_tokens_per_s']:9.1f} tokens/s{run['peak_gib']:8.2f} GiB, {len(run['steps'])} steps",
                      flush=True)
        check_equal(mode, data[mode], runs, args.steps)
        results["modes"][mode] = summarise(mode, data[mode], runs)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten: {args.output}")


def make_environment(folder: Path) -> Path:
    """The Python of an environment with what trl_requirements.txt pins; made, or completed, where it is not yet."""
    python = folder / "bin" / "python"
    wanted = dict(line.split("==") for line in REQUIREMENTS.read_text().split() if "==" in line and line[0] != "#")
    code = "import sys, importlib.metadata as m; print(*[m.version(name).split('+')[0] for name in sys.argv[1:]])"
    if python.exists():
        found = subprocess.run([python, "-c", code, *wanted], capture_output=True, text=True, check=False)
        if found.stdout.split() == list(wanted.values()):
            return python
    print(f"making {folder} from {REQUIREMENTS.name}", flush=True)
    torch = f"torch=={wanted['torch']}"  # first and alone, so that pip takes the build this machine is set up for
    for command in ([sys.executable, "-m", "venv", folder], [python, "-m", "pip", "install", "-q", torch],
                    [python, "-m", "pip", "install", "-q", "-r", REQUIREMENTS]):
        if subprocess.run(command, check=False).returncode:
            raise BenchmarkError(f"could not run {' '.join(map(str, command))}; --trl-python names a Python that has TRL")
    return python


def overrides(args: argparse.Namespace, mode: str) -> list[str]:
    """Tonnage's command line of a mode."""
    return [
        "model=smollm2_135m", "model.attention=sdpa", "model.activation_checkpointing=none", "adapter=lora",
        f"adapter.rank={args.rank}", f"adapter.alpha={ALPHA}", f"precision={args.precision}", f"strategy={args.strategy}",
        "gpus=1", "device=cpu", f"cpu_threads={args.threads}", "data=demo", f"data.seq_tokens={args.seq_tokens}",
        f"data.packing={str(mode == 'packed').lower()}", f"batch.global_rows={args.global_rows}",
        f"batch.micro_rows={args.micro_rows}", "optimizer=adamw", f"optimizer.learning_rate={args.learning_rate}",
        f"optimizer.betas=[{BETAS[0]},{BETAS[1]}]", f"optimizer.eps={EPS}", f"optimizer.clip_norm={CLIP}",
        "schedule=constant", "schedule.warmup_steps=0", "train.epochs=1", "tracker=none", "seed=0",
        *([f"train.max_steps={args.steps}"] if args.steps else [])]


def spec(args: argparse.Namespace, mode: str) -> dict:
    """What a worker needs to know."""
    names = ("steps", "precision", "micro_rows", "global_rows", "seq_tokens", "rank", "learning_rate", "threads")
    return {name: getattr(args, name) for name in names} | {
        "packed": mode == "packed", "overrides": overrides(args, mode), "samples": str(args.work / f"samples-{mode}.jsonl")}


def measured(command: list, args: argparse.Namespace, name: str) -> float:
    """Run a command to its end, output to a log; returns the peak of its resident memory in GiB."""
    log = args.work / f"{name}.log"
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1",
                        "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=ROOT, env=env)
        _, status, usage = os.wait4(process.pid, 0)  # of this child alone, where getrusage takes the largest of all
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise BenchmarkError(f"{name} ended with exit code {process.returncode}; the end of {log}:\n{tail}")
    return usage.ru_maxrss / 2**20


def worker(python: str | Path, kind: str, what: dict, args: argparse.Namespace, name: str) -> tuple[dict, float]:
    """Run this file as a worker; returns what it wrote and its peak memory in GiB."""
    file = args.work / f"{name}.json"
    file.write_text(json.dumps(what | {"result": str(args.work / f"{name}-result.json")}))
    # -P: without it the folder of this file comes first on the path, and `import trl` would find this file
    peak_gib = measured([python, "-P", __file__, "--worker", kind, file], args, name)
    return json.loads((args.work / f"{name}-result.json").read_text()), peak_gib


def run_tonnage(args: argparse.Namespace, mode: str, name: str) -> dict:
    """One run of launch/train.py: its steps and peak memory."""
    runs = args.work / "runs"
    peak_gib = measured([sys.executable, ROOT / "launch" / "train.py", *overrides(args, mode), f"run.root={runs}",
                         f"run.name={name}"], args, name)
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(runs / name / "checkpoints")
    names = ("loss", "step_s", "input_tokens", "label_tokens", "grad_norm")
    return {"steps": [{key: line[key] for key in names} for line in lines], "peak_gib": peak_gib}


def run_trl(args: argparse.Namespace, mode: str, name: str, python: Path, windows: int) -> dict:
    """One run of SFTTrainer: its steps and peak memory, and what it says of itself."""
    # Tonnage ends with the epoch, SFTTrainer's max_steps goes on into the next
    steps = args.steps if args.steps and args.steps < windows else None
    result, peak_gib = worker(python, "trl", spec(args, mode) | {"steps": steps}, args, name)
    return result | {"peak_gib": peak_gib}


def figures(steps: list[dict]) -> dict:
    """Speed over the counted steps."""
    total_s = sum(step["step_s"] for step in steps)
    return {"label_tokens_per_s": sum(step["label_tokens"] for step in steps) / total_s,
            "input_tokens_per_s": sum(step["input_tokens"] for step in steps) / total_s,
            "step_s": statistics.median(step["step_s"] for step in steps)}


def check_equal(mode: str, data: dict, runs: dict, steps: int | None) -> None:
    """Both sides must have trained the same tokens: unpacked step by step, packed over the epoch."""
    for run in runs["trl"]:
        if run["data_label_tokens"] != data["label_tokens"]:
            raise BenchmarkError(f"{mode}: {data['label_tokens']} label tokens in Tonnage's data, "
                                 f"{run['data_label_tokens']} in TRL's; the runs cannot be compared")
    ours, theirs = ([[step[key] for step in runs[side][0]["steps"]] for key in ("label_tokens", "input_tokens")]
                    for side in ("tonnage", "trl"))
    if mode == "packed":
        ours, theirs = ([sum(counts) for counts in side] for side in (ours, theirs))
    if ours != theirs and (mode == "unpacked" or steps is None):
        raise BenchmarkError(f"{mode}: label and input tokens differ: Tonnage {ours}, TRL {theirs}")


def summarise(mode: str, data: dict, runs: dict) -> dict:
    """Print the table of a mode; returns it with all runs."""
    trl = runs["trl"][0]
    totals = {side: sum(step["label_tokens"] for step in runs[side][0]["steps"]) for side in runs}
    first = {side: runs[side][0]["steps"][0]["loss"] for side in runs}
    print(f"\n{mode}: {data['samples']} samples, {data['label_tokens']:,} label tokens of {data['input_tokens']:,}; label "
          f"tokens trained in a run: Tonnage {totals['tonnage']:,}, TRL {totals['trl']:,}")
    print(f"  rows: Tonnage {data['rows']}, TRL {trl['rows']}; loss of the first step: Tonnage {first['tonnage']:.4f}, TRL "
          f"{first['trl']:.4f}" + (" (other rows)" if mode == "packed" else " (same rows)"))
    print(f"  Tonnage keeps {data['dtypes']}\n  TRL keeps {trl['dtypes']}, computes under {trl['autocast']}; attention "
          f"{trl['attention']}; its assistant_only_loss here: {trl['assistant_only_loss']}")
    if mode == "packed":
        apart = trl["packed_difference"]
        print(f"  TRL's packed samples {'do not see' if apart < 0.03 else 'SEE'} each other (logits differ by {apart:.1g} "
              f"from those alone); its micro-batch is one row of up to {trl['longest_row']:,} tokens")
    print(f"\n  {'':18}{'side':10}{'min':>10}{'median':>10}{'max':>10}{'Tonnage/TRL':>14}")
    summary = {}
    for key, (title, decimals) in FIGURES.items():
        values = {side: sorted(run[key] for run in runs[side]) for side in runs}
        median = {side: statistics.median(numbers) for side, numbers in values.items()}
        ratio = median["tonnage"] / median["trl"]
        for side, name in (("tonnage", "Tonnage"), ("trl", "TRL")):
            low, high = values[side][0], values[side][-1]
            print(f"  {title if side == 'tonnage' else '':18}{name:10}{low:10.{decimals}f}{median[side]:10.{decimals}f}"
                  f"{high:10.{decimals}f}" + (f"{ratio:14.2f}" if side == "tonnage" else ""))
        summary[key] = {**{side: {"min": numbers[0], "median": median[side], "max": numbers[-1]}
                           for side, numbers in values.items()}, "tonnage_over_trl": ratio}
    print()
    return {"data": data, "summary": summary, "runs": runs}


def machine() -> dict:
    """What the figures were made on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"cpu": name, "cores": os.cpu_count(), "python": sys.version.split()[0]}


# ---- workers


def export_samples(what: dict) -> None:
    """In Tonnage's environment: the tokenised samples in the order of its windows, for TRL, and counts."""
    import torch

    from tonnage.config.batch import resolve_batch
    from tonnage.config.compose import compose_config
    from tonnage.data.windows import Cursor
    from tonnage.models import build
    from tonnage.models.folder import resolve_folder
    from tonnage.train.session import prepare_data
    from tonnage.train.source import PreparedSource

    config = compose_config(what["overrides"])
    folder = resolve_folder(config.model)
    rows, _ = prepare_data(config, folder, progress=False)
    samples, _ = prepare_data(compose_config([*what["overrides"], "data.packing=false"]), folder, progress=False)
    source = PreparedSource(samples, config.seed, resolve_batch(config.batch, 1, config.data.seq_tokens))
    cursor = Cursor()
    with open(what["samples"], "w") as output:
        while cursor.epoch == 0:
            window, cursor = source.next(cursor)
            for row in window:
                output.write(json.dumps({"input_ids": row.tokens.tolist(), "labels": row.labels.tolist()}) + "\n")
    with torch.device("meta"):
        model = build.build_model(folder, config.model, config.adapter, "sdpa", build.DTYPES[config.precision.name],
                                  torch.float32)
    model.get_base_model().tie_weights()  # loading does it in a run
    write_result(what, {
        "folder": folder, "samples": len(samples), "rows": len(rows), "windows": -(-len(rows) // what["global_rows"]),
        "label_tokens": int(rows.label_tokens.sum()), "input_tokens": int(rows.input_tokens.sum()),
        "dtypes": describe_dtypes(model)})


def train_with_trl(what: dict) -> None:
    """In TRL's environment: one SFTTrainer run, its optimizer steps timed by a callback."""
    import time

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Clock(TrainerCallback):
        def __init__(self):
            self.step_s, self.losses, self.norms = [], [], []

        def on_step_begin(self, args, state, control, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            self.step_s.append(time.perf_counter() - self.started)

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                self.losses.append(logs["loss"])
                self.norms.append(logs["grad_norm"])

    torch.set_num_threads(what["threads"])
    work = Path(what["result"]).parent
    folder = json.loads(next(work.glob("export-*-result.json")).read_text())["folder"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = Dataset.from_list([json.loads(line) for line in Path(what["samples"]).read_text().splitlines()])
    bf16 = what["precision"] == "bf16"
    config = SFTConfig(
        output_dir=str(work / "trl-output"), max_length=what["seq_tokens"], packing=what["packed"], packing_strategy="bfd",
        per_device_train_batch_size=what["micro_rows"], learning_rate=what["learning_rate"], num_train_epochs=1,
        gradient_accumulation_steps=what["global_rows"] // what["micro_rows"], max_steps=what["steps"] or -1,
        lr_scheduler_type="constant", warmup_steps=0, optim="adamw_torch_fused", adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        adam_epsilon=EPS, weight_decay=0.0, max_grad_norm=CLIP, bf16=bf16, gradient_checkpointing=False, use_cpu=True,
        train_sampling_strategy="sequential", logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False, seed=0,
        model_init_kwargs={"dtype": "bfloat16" if bf16 else "float32", "attn_implementation": "sdpa"})
    lora = LoraConfig(r=what["rank"], lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear",
                      task_type="CAUSAL_LM")
    clock = Clock()
    trainer = SFTTrainer(folder, args=config, train_dataset=data, processing_class=tokenizer, peft_config=lora,
                         callbacks=[clock])
    trainer.train()
    counts = count_tokens(trainer, what["global_rows"] // what["micro_rows"], len(clock.step_s))
    steps = [{"loss": loss, "step_s": step_s, "input_tokens": tokens, "label_tokens": labels, "grad_norm": norm}
             for loss, step_s, (labels, tokens), norm in zip(clock.losses, clock.step_s, counts, clock.norms, strict=True)]
    write_result(what, {
        "steps": steps, "rows": len(trainer.train_dataset), "dtypes": describe_dtypes(trainer.model),
        "data_label_tokens": sum(label != -100 for row in trainer.train_dataset["labels"] for label in row),
        "longest_row": what["micro_rows"] * what["seq_tokens"] if trainer.padding_free else what["seq_tokens"],
        "autocast": f"autocast to {config.mixed_precision}" if bf16 else "no autocast",
        "attention": trainer.model.config._attn_implementation, "assistant_only_loss": assistant_only_loss(tokenizer),
        "packed_difference": packed_difference(trainer, torch) if what["packed"] else None})


def count_tokens(trainer, micros: int, num_steps: int) -> list[tuple[int, int]]:
    """(label tokens, non-padding tokens) of each step, counted on the batches that TRL's own loader makes."""
    counts = []
    for number, batch in enumerate(trainer.get_train_dataloader()):
        if number % micros == 0:
            counts.append((0, 0))
        tokens = batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
        labels, seen = counts[-1]
        counts[-1] = labels + int((batch["labels"][:, 1:] != -100).sum()), seen + int(tokens)
    return counts[:num_steps]


def packed_difference(trainer, torch) -> float:
    """Relative difference of a sample's logits behind another in a packed row and alone, by TRL's own collator."""
    first, second = list(range(100, 124)), list(range(500, 516))
    collator, model = trainer.data_collator, trainer.model
    logits = []
    for examples in ([{"input_ids": first + second, "seq_lengths": [24, 16]}],
                     [{"input_ids": second, "seq_lengths": [16]}]):
        inputs = {key: value for key, value in collator(examples).items() if key != "labels"}
        with torch.no_grad():
            logits.append(model(**inputs, use_cache=False).logits[0, -16:].float())
    return float((logits[0] - logits[1]).norm() / logits[1].norm())


def assistant_only_loss(tokenizer) -> str:
    """Whether TRL can mask by roles on this template, in its own words where it cannot."""
    from trl.chat_template_utils import get_training_chat_template

    try:
        get_training_chat_template(tokenizer)
    except Exception as error:  # what TRL raises is what is reported
        return f"not possible ({type(error).__name__}: {str(error).strip().split(' (')[0][:90]})"
    return "possible"


def describe_dtypes(model) -> str:
    """`frozen 134.5M bfloat16, trained 4.9M float32`."""
    counts: dict[tuple[bool, str], int] = {}
    for parameter in model.parameters():
        key = parameter.requires_grad, str(parameter.dtype).removeprefix("torch.")
        counts[key] = counts.get(key, 0) + parameter.numel()
    return ", ".join(f"{'trained' if trained else 'frozen'} {count / 1e6:.1f}M {dtype}"
                     for (trained, dtype), count in sorted(counts.items()))


def write_result(what: dict, result: dict) -> None:
    Path(what["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
