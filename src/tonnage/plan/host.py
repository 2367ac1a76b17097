"""Memory of the host and disk of a run."""

import math
from dataclasses import dataclass

from tonnage.facts.bases import expert_parts, fields
from tonnage.facts.sizes import PROCESS_WITHOUT_CUDA_GIB, SAVE_FILE_BYTES
from tonnage.plan.job import Job, is_expert
from tonnage.plan.spread import MASTER, STATES, largest_trained

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
    whole, rest = divmod(size, block)
    return (whole * pinned_bytes(block) if whole else 0.0) + (2.0 ** math.ceil(math.log2(rest)) if rest > 0 else 0.0)


def _optimizer_bytes(job):
    """Of a rank's share of what is trained, under offload=optimizer and all.

    DeepSpeed 0.19.8 pins its flat buffers, one a group (what decays and what does not), and one for the largest tensor. At
    stages 1 and 2 they are fp32 weights, summed gradients and the weights to be sent back, in fp32 with several
    micro-batches also the sums in between (runtime/zero/stage_1_and_2.py); at stage 3 the gradients, once as summed and
    once for the step, by sub-groups (stage3.py), of which the last tensor may go beyond the limit. FSDP2 pins its fp32
    weights tensor by tensor.
    """
    n, numbers = job.shard_gpus, job.trained_parameters / job.shard_gpus
    states = STATES[job.optimizer] * numbers
    if not job.strategy.startswith("zero"):
        return states + MASTER * numbers + sum(pinned_bytes(MASTER * size / n) for size in _trained_tensors(job))
    embedding = job.architecture.embedding_parameters / n if job.trains_all else 0.0
    groups = (numbers - embedding, embedding)
    if job.strategy == "zero3":
        block = MASTER * job.zero.sub_group_size
        return states + MASTER * numbers + pinned_bytes(MASTER * numbers) + sum(
            pinned_bytes(MASTER * size, block) for size in groups)
    between = MASTER * numbers * (job.strategy == "zero2" and job.compute_bytes == MASTER and job.accumulation_steps > 1)
    return states + between + pinned_bytes(job.compute_bytes * largest_trained(job)) + sum(
        2 * pinned_bytes(MASTER * size) + pinned_bytes(job.compute_bytes * size) for size in groups)


def _weight_bytes(job):
    """Of a rank, besides, under offload=all: frozen weights, pinned tensor by tensor; under ZeRO-3 trained ones in the
    compute precision, pinned so and then in one buffer, while torch keeps the blocks of the former."""
    n = job.shard_gpus
    size = sum(pinned_bytes(one / n) for one in _frozen_tensors(job))
    if job.strategy == "zero3":
        copies = [job.compute_bytes * one / n for one in _trained_tensors(job)]
        size += sum(map(pinned_bytes, copies)) + pinned_bytes(sum(copies))
    return size


def _trained_tensors(job):
    """Numbers of each trained tensor, but for norms and biases; adapters of a layer are taken as one."""
    a = job.architecture
    layers = [inputs * outputs for _, inputs, outputs in _matrices(job)] if job.trains_all else list(job.adapter_parameters)
    return layers + [a.embedding_parameters, a.head_parameters] * job.trains_head


def _frozen_tensors(job):
    """Bytes of each frozen tensor as it is kept, but for norms and biases."""
    if job.trains_all:
        return []
    a, c, sizes = job.architecture, job.compute_bytes, []
    for name, inputs, outputs in _matrices(job):
        if job.quantise == "none" or name == "mlp.gate":
            sizes.append(c * inputs * outputs)
        else:
            sizes += [math.prod(shape) * each
                      for shape, each in fields(job.quantise, (outputs, inputs), expert_parts(name)).values()]
    return [*sizes, c * a.embedding_parameters, c * a.head_parameters]


def _matrices(job):
    """(name, inputs, outputs) of each matrix of the layers; the outputs of all experts lie one below the other."""
    a = job.architecture
    for i in range(a.num_layers):
        for name, (inputs, outputs) in a.linear_shapes(i).items():
            yield name, inputs, outputs * (a.num_experts if is_expert(name) else 1)
