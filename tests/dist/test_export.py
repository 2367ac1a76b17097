"""Runs on quantised bases and with adapters of routed experts: trained, resumed elsewhere, exported, loaded by the libraries."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from moe import ALPHA, RANK, adapted, adapter_names, make_moe, publish_fp8, round_trip
from tiny import config_for, go_to_newest, make_chat_model, open_tiny

from tonnage.errors import ConfigError
from tonnage.runtime import runs
from tonnage.train import checkpoint, export, loop

# name: family, quantised base in training, whether the files are published in FP8, what `auto` comes to
KINDS = {"qwen3_moe-nf4": ("qwen3_moe", "nf4", False, "adapter"), "deepseek_v3-fp8": ("deepseek_v3", "fp8", True, "merged"),
         "deepseek_v3-nf4": ("deepseek_v3", "nf4", False, "merged"), "qwen3_moe-fp8": ("qwen3_moe", "fp8", True, "adapter"),
         "mixtral-none": ("mixtral", "none", False, "adapter"), "llama-nf4": ("llama", "nf4", False, "adapter"),
         "qwen3_moe-none": ("qwen3_moe", "none", False, "adapter"),
         "qwen3_moe-whole": ("qwen3_moe", "fp8", True, "adapter")}
CHANGES = {"qwen3_moe-whole": {"hidden_size": 256}}  # no block of the FP8 files that is cut off
TOLERANCE = 1e-5  # of weights and losses, relative


def words(family, base):
    targets = "[all-linear]" if family == "llama" else "[all-linear,experts]"
    return [f"adapter={'qlora' if base == 'nf4' else 'lora'}", f"adapter.quantise={base}", f"adapter.targets={targets}",
            "optimizer.learning_rate=0.01"]


def go_on(folder, run_folder, strategy, micro, until, overrides):
    """Train from the newest checkpoint of a run to step `until` and save there; the losses."""
    run_folder = Path(run_folder)
    s = open_tiny(config_for(strategy, f"batch.micro_rows={micro}", *overrides), folder, run_folder=run_folder)
    checkpoints, run_id = run_folder / "checkpoints", runs.run_id(run_folder)
    go_to_newest(s, checkpoints, run_id)
    s.num_steps = s.last_saved = until
    loop.train(s)
    checkpoint.save(checkpoints, s.engine, s.position, run_id, s.source.state(), dist.group.WORLD)
    losses = [line["loss"] for line in s.metrics.lines]
    s.engine.close()
    return losses


@pytest.fixture(scope="module")
def trained(pools, tmp_path_factory):
    """`trained(kind)`: (plain folder, run folder, losses) of two windows on 2 ranks of fsdp and one on 1 of zero3."""
    import toy_tokenizers

    made = {}

    def run_of(kind):
        if kind in made:
            return made[kind]
        family, base, published, _ = KINDS[kind]
        place, tokenizer = tmp_path_factory.mktemp(kind), toy_tokenizers.byte_level()
        if family == "llama":
            plain = folder = make_chat_model(place / "model")
        else:
            plain = folder = make_moe(place / "model", family, vocab_size=len(tokenizer), **CHANGES.get(kind, {}))
        if published:
            folder = publish_fp8(plain, place / "published")
        tokenizer.save_pretrained(folder)
        overrides = words(family, base)
        run_folder = _new_run(place, "run", folder, overrides)
        losses = pools(2).run(go_on, folder, str(run_folder), "fsdp", 2, 2, overrides)[0]
        losses += pools(1).run(go_on, folder, str(run_folder), "zero3", 3, 3, overrides)[0]
        made[kind] = plain, run_folder, losses
        return made[kind]
    return run_of


def _new_run(place, name, folder, overrides):
    config = config_for("fsdp", *overrides, f"model.path={folder}")
    run_folder = runs.create_run(str(place), name, "tiny", asdict(config))
    runs.add_attempt(run_folder, {"model_folder": folder, "overrides": []})
    return run_folder


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(export, "ANSWER_TOKENS", 4)


def merged_by_hand(plain, run_folder, base):
    """Weights by name in plain transformers: W, or what is left of it in format `base`, + alpha / rank B A."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    stored = checkpoint.StoredTensors(sorted((run_folder / "checkpoints").glob("step-*"))[-1])
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name in adapted(model):
        if base != "none":
            weights[name] = round_trip(weights[name], base, name.rsplit(".", 1)[-1])
        names = adapter_names(name)
        if names[0] in stored.names():
            weights[name] = weights[name] + ALPHA / RANK * stored[names[1]] @ stored[names[0]]
    return weights


