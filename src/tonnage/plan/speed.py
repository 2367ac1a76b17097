"""How long a step takes, from first principles: FLOPs, bytes through memory, bytes between GPUs, what hides what.

A micro-step is the longer of the GPU's work and the host's launches; gathers and reductions hide behind the work where
the engine prefetches. `MATMUL_FRACTION`, `ROUTED_FRACTION` and `PCIE_FRACTION` were fitted, on half of the published
rows (`is_fitted`); the rest is counted or taken from its source. `launch/plan.py --validate` prints both halves.
What it does not know: the hooks of DeepSpeed, with which micro-batches below 2,000 tokens are 2 to 4 times slower.
Worth reading: EleutherAI, Transformer Math 101 (https://blog.eleuther.ai/transformer-math/).
"""

import math
from dataclasses import dataclass
from statistics import median

from tonnage.facts.gpus import GPUS, Gpu
from tonnage.plan.job import Job, adapted_shapes
from tonnage.plan.published import Row, group_of, is_fitted, published

NETWORK_GB_S = 50.0  # one 400 Gb/s InfiniBand port a GPU. Source: NVIDIA DGX H100 data sheet

# Share of the dense bf16 peak (`Gpu.bf16_tflops`) that the products of a training step sustain at the clocks that the
# power allows; fitted on 51, 15, 5 and 2 rows. No row tells of blackwell and cdna3: they get hopper's share, 0.65, of
# the fastest product measured on them (`Gpu.matmul_tflops`); cards with PCIe alone (L4, L40S, A10, A6000) geforce's.
MATMUL_FRACTION = {"ampere": 0.76, "geforce": 0.90, "hopper": 0.52, "h20": 0.95, "blackwell": 0.50, "cdna3": 0.33}
# As above for flash attention, forward and backward. Source: arXiv 2307.08691, section 4.1 (A100: 170 to 190 of 312
# TFLOP/s, H100: up to 335 of 989). Assumed for the rest: like these, and near its own low peak on an H20.
ATTENTION_FRACTION = {"ampere": 0.55, "geforce": 0.55, "hopper": 0.34, "h20": 0.75, "blackwell": 0.34, "cdna3": 0.25}
ROUTED_FRACTION = 0.65  # of MATMUL_FRACTION for routed experts, uneven and one after another; fitted on 10 rows
PCIE_FRACTION = 0.10  # of a PCIe link: collectives go through host memory, there and back; fitted, on slow and fast hosts
NVLINK_FRACTION = 0.8  # bus bandwidth of large collectives. Source: NVIDIA/nccl-tests on DGX A100 and H100: 230 to 370
MEMORY_FRACTION = 0.8  # of the memory bandwidth, for long element-wise kernels. Source: BabelStream on A100
HOST_LINK_FRACTION = 0.8  # of PCIe, pinned memory. Source: NVIDIA cuda-samples bandwidthTest, 25 of 31 GB/s
HOST_MEMORY_GB_S = 200.0  # of a node, for AdamW on the host: half of 2 sockets x 8 channels of DDR4-3200

