"""Decoder-only language models as numbers: shapes and exact parameter counts, worked out from a config.json alone.

`Architecture.from_hf_config` reads the keys of a Hugging Face config.json; the methods then count what the modules of
transformers hold, tensor by tensor. All counts are in parameters. Counted are the weights of the checkpoint: every
nn.Parameter once (a tied head is not counted again) and the router's bias of DeepSeek-V3, which transformers keeps as
a persistent buffer; rotary frequencies are computed, not stored, and not counted.

Source: transformers 5.24, `models/<model_type>/{configuration,modeling}_<model_type>.py`, for names, defaults, shapes.
"""

from dataclasses import dataclass
from functools import cached_property

from tonnage.errors import ConfigError, UnknownFamily

_REQUIRED = object()
_CORE = dict.fromkeys(
    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    + ("num_key_value_heads", "max_position_embeddings"),
    _REQUIRED,
) | {"head_dim": None, "tie_word_embeddings": False}
_MOE = dict.fromkeys(("num_experts", "num_experts_per_tok"), _REQUIRED)
_DEEPSEEK = (
    _CORE
    | _MOE
    | dict.fromkeys(("moe_intermediate_size", "n_shared_experts"), _REQUIRED)
    | dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _REQUIRED)
    | {"num_key_value_heads": None, "q_lora_rank": 1536, "attention_bias": False}
)
_WINDOW = {"sliding_window": 4096}
_QWEN_WINDOW = _WINDOW | {"use_sliding_window": False}
_GEMMA = _CORE | {"head_dim": 256, "tie_word_embeddings": True, "attention_bias": False}

