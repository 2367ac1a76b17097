"""Rules across sections, what auto becomes on a machine, and what may change when a run goes on."""

import re
from dataclasses import asdict, replace
from functools import lru_cache

import pytest

from tonnage.config.batch import resolve_batch
from tonnage.config.compose import compose_config, schema_fields
from tonnage.config.rules import check_fork, check_resume, freeze, resolve_layout, slicing_obstacle
from tonnage.errors import ConfigError
from tonnage.facts.architectures import row_facts
from tonnage.facts.models import MODELS

composed = lru_cache(compose_config)  # by overrides; configs are frozen


def layout(*overrides, gpus=1, device="cuda", visible=8, under_deepspeed=False):
    return resolve_layout(composed(tuple(overrides)), gpus, device, visible, under_deepspeed)


def refusal(*overrides, **machine):
    with pytest.raises(ConfigError) as error:
        layout(*overrides, **machine)
    return str(error.value)


# ---- what auto becomes

@pytest.mark.parametrize("gpus, under_deepspeed, strategy", [(1, False, "ddp"), (2, False, "fsdp"), (8, False, "fsdp"),
                                                             (1, True, "zero1"), (2, True, "zero3")])
def test_auto_strategy(gpus, under_deepspeed, strategy):
    assert layout(gpus=gpus, under_deepspeed=under_deepspeed).strategy == strategy
    assert layout("strategy=zero2", gpus=gpus, under_deepspeed=under_deepspeed).strategy == "zero2"


@pytest.mark.parametrize("overrides, gpus, visible, per_node", [
    ([], 4, 8, 4), ([], 16, 8, 8), (["cluster.gpus_per_node=4"], 16, 8, 4), (["cluster.gpus_per_node=8"], 2, 2, 2)])
def test_gpus_of_a_node(overrides, gpus, visible, per_node):
    found = layout(*overrides, gpus=gpus, visible=visible)
    assert (found.gpus, found.gpus_per_node, found.device) == (gpus, per_node, "cuda")


def test_the_cut_is_that_of_the_number_of_gpus_and_of_the_row_length():
    cut = layout("data.seq_tokens=1024", gpus=3).cut
    assert (cut.global_rows, cut.micro_rows, cut.accumulation_steps) == (128, 4, 11)


# ---- every rule

