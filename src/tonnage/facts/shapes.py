"""Shapes of the models that others have measured: what their config.json says, by the names used in published tables.

For predicting published rows only; models that Tonnage trains by name are in facts/models.py, and are reused here.
Source: the config.json of the hub id of each row.
"""

from functools import cache

from tonnage.facts.architectures import Architecture
from tonnage.facts.models import MODELS


def _config(model_type, hidden, intermediate, layers, heads, kv_heads, vocab, **more):
    return {"model_type": model_type, "hidden_size": hidden, "intermediate_size": intermediate,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "vocab_size": vocab, "max_position_embeddings": 32768} | more


def _mpt(hidden, layers, heads):
    """A gated MLP of 8/3 hidden has as many weights as MPT's plain one of 4 hidden: equal for FLOPs, not for memory.

    Source: mosaicml/llm-foundry scripts/train/yamls/pretrain, mosaicml/mpt-7b config.json.
    """
    return _config("llama", hidden, round(8 * hidden / 3), layers, heads, heads, 50368, tie_word_embeddings=True)


_QWEN3 = {"head_dim": 128}
_TIED = {"tie_word_embeddings": True}
# hub id -> config. Qwen of the first generation (model_type qwen) fuses its matrices and writes twice the MLP's width;
# Baichuan2 fuses them too: both have the shapes of the families named here.
_CONFIGS = {
    "meta-llama/Llama-2-13b-hf": _config("llama", 5120, 13824, 40, 40, 40, 32000),
    "codellama/CodeLlama-34b-hf": _config("llama", 8192, 22016, 48, 64, 8, 32000),
    "meta-llama/Llama-2-70b-hf": _config("llama", 8192, 28672, 80, 64, 8, 32000),
    "meta-llama/Llama-3.2-1B": _config("llama", 2048, 8192, 16, 32, 8, 128256, **_TIED),
    "meta-llama/Llama-3.2-3B": _config("llama", 3072, 8192, 28, 24, 8, 128256, **_TIED),
    "mistralai/Mistral-7B-v0.1": _config("mistral", 4096, 14336, 32, 32, 8, 32000),
    "01-ai/Yi-6B": _config("llama", 4096, 11008, 32, 32, 4, 64000),
    "01-ai/Yi-34B": _config("llama", 7168, 20480, 60, 56, 8, 64000),
    "baichuan-inc/Baichuan2-7B-Chat": _config("llama", 4096, 11008, 32, 32, 32, 125696),
    "baichuan-inc/Baichuan2-13B-Chat": _config("llama", 5120, 13696, 40, 40, 40, 125696),
    "Qwen/Qwen-1_8B": _config("qwen2", 2048, 5504, 24, 16, 16, 151936),
    "Qwen/Qwen-7B": _config("qwen2", 4096, 11008, 32, 32, 32, 151936),
    "Qwen/Qwen-14B": _config("qwen2", 5120, 13696, 40, 40, 40, 152064),
    "Qwen/Qwen-72B": _config("qwen2", 8192, 24576, 80, 64, 64, 152064),
    "Qwen/Qwen2.5-3B": _config("qwen2", 2048, 11008, 36, 16, 2, 151936, **_TIED),
    "Qwen/Qwen2.5-14B": _config("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "Qwen/Qwen2.5-72B": _config("qwen2", 8192, 29568, 80, 64, 8, 152064),
    "Qwen/Qwen3-8B": _config("qwen3", 4096, 12288, 36, 32, 8, 151936, **_QWEN3),
    "Qwen/Qwen3-14B": _config("qwen3", 5120, 17408, 40, 40, 8, 151936, **_QWEN3),
    "Qwen/Qwen3-32B": _config("qwen3", 5120, 25600, 64, 64, 8, 151936, **_QWEN3),
    "Qwen/Qwen3-30B-A3B": _config("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, **_QWEN3, moe_intermediate_size=768,
                                  num_experts=128, num_experts_per_tok=8),
    "MPT-7b": _mpt(4096, 32, 32),
    "MPT-13b": _mpt(5120, 40, 40),
    "MPT-30b": _mpt(7168, 48, 56),
    "MPT-70b": _mpt(8192, 80, 64),
}

def _gpt(model_type, hidden, layers, heads, vocab, positions, **more):
    return Architecture(
        model_type=model_type, num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=heads,
        head_dim=hidden // heads, intermediate=4 * hidden, vocab=vocab, tied_embeddings=False,
        max_positions_tokens=positions, qkv_bias=True, output_bias=True, mlp_bias=True, is_gpt=True, **more)


# Families that Tonnage does not train. gpt_neox fuses queries, keys and values; phi calls o_proj dense.
_ARCHITECTURES = {
    "phi-1.5 1.3B": _gpt("phi", 2048, 24, 32, 51200, 2048, norms_per_layer=1, head_bias=True),
    "StableLM Alpha 3B": _gpt("gpt_neox", 4096, 16, 32, 50688, 4096),
}

# a name in published tables -> a name in facts/models.py or a hub id above
_NAMES = {
    "llama7b": ("Llama-2-7b", "Llama 2 7B", "Llama-2-7b class"),
    "llama8b": ("Meta-Llama-3-8B", "Llama-3-8B", "Llama-3.1-8B", "Llama3 8B"),
    "llama70b": ("Llama-3-70B", "Llama-3.1-70B", "LLAMA3_70B"),
    "llama405b": ("Llama-3.1-405B", "LLAMA3.1_405B"),
    "mixtral8x7b": ("Mixtral-8x7B", "Mixtral-8x7B-Instruct-v0.1"),
    "qwen7b": ("Qwen2-7B", "Qwen2.5-7B", "Qwen2.5 7B"),
    "qwen32b": ("Qwen2.5-32B", "QwQ-32B"),
    "qwen235b": ("Qwen3-235B-A22B", "Qwen3_235B_a22B"),
    "deepseek16b": ("DeepSeek-V2-Lite",),
    "deepseek671b": ("DeepSeek-V3", "DeepSeekV3", "DeepSeek V3 671B", "DeepSeek-V3/R1"),
    "meta-llama/Llama-2-13b-hf": ("Llama-2-13b", "Llama 2 13B"),
    "codellama/CodeLlama-34b-hf": ("Llama-2-34b",),  # Llama-2-34b was not released; the count is this one's
    "meta-llama/Llama-2-70b-hf": ("Llama-2-70b", "Llama-2-70b-hf"),
    "meta-llama/Llama-3.2-1B": ("Llama-3.2-1B",),
    "meta-llama/Llama-3.2-3B": ("Llama-3.2-3B",),
    "mistralai/Mistral-7B-v0.1": ("Mistral-7B-v0.1", "Mistral-7B-v0.2"),
    "01-ai/Yi-6B": ("yi-6b-chat",),
    "01-ai/Yi-34B": ("Yi-34B", "yi-34b-chat"),
    "baichuan-inc/Baichuan2-7B-Chat": ("baichuan2-7b-chat",),
    "baichuan-inc/Baichuan2-13B-Chat": ("baichuan2-13b-chat",),
    "Qwen/Qwen-1_8B": ("Qwen-1.8B", "Qwen-1.8B-Chat-Int4", "qwen-1_8b-chat"),
    "Qwen/Qwen-7B": ("Qwen-7B", "Qwen-7B-Chat-Int4", "qwen-7b-chat"),
    "Qwen/Qwen-14B": ("qwen-14b-chat",),
    "Qwen/Qwen-72B": ("qwen-72b-chat",),
    "Qwen/Qwen2.5-72B": ("Qwen2.5-72B", "72B (Qwen2.5)"),
    "Qwen/Qwen3-30B-A3B": ("Qwen3-30B-A3B", "Qwen3_30B_a3B", "Qwen3 MoE 30B"),
}
_ALIASES = {name: known for known, names in _NAMES.items() for name in names}


@cache
def shape_of(name: str) -> Architecture | None:
    """The architecture of a model by the name that a published table gives it; None where its family is not counted."""
    known = _ALIASES.get(name, name)
    if known in MODELS:
        return MODELS[known].architecture
    if known in _ARCHITECTURES:
        return _ARCHITECTURES[known]
    config = _CONFIGS.get(known) or _CONFIGS.get(f"Qwen/{known}")
    return Architecture.from_hf_config(config) if config else None


def is_stand_in(name: str) -> bool:
    """Whether `shape_of(name)` has the model's weights and FLOPs, but not its activations."""
    return name.startswith("MPT-")
