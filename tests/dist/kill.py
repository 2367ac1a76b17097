"""Runs that are killed with SIGKILL and go on: the final weights are byte-equal to those of a run never killed.

    python tests/dist/kill.py --runs 20

In turn on zero3 and fsdp, 2 ranks; one rank or every process at once; at a random moment or in the middle of a save.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]

from tiny import make_chat_model, make_chats  # noqa: E402

from tonnage.runtime.runs import read_status  # noqa: E402
from tonnage.train.checkpoint import StoredTensors  # noqa: E402

STEPS, EVERY = 24, 2


def command(*words: str) -> list[str]:
    return [sys.executable, str(ROOT / "launch" / "train.py"), *words]


def new_run(folder: Path, model: str, data: str, strategy: str, name: str) -> list[str]:
    """Two ranks, full fine-tuning in fp32, three epochs, a checkpoint every other step."""
    return command("model=custom", f"model.path={model}", f"data.path={data}", "data=files", f"strategy={strategy}", "gpus=2",
                   "device=cpu", "adapter=full", "precision=fp32", "batch.global_rows=6", "batch.micro_rows=2",
                   "data.seq_tokens=64", "train.epochs=3", f"checkpoint.every_steps={EVERY}", "tracker=none",
                   "optimizer.learning_rate=1e-3", f"run.root={folder}", f"run.name={name}", f"data.cache={folder}/cache")


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer states of the last checkpoint."""
    stored = StoredTensors(sorted((run / "checkpoints").glob("step-*"))[-1])
    return {name: stored[name] for name in stored.shapes}


def descendants(pid: int) -> list[int]:
    """Process ids of all children and theirs."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(one) for one in found] + [deeper for one in found for deeper in descendants(int(one))]


def kill_once(process: subprocess.Popen, run: Path, rng: random.Random, during_save: bool, everyone: bool) -> str:
    """Wait for a moment, kill, wait for the end; says what happened."""
    wait_for(lambda: read_status(run).get("step", 0) >= 1 or process.poll() is not None, 120)
    if during_save:
        wait_for(lambda: list((run / "checkpoints").glob(".writing-*")) or process.poll() is not None, 60)
    else:
        time.sleep(rng.uniform(0.0, 0.8))
    ranks = [pid for pid in descendants(process.pid) if b"train.py" in _command_line(pid)]
    victims = [process.pid, *ranks] if everyone else ranks[-1:] if rng.random() < 0.5 else ranks[:1]
    step = read_status(run).get("step")
    if process.poll() is not None:
        return "ended before the kill"
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    process.wait(60)
    wait_for(lambda: not any(_command_line(pid) for pid in ranks), 60)
    return f"{'all' if everyone else 'one rank'} killed{' in a save' if during_save else ''} around step {step}"


def _command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for(condition, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit_s} s")
        time.sleep(0.002)


def finish(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, different, killed = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data = make_chat_model(folder / "model"), make_chats(folder / "chats.jsonl", 48)
        expected = {}
        for strategy in ("zero3", "fsdp"):
            finish(new_run(folder, model, data, strategy, f"whole-{strategy}"))
            expected[strategy] = weights(folder / f"whole-{strategy}")
        for number in range(options.runs):
            strategy = ("zero3", "fsdp")[number % 2]
            run = folder / f"run-{number}"
            process = subprocess.Popen(new_run(folder, model, data, strategy, run.name), stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
            what = kill_once(process, run, rng, during_save=number % 3 == 2, everyone=number // 2 % 2 == 1)
            killed += what != "ended before the kill"
            if read_status(run)["state"] != "done":
                finish(command(f"run={run}"))
            found = weights(run)
            equal = found.keys() == expected[strategy].keys() and all(
                torch.equal(found[key], expected[strategy][key]) for key in found)
            different += not equal
            print(f"{number + 1:3d}  {strategy:<6} {what:<44} {'byte-equal' if equal else 'DIFFERENT'}", flush=True)
    print(f"{options.runs} runs, {killed} killed, {different} different")
    return 1 if different or killed < options.runs * 0.8 else 0


if __name__ == "__main__":
    sys.exit(main())
