"""The registry of what combines with what: every cell is either legal or refused with choices that are legal."""

import importlib.util
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tonnage.config.compose import compose_config, describe_type, schema_fields
from tonnage.config.rules import resolve_layout
from tonnage.config.schema import Adapter, Model, Optimizer, Precision, Strategy
from tonnage.errors import ConfigError
from tonnage.facts.capabilities import AXES, CAPABILITIES, violations

DEFAULTS = {"precision": "bf16", "offload": "none", "adapter": "lora", "optimizer": "adamw", "compile": False}
CHOICES = {"precision": ("bf16", "fp32", "fp16", "fp8"), "offload": ("none", "optimizer", "all", "nvme"),
           "adapter": ("full", "lora", "dora", "rslora", "qlora"), "optimizer": ("adamw", "adamw8bit", "sgd"),
           "compile": (False, True)}
CELLS = [(strategy, axis, value) for strategy in CAPABILITIES for axis, values in CHOICES.items() for value in values]

BASE = compose_config([])


def config_of(strategy, chosen):
    quantise = "nf4" if chosen["adapter"] == "qlora" else "none"
    return replace(BASE, precision=Precision(name=chosen["precision"]),
                   adapter=Adapter(name=chosen["adapter"], quantise=quantise),
                   strategy=Strategy(name=strategy, offload=chosen["offload"], nvme_path="/nvme"),
                   optimizer=Optimizer(name=chosen["optimizer"]), model=Model(path="auto", compile=chosen["compile"]))


def legal(strategy, chosen):
    return all(value in getattr(CAPABILITIES[strategy], axis) for axis, value in chosen.items())


def alternatives(message):
    """The (strategy, axis, value) that a message offers: other values here, or the same values elsewhere."""
    offer = message.split("; use ")[1]
    axis_of = {key: axis for axis, key in AXES.items()}
    for key, value in re.findall(r"([a-z.]+)=([a-z0-9|]+)", offer):
        if key == "strategy":
            yield from ((strategy, None, None) for strategy in value.split("|"))
        else:
            value = {"true": True, "false": False}.get(value, value) if key == "model.compile" else value
            yield None, axis_of[key], value


def test_the_registry_has_a_row_for_every_strategy_and_only_choices_that_exist():
    assert set(CAPABILITIES) == set(("auto", *CAPABILITIES)) - {"auto"}
    for strategy, row in CAPABILITIES.items():
        assert row.engine == ("deepspeed" if strategy.startswith("zero") else "fsdp")
        for axis, values in CHOICES.items():
            assert getattr(row, axis) and set(getattr(row, axis)) <= set(values)


def test_what_is_known_not_to_work_is_not_in_the_registry():
    assert CAPABILITIES["zero0"].precision == ("fp32",)  # sums bf16 gradients in bf16
    assert all(CAPABILITIES[f"zero{stage}"].compile == (False,) for stage in range(4))
    assert all("all" not in CAPABILITIES[name].offload for name in ("ddp", "zero0", "zero1", "zero2"))
    assert not any("nvme" in row.offload for row in CAPABILITIES.values())  # fails on frozen weights


def test_every_strategy_runs_every_optimizer():
    assert all(row.optimizer == CHOICES["optimizer"] for row in CAPABILITIES.values())


@pytest.mark.parametrize("strategy", CAPABILITIES)
def test_every_legal_cell_is_accepted_and_every_other_refused_with_legal_alternatives(strategy):
    base = DEFAULTS | {"precision": CAPABILITIES[strategy].precision[0]}
    for _, axis, value in (cell for cell in CELLS if cell[0] == strategy):
        chosen = base | {axis: value}
        if value in getattr(CAPABILITIES[strategy], axis):
            assert violations(strategy, chosen) == []
            assert resolve_layout(config_of(strategy, chosen), 4, "cuda", 4, False).strategy == strategy
            continue
        with pytest.raises(ConfigError) as error:
            resolve_layout(config_of(strategy, chosen), 4, "cuda", 4, False)
        message, = str(error.value).splitlines()
        assert message.startswith(f"{AXES[axis]}={str(value).lower()}: not with strategy={strategy} (")
        offered = list(alternatives(message))
        assert offered
        for other, other_axis, other_value in offered:
            assert legal(other or strategy, chosen if other else chosen | {other_axis: other_value})


def test_a_strategy_is_offered_only_if_it_runs_everything_that_was_chosen():
    for strategy, values in itertools.product(CAPABILITIES, itertools.product(*CHOICES.values())):
        chosen = dict(zip(CHOICES, values, strict=True))
        messages = violations(strategy, chosen)
        assert (messages == []) == legal(strategy, chosen)
        for message in messages:
            others = [other for other, _, _ in alternatives(message) if other]
            assert set(others) == {other for other in CAPABILITIES if legal(other, chosen)}


def test_the_schema_offers_what_the_registry_speaks_of():
    fields = schema_fields()
    for axis, values in CHOICES.items():
        key = {"compile": "model.compile", "offload": "strategy.offload"}.get(axis, f"{axis}.name")
        assert describe_type(fields[key].type).split(" or ") == (["true", "false"] if axis == "compile" else list(values))


@pytest.mark.parametrize("strategy", ["ddp", "hsdp", "zero1", "zero2", "zero3"])
def test_experts_are_spread_under_fsdp_alone(strategy):
    config = compose_config([f"strategy={strategy}", "strategy.expert_gpus=2"])
    with pytest.raises(ConfigError, match=rf"strategy.expert_gpus=2: not with strategy={strategy}, .*strategy=fsdp"):
        resolve_layout(config, 4, "cuda", 4, False)


@pytest.mark.parametrize("override, message", [
    ("strategy.expert_gpus=3", "strategy.expert_gpus=3: must divide gpus=4; try 2"),
    ("model.compile=true", "strategy.expert_gpus=2: not with model.compile=true"),
    ("strategy.offload=all", "strategy.expert_gpus=2: not with strategy=fsdp, strategy.offload=all")])
def test_experts_are_spread_over_a_divisor_of_gpus_that_stays_on_them(override, message):
    config = compose_config(["strategy=fsdp", "strategy.expert_gpus=2", override])
    with pytest.raises(ConfigError, match=message):
        resolve_layout(config, 4, "cuda", 4, False)


def test_deepspeeds_own_expert_parallelism_still_fails_with_transformers():
    """Where this fails, AutoEP may work: try it, and take `expert_parallel` out of DEEPSPEED_WHY."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    folder = Path(importlib.util.find_spec("deepspeed").submodule_search_locations[0])
    assert "registry.get(registry_key, _MISSING" in (folder / "module_inject/auto_ep_presets/base.py").read_text()
    with pytest.raises(TypeError):
        _CAN_RECORD_REGISTRY.get("a class", None)
