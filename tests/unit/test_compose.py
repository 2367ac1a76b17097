"""Composing: precedence, keys that do not exist, values of the wrong type, sweeps, and what comes out."""

import dataclasses
import json
from pathlib import Path

import pytest

from tonnage.config import compose as module
from tonnage.config.compose import compose_config, expand_sweep, parse_command_line, schema_fields, to_schema
from tonnage.config.schema import Config
from tonnage.errors import ConfigError


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a recipe and returns the override that names it."""
    monkeypatch.setattr(module, "RECIPES", tmp_path)

    def write(text, name="mine"):
        (tmp_path / f"{name}.yaml").write_text(text)
        return f"recipe={name}"
    return write


def refusal(*overrides):
    """The message that `overrides` are refused with."""
    with pytest.raises(ConfigError) as error:
        compose_config(overrides)
    return str(error.value)


# ---- precedence

def test_defaults_are_a_complete_run():
    config = compose_config([])
    assert (config.model.name, config.adapter.name, config.strategy.name) == ("smollm2_135m", "lora", "auto")
    assert config.data.path == str(module.ROOT / "recipes/data/harbour_train.jsonl") and config.data.seq_tokens == 2048


def test_recipe_goes_over_defaults_and_command_line_over_recipe(recipe):
    name = recipe("adapter.rank: 4\ntrain: {epochs: 3, max_steps: 9}\nprecision: fp32\n")
    from_recipe = compose_config([name])
    assert (from_recipe.adapter.rank, from_recipe.train.epochs, from_recipe.train.max_steps) == (4, 3, 9)
    assert from_recipe.precision.name == "fp32" and from_recipe.adapter.alpha == 32.0
    for overrides in ([name, "adapter.rank=8", "precision=fp16"], ["adapter.rank=8", "precision=fp16", name]):
        typed = compose_config(overrides)
        assert (typed.adapter.rank, typed.precision.name, typed.train.epochs) == (8, "fp16", 3)


def test_a_choice_on_the_command_line_goes_over_what_the_recipe_says_for_that_choice(recipe):
    name = recipe("model: custom\nmodel.path: /mine\nmodel.compile: true\noptimizer.learning_rate: 0.5\n")
    assert compose_config([name]).model.path == "/mine"
    typed = compose_config([name, "model=llama7b", "optimizer=sgd"])
    assert typed.model.path == "meta-llama/Llama-2-7b-hf" and typed.model.compile is True
    assert typed.optimizer.learning_rate == 0.01  # of the preset sgd
    assert compose_config([name, "model=custom"]).model.path == "/mine"  # the recipe's own choice, said again
    assert compose_config([name, "model=llama7b", "model.path=/x"]).model.path == "/x"


def test_a_key_goes_over_a_choice_in_any_order_and_the_last_of_two_counts():
    for overrides in (["optimizer=sgd", "optimizer.learning_rate=3"], ["optimizer.learning_rate=3", "optimizer=sgd"]):
        assert compose_config(overrides).optimizer.learning_rate == 3.0
    assert compose_config(["gpus=2", "gpus=3"]).gpus == 3


def test_overrides_go_over_the_config_of_a_former_run():
    base = dataclasses.asdict(compose_config(["adapter.rank=64", "seed=7", "strategy.extra.aio.block_size=3"]))
    again = compose_config(["seed=8"], base)
    assert (again.adapter.rank, again.seed, again.strategy.extra) == (64, 8, {"aio": {"block_size": 3}})
    assert compose_config([], base) == to_schema(base)
    older = {key: value for key, value in base.items() if key != "gpu"}  # written before the group was there
    assert compose_config(["gpu=h100"], older).gpu.name == "h100"


def test_accumulation_is_short_for_its_key():
    assert compose_config(["accumulation=4"]).batch.accumulation_steps == 4


# ---- keys that do not exist

@pytest.mark.parametrize("typed, nearest", [
    ("optimizer.learning_rat=1", "optimizer.learning_rate"),
    ("+optimizer.learning_rat=1", "optimizer.learning_rate"),
    ("++optimizer.learning_rat=1", "optimizer.learning_rate"),
    ("learning_rate=1", "optimizer.learning_rate"),
    ("batch.learning_rate=1", "optimizer.learning_rate"),
    ("adapter.epochs=1", "train.epochs"),
    ("batch.micro_row=1", "batch.micro_rows"),
    ("acumulation=3", "accumulation"),
    ("modle=llama7b", "model"),
    ("data.sets=[{path: a, wieght: 2}]", "data.sets.0.weight"),
    ("data.sets=[{path: a}, {pth: b}]", "data.sets.1.path"),
])
def test_a_mistyped_key_is_refused_with_the_nearest(typed, nearest):
    message = refusal(typed)
    assert "no such key; did you mean" in message
    assert nearest in message.split("did you mean ")[1].rstrip("?").split(", ")


def test_a_key_like_no_other_is_refused():
    assert refusal("zzqqzz=1").startswith("zzqqzz: no such key")


def test_a_mistyped_key_of_a_recipe_or_a_former_run_is_refused(recipe):
    assert "did you mean train.epochs" in refusal(recipe("train: {epoch: 3}\n"))
    with pytest.raises(ConfigError, match="train.epoch: no such key; did you mean train.epochs"):
        compose_config([], {"train": {"epoch": 3}})


@pytest.mark.parametrize("typed, expected", [
    ("strategy=zero4", ["strategy=zero4", "did you mean", "zero3"]),
    ("+strategy=zero4", ["strategy=zero4", "zero3"]),
    ("model=llama7", ["model=llama7", "did you mean", "llama7b"]),
    ("precision=quux", ["precision=quux", "bf16, fp16, fp32, fp8"]),
    ("recipe=smollm2_lora", ["recipe=smollm2_lora", "smollm2_lora_cpu"]),
    ("recipe=", ["recipe=", "smollm2_lora_cpu"]),
])
def test_an_unknown_choice_or_recipe_is_refused_with_the_nearest(typed, expected):
    message = refusal(typed)
    assert all(word in message for word in expected)


@pytest.mark.parametrize("typed", ["~optimizer.eps", "~optimizer", "~optimizer=adamw"])
def test_a_key_cannot_be_deleted(typed):
    message = refusal(typed)
    assert message.startswith(typed) and "cannot be deleted" in message and "=null" in message


@pytest.mark.parametrize("typed, choices", [("optimizer=3", "adamw, adamw8bit, sgd"), ("optimizer=null", "sgd"),
                                            ("batch=4", None), ("batch={micro_rows: 3}", None), ("train=[1]", None)])
def test_a_section_given_as_a_value_is_refused(typed, choices):
    message = refusal(typed)
    assert message.startswith(typed.split("=")[0] + ": a section; set one of its keys")
    assert choices is None or choices in message


def test_a_section_of_a_recipe_given_as_a_value_is_refused(recipe):
    assert refusal(recipe("train: 4\n")).startswith("train: a section")


# ---- values

@pytest.mark.parametrize("typed, expected", [
    ("adapter.rank=abc", ["adapter.rank='abc'", "a whole number of at least 1"]),
    ("adapter.rank=0", ["adapter.rank=0", "a whole number of at least 1"]),
    ("adapter.rank=1.5", ["adapter.rank=1.5", "a whole number"]),
    ("adapter.rank=true", ["adapter.rank=True", "a whole number"]),
    ("checkpoint.every_steps=true", ["checkpoint.every_steps=True", "a whole number of at least 1, or null (off)"]),
    ("schedule.warmup_steps=-1", ["schedule.warmup_steps=-1", "at least 0, or auto"]),
    ("gpus=four", ["gpus='four'", "a whole number of at least 1, or auto"]),
    ("train.epochs=null", ["train.epochs=None", "a whole number"]),
    ("optimizer.learning_rate=0", ["optimizer.learning_rate=0", "a number above 0, or auto"]),
    ("optimizer.learning_rate=true", ["optimizer.learning_rate=True", "a number above 0"]),
    ("optimizer.betas=[0.9]", ["optimizer.betas=[0.9]", "2 values, each a number"]),
    ("optimizer.betas=[0.9,1.5]", ["optimizer.betas=[0.9, 1.5]", "at least 0 and below 1"]),
    ("optimizer.learning_rate=inf", ["optimizer.learning_rate=inf", "above 0"]),
    ("eval.holdout_fraction=1.01", ["eval.holdout_fraction=1.01", "at least 0 and of at most 1"]),
    ("adapter.targets=q_proj", ["adapter.targets='q_proj'", "a list of texts"]),
    ("strategy.extra=3", ["strategy.extra=3", "a mapping"]),
    ("strategy.name=zero7", ["strategy.name='zero7'", "zero3 or fsdp or hsdp"]),
    ("dry_run=maybe", ["dry_run='maybe'", "true or false"]),
    ("run.name=1", ["run.name=1", "a text, or null (off)"]),
    ("data.sets=[{path: a, weight: -2}]", ["data.sets.0.weight=-2", "a number above 0"]),
    ("data.sets=3", ["data.sets=3", "a list of mappings of path, format"]),
])
def test_a_value_of_the_wrong_type_is_refused_with_key_value_and_rule(typed, expected):
    message = refusal(typed)
    assert message.count("\n") == 0 and ": must be " in message
    assert all(word in message for word in expected)


def test_every_wrong_value_is_named_at_once():
    lines = refusal("adapter.rank=0", "gpus=0", "train.epochs=x").splitlines()
    assert sorted(line.split("=")[0] for line in lines) == ["adapter.rank", "gpus", "train.epochs"]


@pytest.mark.parametrize("word, shown, hint", [
    ("", "''", ""), (" ", "' '", ""), ("=b", "=b", ""), ("+=b", "+=b", ""), ("~", "~", ""), ("foo", "foo", ""),
    ("a b=c", "a b=c", ""),
    ("data@x=files", "data@x=files", ""), ("adapter.targets=[a", "adapter.targets=[a", "'adapter.targets=[a, b]'"),
    ("strategy.extra={", "strategy.extra={", "'strategy.extra={name: a}'"),
    ("data.path=a=b", "data.path=a=b", "'data.path=\"a=b\"'"), ("data.path=it's", "data.path=it's", "'data.path=\"it's\"'"),
    ("model.path=/ü (2)", "model.path=/ü (2)", "'model.path=\"/ü (2)\"'"), ("data.path='\"", "data.path='\"", "")])
def test_what_cannot_be_parsed_is_named_with_the_rule_and_an_example(word, shown, hint):
    message = refusal("gpus=2", word)
    assert message.startswith(f"{shown}: cannot be read: must be key=value, as in optimizer.learning_rate=1e-4")
    assert message.endswith(hint or "1e-4") and "expecting" not in message and "token" not in message


def test_the_quotes_that_an_error_proposes_work():
    config = compose_config(['data.path="/a=b"', 'model.path="/ü (2)"'])
    assert (config.data.path, config.model.path) == ("/a=b", "/ü (2)")


def test_a_value_that_must_be_given_is_named():
    assert refusal("model=custom").startswith("model.path: must be given")
    assert compose_config(["model=custom", "model.path=/x"]).model.path == "/x"


def test_none_switches_off_and_strategy_extra_is_free():
    config = compose_config(["optimizer.clip_norm=null", "strategy.extra.aio.block_size=3", "+strategy.extra.new=[1]"])
    assert config.optimizer.clip_norm is None
    assert config.strategy.extra == {"aio": {"block_size": 3}, "new": [1]}


def test_a_number_that_yaml_reads_as_text_becomes_a_float(recipe):
    # YAML 1.1 wants 1.0e-4; PyYAML gives "1e-4" as a text
    rate = compose_config([recipe("optimizer.learning_rate: 1e-4\n")]).optimizer.learning_rate
    assert rate == 0.0001 and type(rate) is float
    assert compose_config(["optimizer.learning_rate=1e-4"]).optimizer.learning_rate == 0.0001


# ---- sweeps and the command line

def test_a_sweep_is_the_cross_product_and_every_point_composes():
    points = expand_sweep(["model=llama7b", "adapter.rank=4,8", "strategy=zero1,zero2,zero3", "data.path='a b,c'"])
    assert len(points) == 6
    configs = [compose_config(point) for point in points]
    assert {(c.adapter.rank, c.strategy.name) for c in configs} == {(r, f"zero{z}") for r in (4, 8) for z in (1, 2, 3)}
    assert all(c.model.name == "llama7b" and c.data.path == "a b,c" for c in configs)


def test_lists_are_values_and_ranges_and_choices_are_sweeps():
    assert expand_sweep(["adapter.targets=[a,b]"]) == [["adapter.targets=[a,b]"]]
    assert expand_sweep(["seed=range(1,4)"]) == [["seed=1"], ["seed=2"], ["seed=3"]]
    assert expand_sweep(["+seed=choice(1,2)"]) == [["+seed=1"], ["+seed=2"]]
    with pytest.raises(ConfigError, match="strategy=glob.*name the values"):
        expand_sweep(["strategy=glob(zero*)"])


def test_several_values_without_m_are_refused():
    for typed in ("adapter.rank=4,8", "strategy=zero1,zero2"):
        assert refusal(typed).startswith(typed) and "-m" in refusal(typed)


def test_the_rank_that_launchers_append_is_dropped():
    command = parse_command_line(["--local_rank=3", "gpus=2", "--local-rank=0"])
    assert command.overrides == ("gpus=2",)


def test_flags_and_the_run_folder_are_taken_out():
    command = parse_command_line(["run=out/a", "-m", "gpus=2", "--cfg", "-h", "run.name=x"])
    assert command.overrides == ("gpus=2", "run.name=x") and command.run_folder == Path("out/a")
    assert command.multirun and command.print_config and command.help
    plain = parse_command_line(["gpus=2"])
    assert plain.run_folder is None and not (plain.multirun or plain.print_config or plain.help)


@pytest.mark.parametrize("word", ["--config-name=x", "--local_ranks=3", "-x", "--multirum"])
def test_an_unknown_flag_is_refused(word):
    with pytest.raises(ConfigError, match=f"^{word}: unknown flag"):
        parse_command_line(["gpus=2", word])


# ---- what comes out

def builtin_only(value):
    if isinstance(value, dict):
        return type(value) is dict and all(type(key) is str and builtin_only(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(builtin_only, value))
    return type(value) in (str, int, float, bool, type(None))


def test_the_result_is_frozen_dataclasses_of_builtin_types(recipe):
    config = compose_config([recipe("data: files\ndata.sets: [{path: a, columns: {prompt: q}}]\neval.prompts: [x]\n"),
                             "strategy.extra={aio: {sizes: [1, 2]}}", "data.format=${data.name}", "data.name=text"])
    assert config.data.format == "text"
    values = dataclasses.asdict(config)
    assert builtin_only(values)
    assert json.loads(json.dumps(values))["data"]["sets"][0]["columns"] == {"prompt": "q"}
    for part in (config, *(getattr(config, item.name) for item in dataclasses.fields(Config))):
        if dataclasses.is_dataclass(part):
            with pytest.raises(dataclasses.FrozenInstanceError):
                part.name = "other"


def test_schema_fields_are_the_leaves_of_a_composed_config():
    def leaves(value, prefix=""):
        for item in dataclasses.fields(value):
            inner = getattr(value, item.name)
            if dataclasses.is_dataclass(inner):
                yield from leaves(inner, f"{prefix}{item.name}.")
            else:
                yield prefix + item.name
    assert list(leaves(Config())) == list(schema_fields())
