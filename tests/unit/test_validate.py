"""The planner beside the published rows: the bounds hold, and what cannot be predicted says why."""

import json
from dataclasses import fields, replace
from importlib.resources import files

import pytest

from tonnage.facts.models import MODELS
from tonnage.plan import validate as module
from tonnage.plan.activations import Style, layer_tape, play
from tonnage.plan.job import Job
from tonnage.plan.memory import memory
from tonnage.plan.profiles import PROFILES, TRAITS, Profile, predict, profile_of
from tonnage.plan.published import predictable, rows
from tonnage.plan.validate import Validation, groups, half_of, lines, outside_gib, to_json, validate

BY_ID = {row.id: row for row in rows()}


@pytest.fixture(scope="module")
def found():
    return validate()


def gib(name):
    return predict(predictable(BY_ID[name])).peak_bytes / 2**30


def test_the_bounds_hold(found):
    assert found.broken() == []
    assert len(found.of("allocated", "active")) >= 150 and len(found.half["untouched"]) >= 50


def test_every_measured_row_is_there_with_an_error_or_a_reason(found):
    measured = [row.id for row in rows() if row.peak_gib is not None or row.did_not_fit]
    assert [case.id for case in found.cases] == measured
    assert all((case.error is None) == (case.why is not None) for case in found.cases)
    by_id = {case.id: case for case in found.cases}
    assert by_id["fmsacc-orcapf-005"].predicted_gib is None and "lengths vary" in by_id["fmsacc-orcapf-005"].why
    assert by_id["fmsacc-orcapf-004"].error is not None  # the optimizer step is its peak whatever the lengths
    assert by_id["fmsacc-base-016"].verdict == "does not fit" and by_id["fmsacc-base-016"].published_gib is None


def test_what_misses_is_listed_with_its_rows_and_a_cause(found):
    text = "\n".join(module.lines(found))
    assert "tt-8b-lora-a6000" in text and "litgpt-a100-12" in text and "no cause found" not in text


def test_json(found):
    row = to_json(found)["rows"][0]
    assert list(row) == ["id", "predicted_gib", "published_gib", "peak_kind", "error", "verdict", "why"]
    assert row["error"] == row["predicted_gib"] / row["published_gib"] - 1
    json.dumps(to_json(found), allow_nan=False)


def test_groups_are_halved_the_same_way_each_time(found):
    assert list(groups()) == sorted(set(groups()))
    halves = {(case.source, case.family): case.half for case in found.of("allocated", "active")}
    assert [halves[group] for group in groups()] == [("fitted", "untouched")[i % 2] for i in range(len(groups()))]
    stranger = predictable(replace(BY_ID["fmsacc-base-008"], source="a new one"))
    assert half_of(stranger) == "untouched"


def test_a_file_of_the_same_columns(tmp_path):
    lines = files("tonnage.facts").joinpath("published.csv").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    complete = next(line for line in lines if line.startswith("fmsacc-base-008,"))
    without_length = complete.replace("fmsacc-base-008", "mine").replace(",4096,", ",,", 1)
    path = tmp_path / "mine.csv"
    path.write_text("\n".join([lines[0], complete, without_length]) + "\n")
    measured = validate(path)
    assert not measured.broken()
    first, second = json.loads(json.dumps(to_json(measured)))["rows"]
    assert abs(first["error"]) < 0.01 and first["why"] is None and first["verdict"] == "tight"
    assert (second["id"], second["error"], second["predicted_gib"]) == ("mine", None, None)
    assert second["why"] == "no sequence length stated"


def test_a_broken_bound_is_told(found):
    off = [replace(case, error=0.2) if case.half == "untouched" and case.error else case for case in found.cases]
    broken = Validation(tuple(off), found.speeds)
    assert "untouched half: median |error| 20.0%, above 3%" in "\n".join(broken.broken())
    assert "broken: untouched half: median |error| 20.0%, above 3%" in "\n".join(lines(broken))


def test_the_allocators_term():
    assert outside_gib("allocated", 40, 8) == outside_gib("unspecified", 40, 8) == 0
    assert outside_gib("reserved", 40, 8) == pytest.approx(6)
    assert outside_gib("device", 40, 1) == pytest.approx(6.7) and outside_gib("device", 40, 2) == pytest.approx(8.2)


def test_traits_are_fields_of_a_profile():
    names = {field.name for field in fields(Profile)}
    assert all(set(changed) <= names for changed in TRAITS.values())
    assert all(isinstance(profile, Profile) for profile in PROFILES.values())
    profile = profile_of(predictable(BY_ID["fmsacc-liger-020"]))
    assert profile.fused_norm and profile.fused_adapter and profile.adapter_bytes == 2 and profile.fused_ce == (8, 8)


# Mechanisms, each by a row that it decides; measured bytes are exact, from the notes of the row
@pytest.mark.parametrize("name", [
    "fmsacc-base-008",     # 10 bytes a parameter in the step
    "fmsacc-base-034",     # 14 bytes a logit
    "fmsacc-liger-102",    # keys repeated, the recomputed output held
    "fmsacc-liger-162",    # 8 bytes a logit, 12 bytes a parameter before backward
    "fmsacc-liger-174",    # layer inputs and their gradients kept by hooks
    "fmsacc-base-058",     # fp32 between layers
])
def test_mechanisms(name):
    assert gib(name) == pytest.approx(BY_ID[name].peak_gib, rel=0.003)


def test_layers_of_other_frameworks():
    architecture = MODELS["mixtral8x7b"].architecture

    def played(**style):
        return play(layer_tape(architecture, 0, 1, 1024, Style(trains_base=False, **style)), "x")

    at_once, in_turn = played(), played(looped_experts=True)
    width, hidden = architecture.expert_intermediate, architecture.hidden
    # three tensors of the experts' width and their outputs, for each of a token's 2 experts, either way
    assert in_turn.saved == pytest.approx(at_once.saved, rel=0.01) and in_turn.saved > 2 * 1024 * 2 * (3 * width + hidden)
    assert in_turn.backward < at_once.backward
    llama = MODELS["llama7b"].architecture
    plain, fused = (play(layer_tape(llama, 0, 1, 1024, Style(fused_mlp=fused)), "x") for fused in (False, True))
    assert plain.saved - fused.saved == 1024 * 2 * llama.intermediate


@pytest.mark.parametrize("adapter, checkpointing, gpus, backward, loss", [
    ("full", "full", 1, 111541919744, 110470701056),
    ("lora", "none", 8, 25120203776, 25124111360),
])
def test_this_projects_own_memory_is_untouched_by_profiles(adapter, checkpointing, gpus, backward, loss):
    job = Job(architecture=MODELS["llama7b"].architecture, adapter=adapter, rank=16, targets=("all-linear",),
              strategy="fsdp", gpus=gpus, gpus_per_node=gpus, shard_gpus=gpus, offload="none", reshard_after_forward=True,
              precision="bf16", optimizer="adamw", seq_tokens=2048, micro_rows=2, accumulation_steps=4,
              checkpointing=checkpointing, attention="sdpa", loss="chunked", loss_chunk_tokens=1024)
    phases = memory(job).phases
    assert (sum(phases["backward"].values()), sum(phases["loss"].values())) == (backward, loss)
