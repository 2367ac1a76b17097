"""Checks on the model that is about to be trained, on a few tokens, before the first step."""

import math

import numpy as np
import torch.distributed as dist

from tonnage.data.collate import collate
from tonnage.data.pack import Row
from tonnage.engines.base import Engine, inference
from tonnage.errors import ConfigError, TrainingError
from tonnage.models.slices import Slices
from tonnage.train.loss import LossHead, loss_sum

# relative differences; a leak between packed samples or a head that scales its logits is off by far more: by 1.1 where the
# scales of FP8, which other samples of the row change, make 0.12 (tensorwise) and 0.02 (rowwise)
TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2, "fp8": 0.3}


def _tokens(vocab: int, count: int, start: int) -> np.ndarray:
    return ((np.arange(start, start + count) * 7919) % (vocab - 4) + 2).astype(np.int32)


def _row(tokens, positions=None):
    labels = tokens.copy()
    labels[0] = -100
    return Row(tokens, labels, np.arange(len(tokens), dtype=np.int32) if positions is None else positions)


def probe_packing(engine: Engine, vocab: int, precision: str, attention: str, flat: bool) -> float:
    """Relative difference of a sample's logits alone and behind another in a packed row (collective).

    Raises:
        ConfigError: samples of a row see each other with this attention.
    """
    first, second = _tokens(vocab, 24, 0), _tokens(vocab, 16, 100)
    both = np.concatenate([first, second])
    positions = np.concatenate([np.arange(24), np.arange(16)]).astype(np.int32)
    alone = _logits(engine, collate([_row(second)], 0, flat))[0, -16:]
    packed = _logits(engine, collate([_row(both, positions)], 0, flat))[0, 24:40]
    difference = float((packed - alone).norm() / alone.norm())
    if not difference <= TOLERANCE[precision]:
        raise ConfigError(f"data.packing=true: with model.attention={attention} samples of a row see each other (logits "
                          f"differ by {difference:.2g}); use model.attention=sdpa or data.packing=false")
    return difference


def probe_slices(engine: Engine, slices: Slices, vocab: int, precision: str) -> float:
    """Relative difference of logits of a row that ranks share and of the whole row on each, the largest (collective).

    Raises:
        ConfigError: a layer looks at other tokens by other means than transformers' attention.
    """
    row = _row(_tokens(vocab, max(24, 2 * slices.count), 0))
    batch = collate([row], 0, False, slices.number, slices.count)
    start = slices.number * batch.input_ids_BT.shape[1]
    whole = _logits(engine, collate([row], 0))[:, start:start + batch.num_input_tokens]
    with slices.held():
        shared = _logits(engine, batch)[:, :batch.num_input_tokens]
    # of a rank whose slice holds padding alone nothing is judged
    difference = ((shared - whole).norm() / whole.norm().clamp_min(1e-12)).nan_to_num(math.inf).cpu()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    if not difference <= TOLERANCE[precision]:
        raise ConfigError(f"strategy.sequence_gpus={slices.count}: logits of a row whose tokens are shared differ by "
                          f"{difference:.2g} from those of the whole row, so a layer of this model sees other tokens by "
                          f"other means than transformers' attention; use strategy.sequence_gpus=1")
    return float(difference)


def probe_loss(engine: Engine, head: LossHead, vocab: int, precision: str, flat: bool) -> None:
    """Compare the chunked loss with the plain one on one row (collective).

    Raises:
        ConfigError: the model does something to its logits that the chunked loss does not know of.
    """
    if head.kind != "chunked":
        return
    batch = collate([_row(_tokens(vocab, 24, 0))], 0, flat).to(engine.device)
    with inference(engine.model):
        chunked = float(loss_sum(engine.forward, head, batch))
        head.kind = "plain"
        plain = float(loss_sum(engine.forward, head, batch))
    head.kind = "chunked"
    if not math.isfinite(plain):
        raise ConfigError(f"the model gives a loss of {plain} before training; its weights, adapter.alpha or precision "
                          f"do not go together")
    if not abs(chunked - plain) <= TOLERANCE[precision] * abs(plain):
        raise ConfigError(f"train.loss=chunked: gives {chunked:.5g} where the model's own logits give {plain:.5g}; use "
                          f"train.loss=plain")


def audit_gradients(engine: Engine) -> None:
    """Check after two updates that every adapter tensor has received a gradient (collective).

    Raises:
        TrainingError: names the dead tensors.
    """
    dead = []
    for name, parameter in engine.trained():
        if "lora_" in name:
            states = dict(engine.whole_states(parameter))
            first = states.get("exp_avg", states.get("momentum_buffer"))
            if first is not None and not first.any():
                dead.append(name)
    if dead:
        raise TrainingError(f"{len(dead)} trained tensors have received no gradient in two steps, first {dead[0]}: they "
                            f"do not reach the loss, or training has diverged (optimizer.learning_rate); the run would go "
                            f"on without learning (train.audit=false skips this check)")


def _logits(engine, batch):
    batch = batch.to(engine.device)
    with inference(engine.model):
        logits = engine.forward(input_ids=batch.input_ids_BT, position_ids=batch.position_ids_BT, use_cache=False).logits
    return logits.float()
