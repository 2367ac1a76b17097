"""The equivalence matrix: what is learned does not depend on ranks, micro-batch, strategy.

    python tests/dist/equivalence.py            every cell, and the planted faults
    python tests/dist/equivalence.py --quick    the readable subset of `make test`

Each cell trains three windows (7, 7 and a short one of 2 rows; ragged lengths, random masks, clipping on) with the real
loop and engine in fp32, with SGD and momentum and with AdamW, and is compared with a reference written by hand in
plain torch: row by row, sum of token losses / label tokens of the window. Shown is the largest relative deviation:
of the losses, of the gradient norms, and per tensor of the update w_after - w_before (norm of the difference / norm).
"""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from pool import Pool  # noqa: E402
from tiny import GLOBAL_ROWS, RaggedRows, config_for, make_model, open_tiny, whole_weights  # noqa: E402

from tonnage.data.windows import Cursor, Windows, cut_window, epoch_order  # noqa: E402

STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp")
# updates large against the rounding of w_after - w_before, small enough not to amplify differences
RATES = {"sgd": 2.0, "adamw": 0.01}
# relative; AdamW divides by the gradient's own size, which amplifies the noise of gradients near zero
TOLERANCE = {"loss": 1e-5, "norm": 1e-5, "sgd": 1e-5, "adamw": 1e-4}
# bf16 against the fp32 reference; updates are not judged there
BF16_TOLERANCE = {"loss": 5e-3, "norm": 5e-2}
FAULTS = ("mean of means", "dropped last window", "wrong world factor")