# Bytes that the element-wise kernels of one layer move per token and hidden element in one pass, counted kernel by
# kernel on transformers' Llama with an MLP of 3.5 hidden: norms 52, rotary 30, gate 35, residuals 12. Compiled, each
# input is read and each output written once.
ELEMENTWISE_BYTES, ELEMENTWISE_BYTES_COMPILED = 130, 50
LOGIT_BYTES = 24  # per logit, forward and backward of an eager loss: bf16 and fp32 written and read again
# ATen calls of forward and backward, without and with recomputing, counted on transformers' Llama and peft's LoRA; a
# call costs the host 5 to 10 us in eager PyTorch. Selective checkpointing asks Python about each call, forward and again:
# 2.1 and 2.3 times what full adds, measured on layers too small for their arithmetic to count (torch 2.13, a Xeon)
CALLS_PER_LAYER = {"none": 219, "selective": 500, "full": 350}
CALLS_PER_ADAPTED_MATRIX = {"none": 29, "selective": 61, "full": 43}
CALL_S = 8e-6
COMPILED_CALLS = 0.2  # of the calls of an eager layer are left of a compiled one
# read and written by the update of one parameter on the GPU: gradient, weight, moments, bf16 copy, clipping besides
OPTIMIZER_BYTES = {"adamw": 42, "adamw8bit": 34, "sgd": 34}
# per number that is cast to FP8: its largest value (read, its magnitude written, read), then five kernels by way of fp32;
# compiled, it is read twice and written once. Counted on torchao 0.18, and like FP8's share of its peak (taken to be that
# of bf16, MATMUL_FRACTION) not measured: no published row trains in FP8 with torchao's eager kernels
CAST_BYTES, CAST_BYTES_COMPILED = 33, 5
REDUCE_BYTES = 4  # gradients are reduced in fp32, by every engine here


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token: products (those of routed experts and those in FP8 apart), attention.

    `model` is what training takes: causal attention halved, nothing computed twice.
    """

    linear: float
    routed: float
    float8: float
    attention: float
    model: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One optimizer step. Seconds are of the busiest GPU; `mfu` is of the dense bf16 peak, by `Flops.model`.

    step_s = compute_s + exposed_s + transfer_s + optimizer_s; `communication_s` is what is exposed and what is hidden.
    """

    tokens_per_s: float
    tokens_per_s_per_gpu: float
    step_s: float
    micro_step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    transfer_s: float
    optimizer_s: float
    model_flops_per_token: float
    mfu: float


def flops_per_token(job: Job) -> Flops:
    """FLOPs of one token, forward and backward.

    A product with P weights costs 2P forward and 2P for the gradient of its input, 2P more for that of its weights:
    6P; 4P where they are frozen; layers with full checkpointing run forward twice: 8P and 6P. Of a mixture of experts
    only the experts that a token visits count; the input embedding is a lookup; every token is taken to have a label.
    Attention: 2 products over the sequence of s tokens, 4 s x width forward, twice that backward; half under a causal
    mask (eager attention computes both halves), which gives 6 L h s where the convention without halving has 12 L h s.
    Source: arXiv 2001.08361, section 2.1; arXiv 2204.02311, appendix B; arXiv 2106.09685 for frozen weights.
    """
    model, runs = job.architecture, 1 + job.multiplied_again
    layers = sum(parts.active - parts.norms for parts in model.layers)
    head, adapters = model.vocab * model.hidden, job.active_adapter_parameters
    backward = 4 if job.trains_all else 2
    linear = (2 * runs + backward) * layers + (2 + backward) * head + (2 * runs + 4) * adapters
    attention = 2 * job.seq_tokens * _attention_width(model) * model.num_layers
    executed = (runs + 2) * attention * (2 if job.attention == "eager" else 1)
    routed = (2 * runs + backward) * sum(layer.routed_experts_active for layer in model.layers)
    float8 = (2 * runs + backward) * job.float8_sums[0]
    needed = (2 + backward) * (layers + head) + 6 * adapters + 3 * attention
    return Flops(linear - routed - float8, routed, float8, executed, needed)


