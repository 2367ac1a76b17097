"""A model without its weights: the class transformers has for it, with adapters, on whatever device is current.

Building and loading are apart because engines differ in between: FSDP shards the empty model, ZeRO-3 partitions it
while it is built (https://deepspeed.readthedocs.io/en/latest/zero3.html#constructing-massive-models).
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from tonnage.config.schema import Adapter, Model, Precision
from tonnage.errors import ConfigError, ModelError
from tonnage.facts.bases import FP8_BLOCK, expert_parts
from tonnage.models.checkpointing import checkpoint_layers
from tonnage.models.experts import (
    TunedExperts,
    add_expert_adapter,
    expert_modules,
    let_all_take_part,
    listed_experts,
    matrices,
    tune,
)
from tonnage.models.quantised import QuantisedLinear, dequantise_module, field_names, quantise_module
from tonnage.models.slices import SLICED
from tonnage.runtime.logs import LOG

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
FP8_NAMES = ("e4m3", "float8_e4m3fn")  # of the one type, in quantization_config.fmt
EXPERTS = "experts"  # the word of adapter.targets for routed experts
ATTENTION = {"sdpa": "sdpa", "flash": "flash_attention_2", "eager": "eager", "flex": "flex_attention", "sliced": SLICED}


def build_model(folder: str, model: Model, adapter: Adapter, attention: str, frozen_dtype: torch.dtype,
                trained_dtype: torch.dtype, float8: Precision | None = None) -> nn.Module:
    """The model of `folder`'s config.json, empty, with its adapter; what is not trained does not require gradients.

    Call it under `torch.device("meta")` or an engine's own context. Frozen parameters are `frozen_dtype` but for
    those that the model class keeps in fp32; trained ones `trained_dtype`. With `float8` the decoder's linear layers
    compute in FP8, and the model's attribute `float8` says which (models.float8.Converted).

    Raises:
        ModelError: config.json is missing or of an unknown class.
        ConfigError: adapter targets that match nothing; no layer that can compute in FP8.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    config = read_config(folder, model.trust_remote_code)
    dtype = trained_dtype if adapter.name == "full" else frozen_dtype
    with no_init_weights():
        try:
            built = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION[attention],
                                                     trust_remote_code=model.trust_remote_code)
        except ValueError as error:
            if "does not support an attention implementation" not in str(error):
                raise
            raise ConfigError(f"model.attention={model.attention}: the code of {config.model_type} has none by "
                              f"{attention}; use model.attention=eager") from error
    if (Path(folder) / "generation_config.json").is_file():
        built.generation_config = GenerationConfig.from_pretrained(folder)
    built.tie_weights()  # on meta that is left out, and an engine would take one weight for two
    # from_pretrained does this, from_config does not
    for name, tensor in (*built.named_buffers(), *built.named_parameters()):
        if any(word in name for word in built._get_dtype_plan(dtype)):
            tensor.data = tensor.data.float()
    if adapter.quantise != "none":
        quantise(built, adapter.quantise)
    if float8 is not None:  # before the adapter, whose own matrices stay out
        built.float8 = compute_in_float8(built, float8)
    if adapter.name != "full":
        built = add_adapter(built, adapter, trains_embeddings=bool(model.new_tokens), dtype=trained_dtype)
    else:  # a router may be fp32 from its class; ZeRO-3 lays trained weights end to end
        for parameter in built.parameters():
            parameter.data = parameter.data.to(dtype)
    for parent in listed_experts(built):
        let_all_take_part(parent)
    if model.activation_checkpointing != "none":
        checkpoint_layers(built if adapter.name == "full" else built.get_base_model(), model)
    return built.train()


