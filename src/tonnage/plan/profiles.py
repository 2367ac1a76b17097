"""What other frameworks keep in which precision, so that what was measured with them can be predicted.

A `Profile` is read off a framework's source; `predict` turns it and a published row into the style, spread and loss of
`plan.memory`. No number here was fitted to a measurement. What of the untouched half of plan.validate missed at first was
looked up and found in the sources: experts in turn, scales sharded, parts checkpointed one by one with Liger's kernels,
embedding and head apart.

Sources, by what they show:
- foundation-model-stack/fms-acceleration: scripts/benchmarks/scenarios*.yaml (which rows run under autocast, LoRA's
  dropout of 0.1), refs/requirements*.txt (transformers 4.48.1; 4.45.2 for the Liger benchmark), and
  plugins/fused-ops-and-kernels (one kernel for a norm and for rotary embeddings; LoRA and its base as one function).
- transformers 4.45.2 models/mistral, mixtral, qwen2: flash attention is given keys and values repeated for all heads.
  Its models say `logits = logits.float()` and so let go of the bf16 ones; from 4.46, loss/loss_utils.py, the caller
  holds them.
- torch 2.4 distributed/fsdp: _flat_param.py (a layer's weights are views of one tensor, so their gradients are made and
  then concatenated), _runtime_utils.py `_register_post_backward_reshard_only_hook` (a unit without trained weights hooks
  on its inputs and so keeps them, and where checkpointing reenters their gradients, alive until backward ends); the
  root's unit is never let go. Under no_sync, which accelerate takes for all but the last micro-batch, gradients are
  summed whole. peft's utils/other.py fsdp_auto_wrap_policy makes a unit of every adapter: what is gathered ahead is an
  adapter, not a layer.
- torch 2.4 utils/checkpoint.py, CheckpointFunction.backward: the recomputed output is alive while it goes backward.
- Lightning-AI/litgpt at 8641822, finetune/lora.py and lit_gpt: chunks of 128 tokens for head and loss, dropout 0.05, the
  longest sample in the first micro-batch, so that no sums of gradients are there yet; lightning 2.1
  fabric/plugins/precision/half.py convert_output makes fp32 of logits; bitsandbytes 0.41.1 autograd/_functions.py
  MatMul4Bit saves its input.
- pytorch/torchtune recipes and modules/loss: logits of 8 chunks in bf16, let go of before backward; training/
  _activation_offloading.py: five tensors on their way to the host; at 30b8519, when its table was measured,
  recipes/configs/llama3_1. torchao dtypes/nf4tensor.py: scales are sharded and gathered with the weights.
- NVIDIA-NeMo/Automodel at b4733bd: components/_transformers/auto_model.py (Liger's kernels by default),
  components/distributed/parallelizer.py (parts of a layer are checkpointed one by one), components/loss/masked_ce.py.
"""

from dataclasses import dataclass, fields, replace

from tonnage.plan.activations import Style
from tonnage.plan.job import adapted_names
from tonnage.plan.memory import LossBytes, Memory, assemble
from tonnage.plan.published import Published
from tonnage.plan.spread import Spread, Unit, trained_sizes

# Bytes per parameter of a quantised matrix, and of that the scales, which are no parameter and so are not sharded.
# Source: arXiv 2305.14314, section 3 (4 bits; fp32 per 64, or a byte per 64 and fp32 per 256 of these); AutoGPTQ, groups
# of 128 with a 2-byte scale and 4 bits of zero point.
SCALES = {"bf16": 0.0, "nf4": 4 / 64, "nf4_dq": 1 / 64 + 4 / (64 * 256), "gptq4": 2.5 / 128}
STORED = {base: scales + (2.0 if base == "bf16" else 0.5) for base, scales in SCALES.items()}


