"""Activation checkpointing: which decoder layers are computed again in backward, what they keep, and where.

Source: https://docs.pytorch.org/docs/2.13/checkpoint.html
"""

from functools import partial

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tonnage.config.schema import Model
from tonnage.facts.sizes import LEAST_KEPT_INPUTS

# what `selective` keeps: the results of matrix products and of attention, where a layer's time goes; by the place of their
# first factor among the arguments. Products in batches are not among them: in plain attention their results are [T, T]
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0, "aten::_grouped_mm": 0,
            "transformers::grouped_mm_fallback": 0}
ATTENTION = frozenset({
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"})


def checkpoint_layers(model: nn.Module, settings: Model) -> None:
    """Let the decoder layers of `model` checkpoint as model.activation_checkpointing (not none) and its two keys say."""
    # reentrant checkpointing needs an input that requires grad, and reduces twice under ZeRO-2
    how = {"use_reentrant": False}
    if settings.activation_checkpointing == "selective":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _policy) if settings.compile else _contexts
    which = {"every_n_layers": settings.checkpoint_every_layers} if settings.checkpoint_every_layers > 1 else {}
    if settings.checkpoints_on_host and host_is_apart():
        which["offload"] = True
    # by the older of its two names: transformers 5.17, with which benchmarks/gpu.sh runs too, has no other
    model.gradient_checkpointing_enable(how, **which)


def host_is_apart() -> bool:
    """Whether there is a device to move tensors from; without one they are in host memory already.

    transformers 5.24 means to leave them there, but asks for pinned memory that torch 2.13 has on devices alone:
    https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/modeling_utils.py, checkpoint_func
    """
    return torch.accelerator.is_available()


def _contexts():
    """torch's two modes, which see only what is kept.

    torch 2.13 counts every operation, and raises where the second forward has more of one kind than the first. Under ZeRO-3
    weights are gathered within a layer, ahead of their use, in other numbers each time; nothing of that is kept.
    """
    return tuple(_OfKept(mode) for mode in create_selective_checkpoint_contexts(_policy))


class _OfKept(TorchDispatchMode):
    """Hands on to `mode` the operations whose results are kept, and runs the others."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if _is_kept(op, args):
            return self.mode.__torch_dispatch__(op, types, args, kwargs)
        return op(*args, **kwargs or {})


def _policy(_, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if _is_kept(op, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(op, args):
    first = PRODUCTS.get(op.name())
    return op.name() in ATTENTION if first is None else args[first].shape[-1] >= LEAST_KEPT_INPUTS