def step_time(job: Job, gpu: Gpu, network_gb_s: float = NETWORK_GB_S, base_bytes: float | None = None) -> Speed | None:
    """Seconds and tokens of one optimizer step; None in fp32, and where the GPU's arithmetic (in fp8: that of its FP8
    units) or links are not known.

    Args:
        network_gb_s: one way between nodes, per GPU.
        base_bytes: bytes of a frozen parameter as stored and gathered, None as by job.quantise; below 2 it is dequantised
            for every product.
    """
    if base_bytes is None:
        base_bytes = 2.0 if job.quantise == "none" else job.kept_bytes / job.architecture.num_parameters
    if job.precision == "fp32" or None in (gpu.bf16_tflops, gpu.memory_bandwidth_tb_s, gpu.link_gb_s, gpu.host_link_gb_s):
        return None
    if job.precision == "fp8" and gpu.fp8_tflops is None:
        return None
    forward_s, backward_s = compute_s(job, gpu, base_bytes)
    gather, reduce, per_step = communication_bytes(job, base_bytes)
    gather_s, reduce_s = (bus_s(size, job.shard_gpus, job, gpu, network_gb_s) for size in (gather, reduce))
    changed_s = changed_exposed_s = 0.0
    if job.hpz_gpus > 1:  # within a node but for what a step has changed
        changed = 2.0 * job.trained_parameters
        gather_s = bus_s(gather, job.hpz_gpus, job, gpu, network_gb_s)
        first_s = (bus_s(gather - changed, job.hpz_gpus, job, gpu, network_gb_s)
                   + bus_s(changed, job.shard_gpus, job, gpu, network_gb_s))
        changed_s = first_s - gather_s
        changed_exposed_s = (_exposed_s(forward_s, first_s, 0.0, job, gpu) - _exposed_s(forward_s, gather_s, 0.0, job, gpu))
    gathers_again = job.reshard_after_forward or job.strategy == "zero3"
    parts = [(forward_s, gather_s, 0.0), (backward_s, gather_s * gathers_again, reduce_s)]
    exposed_s = sum(_exposed_s(work, gathered, reduced, job, gpu) for work, gathered, reduced in parts)
    # experts wait for their tokens, attention for its heads
    travel_s = (all_to_all_s(travel_bytes(job), job.expert_gpus, job, gpu, network_gb_s)
                + all_to_all_s(heads_bytes(job), job.sequence_gpus, job, gpu, network_gb_s))
    exposed_s += travel_s
    micro_transfer_s, step_transfer_s, host_s = _offload_s(job, gpu, base_bytes)
    step_communication_s = bus_s(per_step, job.gpus, job, gpu, network_gb_s) + _replicas_s(job, gpu, network_gb_s)
    micro_step_s = forward_s + backward_s + exposed_s + micro_transfer_s
    micro_steps, optimizer_s = job.accumulation_steps, host_s or _optimizer_s(job, gpu)
    step_exposed_s = step_communication_s + changed_exposed_s
    step_s = micro_steps * micro_step_s + step_exposed_s + step_transfer_s + optimizer_s
    tokens_per_s = job.step_tokens / step_s  # of the window as it is, not of micro-batches that are all full
    tokens_per_s_per_gpu = tokens_per_s / job.gpus
    flops = flops_per_token(job)
    return Speed(
        tokens_per_s=tokens_per_s, tokens_per_s_per_gpu=tokens_per_s_per_gpu, step_s=step_s,
        micro_step_s=micro_step_s, compute_s=micro_steps * (forward_s + backward_s),
        communication_s=micro_steps * (travel_s + sum(gathered + reduced for _, gathered, reduced in parts))
        + step_communication_s + changed_s,
        exposed_s=micro_steps * exposed_s + step_exposed_s, optimizer_s=optimizer_s,
        transfer_s=micro_steps * micro_transfer_s + step_transfer_s, model_flops_per_token=flops.model,
        mfu=flops.model * tokens_per_s_per_gpu / (gpu.bf16_tflops * 1e12))


def compute_s(job: Job, gpu: Gpu, base_bytes: float = 2.0) -> tuple[float, float]:
    """Seconds of (forward, backward) of one micro-batch on one GPU, without waiting for others.

    The GPU multiplies, attends and moves activations one after another; where that is less than the host needs to
    launch the kernels, the host sets the time. Recomputing counts as backward.
    """
    model, flops, generation = job.architecture, flops_per_token(job), generation_of(gpu)
    peak, memory = gpu.bf16_tflops * 1e12, gpu.memory_bandwidth_tb_s * 1e12 * MEMORY_FRACTION
    passes = 3 + job.computed_again  # backward moves twice what forward does
    adapted = [] if job.trains_all else adapted_shapes(model, job.targets)
    element = ELEMENTWISE_BYTES_COMPILED if job.compile else ELEMENTWISE_BYTES
    # an adapter reads the input, writes its output, reads that and the base's, and writes the sum: bf16
    moved = element * model.hidden * model.num_layers + sum(2 * (inputs + 3 * out) for inputs, out in adapted)
    bytes_moved = job.micro_tokens * (passes * moved + LOGIT_BYTES * model.vocab)
    if base_bytes < 2:
        elsewhere = sum(layer.routed_experts for layer in model.layers) * (1 - 1 / job.expert_gpus)
        bytes_moved += (passes - 1) * (base_bytes + 2) * (model.num_parameters - elsewhere)
    products = flops.linear + flops.routed / ROUTED_FRACTION
    if flops.float8:
        products += flops.float8 * gpu.bf16_tflops / gpu.fp8_tflops
        bytes_moved += _cast_bytes(job)
    gpu_s = (job.micro_tokens * (products / (peak * MATMUL_FRACTION[generation])
                                 + flops.attention / (peak * ATTENTION_FRACTION[generation])) + bytes_moved / memory)
    calls = (_calls(CALLS_PER_LAYER, job) * model.num_layers
             + _calls(CALLS_PER_ADAPTED_MATRIX, job) * len(adapted)) * (COMPILED_CALLS if job.compile else 1)
    total_s = max(gpu_s, calls * CALL_S)
    return total_s / passes, total_s * (passes - 1) / passes


