"""Host memory while weights are loaded: a Llama of about 3 GiB in several shards, by the real engines on two ranks.

    python benchmarks/loading.py [--layers 28] [--strategies fsdp,zero3] [--bases none,nf4]

The checkpoint has random weights, is made in a temporary folder and removed. Each case runs in processes of its own: the
engine builds, shards, loads and wraps the model with LoRA. Per rank: what the process holds of its own (anonymous pages;
mapped files can be dropped and do not count) above what it held before, at its largest and at the end, beside the bytes of
the parameters it keeps. The bound, `LIMIT_GIB`, is on the largest above these; exit code 1 where it is broken.
"""

import argparse
import multiprocessing as mp
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from tonnage.runtime.logs import quiet_libraries

GIB = 2**30
LIMIT_GIB = 0.5  # above what the rank keeps
NUM_RANKS, SAMPLE_S = 2, 0.02
LLAMA = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
         "num_key_value_heads": 32, "max_position_embeddings": 2048, "tie_word_embeddings": False}
SHARD_BYTES = 600 << 20


def make_checkpoint(folder: Path, num_layers: int) -> tuple[float, int]:
    """Write it tensor by tensor, never whole; (GiB, number of shards)."""
    import json

    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=num_layers, **LLAMA)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator, files, total = torch.Generator().manual_seed(0), {}, 0
    pending = {}
    for name, shape in shapes.items():
        pending[name] = torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05, generator=generator)
        if sum(one.nbytes for one in pending.values()) >= SHARD_BYTES or len(files) + len(pending) == len(shapes):
            file = f"model-{len(set(files.values())):05d}.safetensors"
            save_file(pending, folder / file, {"format": "pt"})
            total += sum(one.nbytes for one in pending.values())
            files |= dict.fromkeys(pending, file)
            pending = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return total / GIB, len(set(files.values()))


def own_bytes() -> int:
    """Anonymous memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


class Peak:
    """The largest `own_bytes` while the block runs, sampled by a thread."""

    def __enter__(self):
        self.bytes, self._over = own_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self):
        while not self._over.wait(SAMPLE_S):
            self.bytes = max(self.bytes, own_bytes())

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def kept_bytes(model) -> int:
    """Bytes of this rank's parts of all parameters."""
    parts = [getattr(one, "ds_tensor", getattr(one, "_local_tensor", one)) for one in model.parameters()]
    return sum(part.nbytes for part in parts)


def rank_main(rank: int, folder: str, strategy: str, base: str, store_port: int, results) -> None:
    """Load on one rank; puts (rank, kept, largest, at the end, seconds), bytes above those before."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(store_port), "GLOO_SOCKET_IFNAME": "lo"}
    quiet_libraries()
    import torch
    import torch.distributed as dist

    from tonnage.config.compose import compose_config
    from tonnage.config.rules import resolve_layout
    from tonnage.train.session import engine_parts, make_engine

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    config = compose_config(["model=custom", f"model.path={folder}", f"strategy={strategy}", "adapter=lora",
                             f"adapter.quantise={base}", "precision=bf16", f"gpus={NUM_RANKS}", "device=cpu"])
    layout = resolve_layout(config, NUM_RANKS, "cpu", NUM_RANKS, under_deepspeed=False)
    engine = make_engine(config, layout.strategy, layout.gpus_per_node, layout.cut, torch.device("cpu"))
    if base != "none":
        import bitsandbytes  # noqa: F401 - its own memory is not that of weights
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    dist.barrier()
    before, started = own_bytes(), time.perf_counter()
    with Peak() as peak:
        engine.prepare(engine_parts(config, folder, "sdpa"))
    results.put((rank, kept_bytes(engine.model), peak.bytes - before, own_bytes() - before, time.perf_counter() - started))
    results.close()
    results.join_thread()
    dist.barrier()
    os._exit(0)  # nothing is to be saved; some libraries wait long at exit


def measure(folder: str, strategy: str, base: str) -> list[tuple]:
    """What each rank says, in order."""
    import torch.distributed as dist

    context = mp.get_context("spawn")
    store, results = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, folder, strategy, base, store.port, results))
             for rank in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError(f"{strategy}, {base}: a rank failed")
    return sorted(results.get() for _ in ranks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--strategies", default="fsdp,zero3")
    parser.add_argument("--bases", default="none,nf4")
    args = parser.parse_args()
    quiet_libraries()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        size_gib, num_shards = make_checkpoint(Path(folder), args.layers)
        print(f"a Llama of {size_gib:.2f} GiB in bf16, {num_shards} shards; {NUM_RANKS} ranks, LoRA; GiB above the start")
        print("| strategy | adapter.quantise | rank | it keeps | largest | above them | at the end | seconds |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for strategy in args.strategies.split(","):
            for base in args.bases.split(","):
                for rank, kept, largest, end, seconds in measure(folder, strategy, base):
                    worst = max(worst, (largest - kept) / GIB)
                    print(f"| {strategy} | {base} | {rank} | {kept / GIB:.2f} | {largest / GIB:.2f} | "
                          f"{(largest - kept) / GIB:.2f} | {end / GIB:.2f} | {seconds:.0f} |", flush=True)
    holds = worst < LIMIT_GIB
    print(f"bound: at most {LIMIT_GIB} GiB above what a rank keeps: {'it holds' if holds else 'MISSED'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