@pytest.mark.parametrize("overrides, machine, expected", [
    (["cluster.gpus_per_node=8"], {"gpus": 12}, ["cluster.gpus_per_node=8: must divide gpus=12"]),
    (["strategy=zero3", "strategy.offload=nvme"], {}, ["offload=nvme: not with strategy=zero3", "fails on frozen weights"]),
    (["strategy=fsdp", "strategy.extra.aio.x=1"], {"gpus": 2},
     ["strategy.extra: only for DeepSpeed", "strategy=fsdp", "use strategy=zero1|zero2|zero3"]),
    (["strategy=fsdp", "strategy.offload=all"], {"gpus": 2, "device": "cpu"},
     ["strategy.offload=all", "device=cpu has no GPU", "use strategy.offload=none, or strategy=zero3"]),
    (["precision=fp8", "adapter=qlora"], {}, ["adapter.quantise=nf4: not with precision=fp8", "precision=bf16"]),
    (["precision=fp8"], {"device": "cpu"}, ["precision=fp8: CPUs have no FP8 units", "precision.fp8_emulate=true"]),
    (["precision=fp8", "gpu=a100_80gb"], {}, ["precision=fp8: gpu=a100_80gb has no FP8 units; use precision=bf16"]),
    (["precision.fp8_emulate=true"], {}, ["precision.fp8_emulate: only for precision=fp8, not precision=bf16"]),
    (["precision.fp8_recipe=rowwise"], {}, ["precision.fp8_recipe", "only for precision=fp8, not precision=bf16"]),
    (["strategy.fp8_all_gather=true"], {"gpus": 2},
     ["strategy.fp8_all_gather=true: gathers what", "not precision=bf16"]),
    (["strategy.fp8_all_gather=true", "precision=fp8", "precision.fp8_recipe=rowwise"], {"gpus": 2},
     ["recipe=rowwise; leave it out"]),
    (["strategy.fp8_all_gather=true", "precision=fp8", "strategy=zero3"], {"gpus": 2},
     ["not strategy=zero3", "leave it out"]),
    (["strategy.fp8_all_gather=true", "precision=fp8", "strategy=fsdp", "strategy.offload=all"], {"gpus": 2},
     ["not strategy=fsdp strategy.offload=all"]),
    (["data.streaming=true"], {}, ["train.max_steps: must be set for data.streaming=true"]),
    (["data.sets=[{path: a}]"], {}, ["harbour_train.jsonl: not together with data.sets; data=files data.sets=[...]"]),
    (["data=files", "data.path=b", "data.sets=[{path: a}]"], {}, ["data.path=b: not together with data.sets; give one"]),
    (["data=files"], {}, ["data.path: must be given for data=files"]),
    (["eval.path=x", "eval.holdout_fraction=0.1"], {}, ["eval.holdout_fraction: not together with eval.path"]),
    (["eval.holdout_fraction=1"], {}, ["eval.holdout_fraction=1: leaves nothing to train on"]),
    (["data.streaming=true", "train.max_steps=5", "eval.holdout_fraction=0.1"], {},
     ["eval.holdout_fraction: not with data.streaming=true; give eval.path"]),
    (["model.attention=flash"], {"device": "cpu"}, ["model.attention=flash: runs on GPUs only", "attention=sdpa"]),
    (["model.activation_checkpointing=none", "model.checkpoint_every_layers=2"], {},
     ["model.checkpoint_every_layers=2: nothing is checkpointed", "use full or selective"]),
    (["model.activation_checkpointing=none", "model.checkpoints_on_host=true"], {},
     ["model.checkpoints_on_host=true: nothing is checkpointed", "use full or selective"]),
    (["model.attention=flex", "model.activation_checkpointing=selective"], {},
     ["model.activation_checkpointing=selective: does not see", "attention=flex", "use model.activation_checkpointing="]),
    (["model.checkpoints_on_host=true"], {"device": "cpu"},
     ["model.checkpoints_on_host=true: moves tensors from a GPU", "device=cpu has no GPU"]),
    (["model.compile=true", "model.checkpoints_on_host=true"], {},
     ["model.checkpoints_on_host=true: not with model.compile"]),
    (["optimizer.scale_lr=sqrt", "batch.global_tokens=1000"], {},
     ["optimizer.scale_lr=sqrt: needs batch.global_rows", "set optimizer.learning_rate"]),
    (["model.new_tokens=['<a>']", "adapter.targets=[q_proj,lm_head]"], {}, ["adapter.targets: the head is trained whole"]),
    (["model=llama7b", "data.seq_tokens=4097"], {}, ["data.seq_tokens=4097: llama7b has positions for 4,096 tokens"]),
    (["strategy=hsdp", "strategy.shard_gpus=6"], {"gpus": 16}, ["strategy.shard_gpus=6: must divide gpus=16; try 4"]),
    (["strategy=hsdp", "strategy.shard_gpus=32"], {"gpus": 16}, ["strategy.shard_gpus=32: must divide gpus=16; try 16"]),
    (["strategy=fsdp", "strategy.hpz_gpus=8"], {"gpus": 16},
     ["strategy.hpz_gpus=8: a second copy", "use strategy.hpz_gpus=1, or strategy=hsdp"]),
    (["strategy=zero3", "strategy.offload=all", "strategy.hpz_gpus=8"], {"gpus": 16}, ["strategy.offload=none, not"]),
    (["strategy=zero3", "strategy.hpz_gpus=6"], {"gpus": 16},
     ["strategy.hpz_gpus=6: must divide the 8 GPUs of a node; try 4"]),
    (["batch.global_rows=128", "batch.micro_rows=2", "accumulation=3"], {}, ["batch.accumulation_steps=3", "nearest"]),
    (["model=llama8b", "strategy=fsdp", "strategy.expert_gpus=2"], {"gpus": 8},
     ["strategy.expert_gpus=2: this model has no routed experts; use strategy.expert_gpus=1"]),
    (["model=mixtral8x7b", "strategy=fsdp", "strategy.expert_gpus=3"], {"gpus": 24},
     ["strategy.expert_gpus=3: must divide the 8 experts of a layer; try 2"]),
    (["strategy.sequence_gpus=3"], {"gpus": 8}, ["strategy.sequence_gpus=3: must divide gpus=8; try 2"]),
    (["model=llama7b", "strategy.sequence_gpus=2", "model.attention=flash"], {"gpus": 2},
     ["model.attention=flash: not with strategy.sequence_gpus=2", "use model.attention=sdpa"]),
    (["model=llama7b", "strategy.sequence_gpus=2", "data.packing=true"], {"gpus": 2},
     ["data.packing=true: not with strategy.sequence_gpus=2", "use data.packing=false, or strategy.sequence_gpus=1"]),
    (["model=llama7b", "strategy.sequence_gpus=2", "model.compile=true", "strategy=fsdp"], {"gpus": 2},
     ["model.compile=true: not with strategy.sequence_gpus=2"]),
    (["model=smollm2_135m", "strategy.sequence_gpus=2"], {"gpus": 2},
     ["strategy.sequence_gpus=2: must divide the 9 attention heads of the model; try 1"]),
])
def test_a_broken_rule_is_named_with_the_next_step(overrides, machine, expected):
    message = refusal(*overrides, **machine)
    assert all(part in message for part in expected) and len(message.splitlines()) == 1


