"""Benchmarks run, so that none of them rots between two measurements; what they measure here means nothing."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

from tonnage.config.compose import ROOT


@pytest.mark.slow
def test_the_overhead_benchmark_runs(tmp_path):
    words = ["--strategies", "fsdp", "--precisions", "fp32", "--repeats", "1", "--steps", "1", "--warmup-steps", "1",
             "--micro-rows", "1", "--global-rows", "2", "--seq-tokens", "192", "--threads", "1"]
    done = subprocess.run([sys.executable, "benchmarks/overhead.py", *words, "--work", tmp_path / "work", "--output",
                           tmp_path / "out.json"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["cases"]


ALL_PARTS = """
import json, gpu
for part in gpu.PARTS.values():
    try:
        found = gpu.measure(part, "cpu", True)
    except gpu.NotRun as why:
        found = {"not_run": str(why)}
    print("FOUND", json.dumps({part.name: found}), flush=True)
"""


def test_every_part_of_the_gpu_benchmark_runs_at_toy_size():
    """In one process: to import the libraries takes longer than all parts."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", ALL_PARTS], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {}
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            parts |= json.loads(line.removeprefix("FOUND "))
    for name, found in parts.items():
        assert all(4 < loss < 9 for loss in found["losses"]), name  # log 512 is 6.2
        assert found["tokens_per_s"] > 0 and found["planned_peak_bytes"] > 0, name


def test_the_gpu_benchmark_says_what_was_not_run_and_labels_a_rehearsal(tmp_path):
    words = ["--device", "cpu", "--tiny", "--parts", "loss-plain", "fp8", "--output", tmp_path / "gpu.json"]
    done = subprocess.run([ROOT / "benchmarks" / "gpu.sh", *words], env=os.environ | {"PYTHON": sys.executable},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found, table = json.loads((tmp_path / "gpu.json").read_text()), (tmp_path / "gpu.md").read_text()
    assert found["rehearsal"] and found["versions"]["torch"] and "not_run" not in found["parts"]["loss-plain"]
    assert table.startswith("REHEARSAL") and "2 layers, 128k words, plain loss | 2 x 2 |" in table


def test_the_gpu_benchmark_takes_libraries_from_wheels_and_says_which_is_missing(tmp_path):
    with zipfile.ZipFile(tmp_path / "hydra_core-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("hydra/__init__.py", "raise ImportError('this hydra is from the wheel')")
    done = subprocess.run([ROOT / "benchmarks" / "gpu.sh", "--parts", "moe", "--output", tmp_path / "gpu.json"],
                          env=os.environ | {"PYTHON": sys.executable, "WHEELS": str(tmp_path)}, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 1 and "not run: this hydra is from the wheel" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_loading_benchmark_runs_and_its_bound_holds():
    words = ["--layers", "2", "--strategies", "zero3", "--bases", "none"]
    done = subprocess.run([sys.executable, "benchmarks/loading.py", *words], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0 and "it holds" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_benchmark_of_precisions_runs(tmp_path):
    words = ["--cases", "fp32", "products in FP8, a scale a tensor", "--steps", "1", "--global-rows", "1",
             "--eval-rows", "1", "--seq-tokens", "64", "--threads", "1"]
    done = subprocess.run([sys.executable, "benchmarks/precisions.py", *words, "--work", tmp_path / "work", "--output",
                           tmp_path / "page.md"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "page.md").read_text().count("precision=fp") == 3