def read_config(folder: str, trust_remote_code: bool = False):
    """transformers' configuration object of `folder`; how its files are quantised is left out: no built model is so.

    Raises:
        ModelError: one that cannot be used, of files in a format that is not read, or of a model that does not predict the
            next token.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # json, transformers' own types and those of its validators
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"model.path={folder}: its config.json cannot be used: {reason}") from error
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        _require_readable(folder, part.__dict__.pop("quantization_config", None))
    _require_causal(folder, config, trust_remote_code)
    if config.get_text_config().__dict__.get("num_experts") or config.get_text_config().__dict__.get("n_routed_experts"):
        config._experts_implementation = "grouped_mm"
    return config


def _require_readable(folder, quantised):
    """Refuse files that `models.shards` would misread; `quantised` is what config.json says of them."""
    if quantised is None:
        return
    settings = quantised if isinstance(quantised, dict) else quantised.to_dict()
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8":
        found = f"quantised by {method or 'a method that is not named'}"
    elif settings.get("fmt", "e4m3") not in FP8_NAMES:
        found = f"FP8 of type {settings['fmt']}"
    elif block is None or list(block) != [FP8_BLOCK, FP8_BLOCK]:
        found = f"FP8 with weight_block_size {block}"
    else:
        return
    raise ModelError(f"model.path={folder}: its weights are {found} (quantization_config of config.json); of quantised "
                     f"files only FP8 e4m3 in blocks of {FP8_BLOCK} x {FP8_BLOCK} is read: name the folder of the "
                     f"unquantised model, and for fewer bits set adapter.quantise=nf4, int8 or fp8")


def _require_causal(folder, config, trust_remote_code):
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    # BERT and its kin have a head for the next token too, but see that token unless their config makes them decoders
    kind, sees_ahead = type(config), not (getattr(config, "is_decoder", False) or getattr(config, "causal", False))
    if (kind not in MODEL_FOR_CAUSAL_LM_MAPPING or (kind in MODEL_FOR_MASKED_LM_MAPPING and sees_ahead)
            or getattr(config, "is_encoder_decoder", False)):
        raise ModelError(f"model.path={folder}: model_type {config.model_type} is no causal language model; only models "
                         f"that predict the next token can be trained (docs/models.md): name the folder of one")


def add_adapter(model: nn.Module, adapter: Adapter, trains_embeddings: bool, dtype: torch.dtype) -> nn.Module:
    """`model` with a peft adapter on its targets; embeddings and head are trained too where tokens are new."""
    from peft import LoraConfig, get_peft_model

    base, saved = model, None
    if trains_embeddings:
        saved = [name for name, module in model.named_modules()
                 if module in (model.get_input_embeddings(), model.get_output_embeddings())]
    linears = [word for word in adapter.targets if word != EXPERTS]
    peft_config = LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=adapter.dropout, bias="none", task_type="CAUSAL_LM",
        use_dora=adapter.name == "dora", use_rslora=adapter.name == "rslora",
        target_modules=adapter_targets(model, linears), modules_to_save=saved, ensure_weight_tying=bool(saved))
    with exact_targets():
        wrapped = get_peft_model(model, peft_config, autocast_adapter_dtype=False)
    if EXPERTS in adapter.targets:
        found = expert_modules(base)
        if not found:
            raise ConfigError("adapter.targets=experts: this model has no routed experts; leave it out")
        scale = adapter.alpha / (math.sqrt(adapter.rank) if adapter.name == "rslora" else adapter.rank)
        for experts in found.values():
            add_expert_adapter(experts, adapter.rank, scale, adapter.dropout, dtype)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return wrapped


@contextmanager
def exact_targets() -> Iterator[None]:
    """Within, peft adapts the modules it is told to.

    peft 0.21 reads the gate_proj, up_proj and down_proj of a mixture of experts as names of routed experts, whatever module
    they are in, and so passes over dense layers and shared experts. Source:
    https://github.com/huggingface/peft/blob/v0.21.2/src/peft/utils/transformers_weight_conversion.py
    """
    from peft.utils import transformers_weight_conversion as conversion

    with mock.patch.object(conversion, "convert_peft_config_for_transformers", lambda *_, **__: None):
        yield


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Within, the model is its base."""
    scales = {module: module.lora_scale for module in model.modules() if isinstance(module, TunedExperts)}
    try:
        for module in scales:
            module.lora_scale = None
        with model.disable_adapter():
            yield
    finally:
        for module, scale in scales.items():
            module.lora_scale = scale


def merge_adapter(model: nn.Module) -> nn.Module:
    """The base with the adapter added to its weights; those that are quantised become ordinary ones first."""
    dequantise(model)
    merged = model.merge_and_unload()
    for experts in expert_modules(merged).values():
        if getattr(experts, "lora_scale", None) is not None:
            experts.merge()
    return merged


