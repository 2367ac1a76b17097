"""Experts that stay where they are: each rank holds some of them whole, and tokens travel to their experts and back.

Two meshes over the same ranks: all ranks share the dense parts; of the experts `expert_gpus` ranks hold one copy, split by
expert, and the copies' shards are spread over the remaining dimension. Built on transformers 5.24, which sends the tokens
(https://huggingface.co/docs/transformers/expert_parallelism); its entry points are used in this module only.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tonnage.config.rules import expert_obstacle
from tonnage.errors import ConfigError
from tonnage.models.experts import expert_modules


def expert_mesh(device: torch.device, expert_gpus: int) -> DeviceMesh:
    """(copies, experts, 1): neighbours hold one copy, so that tokens stay within a node where a copy fits."""
    shape = (dist.get_world_size() // expert_gpus, expert_gpus, 1)
    return init_device_mesh(device.type, shape, mesh_dim_names=("copies", "experts", "alone"))


def spread_experts(model: nn.Module, mesh: DeviceMesh, options: dict[str, Any]) -> set[nn.Parameter]:
    """Split the routed experts of every layer over `mesh` and let tokens travel; before layers are sharded.

    Args:
        options: of fully_shard, without a mesh.

    Returns:
        Parameters that nothing is to be done with any more: frozen, and of a single copy, so never gathered.

    Raises:
        ConfigError: a model without routed experts, or a number of them that does not divide.
    """
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

    found, size, copies = expert_modules(model), mesh["experts"].size(), mesh["copies"].size()
    settled = set()
    for number in {experts.num_experts for experts in found.values()} or {0}:
        if (obstacle := expert_obstacle(size, number)) is not None:
            raise ConfigError(obstacle)
    for experts in found.values():
        for name, parameter in experts._parameters.items():
            if parameter is not None:
                split = distribute_tensor(parameter.data, mesh["experts"], [Shard(0)], src_data_rank=None)
                experts._parameters[name] = nn.Parameter(split, requires_grad=parameter.requires_grad)
        experts.num_experts //= size
        experts._is_expert_parallel = True
        EpDispatchExpertsParallel().install_forward(experts, mesh["experts"], tp_mesh=mesh["alone"],
                                                    ep_implementation="all_to_all")
        own = {one for one in experts.parameters(recurse=False) if not one.requires_grad and copies == 1}
        settled |= own
        fully_shard(experts, mesh=mesh["copies"], ignored_params=own, **options)
        # a gradient here is a sum over the tokens of `size` ranks, and the loop scales for a mean over all
        experts.set_gradient_divide_factor(float(dist.get_world_size()))
        if copies > 1:
            experts.set_force_sum_reduction_for_comms(True)
    return settled
