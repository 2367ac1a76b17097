"""The models that Tonnage knows by name: their published config, their published parameter counts, and the sources.

"Active" parameters have no common definition. `Architecture.num_active_parameters` counts everything but the routed
experts that a token does not visit, input embedding and head included. The publishers, in billions:

| publisher: model | published | with the embedding | without | so it counts the embedding |
|---|---|---|---|---|
| Mistral: Mixtral-8x7B | 12.9 | 12.88 | 12.75 | yes |
| Qwen: Qwen3-235B-A22B | 22 | 22.19 | 21.57 | yes, as its sister 30B-A3B shows: 3.3, where it is 3.35 or 3.04 |
| DeepSeek: V3 | 36.6 (37 on the card) | 37.55 | 36.63 | no: "including 0.9B for the output Head", README_WEIGHTS.md |
| DeepSeek: V2 | 21 | 21.38 | 20.85 | no, taken over from V3; the figure fits both |
| DeepSeek: V2-Lite | 2.4 | 2.66 | 2.45 | no |

Source: per row in `ModelFacts.source`; "safetensors" is the count that the hub reads off the weight files.
"""

import copy
from dataclasses import dataclass
from functools import cached_property

from tonnage.facts.architectures import Architecture


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """One named model. Counts are in parameters.

    `published_config` holds the keys of the published config.json that set shape, precision, rope, routing, special
    tokens; `checkpoint_dtype` is the type of the published weight files where it is not torch_dtype.
    `published_active_parameters` is None for a dense model, else a figure of `published_active_digits` digits, which
    includes the input embedding if `published_active_counts_embedding`.
    """

    name: str
    title: str
    hub_id: str
    license: str
    gated: bool
    source: str
    published_parameters: int
    published_active_parameters: int | None = None
    published_active_digits: int | None = None
    published_active_counts_embedding: bool = True
    published_config: dict
    checkpoint_dtype: str | None = None

    @property
    def hf_config(self) -> dict:
        """A fresh copy for AutoConfig.for_model(**hf_config), which writes into the nested dicts it is given."""
        return copy.deepcopy(self.published_config)

    @cached_property
    def architecture(self) -> Architecture:
        """Shapes and exact counts, worked out from `published_config`."""
        return Architecture.from_hf_config(self.published_config)

    @property
    def is_published_in_fp8(self) -> bool:
        """Whether the weight files are in FP8, which adapter.quantise=fp8 keeps as they are."""
        return self.checkpoint_dtype == "float8_e4m3fn"

    @property
    def published_active_tolerance(self) -> int | None:
        """One unit of the last published digit, in parameters: publishers round, and cut off (2.451B became 2.4B)."""
        if self.published_active_parameters is None:
            return None
        return 10 ** (len(str(self.published_active_parameters)) - self.published_active_digits)


# fmt: off
_LLAMA31 = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": 128001, "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN25 = {
    "model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151643, "rope_theta": 1000000.0,
    "use_sliding_window": False, "sliding_window": 131072,
}
_DEEPSEEK = {
    "max_position_embeddings": 163840, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "moe_layer_freq": 1, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "rope_theta": 10000,
}
_DEEPSEEK_V2 = _DEEPSEEK | {
    "model_type": "deepseek_v2", "vocab_size": 102400, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax",
    "bos_token_id": 100000, "eos_token_id": 100001,
}


def _yarn(mscale: float) -> dict:
    return {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": mscale, "mscale_all_dim": mscale,
    }