# Per model_type: every key that its modeling file reads for shapes and windows, with the default of its config class where
# published files omit the key, and the fields that the modeling file fixes whatever the config says. A key absent
# here is ignored by transformers too, e.g. attention_bias of a mistral or moe_layer_freq of a deepseek config.
_FAMILIES: dict[str, tuple[dict, dict]] = {
    "llama": (_CORE | {"num_key_value_heads": None, "attention_bias": False, "mlp_bias": False}, {}),
    "mistral": (_CORE | _WINDOW, {}),
    "mixtral": (_CORE | _MOE, {}),
    "qwen2": (_CORE | _QWEN_WINDOW, {"qkv_bias": True}),
    "qwen3": (_CORE | _QWEN_WINDOW | {"head_dim": 128, "attention_bias": False}, {"qk_norm": True}),
    "qwen3_moe": (
        _CORE
        | _MOE
        | _QWEN_WINDOW
        | {"moe_intermediate_size": _REQUIRED, "decoder_sparse_step": 1, "mlp_only_layers": ()}
        | {"attention_bias": False},
        {"qk_norm": True},
    ),
    "deepseek_v2": (_DEEPSEEK | {"first_k_dense_replace": 0, "mlp_bias": False}, {}),
    "deepseek_v3": (_DEEPSEEK | {"first_k_dense_replace": 3}, {"router_bias": True}),
    "gemma": (_GEMMA, {}),
    "gemma2": (_GEMMA | _WINDOW, {"norms_per_layer": 4}),
}
MODEL_TYPES = tuple(sorted(_FAMILIES))
# Three names for one number; transformers 5 saves a qwen3_moe that was published with the first under the second.
_ALIASES = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one decoder layer by part; biases are counted with their linear.

    `norms` holds every RMSNorm of the layer, those inside the attention (qk-norm, MLA) included; `router` includes the
    router's bias; `routed_experts_active` is the share of `routed_experts` that one token visits.
    """

    attention: int
    dense_mlp: int
    routed_experts: int
    routed_experts_active: int
    shared_experts: int
    router: int
    norms: int

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.dense_mlp + self.routed_experts + self.shared_experts + self.router + self.norms

    @property
    def active(self) -> int:
        """Parameters that one token uses: experts_per_token of the routed experts, and all of the rest."""
        return self.total - self.routed_experts + self.routed_experts_active


# keys of a config.json for the tokens that attention reaches back, and kinds of rotary embeddings that look at the row
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
_MOVING_ROPES = {"dynamic", "longrope", "su"}


def row_facts(config: dict) -> dict:
    """What of a decoder's config.json depends on a row as a whole: `attention_window_tokens`, where attention reaches no
    further back, and `moving_rope`, a kind of rotary embeddings with frequencies by the largest position; None: not so."""
    windows = [config[name] for name in _WINDOWS if config.get(name)] if config.get("use_sliding_window", True) else []
    ropes = [config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    kinds = {part.get("rope_type", part.get("type")) for rope in ropes for part in (rope, *rope.values())
             if isinstance(part, dict)}
    return {"attention_window_tokens": min(windows, default=None), "moving_rope": min(kinds & _MOVING_ROPES, default=None)}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The shape of a decoder-only language model. Widths are in elements; None or 0 means: does not apply.

    `intermediate` is the width of a dense MLP (of an expert in mixtral, which has no dense MLP). MLA models have
    `kv_lora_rank` set and head_dim None: their queries and keys are qk_nope_head_dim + qk_rope_head_dim wide.
    `is_gpt`: LayerNorm with a bias, an MLP of two matrices around a GELU, and attention and MLP side by side, each on the
    layer's input (phi, gpt_neox: measured by others, not trained here, so in no family above).
    Layer i is a mixture-of-experts layer unless i < num_first_dense_layers, or i is in dense_layers, or i + 1 is not
    a multiple of moe_layer_step.
    `attention_window_tokens`, `moving_rope`: see `row_facts`.
    """

    model_type: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int | None
    intermediate: int
    vocab: int
    tied_embeddings: bool
    max_positions_tokens: int
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    is_gpt: bool = False
    head_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int | None = None
    num_shared_experts: int = 0
    num_first_dense_layers: int = 0
    moe_layer_step: int = 1
    dense_layers: tuple[int, ...] = ()
    router_bias: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    attention_window_tokens: int | None = None
    moving_rope: str | None = None

    @classmethod
    def from_hf_config(cls, config: dict) -> "Architecture":
        """The architecture that transformers builds from the dict of a config.json.

        Of a multimodal config the decoder in `text_config` is read; `tie_word_embeddings` beside it wins over the one
        inside, since the outer model owns the head. Keys that published files omit get the default of transformers.

        Raises:
            UnknownFamily: a `model_type` that is not counted here.
            ConfigError: a key that every published file of the family has is missing or null.
        """
        if "text_config" in config:
            tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
            config = config["text_config"] | tied
        model_type = config.get("model_type")
        if model_type not in _FAMILIES:
            raise UnknownFamily(f"model_type={model_type}: not a known architecture; known: {', '.join(MODEL_TYPES)}")
        defaults, fixed = _FAMILIES[model_type]
        config = {_ALIASES.get(key, key): value for key, value in config.items()}
        values = {key: config.get(key, default) for key, default in defaults.items()}
        missing = [key for key in defaults if defaults[key] is _REQUIRED and values[key] in (_REQUIRED, None)]
        if missing:
            raise ConfigError(f"config.json of a {model_type} model: without {', '.join(missing)}; complete the file")
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
            if key in values and (not isinstance(values[key], int) or values[key] < 1):
                raise ConfigError(f"config.json of a {model_type} model: {key}={values[key]}: must be a whole number of at "
                                  f"least 1")
        return cls(model_type=model_type, **(_base_fields(values) | _moe_fields(values) | _mla_fields(values) | fixed),
                   **row_facts(config | values))

    @property
    def is_mla(self) -> bool:
        """Whether attention is multi-head latent attention. Source: arXiv 2405.04434, section 2.1."""
        return self.kv_lora_rank is not None

    @property
    def shared_intermediate(self) -> int:
        """Width of the one MLP that holds all shared experts. Source: arXiv 2401.06066, section 3.2."""
        return self.num_shared_experts * (self.expert_intermediate or 0)

    def is_moe_layer(self, i: int) -> bool:
        """Whether layer i routes tokens to experts.

        Raises:
            IndexError: i is not in 0 .. num_layers - 1.
        """
        if not 0 <= i < self.num_layers:
            raise IndexError(f"layer {i}: the model has layers 0 to {self.num_layers - 1}")
        chosen = i >= self.num_first_dense_layers and i not in self.dense_layers and (i + 1) % self.moe_layer_step == 0
        return self.num_experts > 0 and chosen

    def linear_shapes(self, i: int) -> dict[str, tuple[int, int]]:
        """Matrices of layer i, by their name in transformers below `model.layers.<i>.`, each as (in, out).

        `mlp.gate` is the router. `mlp.experts.gate_up_proj` and `mlp.experts.down_proj` stand for one expert; the
        module stacks num_experts of them into one tensor, of which a token visits experts_per_token.
        """
        return self._attention_shapes() | self._mlp_shapes(i)

    def largest_matrix(self, i: int) -> int:
        """Numbers of the largest parameter of layer i; experts are stacked into one."""
        return max(inputs * out * (self.num_experts if name.startswith("mlp.experts.") else 1)
                   for name, (inputs, out) in self.linear_shapes(i).items())

    def layer_parameters(self, i: int) -> LayerParameters:
        """Parameters of layer i by part: in * out of each matrix, plus out where it has a bias, plus the norms.

        Source: grouped queries arXiv 2305.13245, SwiGLU arXiv 2002.05202, MLA and shared experts arXiv 2405.04434,
        the router's bias arXiv 2412.19437, section 2.1.2.
        """
        shapes = self.linear_shapes(i)
        sizes = {name: inputs * out + out * self._has_bias(name) for name, (inputs, out) in shapes.items()}
        modules = {name.rpartition(".")[0] for name in sizes}
        part = {m: sum(size for name, size in sizes.items() if name.rpartition(".")[0] == m) for m in modules}
        router = sizes.get("mlp.gate", 0)
        expert = part.get("mlp.experts", 0)
        return LayerParameters(
            attention=part["self_attn"],
            dense_mlp=part["mlp"] - router,
            routed_experts=self.num_experts * expert,
            routed_experts_active=self.experts_per_token * expert,
            shared_experts=part.get("mlp.shared_experts", 0),
            router=router,
            norms=self.norms_per_layer * self.final_norm + self._attention_norms(),
        )

    @cached_property
    def layers(self) -> tuple[LayerParameters, ...]:
        """`layer_parameters` of every layer, counted once."""
        return tuple(self.layer_parameters(i) for i in range(self.num_layers))

    @property
    def embedding_parameters(self) -> int:
        """The input embedding, vocab x hidden."""
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """The output head, vocab x hidden; 0 when it is the input embedding."""
        return 0 if self.tied_embeddings else self.vocab * (self.hidden + self.head_bias)

    @property
    def final_norm(self) -> int:
        """The norm between the last layer and the head."""
        return self.hidden * (2 if self.is_gpt else 1)

    @cached_property
    def num_parameters(self) -> int:
        """All parameters of the model."""
        return self._outside_layers + sum(layer.total for layer in self.layers)

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters less the routed experts that a token does not visit; num_parameters for a dense model.

        Embedding and head count in full. A publisher may leave the embedding out, being a lookup and no product; then
        subtract `embedding_parameters`.
        """
        return self._outside_layers + sum(layer.active for layer in self.layers)

    @property
    def _outside_layers(self) -> int:
        return self.embedding_parameters + self.head_parameters + self.final_norm

    def _attention_shapes(self) -> dict[str, tuple[int, int]]:
        if not self.is_mla:
            queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
            return {
                "self_attn.q_proj": (self.hidden, queries),
                "self_attn.k_proj": (self.hidden, keys),
                "self_attn.v_proj": (self.hidden, keys),
                "self_attn.o_proj": (queries, self.hidden),
            }
        queries = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            query_shapes = {"self_attn.q_proj": (self.hidden, queries)}
        else:
            query_shapes = {
                "self_attn.q_a_proj": (self.hidden, self.q_lora_rank),
                "self_attn.q_b_proj": (self.q_lora_rank, queries),
            }
        return query_shapes | {
            "self_attn.kv_a_proj_with_mqa": (self.hidden, self.kv_lora_rank + self.qk_rope_head_dim),
            "self_attn.kv_b_proj": (self.kv_lora_rank, self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)),
            "self_attn.o_proj": (self.num_heads * self.v_head_dim, self.hidden),
        }

    def _mlp_shapes(self, i: int) -> dict[str, tuple[int, int]]:
        if not self.is_moe_layer(i):
            if self.is_gpt:
                return {"mlp.fc1": (self.hidden, self.intermediate), "mlp.fc2": (self.intermediate, self.hidden)}
            return self._swiglu_shapes("mlp", self.intermediate)
        routed = {
            "mlp.gate": (self.hidden, self.num_experts),
            "mlp.experts.gate_up_proj": (self.hidden, 2 * self.expert_intermediate),
            "mlp.experts.down_proj": (self.expert_intermediate, self.hidden),
        }
        shared = self._swiglu_shapes("mlp.shared_experts", self.shared_intermediate)
        return routed | shared if self.num_shared_experts else routed

    def _swiglu_shapes(self, module: str, width: int) -> dict[str, tuple[int, int]]:
        return {
            f"{module}.gate_proj": (self.hidden, width),
            f"{module}.up_proj": (self.hidden, width),
            f"{module}.down_proj": (width, self.hidden),
        }

    def _has_bias(self, name: str) -> bool:
        """Whether the matrix has a bias, one number per output; the router's bias counts as one."""
        module, _, leaf = name.rpartition(".")
        if module == "self_attn":
            if leaf == "o_proj":
                return self.output_bias
            # MLA puts the bias on the compressing projections only.
            return self.qkv_bias and (not self.is_mla or leaf in ("q_a_proj", "kv_a_proj_with_mqa"))
        if leaf == "gate":
            return self.router_bias
        return self.mlp_bias and module != "mlp.experts"

    def _attention_norms(self) -> int:
        if self.is_mla:
            return self.kv_lora_rank + (self.q_lora_rank or 0)
        return 2 * self.head_dim if self.qk_norm else 0


