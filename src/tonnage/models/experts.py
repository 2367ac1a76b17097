"""Routed experts, stacked as transformers 5 does, whose weights are kept quantised or carry an adapter.

Tokens are sorted by expert, and each projection is one grouped product over all experts; so experts that get no token
take part like the others, and no engine waits for them. peft adapts the weight as a whole; here the low-rank product is
on the tokens, [tokens, rank] instead of [experts, out, in].
"""

import torch
from torch import nn

from tonnage.errors import ConfigError
from tonnage.models.quantised import Quantised


class TunedExperts(Quantised):
    """Experts of transformers' `use_experts_implementation`; `lora_scale` is None without an adapter."""

    kept = {}
    lora_scale: float | None = None

    def forward(self, hidden_ND: torch.Tensor, top_k_index_NK: torch.Tensor, top_k_weights_NK: torch.Tensor):
        """[tokens, hidden]: the weighted sum of what each token's experts make of it."""
        num_tokens, top_k = top_k_index_NK.shape
        expert_S, order_S = torch.sort(top_k_index_NK.reshape(-1))
        counted = expert_S.float() if expert_S.device.type == "cpu" else expert_S.int()  # what histc takes there
        counts_E = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1)
        ends_E = counts_E.cumsum(0).to(torch.int32)
        # each tensor has one name, so that it is let go when the next one is made
        out_S = self._project("gate_up_proj" if self.has_gate else "up_proj", hidden_ND[order_S // top_k], expert_S, ends_E)
        out_S = self._apply_gate(out_S) if self.has_gate else self.act_fn(out_S)
        out_S = self._project("down_proj", out_S, expert_S, ends_E)
        out_S = out_S * top_k_weights_NK.reshape(-1)[order_S][:, None]
        place_S = torch.empty_like(order_S)
        place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        out_S = out_S[place_S]
        return out_S.view(num_tokens, top_k, -1).sum(1).to(hidden_ND.dtype)

    def _project(self, leaf, x_S, expert_S, ends_E):
        if leaf in self.kept:
            out = _FrozenGroupedMatmul.apply(x_S, self, leaf, ends_E)
        else:
            out = grouped_matmul(x_S, self._by_inputs(getattr(self, leaf)), ends_E)
        if self.lora_scale is not None:
            a_ERI, b_EOR = getattr(self, f"{leaf}_lora_A"), getattr(self, f"{leaf}_lora_B")
            if self.training and self.lora_dropout:
                x_S = nn.functional.dropout(x_S, self.lora_dropout)
            low_SR = grouped_matmul(x_S, a_ERI.to(x_S.dtype).transpose(1, 2), ends_E)
            out = out + self.lora_scale * grouped_matmul(low_SR, b_EOR.to(x_S.dtype).transpose(1, 2), ends_E)
        return out + getattr(self, f"{leaf}_bias")[expert_S] if self.has_bias else out

    def _by_inputs(self, weight):
        """As [experts, in, out]."""
        return weight if self.is_transposed else weight.transpose(1, 2)

    def merge(self) -> None:
        """Add the adapter to the weights, which must not be quantised, and leave it away."""
        for leaf in matrices(self):
            a_ERI, b_EOR = self._parameters.pop(f"{leaf}_lora_A"), self._parameters.pop(f"{leaf}_lora_B")
            change_EOI = self.lora_scale * torch.bmm(b_EOR.float(), a_ERI.float())
            with torch.no_grad():
                weight = getattr(self, leaf)
                weight += (change_EOI.transpose(1, 2) if self.is_transposed else change_EOI).to(weight.dtype)
        self.lora_scale = None

    def peft_tensors(self) -> dict[str, torch.Tensor]:
        """The adapter as peft's ParamWrapper has it: A [experts * rank, in] and B [out, rank * experts] by name.

        peft wraps the module once for each weight, in their order, so that the last is outermost. Source:
        https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/layer.py
        """
        found = {}
        for depth, leaf in enumerate(reversed(matrices(self))):
            a_ERI, b_EOR = (getattr(self, f"{leaf}_lora_{kind}").detach() for kind in "AB")
            within = "base_layer." * depth
            found[f"{within}lora_A.weight"] = a_ERI.flatten(0, 1)
            found[f"{within}lora_B.weight"] = b_EOR.permute(1, 2, 0).flatten(1)
        return found


class _FrozenGroupedMatmul(torch.autograd.Function):
    """x [rows, in] times each expert's weight, which is dequantised for it; rows [ends[e - 1], ends[e]) are expert e's."""

    @staticmethod
    def forward(ctx, x, module, leaf, ends):
        ctx.module, ctx.leaf = module, leaf
        ctx.save_for_backward(ends)
        return grouped_matmul(x, module._by_inputs(module.dequantised(leaf, x.dtype)), ends)

    @staticmethod
    def backward(ctx, grad):
        weight = ctx.module._by_inputs(ctx.module.dequantised(ctx.leaf, grad.dtype))
        return grouped_matmul(grad, weight.transpose(1, 2), *ctx.saved_tensors), None, None, None


def grouped_matmul(x: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """[rows, out]; by transformers 5.24, which knows on which devices torch has a kernel for it."""
    from transformers.integrations.moe import _grouped_mm

    return _grouped_mm(x, weight_EIO, offs=ends_E)


def listed_experts(model: nn.Module) -> list[nn.Module]:
    """What holds experts as a list of modules, each run only where it gets a token (model code of a folder)."""
    return [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.ModuleList)]


def let_all_take_part(parent: nn.Module) -> None:
    """Give every trained expert of a list a gradient, zero where it got no token.

    Ranks would else reduce the gradients of different experts with each other, or wait for ever.
    """
    def add_nothing(module, args, out):
        trained = [parameter for parameter in module.experts.parameters() if parameter.requires_grad]
        if not trained:
            return out
        nothing = sum((parameter.flatten()[:1] * 0.0).sum() for parameter in trained)
        if isinstance(out, tuple):
            return (out[0] + nothing.to(out[0].dtype), *out[1:])
        return out + nothing.to(out.dtype)

    parent.register_forward_hook(add_nothing)


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Stacked experts by name: what holds parameters of three dimensions beside a router."""
    return {f"{name}.experts" if name else "experts": parent.experts for name, parent in model.named_modules()
            if isinstance(getattr(parent, "experts", None), nn.Module) and matrices(parent.experts)}


def matrices(experts: nn.Module) -> list[str]:
    """Names of the weights [experts, ...] of stacked experts."""
    names = [leaf for leaf, parameter in experts._parameters.items() if parameter is not None and parameter.ndim == 3]
    return [*getattr(experts, "kept", {}), *(leaf for leaf in names if leaf in ("gate_up_proj", "up_proj", "down_proj"))]


def add_expert_adapter(experts: nn.Module, rank: int, scale: float, dropout: float, dtype: torch.dtype) -> None:
    """Give each expert's matrices LoRA: A [experts, rank, in] and B [experts, out, rank], empty.

    Raises:
        ConfigError: experts that are computed otherwise.
    """
    tune(experts)
    experts.lora_scale, experts.lora_dropout = scale, dropout
    for leaf in matrices(experts):
        shape = experts.kept[leaf].shape if leaf in experts.kept else experts._parameters[leaf].shape
        device = next(experts.parameters()).device
        count, outputs, inputs = (shape[0], shape[2], shape[1]) if experts.is_transposed else shape
        for kind, size in (("A", (count, rank, inputs)), ("B", (count, outputs, rank))):
            experts.register_parameter(f"{leaf}_lora_{kind}", nn.Parameter(torch.empty(size, dtype=dtype, device=device)))


def tune(experts: nn.Module) -> None:
    """Make `experts` TunedExperts of their class."""
    if isinstance(experts, TunedExperts):
        return
    if not hasattr(experts, "_is_expert_parallel") or experts.has_post_expert_norm:
        raise ConfigError(f"adapter: {type(experts).__name__} are not stacked experts as transformers 5 computes them; use "
                          f"adapter.targets=[all-linear] and adapter.quantise=none")
    experts.kept = {}
    experts.__class__ = type(type(experts).__name__, (TunedExperts, type(experts)), {})
