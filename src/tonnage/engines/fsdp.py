"""PyTorch's FSDP2: fsdp, hsdp and ddp, one process too, as three meshes of one engine.

fsdp shards over all ranks; hsdp over groups, replicated across groups; ddp is hsdp with groups of one, its frozen
weights left alone. Source: https://docs.pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html
"""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tonnage.engines.base import Parts, StepOutcome, is_eight_bit, set_rate
from tonnage.engines.expert_parallel import expert_mesh, spread_experts
from tonnage.models.build import DTYPES, decoder_layers
from tonnage.models.load import shard_rows

INITIAL_LOSS_SCALE = 2.0**16
GROW_AFTER_STEPS = 2000


class FsdpEngine:
    """See `engines.base.Engine`.

    Args:
        shard_gpus: ranks that share one copy of the weights; the others hold replicas.
        expert_gpus: ranks that share one copy of the routed experts, each whole on one; 1: they are as the rest.
        float8_gathers: what is multiplied in FP8 is gathered in FP8.
        timeout_s: a collective of the engine that takes longer ends the run.
    """

    def __init__(self, *, shard_gpus: int, expert_gpus: int, precision: str, offload: bool, float8_gathers: bool,
                 reshard_after_forward: bool, clip_norm: float | None, compile_layers: bool, timeout_s: float,
                 device: torch.device):
        self.shard_gpus, self.expert_gpus, self.device = shard_gpus, expert_gpus, device
        self.precision, self.offload, self.float8_gathers = precision, offload, float8_gathers
        self.reshard_after_forward, self.clip_norm, self.compile_layers = reshard_after_forward, clip_norm, compile_layers
        self.timeout = timedelta(seconds=timeout_s)
        self.replicas = dist.get_world_size() // shard_gpus
        self.loss_scale = INITIAL_LOSS_SCALE if precision == "fp16" else 1.0
        self.finite_steps = 0

    def prepare(self, parts: Parts) -> None:
        with torch.device("meta"):
            model = parts.build(torch.float32)
        if self.compile_layers:
            for layer in decoder_layers(model):
                layer.compile()
        self._shard(model)
        home = torch.device("cpu") if self.offload else self.device
        parts.load(model, home)
        for module in model.modules():  # parameters may live on the host, buffers are used where they are
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)
        self.model = model
        if self.float8_gathers:
            from tonnage.models.float8 import gather_in_float8

            gather_in_float8(model, self.shard_gpus)
        parts.start(model, self)
        self.optimizer = parts.optimizer(model)

    def _shard(self, model):
        """fully_shard each decoder layer, embedding and head where they are two, then the rest.

        The root stays gathered from forward to the end of backward, so it should hold little. The head is used at the
        end of forward and at the beginning of backward: it stays gathered in between.
        """
        mesh = (init_device_mesh(self.device.type, (self.shard_gpus,)) if self.replicas == 1 else
                init_device_mesh(self.device.type, (self.replicas, self.shard_gpus),
                                 mesh_dim_names=("replicate", "shard")))
        for dim in range(mesh.ndim):  # groups that a mesh makes take torch's default, not that of the group of all
            mesh.get_group(dim).set_timeout(self.timeout)
        options = {"mesh": mesh}
        if self.precision != "fp32":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=DTYPES[self.precision], reduce_dtype=torch.float32)
        if self.offload:
            options["offload_policy"] = CPUOffloadPolicy()
        if self.shard_gpus == 1 and not self.offload:
            # replicated anyway: nothing to gather for weights that no gradient changes
            frozen = {p for p in model.parameters() if not p.requires_grad}
            options["ignored_params"] = frozen
            if frozen:  # an adapter is small: one group for all, or hooks in every layer cost 5 % of a step (measured)
                fully_shard(model, **options)
                return
        if self.expert_gpus > 1:
            mesh = expert_mesh(self.device, self.expert_gpus)
            for dim in range(mesh.ndim):
                mesh.get_group(dim).set_timeout(self.timeout)
            own = {name: value for name, value in options.items() if name != "mesh"}
            options["ignored_params"] = spread_experts(
                model, mesh, own | {"reshard_after_forward": self.reshard_after_forward})
        for layer in decoder_layers(model):
            fully_shard(layer, reshard_after_forward=self.reshard_after_forward, **options)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if head is not None and embedding.weight is not head.weight:
            fully_shard(embedding, reshard_after_forward=self.reshard_after_forward, **options)
            fully_shard(head, reshard_after_forward=False, **options)
        fully_shard(model, **options)

    def forward(self, **inputs) -> Any:
        output = self.model(**inputs)
        if not torch.is_grad_enabled():
            # root and head stay gathered for a backward that does not come: memory, and stale once weights are filled
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return output

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        if self.replicas > 1:
            # shards are reduced every time, so that no rank holds a whole gradient; replicas once a window
            self.model.set_requires_all_reduce(last)
        (loss * self.loss_scale).backward()

    def step(self, learning_rate: float) -> StepOutcome:
        gradients = [p.grad for _, p in self.trained() if p.grad is not None]
        norm = _total_norm(gradients) / self.loss_scale
        finite = bool(torch.isfinite(norm))
        if finite:
            scale = 1.0 / self.loss_scale
            if self.clip_norm is not None:
                scale *= min(1.0, self.clip_norm / (float(norm) + 1e-6))
            if scale != 1.0:
                for of_mesh in _by_mesh(gradients):
                    torch._foreach_mul_(of_mesh, scale)
            set_rate(self.optimizer, learning_rate)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        overflow = not finite and self.loss_scale > 1.0
        if self.precision == "fp16":
            self._adapt_loss_scale(finite)
        return StepOutcome(float(norm), finite, overflow)

    def _adapt_loss_scale(self, finite):
        """Halve on overflow, double after many good steps. Source: https://arxiv.org/abs/1710.03740, section 3.2."""
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.loss_scale = max(1.0, self.loss_scale / 2)
        elif self.finite_steps % GROW_AFTER_STEPS == 0:
            self.loss_scale *= 2

    def discard(self) -> None:
        self.model.reset_iter_state()
        self.optimizer.zero_grad(set_to_none=True)
        # torch 2.13: reset_iter_state keeps gradients that were summed and not yet reduced
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    group._partial_reduce_output = None
                    for parameter in group.fsdp_params:
                        parameter.unsharded_accumulated_grad = None
                        if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                            unsharded.grad = None

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        return _whole(parameter.detach())

    def fill(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(_part(tensor, parameter))

    def whole_states(self, parameter: nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
        states = self.optimizer.state.get(parameter, {})
        return ((name, _whole(_dequantised(value)).float()) for name, value in states.items()
                if torch.is_tensor(value) and value.shape == parameter.shape)

    def fill_states(self, parameter: nn.Parameter, states: dict[str, torch.Tensor], num_steps: int) -> None:
        own = self.optimizer.state[parameter]
        eight_bit = is_eight_bit(self.optimizer)  # it quantises what is copied in
        for name, tensor in states.items():
            own[name] = (self.optimizer._new_buffer(parameter, signed=name == "exp_avg") if eight_bit else
                         torch.zeros_like(parameter))
            _local(own[name]).copy_(_local(_part(tensor, parameter)))
        if "exp_avg" in states:
            own["step"] = torch.tensor(float(num_steps), device="cpu" if eight_bit else parameter.device)

    def close(self) -> None:
        del self.model, self.optimizer


def _total_norm(gradients):
    norms = [torch.nn.utils.get_total_norm(of_mesh) for of_mesh in _by_mesh(gradients)]
    return torch.linalg.vector_norm(torch.stack([_whole(norm) for norm in norms]))


def _by_mesh(tensors):
    """Tensors that are spread over the same ranks in the same way; torch computes with such only."""
    groups = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _dequantised(state):
    """An 8-bit state as fp32, otherwise what it is."""
    local = _local(state)
    if not hasattr(local, "dequantize") or type(local) is torch.Tensor:
        return state
    plain = local.dequantize()
    if not isinstance(state, DTensor):
        return plain
    return DTensor.from_local(plain, state.device_mesh, state.placements, run_check=False, shape=state.shape,
                              stride=state.stride())


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part(tensor, like):
    """This rank's part of `tensor` as a DTensor like `like`; every rank has the whole, so nothing is sent."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device, like.dtype)
    start, stop = shard_rows(like)
    part = tensor[start:stop].to(like.device, like.dtype, copy=True)
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False,
                              shape=like.shape, stride=like.stride())