def _calls(counted, job):
    again = counted["full" if job.compile else job.checkpointing]  # a compiled layer asks nothing while it runs
    return counted["none"] + job.computed_again * (again - counted["none"])


def _cast_bytes(job):
    """Bytes moved by casts to FP8: weights and inputs in each forward, weights and gradients in backward, there the inputs
    too where weights are trained. Of weights that are gathered in FP8, a GPU's part for each gather."""
    runs = 1 + job.computed_again
    weights, inputs, outputs = job.float8_sums
    gathered = sum(job.float8_gathered)
    weights = (runs + 1) * (weights - gathered) + (1 + job.reshard_after_forward) * gathered / job.shard_gpus
    numbers = weights + job.micro_tokens * ((runs + job.trains_all) * inputs + outputs)
    return (CAST_BYTES_COMPILED if job.compile else CAST_BYTES) * numbers


def communication_bytes(job: Job, base_bytes: float = 2.0) -> tuple[float, float, float]:
    """Bytes of whole tensors: (one gather of the weights, reduction per micro-batch, per step and over all GPUs).

    zero3 and fsdp gather every weight in bf16, or as stored, in forward and again in backward, and reduce gradients
    each micro-batch. zero2 reduces each micro-batch; zero0, zero1 and ddp once a step, an all-reduce being two passes.
    zero1 and zero2 gather the updated weights once a step.
    Source: arXiv 1910.02054, section 7; arXiv 2304.11277, section 3.
    """
    total, trained = job.architecture.num_parameters, job.trained_parameters
    weights = total * 2.0 if job.trains_all else total * base_bytes + trained * 2.0
    weights -= sum(job.float8_gathered)  # a byte each, not two
    if job.expert_gpus > 1:  # nothing of experts is gathered among these, and of a single copy nothing at all
        experts = sum(layer.routed_experts for layer in job.architecture.layers) * (2.0 if job.trains_all else base_bytes)
        weights -= experts * (1 - (job.gpus > job.expert_gpus) / job.expert_gpus)
    reduced = trained * float(REDUCE_BYTES)
    return {
        "ddp": (0.0, 0.0, 2 * reduced), "zero0": (0.0, 0.0, 2 * reduced), "zero1": (0.0, 0.0, reduced + 2 * trained),
        "zero2": (0.0, reduced, 2.0 * trained), "zero3": (weights, reduced, 0.0), "fsdp": (weights, reduced, 0.0),
        "hsdp": (weights, reduced, 0.0),
    }[job.strategy]


def travel_bytes(job: Job) -> float:
    """Bytes of one micro-batch that one GPU sends to experts on others and gets back: there and back in forward, in
    backward, and in forward again where layers are checkpointed; each token once for each of its experts, in bf16."""
    if job.expert_gpus == 1:
        return 0.0
    a, passes = job.architecture, 2 + job.computed_again
    layers = sum(layer.routed_experts > 0 for layer in a.layers)
    return 2.0 * passes * 2 * job.micro_tokens * a.experts_per_token * a.hidden * layers