@pytest.mark.parametrize("overrides, machine", [
    (["cluster.gpus_per_node=4"], {"gpus": 12}),
    (["strategy=zero3", "strategy.extra.aio.x=1"], {"gpus": 2}), (["strategy=fsdp", "strategy.offload=all"], {"gpus": 2}),
    (["strategy=zero3", "strategy.offload=all"], {"gpus": 2, "device": "cpu"}),
    (["data.streaming=true", "train.max_steps=5"], {}), (["data=files", "data.sets=[{path: a}]"], {}),
    (["data=files", "data.path=a"], {}), (["eval.holdout_fraction=0.5"], {}), (["model.attention=flash"], {}),
    (["model.checkpoint_every_layers=2", "model.checkpoints_on_host=true"], {}),
    (["model.compile=true", "model.activation_checkpointing=selective"], {}),
    (["optimizer.scale_lr=sqrt"], {}), (["model.new_tokens=['<a>']", "adapter.targets=[q_proj]"], {}),
    (["model.new_tokens=['<a>']"], {}), (["adapter=full", "model.new_tokens=['<a>']"], {}),
    (["model=llama7b", "data.seq_tokens=4096"], {}), (["strategy=hsdp", "strategy.shard_gpus=4"], {"gpus": 16}),
    (["strategy=zero3", "strategy.hpz_gpus=8"], {"gpus": 16}),
    (["model=llama7b", "strategy.sequence_gpus=8", "model.attention=sdpa"], {"gpus": 16}),
    (["strategy.fp8_all_gather=true", "precision=fp8"], {"gpus": 2}),
    (["strategy=hsdp"], {"gpus": 16}), (["model=custom", "model.path=x", "data.seq_tokens=1000000"], {}),
])
def test_the_same_without_the_fault_is_accepted(overrides, machine):
    assert layout(*overrides, **machine).gpus == machine.get("gpus", 1)


def test_gpus_that_share_rows_have_one_share_of_them():
    found = layout("model=llama7b", "strategy.sequence_gpus=4", "data.seq_tokens=4096", gpus=8)
    assert (found.shares, found.cut.micro_rows, found.cut.accumulation_steps) == (2, 4, 16)  # 4,096 tokens a GPU
    assert layout("model=llama7b", gpus=8).shares == 8
    message = refusal("model=llama7b", "strategy.sequence_gpus=4", "batch.global_rows=8", "batch.micro_rows=1",
                      "accumulation=1", gpus=8)
    assert "8 rows on 8 GPUs, 4 to a row, are up to 4 rows" in message and "batch.global_rows=2 " in message


def test_what_looks_at_whole_rows_is_an_obstacle():
    def obstacle(seq_tokens, sequence_gpus=2, num_heads=8, **changed):
        settings = {"sliding_window": 4096, "rope_parameters": {"rope_type": "yarn"}} | changed
        return slicing_obstacle(sequence_gpus, seq_tokens, num_heads, **row_facts(settings))

    assert obstacle(4096) is obstacle(8192, use_sliding_window=False) is obstacle(8192, sequence_gpus=1) is None
    for changed, seq_tokens, told in (
            ({}, 4097, "attends within 4096 tokens"), ({"attention_chunk_size": 512}, 1024, "attends within 512 tokens"),
            ({"num_heads": 9}, 128, "must divide the 9 attention heads of the model; try 1"),
            ({"rope_scaling": {"type": "dynamic"}}, 128, "(dynamic)"),
            ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, 128, "(longrope)")):
        assert told in obstacle(seq_tokens, **changed)


