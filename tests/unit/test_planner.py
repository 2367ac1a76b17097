"""Plans, verdicts, remedies, tables: what they say is right by arithmetic, or by the rules of a run."""

import dataclasses
import json
import math
import re

import pytest
import yaml

from tonnage.config.compose import ROOT, compose_config
from tonnage.config.rules import resolve_layout
from tonnage.data.windows import cut_window
from tonnage.errors import ConfigError
from tonnage.facts.gpus import GPUS, gpu_of
from tonnage.facts.models import MODELS
from tonnage.plan import tables, text
from tonnage.plan.host import pinned_bytes
from tonnage.plan.planner import MOST_MICRO_TOKENS, architecture_of, make_plan, plan_layout
from tonnage.plan.search import GAIN, remedies, search
from tonnage.plan.verdict import DOES_NOT_FIT, FITS, TIGHT, verdict

GIB = 2**30


def planned(*overrides):
    config = compose_config(overrides)
    gpu, architecture = gpu_of(config.gpu.name, config.gpu.memory_gib), architecture_of(config)
    return config, make_plan(config, plan_layout(config, architecture, gpu), architecture, gpu)


def test_small_gpus_need_room_for_what_lies_beside_tensors():
    assert (verdict(6.5 * GIB, 8.0), verdict(6.7 * GIB, 8.0)) == (FITS, TIGHT)
    assert (verdict(6.5 * GIB, 8.0, gpus=8), verdict(4.0 * GIB, 8.0, gpus=8)) == (DOES_NOT_FIT, FITS)


@pytest.mark.parametrize("overrides, least_gib", [
    (["strategy.reshard_after_forward=false", "strategy=fsdp"], 128),  # all of 70B in bf16 stays on each GPU
    (["strategy=fsdp", "model.new_tokens=[x]"], 2 * 2 * 128256 * 8192 * 2 / GIB)])
def test_what_is_kept_whole_is_counted(overrides, least_gib):
    base = planned("model=llama70b", "gpu=h200", "gpus=8", "strategy=fsdp", "batch.micro_rows=1")[1].memory.peak_bytes
    more = planned("model=llama70b", "gpu=h200", "gpus=8", "batch.micro_rows=1", *overrides)[1].memory.peak_bytes
    assert (more - base) / GIB > 0.7 * least_gib


def test_each_replica_of_hsdp_has_its_own_offloaded_states():
    one, four = (planned("model=llama8b", "adapter=full", "strategy=hsdp", f"strategy.shard_gpus={shard}", "gpus=8",
                         "strategy.offload=all", "gpu=h100")[1].host.terms["offloaded optimizer, gradients, fp32 weights"]
                 for shard in (8, 2))
    # moments and gradients; fp32 weights pinned a tensor each, an eighth of it a GPU: of the MLP 28 MiB, of head and
    # embedding 250.5 MiB, of attention 8 and 2 MiB
    pinned_mib = 32 * (3 * 32 + 2 * 8 + 2 * 2) + 2 * 256
    assert four == pytest.approx(4 * one) and one == pytest.approx(12 * 8.03e9 / GIB + 8 * pinned_mib / 1024, rel=1e-3)


def test_idle_gpus_make_no_tokens():
    half, whole = (planned("model=llama8b", "gpu=h100", f"gpus={gpus}")[1].speed for gpus in (128, 256))
    assert whole.tokens_per_s <= half.tokens_per_s and whole.tokens_per_s_per_gpu < 0.6 * half.tokens_per_s_per_gpu


@pytest.mark.parametrize("share, expected", [(0.5, FITS), (0.83, FITS), (0.84, TIGHT), (0.945, TIGHT),
                                             (0.95, DOES_NOT_FIT)])
def test_the_verdict_follows_the_measured_frontier(share, expected):
    assert verdict(share * 80 * GIB, 80.0) == expected


@pytest.mark.parametrize("strategy, bytes_a_parameter", [("ddp", 4 + 8), ("fsdp", (4 + 8) / 8), ("zero1", 2 + 12 / 8),
                                                         ("zero2", 2 + 12 / 8), ("zero3", 14 / 8)])
