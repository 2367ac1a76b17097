"""The DeepSpeed JSON: numbers, clipping and sums come from the typed config, and raw keys cannot contradict them."""

import json

import pytest

from tonnage.config.deepspeed_json import TOP_LEVEL_KEYS, deepspeed_json
from tonnage.config.schema import Config, Optimizer, Precision, Strategy
from tonnage.errors import ConfigError
from tonnage.facts.capabilities import CAPABILITIES

STAGES = range(4)
BATCH_KEYS = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}


def generated(stage=2, precision="bf16", offload="none", clip_norm=1.0, extra=None, micro_rows=4):
    config = Config(precision=Precision(name=precision), optimizer=Optimizer(clip_norm=clip_norm),
                    strategy=Strategy(offload=offload, nvme_path="/nvme", extra=extra or {}))
    return deepspeed_json(config, f"zero{stage}", micro_rows)


def refusal(extra, **keys):
    with pytest.raises(ConfigError) as error:
        generated(extra=extra, **keys)
    return str(error.value)


def leaves(value):
    return [leaf for item in value.values() for leaf in leaves(item)] if type(value) is dict else [value]


@pytest.mark.parametrize("stage", STAGES)
def test_every_combination_is_json_of_builtin_types_without_auto(stage):
    row = CAPABILITIES[f"zero{stage}"]
    for precision in row.precision:
        for offload in row.offload:
            for clip_norm in (None, 0.5):
                found = generated(stage, precision, offload, clip_norm)
                assert json.loads(json.dumps(found)) == found
                assert {type(leaf) for leaf in leaves(found)} <= {int, float, bool, str}
                assert "auto" not in leaves(found) and set(found) <= TOP_LEVEL_KEYS
                assert found["zero_optimization"]["stage"] == stage
                assert {key: found[key] for key in BATCH_KEYS} == BATCH_KEYS
                assert all(type(found[key]) is int for key in BATCH_KEYS)


@pytest.mark.parametrize("clip_norm, expected", [(None, 0.0), (1.0, 1.0), (0.01, 0.01)])
def test_clipping_is_that_of_the_config_and_none_is_off(clip_norm, expected):
    for stage in (1, 2, 3):
        assert generated(stage, clip_norm=clip_norm)["gradient_clipping"] == expected
    assert generated(0, "fp32", clip_norm=clip_norm)["gradient_clipping"] == 0.0  # the engine clips there itself


def test_sums_are_fp32_and_communication_does_not_overlap():
    for stage in (1, 2, 3):
        for precision in ("bf16", "fp16", "fp8"):
            found = generated(stage, precision)
            assert found["data_types"] == {"grad_accum_dtype": "fp32"} and found["communication_data_type"] == "fp32"
            assert found["zero_optimization"]["overlap_comm"] is False


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp8"])
def test_one_precision_at_most_is_on(precision):
    found, expected = generated(precision=precision), "bf16" if precision == "fp8" else precision
    assert {name for name in ("bf16", "fp16") if found.get(name, {}).get("enabled")} == {expected} - {"fp32"}


@pytest.mark.parametrize("offload, optimizer, weights", [
    ("none", None, None), ("optimizer", {"device": "cpu"}, None), ("all", {"device": "cpu"}, {"device": "cpu"}),
    ("nvme", {"device": "nvme", "nvme_path": "/nvme"}, {"device": "nvme", "nvme_path": "/nvme"})])
def test_offload(offload, optimizer, weights):
    zero = generated(3, offload=offload)["zero_optimization"]
    assert (zero.get("offload_optimizer"), zero.get("offload_param")) == (optimizer, weights)


# ---- strategy.extra

def test_extra_is_merged_into_sections_and_beside_them():
    found = generated(3, extra={"zero_optimization": {"stage3_prefetch_bucket_size": 5}, "aio": {"block_size": 3}})
    plain = generated(3)
    assert found["aio"] == {"block_size": 3}
    assert found["zero_optimization"] == plain["zero_optimization"] | {"stage3_prefetch_bucket_size": 5}
    assert {key: found[key] for key in plain if key != "zero_optimization"} == {
        key: plain[key] for key in plain if key != "zero_optimization"}


