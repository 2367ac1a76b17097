"""What every engine must do besides learning the same: resume anywhere, survive NaN, discard, clip, evaluate."""

import json
import math
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import RaggedRows, Recorder, config_for, go_on, make_model, open_tiny, whole_weights

from tonnage.data.pack import Row
from tonnage.train import checkpoint, loop, probes

STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp")
SHARDED = ("zero1", "zero2", "zero3", "fsdp")


def states(engine):
    """Weights and optimizer states by name."""
    found = whole_weights(engine)
    for name, parameter in engine.trained():
        found |= {f"{name}|{key}": value.clone() for key, value in engine.whole_states(parameter)}
    return found


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).norm() / other[key].norm().clamp_min(1e-12)) for key in one)


# ---- resume ------------------------------------------------------------------------------------------------------

def train_from_to(folder, strategy, adapter, micro, run_folder, until, epochs=2, precision="fp32"):
    """Go on from the newest checkpoint in `run_folder` to step `until`, save there; returns (losses, states)."""
    config = config_for(strategy, f"adapter={adapter}", f"batch.micro_rows={micro}", f"train.epochs={epochs}",
                        f"precision={precision}", f"precision.fp8_emulate={str(precision == 'fp8').lower()}",
                        "optimizer.learning_rate=0.01")
    s = open_tiny(config, folder, run_folder=Path(run_folder))
    probes.probe_loss(s.engine, s.head, 96, precision, False)  # as a run does, before weights are filled
    found = go_on(s, Path(run_folder), until), states(s.engine)
    s.engine.close()
    return found


@pytest.mark.parametrize("strategy, adapter, precision", [
    *(pytest.param(*cell, marks=pytest.mark.slow) for cell in [
        ("ddp", "lora", "fp32"), ("zero0", "full", "fp32"), ("zero3", "full", "fp32"), ("fsdp", "full", "bf16"),
        ("zero3", "lora", "fp8"), ("zero1", "full", "bf16")]),
    ("fsdp", "full", "fp8"), ("zero2", "lora", "fp32"), ("zero3", "lora", "bf16"), ("fsdp", "lora", "fp32")])
def test_a_resumed_run_is_byte_equal_at_any_step(pools, tiny_folder, tmp_path, strategy, adapter, precision):
    whole = tmp_path / "whole"
    whole.mkdir()
    _, expected = pools(2).run(train_from_to, tiny_folder, strategy, adapter, 2, str(whole), 6, 2, precision)[0]
    for stop in (1, 2, 3, 5):
        part = tmp_path / f"part-{stop}"
        part.mkdir()
        pools(2).run(train_from_to, tiny_folder, strategy, adapter, 2, str(part), stop, 2, precision)
        _, found = pools(2).run(train_from_to, tiny_folder, strategy, adapter, 2, str(part), 6, 2, precision)[0]
        assert equal(found, expected), f"stopped after step {stop}"