_TABLE = (
    ModelFacts(
        name="smollm2_135m",
        title="SmolLM2-135M-Instruct",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="Apache-2.0",
        gated=False,
        source="safetensors, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        published_parameters=134_515_008,
        published_config={
            "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        },
    ),
    ModelFacts(
        name="llama7b",
        title="Llama-2-7B",
        hub_id="meta-llama/Llama-2-7b-hf",
        license="Llama 2 Community License",
        gated=True,
        # The files also store the rotary frequencies, 32 layers x 64: 2,048 numbers that are no weights.
        source="safetensors, https://huggingface.co/meta-llama/Llama-2-7b-hf",
        published_parameters=6_738_417_664,
        published_config={
            "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            "torch_dtype": "float16", "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    ModelFacts(
        name="llama8b",
        title="Llama-3.1-8B",
        hub_id="meta-llama/Llama-3.1-8B",
        license="Llama 3.1 Community License",
        gated=True,
        source="safetensors, https://huggingface.co/meta-llama/Llama-3.1-8B",
        published_parameters=8_030_261_248,
        published_config=_LLAMA31
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
    ModelFacts(
        name="qwen7b",
        title="Qwen2.5-7B",
        hub_id="Qwen/Qwen2.5-7B",
        license="Apache-2.0",
        gated=False,
        source="safetensors, https://huggingface.co/Qwen/Qwen2.5-7B",
        published_parameters=7_615_616_512,
        published_config=_QWEN25
        | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "max_window_layers": 28, "rms_norm_eps": 1e-6},
    ),
    ModelFacts(
        name="qwen32b",
        title="Qwen2.5-32B",
        hub_id="Qwen/Qwen2.5-32B",
        license="Apache-2.0",
        gated=False,
        source="safetensors, https://huggingface.co/Qwen/Qwen2.5-32B",
        published_parameters=32_763_876_352,
        published_config=_QWEN25
        | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
        | {"num_key_value_heads": 8, "max_window_layers": 64, "rms_norm_eps": 1e-5},
    ),
    ModelFacts(
        name="mixtral8x7b",
        title="Mixtral-8x7B-v0.1",
        hub_id="mistralai/Mixtral-8x7B-v0.1",
        license="Apache-2.0",
        gated=True,
        source="safetensors, https://huggingface.co/mistralai/Mixtral-8x7B-v0.1; "
        "active: https://mistral.ai/news/mixtral-of-experts",
        published_parameters=46_702_792_704,
        published_active_parameters=12_900_000_000,
        published_active_digits=3,
        published_config={
            "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
            "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "max_position_embeddings": 32768,
            "sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    ModelFacts(
        name="llama70b",
        title="Llama-3.1-70B",
        hub_id="meta-llama/Llama-3.1-70B",
        license="Llama 3.1 Community License",
        gated=True,
        source="safetensors, https://huggingface.co/meta-llama/Llama-3.1-70B",
        published_parameters=70_553_706_496,
        published_config=_LLAMA31
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    ModelFacts(
        name="qwen235b",
        title="Qwen3-235B-A22B",
        hub_id="Qwen/Qwen3-235B-A22B",
        license="Apache-2.0",
        gated=False,
        source="safetensors and active: https://huggingface.co/Qwen/Qwen3-235B-A22B",
        published_parameters=235_093_634_560,
        published_active_parameters=22_000_000_000,
        published_active_digits=2,
        published_config={
            "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
            "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
            "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
            "attention_bias": False, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
        },
    ),
    ModelFacts(
        name="deepseek16b",
        title="DeepSeek-V2-Lite",
        hub_id="deepseek-ai/DeepSeek-V2-Lite",
        license="DeepSeek Model License",
        gated=False,
        source="safetensors and active: https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite",
        published_parameters=15_706_484_224,
        published_active_parameters=2_400_000_000,
        published_active_digits=2,
        published_active_counts_embedding=False,
        published_config=_DEEPSEEK_V2
        | {"hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16}
        | {"num_key_value_heads": 16, "q_lora_rank": None, "moe_intermediate_size": 1408, "n_routed_experts": 64}
        | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
        | {"rope_scaling": _yarn(0.707)},
    ),
    ModelFacts(
        name="deepseek236b",
        title="DeepSeek-V2",
        hub_id="deepseek-ai/DeepSeek-V2",
        license="DeepSeek Model License",
        gated=False,
        source="safetensors and active: https://huggingface.co/deepseek-ai/DeepSeek-V2",
        published_parameters=235_741_434_880,
        published_active_parameters=21_000_000_000,
        published_active_digits=2,
        published_active_counts_embedding=False,
        published_config=_DEEPSEEK_V2
        | {"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 60, "num_attention_heads": 128}
        | {"num_key_value_heads": 128, "q_lora_rank": 1536, "moe_intermediate_size": 1536, "n_routed_experts": 160}
        | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
        | {"rope_scaling": _yarn(1.0)},
    ),
    ModelFacts(
        name="llama405b",
        title="Llama-3.1-405B",
        hub_id="meta-llama/Llama-3.1-405B",
        license="Llama 3.1 Community License",
        gated=True,
        source="safetensors, https://huggingface.co/meta-llama/Llama-3.1-405B",
        published_parameters=405_853_388_800,
        published_config=_LLAMA31
        | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
    ),
    ModelFacts(
        name="deepseek671b",
        title="DeepSeek-V3",
        hub_id="deepseek-ai/DeepSeek-V3",
        license="DeepSeek Model License",
        gated=False,
        # The main model: the files, 684.5B by safetensors, also hold the multi-token module and the FP8 scales.
        source="https://github.com/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md",
        published_parameters=671_000_000_000,
        published_active_parameters=36_600_000_000,
        published_active_digits=3,
        published_active_counts_embedding=False,
        published_config=_DEEPSEEK
        | {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432}
        | {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536}
        | {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc"}
        | {"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"num_nextn_predict_layers": 1, "bos_token_id": 0, "eos_token_id": 1, "rope_scaling": _yarn(1.0)},
        checkpoint_dtype="float8_e4m3fn",
    ),
)
# fmt: on
MODELS: dict[str, ModelFacts] = {facts.name: facts for facts in _TABLE}
