"""Weights are read by rows, FP8 with its scales, and kept quantised; broken files and other formats are named."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from moe import make_moe, publish_fp8
from safetensors.torch import load_file, save_file

from tonnage.config.schema import Adapter, Model
from tonnage.errors import ModelError
from tonnage.models import build, load
from tonnage.models.folder import check_path
from tonnage.models.quantised import FORMATS, Kept
from tonnage.models.shards import BlockScaled, Checkpoint, Stacked, Stored


def blocks(rows, columns, seed=0):
    """FP8 codes [rows, columns], a scale for each of their blocks, and by the definition what they stand for."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(math.ceil(rows / 128), math.ceil(columns / 128), generator=generator) + 0.01
    weight = torch.empty(rows, columns)
    for i in range(rows):
        for first in range(0, columns, 128):
            weight[i, first:first + 128] = codes[i, first:first + 128].float() * scales[i // 128, first // 128]
    return codes, scales, weight


def saved(folder, tensors):
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Checkpoint(str(folder))


# ---- files -------------------------------------------------------------------------------------------------------

@pytest.fixture
def shards(tiny_folder, tmp_path):
    """The tiny Llama in several shards, a folder that may be broken."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tiny_folder).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    return tmp_path


def test_a_shard_that_is_cut_short_is_named_before_anything_starts(shards):
    check_path(Model(path=str(shards)))
    broken = sorted(shards.glob("model-*.safetensors"))[1]
    broken.write_bytes(broken.read_bytes()[:-10])
    with pytest.raises(ModelError, match=rf"{broken.name} cannot be read, it is cut short or damaged.*fetch it again"):
        check_path(Model(path=str(shards)))


def test_a_shard_that_is_missing_is_named_before_anything_starts(shards):
    lost = sorted(shards.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=f"1 of .* shards are missing: {lost.name}; fetch them again"):
        check_path(Model(path=str(shards)))


# ---- FP8 ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("start, stop", [(0, 576), (0, 1), (127, 129), (130, 140), (128, 256), (500, 576), (575, 576)])
def test_rows_of_block_scaled_fp8_are_what_the_definition_says(tmp_path, start, stop):
    codes, scales, weight = blocks(576, 300)
    source = BlockScaled(saved(tmp_path, {"w": codes, "w_scale_inv": scales}), "w")
    assert source.shape == (576, 300)
    assert torch.equal(source.rows(start, stop), weight[start:stop])


def test_a_missing_scale_and_one_of_another_shape_are_named(tmp_path):
    codes, scales, _ = blocks(576, 300)
    for tensors, said in (
            ({"deep.w": codes}, "deep.w is FP8 and deep.w_scale_inv is in no file"),
            ({"deep.w": codes, "deep.w_scale_inv": scales[:, :2].contiguous()},
             r"deep.w_scale_inv has shape \[5, 2\]; deep.w, \[576, 300\], has \[5, 3\] blocks"),
            ({"deep.w": codes.float().to(torch.float8_e5m2), "deep.w_scale_inv": scales},
             "deep.w is FP8 of type float8_e5m2")):
        with pytest.raises(ModelError, match=said):
            BlockScaled(saved(tmp_path, tensors), "deep.w")


def test_fp8_files_are_kept_bit_for_bit(tmp_path):
    codes, scales, _ = blocks(576, 300)
    source = BlockScaled(saved(tmp_path, {"w": codes, "w_scale_inv": scales}), "w")
    kept = Kept("fp8", (576, 300), 1, torch.float32)
    for start, stop in ((0, 576), (128, 384), (512, 576)):
        fields = kept.from_rows(source, start, stop, torch.device("cpu"))
        assert torch.equal(fields["codes"], codes.view(torch.uint8)[start:stop])
        assert torch.equal(fields["scales"].view(torch.float32), scales[start // 128:math.ceil(stop / 128)])


def test_stacked_experts_in_fp8_are_kept_bit_for_bit(tmp_path):
    made = {f"{i}.{name}": blocks(144, 160, seed=2 * i + j) for i in range(3) for j, name in enumerate(("gate", "up"))}
    checkpoint = saved(tmp_path, {key: codes for key, (codes, _, _) in made.items()} | {
        f"{key}_scale_inv": scales for key, (_, scales, _) in made.items()})
    source = Stacked([[BlockScaled(checkpoint, f"{i}.{name}") for i in range(3)] for name in ("gate", "up")])
    kept = Kept("fp8", (3, 288, 160), 2, torch.float32)
    fields = kept.from_rows(source, 1, 3, torch.device("cpu"))
    weight = torch.stack([torch.cat([made[f"{i}.{name}"][2] for name in ("gate", "up")]) for i in (1, 2)])
    for n, i in enumerate((1, 2)):
        for part, kind in (("codes", 0), ("scales", 1)):
            whole = torch.cat([made[f"{i}.{name}"][kind] for name in ("gate", "up")])
            assert torch.equal(fields[part][n], whole.view(torch.uint8 if kind == 0 else torch.int32))
    assert torch.equal(FORMATS["fp8"].dequantise(fields, (2, 288, 160), 2, torch.float32), weight)


@pytest.mark.parametrize("base", FORMATS)
def test_what_is_kept_does_not_depend_on_how_rows_are_cut(tmp_path, base):
    weight = torch.randn(576, 300, generator=torch.Generator().manual_seed(0))
    source, kept = Stored(saved(tmp_path, {"w": weight}), "w"), Kept(base, (576, 300), 1, torch.float32)
    whole = kept.from_rows(source, 0, 576, torch.device("cpu"))
    assert {name: (tuple(one.shape), one.dtype) for name, one in whole.items()} == kept.fields
    for cuts in ((0, 128, 576), (0, 256, 384, 576)) + (((0, 1, 77, 576),) if kept.format.block_rows == 1 else ()):
        parts = [kept.from_rows(source, a, b, torch.device("cpu")) for a, b in zip(cuts, cuts[1:], strict=False)]
        for name, tensor in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), tensor), (name, cuts)


# ---- whole models ------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """(plain folder, its FP8 files) of the tiny deepseek_v3."""
    plain = make_moe(tmp_path_factory.mktemp("plain"), "deepseek_v3")
    return plain, publish_fp8(plain, tmp_path_factory.mktemp("published"))


def loaded(folder, adapter, dtype=torch.float32):
    with torch.device("meta"):
        model = build.build_model(folder, Model(path=folder), adapter, "sdpa", dtype, dtype)
    load.load_weights(model, folder, torch.device("cpu"))
    return model


def by_definition(folder):
    """Each tensor of an FP8 folder, its blocks times their scales."""
    stored = load_file(Path(folder) / "model.safetensors")
    found = {}
    for name, tensor in stored.items():
        scales = stored.get(name + "_scale_inv")
        if scales is not None:
            rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
            tensor = tensor.float() * scales[rows][:, columns]
        found[name] = tensor
    return {name: tensor for name, tensor in found.items() if not name.endswith("_scale_inv")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_trained_from_fp8_files_begins_as_the_definition_says(published, tmp_path, dtype):
    _, folder = published
    model = loaded(folder, Adapter(name="full"), dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path)  # back to the hub's names and layout, by transformers
    found, expected = load_file(tmp_path / "model.safetensors"), by_definition(folder)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_a_model_keeps_the_codes_and_scales_of_its_fp8_files(published):
    _, folder = published
    stored = load_file(Path(folder) / "model.safetensors")
    model = loaded(folder, Adapter(name="lora", quantise="fp8"))
    parameters = dict(model.named_parameters())
    layer = "model.layers.1.mlp"
    linear = f"{layer}.shared_experts.down_proj.weight"
    kept = "base_model.model." + linear.replace(".weight", ".base_layer.weight")
    assert torch.equal(parameters[kept + "_codes"], stored[linear].view(torch.uint8))
    assert torch.equal(parameters[kept + "_scales"], stored[linear + "_scale_inv"].view(torch.int32))
    for i in range(8):
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for field, suffix, view in (("codes", "", torch.uint8), ("scales", "_scale_inv", torch.int32)):
                whole = torch.cat([stored[f"{layer}.experts.{i}.{part}.weight{suffix}"] for part in parts])
                assert torch.equal(parameters[f"base_model.model.{layer}.experts.{name}_{field}"][i], whole.view(view))


# ---- other formats -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings, said", [
    ({"quant_method": "gptq", "bits": 4}, "quantised by gptq"),
    ({"quant_method": "awq", "bits": 4}, "quantised by awq"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by bitsandbytes"),
    ({"quant_method": "mxfp4"}, "quantised by mxfp4"),
    ({"quant_method": "compressed-tensors"}, "quantised by compressed-tensors"),
    ({"bits": 4}, "quantised by a method that is not named"),
    ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 64]}, r"FP8 with weight_block_size \[64, 64\]"),
    ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": None}, "FP8 with weight_block_size None"),
    ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "FP8 of type e5m2")])
def test_files_in_another_quantised_format_are_refused_before_anything_starts(tiny_folder, tmp_path, settings, said):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ModelError, match=f"^model.path={folder}: its weights are {said}.*name the folder of the "
                                         "unquantised model.*adapter.quantise"):
        check_path(Model(path=str(folder)))


def test_fp8_files_as_deepseek_publishes_them_are_taken(published):
    check_path(Model(path=published[1]))
