"""The table of GPUs: sane numbers, sources, and the names on a command line."""

import dataclasses

import pytest

from tonnage.config.compose import compose_config, groups
from tonnage.errors import ConfigError
from tonnage.facts.gpus import GPUS, gpu_of

NUMBERS = [field.name for field in dataclasses.fields(next(iter(GPUS.values()))) if "float" in str(field.type)]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_numbers_are_positive_and_agree_with_each_other(gpu):
    assert all(value is None or value > 0 for value in (getattr(gpu, name) for name in NUMBERS))
    assert gpu.memory_gib <= (gpu.driver_memory_gib or gpu.memory_gib)
    assert gpu.fp8_tflops is None or 1.9 < gpu.fp8_tflops / gpu.bf16_tflops < 2.1
    assert gpu.matmul_tflops is None or 0.5 < gpu.matmul_tflops / gpu.bf16_tflops < 1
    assert gpu.link_gb_s == gpu.host_link_gb_s if gpu.has_pcie_only else gpu.link_gb_s > 100


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_every_number_has_a_source_or_a_note(gpu):
    assert gpu.source
    assert gpu.power_w or "power unsourced" in gpu.notes
    prices = (gpu.price_low_usd_h, gpu.price_high_usd_h)
    if any(prices):
        assert prices[0] <= prices[1] and gpu.price_date[:2] == "20" and gpu.price_source
    else:
        assert gpu.price_date is gpu.price_source is None and ("no price" in gpu.notes or "without a date" in gpu.notes)


def test_names_resolve_on_the_command_line():
    assert set(groups()["gpu"]) == {"auto", "other", *GPUS} and len(GPUS) == 18
    config = compose_config(["gpu=rtx4090", "gpu.price_usd_h=0.5", "cluster.network_gb_s=25"])
    assert (config.gpu.name, config.gpu.price_usd_h, config.cluster.network_gb_s) == ("rtx4090", 0.5, 25)
    assert compose_config([]).gpu.name == "auto" and compose_config([]).cluster.network_gb_s == "auto"
    with pytest.raises(ConfigError, match="gpu=rtx4091: no such choice; did you mean rtx4090"):
        compose_config(["gpu=rtx4091"])


def test_what_the_user_says_goes_over_the_table():
    assert gpu_of("auto") is None and gpu_of("h100") is GPUS["h100"]
    mine = gpu_of("rtx4090", memory_gib=22.0, price_usd_h=0.1)
    assert (mine.memory_gib, mine.price_low_usd_h, mine.price_high_usd_h) == (22.0, 0.1, 0.1)
    assert mine.bf16_tflops == GPUS["rtx4090"].bf16_tflops
    other = gpu_of("other", memory_gib=16)
    assert other.memory_gib == 16 and other.bf16_tflops is None and other.price_low_usd_h is None
    with pytest.raises(ConfigError, match="gpu.memory_gib: must be given"):
        gpu_of("other")
