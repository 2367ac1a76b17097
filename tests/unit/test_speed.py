"""Step time: FLOPs and bytes by hand, what hides what, money, and the published rows."""

import sys
from dataclasses import astuple, replace
from subprocess import run

import pytest

from tonnage.facts.architectures import Architecture
from tonnage.facts.gpus import GPUS, gpu_of
from tonnage.facts.models import MODELS
from tonnage.plan.job import Job
from tonnage.plan.speed import (
    all_to_all_s,
    bus_s,
    communication_bytes,
    compare,
    compute_s,
    cost_usd,
    energy_kwh,
    flops_per_token,
    generation_of,
    heads_bytes,
    is_fitted,
    step_time,
    summary,
    travel_bytes,
)

# attention 8x8 + 2 of 8x4 + 8x8 = 192, MLP 3 of 8x16 = 384: 576 weights a layer, 1,152 in all; head 8x32 = 256
TINY = Architecture(model_type="llama", num_layers=2, hidden=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate=16,
                    vocab=32, tied_embeddings=False, max_positions_tokens=64)
H100 = GPUS["h100"]


def job(**more):
    base = Job(architecture=TINY, adapter="full", rank=2, targets=("q_proj",), strategy="fsdp", gpus=8, gpus_per_node=8,
               shard_gpus=8, offload="none", reshard_after_forward=True, precision="bf16", optimizer="adamw",
               seq_tokens=10, micro_rows=1, accumulation_steps=1, checkpointing="none", attention="sdpa", loss="plain",
               loss_chunk_tokens=1024)
    return replace(base, **more)


def llama(**more):
    return job(**{"architecture": MODELS["llama7b"].architecture, "seq_tokens": 4096, "checkpointing": "full"} | more)


# ---- FLOPs

@pytest.mark.parametrize("more, linear, attention, model", [
    # 6 (1,152 + 256) = 8,448; attention 2 x 10 tokens x 8 wide x 2 layers = 320 forward, 3 times that
    ({}, 8448, 960, 8448 + 960),
    # layers run forward twice: 8 x 1,152 + 6 x 256; attention 4 x 320
    ({"checkpointing": "full"}, 10752, 1280, 8448 + 960),
    # frozen: 4 x 1,408, and 6 for the adapter's 2 layers x 2 (8 + 8) = 64 weights
    ({"adapter": "lora"}, 4 * 1408 + 6 * 64, 960, 4 * 1408 + 6 * 64 + 960),
    # every second layer of two: 7 x 1,152, attention 3.5 x 320; what keeps its products computes none again
    ({"checkpointing": "full", "checkpoint_every_layers": 2}, 7 * 1152 + 6 * 256, 1120, 8448 + 960),
    ({"checkpointing": "selective"}, 8448, 960, 8448 + 960),
    ({"adapter": "lora", "checkpointing": "full"}, 6 * 1152 + 4 * 256 + 8 * 64, 1280, 4 * 1408 + 6 * 64 + 960),
    ({"attention": "eager"}, 8448, 1920, 8448 + 960),
])
def test_flops_of_a_token(more, linear, attention, model):
    flops = flops_per_token(job(**more))
    assert (flops.linear, flops.routed, flops.attention, flops.model) == (linear, 0, attention, model)


def test_a_dense_model_costs_six_flops_a_weight_and_a_mixture_only_its_active_ones():
    assert flops_per_token(llama(checkpointing="none", seq_tokens=1)).linear / 6 == pytest.approx(6.607e9, rel=1e-3)
    mixtral = MODELS["mixtral8x7b"].architecture
    flops = flops_per_token(job(architecture=mixtral))
    routed = 32 * 2 * 3 * 4096 * 14336  # layers, experts of a token, matrices
    assert flops.routed == 6 * routed
    assert (flops.linear + flops.routed) / 6 == pytest.approx(12.88e9 - 32000 * 4096, rel=1e-3)


# ---- bytes between GPUs

