"""Memory of one GPU as a maximum over phases: forward, loss, backward, optimizer step, save.

A `Spread` says what a strategy keeps, gathers and buffers; `plan.activations` what a layer holds; here they meet.
All sizes are bytes of tensors; what lies outside of tensors (context, communicators, allocator) is in `plan.verdict`.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from tonnage.plan.activations import Played, Style, layer_tape, play
from tonnage.plan.job import Job, is_adapted
from tonnage.plan.spread import Spread, spread_of

PHASES = ("forward", "loss", "backward", "step", "save")


@dataclass(frozen=True)
class Memory:
    """Bytes per phase and term, on the GPU that holds most. `phases[phase][term]`."""

    phases: dict[str, dict[str, float]]

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak_bytes(self) -> float:
        return sum(self.phases[self.peak_phase].values())


def memory(job: Job) -> Memory:
    """What a step of `job` holds on one GPU."""
    return assemble(job, style_of(job), spread_of(job), loss_bytes(job))


def style_of(job: Job) -> Style:
    """How this project's engines compute a layer: adapters in the compute precision, transformers' own modules."""
    adapted = frozenset() if job.trains_all else frozenset(
        name for i in (0, job.architecture.num_layers - 1) for name in job.architecture.linear_shapes(i)
        if is_adapted(name, job.targets))
    return Style(compute_bytes=job.compute_bytes, trains_base=job.trains_all, weight_gradient_bytes=job.compute_bytes,
                 rank=job.rank, adapted=adapted, adapter_bytes=job.compute_bytes, flash=job.attention != "eager",
                 masked=job.packing and job.attention == "sdpa")


@dataclass(frozen=True)
class LossBytes:
    """Bytes of the head and loss: most alive in `forward` (the loss phase), `kept` from it to backward, most alive in
    `backward` of the head alone."""

    forward: float
    kept: float
    backward: float


def loss_bytes(job: Job) -> LossBytes:
    """Of this project's losses, with every position labelled.

    Chunked: train/loss.py holds logits of one chunk in the compute precision and in fp32, and logsumexp a copy more;
    the gradients of hidden states and of a trained head are formed at once. Plain: logits, their fp32 copy and their
    log-softmax; in backward the log-softmax and two gradients.
    """
    a, c, tokens = job.architecture, job.compute_bytes, job.micro_tokens
    hidden = tokens * a.hidden * c  # the positions with labels are copied
    weight = a.vocab * a.hidden
    if job.loss == "plain":
        logits = tokens * a.vocab
        cast = 0 if c == 4 else c
        return LossBytes(hidden + logits * (8 + cast), hidden + logits * 4,
                         hidden + logits * 12 + (weight * c if job.trains_all else 0))
    chunk = min(job.loss_chunk_tokens, tokens) * a.vocab
    gradients = hidden + (weight * 4 if job.trains_all else 0)
    product = weight * c if job.trains_all else 0
    cast = 0 if c == 4 else weight * c if job.trains_all else 0
    return LossBytes(hidden + gradients + max(chunk * 8, chunk * (4 + c) + product), gradients, gradients + cast)


@lru_cache(maxsize=4096)
def _played(architecture, i, rows, seq_tokens, style) -> Played:
    return play(layer_tape(architecture, i, rows, seq_tokens, style), "x")


def assemble(job: Job, style: Style, spread: Spread, loss: LossBytes) -> Memory:
    """Phases from their parts."""
    a = job.architecture
    kinds = [(a.layer_parameters(i).total, a.is_moe_layer(i)) for i in range(a.num_layers)]
    representative = {kind: i for i, kind in enumerate(kinds)}
    # gradients of weights are the spread's business
    style = replace(style, weight_gradient_bytes=0)
    layers = [_played(a, representative[kind], job.micro_rows, job.seq_tokens, style) for kind in kinds]
    boundary = job.micro_tokens * a.hidden * style.compute_bytes
    checkpointed = job.checkpointing == "full"
    saved = [boundary if checkpointed else layer.saved + boundary for layer in layers]
    held = spread.weights | {"optimizer states": spread.states}
    kept_gradients = spread.gradients if job.accumulation_steps > 1 else 0.0
    gathered_root = {"gathered embedding, head": spread.gathered_root}
    last_norm = boundary * (1 if style.fused_norm else 1 + 4 / style.compute_bytes * (style.compute_bytes != 4)
                            + (1 if style.trains_base else 0))

    forward = held | gathered_root | {
        "gradients": kept_gradients,
        "gathered layers": spread.gathered_forward,
        "layer inputs" if checkpointed else "saved activations": sum(saved),
        "one layer's forward": max((layer.inference if checkpointed else max(0, layer.forward - layer.saved))
                                   for layer in layers)}
    head = held | gathered_root | {
        "gradients": kept_gradients,
        "layer inputs" if checkpointed else "saved activations": sum(saved),
        "output and final norm": boundary + last_norm,
        "logits and loss": loss.forward}
    backward = None
    total_layers = sum(kind[0] for kind in kinds) or 1
    above = 0.0
    for i in reversed(range(a.num_layers)):
        layer = layers[i]
        terms = held | gathered_root | {
            "gradients": max(kept_gradients, spread.gradients_outside + spread.gradients_layers * above / total_layers),
            "gathered layers": spread.gathered_backward,
            "layer inputs" if checkpointed else "saved activations":
                sum(saved[:i + 1]) - (0 if checkpointed else layer.saved),
            "one layer's forward again and backward" if checkpointed else "one layer's backward":
                layer.backward + spread.recompute_extra * boundary,
            "gradients before they are reduced": spread.gradient_buffers + spread.gradient_root}
        above += kinds[i][0]
        if backward is None or sum(terms.values()) > sum(backward.values()):
            backward = terms
    at_head = held | gathered_root | {
        "gradients": kept_gradients,
        "layer inputs" if checkpointed else "saved activations": sum(saved),
        "output and final norm": boundary + last_norm,
        "logits and loss": loss.backward}
    if sum(at_head.values()) > sum(head.values()):
        head = at_head
    step = held | {"gradients": spread.gradients, "step": spread.step}
    save = held | {"whole tensors": spread.save}
    phases = {"forward": forward, "loss": head, "backward": backward, "step": step, "save": save}
    return Memory({phase: {term: size for term, size in terms.items() if size} for phase, terms in phases.items()})
