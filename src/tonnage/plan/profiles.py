"""What other frameworks keep in which precision, so that what was measured with them can be predicted.

A `Profile` is filled in from a framework's source; `predict` turns it and a published row into the style, spread and loss
of `plan.memory`. Nothing here is fitted.

Sources, by what they show:
- foundation-model-stack/fms-acceleration, scripts/benchmarks: scenarios*.yaml (which rows run under autocast, LoRA's
  dropout 0.1), refs/requirements*.txt (transformers 4.48.1, and 4.45.2 for the Liger benchmark), and
  plugins/fused-ops-and-kernels (one kernel for a norm and for rotary embeddings, LoRA and base as one function).
- transformers 4.45.2 models/mistral: flash attention is given keys and values repeated for all heads.
  4.45.2: `logits = logits.float()`, which lets go of the bf16 ones; from 4.46 loss/loss_utils.py: its caller holds them.
- torch 2.4 distributed/fsdp: _flat_param.py (a layer's weights are views of one tensor, so that their gradients are
  concatenated), _runtime_utils.py `_register_post_backward_reshard_only_hook` (a layer without trained weights hooks on
  its inputs and so keeps them and their gradients alive until backward ends), the root's unit is never let go. peft's
  utils/other.py fsdp_auto_wrap_policy makes a unit of every adapter: what is gathered ahead is an adapter, not a layer.
- torch 2.4 utils/checkpoint.py, CheckpointFunction.backward: the recomputed output is alive while it goes backward.
"""

from dataclasses import dataclass, replace

from tonnage.plan.activations import Style
from tonnage.plan.job import is_adapted
from tonnage.plan.memory import LossBytes, Memory, assemble
from tonnage.plan.published import Published
from tonnage.plan.spread import Spread, Unit, trained_sizes