def test_states_at_rest_are_those_of_the_literature(strategy, bytes_a_parameter):
    """arXiv 1910.02054, table 1, with fp32 masters only where an engine keeps no bf16 copy."""
    _, plan = planned("model=llama8b", "adapter=full", f"strategy={strategy}", "gpus=8", "gpu=h100", "batch.micro_rows=1",
                      "batch.global_rows=8")
    step = plan.memory.phases["step"]
    at_rest = sum(size for name, size in step.items() if name in ("weights", "fp32 weights", "optimizer states"))
    assert at_rest == pytest.approx(bytes_a_parameter * MODELS["llama8b"].architecture.num_parameters)


def test_accumulating_costs_an_adapter_nothing_and_full_training_its_gradients():
    def peak(adapter, rows):
        return planned("model=llama8b", f"adapter={adapter}", "strategy=fsdp", "gpus=8", "gpu=h200", "batch.micro_rows=1",
                       f"batch.global_rows={rows}")[1].memory.peak_bytes

    lora, full = (peak(adapter, 64) / peak(adapter, 8) for adapter in ("lora", "full"))
    assert 1 <= lora < 1.02
    gradients = 4 * MODELS["llama8b"].architecture.num_parameters / 8
    assert 0 < peak("full", 64) - peak("full", 8) <= gradients and full > 1.02


def test_auto_takes_the_least_sharding_that_fits_and_the_largest_micro_batch_within_the_limit():
    assert planned("model=llama8b", "gpus=8", "gpu=h100")[1].layout.strategy == "ddp"
    assert planned("model=llama70b", "gpus=8", "gpu=h100")[1].layout.strategy == "fsdp"
    assert planned("model=llama70b", "gpus=16", "gpu=h100")[1].layout.strategy == "hsdp"
    _, plan = planned("model=llama8b", "gpus=8", "gpu=h100")
    assert plan.job.micro_tokens == MOST_MICRO_TOKENS
    assert planned("model=llama8b", "gpus=8", "gpu=h100", "batch.micro_rows=3")[1].layout.cut.micro_rows == 3


def test_what_does_not_fit_comes_with_overrides_that_do():
    overrides = ("model=llama8b", "adapter=full", "gpu=h100", "gpus=1")
    config, plan = planned(*overrides)
    assert plan.verdict == DOES_NOT_FIT
    advice = remedies(config, plan)
    assert len(advice) >= 3
    for one in advice:
        again = planned(*overrides, *one.override.split())[1]  # as a user pastes it
        assert again.verdict == FITS and again.memory.peak_bytes / GIB == pytest.approx(one.peak_gib)


def test_auto_keeps_one_copy_of_what_is_offloaded():
    _, plan = planned("model=llama70b", "adapter=full", "gpu=h100", "gpus=16", "strategy.offload=all")
    assert plan.layout.strategy == "fsdp"  # hsdp fits the GPUs too, with a copy in the memory of each node


def test_a_search_ranks_what_fits_and_proposes_only_what_the_rules_accept():
    config, plan = planned("model=qwen7b", "adapter=full", "gpu=a100_80gb", "gpus=4")
    found = search(config, plan)
    for same in (True, False):
        speeds = [one.tokens_per_s for one in found.fitting if one.verdict == FITS and one.learns_the_same == same]
        assert speeds == sorted(speeds, reverse=True) and speeds
    assert [one.learns_the_same for one in found.fitting if one.verdict == FITS] == sorted(
        (one.learns_the_same for one in found.fitting if one.verdict == FITS), reverse=True) and found.failing
    for one in found.fitting[:4] + found.fitting[-4:]:  # as a user pastes it
        again = planned("model=qwen7b", "adapter=full", "gpu=a100_80gb", "gpus=4", *one.override.split())[1]
        assert (again.verdict, again.memory.peak_bytes / GIB) == (one.verdict, pytest.approx(one.peak_gib))


@pytest.mark.parametrize("overrides, offered", [
    (("model=llama70b", "adapter=full"), {"adapter=lora", "adapter=qlora", ""}),
    (("model=llama70b", "adapter=dora"), {"adapter=lora", "adapter=qlora", ""}),
    (("model=llama70b", "adapter=lora", "adapter.quantise=int8"),
     {"adapter.quantise=none", "adapter=qlora adapter.quantise=nf4", ""}),
    (("model=llama70b", "adapter=qlora"), {"adapter=lora adapter.quantise=none", ""}),
    (("model=deepseek671b",), {"adapter=qlora", "adapter.quantise=fp8", ""}),
    (("model=deepseek671b", "adapter=full"), {"adapter=lora", "adapter=qlora", "adapter=lora adapter.quantise=fp8", ""})])