def heads_bytes(job: Job) -> float:
    """Bytes of queries, keys, values and what is attended of one micro-batch on one GPU where rows are shared, in bf16.

    They travel in forward, in backward, and in forward again where layers are checkpointed; fewer heads of keys
    than GPUs are repeated.

    Source: arXiv 2309.14509, section 3.2; all but 1 / sequence_gpus of it leaves the GPU.
    """
    if job.sequence_gpus == 1:
        return 0.0
    a, passes = job.architecture, 2 + job.computed_again
    key_heads = math.lcm(a.num_heads if a.is_mla else a.num_kv_heads, job.sequence_gpus)
    query, value = ((a.qk_nope_head_dim + a.qk_rope_head_dim, a.v_head_dim) if a.is_mla else (a.head_dim, a.head_dim))
    width = (a.num_heads + key_heads) * (query + value)
    return 2.0 * passes * job.micro_tokens * width * a.num_layers


def bus_s(size: float, group: int, job: Job, gpu: Gpu, network_gb_s: float) -> float:
    """Seconds to gather or reduce-scatter `size` bytes over `group` GPUs: each GPU moves (n-1)/n of them.

    Between nodes the rings of a node's GPUs use its network ports side by side, so that each node takes in the bytes
    once through all of them; the slower of the two sets the pace.
    Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    if group == 1:
        return 0.0
    speed = _link_gb_s(gpu)
    if group > job.gpus_per_node:
        speed = min(speed, job.gpus_per_node * network_gb_s * NVLINK_FRACTION)
    return size * (group - 1) / group / (speed * 1e9)


def all_to_all_s(size: float, group: int, job: Job, gpu: Gpu, network_gb_s: float) -> float:
    """Seconds in which each of `group` GPUs, neighbours by rank, sends `size` bytes in equal parts to all, itself too.

    Nothing is passed on: what leaves a node takes the GPU's own port, beside what stays on the node's links. Where groups
    do not end with nodes, the GPUs with the fewest others of theirs on the node set the pace of ports, those with the most
    that of links.
    """
    most, fewest = min(group, job.gpus_per_node), math.gcd(group, job.gpus_per_node)
    within_s, between_s = (most - 1) / _link_gb_s(gpu), (group - fewest) / (network_gb_s * NVLINK_FRACTION)
    return size / group * max(within_s, between_s) / 1e9


def _link_gb_s(gpu):
    return gpu.link_gb_s * (PCIE_FRACTION if gpu.has_pcie_only else NVLINK_FRACTION)


_PREFIXES = (("a100", "ampere"), ("h200", "hopper"), ("h20", "h20"), ("h", "hopper"), ("b200", "blackwell"),
             ("gb200", "blackwell"), ("mi", "cdna3"))


def generation_of(gpu: Gpu) -> str:
    """The key of MATMUL_FRACTION for a GPU."""
    for prefix, generation in _PREFIXES:
        if gpu.name.startswith(prefix):
            return generation
    return "geforce"


def cost_usd(tokens: float, speed: Speed, gpu: Gpu) -> tuple[float, float] | None:
    """USD for `tokens` at the low and the high price of a GPU-hour; a million of them, or a run's. None: no price."""
    if gpu.price_low_usd_h is None or gpu.price_high_usd_h is None:
        return None
    gpu_hours = tokens / speed.tokens_per_s_per_gpu / 3600
    return gpu_hours * gpu.price_low_usd_h, gpu_hours * gpu.price_high_usd_h


def energy_kwh(tokens: float, speed: Speed, gpu: Gpu) -> float | None:
    """Energy for `tokens` with all GPUs at board power: hosts, network and cooling come on top. None: no power known."""
    return None if gpu.power_w is None else tokens / speed.tokens_per_s_per_gpu / 3600 * gpu.power_w / 1000


def _attention_width(model):
    """Elements per token of queries times keys and of weights times values, both products' width in one mean."""
    if model.is_mla:
        return model.num_heads * (model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim) / 2
    return model.num_heads * model.head_dim


def _exposed_s(work_s, gather_s, reduce_s, job, gpu):
    """What of a gather and a reduction does not hide behind `work_s`.

    Over PCIe nothing does: copies through the host hold up the kernels (fsdp_qlora's 3090 rows are sums). Tonnage
    runs DeepSpeed with overlap_comm off, so that its reductions wait, while stage 3 prefetches its gathers.
    """
    if gpu.has_pcie_only:
        return gather_s + reduce_s
    if job.strategy.startswith("zero"):
        return max(0.0, gather_s - work_s) + reduce_s
    return max(0.0, gather_s + reduce_s - work_s)


