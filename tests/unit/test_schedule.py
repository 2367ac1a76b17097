"""The learning rate by hand-computed values."""

import pytest

from tonnage.config.schema import Optimizer, Schedule
from tonnage.train.schedule import learning_rate, peak_learning_rate


def rates(num_steps, peak=1.0, **keys):
    schedule = Schedule(**keys)
    return [learning_rate(schedule, peak, step, num_steps) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize("keys, expected", [
    ({"name": "constant", "warmup_steps": 0}, [1, 1, 1, 1]),
    ({"name": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1]),
    ({"name": "linear", "warmup_steps": 0, "final_fraction": 0.0}, [0.75, 0.5, 0.25, 0]),
    ({"name": "linear", "warmup_steps": 0, "final_fraction": 0.2}, [0.8, 0.6, 0.4, 0.2]),
    ({"name": "linear", "warmup_steps": 2, "final_fraction": 0.1}, [0.5, 1, 0.55, 0.1]),
    # cosine: (1 + cos(pi t)) / 2 at t = 1/4, 1/2, 3/4, 1
    ({"name": "cosine", "warmup_steps": 0, "final_fraction": 0.0}, [0.853553391, 0.5, 0.146446609, 0]),
    ({"name": "cosine", "warmup_steps": 0, "final_fraction": 0.5}, [0.926776695, 0.75, 0.573223305, 0.5]),
    ({"name": "cosine", "warmup_steps": 2, "final_fraction": 0.1}, [0.5, 1, 0.55, 0.1]),
    ({"name": "wsd", "warmup_steps": 1, "decay_fraction": 0.5, "final_fraction": 0.0}, [1, 1, 0.5, 0]),
    ({"name": "wsd", "warmup_steps": 2, "decay_fraction": 0.25, "final_fraction": 0.2}, [0.5, 1, 1, 0.2]),
    ({"name": "wsd", "warmup_steps": 3, "decay_fraction": 1.0, "final_fraction": 0.0}, [1 / 3, 2 / 3, 1, 0]),
    ({"name": "wsd", "warmup_steps": 0, "decay_fraction": 0.0, "final_fraction": 0.0}, [1, 1, 1, 1]),
])
def test_four_steps_of_each_shape(keys, expected):
    assert rates(4, **keys) == pytest.approx(expected, abs=1e-9)
    assert rates(4, peak=2e-4, **keys) == pytest.approx([2e-4 * value for value in expected], abs=1e-12)


@pytest.mark.parametrize("num_steps", [2, 3, 10, 97, 1000])
@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_the_last_step_has_the_planned_rate_and_none_before_it(name, num_steps):
    found = rates(num_steps, name=name, final_fraction=0.1)
    assert found[-1] == pytest.approx(0.1) and min(found[len(found) // 2:-1], default=1) > 0.1
    assert max(found) == 1.0


@pytest.mark.parametrize("num_steps, warmup", [(10, 1), (33, 1), (34, 2), (100, 3), (1000, 30)])
def test_auto_warm_up_is_three_percent_rounded_up(num_steps, warmup):
    found = rates(num_steps, name="constant", warmup_steps="auto")
    assert found[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert found[warmup:] == [1.0] * (num_steps - warmup)


def test_the_rate_is_a_pure_function_of_the_step():
    schedule = Schedule(name="cosine", warmup_steps=3)
    forward = [learning_rate(schedule, 1e-3, step, 20) for step in range(1, 21)]
    backward = [learning_rate(schedule, 1e-3, step, 20) for step in range(20, 0, -1)]
    assert forward == backward[::-1]
    assert [learning_rate(schedule, 1e-3, step, 20) for step in range(11, 21)] == forward[10:]  # as after a resume


@pytest.mark.parametrize("scale_lr, global_rows, expected", [
    ("none", 512, 1e-4), ("linear", 512, 4e-4), ("sqrt", 512, 2e-4), ("linear", 32, 0.25e-4), ("sqrt", 32, 0.5e-4),
    ("linear", 128, 1e-4), ("none", None, 1e-4)])
def test_scaling_by_the_global_batch(scale_lr, global_rows, expected):
    optimizer = Optimizer(learning_rate=1e-4, scale_lr=scale_lr, base_rows=128)
    assert peak_learning_rate(optimizer, "lora", global_rows) == pytest.approx(expected)


@pytest.mark.parametrize("adapter, expected", [("full", 1e-5), ("lora", 2e-4), ("dora", 2e-4), ("rslora", 2e-4)])
def test_auto_rates(adapter, expected):
    assert peak_learning_rate(Optimizer(), adapter, 128) == expected
    assert peak_learning_rate(Optimizer(scale_lr="linear", base_rows=64), adapter, 128) == 2 * expected
    assert peak_learning_rate(Optimizer(learning_rate=3e-3), adapter, 128) == 3e-3