@dataclass(frozen=True, kw_only=True)
class Profile(Style):
    """How a framework computes a layer, and what it keeps. Bytes are per parameter, or per logit.

    Args:
        weight, gradient, moment, master: of a trained parameter; Adam keeps two moments. `temporary`: of the optimizer
            step; foreach AdamW holds one more gradient.
        engine: "fsdp" or "zero". `flat`: FSDP1. `mixed_units`: adapters are in one unit with what is frozen, which then
            has gradients throughout. `no_sync`: gradients are summed whole until the last micro-batch.
        plain, fused_ce: most alive in the loss's forward and in its backward. `chunked`: the same for the logits of
            all chunks, what of these is alive until backward ends, and more for the chunk that is worked on.
        quantised_head: the head is quantised like the layers. `longest_first`: the longest sample is in the first
            micro-batch. `shards_scales`: those of a quantised matrix, with it. `outside_apart`: embedding and head are
            units of their own.
        moments_on_host, steps_in_backward: as they say.
        Others as in `plan.activations.Style`; of these a row's job sets precision, adapter and attention.
    """

    weight: float = 2
    gradient: float = 2
    moment: float = 2
    master: float = 0
    temporary: float = 0
    engine: str = "fsdp"
    flat: bool = False
    mixed_units: bool = False
    no_sync: bool = False
    longest_first: bool = False
    moments_on_host: bool = False
    steps_in_backward: bool = False
    quantised_head: bool = False
    shards_scales: bool = False
    outside_apart: bool = False
    plain: tuple[float, float] = (14, 12)
    fused_ce: tuple[float, float] = (10, 8)
    chunked: tuple[float, float, float, float] = (6, 4, 0, 8)