def test_a_search_offers_quantised_bases_in_words_that_make_them(overrides, offered):
    overrides = (*overrides, "gpu=h200", "gpus=64", "strategy=zero3", "batch.micro_rows=1")
    config, plan = planned(*overrides)
    by_words = {}
    for one in search(config, plan, extremes=True).fitting:
        if not set(one.changed) - {"adapter", "adapter.quantise"}:
            by_words[one.override] = one
    assert set(by_words) <= offered and set(by_words) >= offered - {""}
    for words, one in by_words.items():
        assert one.learns_the_same == (words == "")
        again = planned(*overrides, *words.split())[1]
        assert again.memory.peak_bytes / GIB == pytest.approx(one.peak_gib)


def test_a_remedy_changes_no_more_than_another_that_is_nearly_as_fast():
    config, plan = planned("model=deepseek671b", "gpu=h200", "gpus=8")
    advice = [one for one in remedies(config, plan) if not {"gpus", "gpu"} & set(one.changed)]
    assert {"adapter", "adapter.quantise"} <= {key for one in advice for key in one.changed}
    for one in advice:
        assert not [other for other in advice if set(other.changed) < set(one.changed)
                    and GAIN * other.tokens_per_s >= one.tokens_per_s]


LONG = ("model=llama8b", "adapter=full", "gpu=h100", "gpus=8", "strategy=fsdp", "data.seq_tokens=131072",
        "batch.global_rows=8")


def test_gpus_that_share_a_row_hold_its_slices_and_are_offered_where_a_row_does_not_fit():
    config, alone = planned(*LONG)
    assert alone.verdict == DOES_NOT_FIT and alone.job.micro_tokens == 131072
    advice = {one.override: one for one in remedies(config, alone)}
    one = advice["strategy.sequence_gpus=2"]  # as few as it takes
    _, together = planned(*LONG, *one.override.split())
    assert together.verdict == FITS and together.memory.peak_bytes / GIB == pytest.approx(one.peak_gib)
    assert (together.job.micro_tokens, together.layout.shares, together.layout.cut.accumulation_steps) == (65536, 4, 2)
    assert together.job.step_tokens == alone.job.step_tokens == 8 * 131072
    assert "8 rows of 131,072 tokens: 4 x 1 rows x 2 accumulation steps, each row shared by 2 GPUs" in text.describe(
        config, together)
    fitting = {one.override for one in search(config, alone, extremes=True).fitting if one.verdict == FITS}
    shared = [words for words in fitting if "sequence_gpus=" in words]
    fewer = {words.replace(f"sequence_gpus={more}", f"sequence_gpus={few}") for words in shared for more in (2, 4, 8)
             for few in (2, 4) if few < more and f"sequence_gpus={more}" in words}
    unshared = {" ".join(word for word in words.split() if "sequence_gpus" not in word) for words in shared}
    assert shared and not fitting & (fewer | unshared)
    with pytest.raises(ConfigError, match="sequence_gpus=3: must divide the 32 attention heads of the model; try 1"):
        planned("model=llama8b", "gpu=h100", "gpus=6", "strategy.sequence_gpus=3")


def test_more_gpus_share_a_row_where_fewer_leave_it_tight():
    config, plan = planned(*LONG, "gpu=other", "gpu.memory_gib=40")
    offered = {one.override: one.verdict for one in search(config, plan, extremes=True).fitting}
    assert offered["strategy.sequence_gpus=4"] == TIGHT and offered["strategy.sequence_gpus=8"] == FITS
    assert "strategy.sequence_gpus=8" in {one.override for one in remedies(config, plan)}


@pytest.mark.parametrize("window", [["accumulation=2"], ["accumulation=2", "batch.global_rows=16"], []])
def test_what_is_offered_as_the_same_run_has_the_same_window(window):
    words = [*LONG[:-1], "batch.micro_rows=1", *window]
    config, plan = planned(*words)
    same = [one for one in remedies(config, plan) if one.learns_the_same]
    assert {one.override.split("=")[0] for one in same} >= {"strategy.sequence_gpus", "gpu"}
    for one in same:
        again = planned(*words, *one.override.split())[1]
        assert again.job.step_tokens == plan.job.step_tokens, one.override


