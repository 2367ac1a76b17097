"""What each strategy keeps on one GPU, what it gathers, and which buffers it needs: the numbers, per engine.

Sources: FSDP2, torch 2.13 torch/distributed/fsdp/_fully_shard; ZeRO, DeepSpeed 0.19.8 runtime/zero, and arXiv 1910.02054.
"""

from dataclasses import dataclass

from tonnage.facts.capabilities import CAPABILITIES
from tonnage.plan.job import Job

STATES = {"adamw": 8.0, "adamw8bit": 2.0 + 8 / 256, "sgd": 4.0}  # bytes a trained parameter; 8 bits: a scale per 256
MASTER = 4.0  # trained weights, gradients' sums: fp32


@dataclass(frozen=True)
class Unit:
    """What is gathered and reduced at once: a layer, the embedding, the head. Bytes on one GPU.

    `whole`: its weights in the compute precision, where they are gathered. `gradient`: of its trained weights before
    they are reduced; `reduced`: the fp32 buffer in which they are.
    """

    whole: float = 0.0
    gradient: float = 0.0
    reduced: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Bytes on one GPU.

    `weights`: kept at all times, by kind. `states`: of the optimizer. `gradients`: when all are summed. `share`: of a
    unit's fp32 gradient that stays here. `root` is gathered from forward to the end of backward, the others when they
    are used. `step`: temporaries of the optimizer step. `save`: of writing a checkpoint.

    What follows is of other frameworks (plan.profiles). `flat`: FSDP1, which gathers in place, one layer at a time in
    forward, and has reduced a layer's gradients before the next layer's are made. `root_gradient`: of weights outside of
    layers, whole from the loss on. `keeps_input_gradients`: the inputs of checkpointed layers, and their gradients, are
    alive to the end of backward. `prefetches`: the next layer is gathered during the backward of one. `sums`: of
    gradients between micro-batches, where these are not `gradients`.
    """

    weights: dict[str, float]
    states: float
    gradients: float
    share: float
    layers: tuple[Unit, ...]
    embedding: Unit = Unit()
    head: Unit = Unit()
    root: Unit = Unit()
    step: float = 0.0
    save: float = 0.0
    flat: bool = False
    root_gradient: float = 0.0
    keeps_input_gradients: bool = False
    prefetches: bool = True
    sums: float | None = None


def spread_of(job: Job) -> Spread:
    """The spread of this project's engines."""
    return _fsdp(job) if CAPABILITIES[job.strategy].engine == "fsdp" else _zero(job)


def trained_sizes(job: Job) -> tuple[list[int], int, int, int]:
    """(parameters of each layer, of the embedding, of the head, of the final norm) that are trained."""
    a = job.architecture
    if not job.trains_all:
        return list(job.adapter_parameters), 0, 0, 0
    layers = [a.layer_parameters(i).total for i in range(a.num_layers)]
    return layers, a.embedding_parameters, a.head_parameters, a.final_norm


def _fsdp(job):
    """FSDP2 over job.shard_gpus; trained weights fp32, frozen ones in the compute precision."""
    a, c, n = job.architecture, job.compute_bytes, job.shard_gpus
    layers, embedding, head, norm = trained_sizes(job)
    trained = job.trained_parameters
    managed = job.trains_all or n > 1  # else frozen weights are left alone and adapters are one group
    frozen = 0 if job.trains_all else a.num_parameters
    all_layers = [a.layer_parameters(i).total + job.adapter_parameters[i] for i in range(a.num_layers)]

    def unit(parameters, trains):
        return Unit(c * parameters * managed, c * trains, MASTER * trains)

    if managed:
        units = tuple(unit(*sizes) for sizes in zip(all_layers, layers, strict=True))
        outside = (unit(a.embedding_parameters, embedding), unit(a.head_parameters, head), unit(a.final_norm, norm))
        together = (Unit(), Unit(), unit(a.embedding_parameters + a.final_norm, embedding + norm))
        embedding, head, root = together if a.tied_embeddings else outside
    else:
        units = (Unit(),) * a.num_layers
        embedding, head, root = Unit(), Unit(), Unit(c * trained, c * trained, MASTER * trained)
    return Spread(
        weights={"weights": MASTER * trained / n} if job.trains_all else
                {"frozen weights": c * frozen / n, "adapters": MASTER * trained / n},
        states=STATES[job.optimizer] * trained / n, gradients=MASTER * trained / n, share=1 / n,
        layers=units, embedding=embedding, head=head, root=root,
        save=MASTER * max(layers + [a.embedding_parameters if job.trains_all else 0]))


def _zero(job):
    raise NotImplementedError