def same_weights(folder, expected):
    from transformers import AutoModelForCausalLM

    found = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).norm() <= TOLERANCE * weight.norm(), name


@pytest.mark.parametrize("kind", ["deepseek_v3-fp8", "qwen3_moe-nf4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (
    "deepseek_v3-nf4", "qwen3_moe-fp8", "qwen3_moe-none"))])
def test_a_run_on_a_quantised_base_goes_on_with_another_engine(pools, trained, tmp_path, kind):
    _, run_folder, losses = trained(kind)
    folder = runs.read_attempt(run_folder)["model_folder"]
    whole = _new_run(tmp_path, "whole", folder, words(*KINDS[kind][:2]))
    expected = pools(1).run(go_on, folder, str(whole), "zero3", 3, 3, words(*KINDS[kind][:2]))[0]
    assert losses == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_export_is_the_published_base_and_the_adapter(trained, tmp_path, kind):
    plain, run_folder, _ = trained(kind)
    _, base, published, _ = KINDS[kind]
    done = export.export_run(run_folder, "merged", dtype="fp32", out=tmp_path / "merged")
    same_weights(done.folder, merged_by_hand(plain, run_folder, "fp8" if published else "none"))
    assert "quantization_config" not in json.loads((done.folder / "config.json").read_text())
    if base == "none":
        assert not done.notes
    else:
        assert done.notes[0].startswith(f"trained on a base kept in {base}, exported for the published one: that changes")
        assert ("by 0.00% and 0 of its" in done.notes[0]) == published


def test_a_merged_export_can_have_the_base_that_training_saw(trained, tmp_path):
    plain, run_folder, _ = trained("deepseek_v3-nf4")
    done = export.export_run(run_folder, "merged", dtype="fp32", out=tmp_path / "merged", base="trained")
    same_weights(done.folder, merged_by_hand(plain, run_folder, "nf4"))
    assert "base that training saw, nf4 dequantised" in done.notes[0]
    assert "kept in nf4; here it is what that stands for" in (done.folder / "README.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_auto_is_an_adapter_where_peft_can_load_it(trained, tmp_path, kind):
    _, run_folder, _ = trained(kind)
    expected = KINDS[kind][-1]
    done = export.export_run(run_folder, out=tmp_path / "auto")
    assert (done.folder / "adapter_config.json").is_file() == (expected == "adapter")
    if expected == "merged":
        with pytest.raises(ConfigError, match="kind=adapter: peft 0.21 would take .*; use kind=merged"):
            export.export_run(run_folder, "adapter", out=tmp_path / "adapter")
    else:
        with pytest.raises(ConfigError, match="base=trained: .*use kind=merged"):
            export.export_run(run_folder, out=tmp_path / "adapter", base="trained")
        assert any("transformers 5.24 misreads" in note for note in done.notes) == (kind == "qwen3_moe-fp8")


def test_an_exported_adapter_gives_the_logits_of_the_merged_weights(trained, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain, run_folder, _ = trained("qwen3_moe-nf4")
    done = export.export_run(run_folder, "adapter", out=tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        expected = torch.func.functional_call(model, merged_by_hand(plain, run_folder, "none"), (ids,)).logits
        before = model(ids).logits
        found = PeftModel.from_pretrained(model, done.folder).eval()(ids).logits
    assert (found - expected).norm() <= TOLERANCE * expected.norm() < 1e-2 * (before - expected).norm()