# Bytes per parameter of a quantised matrix, and of that what is no parameter and so is not sharded: the scales.
# Source: arXiv 2305.14314, section 3 (4 bits; fp32 per 64, or a byte per 64 and fp32 per 256 of these); AutoGPTQ, groups
# of 128 with a 2-byte scale and 4 bits of zero point.
STORED = {"bf16": 2.0, "nf4": 0.5 + 4 / 64, "nf4_dq": 0.5 + 1 / 64 + 4 / (64 * 256), "gptq4": 0.5 + 2.5 / 128}
SCALES = {"bf16": 0.0, "nf4": 4 / 64, "nf4_dq": 1 / 64 + 4 / (64 * 256), "gptq4": 2.5 / 128}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a framework keeps. Bytes are per parameter, or per logit.

    Args:
        weight, gradient, state: of a trained parameter; states are moments and master copies. `gathered`: of any
            parameter while it is computed with.
        step: temporaries of the optimizer step, of a trained parameter; foreach AdamW holds one more of them all.
        flat: FSDP1. `engine`: "fsdp", or "zero" for the stages of ZeRO.
        drops_root_gradients: FSDP2 reduces the head's gradient when it is made.
        adapter: of one number in an adapter's computation.
        logits: by kind of loss, most alive in forward, most alive in backward.
        Others as in `plan.activations.Style`.
    """

    weight: float = 2
    gradient: float = 2
    state: float = 4
    gathered: float = 2
    step: float = 0
    engine: str = "fsdp"
    flat: bool = False
    adapter: int = 2
    dropout: bool = False
    fused_adapter: bool = False
    fused_norm: bool = False
    fused_rope: bool = False
    repeats_kv: bool = False
    reentrant: bool = False
    stream: int = 2
    inputs_on_host: int = 0
    steps_in_backward: bool = False
    compiled: bool = False
    plain: tuple[float, float] = (14, 12)
    fused_ce: tuple[float, float] = (10, 8)


HF = Profile(step=2, flat=True, reentrant=True)
HF_ADAPTER = replace(HF, weight=4, gradient=4, state=8, step=4, dropout=True, adapter=4)
PROFILES = {
    # transformers' Trainer with everything bf16: 2 weights + 2 gradients + 4 moments
    "hf_pure_bf16": HF,
    # accelerate >= 0.30 with bf16 mixed precision: fp32 flat weights, gradients, moments; bf16 is gathered
    "hf_fsdp_mixed": replace(HF, weight=4, gradient=4, state=8, step=4),
    # peft: adapters fp32 beside a frozen bf16 base
    "hf_lora": HF_ADAPTER,
    # the same over a 4-bit base (bitsandbytes NF4 or GPTQ): matrices of layers quantised, embedding and head bf16
    "hf_qlora": HF_ADAPTER,
    # Answer.AI fsdp_qlora: NF4 (or bf16) base stored and gathered as bf16, adapters bf16
    "fsdp_qlora": replace(HF, dropout=True),
    # all bf16; adapters with dropout 0.05; head and loss in chunks of 128 tokens
    "litgpt_bf16_true": Profile(flat=True, step=2, dropout=True),
    # all bf16, adapters too; loss in 8 chunks
    "torchtune_bf16": Profile(step=2),
    # NeMo AutoModel: the model is loaded in bf16 and stays so
    "automodel_bf16": Profile(step=2),
    # torchtitan: fp32 shards; bf16 gathered and computed; gradients reduced in fp32
    "fsdp2_fp32_master": Profile(weight=4, gradient=4, state=8, step=4),
    # llm-foundry, fms-fsdp: the same on FSDP1
    "fsdp1_fp32_master": Profile(weight=4, gradient=4, state=8, step=4, flat=True),
    # DeepSpeed bf16: 2 weights + 4 sums of gradients + fp32 master and moments; frozen weights sharded at stage 3 only
    "deepspeed_zero": Profile(gradient=4, state=12, engine="zero", reentrant=True),
    # ColossalAI low-level ZeRO: 2 + 2 + 12
    "colossal_zero": Profile(state=12, engine="zero"),
}
# What a row's version or options change, by the name that `Published.traits` gives it.
TRAITS = {
    # Unsloth's kernels for norms and rotary embeddings, in fms-acceleration's "foak" and in Liger's own examples
    "fused kernels": {"fused_norm": True, "fused_rope": True},
    # one autograd function for a quantised matrix and its adapter
    "fused adapter": {"fused_adapter": True},
    # bf16 autocast casts an adapter's input after dropout
    "autocast": {"adapter": 2},
    # flash attention is given repeated keys and values
    "repeated keys": {"repeats_kv": True},
    # transformers < 4.46: the bf16 logits are let go of before the loss
    "logits let go": {"plain": (12, 12), "fused_ce": (8, 8)},
    # trl's preparation of a quantised base on one GPU leaves the stream between layers in fp32
    "fp32 stream": {"stream": 4},
    "inputs on host": {"inputs_on_host": 5},  # torchtune OffloadActivations(max_fwd_stash_size=5)
    "step in backward": {"steps_in_backward": True},
}


def profile_of(found: Published) -> Profile:
    """The framework's profile with the row's traits."""
    profile = PROFILES[found.profile]
    for trait in found.traits:
        profile = replace(profile, **TRAITS[trait])
    return profile


def predict(found: Published) -> Memory:
    """What a step of the row's job held on one GPU, phase by phase."""
    profile = profile_of(found)
    return assemble(found.job, _style(found, profile), _spread(found, profile), _loss(found, profile))


def _style(found, profile):
    job = found.job
    adapted = frozenset() if job.trains_all else frozenset(
        name for i in (0, job.architecture.num_layers - 1) for name in job.architecture.linear_shapes(i)
        if is_adapted(name, job.targets))
    return Style(
        compute_bytes=job.compute_bytes, trains_base=job.trains_all, weight_gradient_bytes=2, rank=job.rank,
        adapted=adapted, adapter_bytes=profile.adapter, fused_norm=profile.fused_norm, fused_rope=profile.fused_rope,
        flash=job.attention != "eager", masked=profile.repeats_kv, dequantised_weight=found.base != "bf16",
        dropout=profile.dropout, fused_adapter=profile.fused_adapter, reentrant=profile.reentrant,
        stream_bytes=profile.stream, inputs_on_host=profile.inputs_on_host)


