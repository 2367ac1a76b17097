"""Predicted beside measured: plan.json of a run folder."""

import json
from pathlib import Path
from statistics import median

FILE = "plan.json"


def write(folder: Path, attempt: int, plan: dict) -> None:
    """Keep the plan of an attempt (plan.text.as_dict)."""
    (folder / FILE).write_text(json.dumps(plan | {"attempt": attempt}, indent=2) + "\n")


def compare(folder: Path, attempt: int) -> None:
    """Add what rank 0 measured in this attempt to its plan; nothing where there is no plan or no step was taken.

    Memory is what torch allocated on a GPU, and on a CPU what the whole process held, libraries included.
    """
    file, metrics = folder / FILE, folder / "metrics.jsonl"
    if not file.is_file() or not metrics.is_file():
        return
    plan = json.loads(file.read_text())
    steps = [line for line in map(json.loads, metrics.read_text().splitlines())
             if line.get("attempt") == attempt and "step_s" in line]
    if plan["attempt"] != attempt or not steps:
        return
    cuda = plan["layout"]["device"] == "cuda"
    plan["measured"] = {"peak_gib": max(line["memory_gib"] for line in steps),
                        "peak_kind": "allocated" if cuda else "resident",
                        "step_s": median(line["step_s"] for line in steps),
                        "tokens_per_s": median(line["input_tokens_per_s"] for line in steps)}
    file.write_text(json.dumps(plan, indent=2) + "\n")