def test_every_broken_rule_is_named_at_once():
    message = refusal("data.streaming=true", "model.attention=flash", "strategy=zero0", device="cpu")
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "precision=bf16", "train.max_steps", "model.attention=flash"]


def test_every_known_model_takes_rows_as_long_as_its_positions():
    for name, facts in MODELS.items():
        longest = facts.architecture.max_positions_tokens
        assert layout(f"model={name}", f"data.seq_tokens={longest}")
        assert f"{longest:,} tokens" in refusal(f"model={name}", f"data.seq_tokens={longest + 1}")


@pytest.mark.parametrize("under_deepspeed", [False, True])
@pytest.mark.parametrize("offload, gpus, strategy", [
    ("none", 1, ("ddp", "zero1")), ("none", 4, ("fsdp", "zero3")), ("optimizer", 1, ("zero1", "zero1")),
    ("optimizer", 4, ("zero3", "zero3")), ("all", 1, ("fsdp", "zero3")), ("all", 4, ("fsdp", "zero3"))])
def test_auto_is_a_strategy_that_offloads_what_is_asked_for(offload, gpus, strategy, under_deepspeed):
    found = layout(f"strategy.offload={offload}", gpus=gpus, under_deepspeed=under_deepspeed)
    assert found.strategy == strategy[under_deepspeed]


# ---- freezing

def frozen(*overrides, gpus=1):
    config = composed(overrides)
    return freeze(config, resolve_layout(config, gpus, "cuda", 8, False))


def test_the_global_batch_is_frozen_and_its_cut_is_left_to_each_attempt():
    config = frozen("batch.micro_rows=2", "dry_run=true", gpus=3)
    assert (config.batch.global_rows, config.batch.micro_rows, config.batch.accumulation_steps) == (128, 2, "auto")
    assert config.dry_run is False and config.gpus == "auto"
    assert replace(config, batch=compose_config([]).batch) == compose_config([])
    by_tokens = frozen("batch.global_tokens=5000").batch
    assert (by_tokens.global_tokens, by_tokens.global_rows) == (5000, "auto")
    micro_and_steps = frozen("batch.micro_rows=2", "accumulation=5", gpus=3).batch
    assert (micro_and_steps.global_rows, micro_and_steps.micro_rows) == (30, 2)


@pytest.mark.parametrize("overrides", [["accumulation=4"], ["batch.global_rows=64", "accumulation=8"],
                                       ["batch.micro_rows=8"], ["batch.micro_rows=2", "accumulation=3"],
                                       ["batch.global_rows=100", "batch.micro_rows=4"], ["batch.global_tokens=9000"], []])
def test_a_frozen_config_is_cut_as_the_one_it_was_made_from(overrides):
    for gpus in (1, 2, 3, 8):
        config = composed(tuple(overrides))
        cut = resolve_batch(config.batch, gpus, config.data.seq_tokens)
        assert resolve_batch(frozen(*overrides, gpus=gpus).batch, gpus, config.data.seq_tokens) == cut


# ---- going on with a run

MAY_CHANGE = ["gpus=7", "device=cpu", "cpu_threads=3", "dry_run=true", "batch.micro_rows=7", "accumulation=9",
              "strategy=zero2", "strategy.offload=all", "strategy.extra.aio.x=1", "strategy.shard_gpus=2",
              "tracker=none", "model.path=/moved", "model.attention=eager", "model.compile=true",
              "model.activation_checkpointing=none", "model.checkpoint_every_layers=2", "model.checkpoints_on_host=true",
              "train.loss=plain", "train.loss_chunk_tokens=7",
              "train.audit=false", "train.max_nonfinite_steps=9", "checkpoint.every_steps=3", "checkpoint.keep=9",
              "cluster.timeout_s=9", "cluster.gpus_per_node=4", "gpu=h100", "gpu.price_usd_h=2", "plan.refuse=false",
              "eval.every_steps=4", "eval.path=x", "run.fork=true", "run.name=x", "data.cache=/c",
              "tracker.every_steps=3"]
