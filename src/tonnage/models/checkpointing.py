"""Activation checkpointing: which decoder layers are computed again in backward, what they keep, and where.

Source: https://docs.pytorch.org/docs/2.13/checkpoint.html
"""

import inspect
from functools import partial

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tonnage.config.schema import Model
from tonnage.errors import ConfigError
from tonnage.facts.sizes import LEAST_KEPT_INPUTS

# what `selective` keeps: the results of matrix products and of attention, where a layer's time goes; by the place of their
# first factor among the arguments. Products in batches are not among them: in plain attention their results are [T, T]
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0, "aten::_grouped_mm": 0,
            "transformers::grouped_mm_fallback": 0}
ATTENTION = frozenset({
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"})


def checkpoint_layers(model: PreTrainedModel, settings: Model) -> None:
    """Let the decoder layers of `model` checkpoint as model.activation_checkpointing (not none) and its two keys say.

    Raises:
        ConfigError: a model whose code would take no notice of that.
    """
    if (obstacle := _obstacle(model, settings)) is not None:
        raise ConfigError(f"model.activation_checkpointing={settings.activation_checkpointing}: {type(model).__name__} "
                          f"{obstacle}")
    # reentrant checkpointing needs an input that requires grad, and reduces twice under ZeRO-2
    how = {"use_reentrant": False}
    if settings.activation_checkpointing == "selective":  # a compiled layer knows of torch's own modes alone
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy) if settings.compile else _contexts
    which = {"every_n_layers": settings.checkpoint_every_layers} if settings.checkpoint_every_layers > 1 else {}
    if settings.checkpoints_on_host:
        which["offload"] = True
    # by the older of its two names: transformers 5.17, with which benchmarks/gpu.sh runs too, has no other
    model.gradient_checkpointing_enable(how, **which)


def _obstacle(model, settings):
    if not model.supports_gradient_checkpointing:
        return "cannot checkpoint; use none"
    if "value" in inspect.signature(model._set_gradient_checkpointing).parameters:  # transformers then drops `how`
        return "checkpoints in the way of transformers before 4.35, which is not told how; use none"
    if settings.checkpoint_every_layers > 1 and not any(
            isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
        return "has no layers that checkpoint one by one; use model.checkpoint_every_layers=1"
    return None


def _contexts():
    """torch's two modes, which see only what is kept.

    torch 2.13 counts every operation, and raises where the second forward has more of one kind than the first. Under ZeRO-3
    weights are gathered within a layer, ahead of their use, in other numbers each time; nothing of that is kept.
    """
    return tuple(_OfKept(mode) for mode in create_selective_checkpoint_contexts(_policy))


class _OfKept(TorchDispatchMode):
    """Hands on to `mode` the operations whose results are kept, and runs the others."""

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    @classmethod
    def ignore_compile_internals(cls):
        return True  # as torch's own; else what is compiled within a layer would run eagerly

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if _is_kept(op, args):
            return self.mode.__torch_dispatch__(op, types, args, kwargs)
        return op(*args, **kwargs or {})


def _policy(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if _is_kept(op, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(op, args):
    first = PRODUCTS.get(op.name())
    return op.name() in ATTENTION if first is None else args[first].shape[-1] >= LEAST_KEPT_INPUTS
