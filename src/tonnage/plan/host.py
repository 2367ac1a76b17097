"""Memory of the host and disk of a run."""

import math
from dataclasses import dataclass

from tonnage.facts.sizes import PROCESS_WITHOUT_CUDA_GIB, SAVE_FILE_BYTES
from tonnage.plan.job import Job
from tonnage.plan.spread import MASTER, STATES

PROCESS_GIB = 3.0  # a Python process with torch and CUDA's libraries
GIB = 2**30


@dataclass(frozen=True)
class Host:
    """GiB. `terms` by what holds them, of one node with all its ranks; disk of one checkpoint, and the most at once."""

    terms: dict[str, float]
    checkpoint_gib: float
    disk_gib: float

    @property
    def memory_gib(self) -> float:
        return sum(self.terms.values())


def host(job: Job, num_checkpoints: int, cuda: bool) -> Host:
    """What a node and the disk must hold; each replica of hsdp has its own.

    Args:
        num_checkpoints: kept at once, the one being written included.
    """
    trained = job.trained_parameters
    ranks = min(job.gpus, job.gpus_per_node)
    terms = {"processes": ranks * (PROCESS_GIB if cuda else PROCESS_WITHOUT_CUDA_GIB)}
    if job.offload != "none":
        terms["offloaded optimizer, gradients, fp32 weights"] = ranks * _optimizer_bytes(job) / GIB
    if job.offload == "all":
        terms["offloaded weights"] = ranks * _weight_bytes(job) / GIB
    if job.checkpoints_on_host:
        terms["inputs of layers"] = ranks * job.layers_on_host * pinned_bytes(job.layer_input_bytes) / GIB
    checkpoint = (4 + (4 if job.optimizer == "sgd" else 8)) * trained / GIB
    # each rank collects a file; one at a time has the largest tensor with its states besides
    largest = max(job.architecture.largest_matrix(i) for i in range(job.architecture.num_layers)) if job.trains_all else 0
    written = ranks * SAVE_FILE_BYTES + checkpoint * GIB / max(1, trained) * largest
    terms["checkpoint being written"] = min(written / GIB, checkpoint)
    return Host(terms, checkpoint, checkpoint * num_checkpoints)


def pinned_bytes(size: float, block: float = math.inf) -> float:
    """What `size` bytes of pinned memory take, in blocks of `block`: torch rounds each up to a power of two.

    Source: torch 2.13, ATen/core/CachingHostAllocator.h.
    """
    whole, rest = (0, size) if size < block else divmod(size, block)
    return whole * (pinned_bytes(block) if whole else 0) + (2.0 ** math.ceil(math.log2(rest)) if rest > 0 else 0.0)


def _optimizer_bytes(job):
    """Of a rank's share of what is trained, under offload=optimizer and all.

    DeepSpeed 0.19.8 pins its flat buffers: at stages 1 and 2 fp32 weights, summed gradients and the weights to be sent
    back (runtime/zero/stage_1_and_2.py); at stage 3 the gradients, once as summed and once for the step, by sub-groups
    (stage3.py). FSDP2 pins its fp32 weights tensor by tensor, how far these are rounded up is not counted.
    """
    trained = job.trained_parameters / job.shard_gpus
    states = STATES[job.optimizer] * trained
    if job.strategy == "zero3":
        return states + MASTER * trained + pinned_bytes(MASTER * trained) + pinned_bytes(
            MASTER * trained, MASTER * job.zero.sub_group_size)
    if job.strategy.startswith("zero"):
        return states + 2 * pinned_bytes(MASTER * trained) + pinned_bytes(job.compute_bytes * trained)
    return states + 2 * MASTER * trained


def _weight_bytes(job):
    """Of a rank, besides, under offload=all: frozen weights; under ZeRO-3 trained ones in the compute precision, pinned
    one by one and then in one buffer, while torch keeps the blocks of the former."""
    copies = job.compute_bytes * job.trained_parameters / job.shard_gpus if job.strategy == "zero3" else 0.0
    return job.kept_bytes / job.shard_gpus + copies + pinned_bytes(copies)