def reference(folder: str, adapter: str, optimizer: str) -> dict:
    """Three windows in plain torch: losses, gradient norms, updates by name."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tonnage.models.load import kaiming_by_name

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter == "lora":
        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules=layers, task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if ".lora_A." in name:
                parameter.data = kaiming_by_name(name, 0, parameter.shape)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    make = {"sgd": lambda: torch.optim.SGD(trained.values(), lr=RATES["sgd"], momentum=0.9),
            "adamw": lambda: torch.optim.AdamW(trained.values(), lr=RATES["adamw"], betas=(0.9, 0.95), weight_decay=0.0)}
    step_with = make[optimizer]()
    rows = RaggedRows()
    order = epoch_order(rows.fingerprint, 0, 0, rows.weights)
    losses, norms = [], []
    for start in range(0, len(order), GLOBAL_ROWS):
        window = [rows[int(i)] for i in order[start:start + GLOBAL_ROWS]]
        count = sum(int((row.labels[1:] != -100).sum()) for row in window)
        total = 0.0
        for row in window:
            logits = model(input_ids=torch.tensor(row.tokens[None].astype("int64"))).logits[0, :-1]
            labels = torch.tensor(row.labels[1:].astype("int64"))
            loss = -torch.log_softmax(logits, -1)[labels != -100].gather(1, labels[labels != -100][:, None]).sum()
            (loss / count).backward()
            total += loss.item()
        norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in trained.values()))
        for p in trained.values():
            p.grad *= min(1.0, 0.5 / float(norm))
        step_with.step()
        step_with.zero_grad()
        losses.append(total / count)
        norms.append(float(norm))
    return {"losses": losses, "norms": norms, "updates": {n: p.detach() - before[n] for n, p in trained.items()}}


def train_cell(folder, strategy, adapter, optimizer, micro, precision="fp32", fault=None, overrides=()) -> dict:
    """The same by the real loop, on one rank of the pool."""
    from tonnage.train import loop

    config = config_for(strategy, f"adapter={adapter}", f"optimizer={optimizer}", f"precision={precision}",
                        f"optimizer.learning_rate={RATES[optimizer]}", f"batch.micro_rows={micro}", *overrides)
    s = open_tiny(config, folder)
    undo = plant(s, fault) if fault else lambda: None
    try:
        before = whole_weights(s.engine)
        loop.train(s)
        after = whole_weights(s.engine)
    finally:
        undo()
    result = {"losses": [line["loss"] for line in s.metrics.lines], "norms": [line["grad_norm"] for line in s.metrics.lines],
              "updates": {name: after[name] - before[name] for name in after}}
    s.engine.close()
    return result


def plant(s, fault):
    """Make a fault that is common elsewhere; returns how to undo it."""
    from tonnage.train import loop

    if fault == "wrong world factor":
        backward = s.engine.backward
        s.engine.backward = lambda loss, last: backward(loss / s.world_size, last)
        return lambda: None
    if fault == "dropped last window":
        s.num_steps -= 1
        s.last_saved = s.num_steps
        return lambda: None
    honest = loop.loss_sum
    windows = Windows(s.source.rows.fingerprint, 0, s.source.rows.input_tokens, s.source.rows.weights, GLOBAL_ROWS)

    def averaged(forward, head, batch):
        numbers, _ = windows.next(Cursor(row=s.position.cursor.row))
        micros = cut_window([s.source.rows.input_tokens[i] for i in numbers], s.world_size, s.cut.micro_rows)
        per_micro = s.source.rows.label_tokens[numbers].sum() / sum(bool(micro) for rank in micros for micro in rank)
        return honest(forward, head, batch) * float(per_micro) / max(1, batch.num_label_tokens)

    loop.loss_sum = averaged
    return lambda: setattr(loop, "loss_sum", honest)


def deviations(result: dict, expected: dict, optimizer: str) -> dict[str, float]:
    """Largest relative deviation of losses, norms and updates; infinite where steps are missing."""
    if len(result["losses"]) != len(expected["losses"]):
        return {"loss": float("inf"), "norm": float("inf"), optimizer: _update_deviation(result, expected)}
    pairs = {"loss": zip(result["losses"], expected["losses"], strict=True),
             "norm": zip(result["norms"], expected["norms"], strict=True)}
    worst = {name: max(abs(a - b) / abs(b) for a, b in values) for name, values in pairs.items()}
    return worst | {optimizer: _update_deviation(result, expected)}


def _update_deviation(result, expected):
    assert result["updates"].keys() == expected["updates"].keys()
    return max(float((result["updates"][name] - update).norm() / update.norm())
               for name, update in expected["updates"].items())


def within(worst: dict[str, float], tolerance: dict[str, float]) -> bool:
    return all(worst[name] <= tolerance[name] for name in worst if name in tolerance)


class Matrix:
    """Runs cells, keeps references, prints one line a cell."""

    def __init__(self, folder: str, pools: dict[int, Pool]):
        self.folder, self.pools, self.references, self.failed = folder, pools, {}, []

    def expected(self, adapter: str, optimizer: str) -> dict:
        if (adapter, optimizer) not in self.references:
            self.references[adapter, optimizer] = reference(self.folder, adapter, optimizer)
        return self.references[adapter, optimizer]

    def cell(self, world: int, strategy: str, adapter: str, micro: int, precision: str = "fp32", fault: str | None = None,
             optimizers=("sgd", "adamw"), overrides=()) -> dict[str, float]:
        """Deviations of one cell, over all its optimizers."""
        worst = {}
        for optimizer in optimizers:
            ranks = self.pools[world].run(train_cell, self.folder, strategy, adapter, optimizer, micro, precision,
                                          fault, overrides)
            for result in ranks:
                for name, value in deviations(result, self.expected(adapter, optimizer), optimizer).items():
                    worst[name] = max(worst.get(name, 0.0), value)
        return worst

    def show(self, label: str, worst: dict[str, float], tolerance: dict[str, float], want: bool = True) -> None:
        """Print a cell; `want` is what `within` should say."""
        good = within(worst, tolerance) == want
        if not good:
            self.failed.append(label)
        figures = "  ".join(f"{name} {value:8.1e}" for name, value in worst.items())
        print(f"{label:<44} {figures}  {'ok' if good else 'NOT AS IT SHOULD BE'}", flush=True)


def cells(quick: bool):
    """(world, strategy, adapter, micro) of the matrix."""
    if quick:
        return [(2, strategy, adapter, 2) for strategy in STRATEGIES for adapter in ("full", "lora")] + [
            (3, "zero3", "full", 1), (3, "fsdp", "lora", 1), (1, "ddp", "full", 4)]
    every = itertools.product((1, 2, 3), STRATEGIES, ("full", "lora"), (1, 2, 4))
    return list(every) + [(4, "hsdp", adapter, micro) for adapter in ("full", "lora") for micro in (1, 2, 4)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    started = time.monotonic()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        todo = cells(quick)
        pools = {world: Pool(world) for world in sorted({world for world, *_ in todo} | {2})}
        matrix = Matrix(make_model(Path(folder)), pools)
        current = None
        for world, strategy, adapter, micro in todo:
            if current not in (None, world):
                pools[current].close()
            current = world
            worst = matrix.cell(world, strategy, adapter, micro)
            matrix.show(f"{world} ranks  {strategy:<6} {adapter:<5} micro {micro}", worst, TOLERANCE)
        print("bf16 against the fp32 reference")
        for strategy, adapter in itertools.product([s for s in STRATEGIES if s != "zero0"], ("full", "lora")):
            worst = matrix.cell(2, strategy, adapter, 2, "bf16", optimizers=("sgd",))
            matrix.show(f"2 ranks  {strategy:<6} {adapter:<5} micro 2 bf16", worst, BF16_TOLERANCE)
        print("planted faults: these must be seen")
        for fault in FAULTS:
            for strategy in ("zero2", "fsdp"):
                worst = matrix.cell(2, strategy, "full", 2, fault=fault)
                matrix.show(f"2 ranks  {strategy:<6} full  {fault}", worst, TOLERANCE, want=False)
        for pool in pools.values():
            pool.close()
    print(f"{len(matrix.failed)} cells not as they should be, in {time.monotonic() - started:.0f} s")
    return 1 if matrix.failed else 0


if __name__ == "__main__":
    sys.exit(main())
