"""What each strategy keeps on one GPU, what it gathers, and which buffers it needs: the numbers, per engine.

Sources: FSDP2, torch 2.13 torch/distributed/fsdp/_fully_shard; ZeRO, DeepSpeed 0.19.8 runtime/zero, and arXiv 1910.02054.
"""

from dataclasses import dataclass

from tonnage.facts.capabilities import CAPABILITIES
from tonnage.plan.job import Job

STATES = {"adamw": 8.0, "adamw8bit": 2.0 + 8 / 256, "sgd": 4.0}  # bytes a trained parameter; 8 bits: a scale per 256


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Bytes on one GPU.

    `weights`: kept at all times, by kind. `states`: of the optimizer. `gradients`: when a backward is through, of which
    `gradients_layers` come layer by layer and `gradients_outside` before them. `gathered_root`: whole from forward to the end of
    backward; `gathered_forward`, `gathered_backward`: most of the layers' whole weights at once. `gradient_buffers`:
    of a layer, before and while they are reduced; `gradient_root`: of embedding and head. `step`: temporaries of the
    optimizer step. `save`: of writing a checkpoint. `recompute_extra`: [tokens, hidden] tensors held by recomputation.
    """

    weights: dict[str, float]
    states: float
    gradients: float
    gradients_layers: float = 0.0
    gradients_outside: float = 0.0
    gathered_root: float = 0.0
    gathered_forward: float = 0.0
    gathered_backward: float = 0.0
    gradient_buffers: float = 0.0
    gradient_root: float = 0.0
    step: float = 0.0
    save: float = 0.0
    recompute_extra: float = 0.0


def spread_of(job: Job) -> Spread:
    """The spread of this project's engines."""
    return _fsdp(job) if CAPABILITIES[job.strategy].engine == "fsdp" else _zero(job)


def _fsdp(job):
    """FSDP2 over job.shard_gpus; trained weights fp32, frozen ones in the compute precision."""
    a, c, n = job.architecture, job.compute_bytes, job.shard_gpus
    layers = [a.layer_parameters(i).total for i in range(a.num_layers)]
    outside = a.num_parameters - sum(layers)
    trained = job.trained_parameters
    root = a.final_norm + (a.head_parameters or a.embedding_parameters)
    if job.trains_all:
        weights = {"weights": 4.0 * a.num_parameters / n}
        trained_layer, trained_root = max(layers), root
    else:
        weights = {"frozen weights": c * a.num_parameters / n, "adapters": 4.0 * trained / n}
        trained_layer, trained_root = max(job.adapter_parameters), 0
    ignored = n == 1 and not job.trains_all  # frozen weights are left alone, adapters are one group
    gathered = c * trained if ignored else c * (max(layers) + max(job.adapter_parameters))
    return Spread(
        weights=weights, states=STATES[job.optimizer] * trained / n, gradients=4.0 * trained / n,
        gradients_layers=4.0 * (sum(layers) if job.trains_all else trained) / n,
        gathered_root=gathered if ignored else c * root,
        gathered_forward=0 if ignored else 2 * gathered, gathered_backward=0 if ignored else 2 * gathered,
        gradient_buffers=c * trained if ignored else (c + 4) * trained_layer,
        gradient_root=c * trained_root,
        save=4.0 * max(layers + [outside]) if job.trains_all else 4.0 * trained_layer)


def _zero(job):
    raise NotImplementedError
