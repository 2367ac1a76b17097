"""What is shipped in conf/ and recipes/ composes, is explained and can be planned, so that none of it can rot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from scripts import load_script

from tonnage.config.compose import CONF, RECIPES, ROOT, compose_config, describe_type, groups, recipes, schema_fields
from tonnage.config.schema import DataSet
from tonnage.errors import ConfigError
from tonnage.facts.capabilities import CAPABILITIES
from tonnage.facts.models import MODELS
from tonnage.plan.ladder import IN_VAIN, ladder_text, plan_of, rungs
from tonnage.plan.verdict import DOES_NOT_FIT, FITS, TIGHT

CHOICES = [(group, choice) for group, choices in groups().items() for choice in choices]
NEEDS = {("model", "custom"): ["model.path=x"]}


@pytest.fixture(scope="module")
def train():
    return load_script("launch/train")


@pytest.fixture
def dry_run(train, capsys, monkeypatch):
    """Runs launch/train.py dry_run=true in this process, as on a machine without a GPU; returns what it prints."""
    import torch

    from tonnage.runtime import ranks

    for name in ("RANK", "WORLD_SIZE", ranks.LAUNCHER_VARIABLE, ranks.RUN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "driver_present", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(ROOT)

    def run(*overrides):
        assert train.main(["dry_run=true", *overrides]) == 0
        return capsys.readouterr().out
    return run


# ---- conf/

@pytest.mark.parametrize("group, choice", CHOICES)
def test_every_choice_composes_alone_over_the_defaults(group, choice):
    config = compose_config([f"{group}={choice}", *NEEDS.get((group, choice), [])])
    assert getattr(config, group).name == choice


@pytest.mark.parametrize("group, choice", [(group, choice) for group, choice in CHOICES if (CONF / group).is_dir()])
def test_every_preset_is_small_and_says_only_what_differs(group, choice):
    text = (CONF / group / f"{choice}.yaml").read_text()
    stated = yaml.safe_load(text)
    assert stated.pop("name") == choice and len(text.splitlines()) <= 20
    defaults = {key: field.default for key, field in schema_fields().items()}
    assert all(defaults[f"{group}.{key}"] != value for key, value in stated.items())


def test_every_choice_that_the_schema_names_has_a_preset():
    assert set(groups()["strategy"]) == set(("auto", *CAPABILITIES))
    for group in ("adapter", "cluster", "gpu", "optimizer", "precision", "schedule", "tracker"):
        assert set(describe_type(schema_fields()[f"{group}.name"].type).split(" or ")) == set(groups()[group])


def test_every_model_of_conf_has_facts_and_the_other_way_round():
    assert set(groups()["model"]) - {"custom"} == set(MODELS)


def test_every_key_has_a_text_and_a_type_in_words():
    import dataclasses

    fields = schema_fields() | {f"data.sets.{item.name}": item for item in dataclasses.fields(DataSet)}
    without = [key for key, field in fields.items() if len(field.metadata.get("text", "")) < 10]
    assert without == []
    assert all(describe_type(field.type) for field in fields.values())


def test_the_command_line_of_the_readme_is_complete():
    config = compose_config(["model=llama7b", "gpus=4"])
    assert (config.model.path, config.gpus) == ("meta-llama/Llama-2-7b-hf", 4)


# ---- recipes/

@pytest.mark.parametrize("name", recipes())
def test_every_recipe_composes_and_prints_a_plan(dry_run, name):
    printed = dry_run(f"recipe={name}")
    config = compose_config([f"recipe={name}"])
    assert "nothing was started" in printed and config.model.name in printed
    assert f"{config.gpus if config.gpus != 'auto' else 1} ranks" in printed


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_is_small_and_names_data_that_exist(name):
    assert len((RECIPES / f"{name}.yaml").read_text().splitlines()) <= 30
    config = compose_config([f"recipe={name}"])
    paths = [config.data.path, config.eval.path, *(one.path for one in config.data.sets)]
    assert not [path for path in paths if path and path.startswith("recipes/") and not (ROOT / path).exists()]


def test_every_recipe_for_gpus_fits_and_is_named_for_what_it_is():
    for name, config, plan in rungs():
        assert plan.verdict in (FITS, TIGHT), name
        kind = "qlora" if config.adapter.quantise == "nf4" else config.adapter.name
        assert name == f"{config.model.name}_{kind}_{config.gpus}x{config.gpu.name}"
        assert config.model.activation_checkpointing == "full", name


@pytest.mark.slow
def test_the_page_of_recipes_is_up_to_date_and_what_it_says_does_not_fit_does_not():
    text = ladder_text()
    assert (RECIPES / "README.md").read_text() == text, "run python launch/plan.py --ladder > recipes/README.md"
    assert all(f"]({name}.yaml)" in text for name in recipes() if name != "smollm2_lora_cpu")
    assert {plan.verdict for plan in map(plan_of, map(compose_config, IN_VAIN))} == {DOES_NOT_FIT}


# ---- dry runs

@pytest.mark.parametrize("strategy", ("auto", *CAPABILITIES))
def test_a_dry_run_of_four_gpus_for_each_strategy(dry_run, strategy):
    overrides = ["model=llama7b", "gpus=4", f"strategy={strategy}"]
    if strategy == "zero0":
        with pytest.raises(ConfigError, match="precision=bf16: not with strategy=zero0.*precision=fp32"):
            dry_run(*overrides)
        overrides.append("precision=fp32")
    printed = dry_run(*overrides)
    assert "llama7b" in printed and "4 ranks on 1 node of 4" in printed
    assert "128 rows: 4 shares of up to 32, 16 micro-batches of up to 2 rows" in printed
    used = "fsdp" if strategy == "auto" else strategy
    assert f"strategy {used}" in printed
    if CAPABILITIES[used].engine == "deepspeed":
        settings = json.loads(printed.split("DeepSpeed JSON:")[1])
        assert settings["zero_optimization"]["stage"] == int(used[-1])
        assert settings["train_micro_batch_size_per_gpu"] == 2
    else:
        mesh = {"ddp": "4 replicas x 1 shards", "fsdp": "1 replicas x 4 shards", "hsdp": "1 replicas x 4 shards"}[used]
        assert "FSDP plan:" in printed and f"mesh: {mesh}" in printed


def test_a_dry_run_says_how_long_and_how_fast_it_learns(dry_run):
    printed = dry_run("recipe=smollm2_lora_cpu")
    assert "16: train.max_steps=16 of 1 epoch of 23 (360 samples each" in printed
    assert "adamw, learning rate cosine, peak 0.001" in printed and "as shipped with an installed package" in printed
    printed = dry_run("train.epochs=2", "eval.holdout_fraction=0.5")
    assert "4: 2 epochs of 2 (180 samples each" in printed and "peak 0.0002" in printed


@pytest.mark.parametrize("variables, command", [
    ({}, "python launch/train.py gpus=2 train.epochs=1"),
    ({"LOCAL_SIZE": "2"}, "deepspeed launch/train.py gpus=2 train.epochs=1"),
    ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun --nproc-per-node 2 launch/train.py gpus=2 train.epochs=1")])
def test_the_command_of_a_dry_run_keeps_its_launcher(dry_run, monkeypatch, variables, command):
    for name, value in (variables | {"RANK": "0", "WORLD_SIZE": "2"} if variables else {}).items():
        monkeypatch.setenv(name, value)
    printed = dry_run("gpus=2", "train.epochs=1")
    assert f"│ {command} " in printed
    assert ("gradient_accumulation_steps 1" in printed) == command.startswith("deepspeed")


@pytest.mark.parametrize("gpus, expected", [(3, "128 rows: 3 shares of up to 43, 22 micro-batches of up to 2 rows"),
                                            (6, "128 rows: 6 shares of up to 22, 11 micro-batches of up to 2 rows"),
                                            (128, "128 rows: 128 shares of up to 1, 1 micro-batches of up to 1 rows")])
def test_any_number_of_gpus_keeps_the_global_batch(dry_run, gpus, expected):
    assert expected in dry_run("model=llama7b", f"gpus={gpus}")


def test_the_composed_config_is_printed_without_secrets(train, capsys):
    assert train.main(["--cfg", "seed=5", "strategy.extra.wandb.api_key=s3cr3t"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["seed"] == 5 and "s3cr3t" not in str(printed)


def test_help_names_groups_and_recipes(train, capsys):
    assert train.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*groups(), *recipes(), "run=FOLDER", "dry_run=true", "-m"))


def test_as_deepspeed_starts_it_and_a_user_error_is_one_line_and_exit_code_2(tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}

    def launch(*words):
        return subprocess.run([sys.executable, str(ROOT / "launch" / "train.py"), *words], cwd=tmp_path, env=env,
                              capture_output=True, text=True, timeout=120)
    done = launch("--local_rank=0", "dry_run=true", "device=cpu", "model=llama7b", "gpus=2")
    assert done.returncode == 0 and "2 ranks" in done.stdout and done.stderr == ""
    wrong = launch("optimizer.learning_rat=1")
    assert wrong.returncode == 2 and wrong.stdout == "" and wrong.stderr.count("\n") == 1
    assert wrong.stderr.startswith("error: optimizer.learning_rat: no such key; did you mean optimizer.learning_rate")
    assert list(Path(tmp_path).iterdir()) == []  # nothing is left behind


def test_the_configuration_page_is_up_to_date():
    from tonnage.config.compose import ROOT
    from tonnage.config.docs import config_markdown

    assert (ROOT / "docs" / "config.md").read_text() == config_markdown(), "run make docs"