@pytest.mark.parametrize("adapter", ["full", pytest.param("lora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("first, second", [
    (("zero1", 2, 2), ("zero3", 3, 1)), (("zero3", 3, 2), ("fsdp", 2, 4)), (("fsdp", 2, 2), ("ddp", 1, 2)),
    (("ddp", 3, 1), ("zero2", 2, 2)), (("zero2", 2, 1), ("zero0", 1, 4)), (("zero0", 2, 2), ("zero3", 2, 1))])
def test_a_run_goes_on_with_another_engine_layout_and_micro_batch(pools, tiny_folder, tmp_path, adapter, first, second):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    whole.mkdir(), moved.mkdir()
    losses, expected = pools(1).run(train_from_to, tiny_folder, "ddp", adapter, 4, str(whole), 5)[0]
    strategy, world, micro = first
    pools(world).run(train_from_to, tiny_folder, strategy, adapter, micro, str(moved), 2)
    strategy, world, micro = second
    found_losses, found = pools(world).run(train_from_to, tiny_folder, strategy, adapter, micro, str(moved), 5)[0]
    assert found_losses == pytest.approx(losses[2:], rel=1e-5)
    weights = [name for name in expected if "|" not in name]
    assert furthest({name: found[name] for name in weights}, {name: expected[name] for name in weights}) < 1e-4


# ---- non-finite gradients ----------------------------------------------------------------------------------------

def train_with_nan(folder, strategy, precision):
    """Window 2 has a NaN on the last rank's first micro-batch; returns what happened around it."""
    s = open_tiny(config_for(strategy, "adapter=full", f"precision={precision}", "batch.micro_rows=2", "train.epochs=2"), folder)
    seen, honest = {}, s.engine.backward

    def poisoned(loss, last):
        if s.position.step == 1 and dist.get_rank() == dist.get_world_size() - 1 and not seen.get("done"):
            seen["done"], loss = True, loss * math.nan
        honest(loss, last)

    s.engine.backward = poisoned
    before, lines = [], s.metrics.lines
    s.num_steps = 4
    s.last_saved = 4
    for until in (1, 2, 3):
        s.num_steps = until
        s.last_saved = until
        loop.train(s)
        before.append(states(s.engine))
    applied = [line["applied"] for line in lines]
    norms = [line["grad_norm"] for line in lines]
    s.engine.close()
    return applied, norms, equal(before[0], before[1]), all(v.isfinite().all() for v in before[2].values())


@pytest.mark.parametrize("strategy, precision", [(name, "fp32") for name in STRATEGIES] + [
    (name, "bf16") for name in ("ddp", "zero1", "zero2", "zero3", "fsdp")])
def test_a_nan_gradient_never_touches_the_weights(pools, tiny_folder, strategy, precision):
    for applied, norms, untouched, finite in pools(2).run(train_with_nan, tiny_folder, strategy, precision):
        assert applied == [True, False, True]
        assert not math.isfinite(norms[1]) and math.isfinite(norms[2])
        assert untouched and finite


def train_on_nan_only(folder):
    from tonnage.errors import TrainingError

    s = open_tiny(config_for("fsdp", "train.max_nonfinite_steps=2", "train.epochs=2"), folder)
    honest = s.engine.backward
    s.engine.backward = lambda loss, last: honest(loss * math.nan, last)
    try:
        loop.train(s)
    except TrainingError as error:
        return s.position.step, str(error)


def test_the_run_stops_after_a_set_number_of_nonfinite_steps(pools, tiny_folder):
    for step, message in pools(2).run(train_on_nan_only, tiny_folder):
        assert step == 2 and message.startswith("train.max_nonfinite_steps=2")


# ---- discard -----------------------------------------------------------------------------------------------------

def train_discarding(folder, strategy, adapter, thrown):
    """Throw `thrown` micro-batches of window 2 away, then do the window again; returns the final states."""
    from tonnage.data.collate import collate
    from tonnage.data.windows import cut_window
    from tonnage.train.loss import loss_sum

    s = open_tiny(config_for(strategy, f"adapter={adapter}", "batch.micro_rows=1"), folder)
    s.num_steps = s.last_saved = 1
    loop.train(s)
    rows, _ = s.source.next(s.position.cursor)
    micros = cut_window([len(row.tokens) for row in rows], s.world_size, 1)[s.rank]
    for micro in micros[:thrown]:
        batch = collate([rows[i] for i in micro], 0)
        s.engine.backward(loss_sum(s.engine.forward, s.head, batch), last=False)
    if thrown:
        s.engine.discard()
    s.num_steps = s.last_saved = 3
    loop.train(s)
    found = states(s.engine)
    s.engine.close()
    return found


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_discarded_window_leaves_no_trace(pools, tiny_folder, strategy, adapter):
    expected = pools(2).run(train_discarding, tiny_folder, strategy, adapter, 0)[0]
    for thrown in (1, 2):
        assert equal(pools(2).run(train_discarding, tiny_folder, strategy, adapter, thrown)[0], expected)


# ---- clipping, evaluation, checkpointing of activations ------------------------------------------------------------

def one_update(folder, strategy, clip):
    s = open_tiny(config_for(strategy, "adapter=full", "optimizer=sgd", "optimizer.learning_rate=1", "optimizer.momentum=0",
                             f"optimizer.clip_norm={clip}"), folder)
    before = whole_weights(s.engine)
    s.num_steps = s.last_saved = 1
    loop.train(s)
    after = whole_weights(s.engine)
    size = math.sqrt(sum(float(((after[name] - before[name]).double() ** 2).sum()) for name in after))
    norm = s.metrics.lines[0]["grad_norm"]
    s.engine.close()
    return size, norm


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clipping_bounds_the_update_and_none_is_off(pools, tiny_folder, strategy):
    for size, norm in pools(2).run(one_update, tiny_folder, strategy, 0.01):
        assert size == pytest.approx(0.01, rel=1e-3) and norm > 0.02
    for size, norm in pools(2).run(one_update, tiny_folder, strategy, "null"):
        assert size == pytest.approx(norm, rel=1e-3)


def losses_at_rate_zero(folder, strategy):
    from tonnage.train.evaluate import evaluate

    rows = RaggedRows(5, seed=3)
    s = open_tiny(config_for(strategy, "optimizer.learning_rate=1e-30", "batch.micro_rows=2"), folder, rows)
    held_out = evaluate(s.engine, s.head, rows, 5, 2, 0, False, dist.group.WORLD)
    loop.train(s)
    trained = s.metrics.lines[0]["loss"]
    s.engine.close()
    return held_out, trained


@pytest.mark.parametrize("strategy, world", [("ddp", 1), ("zero3", 2), ("fsdp", 3), ("zero1", 3)])
def test_held_out_and_training_loss_agree_on_the_same_rows(pools, tiny_folder, strategy, world):
    for held_out, trained in pools(world).run(losses_at_rate_zero, tiny_folder, strategy):
        assert held_out == pytest.approx(trained, rel=1e-5)


def evaluate_and_stop(folder, strategy):
    """17 rows, one a micro-batch, on two ranks: 9 turns each, the last of rank 1 empty; a stop at each of the questions."""
    from tonnage.train import evaluate as module

    rows, found = RaggedRows(17, seed=3), {}
    s = open_tiny(config_for(strategy, "batch.micro_rows=1"), folder, rows)
    s.eval_rows, s.metrics = rows, Recorder()
    collate, turns = module.collate, []
    module.collate = lambda *args: turns.append(1) or collate(*args)
    try:
        for stop_at in (1, 2, 3):
            asked = []

            def stop(asked=asked, stop_at=stop_at):
                asked.append(1)
                return len(asked) == stop_at

            loss = module.evaluate(s.engine, s.head, rows, 17, 1, 0, False, dist.group.WORLD, stop)
            found[stop_at] = (loss is None, len(turns), len(asked))
            turns.clear()
    finally:
        module.collate = collate
    # one rank is asked to stop, all of them do, and nothing is noted; training goes on as if nothing had been
    s.stop.asked = lambda look: int(s.rank == 1)
    s.evaluate()
    noted = list(s.metrics.lines), s.position.best_metric
    s.stop.asked = lambda look: 0
    s.stopped_by = None
    s.evaluate()
    loop.train(s)
    losses = [line["loss"] for line in s.metrics.lines if "loss" in line]
    s.engine.close()
    return found, noted, losses


def train_ragged(folder, strategy):
    s = open_tiny(config_for(strategy, "batch.micro_rows=1"), folder, RaggedRows(17, seed=3))
    loop.train(s)
    losses = [line["loss"] for line in s.metrics.lines]
    s.engine.close()
    return losses


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_a_stop_request_ends_an_evaluation_at_the_next_micro_batch_on_all_ranks(pools, tiny_folder, strategy):
    expected = pools(2).run(train_ragged, tiny_folder, strategy)[0]
    for found, noted, losses in pools(2).run(evaluate_and_stop, tiny_folder, strategy):
        assert found == {1: (True, 0, 1), 2: (True, 1, 2), 3: (True, 2, 3)}
        assert noted == ([], None) and losses == expected


def train_three(folder, strategy, *overrides, watch=None):
    """(losses, weights) of three windows; and what `watch` gave of the engine before them, a list that they may fill."""
    s = open_tiny(config_for(strategy, "optimizer.learning_rate=0.01", *overrides), folder)
    seen = [] if watch is None else [watch(s.engine)]
    loop.train(s)
    found = [line["loss"] for line in s.metrics.lines], whole_weights(s.engine), *seen
    s.engine.close()
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("adapter", [pytest.param("full", marks=pytest.mark.slow), "lora"])
def test_activation_checkpointing_changes_nothing(pools, tmp_path, strategy, adapter):
    folder = make_model(tmp_path, hidden=128)  # wide enough for selective checkpointing to keep products
    words = (strategy, f"adapter={adapter}", "optimizer.learning_rate=0.001")
    plain = pools(2).run(train_three, folder, *words)[0]
    for how in (["model.activation_checkpointing=full"], ["model.activation_checkpointing=selective"],
                ["model.activation_checkpointing=selective", "model.checkpoint_every_layers=2"]):
        again = pools(2).run(train_three, folder, *words, *how)[0]
        assert again[0] == pytest.approx(plain[0], rel=1e-6), how
        assert furthest(again[1], plain[1]) < 1e-5, how


@pytest.mark.parametrize("how", ["full", "selective"])
def test_weights_gathered_within_a_layer_do_not_upset_checkpointing(pools, tmp_path, how):
    folder = make_model(tmp_path, hidden=128, layers=6)
    few = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 100_000,
           "stage3_prefetch_bucket_size": 40_000}  # for all layers to be gathered anew, some while another computes
    words = ("zero3", "adapter=full", "optimizer.learning_rate=0.001", "batch.micro_rows=1",
             f"strategy.extra={json.dumps({'zero_optimization': few})}".replace('"', ""))
    plain = pools(2).run(train_three, folder, *words)[0]
    again = pools(2).run(train_three, folder, *words, f"model.activation_checkpointing={how}")[0]
    assert again[0] == pytest.approx(plain[0], rel=1e-6)
    assert furthest(again[1], plain[1]) < 1e-5


