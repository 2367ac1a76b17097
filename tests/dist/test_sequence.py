"""Rows whose tokens ranks share teach what whole rows teach, on every engine; what cannot be shared is seen."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from equivalence import BF16_TOLERANCE, TOLERANCE, Matrix, deviations, train_cell, within
from tiny import RaggedRows, config_for, go_on, make_model, open_tiny

from tonnage.train import checkpoint, loop, probes

SHARED = ("strategy.sequence_gpus=2", "model.activation_checkpointing=full")


@pytest.fixture(scope="module")
def matrix(tiny_folder, pools):
    """Four heads, two of keys; two ranks to a row."""
    return Matrix(tiny_folder, {world: pools(world) for world in (1, 2, 3, 4)})


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_two_ranks_that_share_rows_learn_what_the_reference_learns(matrix, strategy, adapter):
    optimizers = ("sgd", "adamw") if strategy in ("zero3", "fsdp") else ("sgd",)
    worst = matrix.cell(2, strategy, adapter, 4, optimizers=optimizers, overrides=SHARED)
    assert within(worst, TOLERANCE), worst


@pytest.mark.parametrize("overrides", [SHARED[:1], (SHARED[0], "train.loss=plain"),
                                       (SHARED[0], "model.activation_checkpointing=selective"),
                                       (SHARED[0], "batch.micro_rows=7")])
def test_other_checkpointing_the_plain_loss_and_one_micro_batch(matrix, overrides):
    worst = matrix.cell(2, "fsdp", "lora", 1, optimizers=("sgd",), overrides=overrides)
    assert within(worst, TOLERANCE), worst


def test_in_bf16_it_stays_near_the_reference(matrix):
    worst = matrix.cell(2, "fsdp", "lora", 2, "bf16", optimizers=("sgd",), overrides=SHARED)
    assert within(worst, BF16_TOLERANCE), worst


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_fewer_key_heads_than_ranks(pools, tmp_path, adapter):
    matrix = Matrix(make_model(tmp_path, kv_heads=1), {2: pools(2)})
    worst = matrix.cell(2, "fsdp", adapter, 2, optimizers=("sgd",), overrides=SHARED)
    assert within(worst, TOLERANCE), worst


@pytest.mark.slow
def test_four_ranks(pools, matrix):
    """Two shares, of 4 and 3 rows, one a micro-batch: a dummy row is shared too. And all to a row, with two heads of keys."""
    found = {strategy: matrix.cell(4, strategy, "lora", 1, optimizers=("sgd",), overrides=SHARED)
             for strategy in ("fsdp", "hsdp", "zero2")}
    found["four to a row"] = matrix.cell(4, "fsdp", "full", 2, optimizers=("sgd",), overrides=("strategy.sequence_gpus=4",))
    pools(4).close()
    assert all(within(worst, TOLERANCE) for worst in found.values()), found


# ---- faults that must be seen

def with_fault(function, fault, *args):
    """Run `function` with a fault in how rows are shared."""
    from tonnage.models import slices

    honest = slices.Slices.held, loop.collate

    def restarted(*words):
        batch = honest[1](*words)
        batch.position_ids_BT -= batch.position_ids_BT[:, :1].clone()
        return batch

    if fault == "attention within the slice":
        slices.Slices.held = lambda self: nullcontext()
    elif fault == "positions from the slice's beginning":
        loop.collate = restarted
    try:
        return function(*args)
    finally:
        slices.Slices.held, loop.collate = honest


@pytest.mark.parametrize("fault", ["none", "attention within the slice", "positions from the slice's beginning"])
def test_a_planted_fault_is_seen(matrix, pools, tiny_folder, fault):
    result = pools(2).run(with_fault, train_cell, fault, tiny_folder, "fsdp", "full", "sgd", 2, "fp32", None, SHARED)[0]
    assert within(deviations(result, matrix.expected("full", "sgd"), "sgd"), TOLERANCE) == (fault == "none")


def probed(folder, precision):
    from tonnage.errors import ConfigError

    s = open_tiny(config_for("fsdp", f"precision={precision}", *SHARED), folder)
    try:
        return probes.probe_slices(s.engine, s.slices, 96, precision)
    except ConfigError as error:
        return str(error)
    finally:
        s.engine.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_probe_tells_shared_rows_from_slices_on_their_own(pools, tiny_folder, precision):
    assert all(found < 1e-2 for found in pools(2).run(with_fault, probed, "none", tiny_folder, precision))
    for found in pools(2).run(with_fault, probed, "attention within the slice", tiny_folder, precision):
        assert found.startswith("strategy.sequence_gpus=2: logits of a row"), found


# ---- what a run does besides

def held_out_and_trained(folder, strategy):
    from tonnage.train.evaluate import evaluate

    rows = RaggedRows(5, seed=3)
    s = open_tiny(config_for(strategy, "optimizer.learning_rate=1e-30", "batch.micro_rows=2", *SHARED), folder, rows)
    held_out = evaluate(s.engine, s.head, rows, 5, 2, 0, False, dist.group.WORLD, slices=s.slices)
    whole = evaluate(s.engine, s.head, rows, 5, 2, 0, False, dist.group.WORLD)
    loop.train(s)
    line = s.metrics.lines[0]
    s.engine.close()
    return held_out, whole, line["loss"], line["input_tokens"], line["label_tokens"]


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_held_out_loss_and_counts_are_those_of_whole_rows(pools, tiny_folder, strategy):
    rows = RaggedRows(5, seed=3)
    labels = sum(int((row.labels[1:] != -100).sum()) for row in rows.rows)
    for held_out, whole, trained, input_tokens, label_tokens in pools(2).run(held_out_and_trained, tiny_folder, strategy):
        assert held_out == pytest.approx(whole, rel=1e-5) and trained == pytest.approx(whole, rel=1e-5)
        assert (input_tokens, label_tokens) == (rows.input_tokens.sum(), labels)


def go_on_shared(folder, run_folder, until, sequence_gpus):
    """From the newest checkpoint to step `until`; losses."""
    config = config_for("fsdp", "adapter=full", "train.epochs=2", "optimizer.learning_rate=0.01", "batch.micro_rows=2",
                        f"strategy.sequence_gpus={sequence_gpus}")
    s = open_tiny(config, folder, run_folder=Path(run_folder))
    found = go_on(s, Path(run_folder), until)
    s.engine.close()
    return found


def test_a_run_goes_on_with_rows_shared_by_others(pools, tiny_folder, tmp_path):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    whole.mkdir(), moved.mkdir()
    losses = pools(2).run(go_on_shared, tiny_folder, str(whole), 4, 1)[0]
    found = [loss for until, gpus in ((1, 2), (2, 1), (4, 2))
             for loss in pools(2).run(go_on_shared, tiny_folder, str(moved), until, gpus)[0]]
    assert found == pytest.approx(losses, rel=1e-5) and len(losses) == 4


def attended(shape, value_width, kv_heads, kind):
    """(largest difference of what is attended and of the gradients, relative) of slices and whole rows."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from tonnage.models.slices import Slices, sliced_attention

    slices, (rows, heads, tokens, width) = Slices.over(dist.get_world_size(), 60.0), shape
    torch.manual_seed(0)
    whole = [torch.randn(rows, count, tokens, size, dtype=getattr(torch, kind)) for count, size in (
        (heads, width), (kv_heads, width), (kv_heads, value_width))]
    weight = torch.randn(rows, tokens, heads, value_width, dtype=whole[0].dtype)
    part = slice(slices.number * tokens // slices.count, (slices.number + 1) * tokens // slices.count)
    mine = [one[:, :, part].clone().requires_grad_() for one in whole]
    whole = [one.requires_grad_() for one in whole]
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads)
    expected, _ = sdpa_attention_forward(module, *whole, None, scaling=0.3)
    (expected * weight).sum().backward()
    with slices.held():
        found, _ = sliced_attention(module, *mine, None, scaling=0.3)
        (found * weight[:, part]).sum().backward()
    pairs = [(found, expected[:, part]), *((one.grad, other.grad[:, :, part]) for one, other in zip(mine, whole, strict=True))]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


