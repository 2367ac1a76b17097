"""Memory of one GPU as a maximum over phases: forward, loss, backward, optimizer step, save.

A `Spread` says what a strategy keeps, gathers and buffers; `plan.activations` what a layer holds; here they meet.
All sizes are bytes of tensors; what lies outside of tensors (context, communicators, allocator) is in `plan.verdict`.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from tonnage.facts.sizes import READ_AT_ONCE_BYTES, VOCAB_BLOCK
from tonnage.plan.activations import Played, Style, layer_tape, play
from tonnage.plan.job import Job, adapted_names, is_float8
from tonnage.plan.spread import Spread, spread_of

PHASES = ("load", "forward", "loss", "backward", "step", "save")


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


@lru_cache(maxsize=4096)
def memory(job: Job) -> Memory:
    """What a step of `job` holds on one GPU. What settles `auto` asks first, and a plan the same again."""
    return assemble(job, style_of(job), spread_of(job), loss_bytes(job))


def style_of(job: Job) -> Style:
    """How this project's engines compute a layer: adapters in the compute precision, transformers' own modules."""
    # samples of a row that are kept apart, or a window, take a mask; without one attention is causal
    windowed = job.architecture.attention_window_tokens is not None
    masked = (job.packing or windowed) and job.attention == "sdpa"
    return Style(compute_bytes=job.compute_bytes, trains_base=job.trains_all, weight_gradient_bytes=job.compute_bytes,
                 rank=job.rank, adapted=adapted_names(job), adapter_bytes=job.compute_bytes, flash=job.attention != "eager",
                 masked=masked, holds_mask=masked, dropout=job.dropout > 0, dora=job.adapter == "dora",
                 dequantised_weight=job.quantise != "none", expert_gpus=job.expert_gpus,
                 inputs_on_host=int(job.checkpoints_on_host), sequence_gpus=job.sequence_gpus,
                 float8=_names(job, lambda *matrix: job.precision == "fp8" and is_float8(*matrix)),
                 gathered_in_float8=_names(job, job.gathers_in_float8))


def _names(job, chosen):
    """Names of the matrices, dense layers and mixtures of experts together, for which chosen(name, inputs, outputs)."""
    a = job.architecture
    shapes = {name: shape for i in (0, a.num_layers - 1) for name, shape in a.linear_shapes(i).items()}
    return frozenset(name for name, shape in shapes.items() if chosen(name, *shape))


@dataclass(frozen=True)
class LossBytes:
    """Bytes of head and loss: most alive in `forward`, most alive in `backward` of both, what remains `after` it, and what
    is `kept` until the backward of layers ends."""

    forward: float
    backward: float
    after: float
    kept: float = 0.0


def loss_bytes(job: Job) -> LossBytes:
    """Of this project's losses, with every position labelled.

    Chunked: train/loss.py holds logits of one chunk in fp32 and, going in and coming out, in the compute precision; the
    gradients of hidden states and of a trained head are formed at once, the head's in fp32. Plain: logits, their fp32
    copy and their log-softmax; in backward the log-softmax and two gradients.
    """
    a, c, tokens = job.architecture, job.compute_bytes, job.micro_tokens
    hidden = tokens * a.hidden * c  # the positions with labels are copied
    head = a.vocab * a.hidden if job.trains_head else 0
    cast = 0 if c == 4 else c
    if job.loss == "plain":
        logits = tokens * a.vocab
        return LossBytes(hidden + logits * (8 + cast), hidden + max(logits * 12, logits * c + head * c), hidden)
    chunk, block = min(job.loss_chunk_tokens, tokens), min(VOCAB_BLOCK, a.vocab)
    product = block * a.hidden * c if job.trains_head else 0
    # in fp32 beside what the product gave, or beside the exponentials of a block of words
    logits = chunk * (4 * a.vocab + max(cast * a.vocab, 4 * block))
    return LossBytes(2 * hidden + 4 * head + logits + product, hidden + head * (4 + cast), hidden)


@lru_cache(maxsize=4096)
def _played(architecture, i, rows, seq_tokens, style) -> Played:
    return play(layer_tape(architecture, i, rows, seq_tokens, style), "x")


def assemble(job: Job, style: Style, spread: Spread, loss: LossBytes) -> Memory:
    """Phases from their parts; each is the fullest of its moments."""
    a = job.architecture
    layers = _layers(job, style)
    boundary = job.micro_tokens * a.hidden * style.compute_bytes
    between = job.micro_tokens * a.hidden * (style.stream_bytes or style.compute_bytes)
    how = [job.checkpointing_of(i) for i in range(a.num_layers)]
    kept = "layer inputs" if set(how) == {"full"} else "saved activations"
    # a norm that casts its input saves the cast instead
    saves_input = style.fused_norm or style.compute_bytes == 4
    between *= 4 if style.checkpoints_parts else 1
    own = [{"none": layer.saved, "selective": layer.products, "full": 0.0}[way]
           for way, layer in zip(how, layers, strict=True)]
    on_gpu = [i for i, way in enumerate(how) if way != "none"][:style.inputs_on_host or None]  # of checkpointed layers
    inputs = [saves_input * boundary if way == "none" else between * (i in on_gpu) for i, way in enumerate(how)]
    below = [0, *accumulate(map(sum, zip(own, inputs, strict=True)))]  # of the layers before each
    held = spread.weights | {"optimizer states": spread.states}
    mask = job.micro_rows * job.seq_tokens**2 if style.holds_mask else 0  # one for all layers, a byte each
    held_root = held | {"gathered for the whole step": spread.root.whole, "attention mask": mask}
    sums = spread.gradients if spread.sums is None else spread.sums
    summed = sums if job.accumulation_steps > 1 else 0.0
    copies = 1 if spread.flat else 2  # FSDP2 gathers into a buffer and copies out of it

    forward = [held_root | {"gradients": summed, "gathered": copies * spread.embedding.whole, kept: boundary}]
    before = spread.embedding.whole
    for i, layer in enumerate(layers):
        so_far = held_root | {"gradients": summed, kept: below[i] + boundary}
        whole, experts = spread.layers[i].whole, spread.layers[i].experts
        forward.append(so_far | {"gathered": before + copies * whole})
        gathered = max(copies * whole, whole + copies * experts)
        forward.append(so_far | {"gathered": gathered, "one layer's forward": {
            "none": layer.forward, "selective": layer.selective, "full": layer.inference}[how[i]]})
        before = 0.0 if spread.flat else whole

    # the last norm holds its input (a cast of it unless fused), its output, and the cast before a trained weight
    wide = boundary * 4 / style.compute_bytes
    norm = boundary + (boundary if style.fused_norm else wide + (style.trains_base and style.compute_bytes < 4) * boundary)
    end = held_root | {"gradients": summed, kept: below[-1], "final norm": norm}
    head = spread.head
    losses = [end | {"gathered": before + copies * head.whole},
              end | {"gathered": copies * head.whole, "logits and loss": loss.forward},
              end | {"gathered": head.whole, "logits and loss": loss.backward},
              end | {"gradients before they are reduced": head.gradient + head.reduced, "logits and loss": loss.after}]

    backward, above, reducing = [], spread.head.reduced, spread.head.reduced
    held_root = held_root | {"gradients outside of layers": spread.root_gradient, "logits and loss": loss.kept}
    for i in reversed(range(a.num_layers)):
        layer, unit = layers[i], spread.layers[i]
        ahead = spread.prefetches * (spread.layers[i - 1].whole if i else spread.embedding.whole)
        here = held_root | {
            "gradients": max(summed, spread.share * above) + (spread.second_sum if summed else 0.0),
            "gathered": unit.whole + unit.experts + ahead,
            kept: below[i + 1] - own[i]}
        if spread.keeps_input_gradients:  # a layer's own output gradient is counted in its backward
            here |= {kept: below[-1], "gradients of layer inputs": max(0, a.num_layers - 2 - i) * between}
        # a layer's forward is the fuller half where its products need more than their results: casts, norms of weights
        whole_again = max(style.dora * layer.forward, bool(style.float8) * (layer.forward + boundary))
        again = {"none": 0.0, "selective": layer.again, "full": whole_again}[how[i]]
        backward.append(here | {
            "one layer's backward" if how[i] == "none" else "one layer again, backward":
                max(layer.backward, again) + (how[i] != "none" and style.reentrant) * between,
            "gradients before they are reduced": reducing})
        still = unit.whole if spread.flat else 0.0  # weights are views of what the gradients are concatenated for
        backward.append(here | {"gathered": still + ahead, "one layer again, backward": 2 * boundary,
                                "gradients before they are reduced": unit.gradient + unit.reduced})
        above, reducing = above + unit.reduced, 0.0 if spread.flat else unit.reduced
    outside = spread.embedding if spread.embedding.whole else spread.root
    backward.append(held_root | {
        "gradients": max(summed, spread.share * above), kept: boundary,
        "gradients before they are reduced": outside.gradient + outside.reduced})

    backward.append(held_root | {"gradients": spread.gradients, "buffers of reduction": spread.reduce})

    largest = max(a.embedding_parameters, *(a.largest_matrix(i) for i in range(a.num_layers)))
    phases = {"load": [spread.weights | {"rows on their way": 2 * min(READ_AT_ONCE_BYTES, 2 * largest)}],
              "forward": forward, "loss": losses, "backward": backward,
              "step": [held | {"gradients": spread.gradients, "step": spread.step}],
              "save": [held | {"whole tensors": spread.save}]}
    fullest = {phase: max(moments, key=lambda terms: sum(terms.values())) for phase, moments in phases.items()}
    return Memory({phase: {term: size for term, size in terms.items() if size} for phase, terms in fullest.items()})


def _layers(job, style):
    """What each layer holds; layers of one shape are worked out once."""
    a = job.architecture
    shapes = list(zip(a.layers, job.adapter_parameters, strict=True))
    first = {shape: i for i, shape in reversed(list(enumerate(shapes)))}
    return [_played(a, first[shape], job.micro_rows, job.slice_tokens, style) for shape in shapes]
