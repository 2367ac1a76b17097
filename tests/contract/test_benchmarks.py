"""Benchmarks run, so that none of them rots between two measurements; what they measure here means nothing."""

import json
import subprocess
import sys

import pytest

from tonnage.config.compose import ROOT


def test_the_overhead_benchmark_runs(tmp_path):
    words = ["--strategies", "fsdp", "--precisions", "fp32", "--repeats", "1", "--steps", "1", "--warmup-steps", "1",
             "--micro-rows", "1", "--global-rows", "2", "--seq-tokens", "192", "--threads", "1"]
    done = subprocess.run([sys.executable, "benchmarks/overhead.py", *words, "--work", tmp_path / "work", "--output",
                           tmp_path / "out.json"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["cases"]


@pytest.mark.slow
def test_the_benchmark_of_precisions_runs(tmp_path):
    words = ["--cases", "fp32", "products in FP8, a scale a tensor", "--steps", "1", "--global-rows", "1",
             "--eval-rows", "1", "--seq-tokens", "64", "--threads", "1"]
    done = subprocess.run([sys.executable, "benchmarks/precisions.py", *words, "--work", tmp_path / "work", "--output",
                           tmp_path / "page.md"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "page.md").read_text().count("precision=fp") == 3