def misread_by_peft(model: nn.Module) -> bool:
    """Whether peft by itself would put this adapter's matrices elsewhere; see `exact_targets`."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    stated = model.peft_config["default"]
    read = copy.deepcopy(stated)
    convert_peft_config_for_transformers(read, model=model.get_base_model(), conversions=None)
    return set(read.target_modules) != set(stated.target_modules)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers, found by structure: the longest ModuleList that is in no other (as experts may be)."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [module for name, module in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return max(outer, key=len)


def decoder_linears(model: nn.Module) -> tuple[dict[str, nn.Linear], list[str]]:
    """Linear layers of the decoder by name, and the names of those that are no routers.

    A router is a linear layer beside `experts`: to change it changes what each expert sees.
    """
    layers = decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    routers = {id(child) for parent in model.modules() if hasattr(parent, "experts")
               for child in parent.children() if child is not parent.experts and isinstance(child, nn.Linear)}
    linears = {f"{prefix}.{name}": module for name, module in layers.named_modules() if isinstance(module, nn.Linear)}
    return linears, [name for name, module in linears.items() if id(module) not in routers]


def quantise(model: nn.Module, base: str) -> None:
    """Keep the decoder's linear layers, routers left out, and routed experts in format `base`."""
    linears, names = decoder_linears(model)
    others = [name for name in names if type(linears[name]) is not nn.Linear]
    if others:  # what their class computes is not known
        LOG.warning(f"adapter.quantise={base}: {len(others)} linear layers of a class of the model's own stay as they are, "
                    f"first {others[0]}")
    for name in names:
        if name not in others:
            quantise_module(linears[name], QuantisedLinear, ["weight"], base)
    for experts in expert_modules(model).values():
        tune(experts)
        quantise_module(experts, TunedExperts, matrices(experts), base, expert_parts)


def dequantise(model: nn.Module) -> None:
    """Undo `quantise`: weights are what their codes stand for."""
    for module in list(model.modules()):
        if getattr(module, "kept", None):
            dequantise_module(module)


def compute_in_float8(model: nn.Module, precision: Precision):
    """Let the decoder's linear layers compute in FP8; returns which do (models.float8.Converted)."""
    from tonnage.models.float8 import convert

    linears, no_routers = decoder_linears(model)
    return convert(linears, linears.keys() - no_routers, precision, bool(expert_modules(model)))


def adapter_targets(model: nn.Module, wanted: list[str]) -> list[str]:
    """Full names of the linear layers to adapt.

    `all-linear` is every linear layer of the decoder but routers. A name matches the end of module names.

    Raises:
        ConfigError: a name that matches no linear layer.
    """
    linears, no_routers = decoder_linears(model)
    chosen = []
    for word in wanted:
        if word == "all-linear":
            found = no_routers
        else:
            found = [name for name in linears if name == word or name.endswith("." + word)]
        if not found:
            endings = sorted({name.rsplit(".", 1)[-1] for name in linears})
            raise ConfigError(f"adapter.targets={word}: matches no linear layer of the decoder; there are "
                              f"{', '.join(endings)}")
        chosen += found
    return sorted(set(chosen))


def count_by_kind(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Parameters (trained, frozen) per kind: embedding, attention, mlp, experts, router, norm, head, adapter.

    Sizes are those of the whole model, also where an engine holds a part of it.
    """
    counts = {}
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    special = {id(p): kind for module, kind in ((head, "head"), (embedding, "embedding")) if module is not None
               for p in module.parameters()}
    quantised = set()  # of what is kept quantised the weights are counted, not their codes
    for path, module in model.named_modules():
        for leaf, kept in getattr(module, "kept", {}).items():
            trained, frozen = counts.get(_kind(f"{path}.{leaf}"), (0, 0))
            counts[_kind(f"{path}.{leaf}")] = trained, frozen + math.prod(kept.shape)
        quantised |= {f"{path}.{name}" for name in field_names(module)}
    for name, parameter in model.named_parameters():
        if name in quantised:
            continue
        kind = special.get(id(parameter)) or _kind(name)
        trained, frozen = counts.get(kind, (0, 0))
        size = full_numel(parameter)
        counts[kind] = (trained + size, frozen) if parameter.requires_grad else (trained, frozen + size)
    return counts


def _kind(name):
    for kind, words in (("adapter", ("lora_",)), ("router", (".gate.", ".router.")), ("experts", (".experts",)),
                        ("norm", ("norm",)), ("attention", ("attn",)), ("mlp", ("mlp", "feed_forward"))):
        if any(word in name for word in words):
            return kind
    return "other"


def moved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that files hold and that may change where every weight is trained: the biases of DeepSeek-V3's routers."""
    if hasattr(model, "peft_config"):
        return {}
    return {f"{path}.{leaf}": buffer for path, module in model.named_modules() for leaf, buffer in module._buffers.items()
            if buffer is not None and leaf not in module._non_persistent_buffers_set}


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of the whole parameter, also of one that ZeRO-3 has partitioned."""
    return getattr(parameter, "ds_shape", parameter.shape)


def full_numel(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter."""
    return math.prod(full_shape(parameter))