MAY_NOT = ["seed=1", "batch.global_rows=64", "batch.global_tokens=999", "adapter.rank=3", "adapter=full",
           "adapter.targets=[q_proj]", "adapter.dropout=0.1", "precision=fp16", "precision=fp8", "optimizer=sgd",
           "optimizer.learning_rate=0.5", "optimizer.betas=[0.1,0.2]", "optimizer.clip_norm=null",
           "optimizer.weight_decay=0.1", "schedule=linear", "schedule.warmup_steps=7", "data.path=other",
           "data.sets=[{path: a}]", "data.seq_tokens=99", "data.packing=true", "data.train_on=all", "data.streaming=true",
           "data.system=x", "data.truncate=drop", "train.epochs=2", "train.max_steps=3", "model=llama7b",
           "model.revision=v2", "model.new_tokens=['<a>']"]


def resume(overrides):
    base = asdict(frozen("adapter.rank=8"))
    check_resume(base, asdict(compose_config(overrides, base)))


@pytest.mark.parametrize("override", MAY_CHANGE)
def test_where_and_how_a_run_goes_may_change(override):
    resume([override])


@pytest.mark.parametrize("override", MAY_NOT)
def test_what_is_learned_may_not_change(override):
    with pytest.raises(ConfigError) as error:
        resume([override])
    named, *_, last = str(error.value).splitlines()
    assert named.split("=")[0].startswith(override.split("=")[0]) and ": was " in named
    assert "run.fork=true" in last


def fork(parent, overrides):
    base = asdict(frozen(*parent))
    check_fork(base, asdict(compose_config(overrides, base)))


HELD = ["eval.holdout_fraction=0.1"]
SETS = ["data.path=null", "data.sets=[{path: a}, {path: b}]"]


@pytest.mark.parametrize("parent, overrides", [
    (HELD, ["seed=1"]), (HELD, ["eval.holdout_fraction=0.2"]), (HELD, ["data.seq_tokens=99"]),
    (HELD, ["data.train_on=all"]), ([], HELD), ([], ["seed=1", *HELD]),
    ([*HELD, *SETS], ["data.sets=[{path: b}, {path: a}]"]),
    ([*HELD, *SETS], ["data.sets=[{path: a, split: test}, {path: c}]"])])
def test_a_fork_is_not_evaluated_on_what_its_parent_has_trained_on(parent, overrides):
    with pytest.raises(ConfigError) as error:
        fork(parent, overrides)
    named, *_, last = str(error.value).splitlines()
    assert re.split(r"=| \(", named)[0] in overrides[0] and ": was " in named
    assert "held out" in last and "eval.path" in last


@pytest.mark.parametrize("parent, overrides", [
    (HELD, []), (HELD, ["optimizer.learning_rate=1", "data.packing=true"]), ([], ["seed=1"]),
    (HELD, ["seed=1", "eval.holdout_fraction=0", "eval.path=x"]), (HELD, ["seed=1", "data.path=other"]),
    ([], [*HELD, "data.path=other"]), ([*HELD, *SETS], ["data.sets=[{path: a, weight: 2}, {path: c}, {path: d}]"])])
def test_a_fork_may_change_all_else(parent, overrides):
    fork(parent, overrides)


def test_every_key_that_is_refused_is_named_with_both_values():
    with pytest.raises(ConfigError) as error:
        resume(["seed=5", "gpus=2", "adapter.rank=16"])
    assert str(error.value).splitlines()[:2] == ["seed=5: was 0", "adapter.rank=16: was 8"]


def test_nothing_changed_and_a_config_that_went_through_yaml_are_accepted():
    import yaml

    base = asdict(frozen())
    check_resume(yaml.safe_load(yaml.safe_dump(base | {"optimizer": base["optimizer"] | {"betas": [0.9, 0.95]}})), base)


def test_every_section_is_sorted_into_one_of_the_two():
    named = {override.split("=")[0].split(".")[0] for override in MAY_CHANGE + MAY_NOT} | {"batch"}
    assert named - {"accumulation"} >= {key.split(".")[0] for key in schema_fields()}


def test_the_rank_of_adapted_experts_fills_16_bytes():
    words = ("model=deepseek16b", "adapter.targets=[all-linear,experts]", "strategy=fsdp", "gpus=2")
    assert "adapter.rank=12: with adapter.targets=experts" in refusal(*words, "adapter.rank=12", gpus=2)
    assert layout(*words, "adapter.rank=12", "precision=fp32", gpus=2) and layout(*words, "adapter.rank=8", gpus=2)
