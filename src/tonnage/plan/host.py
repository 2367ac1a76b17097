"""Memory of the host and disk of a run."""

from dataclasses import dataclass

from tonnage.plan.job import Job
from tonnage.plan.spread import STATES

PROCESS_GIB = 3.0  # a Python process with torch and CUDA's libraries; 0.5 without CUDA (measured)
SAVE_FILE_GIB = 2.0  # train/checkpoint.py collects tensors up to this size before it writes a file
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
    """What a node and the disk must hold.

    Offloaded: fp32 weights, gradients and optimizer states of what is trained (16 bytes a parameter with AdamW) and,
    with `all`, the frozen weights; each in pinned memory. Source: DeepSpeed docs, memory.rst; arXiv 2101.06840.

    Args:
        num_checkpoints: kept at once, the one being written included.
    """
    a, trained = job.architecture, job.trained_parameters
    ranks = min(job.gpus, job.gpus_per_node)
    nodes_share = ranks / max(job.shard_gpus, ranks) if job.shard_gpus > 1 else ranks
    terms = {"processes": ranks * (PROCESS_GIB if cuda else 0.5)}
    if job.offload != "none":
        terms["offloaded optimizer, gradients, fp32 weights"] = (8 + STATES[job.optimizer]) * trained * nodes_share / GIB
    if job.offload in ("all", "nvme"):
        terms["offloaded weights"] = job.compute_bytes * a.num_parameters * nodes_share / GIB
    if job.offload == "nvme":  # on the disk instead; buffers of a few tensors stay
        largest = max(a.embedding_parameters, *(a.layer_parameters(i).total for i in range(a.num_layers)))
        terms = {"processes": terms["processes"], "swap buffers": ranks * 5 * 4 * largest / max(1, job.shard_gpus) / GIB}
    checkpoint = (4 + (4 if job.optimizer == "sgd" else 8)) * trained / GIB
    terms["checkpoint being written"] = min(ranks * SAVE_FILE_GIB, checkpoint)
    return Host(terms, checkpoint, checkpoint * num_checkpoints)
