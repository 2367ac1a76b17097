"""The trace on fake tensors against the same window for real, and what a trace refuses."""

import memory
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tonnage.config.compose import compose_config
from tonnage.config.rules import resolve_layout
from tonnage.errors import ConfigError
from tonnage.trace.step import _cuda_attention, trace
from tonnage.trace.tracker import PHASES, Tracker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return memory.make_folder(tmp_path_factory.mktemp("proportioned"), num_layers=2)


def traced(strategy, adapter, folder, ranks, *overrides, device="cuda"):
    config = memory.config_for(strategy, adapter, folder, ranks, overrides)
    return trace(config, resolve_layout(config, ranks, device, ranks, under_deepspeed=False))


@pytest.mark.parametrize(("strategy", "adapter", "overrides"), [
    ("fsdp", "lora", ()), ("fsdp", "lora", ("strategy.sequence_gpus=2",)),
    pytest.param("fsdp", "full", ("train.loss=plain", "model.activation_checkpointing=none"), marks=pytest.mark.slow),
    pytest.param("ddp", "full", (), marks=pytest.mark.slow)])
def test_a_trace_is_what_a_real_step_allocates(pools, folder, strategy, adapter, overrides):
    real = pools(2).run(memory.measure, strategy, adapter, folder, overrides)[0]
    fake = traced(strategy, adapter, folder, 2, *overrides, device="cpu")
    for phase in PHASES:
        assert fake.phases[phase].total == pytest.approx(real[phase]["total"], rel=1e-3), phase
        # of two moments that are as full as each other either may be the fullest: what both hold is compared
        for category in ("weights", "gradients", "optimizer states"):
            assert fake.phases[phase].by_category[category] == pytest.approx(
                real[phase]["by_category"][category], rel=1e-3, abs=4096), category


def test_states_are_exact_and_shrink_with_ranks(folder):
    num_parameters = 2 * 2048 * 256 + 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 688 + 2 * 256) + 256
    one, four = (traced("fsdp", "full", folder, ranks).phases["step"].by_category for ranks in (1, 4))
    for category, size in (("weights", 4), ("gradients", 4), ("optimizer states", 8)):
        assert one[category] == pytest.approx(size * num_parameters, rel=1e-3)
        assert four[category] == pytest.approx(one[category] / 4, rel=1e-3)


@pytest.mark.slow
def test_a_known_model_needs_no_files():
    config = compose_config(["model=llama7b", "strategy=fsdp", "gpus=8", "batch.micro_rows=1"])
    result = trace(config, resolve_layout(config, 8, "cuda", 8, under_deepspeed=False))
    base, adapter = 6_738_415_616, 39_976_960
    step = result.phases["step"].by_category
    assert step["weights"] == pytest.approx((2 * base + 4 * adapter) / 8, rel=1e-3)
    assert step["optimizer states"] == pytest.approx(8 * adapter / 8, rel=1e-3)
    # 32 layer inputs of 2,048 x 4,096 in bf16
    assert result.phases["backward"].by_category["activations"] == pytest.approx(2**29, rel=1e-2)


@pytest.mark.parametrize(("strategy", "override", "message"), [
    ("zero3", "seed=0", "strategy=zero3: cannot be traced"), ("fsdp", "strategy.offload=all", "strategy.offload=all"),
    ("fsdp", "model.compile=true", "model.compile=true"), ("fsdp", "optimizer=adamw8bit", "optimizer=adamw8bit"),
    ("fsdp", "model.path=/nowhere", "model.path=/nowhere: a trace needs")])
def test_what_cannot_be_traced_is_refused(folder, strategy, override, message):
    with pytest.raises(ConfigError, match=message):
        traced(strategy, "lora", folder, 2, override)


@pytest.mark.parametrize(("value_dim", "masked"), [(64, False), (32, False), (64, True)])
def test_attention_on_a_gpu_holds_no_softmax(value_dim, masked):
    mode = FakeTensorMode()
    with mode, Tracker(fake_mode=mode) as tracker:
        query, value = (torch.empty(1, 8, 512, dim, dtype=torch.bfloat16, requires_grad=True) for dim in (64, value_dim))
        mask = torch.ones(1, 1, 512, 512, dtype=torch.bool) if masked else None
        before = tracker.total
        out = _cuda_attention(query, query, value, mask, is_causal=not masked)
        assert out.shape == (1, 8, 512, value_dim)
        # the output, fp32 log-sums, and a mask in the type of the query, the same for all heads
        held = 8 * 512 * (2 * value_dim + 4) + masked * 2 * 512 * 512
        assert tracker.total - before == pytest.approx(held, abs=64)  # a seed
        out.sum().backward()
