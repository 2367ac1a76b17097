"""The optimizer over an engine's parameters, with weight decay where it belongs."""

import torch
from torch import nn

from tonnage.config.schema import Optimizer
from tonnage.models.build import full_shape


def parameter_groups(model: nn.Module, optimizer: Optimizer) -> list[dict]:
    """Trained parameters in groups: with weight decay, and norms, biases and embeddings without; each by its mesh.

    `decay_all=true` lets all decay. Groups are never empty. A mesh: torch updates tensors of one together.
    """
    embeddings = {id(parameter) for module in model.modules() if isinstance(module, nn.Embedding)
                  for parameter in module.parameters(recurse=False)}
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # under ZeRO-3 a parameter itself is empty and flat
            exempt = (len(full_shape(parameter)) < 2 or id(parameter) in embeddings or name.endswith("bias")
                      or "norm" in name)
            key = exempt and not optimizer.decay_all, getattr(parameter, "device_mesh", None)
            groups.setdefault(key, []).append(parameter)
    # DeepSpeed numbers them: those that decay first
    return [{"params": parameters, "weight_decay": 0.0 if exempt else optimizer.weight_decay}
            for (exempt, _), parameters in sorted(groups.items(), key=lambda item: item[0][0])]


def build_optimizer(model: nn.Module, optimizer: Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer of `optimizer` over `model`'s trained parameters."""
    groups = parameter_groups(model, optimizer)
    # the loop sets the rate before each step; some libraries step once on zero gradients while they set up
    common = {"lr": 0.0, "betas": optimizer.betas, "eps": optimizer.eps}
    if optimizer.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=optimizer.momentum)
    if optimizer.name == "adamw":
        return torch.optim.AdamW(groups, **common, fused=True)
    from tonnage.engines.eight_bit import AdamW8bit

    return AdamW8bit(groups, **common)
