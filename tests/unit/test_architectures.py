"""Parameter counts against the real modules of transformers on the meta device, and against the published counts.

Counted on both sides: every nn.Parameter once, and the persistent buffers, which are the router's bias of DeepSeek-V3
(`e_score_correction_bias`). Both come from the checkpoint.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from tonnage.errors import ConfigError
from tonnage.facts.architectures import MODEL_TYPES, Architecture
from tonnage.facts.docs import models_markdown
from tonnage.facts.models import MODELS
from tonnage.facts.shapes import shape_of

ROOT = Path(__file__).parents[2]
TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
TINY_MOE = TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TINY_DEEPSEEK = TINY | {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Every family, with its defaults and with the options that no named model uses.
VARIANTS = {
    "llama": TINY | {"model_type": "llama"},
    "llama, biases, tied": TINY
    | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 12, "tie_word_embeddings": True},
    "mistral, ignored bias": TINY | {"model_type": "mistral", "attention_bias": True},
    "mixtral": TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": TINY | {"model_type": "qwen2"},
    "qwen3": TINY | {"model_type": "qwen3"},
    "qwen3, bias": TINY | {"model_type": "qwen3", "attention_bias": True, "head_dim": 16},
    "qwen3_moe": TINY_MOE | {"model_type": "qwen3_moe"},
    "qwen3_moe, some dense": TINY_MOE | {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "qwen3_moe, no experts": TINY_MOE | {"model_type": "qwen3_moe", "num_experts": 0},
    "deepseek_v2": TINY_DEEPSEEK | {"model_type": "deepseek_v2"},
    "deepseek_v2, biases": TINY_DEEPSEEK
    | {"model_type": "deepseek_v2", "attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 1},
    "deepseek_v3": TINY_DEEPSEEK | {"model_type": "deepseek_v3"},
    "deepseek_v3, bias": TINY_DEEPSEEK
    | {"model_type": "deepseek_v3", "attention_bias": True, "q_lora_rank": 20, "first_k_dense_replace": 1},
    "deepseek_v3, plain queries": TINY_DEEPSEEK | {"model_type": "deepseek_v3", "q_lora_rank": None},
    "gemma": TINY | {"model_type": "gemma"},
    "gemma2, untied": TINY | {"model_type": "gemma2", "tie_word_embeddings": False, "attention_bias": True},
}


def build_on_meta(config: dict) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def count(module: torch.nn.Module) -> int:
    stored = module.state_dict().keys()
    buffers = [buffer for name, buffer in module.named_buffers() if name in stored]
    return sum(tensor.numel() for tensor in [*module.parameters(), *buffers])


def matrices(layer: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Name to (in, out) of every tensor that is multiplied; the experts' are stacked to (experts, out, in)."""
    named = {name.removesuffix(".weight"): p for name, p in layer.named_parameters() if p.ndim > 1}
    return {name: (p.shape[-1], p.shape[-2]) for name, p in named.items()}


def assert_equal_to_modules(arch: Architecture, model: torch.nn.Module) -> None:
    assert len(model.model.layers) == arch.num_layers
    for i, layer in enumerate(model.model.layers):
        assert arch.layer_parameters(i).total == count(layer), f"layer {i}"
        assert arch.linear_shapes(i) == matrices(layer), f"layer {i}"
    assert arch.embedding_parameters == count(model.model.embed_tokens)
    assert arch.final_norm == count(model.model.norm)
    assert arch.num_parameters == count(model)
    assert arch.max_positions_tokens == model.config.max_position_embeddings


@pytest.mark.parametrize("name", MODELS)
def test_named_model_equals_its_modules_and_the_published_total(name):
    facts = MODELS[name]
    model = build_on_meta(facts.hf_config)
    assert_equal_to_modules(facts.architecture, model)
    for total in (facts.architecture.num_parameters, count(model)):
        assert total == pytest.approx(facts.published_parameters, rel=1e-3)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_family_and_option_equals_its_modules(config):
    assert_equal_to_modules(Architecture.from_hf_config(config), build_on_meta(config))


