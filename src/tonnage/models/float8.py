"""Linear layers of the decoder whose three products are computed in FP8, by torchao's casts and scaled products.

Weights, their gradients and activations stay what they are without it; what a product takes is cast for that product and
let go. torchao's own Float8Linear makes the gradient of a frozen weight too, and keeps the input for it; here neither is
done, so that a base under an adapter costs two products and saves nothing.

Sources: https://docs.pytorch.org/ao/0.18/api_reference/api_ref_float8.html; e4m3 forward, e5m2 for gradients (rowwise: e4m3
in both): arXiv 2209.05433. Shapes: N tokens, I inputs, O outputs, P ranks that share a weight.
"""

from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig, ScaledMMConfig

from tonnage.config.schema import Precision
from tonnage.errors import ConfigError
from tonnage.facts.sizes import FLOAT8_MULTIPLE

UNITS_SINCE = (8, 9)  # compute capability of Ada, the first with FP8 units for these products


@dataclass(frozen=True)
class Converted:
    """What `convert` has done; `left_out`: names of linear layers by why they were. `num_gathered`: of the converted, those
    that are gathered in FP8."""

    scaling: str
    num_converted: int
    left_out: dict[str, list[str]] = field(default_factory=dict)
    has_experts: bool = False
    num_gathered: int = 0

    def __str__(self) -> str:
        total = self.num_converted + sum(map(len, self.left_out.values()))
        parts = [f"{len(names)} left out: {why} ({names[0]}{', ...' * (len(names) > 1)})"
                 for why, names in self.left_out.items()]
        parts += [f"{self.num_gathered} of them gathered in FP8"] * (self.num_gathered > 0)
        parts += ["routed experts are not among them and compute in bf16"] * self.has_experts
        return "; ".join([f"FP8 ({self.scaling}): {self.num_converted} of {total} linear layers of the decoder", *parts])


def require_units(device: torch.device) -> None:
    """Refuse a GPU without FP8 units.

    Raises:
        ConfigError: it is older than Ada.
    """
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < UNITS_SINCE:
        major, minor = torch.cuda.get_device_capability(device)
        raise ConfigError(f"precision=fp8: {torch.cuda.get_device_name(device)} has no FP8 units (compute capability "
                          f"{major}.{minor}, needed {'.'.join(map(str, UNITS_SINCE))}); use precision=bf16, or "
                          f"precision.fp8_emulate=true, which is slow")


def convert(linears: dict[str, nn.Linear], routers: set[str], precision: Precision, has_experts: bool) -> Converted:
    """Let `linears` compute in FP8, in place, but for routers and what FP8 units cannot multiply.

    Args:
        precision: its fp8_recipe is `tensorwise`, one scale a tensor, or `rowwise`, one a row; with fp8_emulate numbers
            are rounded to FP8 and multiplied in fp32.
        has_experts: the decoder has routed experts, which are no linear layers.

    Raises:
        ConfigError: none of them can.
    """
    left_out = {}
    config, products = _configs(precision.fp8_recipe, precision.fp8_emulate)
    for name, module in linears.items():
        why = ("routers" if name in routers else "of a class of the model's own" if type(module) is not nn.Linear else
               f"dimensions that are no multiples of {FLOAT8_MULTIPLE}" if not _fits(module) else None)
        if why:
            left_out.setdefault(why, []).append(name)
            continue
        module.__class__, module.float8, module.products = Float8Linear, config, products
    num = len(linears) - sum(map(len, left_out.values()))
    if num == 0:
        reasons = "; ".join(f"{len(names)} {why}" for why, names in left_out.items())
        raise ConfigError(f"precision=fp8: none of the {len(linears)} linear layers of the decoder can compute in FP8 "
                          f"({reasons}); use precision=bf16")
    scaling = precision.fp8_recipe + ", emulated" * precision.fp8_emulate
    return Converted(scaling, num, left_out, has_experts)


def gather_in_float8(model: nn.Module, num_shards: int) -> None:
    """Let FSDP2 gather in FP8 what `model`, sharded by rows over `num_shards` ranks, multiplies in FP8 (tensorwise).

    Each rank casts its rows, by the scale of the whole matrix in the compute precision: the numbers are those that a rank
    makes of what it gathers otherwise. Matrices whose rows do not divide are gathered as the rest. Call it once weights
    are where they stay. FSDP2 asks the local tensor for these two functions; a class of tensors with them, as torchao has
    for this, would pass through optimizer, checkpoint and clipping too.

    Source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py.

    Raises:
        ConfigError: the rows of none divide.
    """
    even = [module for module in model.modules()
            if isinstance(module, Float8Linear) and module.out_features % num_shards == 0]
    if not even:
        raise ConfigError(f"strategy.fp8_all_gather=true: no matrix has rows that divide by the {num_shards} GPUs that "
                          f"share them; leave it out, or change gpus")
    for module in even:
        local_RI = module.weight._local_tensor  # itself: to_local() makes another of it
        local_RI.fsdp_pre_all_gather, local_RI.fsdp_post_all_gather = _Rows(local_RI).cast, _gathered
    model.float8 = replace(model.float8, num_gathered=len(even))