def _replicas_s(job, gpu, network_gb_s):
    """hsdp: once a step each GPU all-reduces its shard of the gradients over the replicas."""
    replicas = job.gpus // job.shard_gpus
    if job.strategy != "hsdp" or replicas == 1:
        return 0.0
    size = 2 * REDUCE_BYTES * job.trained_parameters / job.shard_gpus * (replicas - 1) / replicas
    within, between = _link_gb_s(gpu), network_gb_s * NVLINK_FRACTION
    return size / ((min(within, between) if job.gpus > job.gpus_per_node else within) * 1e9)


def _optimizer_s(job, gpu):
    shards = job.gpus if job.strategy.startswith("zero") and job.strategy != "zero0" else job.shard_gpus
    return (job.trained_parameters / shards * OPTIMIZER_BYTES[job.optimizer]
            / (gpu.memory_bandwidth_tb_s * 1e12 * MEMORY_FRACTION))


def _offload_s(job, gpu, base_bytes):
    """(host link per micro-batch, host link per step, AdamW on the host) in seconds; nothing of it hides.

    `optimizer` brings gradients to the host and weights back once a step; `all` also fetches each GPU's part of the
    weights for every gather (fp32 where they are trained) and brings gradients back each micro-batch. Inputs of layers
    that are kept on the host go there and come back each micro-batch. Source: arXiv 2101.06840, section 4.
    """
    link, trained = gpu.host_link_gb_s * 1e9 * HOST_LINK_FRACTION, job.trained_parameters / job.shard_gpus
    inputs_s = 2 * job.layers_on_host * job.layer_input_bytes / link
    if job.offload == "none":
        return inputs_s, 0.0, 0.0
    frozen = 0 if job.trains_all else job.architecture.num_parameters / job.shard_gpus
    host_s = (trained * min(job.gpus, job.gpus_per_node) * OPTIMIZER_BYTES[job.optimizer] / (HOST_MEMORY_GB_S * 1e9))
    if job.offload == "optimizer":
        return inputs_s, trained * (REDUCE_BYTES + 2) / link, host_s
    fetched = 2 * (4 * trained + base_bytes * frozen)
    return inputs_s + (fetched + REDUCE_BYTES * trained) / link, 0.0, host_s


# ---- beside the published rows

STORED_BYTES = {"bf16": 2.0, "nf4": 0.5625, "nf4_dq": 0.516, "gptq4": 0.53}


@dataclass(frozen=True)
class Comparison:
    """A published speed and ours, tokens/s per GPU."""

    row: Row
    group: tuple[str, str]
    measured: float
    predicted: float

    @property
    def factor(self) -> float:
        """How far apart, at least 1."""
        return max(self.predicted / self.measured, self.measured / self.predicted)


def compare(among: tuple[Row, ...] | None = None) -> list[Comparison]:
    """Every predictable published speed beside ours."""
    found = [item for item in published(lambda row: row.tok_per_s_per_gpu is not None, among) if item.predicts_speed]
    return [Comparison(item.row, group_of(item), item.row.tok_per_s_per_gpu,
                       step_time(item.job, GPUS[item.gpu], item.network_gb_s or NETWORK_GB_S,
                                 STORED_BYTES[item.base]).tokens_per_s_per_gpu)
            for item in found]


def summary(comparisons: list[Comparison]) -> list[tuple[str, int, float, float, float]]:
    """(what, rows, median factor, 90th percentile, median predicted / measured), for both halves and every group."""
    groups = sorted({item.group for item in comparisons})
    halves = {"fitted": [], "untouched": []}
    for item in comparisons:
        halves["fitted" if is_fitted(item.group, groups) else "untouched"].append(item)
    named = halves | {f"{'f' if is_fitted(group, groups) else 'u'} {group[0]}, {group[1]}":
                      [item for item in comparisons if item.group == group] for group in groups}
    return [(name, len(items), median(item.factor for item in items),
             sorted(item.factor for item in items)[math.ceil(0.9 * len(items)) - 1],
             median(item.predicted / item.measured for item in items)) for name, items in named.items() if items]