def test_communication_of_each_strategy():
    total = 1152 + 2 * 16 + 8 + 2 * 256  # weights, norms, final norm, embedding and head
    assert TINY.num_parameters == total == 1704
    assert communication_bytes(job(strategy="ddp")) == (0, 0, 2 * 4 * total)
    assert communication_bytes(job(strategy="zero1")) == (0, 0, 4 * total + 2 * total)
    assert communication_bytes(job(strategy="zero2")) == (0, 4 * total, 2 * total)
    for strategy in ("zero3", "fsdp", "hsdp"):
        assert communication_bytes(job(strategy=strategy)) == (2 * total, 4 * total, 0)
    assert communication_bytes(job(adapter="lora")) == (2 * total + 2 * 64, 4 * 64, 0)
    assert communication_bytes(job(adapter="lora"), base_bytes=0.5) == (0.5 * total + 2 * 64, 4 * 64, 0)


def test_the_slower_of_links_and_network_sets_the_pace():
    one, two = job(gpus=8), job(gpus=16)
    assert bus_s(8e9, 1, one, H100, 50) == 0
    assert bus_s(8e9, 4, one, H100, 50) == pytest.approx(8 * 3 / 4 / 360)  # 450 x 0.8 GB/s
    assert bus_s(8e9, 16, two, H100, 50) == pytest.approx(8 * 15 / 16 / 320)  # 8 ports x 50 x 0.8
    assert bus_s(8e9, 16, two, H100, 100) == pytest.approx(8 * 15 / 16 / 360)
    assert bus_s(8e9, 2, one, GPUS["rtx4090"], 50) == pytest.approx(8 / 2 / 3.1)


def test_what_hides_and_what_does_not():
    sharded = step_time(llama(), H100)
    assert sharded.exposed_s == 0 < sharded.communication_s
    assert step_time(llama(gpus=16, shard_gpus=16), H100, network_gb_s=1).exposed_s > 0
    pcie = step_time(llama(), GPUS["l40s"])
    assert pcie.exposed_s == pytest.approx(pcie.communication_s)
    ddp = step_time(llama(strategy="ddp", shard_gpus=1, accumulation_steps=4), H100)
    assert ddp.exposed_s == ddp.communication_s == pytest.approx(bus_s(8 * 6738415616, 8, llama(), H100, 50))


def test_heads_travel_there_and_back_in_each_pass():
    # 2 heads of 4 for queries and what is attended; the one of keys and values twice, once a GPU: 8 x 4 numbers a token
    shared = job(sequence_gpus=2)
    assert (shared.micro_tokens, heads_bytes(job()), heads_bytes(shared)) == (5, 0, 2 * 2 * 5 * 32 * 2)
    assert heads_bytes(job(sequence_gpus=2, checkpointing="full")) == 3 * 2 * 5 * 32 * 2
    v3 = MODELS["deepseek671b"].architecture  # 128 heads, queries and keys 192 wide, values 128
    assert heads_bytes(job(sequence_gpus=2, architecture=v3)) == 2 * 2 * 5 * 128 * 2 * (192 + 128) * 61
    one, node, two = (step_time(llama(gpus=16, shard_gpus=16, sequence_gpus=count), H100) for count in (1, 8, 16))
    apart = 2 * 3 * 512 * 4 * 4096 * 32 * 7 / 8 / 360e9  # seven eighths of 512 tokens by NVLink, which nothing hides
    assert node.communication_s - one.communication_s == pytest.approx(apart) and node.exposed_s > apart
    alone = 2 * 3 * 256 * 4 * 4096 * 32 * 8 / 16 / 40e9  # half of it to the other node, each GPU by its own port
    assert two.communication_s - one.communication_s == pytest.approx(alone) and two.exposed_s > alone


def test_what_goes_from_each_gpu_to_each_takes_links_and_ports_side_by_side():
    one, three = job(gpus=16), job(gpus=12, gpus_per_node=6)
    assert all_to_all_s(8e9, 1, one, H100, 50) == 0
    assert all_to_all_s(8e9, 8, one, H100, 50) == pytest.approx(8 * 7 / 8 / 360)
    assert all_to_all_s(8e9, 16, one, H100, 50) == pytest.approx(8 * 8 / 16 / 40)
    assert all_to_all_s(8e9, 16, one, H100, 5000) == pytest.approx(8 * 7 / 16 / 360)
    # ranks 4 to 7 are on two nodes of six GPUs: two and two
    assert all_to_all_s(8e9, 4, three, H100, 50) == pytest.approx(8 * 2 / 4 / 40)
    assert all_to_all_s(8e9, 4, three, GPUS["l40s"], 50) == pytest.approx(8 * 3 / 4 / (GPUS["l40s"].link_gb_s * 0.1))
    wide = [step_time(v3(count), H100) for count in (8, 64)]
    travel = [all_to_all_s(travel_bytes(v3(count)), count, v3(count), H100, 50) for count in (8, 64)]
    assert wide[1].exposed_s - wide[0].exposed_s > 0.5 * (travel[1] - travel[0]) > 0


