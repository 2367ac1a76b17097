"""What each strategy keeps on one GPU, what it gathers, and which buffers it needs: the numbers, per engine.

Sources: FSDP2, torch 2.13 torch/distributed/fsdp/_fully_shard; ZeRO, DeepSpeed 0.19.8 runtime/zero, and arXiv 1910.02054.
"""

from dataclasses import dataclass, replace

from tonnage.facts.capabilities import CAPABILITIES
from tonnage.plan.job import Job

STATES = {"adamw": 8.0, "adamw8bit": 2.0 + 8 / 256, "sgd": 4.0}  # bytes a trained parameter; 8 bits: a scale per 256
MASTER = 4.0  # trained weights, gradients' sums: fp32
ALL_REDUCE_SIZE = 500_000_000  # DeepSpeed 0.19.8, runtime/engine.py: numbers that are reduced at once at stages 0 and 1


@dataclass(frozen=True)
class Unit:
    """What is gathered and reduced at once: a layer, the embedding, the head. Bytes on one GPU.

    `whole`: its weights in the compute precision, where they are gathered. `gradient`: of its trained weights before
    they are reduced; `reduced`: the fp32 buffer in which they are. `experts`: gathered besides while a layer's run.
    """

    whole: float = 0.0
    gradient: float = 0.0
    reduced: float = 0.0
    experts: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Bytes on one GPU.

    `weights`: kept at all times, by kind. `states`: of the optimizer. `gradients`: when all are summed. `share`: of a
    unit's fp32 gradient that stays here. `root` is gathered from forward to the end of backward, the others when they
    are used. `reduce`: buffers at the end of backward. `second_sum`: of gradients, held in backward while
    accumulating. `step`: temporaries of the optimizer step. `save`: of writing a checkpoint.

    `root_gradient`: of weights outside of layers, whole from the loss on; here that of a head tied to the embedding.

    What follows is of other frameworks (plan.profiles). `flat`: FSDP1, which gathers in place, one layer at a time in
    forward, and has reduced a layer's gradients before the next layer's are made. `keeps_input_gradients`: the inputs
    of checkpointed layers, and their gradients, are alive to the end of backward. `prefetches`: the next layer is
    gathered during the backward of one. `sums`: of gradients between micro-batches, where these are not `gradients`.
    """

    weights: dict[str, float]
    states: float
    gradients: float
    share: float
    layers: tuple[Unit, ...]
    embedding: Unit = Unit()
    head: Unit = Unit()
    root: Unit = Unit()
    reduce: float = 0.0
    second_sum: float = 0.0
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
        beside = (a.embedding_parameters, a.head_parameters) if job.trains_embeddings else (0, 0)
        return list(job.adapter_parameters), *beside, 0
    layers = [layer.total for layer in a.layers]
    return layers, a.embedding_parameters, a.head_parameters, a.final_norm


def _fsdp(job):
    """FSDP2 over job.shard_gpus; trained weights fp32, frozen ones in the compute precision."""
    a, c, n = job.architecture, job.compute_bytes, job.shard_gpus
    layers, embedding, head, norm = trained_sizes(job)
    trained = job.trained_parameters
    # where nothing is gathered or moved, frozen weights are left alone and adapters are one group
    managed = job.trains_all or n > 1 or job.offload != "none"
    frozen = job.kept_bytes

    def unit(parameters, trains):
        return Unit(c * parameters * managed, c * trains, MASTER * trains)

    if managed:
        units = tuple(_layer_unit(job, i, trains) for i, trains in enumerate(layers))
        copies = 2 if job.trains_embeddings else 1  # peft trains a copy beside the frozen one
        if a.tied_embeddings:  # used first and last, so it stays with the root
            root = unit(copies * a.embedding_parameters + a.final_norm, embedding + norm)
            embedding, head = Unit(), Unit()
        else:
            embedding, head, root = (unit(copies * a.embedding_parameters, embedding),
                                     unit(copies * a.head_parameters, head), unit(a.final_norm, norm))
        if not job.reshard_after_forward and n > 1:
            wholes = [one.whole for one in (*units, embedding)]  # kept from forward to backward, beside the last buffer
            root = replace(root, whole=root.whole + sum(wholes) + max(wholes))
            units = tuple(replace(one, whole=0.0) for one in units)
            embedding = replace(embedding, whole=0.0)
    else:
        units = (Unit(),) * a.num_layers
        embedding, head, root = Unit(), Unit(), Unit(c * trained, c * trained, MASTER * trained)
    here = job.offload == "none"  # else weights, gradients and states are the host's, and the step too
    weights = {"frozen weights": frozen / n, "adapters" if frozen else "weights": MASTER * trained / n}
    return Spread(
        weights={name: size for name, size in weights.items() if size and here},
        states=here * STATES[job.optimizer] * trained / n, gradients=here * MASTER * trained / n, share=here / n,
        layers=units, embedding=embedding, head=head, root=root,
        root_gradient=c * a.embedding_parameters * (job.trains_head and a.tied_embeddings),
        save=MASTER * largest_trained(job))


def largest_trained(job: Job) -> int:
    """Numbers of the largest trained tensor, adapters of a layer taken as one. A checkpoint gathers them one by one."""
    a = job.architecture
    largest = [a.largest_matrix(i) for i in range(a.num_layers)] if job.trains_all else job.adapter_parameters
    return max(*largest, a.embedding_parameters if job.trains_head else 0)


def _layer_unit(job, i, trains):
    """What is gathered and reduced of layer i, `trains` of whose parameters are trained.

    Of experts that are spread over `expert_gpus`, the part of one GPU; frozen ones only where there are several copies.
    """
    e, c = job.expert_gpus, job.compute_bytes
    less = (c - 1) * job.float8_gathered[i]
    if e == 1:
        return Unit(job.kept_layers[i] + c * trains - less, c * trains, MASTER * trains)
    spread = job.architecture.layers[i].routed_experts if job.trains_all else job.expert_adapters[i]
    experts = c * spread / e + job.kept_experts[i] / e * (job.shard_gpus > e)
    here = trains - spread + spread / e
    return Unit(job.kept_layers[i] - job.kept_experts[i] + c * (trains - spread) - less, c * here, MASTER * here, experts)


def _zero(job):
    """DeepSpeed: whole weights in the compute precision (sharded at stage 3), fp32 ones and states sharded.

    Measured allocation by allocation (tests/dist/memory.py): stage 1 in bf16 holds the whole fp32 sums of gradients and
    the bf16 gradients besides, and reduces all of them at once; stage 2 in bf16 sums gradients in fp32 on the GPU, also
    where the optimizer is offloaded; stage 3 holds its bucket for good, gathers up to a limit, and casts the gradients of a
    sub-group in the step.
    """
    a, c, n, limits = job.architecture, job.compute_bytes, job.shard_gpus, job.zero
    stage, trained = int(job.strategy.removeprefix("zero")), job.trained_parameters
    layers, embedding, head, _ = trained_sizes(job)
    frozen = job.kept_bytes
    parts = n if stage == 3 else 1
    in_fp32 = c == 4
    offload, all_offloaded = job.offload != "none", job.offload == "all"
    weights = {"frozen weights": frozen / parts, "weights": c * trained / parts,
               "fp32 weights": MASTER * trained / n * (stage > 0) * (not offload)}
    if all_offloaded:
        weights = {}
    sums = MASTER * trained / (1 if stage < 2 else n)
    if stage == 1 and not in_fp32 and not offload:
        sums += c * trained
    if offload and stage < 3:
        weights["a gradient on its way"] = c * largest_trained(job)
    summed_here = not offload or stage < 2 or stage == 2 and not in_fp32
    # stage 3 casts and averages a gradient that no bucket holds as a whole (measured: 8 bytes a number)
    whole_casts = [8.0 * size if stage == 3 and job.trains_all and size > limits.reduce_bucket_size else 0.0
                   for size in map(a.largest_matrix, range(a.num_layers))]
    units = tuple(Unit(0.0, c * size + cast, 0.0) for size, cast in zip(layers, whole_casts, strict=True))
    bucket = min(limits.reduce_bucket_size, trained)
    gathered = 0.0
    if stage == 3:
        weights["reduce bucket"] = MASTER * limits.reduce_bucket_size
        if n > 1 or all_offloaded:
            everything = c * trained + frozen
            if job.hpz_gpus > 1:
                weights["second copy of weights"] = everything / job.hpz_gpus
            largest = max([c * layer.total for layer in a.layers] if job.trains_all else job.kept_layers)
            largest = max(largest, c * a.embedding_parameters)
            number = 1 if job.quantise != "none" else c  # DeepSpeed counts numbers, and codes are bytes
            gathered = min(everything, max(number * limits.stage3_max_live_parameters, largest))
    whole = stage == 0 or (stage == 1 and not in_fp32)
    reduce = MASTER * min(trained, ALL_REDUCE_SIZE) if whole else (c + MASTER) * bucket
    if stage == 3:
        step = MASTER * min(limits.sub_group_size, trained / n)
    else:  # in fp32 the gradients of a group are made one tensor
        step = MASTER * trained / n if stage and in_fp32 else 0.0
    return Spread(
        weights={name: size for name, size in weights.items() if size}, states=0.0 if offload else
        STATES[job.optimizer] * trained / n if stage else STATES[job.optimizer] * trained,
        gradients=sums * summed_here, share=1 / (1 if stage < 2 else n), layers=units,
        embedding=Unit(0.0, c * embedding, 0.0), head=Unit(0.0, c * head, 0.0),
        root=Unit(gathered), reduce=reduce, second_sum=MASTER * trained / n if stage == 2 and in_fp32 else 0.0, step=step,
        save=MASTER * largest_trained(job))