@pytest.mark.parametrize("world, heads, kv_heads, value_width", [
    (2, 4, 4, 8), (2, 4, 2, 8), (2, 6, 1, 8), (2, 4, 4, 6), (3, 6, 2, 8), (3, 12, 4, 8)])
def test_attention_over_slices_is_attention_over_rows(pools, world, heads, kv_heads, value_width):
    for found in pools(world).run(attended, (2, heads, 6 * world, 8), value_width, kv_heads, "float64"):
        assert found < 1e-12


def test_models_whose_rows_cannot_be_shared_are_refused_before_they_are_built(tmp_path):
    from transformers import LlamaConfig, MistralConfig

    from tonnage.errors import ConfigError
    from tonnage.models.build import read_config
    from tonnage.models.slices import require_sliceable

    folder = make_model(tmp_path)
    require_sliceable(read_config(folder), 2, 128)
    for config, told in ((read_config(folder), "must divide the 4 attention heads of the model; try 1"),
                         (MistralConfig(hidden_size=96, num_attention_heads=6, sliding_window=64), "attends within 64 tokens"),
                         (LlamaConfig(hidden_size=96, num_attention_heads=6, rope_parameters={
                             "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rotary embeddings (dynamic)")):
        with pytest.raises(ConfigError) as error:
            require_sliceable(config, 3, 128)
        assert str(error.value).startswith("strategy.sequence_gpus=3: ") and told in str(error.value)
