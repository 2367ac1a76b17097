"""Token-weighted held-out loss, and answers to a few prompts, safe on any engine and with uneven ranks."""

import torch
import torch.distributed as dist

from tonnage.data.collate import collate
from tonnage.data.windows import cut_window
from tonnage.engines.base import Engine, inference
from tonnage.models.slices import WHOLE, Slices
from tonnage.runtime.watchdog import beat
from tonnage.train.loss import LossHead, loss_sum


def evaluate(engine: Engine, head: LossHead, rows, num_rows: int, micro_rows: int, pad_token: int, flat: bool,
             group: dist.ProcessGroup, stop=lambda: False, slices: Slices = WHOLE) -> float | None:
    """Sum of token losses / number of label tokens over the first `num_rows` of `rows` (collective).

    Ranks take equal shares to within a row; a rank without rows runs empty micro-batches. Only sums are kept.

    Args:
        stop: asked before each micro-batch, agreed by all ranks; True ends it with None.
        slices: of rows that several ranks share.
    """
    shares = cut_window([int(length) for length in rows.input_tokens[:num_rows]], slices.num_shares, micro_rows)
    mine = shares[slices.share]
    total = torch.zeros(2, dtype=torch.float64)
    with inference(engine.model), slices.held():
        for number, micro in enumerate(mine):
            if stop():
                return None
            beat(f"evaluation, micro-batch {number + 1} of {len(mine)}")
            batch = collate([rows[i] for i in micro], pad_token, flat, slices.number, slices.count).to(engine.device)
            total[0] += loss_sum(engine.forward, head, batch).double().cpu()
            total[1] += batch.num_label_tokens
    dist.all_reduce(total, group=group)
    return float(total[0] / total[1])


def answer(engine: Engine, tokenizer, prompt: str, system: str | None, max_tokens: int) -> str:
    """A greedy answer to one user message (collective: every rank computes the same)."""
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": prompt}]
    text = prompt
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template, return_tensors="pt").input_ids
    ids = ids.to(engine.device)
    end = _end_tokens(engine.model, tokenizer)
    start = ids.shape[1]
    with inference(engine.model):
        for _ in range(max_tokens):
            beat("an answer to eval.prompts")
            logits = engine.forward(input_ids=ids, use_cache=False, logits_to_keep=1).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            dist.broadcast(token, src=0)  # a tie may fall differently on another rank
            ids = torch.cat([ids, token], dim=1)
            if int(ids[0, -1]) in end:
                break
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True).strip()


def _end_tokens(model, tokenizer):
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return {token for token in (*ends, tokenizer.eos_token_id) if token is not None}