@pytest.mark.parametrize("settings, message", [
    ({"sliding_window": 4096}, "attends within 4096 tokens"), ({"rope_scaling": {"type": "dynamic"}}, r"\(dynamic\)")])
def test_a_folder_whose_rows_cannot_be_shared_is_refused_by_its_plan(tmp_path, settings, message):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["mixtral8x7b"].hf_config | settings))
    words = ("model=custom", f"model.path={tmp_path}", "gpu=h200", "gpus=8", "data.seq_tokens=8192")
    config, plan = planned(*words)
    assert not any("sequence_gpus" in one.override for one in search(config, plan, extremes=True).fitting)
    with pytest.raises(ConfigError, match=message):
        planned(*words, "strategy.sequence_gpus=2")


def test_a_second_copy_is_for_zero3_whoever_chooses_the_strategy():
    words = ("model=llama8b", "adapter=full", "gpu=h100", "gpus=16", "strategy.hpz_gpus=8")
    for under_deepspeed in (False, True):
        config = compose_config(words)
        layout = plan_layout(config, architecture_of(config), gpu_of("h100"), under_deepspeed)
        assert layout.strategy == "zero3"
    assert resolve_layout(config, 16, "cpu", 8, False).strategy == "zero3"
    found = search(config, planned(*words)[1], extremes=True).fitting
    assert {one.strategy for one in found} >= {"zero3", "fsdp"}  # without the copy
    assert all("strategy.hpz_gpus=1" in one.override for one in found if one.strategy != "zero3")
    offered = search(*planned(*words[:-1], "cluster.network_gb_s=5", "batch.micro_rows=1")).fitting
    assert any("strategy=zero3 strategy.hpz_gpus=8" in one.override for one in offered)


def test_the_page_of_long_rows_says_what_the_planner_says():
    page = (ROOT / "docs" / "long_sequences.md").read_text()
    words, = re.findall(r"`python launch/plan.py (.*?)` with", page)
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert len(rows) == 9
    for more, *told in rows:
        _, plan = planned(*words.split(), *more.split())
        assert told == [f"{plan.memory.peak_bytes / GIB:.1f}", f"{plan.share:.0%}", plan.verdict,
                        f"{plan.speed.tokens_per_s:,.0f}"], more


def test_unknown_arithmetic_gives_no_speed_and_unknown_prices_no_cost():
    config, plan = planned("model=llama7b", "gpu=other", "gpu.memory_gib=48")
    assert plan.speed is None and "not known" in text.describe(config, plan)


def test_a_model_folder_is_planned_by_its_config_and_a_missing_one_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["mixtral8x7b"].hf_config))
    config, plan = planned("model=custom", f"model.path={tmp_path}", "gpu=h200", "gpus=8")
    named = planned("model=mixtral8x7b", "gpu=h200", "gpus=8")[1]
    assert plan.memory == named.memory
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="config.json"):
        planned("model=custom", f"model.path={tmp_path}", "gpu=h200")


def test_host_memory_grows_with_what_is_offloaded():
    here = planned("model=llama8b", "adapter=full", "gpu=h100", "gpus=8", "strategy=zero2")[1].host
    offloaded = planned("model=llama8b", "adapter=full", "gpu=h100", "gpus=8", "strategy=zero2",
                        "strategy.offload=optimizer")[1].host
    # moments; pinned on each of 8 GPUs fp32 weights, gradients and weights in bf16 of what decays (3.75e9 and 1.88e9 bytes)
    # and of the embedding (0.26e9 and 0.13e9); the whole embedding in bf16 (1.05e9)
    pinned = 2 * (4 + 1 / 4) + (2 + 1 / 8) + 1
    assert offloaded.memory_gib - here.memory_gib == pytest.approx(8 * 8.03e9 / GIB + 8 * pinned, rel=1e-3)
    assert here.checkpoint_gib == pytest.approx(12 * 8.03e9 / GIB, rel=0.01)