def test_extra_may_say_again_what_is_generated():
    assert generated(extra={"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}) == generated()


@pytest.mark.parametrize("extra, named", [
    ({"gradient_clipping": 0.5}, "strategy.extra.gradient_clipping=0.5: contradicts 1.0"),
    ({"zero_optimization": {"stage": 3}}, "strategy.extra.zero_optimization.stage=3: contradicts 2"),
    ({"zero_optimization": {"overlap_comm": True}},
     "strategy.extra.zero_optimization.overlap_comm=True: contradicts False"),
    ({"zero_optimization": 3}, "strategy.extra.zero_optimization=3: contradicts"),
    ({"gradient_accumulation_steps": 8}, "strategy.extra.gradient_accumulation_steps=8: contradicts 1"),
    ({"gradient_accumulation_steps": "1"}, "strategy.extra.gradient_accumulation_steps=1: contradicts"),
    ({"train_micro_batch_size_per_gpu": "auto"}, "strategy.extra.train_micro_batch_size_per_gpu=auto: contradicts 4"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "strategy.extra.data_types.grad_accum_dtype=bf16: contradicts fp32"),
    ({"fp16": {"enabled": True}}, "strategy.extra.fp16.enabled=True: contradicts False"),
    ({"bf16": {"enabled": False}}, "strategy.extra.bf16.enabled=False: contradicts True"),
])
def test_extra_may_not_contradict_what_is_generated(extra, named):
    assert refusal(extra).startswith(named)


@pytest.mark.parametrize("name", ["train_batch_size", "optimizer", "scheduler", "amp", "torch_autocast"])
def test_extra_may_not_set_what_the_typed_keys_decide(name):
    assert refusal({name: 64}).startswith(f"strategy.extra.{name}: is decided by ")


@pytest.mark.parametrize("name, nearest", [("zero_optimisation", "zero_optimization"), ("gradient_cliping",
                                           "gradient_clipping"), ("wall_clock_breakdwon", "wall_clock_breakdown")])
def test_an_unknown_top_level_key_is_refused_with_the_nearest(name, nearest):
    message = refusal({name: {"stage": 3}})
    assert message == f"strategy.extra.{name}: DeepSpeed has no such key; did you mean {nearest}?"
    assert refusal({"qqzz": 1}) == "strategy.extra.qqzz: DeepSpeed has no such key"


@pytest.mark.parametrize("name", ["zero_quantized_weights", "zero_quantized_nontrainable_weights",
                                  "zero_quantized_gradients"])
def test_rounded_traffic_is_refused_unless_it_is_off(name):
    message = refusal({"zero_optimization": {name: True}})
    assert message.startswith(f"strategy.extra.zero_optimization.{name}=True: what ZeRO++ sends") and "hpz_gpus" in message
    assert generated(3, extra={"zero_optimization": {name: False}})["zero_optimization"][name] is False


def test_a_second_copy_of_the_weights_is_decided_by_its_key():
    assert refusal({"zero_optimization": {"zero_hpz_partition_size": 8}}).startswith(
        "strategy.extra.zero_optimization.zero_hpz_partition_size: is decided by strategy.hpz_gpus")
    copied = deepspeed_json(Config(strategy=Strategy(hpz_gpus=4)), "zero3", 1)
    assert copied["zero_optimization"]["zero_hpz_partition_size"] == 4
    assert "zero_hpz_partition_size" not in generated(3)["zero_optimization"]


def test_extra_of_the_config_is_not_changed():
    extra = {"zero_optimization": {"sub_group_size": 5}}
    generated(extra=extra)
    assert extra == {"zero_optimization": {"sub_group_size": 5}}


def test_every_deepspeed_strategy_has_a_stage():
    assert {int(name.removeprefix("zero")) for name in ("auto", *CAPABILITIES) if name.startswith("zero")} == set(STAGES)
