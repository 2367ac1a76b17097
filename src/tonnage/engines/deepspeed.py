"""DeepSpeed, ZeRO stages 0 to 3: the only module that imports it.

The loop owns accumulation: `set_gradient_accumulation_boundary` before each backward, losses scaled
beforehand, one `step` a window. Source: https://deepspeed.readthedocs.io/en/latest/training.html
Written against 0.19.8; below that, a NaN gradient destroys the weights in bf16 ZeRO-3 while the norm reads 1.0.
"""

import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tonnage.engines.base import Parts, StepOutcome, is_eight_bit, set_rate
from tonnage.models.build import DTYPES, full_shape
from tonnage.models.experts import listed_experts
from tonnage.models.load import materialise
from tonnage.runtime.extensions import settle_builds
from tonnage.runtime.logs import library_prints, redirect


def import_deepspeed(device: torch.device):
    """The deepspeed module, set up for `device`; it must not compile anything on the way in."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    settle_builds()
    import deepspeed

    redirect("DeepSpeed")
    # On CPU it would build a shared-memory op at start-up (32 s; a killed build leaves a lock that hangs later runs).
    # By name: the attribute deepspeed.comm.torch is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    return deepspeed


class DeepSpeedEngine:
    """See `engines.base.Engine`.

    Args:
        settings: the JSON of `config.deepspeed_json`.
    """

    def __init__(self, *, settings: dict, precision: str, clip_norm: float | None, device: torch.device):
        self.settings, self.precision, self.clip_norm, self.device = settings, precision, clip_norm, device
        self.stage = settings["zero_optimization"]["stage"]
        self.deepspeed, self._partitioned = import_deepspeed(device), None
        dist.barrier()  # no rank builds before all have looked for stale locks

    def prepare(self, parts: Parts) -> None:
        from transformers.integrations import HfDeepSpeedConfig

        self.deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        with torch.device("meta"):
            model = parts.build(DTYPES[self.precision])
        if self.stage == 3:  # module by module: no rank ever holds the model
            materialise(model, self.device, self._partition)
            for parent in listed_experts(model):  # gathered with all its experts: ranks use different ones
                self.deepspeed.utils.set_z3_leaf_module(parent, True)
            self._told = HfDeepSpeedConfig(self.settings)  # by this, while it lives, transformers knows of the partitions
        parts.load(model, self.device)
        for parameter in model.parameters():
            _forget_second_copy(parameter)  # made as each was partitioned, before it had its weights
        optimizer = parts.optimizer(model)
        with library_prints():
            self.core, self.optimizer, _, _ = self.deepspeed.initialize(
                model=model, optimizer=optimizer, config=self.settings, dist_init_required=False)
        self.model = self.core.module
        self._make_states()
        parts.start(model, self)

    def _partition(self, module):
        """Leave this rank its slice of the parameters that `module` itself has."""
        own = [parameter for parameter in module.parameters(recurse=False) if not hasattr(parameter, "ds_id")]
        if own and self._partitioned is None:
            self.deepspeed.zero.Init(module=nn.ParameterList(own), config_dict_or_path=self.settings)
            self._partitioned = own[0]
        elif own:
            self._partitioned.convert_to_zero_parameters(param_list=own)

    def _flat_parameters(self):
        """The flat fp32 tensors that the optimizer updates, this rank's part of all trained parameters."""
        for name in ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups"):
            if hasattr(self.optimizer, name):
                return getattr(self.optimizer, name)
        raise AssertionError(f"no flat parameters in {type(self.optimizer).__name__}")

    def _make_states(self, num_steps: int = 0):
        """Create the optimizer states (zeros) and set their step count.

        torch creates them in the first step, but DeepSpeed's accessors fail on states that do not exist yet.
        """
        self.torch_optimizer = self.optimizer if self.stage == 0 else self.optimizer.optimizer
        if self.eight_bit:
            self._make_pieces()
            return
        sgd = isinstance(self.torch_optimizer, torch.optim.SGD)
        self.state_names = ("momentum_buffer",) if sgd else ("exp_avg", "exp_avg_sq")
        flats = [p for _, p in self.trained()] if self.stage == 0 else self._flat_parameters()
        for flat in flats:
            state = self.torch_optimizer.state[flat]
            for name in self.state_names:
                if name not in state:
                    state[name] = torch.zeros_like(flat)
            if not sgd:
                state["step"] = torch.tensor(float(num_steps), device=flat.device)
        if self.stage in (1, 2):
            self.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def eight_bit(self) -> bool:
        """States are per parameter, not per flat tensor."""
        return is_eight_bit(self.torch_optimizer)

    def _make_pieces(self):
        """Give each trained parameter's part of this rank 8-bit states of its own.

        Blocks then never mix parameters, and states are read and written without the whole flat tensor in fp32.
        """
        self.state_names = ("exp_avg", "exp_avg_sq")
        self.pieces = {}
        for _, parameter in self.trained():
            if self.stage == 0:
                self.pieces[parameter] = [parameter]
            elif self.stage == 3:
                group, start, numel = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
                self.pieces[parameter] = self.torch_optimizer.split(self._flat_parameters()[group], start, numel)
            elif (mapping := parameter._hp_mapping) is None:  # all of it is on other ranks
                self.pieces[parameter] = []
            else:
                flat, address = self._flat_parameters()[mapping.param_group_index], mapping.get_hp_fragment_address()
                self.pieces[parameter] = self.torch_optimizer.split(flat, address.start, address.numel)
            for name in self.state_names:
                size = sum(piece.numel() for piece in self.pieces[parameter])
                self.torch_optimizer.write(self.pieces[parameter], name, torch.zeros(size, device=self.device), 0)

    def forward(self, **inputs) -> Any:
        # through the engine: it counts micro-batches there, and ZeRO-3 would overwrite gradients instead of summing
        return self.core(**inputs)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.core.set_gradient_accumulation_boundary(last)
        self.core.backward(loss, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> StepOutcome:
        set_rate(self.optimizer, learning_rate)
        if self.stage == 0:
            return self._plain_step()
        self.core.step()
        applied = self.core.was_step_applied()
        norm = float(self.core.get_global_grad_norm()) if applied else float("inf")
        return StepOutcome(norm, applied, overflow=not applied and self.precision == "fp16" and self.loss_scale > 1.0)

    @property
    def loss_scale(self) -> float:
        return float(self.optimizer.loss_scaler.cur_scale) if self.precision == "fp16" else 1.0

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if self.precision == "fp16":
            self.optimizer.loss_scaler.cur_scale = scale

    def _plain_step(self):
        """Stage 0 in fp32, where DeepSpeed reports no norm and steps on NaN; gradients are reduced by now."""
        parameters = [p for _, p in self.trained()]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        finite = bool(torch.isfinite(norm))
        if not finite:
            self.core.zero_grad()
            return StepOutcome(float(norm), False)
        if self.clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm)
        self.core.step()
        return StepOutcome(float(norm), True)

    def discard(self) -> None:
        """What zero_grad leaves behind at stages 1 to 3 (0.19.8), private state by name: only here."""
        self.core.zero_grad()
        if self.stage == 0:
            return
        optimizer = self.optimizer
        optimizer.zero_grad(set_to_none=True)
        if self.stage == 3:
            for bucket in optimizer.ipg_buckets.values():
                bucket.clear_params()
            optimizer.averaged_gradients = {}
            optimizer._get_param_coordinator().hierarchy = 0
            optimizer._partition_all_parameters()
        elif hasattr(optimizer, "clear_hp_grads"):
            optimizer.clear_hp_grads()
        else:
            for group in optimizer.averaged_gradients:
                optimizer.averaged_gradients[group] = optimizer.all_grad_tensors[group] = None
            optimizer.micro_step_id = -1
            optimizer._release_ipg_buffers()
            for bucket in optimizer.ipg_buckets.values():
                bucket.clear()
            optimizer.ready_for_gradients = False
        if hasattr(optimizer, "params_already_reduced"):
            reduced = optimizer.params_already_reduced
            for i in (reduced if isinstance(reduced, dict) else range(len(reduced))):
                reduced[i] = False
        hooks = getattr(optimizer, "_backward_hook_state", None)
        if hooks is not None:
            hooks.backward_active_depth = hooks.remaining_grad_acc_hooks = 0
            hooks.reset_for_new_step()

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        if parameter.requires_grad and self.stage > 0:
            return self.deepspeed.utils.safe_get_full_fp32_param(parameter).view(full_shape(parameter))
        if self.stage == 3:
            with self.deepspeed.zero.GatheredParameters([parameter]):
                return parameter.detach().clone()
        return parameter.detach()

    def fill(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        if self.stage == 3:
            from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

            part = self._part(parameter, tensor)
            self.deepspeed.utils.safe_set_local_fp32_param(parameter, part)
            parameter.ds_tensor.data.copy_(part)
            _forget_second_copy(parameter)
            if parameter.ds_status == ZeroParamStatus.AVAILABLE:  # small ones are kept whole on every rank
                parameter.data.copy_(tensor)
            return
        if self.stage > 0:
            self.deepspeed.utils.safe_set_full_fp32_param(parameter, tensor.to(self.device, torch.float32))
        parameter.data.copy_(tensor)

    def _part(self, parameter, tensor):
        """This rank's slice of the flattened tensor, padded to equal slices as ZeRO-3 does."""
        size = parameter.ds_tensor.numel()
        start = size * dist.get_rank()
        own = tensor.flatten()[start:start + size].to(parameter.ds_tensor.device, torch.float32)
        return nn.functional.pad(own, (0, size - own.numel()))

    def whole_states(self, parameter: nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
        read = self.deepspeed.utils.safe_get_full_optimizer_state
        if self.eight_bit:
            read = self._whole_8bit
        elif self.stage == 0:
            return ((name, self.torch_optimizer.state[parameter][name]) for name in self.state_names)
        return ((name, read(parameter, name).view(full_shape(parameter))) for name in self.state_names)

    def _whole_8bit(self, parameter, name):
        pieces = self.pieces[parameter]
        if not pieces:  # DeepSpeed sums the parts over ranks
            return parameter.get_full_hp_param(name)
        part = self.torch_optimizer.read(pieces, name)
        if self.stage == 0:
            return part
        if self.stage == 3:
            return self.optimizer._fp32_state_allgather(parameter, part)
        parameter._hp_mapping.optim_fragment = {name: part}
        whole = parameter.get_full_hp_param(name)
        parameter._hp_mapping.optim_fragment = {}
        return whole

    def fill_states(self, parameter: nn.Parameter, states: dict[str, torch.Tensor], num_steps: int) -> None:
        if self.eight_bit:
            for name, tensor in states.items():
                self.torch_optimizer.write(self.pieces[parameter], name, self._own_part(parameter, tensor), num_steps)
            return
        for name, tensor in states.items():
            if self.stage == 3:
                self.deepspeed.utils.safe_set_local_optimizer_state(parameter, self._part(parameter, tensor), name)
            elif self.stage > 0:
                self.deepspeed.utils.safe_set_full_optimizer_state(parameter, tensor.to(self.device), name)
            else:
                self.torch_optimizer.state[parameter][name].copy_(tensor)
        self._make_states(num_steps)

    def _own_part(self, parameter, tensor):
        """What this rank's pieces hold of a whole tensor, flat."""
        if self.stage == 3:
            return self._part(parameter, tensor)
        if self.stage == 0:
            return tensor.flatten()
        if parameter._hp_mapping is None:
            return tensor.new_empty(0)
        address = parameter._hp_mapping.lp_fragment_address
        return tensor.flatten().narrow(0, address.start, address.numel)

    def close(self) -> None:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        self.core.destroy()
        unset_hf_deepspeed_config()
        # 0.19.8: the next model of this process would keep second copies too
        self.deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        self._partitioned, self.pieces = None, {}
        del self.core, self.model, self.optimizer, self.torch_optimizer


def _forget_second_copy(parameter):
    """Of hpZ, where ZeRO-3 keeps one: the next gather is of what the parameter is now, and makes a new one.

    0.19.8 makes it when a parameter is partitioned, and drops those of trained ones after a step alone.
    """
    if hasattr(parameter, "ds_secondary_tensor"):
        parameter.ds_secondary_tensor = None
