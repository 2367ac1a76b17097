"""Memory of the host and disk of a run."""

from dataclasses import dataclass

from tonnage.facts.sizes import PROCESS_WITHOUT_CUDA_GIB, SAVE_FILE_BYTES
from tonnage.plan.job import Job
from tonnage.plan.spread import STATES

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
    """What a node and the disk must hold.

    Offloaded: fp32 weights, gradients and optimizer states of what is trained (16 bytes a parameter with AdamW); with
    `all`, the frozen weights too, and under ZeRO-3 the compute copy of the trained ones. Each replica of hsdp has its own.
    Source: DeepSpeed docs, memory.rst; arXiv 2101.06840.

    Args:
        num_checkpoints: kept at once, the one being written included.
    """
    trained = job.trained_parameters
    ranks = min(job.gpus, job.gpus_per_node)
    replicas = ranks / job.shard_gpus  # of what is sharded, on this node
    terms = {"processes": ranks * (PROCESS_GIB if cuda else PROCESS_WITHOUT_CUDA_GIB)}
    if job.offload != "none":
        terms["offloaded optimizer, gradients, fp32 weights"] = (8 + STATES[job.optimizer]) * trained * replicas / GIB
    if job.offload == "all":
        copied = trained if job.strategy == "zero3" else 0
        terms["offloaded weights"] = (job.kept_bytes + job.compute_bytes * copied) * replicas / GIB
    if job.checkpoints_on_host:
        terms["inputs of layers"] = ranks * job.host_boundary_bytes / GIB
    checkpoint = (4 + (4 if job.optimizer == "sgd" else 8)) * trained / GIB
    # each rank collects a file; one at a time has the largest tensor with its states besides
    largest = max(job.architecture.largest_matrix(i) for i in range(job.architecture.num_layers)) if job.trains_all else 0
    written = ranks * SAVE_FILE_BYTES + checkpoint * GIB / max(1, trained) * largest
    terms["checkpoint being written"] = min(written / GIB, checkpoint)
    return Host(terms, checkpoint, checkpoint * num_checkpoints)
