"""launch/plan.py as a command: no torch, exit codes, errors, machine-readable output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAN = ROOT / "launch" / "plan.py"


def plan(*words):
    return subprocess.run([sys.executable, str(PLAN), *words], capture_output=True, text=True, timeout=120)


def test_a_plan_imports_no_torch_and_says_all_of_it():
    code = (f"import runpy, sys; sys.path.insert(0, {str(PLAN.parent)!r}); "
            f"sys.argv = ['plan.py', 'model=llama8b', 'gpu=rtx4090']\n"
            f"try: runpy.run_path({str(PLAN)!r}, run_name='__main__')\n"
            f"except SystemExit as end: code = end.code\n"
            f"heavy = sorted(set(sys.modules) & {{'torch', 'transformers', 'deepspeed', 'peft', 'numpy', 'datasets'}})\n"
            f"print('END', code, heavy)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "END 0 []" in done.stdout, done.stdout[-500:] + done.stderr[-500:]
    for word in ("backward", "fits", "host memory", "disk", "tokens/s", "USD", "kWh", "not yet measured on a GPU"):
        assert word in done.stdout, word


def test_what_does_not_fit_ends_with_3_and_says_what_does():
    done = plan("model=llama70b", "adapter=full", "gpu=rtx4090", "gpus=2")
    assert done.returncode == 3 and "does not fit" in done.stdout and "gpus=" in done.stdout


def test_json_holds_the_phases_and_the_verdict():
    done = plan("model=deepseek671b", "gpu=h200", "gpus=64", "--json")
    found = json.loads(done.stdout)
    assert found["verdict"] == "fits" and set(found["phases"]) == {"load", "forward", "loss", "backward", "step", "save"}
    assert found["peak_bytes"] == max(sum(terms.values()) for terms in found["phases"].values())
    search = json.loads(plan("model=llama7b", "gpu=rtx3090", "--search", "--json").stdout)
    assert search["tried"] >= len(search["fitting"]) > 0


@pytest.mark.parametrize("words, told", [
    (["model=llama7b"], "gpu: must be given"), (["model=llama7b", "gpu=h101"], "did you mean h100"),
    (["model=llama7b", "gpu=h100", "gpus=0"], "gpus=0"), (["model=llama7b", "gpu=other"], "gpu.memory_gib: must be given"),
    (["model=custom", "model.path=/nowhere", "gpu=h100"], "config.json"),
    (["model=llama7b", "gpu=h100", "data.seq_tokens=9999"], "data.seq_tokens=9999"),
    (["model=llama7b", "gpu=h100", "batch.micro_rows=64", "batch.global_rows=32"], "batch.micro_rows=64"),
    (["--search", "--trace"], "not together"), (["--tables", "gpus=2"], "takes no keys"),
    (["model=llama7b", "gpu=h100", "--nothing"], "unknown flag"), (["run=x"], "launch/train.py's"),
    (["model=llama7b", "gpu=h100", "gpus=12"], "cluster.gpus_per_node=8: must divide gpus=12")])
def test_bad_input_is_one_clear_error(words, told):
    done = plan(*words)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and told in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_validation_keeps_its_bounds_and_says_which_rows_it_left_out(tmp_path):
    done = plan("--validate", "--json", f"--plot={tmp_path / 'plot.png'}")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["broken"] == [] and (tmp_path / "plot.png").stat().st_size > 10_000
    judged = [row for row in found["rows"] if row["error"] is not None and row["peak_kind"] in ("allocated", "active")]
    assert len(judged) >= 150 and all(row["why"] for row in found["rows"] if row["error"] is None)
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    for file in (tmp_path / "bad.csv", tmp_path / "missing.csv"):
        done = plan("--validate", str(file))
        assert done.returncode == 2 and done.stderr.startswith(f"error: --validate {file}")