def second_copies(engine):
    """Which share of the sharded weights this rank holds in a second copy after each forward."""
    sharded, held = [parameter for parameter in engine.model.parameters() if not parameter.ds_persist], []

    def look(*_):
        copies = [parameter.ds_secondary_tensor for parameter in sharded]
        held.append(sum(copy.numel() for copy in copies if copy is not None) / sum(p.ds_numel for p in sharded))

    engine.model.register_forward_hook(look)
    return held


@pytest.mark.parametrize(("adapter", "ranks", "hpz_gpus", "words"), [
    ("lora", 2, 2, ()), pytest.param("full", 2, 2, (), marks=pytest.mark.slow),
    pytest.param("full", 4, 2, (), marks=pytest.mark.slow), pytest.param("qlora", 4, 2, (), marks=pytest.mark.slow),
    # small tensors stay whole, as they do by default
    ("full", 2, 2, ("strategy.extra={zero_optimization: {stage3_param_persistence_threshold: 1000}}",))])
def test_a_second_copy_of_the_weights_changes_nothing(pools, tiny_folder, adapter, ranks, hpz_gpus, words):
    words = ("zero3", f"adapter={adapter}", "batch.micro_rows=1", "model.activation_checkpointing=full", *words)
    train = partial(train_three, watch=second_copies)
    *plain, none = pools(ranks).run(train, tiny_folder, *words)[0]
    *copied, held = pools(ranks).run(train, tiny_folder, *words, f"strategy.hpz_gpus={hpz_gpus}")[0]
    # what is used again before long is not released after forward, and not copied
    assert not any(none) and max(held) == pytest.approx(1 / hpz_gpus, rel=0.05)
    assert copied[0] == pytest.approx(plain[0], rel=1e-6)
    assert furthest(copied[1], plain[1]) < 1e-5
    assert pools(ranks).run(train, tiny_folder, *words)[0][0] == plain[0]  # no copies are left to the next model


