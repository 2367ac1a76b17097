"""docs/memory.md is what the planner says now, beside the figures of the last measurement; nothing is measured here."""

import json

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def benchmark():
    return load_script("benchmarks/memory")


@pytest.fixture(scope="module")
def measured(benchmark):
    return json.loads(benchmark.MEASURED.read_text())


def test_the_memory_page_is_up_to_date(benchmark, measured):
    assert benchmark.PAGE.read_text() == benchmark.page(measured), "run python benchmarks/memory.py --page"


def test_every_case_was_measured_and_lost_nothing_by_its_cut(benchmark, measured):
    found = benchmark._by_case(measured)
    assert list(found) == benchmark.cases()
    assert benchmark._loss_spread(found) < 1e-5


def test_predictions_are_within_five_percent_of_what_was_measured(benchmark, measured):
    for case, one in benchmark._by_case(measured).items():
        assert benchmark.predict(case).peak_bytes == pytest.approx(benchmark._peak(one), rel=0.05), case
