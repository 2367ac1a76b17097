"""The shape of a model whose family is not counted by hand: transformers builds it without weights, and it is measured."""

from dataclasses import replace
from math import prod

import torch

from tonnage.errors import ConfigError, UnknownFamily
from tonnage.facts.architectures import Architecture
from tonnage.models.build import read_config

TOLERANCE = 0.01


def measured_architecture(folder: str) -> Architecture:
    """An `Architecture` for the config.json in `folder`, of any family that transformers has, if it is like those known.

    Widths come from the keys that most families share; the parameters of the module on the meta device must agree within
    1 %, or the planner's operations would be those of another model.

    Raises:
        UnknownFamily: one of another build (its keys, or its parameters, do not fit).
    """
    from transformers import AutoModelForCausalLM

    config = read_config(folder)
    keys = config.get_text_config().to_dict()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(prod(p.shape) for p in {id(p): p for p in model.parameters()}.values())
    like = _as_known(keys, tied=model.get_input_embeddings().weight is getattr(
        model.get_output_embeddings(), "weight", None) or bool(config.tie_word_embeddings))
    if like is None or abs(like.num_parameters / counted - 1) > TOLERANCE:
        found = "" if like is None else f" ({counted:,} parameters, one of its widths would have {like.num_parameters:,})"
        raise UnknownFamily(f"model.path={folder}: model_type {keys.get('model_type')} is built unlike the families that "
                            f"can be planned{found}; train without a plan, or plan a model of docs/models.md")
    return replace(like, model_type=keys["model_type"])


def _as_known(keys, tied):
    """The nearest known family with these keys, or None where they do not say enough."""
    routed = any(keys.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    latent = keys.get("kv_lora_rank") is not None
    sparse = "qwen3_moe" if keys.get("moe_intermediate_size") else "mixtral"
    family = "deepseek_v3" if latent and routed else sparse if routed else "llama"
    kept = {name: value for name, value in keys.items() if value is not None} | {"model_type": family}
    try:
        return Architecture.from_hf_config(kept | {"tie_word_embeddings": tied})
    except (ConfigError, TypeError, KeyError, ZeroDivisionError):
        return None