def test_a_run_that_needs_more_host_memory_than_is_given_does_not_fit():
    words = ("model=llama8b", "gpu=h100", "gpus=8", "strategy=fsdp", "strategy.offload=all")
    config, plan = planned(*words, "cluster.memory_gib=30")
    assert plan.verdict == DOES_NOT_FIT and plan.share < 0.5
    told = f"host memory {plan.host.memory_gib:.1f} GiB a node is more than cluster.memory_gib=30"
    assert told in text.describe(config, plan)
    advice = remedies(config, plan)
    assert advice and all(one.host_gib <= 30 for one in advice)
    config, plan = planned(*words, "cluster.memory_gib=60")
    assert plan.verdict == FITS and "cluster.memory_gib" not in text.describe(config, plan)


def test_what_the_engine_would_refuse_is_refused_by_the_plan():
    with pytest.raises(ConfigError, match="zero_quantized_weights"):
        planned("model=llama8b", "gpu=h100", "gpus=8", "strategy=zero3",
                "strategy.extra={zero_optimization: {zero_quantized_weights: true}}")
    with pytest.raises(ConfigError, match="no routed experts"):
        planned("model=llama8b", "gpu=h100", "gpus=8", "strategy=fsdp", "strategy.expert_gpus=2")


def test_emulated_fp8_has_no_speed_and_a_plan_says_its_levers():
    words = ("model=llama8b", "gpu=h100", "gpus=8", "strategy=fsdp", "precision=fp8")
    config, plan = planned(*words, "precision.fp8_emulate=true")
    assert plan.speed is None and planned(*words)[1].speed is not None
    assert text.as_dict(config, plan)["levers"]["precision"] == "fp8"
    assert "in every 22nd layer" in text.describe(*planned(*words, "model.checkpoint_every_layers=22"))
    assert "too low" in text.describe(*planned("model=llama8b", "gpu=h100", "model.attention=eager"))


@pytest.mark.parametrize("settings", [{"sliding_window": 1024}, {"sliding_window": None}])
def test_a_window_is_a_mask_for_which_keys_are_repeated(tmp_path, settings):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["mixtral8x7b"].hf_config | settings))
    words = ("model=custom", f"model.path={tmp_path}", "gpu=h200", "gpus=8", "model.activation_checkpointing=none")
    saved = planned(*words, "batch.micro_rows=1")[1].memory.phases["backward"]
    assert ("attention mask" in saved) == (settings["sliding_window"] is not None)


def test_a_block_of_pinned_memory_is_a_power_of_two():
    assert [pinned_bytes(size) for size in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]
    assert [pinned_bytes(size, block=10) for size in (9, 20, 25)] == [16, 32, 16 + 16 + 8]


@pytest.mark.parametrize("strategy, offload, per_parameter", [
    ("zero1", "optimizer", 18), ("zero2", "optimizer", 18), ("zero3", "optimizer", 20), ("zero3", "all", 24)])
def test_each_buffer_of_deepspeed_on_the_host_is_counted(strategy, offload, per_parameter):
    terms = planned("model=llama7b", "adapter=full", "gpu=h100", f"strategy={strategy}",
                    f"strategy.offload={offload}")[1].host.terms
    found = sum(terms[name] for name in terms if name.startswith("offloaded"))
    exact = per_parameter * 6.738e9 / GIB
    assert exact <= found < 1.4 * exact


def test_what_is_pinned_tensor_by_tensor_is_rounded_up_each():
    words = ("model=qwen32b", "gpu=h100", "strategy=zero3", "strategy.offload=all")
    terms = {adapter: planned(*words, f"adapter={adapter}")[1].host.terms["offloaded weights"]
             for adapter in ("lora", "qlora")}
    # of 64 layers, in bf16: q and o 50 MiB, k and v 10, MLP 270 each; embedding and head 1,485
    assert terms["lora"] == pytest.approx((64 * (2 * 64 + 2 * 16 + 3 * 512) + 2 * 2048) / 1024, rel=0.02)
    # codes a quarter of that, scales besides; embedding and head as before
    assert terms["qlora"] == pytest.approx((64 * (2 * 16 + 2 * 4 + 3 * 128) + 2 * 2048) / 1024, rel=0.06)