def v3(expert_gpus):
    return llama(architecture=MODELS["deepseek671b"].architecture, adapter="lora", gpus=64, shard_gpus=64,
                 expert_gpus=expert_gpus)


def test_a_second_copy_is_gathered_within_a_node_but_for_what_a_step_changed():
    def zero3(network_gb_s, seq_tokens, accumulation_steps, **more):
        return step_time(llama(strategy="zero3", gpus=16, shard_gpus=16, seq_tokens=seq_tokens,
                               accumulation_steps=accumulation_steps, **more), H100, network_gb_s=network_gb_s)

    # the first gather of a step is from all GPUs, and hides like any other
    assert zero3(50, 8192, 1, hpz_gpus=8).step_s == pytest.approx(zero3(50, 8192, 1).step_s)
    far, near = (zero3(1, 4096, 4, **more) for more in ({}, {"hpz_gpus": 8}))
    whole_s = bus_s(2 * 6738415616, 16, llama(gpus=16), H100, 1)
    assert far.communication_s - near.communication_s == pytest.approx(
        8 * whole_s - whole_s - 7 * bus_s(2 * 6738415616, 8, llama(), H100, 1))
    forward_s = compute_s(llama(strategy="zero3", gpus=16, shard_gpus=16), H100)[0]
    reduced_s = 4 * bus_s(4 * 6738415616, 16, llama(gpus=16), H100, 1)
    assert near.exposed_s == pytest.approx(whole_s - forward_s + reduced_s, rel=1e-3)
    # of an adapter the frozen weights are gathered within the node each time
    few = zero3(1, 512, 1, hpz_gpus=8, adapter="lora", trains_embeddings=True)
    trained = llama(adapter="lora", trains_embeddings=True).trained_parameters
    local_s = bus_s(2 * 6738415616 + 2 * trained, 8, llama(), H100, 1)
    first_s = bus_s(2 * 6738415616, 8, llama(), H100, 1) + bus_s(2 * trained, 16, llama(gpus=16), H100, 1)
    assert few.communication_s == pytest.approx(first_s + local_s + bus_s(4 * trained, 16, llama(gpus=16), H100, 1))


def test_gpus_that_share_rows_do_the_work_of_whole_rows_together():
    alone, shared = (compute_s(llama(seq_tokens=65536, sequence_gpus=count), H100) for count in (1, 4))
    assert sum(shared) == pytest.approx(sum(alone) / 4, rel=1e-3)
    assert flops_per_token(llama(sequence_gpus=4)) == flops_per_token(llama())


# ---- the step

@pytest.mark.parametrize("more", [
    {}, {"strategy": "zero2", "offload": "optimizer"}, {"offload": "all"}, {"adapter": "lora", "offload": "all"},
    {"strategy": "hsdp", "gpus": 16}, {"strategy": "ddp", "shard_gpus": 1}, {"optimizer": "adamw8bit"}])
def test_a_step_is_the_sum_of_its_parts(more):
    speed = step_time(llama(accumulation_steps=3, **more), H100)
    assert speed.step_s == pytest.approx(speed.compute_s + speed.exposed_s + speed.transfer_s + speed.optimizer_s)
    assert speed.tokens_per_s == pytest.approx(3 * 4096 * (16 if "gpus" in more else 8) / speed.step_s)
    assert 0 < speed.mfu < 1
    assert (speed.transfer_s > 0) == ("offload" in more)


def test_directions():
    plain = step_time(llama(), H100)
    assert step_time(llama(offload="all"), H100).step_s > plain.step_s
    assert step_time(llama(checkpointing="none"), H100).step_s < plain.step_s
    lora = step_time(llama(adapter="lora"), H100)
    assert lora.step_s < plain.step_s
    assert step_time(llama(adapter="lora"), H100, base_bytes=0.5).compute_s > lora.compute_s  # it is dequantised
    assert step_time(llama(compile=True), H100).step_s < plain.step_s
    assert step_time(llama(micro_rows=4), H100).tokens_per_s > plain.tokens_per_s
    few = step_time(llama(seq_tokens=16), H100)  # the host's launches take as long for 16 tokens as for 32
    assert few.micro_step_s == pytest.approx(step_time(llama(seq_tokens=32), H100).micro_step_s, rel=1e-3)