def _base_fields(values: dict) -> dict:
    heads = values["num_attention_heads"]
    is_mla = "kv_lora_rank" in values
    return {
        "num_layers": values["num_hidden_layers"],
        "hidden": values["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": values["num_key_value_heads"] or heads,
        # DeepSeek configs saved by transformers carry head_dim = qk_rope_head_dim, which no matrix has as a width.
        "head_dim": None if is_mla else values["head_dim"] or values["hidden_size"] // heads,
        "intermediate": values["intermediate_size"],
        "vocab": values["vocab_size"],
        "tied_embeddings": values["tie_word_embeddings"],
        "max_positions_tokens": values["max_position_embeddings"],
        "qkv_bias": values.get("attention_bias", False),
        "output_bias": values.get("attention_bias", False),
        "mlp_bias": values.get("mlp_bias", False),
    }


def _moe_fields(values: dict) -> dict:
    if not values.get("num_experts"):
        return {}
    return {
        "num_experts": values["num_experts"],
        "experts_per_token": values["num_experts_per_tok"],
        "expert_intermediate": values.get("moe_intermediate_size", values["intermediate_size"]),
        "num_shared_experts": values.get("n_shared_experts", 0),
        "num_first_dense_layers": values.get("first_k_dense_replace", 0),
        "moe_layer_step": values.get("decoder_sparse_step", 1),
        "dense_layers": tuple(values.get("mlp_only_layers") or ()),
    }


def _mla_fields(values: dict) -> dict:
    keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {key: values[key] for key in keys if key in values}
