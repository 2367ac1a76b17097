"""The published rows: parsed, mapped to jobs, and honest about what cannot be asked."""

import csv
import dataclasses
from importlib.resources import files

import pytest

from tonnage.facts.gpus import GPUS
from tonnage.facts.shapes import is_stand_in, shape_of
from tonnage.plan.profiles import PROFILES, TRAITS
from tonnage.plan.published import Published, counts, predictable, published, rows

BY_ID = {row.id: row for row in rows()}


def lines():
    """The rows of the file as they are."""
    text = files("tonnage.facts").joinpath("published.csv").read_text(encoding="utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))


def test_rows_are_parsed():
    assert len(rows()) == len(BY_ID) == 830
    row = BY_ID["fmsacc-base-009"]
    assert (row.model, row.world, row.peak_gib, row.tok_per_s_per_gpu) == ("Mistral-7B-v0.1", 2, 33.74, 2777.2)
    assert row.grade == "A" and row.lora_rank is None and row.has_tensor_peak


def test_a_row_becomes_a_job():
    found = predictable(BY_ID["fmsacc-base-009"])
    job = found.job
    assert (job.adapter, job.strategy, job.gpus, job.shard_gpus, job.seq_tokens, job.micro_rows) == (
        "full", "fsdp", 2, 2, 4096, 2)
    assert (job.checkpointing, job.attention, job.loss, job.precision) == ("full", "flash", "plain", "bf16")
    assert (found.profile, found.base, found.logits, found.gpu) == ("hf_pure_bf16", "bf16", "plain", "a100_80gb")
    assert found.predicts_memory and found.predicts_speed


@pytest.mark.parametrize("name, expected", [
    ("fmsacc-base-034", ("hf_lora", "bf16", "plain")),
    ("fmsacc-liger-020", ("hf_qlora", "nf4_dq", "none")),
    ("fmsacc-liger-036", ("hf_fsdp_mixed", "bf16", "none")),
    ("fsdpqlora-02", ("fsdp_qlora", "nf4", "plain")),
    ("litgpt-a100-13", ("litgpt_bf16_true", "nf4_dq", "chunked")),
    ("tt-8b-lora-4090", ("torchtune_bf16", "bf16", "chunked")),
    ("automodel-gc-lce", ("automodel_bf16", "bf16", "none")),
    ("foundry-037", ("fsdp1_fp32_master", "bf16", "plain")),
    ("qwen-7b-full-256", ("deepspeed_zero", "bf16", "plain")),
])
def test_frameworks_and_losses(name, expected):
    found = predictable(BY_ID[name])
    assert (found.profile, found.base, found.logits) == expected


def test_what_is_not_stated_is_a_reason():
    reasons = {"fmsacc-issue12-1": "no sequence length stated", "mbridge-001": "tensor, pipeline",
               "titan-a100-64-8b-selop": "selective", "lora-paper-gpt3-full": "tensor, pipeline",
               "qwen-7b-loraemb-512": "more than them"}
    for name, words in reasons.items():
        found = predictable(BY_ID[name])
        assert isinstance(found, str) and words in found, (name, found)
    bounded = [predictable(row) for row in rows() if "orca" in row.seq_len]
    assert bounded and not any(found.predicts_memory or found.predicts_speed for found in bounded)


def test_longest_samples_set_a_peak_but_no_speed():
    found = predictable(BY_ID["litgpt-a100-13"])
    assert found.job.seq_tokens == 1304 and found.seq_is_longest and not found.predicts_speed


def test_shapes_have_the_published_number_of_parameters():
    seen = {row.model for row in rows() if shape_of(row.model)}
    stated = {line["model"]: float(line["params_b"]) for line in lines() if line["model"] in seen and line["params_b"]}
    assert len(stated) > 50
    for name, billions in stated.items():
        assert shape_of(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01), name
    assert is_stand_in("MPT-7b") and not is_stand_in("Llama-2-7b") and shape_of("gpt-neox") is None


def test_all_that_is_mapped_is_named():
    for found in published():
        assert found.profile in PROFILES and set(found.traits) <= set(TRAITS)
        assert found.logits in ("plain", "fused_ce", "chunked", "none")
        assert found.gpu is None or found.gpu in GPUS
        assert found.job.gpus % found.job.gpus_per_node == 0 and found.job.micro_rows >= 1
        assert all(value is not None for value in dataclasses.asdict(found.job).values())


def test_most_rows_with_a_tensor_peak_or_a_fixed_length_can_be_asked():
    memory, oom, speed = counts().values()
    assert memory.total() == 197 and memory["predictable"] >= 150
    assert oom.total() == 76 and oom["predictable"] >= 65
    assert speed.total() == 501 and speed["predictable"] >= 230
    assert sum(isinstance(predictable(row), Published) for row in rows()) > 300
