"""How fast a plan is: `launch/plan.py` as a command, start of the process included; the fastest of --repeats.

    python benchmarks/plan.py        every model of docs/models.md, and --search for the largest

Goals, of wall time on an idle machine: a plan in less than 1 s, a search in less than 5 s; exit code 1 where one is
missed. CPU time is printed beside it: far less than the wall time means that other work ran.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

from tonnage.facts.models import MODELS

ROOT = Path(__file__).resolve().parents[1]
PLAN_S, SEARCH_S = 1.0, 5.0
DOES_NOT_FIT = 3  # an answer too


def seconds(words: list[str], repeats: int) -> tuple[float, float]:
    """Wall and CPU seconds of `python launch/plan.py words`, of the fastest."""
    times = []
    for _ in range(repeats):
        started, cpu_s = time.perf_counter(), children_cpu_s()
        done = subprocess.run([sys.executable, "launch/plan.py", *words], cwd=ROOT, capture_output=True, text=True)
        times.append((time.perf_counter() - started, children_cpu_s() - cpu_s))
        if done.returncode not in (0, DOES_NOT_FIT):
            raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return min(times)


def children_cpu_s() -> float:
    """CPU seconds of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    commands = [([f"model={name}", "gpu=h200", "gpus=8"], PLAN_S) for name in MODELS]
    commands.append((["model=deepseek671b", "gpu=h200", "gpus=8", "--search"], SEARCH_S))
    missed = 0
    for words, goal_s in commands:
        taken_s, cpu_s = seconds(words, args.repeats)
        missed += taken_s >= goal_s
        print(f"{taken_s:6.2f} s  {cpu_s:6.2f} s of CPU  {'MISSED ' * (taken_s >= goal_s)}{' '.join(words)}", flush=True)
    print(f"goals, a plan in less than {PLAN_S:.0f} s and a search in less than {SEARCH_S:.0f} s: "
          f"{f'{missed} missed' if missed else 'they hold'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
