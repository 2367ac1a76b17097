"""Adapters end up on the matrices that are named, whatever peft makes of the names."""

import json

import pytest
import torch

from tonnage.config.schema import Adapter, Model
from tonnage.errors import ConfigError
from tonnage.facts.models import MODELS
from tonnage.models import build

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 4}
SPARSE = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
          "n_group": 2, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 8, "v_head_dim": 16}


@pytest.fixture(params=["llama7b", "deepseek671b"])
def model(request, tmp_path):
    small = SMALL | (SPARSE if request.param.startswith("deepseek") else {})
    (tmp_path / "config.json").write_text(json.dumps(MODELS[request.param].hf_config | small))
    with torch.device("meta"):
        return build.build_model(str(tmp_path), Model(path=str(tmp_path)), Adapter(), "sdpa", torch.bfloat16, torch.float32)


def test_all_linear_adapts_every_linear_of_the_decoder_and_nothing_else(model):
    base = model.get_base_model()
    adapted = {name for name, module in base.named_modules() if hasattr(module, "lora_A")}
    wanted = {name for name in adapted | {
        name for name, module in base.model.layers.named_modules(prefix="model.layers")
        if isinstance(module, torch.nn.Linear)} if not name.endswith((".base_layer", ".default"))}
    assert adapted == wanted
    assert not any("experts." in name and "shared" not in name for name in adapted)
    assert any(name.endswith("layers.0.mlp.gate_proj") for name in adapted)


def test_peft_by_itself_still_misreads_a_mixture_of_experts(model):
    """Where this fails for deepseek_v3, `exact_targets` and export's refusal can go."""
    assert build.misread_by_peft(model) == (model.config.model_type == "deepseek_v3")


def test_linear_layers_of_a_class_of_their_own_are_named_where_they_stay_unquantised(tmp_path, monkeypatch):
    class Own(torch.nn.Linear):
        pass

    said = []
    monkeypatch.setattr(build.LOG, "warning", said.append)
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama7b"].hf_config | SMALL))
    with torch.device("meta"):
        plain = build.build_model(str(tmp_path), Model(path=str(tmp_path)), Adapter(name="full"), "sdpa", torch.bfloat16,
                                  torch.float32)
    plain.model.layers[1].mlp.up_proj.__class__ = Own
    build.quantise(plain, "nf4")
    assert len(said) == 1 and "1 linear layers" in said[0] and "model.layers.1.mlp.up_proj" in said[0]
    assert not hasattr(plain.model.layers[1].mlp.up_proj, "kept") and plain.model.layers[0].mlp.up_proj.kept


def test_code_without_an_attention_is_told_which_it_has(tmp_path):
    gemma = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32,
             "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    with pytest.raises(ConfigError, match="=auto: the code of gemma2 has none by sdpa; use model.attention=eager"):
        build.build_model(str(tmp_path), Model(path=str(tmp_path)), Adapter(name="full"), "sdpa", torch.float32,
                          torch.float32)