def test_products_in_fp8_run_at_its_peak_and_their_casts_move_bytes():
    assert flops_per_token(llama(precision="fp8")).float8 == 8 * 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert sum(astuple(flops_per_token(llama(precision="fp8")))[:3]) == flops_per_token(llama()).linear
    # layers run forward twice, all four numbers of a matrix of TINY are below 16
    assert flops_per_token(job(precision="fp8")).float8 == 0
    compiled, eager = (step_time(llama(precision="fp8", compile=one, micro_rows=4), H100) for one in (True, False))
    bf16 = step_time(llama(compile=True, micro_rows=4), H100)
    # two thirds of a step are products: twice as fast, they leave a gain that uncompiled casts take back
    assert 1.3 < compiled.tokens_per_s / bf16.tokens_per_s < 1.7
    assert eager.tokens_per_s < 0.7 * compiled.tokens_per_s


def test_weights_gathered_in_fp8_are_half_the_bytes_and_cast_once_a_shard():
    plain, gathered = (llama(precision="fp8", fp8_all_gather=one) for one in (False, True))
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert communication_bytes(plain)[0] - communication_bytes(gathered)[0] == matrices
    assert step_time(gathered, H100).compute_s < step_time(plain, H100).compute_s
    # 8 GPUs gather twice and cast an eighth each time, instead of all of it three times; through 2.68 TB/s
    saved = 33 * matrices * (3 - 2 / 8) / (3.35e12 * 0.8)
    assert step_time(plain, H100).compute_s - step_time(gathered, H100).compute_s == pytest.approx(saved, rel=1e-3)
    odd = llama(precision="fp8", fp8_all_gather=True, gpus=7, shard_gpus=7)  # 4,096 and 11,008 rows do not divide
    assert communication_bytes(odd) == communication_bytes(llama(gpus=7, shard_gpus=7))


def test_unknown_stays_none():
    assert step_time(llama(precision="fp8"), GPUS["a100_80gb"]) is None
    assert step_time(llama(), gpu_of("other", memory_gib=16)) is None
    assert step_time(llama(precision="fp32"), H100) is None
    speed = step_time(llama(), H100)
    assert cost_usd(1e6, speed, GPUS["h20"]) is None and energy_kwh(1e6, speed, GPUS["gb200"]) is None


def test_money_and_energy():
    speed = step_time(llama(), H100)
    hours = 1e9 / speed.tokens_per_s_per_gpu / 3600
    assert cost_usd(1e9, speed, H100) == pytest.approx((hours * 1.99, hours * 5.00))
    assert cost_usd(1e9, speed, gpu_of("h100", price_usd_h=2)) == pytest.approx((hours * 2, hours * 2))
    assert energy_kwh(1e9, speed, H100) == pytest.approx(hours * 0.7)


def test_every_gpu_has_a_generation_and_a_speed():
    assert [generation_of(GPUS[name]) for name in ("a100_40gb", "h100_pcie", "h200", "h20", "gb200", "mi325x", "l4")] == [
        "ampere", "hopper", "hopper", "h20", "blackwell", "cdna3", "geforce"]
    assert all(step_time(llama(), gpu).tokens_per_s > 0 for gpu in GPUS.values())


# ---- published rows

def test_both_halves_of_the_published_speeds_are_met():
    comparisons = compare()
    halves = {name: (number, middle) for name, number, middle, _, _ in summary(comparisons)}
    assert halves["fitted"][0] + halves["untouched"][0] == len(comparisons) >= 230
    assert halves["fitted"][1] < 1.15 and halves["untouched"][1] < 1.25
    groups = sorted({item.group for item in comparisons})
    assert [is_fitted(group, groups) for group in groups[:3]] == [True, False, True]


def test_planning_starts_without_torch():
    code = "import sys; import tonnage.plan.speed; print(any(m == 'torch' for m in sys.modules))"
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
