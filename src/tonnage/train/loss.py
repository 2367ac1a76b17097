"""The loss of a micro-batch: the sum of its token losses. The loop divides by the window's label tokens, once.

Shapes: N label tokens, D hidden size, V vocabulary, C label tokens of a chunk.

Only positions that have a label reach the head. The chunked loss makes logits for C of them at a time and their
gradient at once, so [N, V] is never held (after https://github.com/apple/ml-cross-entropy, arXiv 2411.09009).
"""

from contextlib import contextmanager

import torch
import torch.nn.functional as F

from tonnage.data.collate import MicroBatch
from tonnage.errors import ConfigError
from tonnage.facts.sizes import VOCAB_BLOCK


class ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Sum over N of cross_entropy(hidden W^T + b, target), with gradients formed in forward chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, bias_V, targets_N, chunk_tokens):
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        loss = hidden_ND.new_zeros((), dtype=torch.float32)
        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for start in range(0, len(targets_N), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CD, targets_C = hidden_ND[rows], targets_N[rows]
            logits_CV = F.linear(hidden_CD, weight_VD, bias_V).float()
            log_norm_C = _log_norm(logits_CV)
            loss += (log_norm_C - logits_CV.gather(1, targets_C[:, None])[:, 0]).sum()
            # d loss / d logits = softmax - onehot, in place of the logits
            grad_CV = logits_CV.sub_(log_norm_C[:, None]).exp_()
            grad_CV.scatter_add_(1, targets_C[:, None], -torch.ones_like(grad_CV[:, :1]))
            if needs_bias:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_VD.dtype)
            if needs_hidden:
                grad_hidden_ND[rows] = grad_CV @ weight_VD
            if needs_weight:
                for block in range(0, len(weight_VD), VOCAB_BLOCK):  # the product of all would be as large as the head
                    words = slice(block, block + VOCAB_BLOCK)
                    grad_weight_VD[words] += grad_CV[:, words].T @ hidden_CD
            del logits_CV, grad_CV  # or they are held while the next chunk is made
        ctx.grads = (grad_hidden_ND, grad_weight_VD, grad_bias_V)
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grads, ctx.grads = ctx.grads, None  # scaled in place, one after the other: a head's gradient is large
        scaled = [None if grad is None else grad.mul_(grad_loss).to(dtype)
                  for grad, dtype in zip(grads, ctx.dtypes, strict=True)]
        return *scaled, None, None


def _log_norm(logits_CV):
    """log sum exp over the vocabulary, block by block: torch.logsumexp makes a second tensor of all logits.

    A vocabulary of one block is summed in torch's own order: AdamW makes 1e-4 of the last digits of small gradients.
    """
    most_C = logits_CV.amax(dim=-1)
    sum_C = torch.zeros_like(most_C)
    for block in logits_CV.split(VOCAB_BLOCK, dim=1):
        sum_C += (block - most_C[:, None]).exp_().sum(dim=-1)
    return most_C + sum_C.log()


def plain_loss(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Sum of token losses, fp32 scalar."""
    return F.cross_entropy(logits_NV.float(), targets_N, reduction="sum")


class LossHead:
    """Lets the model's own head return the loss sum of a micro-batch instead of logits.

    The head keeps being called by the model's forward, so that the hooks with which ZeRO-3 and FSDP gather its weight
    fire; outside `expecting` it is what it was.

    Raises:
        ConfigError: loss=chunked where the head is not a plain linear layer whose output is the logits.
    """

    def __init__(self, model, loss: str, chunk_tokens: int):
        self.head = plain_head(model)
        obstacle = chunk_obstacle(model, self.head)
        if loss == "chunked" and obstacle:
            raise ConfigError(f"train.loss=chunked: {obstacle}; use train.loss=plain")
        self.kind = "plain" if loss == "plain" or obstacle else "chunked"
        self.chunk_tokens, self.pending = chunk_tokens, None
        self._forward = self.head.forward
        self.head.forward = self._call

    @contextmanager
    def expecting(self, batch: MicroBatch):
        """Within, the head sees only the positions with labels and, if chunked, returns their loss sum."""
        self.pending = batch
        try:
            yield
        finally:
            self.pending = None

    def _call(self, hidden_BTD):
        if self.pending is None:
            return self._forward(hidden_BTD)
        batch = self.pending
        hidden_ND = hidden_BTD.flatten(0, 1).index_select(0, batch.label_index_N)
        if self.kind == "plain":
            return self._forward(hidden_ND[None])
        weight, bias = self.head.weight, getattr(self.head, "bias", None)
        loss = ChunkedLinearCrossEntropy.apply(hidden_ND.to(weight.dtype), weight, bias, batch.targets_N,
                                               self.chunk_tokens)
        return loss.reshape(1, 1, 1)


def plain_head(model):
    """The module that makes the logits: inside peft's wrapper of a saved module, the one that is trained."""
    head = model.get_output_embeddings()
    if hasattr(head, "modules_to_save"):
        return head.modules_to_save[head.active_adapter if isinstance(head.active_adapter, str)
                                    else head.active_adapters[0]]
    return head


def chunk_obstacle(model, head) -> str | None:
    """Why the chunked loss cannot be used with this head, or None."""
    if getattr(type(head), "forward", None) is not torch.nn.Linear.forward:  # FSDP makes a subclass of what it shards
        return f"the head is a {type(head).__name__}, not a plain linear layer"
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            return f"the model changes its logits after the head ({name}={getattr(config, name)})"
    return None


def loss_sum(forward, head: LossHead, batch: MicroBatch) -> torch.Tensor:
    """Sum of the token losses of `batch`, fp32 scalar; a batch without labels gives a zero joined to the graph.

    Args:
        forward: the engine's, so that its hooks run.
    """
    with head.expecting(batch):
        output = forward(input_ids=batch.input_ids_BT, position_ids=batch.position_ids_BT, use_cache=False).logits
    if batch.num_label_tokens == 0:
        return output.float().sum() * 0.0
    if head.kind == "chunked":
        return output.reshape(())
    return plain_loss(output[0], batch.targets_N)