HF = Profile(temporary=2, flat=True, no_sync=True, reentrant=True, looped_experts=True)
HF_ADAPTER = replace(HF, weight=4, gradient=4, moment=4, temporary=4, dropout=True, adapter_bytes=4)
FP32_MASTER = Profile(weight=4, gradient=4, moment=4, temporary=4)
PROFILES = {
    # transformers' Trainer with everything in bf16: 2 weights + 2 gradients + 4 moments
    "hf_pure_bf16": HF,
    # accelerate >= 0.30 with bf16 mixed precision: fp32 flat weights, gradients, moments; bf16 is gathered
    "hf_fsdp_mixed": replace(HF, weight=4, gradient=4, moment=4, temporary=4),
    # peft: adapters in fp32 beside a frozen bf16 base
    "hf_lora": HF_ADAPTER,
    # the same over a 4-bit base (bitsandbytes NF4 or GPTQ): matrices of layers quantised, embedding and head bf16
    "hf_qlora": HF_ADAPTER,
    # Answer.AI fsdp_qlora: NF4 (or bf16) base, stored and gathered as bf16; adapters bf16; train.py checkpoints without
    # reentering
    "fsdp_qlora": replace(HF, dropout=True, reentrant=False),
    # all bf16; fp32 logits and their log-softmax, of which the logits are held to the end of backward
    "litgpt_bf16_true": Profile(temporary=2, flat=True, mixed_units=True, no_sync=True, longest_first=True, fused_norm=True,
                                fused_rope=True, fused_qkv=True, dropout=True, saves_inputs=True, quantised_head=True,
                                chunked=(8, 8, 4, 8)),
    # all bf16, adapters too; logits fp32, and their log-softmax and two gradients
    "torchtune_bf16": Profile(temporary=2, shards_scales=True, plain=(8, 12)),
    # NeMo AutoModel: the model is loaded in bf16 and stays so, with Liger's kernels; bf16 logits are held, labels are
    # shifted instead of them
    "automodel_bf16": Profile(temporary=2, fused_norm=True, fused_rope=True, fused_mlp=True, checkpoints_parts=True,
                              plain=(10, 14)),
    # torchtitan: fp32 shards; bf16 gathered and computed; gradients reduced in fp32
    "fsdp2_fp32_master": FP32_MASTER,
    # llm-foundry, fms-fsdp: the same on FSDP1
    "fsdp1_fp32_master": replace(FP32_MASTER, flat=True),
    # DeepSpeed in bf16: 2 weights + 4 sums of gradients + fp32 master and moments; frozen weights sharded at stage 3 only
    "deepspeed_zero": Profile(gradient=4, moment=4, master=4, engine="zero", reentrant=True),
    # ColossalAI low-level ZeRO: 2 + 2 + 12, and gradients in fp32 for the step
    "colossal_zero": Profile(moment=4, master=4, temporary=4, engine="zero", reentrant=True),
}
# What a row's versions and options change, by the name that `Published.traits` gives it.
TRAITS = {
    # Unsloth's kernels for norms and rotary embeddings, in fms-acceleration's "foak"
    "fused kernels": {"fused_norm": True, "fused_rope": True},
    # Liger's own, which fuse the activation of the MLP too
    "Liger's kernels": {"fused_norm": True, "fused_rope": True, "fused_mlp": True},
    # one autograd function for a quantised matrix and its adapter
    "fused adapter": {"fused_adapter": True},
    # bf16 autocast casts an adapter's input after dropout
    "autocast": {"adapter_bytes": 2},
    # flash attention is given repeated keys and values
    "repeated keys": {"masked": True},
    # transformers < 4.46: the bf16 logits are let go of before the loss
    "logits let go": {"plain": (12, 12), "fused_ce": (8, 8)},
    # trl's preparation of a quantised base on one GPU leaves the stream between layers in fp32
    "fp32 stream": {"stream_bytes": 4},
    # a compiled norm or loss reads its input once and keeps no fp32 copy
    "compiled": {"fused_norm": True, "fused_rope": True, "plain": (4, 8), "chunked": (2, 2, 0, 2)},
    # the shipped config has custom_sharded_layers: ['tok_embeddings', 'output']
    "outside apart": {"outside_apart": True},
    "inputs on host": {"inputs_on_host": 5},
    "step in backward": {"steps_in_backward": True},
    "states on host": {"moments_on_host": True},
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
    spread = _zero if profile.engine == "zero" else _fsdp
    job = replace(found.job, accumulation_steps=1) if profile.longest_first else found.job
    return assemble(job, _style(found, profile), spread(found, profile), _loss(found, profile))


def _style(found, profile):
    job, quantised = found.job, found.base != "bf16"
    computed = {field.name: getattr(profile, field.name) for field in fields(Style)}
    return Style(**computed | {
        "compute_bytes": job.compute_bytes, "trains_base": job.trains_all, "rank": job.rank,
        "adapted": adapted_names(job), "flash": job.attention != "eager", "dequantised_weight": quantised,
        "checkpoints_parts": profile.checkpoints_parts and job.checkpointing == "full",
        "saves_inputs": profile.saves_inputs and quantised})


def _loss(found, profile):
    """Logits and what the loss makes of them, for all tokens or a chunk of them; with the head's gradient if trained."""
    job, a = found.job, found.job.architecture
    hidden = job.micro_tokens * a.hidden * job.compute_bytes
    head = 2 * a.vocab * a.hidden if job.trains_all else 0
    logits, chunk = job.micro_tokens * a.vocab, min(job.loss_chunk_tokens, job.micro_tokens) * a.vocab
    if found.logits == "none":  # Liger: gradients of hidden states and head are made at once; a chunk in bf16 and fp32
        return LossBytes(hidden + head + chunk * 6, hidden + head, hidden)
    if found.logits == "chunked":
        forward, backward, kept, more = profile.chunked
        unpacked = 2 * a.vocab * a.hidden * (profile.quantised_head and found.base != "bf16")
        return LossBytes(logits * forward + unpacked, hidden + logits * backward + chunk * more + head + unpacked, hidden,
                         logits * kept)
    forward, backward = getattr(profile, found.logits)
    return LossBytes(logits * forward, max(logits * backward, hidden + logits * 2 + head), hidden)


def _frozen(found, profile):
    """(bytes of the frozen weights that shard, bytes of each layer's, bytes that do not shard)."""
    a = found.job.architecture
    matrices = [sum(inputs * outputs * (a.num_experts if name.startswith("mlp.experts.") else 1)
                    for name, (inputs, outputs) in a.linear_shapes(i).items() if name != "mlp.gate")
                for i in range(a.num_layers)]
    quantised = sum(matrices) + profile.quantised_head * a.vocab * a.hidden
    scales = 0.0 if profile.shards_scales else SCALES[found.base]
    width = STORED[found.base] - scales
    layers = [width * size + 2 * (layer.total - size) for layer, size in zip(a.layers, matrices, strict=True)]
    return width * quantised + 2 * (a.num_parameters - quantised), layers, scales * quantised


def _states(profile, job):
    """Bytes of the optimizer's states, per trained parameter. 8-bit moments: with a scale per 256."""
    moments = 2 + 8 / 256 if job.optimizer == "adamw8bit" else 2 * profile.moment
    return profile.master + (0 if profile.moments_on_host else moments)


def _fsdp(found: Published, profile: Profile) -> Spread:
    job, a, n = found.job, found.job.architecture, found.job.shard_gpus
    layers, embedding, head, norm = trained_sizes(job)
    trained, sharded = job.trained_parameters, n > 1
    whole_units = profile.mixed_units and sharded and not job.trains_all
    if whole_units:
        layers = [layer.total + adapter for layer, adapter in zip(a.layers, job.adapter_parameters, strict=True)]
    if job.trains_all:
        weights, wholes = {"weights": profile.weight * trained / n}, [2 * size for size in layers]
    else:
        shards, frozen, scales = _frozen(found, profile)
        weights = {"frozen weights": shards / n + scales, "adapters": profile.weight * trained / n}
        wholes = [size + 2 * adapter for size, adapter in zip(frozen, job.adapter_parameters, strict=True)]
    share = 1 if profile.no_sync and job.accumulation_steps > 1 else 1 / n
    summed = profile.gradient * (sum(layers) if whole_units else trained)

    def unit(whole, trains):
        """Gradients as they are made, again as one flat tensor under FSDP1, then reduced into what is kept."""
        made, reduced = 2 * trains * (2 if sharded and profile.flat else 1), profile.gradient * trains
        return Unit(whole * sharded, max(0.0, made - reduced) if profile.flat or not sharded else made, reduced)

    hooked = profile.flat and sharded and not job.trains_all and not whole_units
    head_gradient = 2 * a.vocab * a.hidden if job.trains_all and not profile.outside_apart else 0.0
    spread = Spread(
        weights=weights, states=_states(profile, job) * trained / n, gradients=summed / n, sums=share * summed,
        share=share, layers=tuple(unit(whole, size) for whole, size in zip(wholes, layers, strict=True)),
        **_outside(a, profile, unit, (embedding, head, norm)), root_gradient=head_gradient,
        step=profile.temporary * trained / n, flat=profile.flat or not sharded,
        keeps_input_gradients=hooked and profile.reentrant and job.checkpointing == "full", prefetches=not hooked)
    return _elsewhere(spread, profile, job)


def _outside(a, profile, unit, trained):
    """Units of the embedding, the head and the final norm, by their names in a spread."""
    sizes = {"embedding": a.embedding_parameters, "head": a.head_parameters, "root": a.final_norm}
    if profile.outside_apart:
        return {name: unit(2 * size, trains) for (name, size), trains in zip(sizes.items(), trained, strict=True)}
    return {"root": unit(2 * sum(sizes.values()), sum(trained))}


def _elsewhere(spread, profile, job):
    """The spread without what is on the host, or is used up as soon as it is made."""
    if profile.steps_in_backward:
        spread = replace(spread, gradients=0.0, sums=0.0, share=0.0, step=0.0)
    if job.offload != "none":
        spread = replace(spread, states=0.0, step=0.0)
    if job.offload == "all":
        spread = replace(spread, weights={}, gradients=0.0, sums=0.0, share=0.0)
    return spread


def _zero(found: Published, profile: Profile) -> Spread:
    """Stages of ZeRO: 1 shares out states, 2 gradients, 3 weights; all weights are whole in forward below 3.

    Source: arXiv 1910.02054, section 5.
    """
    job, a, n = found.job, found.job.architecture, found.job.gpus
    stage = int(job.strategy[-1])
    layers, embedding, head, norm = trained_sizes(job)
    trained = job.trained_parameters
    frozen = 0 if job.trains_all else sum(_frozen(found, profile)[::2])
    share = 1 / n if stage >= 2 else 1
    gathered = 2 if stage == 3 else 0

    def unit(parameters, trains):
        return Unit(gathered * parameters, 2 * trains, profile.gradient * trains)

    sizes = [layer.total + adapter for layer, adapter in zip(a.layers, job.adapter_parameters, strict=True)]
    spread = Spread(
        weights={"weights": (2 * trained + frozen) / (n if stage == 3 else 1)},
        states=_states(profile, job) * trained / (n if stage else 1), gradients=share * profile.gradient * trained,
        share=share, layers=tuple(unit(*pair) for pair in zip(sizes, layers, strict=True)),
        root=unit(a.embedding_parameters + a.head_parameters + a.final_norm, embedding + head + norm),
        step=profile.temporary * trained / (n if stage else 1), flat=True)
    return _elsewhere(spread, profile, job)
