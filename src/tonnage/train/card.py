"""The README.md of an export: what it is, how it was trained, how it is loaded; nothing that is not known."""

import json
from pathlib import Path

from tonnage.config.schema import Config
from tonnage.train.schedule import peak_learning_rate

LOADING = {
    "adapter": """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({base!r}, dtype={dtype!r})
model = PeftModel.from_pretrained(base, FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)""",
    "merged": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype={dtype!r})
tokenizer = AutoTokenizer.from_pretrained(FOLDER)"""}


def base_name(config: Config, base_folder: str) -> str:
    """How an export names its base: the hub id or folder that was given, or the folder that was made of it here."""
    given = config.model.path and "/" in config.model.path and not config.model.path.endswith(".gguf")
    return config.model.path if given and not config.model.new_tokens else base_folder


def only_here(base: str) -> str:
    """What to know about a base that is a folder of this machine; empty for a hub id."""
    return (f"the adapter refers to the base model as {base}, a folder of this machine; on another machine give "
            f"the base's path there" if Path(base).is_absolute() else "")


def model_card(config: Config, run_folder: Path, kind: str, dtype: str, base: str, step: int, merged_into: str) -> str:
    """The text, in Markdown with the hub's header.

    Args:
        merged_into: original or trained, as in `export_run`.
    """
    adapter, data, optimizer = config.adapter, config.data, config.optimizer
    head = ["---", f"library_name: {'peft' if kind == 'adapter' else 'transformers'}"]
    head += [] if Path(base).is_absolute() else [f"base_model: {base}"]
    what = "every weight" if adapter.name == "full" else (
        f"{adapter.name}, rank {adapter.rank}, alpha {adapter.alpha:g}, targets {', '.join(adapter.targets)}")
    names = ", ".join(Path(one).name if Path(one).is_absolute() else one for one in
                      ([one.path for one in data.sets] or [data.path]))
    batch = f"{config.batch.global_rows} rows" if config.batch.global_tokens is None else (
        f"up to {config.batch.global_tokens:,} tokens")
    facts = [
        ("base model", f"{config.model.name} ({base})"),
        ("this folder", "an adapter, fp32" if kind == "adapter" else f"whole weights, {dtype}" + (
            "" if adapter.name == "full" else ", the adapter merged in")),
        ("trained", what),
        ("data", f"{names}; rows of up to {data.seq_tokens:,} tokens, loss on "
                 f"{'the answers' if data.train_on == 'assistant' else 'all tokens'}"),
        ("steps", f"{step}, each of {batch}"),
        ("optimizer", f"{optimizer.name}, peak learning rate "
                      f"{peak_learning_rate(optimizer, adapter.name, config.batch.global_rows):g}, "
                      f"schedule {config.schedule.name}, seed {config.seed}"),
        ("compute precision", config.precision.name)]
    if adapter.quantise != "none":
        facts.append(("base in training", f"kept in {adapter.quantise}" + (
            f"; here it is {'as published' if merged_into == 'original' else 'what that stands for'}")))
    losses = _held_out(run_folder)
    if step in losses:
        before = f" ({losses[0]:.4f} before training)" if 0 in losses else ""
        facts.append(("held-out loss", f"{losses[step]:.4f}{before}"))
    lines = [*head, "---", "", f"# {run_folder.resolve().name}", "", "Fine-tuned with Tonnage.", "", "| | |",
             "| --- | --- |",
             *(f"| {name} | {value} |" for name, value in facts), ""]
    if kind == "adapter" and only_here(base):
        lines += [f"Note: {only_here(base)}.", ""]
    lines += ["```python", LOADING[kind].format(base=base, dtype=_torch_name(config.precision.dtype if kind == "adapter"
                                                                            else dtype)), "```", "",
              "The licences of the base model and of the data apply. Nothing beyond the loss above was evaluated."]
    return "\n".join(lines) + "\n"


def _torch_name(precision):
    return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[precision]


def _held_out(run_folder):
    """Held-out loss by step, of the last attempt that has one."""
    file = run_folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines() if '"eval_loss"' in line] if file.is_file() else []
    return {line["step"]: line["eval_loss"] for line in lines}
