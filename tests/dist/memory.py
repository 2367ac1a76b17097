"""Every allocation of a real window: peaks per phase and category on rank 0, for each engine and adapter, over gloo.

    python tests/dist/memory.py [strategies=ddp,zero1,zero2,zero3,fsdp] [adapters=full,lora] [ranks=1,2] [key=value ...]

What the traced and the closed form are held against. Numbers are bytes of tensors, as JSON lines with --json.
"""

import gc
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from pool import Pool

from tonnage.config.compose import compose_config
from tonnage.config.rules import resolve_layout
from tonnage.models.slices import Slices
from tonnage.runtime.logs import quiet_libraries
from tonnage.trace.tracker import PHASES, Tracker
from tonnage.trace.window import book_fsdp, full_batch, loss_phase, tracked_window
from tonnage.train.loss import LossHead
from tonnage.train.session import engine_parts, make_engine

SEQ_TOKENS, MICRO_ROWS = 256, 2
# DeepSpeed 0.19.8: what its optimizers hold, by attribute
HELD = {"bit16_groups_flat": "weights", "bf16_groups_flat": "weights", "fp16_partitioned_groups_flat": "weights",
        "single_partition_of_fp32_groups": "master weights", "fp32_groups_flat_partition": "master weights",
        "fp32_partitioned_groups_flat": "master weights", "averaged_gradients": "gradients",
        "all_grad_tensors": "gradients", "fp32_groups_gradients_flat": "gradients", "grads_in_partition": "gradients",
        "grad_partitions_flat_buffer": "gradients", "ipg_buckets": "communication"}


def make_folder(folder: Path, num_layers: int = 6) -> str:
    """A Llama of realistic proportions with random weights.

    In fp16, which no run trains in: so every weight is converted as it is loaded. Else it would be a piece of the mapped
    file, and the whole file its storage.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=2048, hidden_size=256, intermediate_size=688, num_hidden_layers=num_layers,
                         num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024)
    LlamaForCausalLM(config).half().save_pretrained(folder)
    return str(folder)


def config_for(strategy: str, adapter: str, folder: str, ranks: int, overrides=()):
    """Two micro-batches a step.

    DeepSpeed's limits are 1/1000 of its defaults, as the model is of a 7B one; under ZeRO-3 tiny parameters are
    partitioned too.
    """
    fixed = [f"strategy={strategy}", f"adapter={adapter}", "model=custom", f"model.path={folder}", f"gpus={ranks}",
             f"data.seq_tokens={SEQ_TOKENS}", f"batch.micro_rows={MICRO_ROWS}", "accumulation=2"]
    if strategy.startswith("zero"):
        keys = "reduce_bucket_size: 500000, allgather_bucket_size: 500000"
        if strategy == "zero3":
            keys += (", stage3_param_persistence_threshold: 0, stage3_prefetch_bucket_size: 50000, sub_group_size: 1000000"
                     ", stage3_max_live_parameters: 1000000, stage3_max_reuse_distance: 1000000")
        fixed.append(f"strategy.extra={{zero_optimization: {{{keys}}}}}")
    return compose_config([*fixed, *overrides])


def measure(strategy: str, adapter: str, folder: str, overrides=()) -> dict:
    """On each rank of a pool: the second window of a real engine under the tracker."""
    ranks = dist.get_world_size()
    config = config_for(strategy, adapter, folder, ranks, overrides)
    layout = resolve_layout(config, ranks, "cpu", ranks, under_deepspeed=False)
    gc.collect()
    before = _storages()  # held, so that no address is used again
    engine = make_engine(config, layout.strategy, layout.gpus_per_node, layout.cut, torch.device("cpu"))
    engine.prepare(engine_parts(config, folder, "sdpa"))
    head = LossHead(engine.model, config.train.loss, config.train.loss_chunk_tokens)
    slices = Slices.over(layout.sequence_gpus, config.cluster.timeout_s)
    batches = [full_batch(layout.cut.micro_rows, -(-config.data.seq_tokens // slices.count)) for _ in range(2)]
    tracker = Tracker()

    def note(_=None):
        book_deepspeed(tracker, engine) if strategy.startswith("zero") else book_fsdp(tracker, engine)

    if strategy == "zero3":
        for module in engine.model.modules():
            module.register_forward_pre_hook(lambda module, _: tracker.book_all(
                (p.data for p in module.parameters(recurse=False)), "gathered weights"))
    gc.collect()
    with tracker, loss_phase(tracker, head), slices.held():
        for tensor in _tensors():
            if tensor.untyped_storage()._cdata not in before:
                tracker.book(tensor)
        note()
        for _ in (1, 2):
            tracker.start()
            tracked_window(tracker, engine, head, batches, 1e-3, 1e-4, note)
    peaks = {phase: asdict(tracker.peak(phase)) for phase in PHASES}
    engine.close()
    return peaks


def book_deepspeed(tracker: Tracker, engine) -> None:
    """Book what a DeepSpeed engine holds, each as what it is."""
    optimizer = engine.optimizer
    for parameter in engine.model.parameters():
        gathered = getattr(parameter, "ds_tensor", None) is not None
        tracker.book(parameter.data, "gathered weights" if gathered else "weights")
        tracker.book_all([getattr(parameter, "ds_tensor", None)], "weights")
        tracker.book_all([parameter.grad], "gradients")
    tracker.book_all(engine.model.buffers(), "weights")
    for name, category in HELD.items():
        tracker.book_all(_inside(getattr(optimizer, name, None)), category)
    tracker.book_all((value for states in engine.torch_optimizer.state.values() for value in states.values()
                      if torch.is_tensor(value)), "optimizer states")


def _inside(value):
    """All tensors in nested lists, dicts and plain objects."""
    if torch.is_tensor(value):
        yield value
        if value.grad is not None:
            yield value.grad
    elif isinstance(value, dict):
        for one in value.values():
            yield from _inside(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _inside(one)
    elif "IPGBucket" in type(value).__name__:
        yield from _inside(vars(value).get("buffer"))


def _tensors():
    return [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.device.type == "cpu"]


def _storages():
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in _tensors()}


def main(argv: list[str]) -> int:
    options = {"strategies": "ddp,fsdp,zero1,zero2,zero3", "adapters": "full,lora", "ranks": "1,2"}
    overrides = []
    for word in argv:
        name, _, value = word.partition("=")
        if name in options:
            options[name] = value
        elif word != "--json":
            overrides.append(word)
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder))
        for ranks in map(int, options["ranks"].split(",")):
            pool = Pool(ranks)
            for strategy in options["strategies"].split(","):
                for adapter in options["adapters"].split(","):
                    phases = pool.run(measure, strategy, adapter, folder, tuple(overrides))[0]
                    _show({"strategy": strategy, "adapter": adapter, "ranks": ranks, "phases": phases}, "--json" in argv)
            pool.close()
    return 0


def _show(row, as_json):
    if as_json:
        print(json.dumps(row), flush=True)
        return
    print(f"{row['strategy']} {row['adapter']} {row['ranks']} ranks, MiB")
    for phase, peak in row["phases"].items():
        parts = "  ".join(f"{name} {size / 2**20:.3f}" for name, size in peak["by_category"].items() if size)
        print(f"  {phase:9} total {peak['total'] / 2**20:.3f}  {parts}")
        for category, maker, size, count in peak["largest"][:6]:
            print(f"      {category}: {count} x {size / 2**20:.3f} of {maker}", flush=True)


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(main(sys.argv[1:]))
