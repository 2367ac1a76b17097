"""`make demo`: fine-tune SmolLM2-135M on two CPU ranks or the GPUs at hand, export it, load the export again."""

import sys
import time
from pathlib import Path

import _installed  # noqa: F401 - first
import torch

from tonnage.runtime.entry import run_script
from tonnage.runtime.runs import now

HERE = Path(__file__).parent


def run(script: str, *words: str) -> None:
    """Run a launch script; a failure ends the demo with its exit code."""
    code = run_script(HERE / script, *words)
    if code:
        sys.exit(code)


def on_gpus() -> list[str]:
    """What is different where there are GPUs."""
    count = torch.cuda.device_count()
    return [f"gpus={min(2, count)}", "precision=bf16"] if count else []


def main() -> None:
    started = time.monotonic()
    name = f"demo-{now():%Y%m%d-%H%M%S}"
    run("train.py", "recipe=smollm2_lora_cpu", f"run.name={name}", *on_gpus())
    run("export.py", f"run=outputs/{name}")
    (adapter,) = Path("outputs", name, "export").glob("adapter-step-*")
    print(f"demo: {time.monotonic() - started:.0f} s in all; the adapter is in {adapter}\n"
          f"next: source .venv/bin/activate, then the commands of README.md, Running", flush=True)


if __name__ == "__main__":
    main()
