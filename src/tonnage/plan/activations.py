"""What a decoder layer holds while it is trained: its operations as a tape, played forward and backward.

The tape names every tensor that the layer's operations make, which of them autograd saves, and which gradients pass
through without a copy; playing it gives the bytes that are saved and the most that is alive at once. It follows the
modules of transformers 5.24 in eager mode operation by operation, so that no constant is fitted.

Sources: torch 2.13 derivatives.yaml for what an operation saves; arXiv 2205.05198, section 4, for the method.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import gcd, inf

from tonnage.facts.architectures import Architecture
from tonnage.facts.sizes import LEAST_KEPT_INPUTS


@dataclass(frozen=True)
class Op:
    """One operation. Sizes are looked up by name in `Tape.sizes`, all in bytes.

    `passes`: its gradient is handed on as it is (add, view). `temporary`: bytes alive only within it, forward and
    backward. `weight`: bytes of the gradient of its weight, made in backward and kept. `multiplies`: for a number of the
    result, of matrix products and attention kernels; selective checkpointing keeps what takes LEAST_KEPT_INPUTS of them,
    and what such an operation gives `beside` its output.
    """

    output: str
    inputs: tuple[str, ...]
    saves: tuple[str, ...] = ()
    passes: bool = False
    forward_temporary: float = 0
    backward_temporary: float = 0
    weight: float = 0
    multiplies: float = 0
    beside: tuple[str, ...] = ()


@dataclass
class Tape:
    """Operations in order; `source` is the layer's input, which its caller holds."""

    sizes: dict[str, float] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def add(self, output: str, size: float, *inputs: str, **facts) -> str:
        """Append an operation that makes `output` of `size` bytes; returns its name."""
        self.sizes[output] = size
        self.ops.append(Op(output, inputs, **facts))
        return output


@dataclass(frozen=True)
class Played:
    """Bytes of a played tape: `saved` for backward, the most alive in `forward`, in `backward`, and in a forward that
    saves nothing (`inference`); of selective checkpointing what it keeps (`products`), the most alive in a forward that
    keeps them (`selective`) and in the one that is computed again from them (`again`). The layer's input and the weights
    are not counted; the gradient of its output is."""

    saved: float
    forward: float
    backward: float
    inference: float
    products: float
    selective: float
    again: float


def play(tape: Tape, source: str) -> Played:
    """Run the tape forward, with and without saving, then backward."""
    saved = {name for op in tape.ops for name in op.saves if name != source}
    products = {name for op in tape.ops if op.multiplies >= LEAST_KEPT_INPUTS for name in (op.output, *op.beside)}
    return Played(saved=sum(tape.sizes[name] for name in saved), forward=_play_forward(tape, source, saved),
                  inference=_play_forward(tape, source, set()), backward=_play_backward(tape, source, saved),
                  products=sum(tape.sizes[name] for name in products),
                  selective=_play_forward(tape, source, products),
                  again=_play_forward(tape, source, saved, products) + tape.sizes[tape.ops[-1].output])


def _play_forward(tape, source, keep, given=frozenset()):
    """Most bytes alive where `keep` stays to the end and `given` is there from the beginning."""
    uses = Counter(name for op in tape.ops for name in op.inputs)
    alive = {source: 0.0} | {name: tape.sizes[name] for name in given}
    total = most = sum(alive.values())
    for op in tape.ops:
        if op.output not in given:
            alive[op.output] = tape.sizes[op.output]
            total += alive[op.output]
        most = max(most, total + op.forward_temporary)
        for name in op.inputs:
            uses[name] -= 1
            if uses[name] == 0 and name not in keep and name != source:
                total -= alive.pop(name)
    return most