@pytest.mark.parametrize("name, config, head", [
    ("phi-1.5 1.3B", {"model_type": "phi", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
                      "num_attention_heads": 32, "vocab_size": 51200}, "lm_head"),
    ("StableLM Alpha 3B", {"model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384,
                           "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 50688}, "embed_out"),
])
def test_families_that_others_measured_equal_their_modules(name, config, head):
    arch, model = shape_of(name), build_on_meta(config)
    layers = model.base_model.layers
    assert [arch.layer_parameters(i).total for i in range(arch.num_layers)] == [count(layer) for layer in layers]
    assert arch.num_parameters == count(model)
    assert arch.head_parameters == count(getattr(model, head, None) or model.get_output_embeddings())
    assert arch.embedding_parameters == count(model.get_input_embeddings())
    assert arch.model_type not in MODEL_TYPES  # Tonnage does not train them


def test_the_variants_cover_every_family():
    assert {config["model_type"] for config in VARIANTS.values()} == set(MODEL_TYPES)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
def test_a_config_saved_by_transformers_gives_the_same_architecture(config):
    saved = AutoConfig.for_model(**config).to_dict()
    assert Architecture.from_hf_config(saved) == Architecture.from_hf_config(config)


@pytest.mark.parametrize("name", MODELS)
def test_active_parameters_agree_with_the_published_figure(name):
    facts, arch = MODELS[name], MODELS[name].architecture
    if facts.published_active_parameters is None:
        assert arch.num_active_parameters == arch.num_parameters
        return
    active = arch.num_active_parameters - (0 if facts.published_active_counts_embedding else arch.embedding_parameters)
    assert abs(active - facts.published_active_parameters) < facts.published_active_tolerance


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_visit():
    arch = Architecture.from_hf_config(VARIANTS["deepseek_v3, bias"])
    model = build_on_meta(VARIANTS["deepseek_v3, bias"])
    idle = sum(count(layer.mlp.experts) // 4 * 2 for layer in model.model.layers[1:])
    assert arch.num_active_parameters == count(model) - idle


def test_the_parts_of_a_moe_layer():
    facts = MODELS["deepseek671b"]
    dense, moe = facts.architecture.layer_parameters(2), facts.architecture.layer_parameters(3)
    expert = 3 * 7168 * 2048
    assert (dense.dense_mlp, dense.routed_experts, dense.shared_experts, dense.router) == (3 * 7168 * 18432, 0, 0, 0)
    assert (moe.dense_mlp, moe.shared_experts, moe.router) == (0, expert, 256 * 7168 + 256)
    assert (moe.routed_experts, moe.routed_experts_active) == (256 * expert, 8 * expert)
    queries, keys_and_values = 7168 * 1536 + 1536 * 128 * 192, 7168 * 576 + 512 * 128 * 256
    assert moe.attention == dense.attention == queries + keys_and_values + 128 * 128 * 7168
    assert moe.norms == 2 * 7168 + 1536 + 512


def test_layer_out_of_range():
    with pytest.raises(IndexError, match="layers 0 to 29"):
        MODELS["smollm2_135m"].architecture.layer_parameters(30)


def test_text_config_of_a_multimodal_model():
    text = VARIANTS["llama"]
    nested = Architecture.from_hf_config({"model_type": "llava", "text_config": text})
    assert nested == Architecture.from_hf_config(text)
    tied = Architecture.from_hf_config({"model_type": "llava", "tie_word_embeddings": True, "text_config": text})
    assert tied.head_parameters == 0


def test_unknown_model_type_names_it_and_what_is_known():
    with pytest.raises(ConfigError, match=r"model_type=mamba: .* known: deepseek_v2, .*, qwen3_moe"):
        Architecture.from_hf_config({"model_type": "mamba", "hidden_size": 32})


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="hidden_size"):
        Architecture.from_hf_config({key: value for key, value in VARIANTS["qwen2"].items() if key != "hidden_size"})


def test_hf_config_is_a_copy_that_transformers_may_write_into():
    before = MODELS["llama8b"].hf_config
    AutoConfig.for_model(**MODELS["llama8b"].hf_config)
    assert MODELS["llama8b"].hf_config == before


def test_docs_are_written_from_the_table():
    written = (ROOT / "docs" / "models.md").read_text()
    assert written == models_markdown(), "run: python -m tonnage.facts.docs > docs/models.md"


def test_config_group_holds_every_model():
    group = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "conf" / "model").glob("*.yaml")}
    paths = {name: facts.hub_id for name, facts in MODELS.items()} | {"smollm2_135m": "auto", "custom": "???"}
    assert group == {name: {"name": name, "path": path} for name, path in paths.items()}


def test_the_table_needs_neither_torch_nor_transformers():
    code = "import sys, tonnage.facts.models; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