def _loss(found, profile):
    """Logits and what the loss makes of them, for all tokens or a chunk of them; with the head's gradient if trained."""
    job, a = found.job, found.job.architecture
    hidden = job.micro_tokens * a.hidden * job.compute_bytes
    head = 2 * a.vocab * a.hidden if job.trains_all else 0
    if found.logits in ("plain", "fused_ce"):
        forward, backward = getattr(profile, found.logits)
        logits = job.micro_tokens * a.vocab
        return LossBytes(logits * forward, max(logits * backward, logits * 2 + head), hidden)
    chunk = min(job.loss_chunk_tokens, job.micro_tokens) * a.vocab
    if found.logits == "none":  # Liger: gradients of hidden states and head are made at once; a chunk in bf16 and fp32
        return LossBytes(hidden + head + chunk * 6, hidden + head, hidden)
    logits = job.micro_tokens * a.vocab  # bf16 logits of all chunks, and the log-softmax that each saves
    return LossBytes(logits * 4 + chunk * 4, logits * 4 + chunk * 4 + head, hidden)


def _spread(found: Published, profile: Profile) -> Spread:
    job, a = found.job, found.job.architecture
    return _zero(found, profile) if profile.engine == "zero" else _fsdp(found, profile, job, a)


def _base(found):
    """(bytes of the frozen weights that shard, bytes that do not): all layers' matrices quantised, the rest bf16."""
    a = found.job.architecture
    matrices = sum(sum(_matrix_sizes(a, i)) for i in range(a.num_layers))
    scales = SCALES[found.base] * matrices
    return STORED[found.base] * matrices + 2 * (a.num_parameters - matrices) - scales, scales


def _matrix_sizes(a, i):
    """Parameters of each matrix of layer i that a quantised base quantises: all but the router."""
    return [inputs * outputs * (a.num_experts if name.startswith("mlp.experts.") else 1)
            for name, (inputs, outputs) in a.linear_shapes(i).items() if name != "mlp.gate"]


def _fsdp(found, profile, job, a):
    n = job.shard_gpus
    layers, embedding, head, norm = trained_sizes(job)
    trained = job.trained_parameters
    sharded = n > 1
    if job.trains_all:
        weights = {"weights": profile.weight * trained / n}
        wholes = [profile.gathered * size for size in layers]
    else:
        shards, whole = _base(found)
        weights = {"frozen weights": shards / n + whole, "adapters": profile.weight * trained / n}
        width = STORED[found.base] - SCALES[found.base]
        wholes = [width * sum(_matrix_sizes(a, i)) + profile.gathered * job.adapter_parameters[i]
                  for i in range(a.num_layers)]
    outside = a.embedding_parameters + a.head_parameters + a.final_norm
    kept = 0.0 if profile.steps_in_backward else profile.gradient

    def unit(whole, trains):
        """Gradients as they are made, again as one flat tensor under FSDP1, and then reduced into what is kept."""
        made = profile.gathered * trains * (2 if sharded and profile.flat else 1)
        reduced = profile.gradient * trains
        return Unit(whole * sharded, made if sharded and not profile.flat else max(0.0, made - reduced), reduced)

    hooked = profile.flat and sharded and not job.trains_all
    return Spread(
        weights=weights, states=profile.state * trained / n, gradients=kept * trained / n,
        share=0.0 if profile.steps_in_backward else 1 / n,
        layers=tuple(unit(whole, size) for whole, size in zip(wholes, layers, strict=True)),
        root=unit(profile.gathered * outside, embedding + head + norm),
        root_gradient=2 * head * job.trains_all, step=0 if profile.steps_in_backward else profile.step * trained / n,
        flat=profile.flat or not sharded,
        keeps_input_gradients=hooked and job.checkpointing == "full", prefetches=not hooked)


def _zero(found, profile):
    raise NotImplementedError