@dataclass(frozen=True)
class _Rows:
    """The rows of a weight [O, I] on this rank, R = O / P."""

    local_RI: torch.Tensor

    def cast(self, mesh, outer_size, outer_stride, module, mp_policy):
        """(what is gathered, what is not)."""
        config = module.float8
        cast_RI = hp_tensor_to_float8_dynamic(
            self.local_RI.detach().to(mp_policy.param_dtype), config.cast_config_weight.target_dtype, module.products,
            reduce_amax=True, gemm_input_role=GemmInputRole.WEIGHT, device_mesh=mesh,
            round_scales_to_power_of_2=config.round_scales_to_power_of_2)
        return (cast_RI._data,), (cast_RI._scale, module.products)


def _gathered(outputs, kept, param_dtype, *, out=None):
    """(the whole weight, what to free of it); into `out`, whose numbers are in place, where it was made before."""
    (data_OI,), (scale, products) = outputs, kept
    if out is not None:
        out._scale = scale
        return None
    return Float8TrainingTensor(data_OI, scale, param_dtype, products, gemm_input_role=GemmInputRole.WEIGHT), (data_OI,)


def _fits(module):
    return module.in_features % FLOAT8_MULTIPLE == 0 and module.out_features % FLOAT8_MULTIPLE == 0


@cache
def _configs(recipe, emulate):
    """torchao's settings of casts and of products."""
    convert_to_float8_training(nn.Identity())  # converts nothing: works around a fault of Triton in compiled FP8 casts
    config = Float8LinearConfig.from_recipe_name(recipe)
    each = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    # the last sums over tokens, of which micro-batches have any number, and the units take multiples of 16
    products = LinearMMConfig(*(ScaledMMConfig(emulate, one.use_fast_accum, False, pad)
                                for one, pad in zip(each, (False, False, True), strict=True)))
    return config, products


class Float8Linear(nn.Linear):
    """A linear layer [O, I] that computes in FP8; peft adapts it as it does any other."""

    def forward(self, x):
        out = _Float8Product.apply(x, self.weight, self.products, self.float8)
        return out if self.bias is None else out + self.bias.to(out.dtype)


@torch._dynamo.allow_in_graph
class _Float8Product(torch.autograd.Function):
    """x [..., I] times the transpose of weight [O, I]."""

    @staticmethod
    def forward(ctx, x, weight_OI, products, config):
        trains_weight = ctx.needs_input_grad[1]
        # the weight itself, not a view: engines free what it gathers and gather it again
        ctx.save_for_backward(x if trains_weight else None, weight_OI)
        ctx.products, ctx.config, ctx.shape = products, config, x.shape
        x_NI = _cast(x.reshape(-1, x.shape[-1]), GemmInputRole.INPUT, config.cast_config_input, -1, products, config)
        weight_IO = _cast_weight(weight_OI, config.cast_config_weight, 0, products, config)
        return torch.mm(x_NI, weight_IO).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        (x, weight_OI), products, config = ctx.saved_tensors, ctx.products, ctx.config
        grad_x = grad_weight_OI = None
        rows = grad.reshape(-1, grad.shape[-1])
        grad_NO = _cast(rows, GemmInputRole.GRAD_OUTPUT, config.cast_config_grad_output, -1, products, config)
        if ctx.needs_input_grad[0]:
            cast = config.cast_config_weight_for_grad_input
            weight_IO = _cast_weight(weight_OI, cast, -1, products, config)
            grad_x = torch.mm(grad_NO, weight_IO.t()).reshape(ctx.shape)
            del weight_IO
        if ctx.needs_input_grad[1]:
            cast = config.cast_config_grad_output_for_grad_weight
            if cast.scaling_granularity is ScalingGranularity.AXISWISE:  # else a cast serves both products
                del grad_NO
                grad_NO = _cast(rows, GemmInputRole.GRAD_OUTPUT, cast, 0, products, config)
            cast = config.cast_config_input_for_grad_weight
            x_NI = _cast(x.reshape(-1, x.shape[-1]), GemmInputRole.INPUT, cast, 0, products, config)
            grad_weight_OI = torch.mm(grad_NO.t(), x_NI)
        return grad_x, grad_weight_OI, None, None


def _cast_weight(weight_OI, cast, axis, products, config):
    """Transposed, in FP8; cast already where it was gathered so."""
    if isinstance(weight_OI, Float8TrainingTensor):
        return weight_OI.t()
    return _cast(weight_OI.t(), GemmInputRole.WEIGHT, cast, axis, products, config)


def _cast(matrix, role, cast, axis, products, config):
    """In FP8 with a scale for all of it, or for each line along `axis`."""
    axis = axis if cast.scaling_granularity is ScalingGranularity.AXISWISE else None
    return hp_tensor_to_float8_dynamic(
        matrix, cast.target_dtype, products, gemm_input_role=role, scaling_granularity=cast.scaling_granularity,
        axiswise_dim=axis, round_scales_to_power_of_2=config.round_scales_to_power_of_2)