def test_layer_inputs_on_the_host_leave_the_gpu_and_are_counted_there_and_on_the_link():
    words = ("model=llama8b", "gpu=h100", "gpus=8", "data.seq_tokens=32768", "batch.micro_rows=1")
    here, there = (planned(*words, f"model.checkpoints_on_host={word}")[1] for word in ("false", "true"))
    inputs = 32 * 32768 * 4096 * 2  # layers x tokens x hidden, in bf16
    assert here.memory.peak_bytes - there.memory.peak_bytes == pytest.approx(inputs * 31 / 32, rel=1e-6)
    assert there.host.memory_gib - here.host.memory_gib == pytest.approx(8 * inputs / GIB)
    wide = ("model=qwen32b", "gpu=h100", "gpus=8", "data.seq_tokens=4096", "batch.micro_rows=1")
    rounded = planned(*wide, "model.checkpoints_on_host=true")[1].host.terms["inputs of layers"]
    assert rounded == pytest.approx(8 * 64 * 4096 * 8192 * 2 / GIB)  # of 5,120 hidden
    assert there.speed.micro_step_s - here.speed.micro_step_s == pytest.approx(
        2 * inputs / (there.gpu.host_link_gb_s * 0.8e9))


def test_a_search_offers_every_way_of_checkpointing():
    config, plan = planned("model=llama8b", "gpu=h100", "gpus=8", "strategy=fsdp", "batch.micro_rows=1",
                           "model.checkpoint_every_layers=2")
    found = {one.override for one in search(config, plan, extremes=True).fitting if all(
        key.startswith("model.") for key in one.changed)}
    assert found >= {"", "model.checkpoint_every_layers=1",
                     "model.checkpoint_every_layers=1 model.checkpoints_on_host=true"}
    config, plan = planned("model=llama8b", "gpu=h100", "gpus=8", "strategy=fsdp", "batch.micro_rows=1")
    ways = {one.override: one for one in search(config, plan, extremes=True).fitting if all(
        key.startswith("model.") for key in one.changed)}
    none, selective, full, host = (ways[words] for words in (
        "model.activation_checkpointing=none", "model.activation_checkpointing=selective", "",
        "model.checkpoints_on_host=true"))
    assert none.peak_gib > selective.peak_gib > full.peak_gib > host.peak_gib
    assert none.tokens_per_s > selective.tokens_per_s > full.tokens_per_s > host.tokens_per_s


# ---- the accumulation tables

ROWS = {model: [tables.Row(*row) for row in yaml.load((tables.FOLDER / f"{model}.yaml").read_text(),
                                                      Loader=yaml.CSafeLoader)["rows"]]
        for model in tables.table_models()}


def test_there_is_a_table_for_every_model_from_7b_on():
    assert sorted(path.stem for path in tables.FOLDER.glob("*.yaml")) == sorted(tables.table_models())
    assert "llama7b" in ROWS and "deepseek671b" in ROWS and all(ROWS.values())


@pytest.mark.parametrize("model", sorted(ROWS))
def test_every_row_of_a_table_is_what_the_planner_says(model):
    fields = [field.name for field in dataclasses.fields(tables.Row)]
    lines = (tables.FOLDER / f"{model}.yaml").read_text()
    assert f"columns: [{', '.join(fields)}]" in lines
    assert tables.table_text(model) == lines, f"conf/tables/{model}.yaml: run python launch/plan.py --tables"


@pytest.mark.parametrize("model", sorted(ROWS))
def test_every_table_has_what_can_be_trained_on_which_base(model):
    found = {(row.adapter, row.quantise) for row in ROWS[model]}
    in_fp8 = {("lora", "fp8")} if model == "deepseek671b" else set()  # which is how it is published
    assert found == {("lora", "none"), ("qlora", "nf4"), ("full", "none")} | in_fp8


@pytest.mark.parametrize("model", sorted(ROWS))
def test_every_row_makes_exactly_the_asked_global_batch_and_fits(model):
    for row in ROWS[model]:
        assert row.rows_per_step == 128
        micros = cut_window([1] * row.rows_per_step, row.gpus, row.micro_rows)
        rows = [index for share in micros for micro in share for index in micro]
        assert sorted(rows) == list(range(128)), row
        assert max(len(share) for share in micros) == row.accumulation_steps == math.ceil(
            math.ceil(128 / row.gpus) / row.micro_rows), row
        assert verdict(row.peak_gib * GIB, GPUS[row.gpu].memory_gib) == FITS, row
