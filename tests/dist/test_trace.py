"""The trace on fake tensors against the same window for real, and what a trace refuses."""

import memory
import pytest

from tonnage.config.rules import resolve_layout
from tonnage.errors import ConfigError
from tonnage.trace.step import trace
from tonnage.trace.tracker import PHASES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return memory.make_folder(tmp_path_factory.mktemp("proportioned"), num_layers=2)


def traced(strategy, adapter, folder, ranks, *overrides, device="cuda"):
    config = memory.config_for(strategy, adapter, folder, ranks, overrides)
    return trace(config, resolve_layout(config, ranks, device, ranks, under_deepspeed=False))


@pytest.mark.parametrize(("strategy", "adapter", "overrides"), [
    ("fsdp", "lora", ()), ("fsdp", "full", ("train.loss=plain", "model.activation_checkpointing=none")),
    ("ddp", "full", ())])
def test_a_trace_is_what_a_real_step_allocates(pools, folder, strategy, adapter, overrides):
    real = pools(2).run(memory.measure, strategy, adapter, folder, overrides)[0]
    fake = traced(strategy, adapter, folder, 2, *overrides, device="cpu")
    for phase in PHASES:
        assert fake.phases[phase].total == pytest.approx(real[phase]["total"], rel=1e-3), phase
        for category, num_bytes in real[phase]["by_category"].items():
            # a few numbers of 4 bytes, and scalars that autograd makes
            assert fake.phases[phase].by_category[category] == pytest.approx(num_bytes, rel=1e-3, abs=4096), category


def test_states_are_exact_and_shrink_with_ranks(folder):
    num_parameters = 2 * 2048 * 256 + 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 688 + 2 * 256) + 256
    one, four = (traced("fsdp", "full", folder, ranks).phases["step"].by_category for ranks in (1, 4))
    for category, size in (("weights", 4), ("gradients", 4), ("optimizer states", 8)):
        assert one[category] == pytest.approx(size * num_parameters, rel=1e-3)
        assert four[category] == pytest.approx(one[category] / 4, rel=1e-3)


@pytest.mark.parametrize(("strategy", "override", "message"), [
    ("zero3", "seed=0", "strategy=zero3: DeepSpeed does not run"), ("fsdp", "strategy.offload=all", "strategy.offload=all"),
    ("fsdp", "model.compile=true", "model.compile=true"), ("fsdp", "optimizer=adamw8bit", "optimizer=adamw8bit"),
    ("fsdp", "model.path=/nowhere", "model.path=/nowhere: a trace needs")])
def test_what_cannot_be_traced_is_refused(folder, strategy, override, message):
    with pytest.raises(ConfigError, match=message):
        traced(strategy, "lora", folder, 2, override)