def _play_backward(tape, source, saved):
    """Most bytes alive, from all saved tensors and the gradient of the output on."""
    last_save = {}
    for i, op in enumerate(tape.ops):
        for name in op.saves:
            last_save.setdefault(name, i)  # the first operation that saves it is the last to let go
    output = tape.ops[-1].output
    gradients = {output: [tape.sizes[output], 1]}  # [bytes, names that share it]
    holder = {output: gradients[output]}
    total = sum(tape.sizes[name] for name in saved) + tape.sizes[output]
    most = total
    for i in reversed(range(len(tape.ops))):
        op = tape.ops[i]
        incoming = holder.pop(op.output)
        made = 0.0
        for name in op.inputs:
            if op.passes:
                gradient = incoming
                gradient[1] += 1
            else:
                gradient = [tape.sizes[name], 1]
                made += gradient[0]
            if name not in holder:
                holder[name] = gradient
            elif not op.passes:  # summed into the one that is there, then let go
                most = max(most, total + made + op.backward_temporary)
                made -= gradient[0]
            elif holder[name] is not gradient:  # a shared one cannot be written to: the sum is a new tensor
                most = max(most, total + made + tape.sizes[name])
                gradient[1] -= 1
        total += made + op.weight
        most = max(most, total + op.backward_temporary)
        incoming[1] -= 1
        if incoming[1] == 0:
            total -= incoming[0]
        for name in op.saves:
            if name != source and last_save[name] == i:
                total -= tape.sizes[name]
    return most


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a framework computes a layer, as far as it shows in what is held.

    Args:
        compute_bytes: of one number.
        trains_base: weights of the base are trained; then their linears save their inputs and make gradients.
        weight_gradient_bytes: of one number of such a gradient.
        rank: of the adapter. `adapted`: whether a matrix has one.
        adapter_bytes: of one number in the adapter's computation; where it is not compute_bytes, inputs are copied.
        fused_norm, fused_rope: one kernel, no fp32 copies.
        flash: the attention kernel never holds [tokens, tokens]. `masked`: it is given a mask, so keys and values
            are repeated for all heads. `holds_mask`: the mask is [tokens, tokens] of a row.
        dequantised_weight: a linear unpacks its weight, in forward and again in backward.
        float8: matrices whose products are computed in FP8; what is saved is in compute_bytes all the same.
        gathered_in_float8: those of them that arrive in FP8.
        dropout: the adapter's input goes through dropout: a copy for each adapted matrix, and a mask.
        fused_adapter: adapter and base are one function, which saves its input besides and no mask.
        fused_qkv: queries, keys and values are views of one product, which the values keep alive; its adapter is one, and
            put in its place by index_copy, which saves it.
        saves_inputs: the product with a quantised matrix saves its input, trained or not.
        fused_mlp: activation and product of a gated MLP are one kernel, which saves its two inputs.
        looped_experts: routed experts one after another, as transformers below 5 has them.
        checkpoints_parts: norms, attention and MLP are checkpointed one by one, so that a layer keeps four inputs, and one
            part at a time is computed again.
        reentrant: checkpointing holds the recomputed output while it goes backward.
        stream_bytes: of one number between layers; 0 is compute_bytes.
        expert_gpus: GPUs that routed experts are spread over, to which tokens travel.
        sequence_gpus: GPUs that share the tokens of each row, between which heads travel.
        inputs_on_host: checkpointed inputs are moved to the host, all but so many on their way; 0: they are not.
    """

    compute_bytes: int = 2
    trains_base: bool = True
    weight_gradient_bytes: int = 2
    rank: int = 0
    adapted: frozenset[str] = frozenset()
    adapter_bytes: int = 2
    fused_norm: bool = False
    fused_rope: bool = False
    flash: bool = True
    masked: bool = False
    dequantised_weight: bool = False
    float8: frozenset[str] = frozenset()
    gathered_in_float8: frozenset[str] = frozenset()
    dropout: bool = False
    dora: bool = False
    holds_mask: bool = False
    fused_adapter: bool = False
    fused_qkv: bool = False
    saves_inputs: bool = False
    fused_mlp: bool = False
    looped_experts: bool = False
    checkpoints_parts: bool = False
    reentrant: bool = False
    stream_bytes: int = 0
    inputs_on_host: int = 0
    expert_gpus: int = 1
    sequence_gpus: int = 1


def layer_tape(architecture: Architecture, i: int, rows: int, seq_tokens: int, style: Style) -> Tape:
    """The tape of layer i for `rows` rows of `seq_tokens` tokens, those of this GPU; its input is `x`."""
    writer = _Writer(architecture, i, rows, seq_tokens, style)
    if style.checkpoints_parts:  # the MLP is the fullest part
        writer.mlp("x", "mlp")
        return writer.tape
    normed = writer.norm("x", "input_norm", architecture.hidden)
    attended = writer.attention(normed)
    if architecture.norms_per_layer == 4:
        attended = writer.norm(attended, "post_attention_norm", architecture.hidden)
    hidden = writer.residual("x", attended, "x2")
    return writer.side_by_side(normed, hidden) if architecture.is_gpt else writer.finish(hidden)


class _Writer:
    """Writes the operations of a layer onto a tape; sizes in bytes for all tokens."""

    def __init__(self, architecture, i, rows, seq_tokens, style):
        self.a, self.i, self.style = architecture, i, style
        self.rows, self.seq, self.tokens = rows, seq_tokens, rows * seq_tokens
        self.shapes = architecture.linear_shapes(i)
        self.c = style.compute_bytes
        self.tape = Tape({"x": self.of(architecture.hidden)})

    def of(self, width):
        """Bytes of a [tokens, width] tensor in the compute precision."""
        return self.tokens * width * self.c

    def norm(self, x, name, width):
        """RMSNorm as transformers writes it: in fp32, cast back, times the weight."""
        tape, saves_input = self.tape, self.style.trains_base
        if self.style.fused_norm or self.a.is_gpt:
            return tape.add(name, self.of(width), x, saves=(x,))
        wide = self.tokens * width * 4
        if self.c != 4:
            x = tape.add(f"{name}.fp32", wide, x)
        tape.add(f"{name}.square", wide, x, saves=(x,), backward_temporary=wide)
        tape.add(f"{name}.rsqrt", self.tokens * 4, f"{name}.square", saves=(f"{name}.rsqrt",))
        y = tape.add(f"{name}.scaled", wide, x, f"{name}.rsqrt", saves=(x, f"{name}.rsqrt"), backward_temporary=wide)
        if self.c != 4:
            y = tape.add(f"{name}.cast", self.of(width), y)
        return tape.add(name, self.of(width), y, saves=(y,) if saves_input else (),
                        backward_temporary=self.of(width) if saves_input else 0)

    def linear(self, x, name, output=None):
        """A matrix of the layer with its adapter; returns its output's name."""
        inputs, outputs = self.shapes[name]
        output, style, tape = output or name, self.style, self.tape
        adapted = name in style.adapted
        base = f"{output}.base" if adapted else output
        unpacked = inputs * outputs * self.c if style.dequantised_weight else 0
        saves_input = style.trains_base or style.saves_inputs or (adapted and style.fused_adapter)
        forward, backward = self.float8_temporaries(name) if name in style.float8 else (unpacked, unpacked)
        tape.add(base, self.of(outputs), x, multiplies=inputs,
                 saves=(x,) if saves_input else (), forward_temporary=forward,
                 backward_temporary=backward,
                 weight=inputs * outputs * style.weight_gradient_bytes if style.trains_base else 0)
        if not adapted:
            return output
        narrow = self.tokens * style.adapter_bytes
        if style.adapter_bytes != self.c:
            x = tape.add(f"{output}.input", narrow * inputs, x)
        if style.dropout:
            tape.sizes[f"{output}.mask"] = 0 if style.fused_adapter else self.tokens * inputs
            x = tape.add(f"{output}.dropped", narrow * inputs, x, saves=(f"{output}.mask",))
        # DoRA takes the norm of the changed weight: the product of its matrices (of the identity), and two sums
        weights = style.adapter_bytes * inputs * (inputs + 3 * outputs) if style.dora else 0
        tape.add(f"{output}.A", narrow * style.rank, x, multiplies=inputs, saves=(x,),
                 forward_temporary=weights)
        lora = tape.add(f"{output}.B", narrow * outputs, f"{output}.A", multiplies=style.rank,
                        saves=(f"{output}.A",))
        if style.dora:
            lora = tape.add(f"{output}.magnified", narrow * outputs, lora, saves=(lora,))
        tape.add(f"{output}.scaled", narrow * outputs, lora)
        if style.dora:
            tape.add(f"{output}.base_magnified", narrow * outputs, base, saves=(base,))
            tape.add(f"{output}.dora", narrow * outputs, f"{output}.base_magnified", f"{output}.scaled", passes=True)
            return tape.add(output, self.of(outputs), base, f"{output}.dora", passes=True)
        size = max(narrow, self.tokens * self.c) * outputs
        if style.adapter_bytes == self.c:
            return tape.add(output, size, base, f"{output}.scaled", passes=True)
        # bf16 + fp32 is fp32, cast back
        tape.add(f"{output}.sum", size, base, f"{output}.scaled")
        return tape.add(output, self.of(outputs), f"{output}.sum")

    def float8_temporaries(self, name):
        """Bytes beside its results that a product in FP8 holds most of (forward, backward).

        The input, the gradient and the weight are cast in turn, each through two fp32 copies (models/float8.py); their FP8
        copies, a byte a number, stay to the product. For the input's gradient the weight's is transposed by another; for
        the weight's the gradient's is, and the input's is padded and transposed.
        """
        inputs, outputs = self.shapes[name]
        x, grad, weight = self.tokens * inputs, self.tokens * outputs, inputs * outputs
        cast, here = 4 + 4 + 1, name not in self.style.gathered_in_float8  # else it is in FP8 as it comes
        out, grad_x = grad * self.c, x * self.c
        grad_weight = weight * self.style.weight_gradient_bytes * self.style.trains_base
        # results are counted as made by then, and are not yet where the fullest moment is that of a cast
        forward = max(cast * x - out, x + cast * weight * here - out, x + weight * here)
        backward = max(cast * grad - grad_x, grad + cast * weight * here - grad_x, grad + (1 + here) * weight) - grad_weight
        if grad_weight:
            backward = max(backward, grad + cast * x - grad_weight, 2 * grad + 3 * x - grad_weight, 2 * grad + 2 * x)
        return forward, backward

    def fused(self, x):
        """Queries and keys after rotary embeddings, and the product of which the values are a view, with litgpt's adapter.

        Source: Lightning-AI/litgpt at 8641822, lit_gpt/lora.py LoRAQKVLinear, lit_gpt/model.py CausalSelfAttention.
        """
        tape, style, (inputs, _) = self.tape, self.style, self.shapes["self_attn.q_proj"]
        widths = {name: self.shapes[f"self_attn.{name}_proj"][1] for name in "qkv"}
        adapted = [name for name in "qkv" if f"self_attn.{name}_proj" in style.adapted]
        total = self.of(sum(widths.values()))
        tape.add("qkv.base", total, x, saves=(x,) if style.trains_base or style.saves_inputs else ())
        tape.sizes["qkv.mask"] = self.tokens * inputs
        tape.add("qkv.dropped", self.of(inputs), x, saves=("qkv.mask",))
        tape.add("qkv.A", self.of(style.rank * len(adapted)), "qkv.dropped", saves=("qkv.dropped",))
        tape.add("qkv.B", self.of(sum(widths[name] for name in adapted)), "qkv.A", saves=("qkv.A",))
        tape.add("qkv.placed", total, "qkv.B", saves=("qkv.B",), forward_temporary=total)
        tape.add("qkv.scaled", total, "qkv.placed")
        qkv = tape.add("qkv", total, "qkv.base", "qkv.scaled", passes=True)
        return tape.add("q", self.of(widths["q"]), qkv), tape.add("k", self.of(widths["k"]), qkv), qkv

    def rope(self, x, width):
        """x * cos + rotate_half(x) * sin."""
        size, tape, name = self.of(width), self.tape, f"{x}.rope"
        if self.style.fused_rope:
            return tape.add(name, size, x)
        tape.add(f"{name}.cos", size, x)
        tape.add(f"{name}.half", size, x, forward_temporary=size / 2, backward_temporary=size)
        tape.add(f"{name}.sin", size, f"{name}.half")
        return tape.add(name, size, f"{name}.cos", f"{name}.sin", passes=True)

    def attention(self, x):
        """From the normed input to the output projection."""
        a = self.a
        if self.style.fused_qkv:
            query_width = value_width = a.num_heads * a.head_dim
            q, k, v = self.fused(x)
        elif a.is_mla:
            q, k, v = self.latent(x)
            query_width, value_width = a.num_heads * (a.qk_nope_head_dim + a.qk_rope_head_dim), a.num_heads * a.v_head_dim
        else:
            query_width = value_width = a.num_heads * a.head_dim
            q, k, v = (self.linear(x, f"self_attn.{name}_proj") for name in "qkv")
            if a.qk_norm:
                q, k = self.norm(q, "q_norm", query_width), self.norm(k, "k_norm", a.num_kv_heads * a.head_dim)
            q, k = self.rope(q, query_width), self.rope(k, a.num_kv_heads * a.head_dim)
        if self.style.sequence_gpus > 1:
            return self.linear(self.travelled(q, k, v, query_width, value_width), "self_attn.o_proj")
        return self.linear(self.kernel(q, k, v, value_width), "self_attn.o_proj")

    def latent(self, x):
        """Multi-head latent attention: queries, keys and values from compressed ones; values stay a view of kv_b's output.

        Source: arXiv 2405.04434, section 2.1; transformers, DeepseekV3Attention.
        """
        a, tape = self.a, self.tape
        rope, heads = a.qk_rope_head_dim, a.num_heads
        if a.q_lora_rank is None:
            q = self.linear(x, "self_attn.q_proj")
        else:
            narrow = self.linear(x, "self_attn.q_a_proj")
            q = self.linear(self.norm(narrow, "q_a_norm", a.q_lora_rank), "self_attn.q_b_proj")
        compressed = self.linear(x, "self_attn.kv_a_proj_with_mqa")
        kv = self.linear(self.norm(compressed, "kv_a_norm", a.kv_lora_rank), "self_attn.kv_b_proj")
        rotated = self.rope(q, heads * rope)
        k_rotated = self.rope(compressed, rope)
        query = tape.add("query", self.of(heads * (a.qk_nope_head_dim + rope)), q, rotated)
        key = tape.add("key", self.of(heads * (a.qk_nope_head_dim + rope)), kv, k_rotated)
        return query, key, kv

    def travelled(self, q, k, v, query_width, value_width):
        """Attention where GPUs share rows: heads travel to all tokens of a row, and back (models/slices.py)."""
        a, tape, count = self.a, self.tape, self.style.sequence_gpus
        heads = a.num_heads if a.is_mla else a.num_kv_heads
        repeats, whole = count // gcd(count, heads), []
        widths = query_width, query_width * heads // a.num_heads, value_width * heads // a.num_heads
        for x, width in zip((q, k, v), widths, strict=True):
            size = self.of(width)
            if repeats > 1 and x != q:
                size *= repeats
                x = tape.add(f"{x}.repeated", size, x)
            sent = tape.add(f"{x}.sent", size, x, passes=True)
            whole.append(tape.add(f"{x}.travelled", size, sent))
        attended, size = self.kernel(*whole, value_width), self.of(value_width)
        if self.rows > 1:  # tokens come first on the way
            attended = tape.add("attended.sent", size, attended, passes=True)
        back = tape.add("attended.back", size, attended, backward_temporary=size)
        return tape.add("attended.whole", size, back, passes=True)

    def kernel(self, q, k, v, width):
        """softmax(q k^T) v; `width` is that of the output."""
        tape, saves, heads = self.tape, (q, k, v), self.a.num_heads
        if self.style.masked:
            # an explicit mask keeps keys and values from being shared by a group of heads: they are repeated
            k, v = (tape.add(f"{x}.repeated", self.of(width), x) for x in (k, v))
            saves = (q, k, v)
        if self.style.holds_mask:  # the kernel takes it in the type of the queries, a copy for each layer
            tape.sizes["mask"] = self.rows * self.seq**2 * self.c
            saves = (*saves, "mask")
        if not self.style.flash:
            scores = self.rows * heads * self.seq * self.seq
            tape.add("scores", scores * self.c, q, k, saves=(q, k))
            tape.add("softmax", scores * 4, "scores", saves=("softmax",))
            tape.add("weights", scores * self.c, "softmax")
            return tape.add("attended", self.of(width), "weights", v, saves=("weights", v))
        tape.add("attended", self.of(width), q, k, v, multiplies=inf, beside=("log_sum_exp",),
                 saves=(*saves, "attended", "log_sum_exp"))
        tape.sizes["log_sum_exp"] = self.tokens * heads * 4
        return "attended"

    def residual(self, x, y, name):
        return self.tape.add(name, self.of(self.a.hidden), x, y, passes=True)

    def mlp(self, x, module):
        """SwiGLU: down(silu(gate(x)) * up(x))."""
        width, tape = self.of(self.shapes[f"{module}.gate_proj"][1]), self.tape
        gate, up = self.linear(x, f"{module}.gate_proj"), self.linear(x, f"{module}.up_proj")
        if self.style.fused_mlp:
            tape.add(f"{module}.product", width, gate, up, saves=(gate, up))
            return self.linear(f"{module}.product", f"{module}.down_proj")
        tape.add(f"{module}.act", width, gate, saves=(gate,))
        tape.add(f"{module}.product", width, f"{module}.act", up, saves=(f"{module}.act", up))
        return self.linear(f"{module}.product", f"{module}.down_proj")

    def experts(self, x):
        """Routed experts by grouped matrix products over tokens sorted by expert, each token experts_per_token times.

        Source: transformers 5.24, integrations/moe.py, grouped_mm_experts_forward.
        """
        a, tape, style = self.a, self.tape, self.style
        pairs = self.c * self.tokens * a.experts_per_token
        probabilities = tape.add("router", self.tokens * a.num_experts * 4, x, multiplies=a.hidden,
                                 saves=(x, "router") if style.trains_base else ("router",))
        scores = tape.add("scores_of_experts", pairs, probabilities, saves=("scores_of_experts",))
        if style.looped_experts:
            return self.experts_in_turn(x, scores, pairs / a.num_experts)
        if style.expert_gpus > 1:
            return self.experts_elsewhere(x, scores, pairs)
        chosen = tape.add("chosen", pairs * a.hidden, x)
        down = self.gated(chosen, pairs)
        weighted = tape.add("weighted", pairs * a.hidden, down, scores, saves=(down, scores))
        ordered = tape.add("ordered", pairs * a.hidden, weighted)
        return tape.add("routed", self.of(a.hidden), ordered)

    def gated(self, chosen, pairs):
        """SwiGLU of all experts on sorted tokens."""
        tape, width = self.tape, self.a.expert_intermediate
        both = self.stacked(chosen, "gate_up_proj", "gate_up", pairs)
        tape.add("expert_act", pairs * width, both, saves=(both,))
        product = tape.add("expert_product", pairs * width, "expert_act", both, saves=("expert_act", both))
        return self.stacked(product, "down_proj", "expert_down", pairs)

    def experts_elsewhere(self, x, scores, pairs):
        """Routed experts to which tokens are sent, each rank receiving as many as it sends.

        Source: transformers 5.24, distributed/expert_parallel.py, AllToAllEP.
        """
        tape, size = self.tape, pairs * self.a.hidden
        sent = tape.add("sent", size, x)
        received = tape.add("received", size, sent)
        down = self.gated(tape.add("chosen", size, received), pairs)
        last = down
        for name in ("weighted", "ordered", "summed", "returned", "placed"):
            last = tape.add(name, size, last)
        weighed = tape.add("weighed", size, last, scores, saves=(last, scores))
        return tape.add("routed", self.of(self.a.hidden), weighed)

    def stacked(self, x, name, output, pairs):
        """One matrix of all experts with its adapters, on sorted tokens: `pairs` bytes a unit of width."""
        a, tape, style = self.a, self.tape, self.style
        inputs, outputs = self.shapes[f"mlp.experts.{name}"]
        weights = a.num_experts // style.expert_gpus * inputs * outputs
        adapted = f"mlp.experts.{name}" in style.adapted
        unpacked = weights * self.c * style.dequantised_weight
        base = tape.add(f"{output}.base" if adapted else output, pairs * outputs, x, multiplies=inputs,
                        saves=(x,) if style.trains_base else (), forward_temporary=unpacked, backward_temporary=unpacked,
                        weight=weights * style.weight_gradient_bytes if style.trains_base else 0)
        if not adapted:
            return base
        if style.dropout:
            tape.sizes[f"{output}.mask"] = pairs / self.c * inputs
            x = tape.add(f"{output}.dropped", pairs * inputs, x, saves=(f"{output}.mask",))
        low = tape.add(f"{output}.A", pairs * style.rank, x, multiplies=inputs, saves=(x,))
        lora = tape.add(f"{output}.B", pairs * outputs, low, multiplies=style.rank, saves=(low,))
        scaled = tape.add(f"{output}.scaled", pairs * outputs, lora)
        return tape.add(output, pairs * outputs, base, scaled, passes=True)

    def experts_in_turn(self, x, scores, pairs):
        """Routed experts one by one, each on as many tokens: `pairs` bytes a unit of width; added up in place.

        Source: transformers 4.48 models/mixtral/modeling_mixtral.py, MixtralSparseMoeBlock.forward.
        """
        a, tape, style = self.a, self.tape, self.style
        (_, both), (width, _) = self.shapes["mlp.experts.gate_up_proj"], self.shapes["mlp.experts.down_proj"]
        weight = a.hidden * width * style.weight_gradient_bytes * style.trains_base
        unpacked = a.hidden * width * self.c * style.dequantised_weight
        product = {"weight": weight, "forward_temporary": unpacked, "backward_temporary": unpacked}
        total = tape.add("routed", self.of(a.hidden), x)
        for e in range(a.num_experts):
            chosen = tape.add(f"{e}.chosen", pairs * a.hidden, x)
            kept = (chosen,) if style.trains_base else ()
            gate = tape.add(f"{e}.gate", pairs * both / 2, chosen, saves=kept, **product)
            act = tape.add(f"{e}.act", pairs * width, gate, saves=(gate,))
            up = tape.add(f"{e}.up", pairs * both / 2, chosen, saves=kept, **product)
            made = tape.add(f"{e}.product", pairs * width, act, up, saves=(act, up))
            down = tape.add(f"{e}.down", pairs * a.hidden, made, saves=(made,) if style.trains_base else (), **product)
            weighted = tape.add(f"{e}.weighted", pairs * a.hidden, down, scores, saves=(down, scores))
            total = tape.add(f"{e}.routed", self.of(a.hidden), total, weighted)
        return total

    def side_by_side(self, normed, hidden):
        """The MLP of a layer whose attention and MLP both work on its input."""
        tape = self.tape
        if self.a.norms_per_layer > 1:
            normed = self.norm("x", "post_norm", self.a.hidden)
        wide = self.linear(normed, "mlp.fc1")
        out = self.linear(tape.add("mlp.act", tape.sizes[wide], wide, saves=(wide,)), "mlp.fc2")
        self.residual(hidden, out, "y")
        return tape

    def finish(self, hidden):
        """The second half of the layer."""
        normed = self.norm(hidden, "post_norm", self.a.hidden)
        if not self.a.is_moe_layer(self.i):
            out = self.mlp(normed, "mlp")
        else:
            out = self.experts(normed)
            if self.a.num_shared_experts:
                out = self.residual(out, self.mlp(normed, "mlp.shared_experts"), "experts_and_shared")
        if self.a.norms_per_layer == 4:
            out = self.norm(out, "post_feedforward_norm", self.a.hidden)
        self.residual(hidden, out, "y")
        return self.tape