class PackedRows(RaggedRows):
    """The same samples, several to a row."""

    fingerprint = "packed"

    def __init__(self):
        super().__init__()
        samples, self.rows = self.rows, []
        for start in range(0, len(samples), 3):
            group = samples[start:start + 3]
            self.rows.append(Row(*(np.concatenate([getattr(one, name) for one in group]) for name in Row._fields)))
        self.input_tokens = np.array([len(row.tokens) for row in self.rows], np.int32)
        self.weights = np.ones(len(self.rows))


def train_packed(folder, strategy, packed, attention):
    """One window of all samples; the updates."""
    rows = PackedRows() if packed else RaggedRows()
    config = config_for(strategy, "adapter=full", "optimizer=sgd", "optimizer.learning_rate=2", "batch.global_rows=16",
                        f"model.attention={attention}", f"data.packing={str(packed).lower()}")
    s = open_tiny(config, folder, rows)
    before = whole_weights(s.engine)
    loop.train(s)
    after = whole_weights(s.engine)
    loss = s.metrics.lines[0]["loss"]
    s.engine.close()
    return loss, {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("strategy, attention", [("ddp", "sdpa"), ("zero3", "sdpa"), ("fsdp", "eager")])
def test_packed_samples_teach_what_they_teach_alone(pools, tiny_folder, strategy, attention):
    loss, updates = pools(2).run(train_packed, tiny_folder, strategy, False, attention)[0]
    packed_loss, packed = pools(2).run(train_packed, tiny_folder, strategy, True, attention)[0]
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    assert furthest(packed, updates) < 1e-4


def probe(folder, leak):
    from tonnage.errors import ConfigError
    from tonnage.train.probes import probe_packing

    s = open_tiny(config_for("ddp", "adapter=full"), folder)
    if leak:  # a kernel that does not take borders from positions
        forward = s.engine.forward
        s.engine.forward = lambda position_ids, **inputs: forward(
            position_ids=torch.arange(position_ids.shape[1])[None], **inputs)
    try:
        return probe_packing(s.engine, 96, "fp32", "sdpa", False)
    except ConfigError as error:
        return str(error)
    finally:
        s.engine.close()


def test_the_probe_tells_isolated_samples_from_leaking_ones(pools, tiny_folder):
    assert pools(1).run(probe, tiny_folder, False)[0] < 1e-5
    assert pools(1).run(probe, tiny_folder, True)[0].startswith("data.packing=true: with model.attention=sdpa")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_compiled_layers_learn_the_same(pools, tmp_path, strategy, checkpointing):
    folder, words = make_model(tmp_path, hidden=128), (strategy, "adapter=lora", "optimizer.learning_rate=0.001")
    losses, weights = pools(2).run(train_three, folder, *words)[0]
    found_losses, found = pools(2).run(train_three, folder, *words, "model.compile=true",
                                       f"model.activation_checkpointing={checkpointing}")[0]
    assert found_losses == pytest.approx(losses, rel=1e-4)
    assert furthest(found, weights) < 1e-3


@pytest.mark.parametrize("adapter", ["dora", "rslora"])
def test_other_adapters_do_not_depend_on_the_layout(pools, tiny_folder, adapter):
    losses, weights = pools(1).run(train_three, tiny_folder, "ddp", f"adapter={adapter}")[0]
    for strategy in ("zero3", "fsdp"):
        found_losses, found = pools(2).run(train_three, tiny_folder, strategy, f"adapter={adapter}")[0]
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert furthest(found, weights) < 1e-4


@pytest.mark.parametrize("strategy, loss", [("zero3", "plain"), ("fsdp", "plain")])
def test_plain_and_chunked_loss_train_alike(pools, tiny_folder, strategy, loss):
    chunked = pools(2).run(train_three, tiny_folder, strategy, "adapter=full")[0]
    plain = pools(2).run(train_three, tiny_folder, strategy, "adapter=full", f"train.loss={loss}")[0]
    assert furthest(plain[1], chunked[1]) < 1e-4


def test_hsdp_on_four_ranks(pools, tiny_folder):
    losses, weights = pools(1).run(train_three, tiny_folder, "ddp", "adapter=full")[0]
    for found_losses, found in pools(4).run(train_three, tiny_folder, "hsdp", "adapter=full", "batch.micro_rows=1"):
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert furthest(found, weights) < 1e-4


def timeouts_of_groups(folder, strategy):
    s = open_tiny(config_for(strategy, "adapter=full", "cluster.timeout_s=77"), folder)
    # not by a parameter's device_mesh: torch keeps an equal mesh of an earlier engine of this process
    info = s.engine.model._get_fsdp_state()._fsdp_param_groups[0].mesh_info
    groups = [getattr(info, name) for name in ("shard_process_group", "replicate_process_group") if hasattr(info, name)]
    found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    dist.group.WORLD.set_timeout(timedelta(seconds=120))  # as the pool made it
    s.engine.close()
    return found


@pytest.mark.parametrize("strategy, world", [("hsdp", 4), ("fsdp", 2), ("ddp", 2)])
def test_every_group_of_a_mesh_has_the_time_out_of_the_config(pools, tiny_folder, strategy, world):
    for found in pools(world).run(timeouts_of_groups, tiny_folder, strategy):
        assert set(found) == {77.0}


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offload_to_host_memory_learns_the_same(pools, tiny_folder, strategy, offload):
    if offload == "all" and strategy != "zero3":
        return
    losses, weights = pools(1).run(train_three, tiny_folder, "ddp", "adapter=full")[0]
    found_losses, found = pools(2).run(train_three, tiny_folder, strategy, "adapter=full", f"strategy.offload={offload}")[0]
    assert found_losses == pytest.approx(losses, rel=1e-5)
    assert furthest(found, weights) < 1e-4


def train_8bit(folder, strategy, run_folder, until, *overrides, compiled=False):
    """As train_from_to, with 8-bit states; torchao compiles its step, which takes longer than these runs.

    Returns (losses, weights and states, bytes per element of the optimizer states on this rank).
    """
    config = config_for(strategy, "adapter=full", "optimizer=adamw8bit", "optimizer.learning_rate=0.001",
                        "train.epochs=2", *overrides)
    s = open_tiny(config, folder, run_folder=Path(run_folder))
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        losses = go_on(s, Path(run_folder), until)
    optimizer = getattr(s.engine, "torch_optimizer", s.engine.optimizer)
    held = [local(value) for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    size = sum(value.codes.nbytes + value.scale.nbytes if hasattr(value, "codes") else value.nbytes for value in held)
    found = losses, states(s.engine), size / sum(value.numel() for value in held)
    s.engine.close()
    return found


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def pinned(folder, strategy, offload):
    """Bytes a trained parameter that DeepSpeed asks to pin by the end of a run; one by one freed before it ends are twice."""
    from deepspeed.accelerator import get_accelerator

    kind, sizes = type(get_accelerator()), []
    before, kind.pin_memory = kind.pin_memory, lambda self, tensor, *_, **__: sizes.append(tensor.nbytes) or tensor
    try:
        config = config_for(strategy, "adapter=full", "precision=bf16", f"strategy.offload={offload}")
        s = open_tiny(config, folder)
        loop.train(s)
        size = sum(getattr(parameter, "ds_numel", parameter.numel()) for _, parameter in s.engine.trained())
        s.engine.close()
    finally:
        kind.pin_memory = before
    return sum(sizes) / size


@pytest.mark.parametrize("strategy, offload, per_parameter", [
    ("zero1", "optimizer", 4 + 4 + 2), ("zero2", "optimizer", 4 + 4 + 2), ("zero3", "optimizer", 4 + 4),
    ("zero3", "all", 4 + 4 + 2 + 2)])
def test_deepspeed_pins_what_the_plan_of_the_host_counts(pools, tmp_path, strategy, offload, per_parameter):
    folder = make_model(tmp_path, hidden=256, layers=4)  # large beside a buffer of a tensor
    assert pools(1).run(pinned, folder, strategy, offload)[0] == pytest.approx(per_parameter, rel=0.1)


@pytest.mark.parametrize("strategy, overrides", [
    ("zero2", ("precision=bf16",)), ("fsdp", ()),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("ddp", ()), ("zero0", ()), ("zero1", ()), ("zero2", ("strategy.offload=optimizer",)), ("zero3", ()),
        ("zero3", ("strategy.offload=optimizer",)), ("zero3", ("strategy.offload=all", "precision=bf16"))))], ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain")
def test_eight_bit_states_follow_adamw_and_a_resumed_run_is_byte_equal(pools, wide_folder, tmp_path, strategy, overrides):
    whole = tmp_path / "whole"
    whole.mkdir()
    exact, _ = pools(2).run(train_three, wide_folder, strategy, "adapter=full", "train.epochs=2",
                            "optimizer.learning_rate=0.001", *overrides)[0]
    outcomes = pools(2).run(train_8bit, wide_folder, strategy, str(whole), 6, *overrides)
    losses, expected, _ = outcomes[0]
    assert losses == pytest.approx(exact, rel=1e-2)
    # a byte each and an fp32 scale for 256 of them; torchao leaves shards of under 4,096 elements in fp32, a tenth here
    assert all(size < 1.4 for *_, size in outcomes)
    for stop in (1, 3):
        part = tmp_path / f"part-{stop}"
        part.mkdir()
        pools(2).run(train_8bit, wide_folder, strategy, str(part), stop, *overrides)
        _, found, _ = pools(2).run(train_8bit, wide_folder, strategy, str(part), 6, *overrides)[0]
        assert equal(found, expected), f"stopped after step {stop}"


def train_8bit_compiled(folder, strategy, run_folder, until):
    return train_8bit(folder, strategy, run_folder, until, compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_the_compiled_eight_bit_step_does_the_same_and_resumes_byte_equal(pools, wide_folder, tmp_path, strategy):
    folders = [tmp_path / name for name in ("eager", "whole", "part")]
    for folder in folders:
        folder.mkdir()
    eager, whole, part = map(str, folders)
    losses, *_ = pools(2).run(train_8bit, wide_folder, strategy, eager, 6)[0]
    found, expected, _ = pools(2).run(train_8bit_compiled, wide_folder, strategy, whole, 6, timeout_s=900)[0]
    assert found == pytest.approx(losses, rel=1e-3)
    pools(2).run(train_8bit_compiled, wide_folder, strategy, part, 3)
    assert equal(pools(2).run(train_8bit_compiled, wide_folder, strategy, part, 6)[0][1], expected)


# ---- fp16 ----------------------------------------------------------------------------------------------------------

def train_fp16(folder, strategy):
    s = open_tiny(config_for(strategy, "precision=fp16", "adapter=lora", "train.epochs=6"), folder)
    loop.train(s)
    lines = s.metrics.lines
    dtypes = {tensor.dtype for tensor in whole_weights(s.engine).values()}
    s.engine.close()
    return [line["applied"] for line in lines], [line["loss"] for line in lines], dtypes


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_fp16_scales_the_loss_and_skips_overflows(pools, tiny_folder, strategy):
    for applied, losses, dtypes in pools(2).run(train_fp16, tiny_folder, strategy):
        assert applied[-6:] == [True] * 6  # the scale has come down to where nothing overflows
        assert all(map(math.isfinite, losses)) and dtypes == {torch.float32}


# ---- sharding really happens, ranks differ where they should ---------------------------------------------------------

def held_sizes(folder, strategy):
    s = open_tiny(config_for(strategy, "adapter=lora"), folder)
    held = 0
    for parameter in s.engine.model.parameters():
        if hasattr(parameter, "ds_tensor"):
            assert parameter.numel() == 0
            held += parameter.ds_tensor.numel()
        else:
            held += parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel()
    whole = sum(math.prod(getattr(p, "ds_shape", p.shape)) for p in s.engine.model.parameters())
    s.engine.close()
    return held, whole


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_each_rank_holds_its_part_of_frozen_weights_too(pools, tiny_folder, strategy):
    for held, whole in pools(2).run(held_sizes, tiny_folder, strategy):
        assert 0.45 < held / whole < 0.6


def first_draws(folder):
    s = open_tiny(config_for("ddp", "adapter=lora"), folder)
    loop.seed_window(0, 1, s.rank)
    draw = torch.rand(4)
    loop.seed_window(0, 1, s.rank)
    again = torch.rand(4)
    start = whole_weights(s.engine)
    s.engine.close()
    return draw, again, start


def test_dropout_differs_between_ranks_and_adapters_start_equal(pools, tiny_folder):
    (one, again, start), (other, _, other_start) = pools(2).run(first_draws, tiny_folder)
    assert not torch.equal(one, other) and torch.equal(one, again)
    assert equal(start, other_start) and all(t.abs().sum() > 0 for n, t in start.items() if "lora_A" in n)


# ---- checkpoints ------------------------------------------------------------------------------------------------------

def save_lora(folder, strategy, run_folder):
    s = open_tiny(config_for(strategy, "adapter=lora"), folder, run_folder=Path(run_folder))
    s.num_steps = s.last_saved = 2
    loop.train(s)
    gathered, honest = [], s.engine.whole

    def counted(parameter):
        tensor = honest(parameter)
        gathered.append(tensor.numel())
        return tensor

    s.engine.whole = counted
    path = checkpoint.save(Path(run_folder), s.engine, s.position, "tiny", s.source.state(), dist.group.WORLD)
    num_gathered = sum(gathered)
    found = whole_weights(s.engine)
    s.engine.close()
    return str(path), num_gathered, found


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_saved_adapter_is_whole_and_nothing_frozen_is_gathered(pools, tiny_folder, tmp_path, strategy):
    path, gathered, found = pools(2).run(save_lora, tiny_folder, strategy, str(tmp_path))[0]
    stored = checkpoint.StoredTensors(Path(path))
    assert set(stored.names()) == set(found)
    assert all(torch.equal(stored[name], found[name]) for name in found)
    assert gathered == sum(tensor.numel() for tensor in found.values())
