"""What routers do in a window: how evenly they load their experts, and the two ways of balancing that load.

Shapes: L layers with experts, E experts of a layer, N = B*T tokens of a micro-batch, K experts of a token, R its rows.
Everything is a sum over tokens or rows, so the cut of a window into micro-batches and ranks changes none of it.
"""

import torch
import torch.distributed as dist
from torch import nn

from tonnage.config.schema import Config
from tonnage.data.collate import MicroBatch
from tonnage.errors import ConfigError
from tonnage.models.slices import held_slices

BIAS = "e_score_correction_bias"
BIAS_RATE = 0.001  # gamma. Source: arXiv 2412.19437, section 4.2
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_alpha")  # of config.json


class Routing:
    """Watches the routers of a model; without experts it does nothing.

    The balance loss of a row is the sum over experts of f * P, where f is the expert's share of the row's choices times E
    and P the mean of its normalised scores over the row (arXiv 2412.19437, section 2.1.2, equations 17 to 20); a window's
    is the mean over its rows and layers. A router's bias is moved once a window, by the rate: up for experts with fewer
    tokens than the mean, down for those with more (the same, auxiliary-loss-free balancing).

    With an adapter routers are frozen, and `auto` balances nothing.

    Raises:
        ConfigError: balancing that is asked for where there is nothing to balance.
    """

    def __init__(self, model: nn.Module, config: Config):
        train, trains_all = config.train, config.adapter.name == "full"
        self.routers = [router for parent in model.modules() for router in _routers(parent)]
        settings = model.config.get_text_config()
        given = [getattr(settings, name) for name in COEFFICIENTS if getattr(settings, name, None) is not None]
        self.coefficient = (given[0] if given and trains_all else 0.0) if train.router_aux_loss == "auto" else (
            train.router_aux_loss)
        self.biased = [hasattr(router, BIAS) for router in self.routers]
        self.bias_rate = BIAS_RATE * (trains_all and any(self.biased)) if train.router_bias_rate == "auto" else (
            train.router_bias_rate)
        for key, asked, nothing in (("router_aux_loss", train.router_aux_loss, not self.routers or not trains_all),
                                    ("router_bias_rate", train.router_bias_rate, not any(self.biased) or not trains_all)):
            if asked not in ("auto", 0.0) and nothing:
                raise ConfigError(f"train.{key}={asked}: " + ("routers are frozen under an adapter" if not trains_all else
                                  "this model has no such routers") + f"; use train.{key}=0")
        self.counting, self.row_N = False, None
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(lambda module, args, out, layer=layer: self._seen(layer, out))

    def begin_window(self, num_rows: int, device: torch.device) -> None:
        """Forget what was counted; `num_rows` of the whole window."""
        if self.routers:
            self.num_rows = num_rows
            self.counts_LE = torch.zeros(len(self.routers), self.routers[0].num_experts, dtype=torch.int64, device=device)
            self.loss = torch.zeros((), dtype=torch.float64, device=device)

    def begin(self, batch: MicroBatch, scale: float) -> None:
        """From now on forward passes, and their repetitions in backward, are those of `batch`.

        Args:
            scale: what the engine divides gradients by.
        """
        if self.routers:
            self.row_N, self.num_micro_rows = batch.row_of_tokens(), len(batch.row_tokens)
            self.counting, self.scale = True, scale

    def forward_done(self) -> None:
        """What is computed from now on is computed again."""
        self.counting = False

    def end(self) -> None:
        """Leave forward passes alone."""
        self.row_N = None

    def _seen(self, layer, out):
        if self.row_N is None or not isinstance(out, tuple) or len(out) < 3:
            return None
        logits_NE, weights_NK, index_NK, *more = out
        if self.counting:
            real_NK = (self.row_N >= 0)[:, None].expand_as(index_NK)  # no selection: its size would be waited for
            self.counts_LE[layer].scatter_add_(0, index_NK.flatten(), real_NK.flatten().long())
        if not self.coefficient:
            return None
        balance = balance_of_rows(logits_NE, index_NK, self.row_N, self.num_micro_rows, self.biased[layer])
        balance = balance / self.num_rows / len(self.routers)
        if self.counting:
            self.loss += balance.detach()
        return logits_NE, _Beside.apply(weights_NK, self.coefficient * self.scale * balance), index_NK, *more

    def end_window(self, applied: bool, group: dist.ProcessGroup) -> dict[str, float]:
        """Figures of the window over all ranks; moves the biases where the update was applied (collective).

        router_load_max: tokens of the fullest expert relative to an even share, the most of all layers.
        router_entropy: of the load, 1 where it is even, the mean of layers. router_idle_experts: without a token, of all
        layers. No token is dropped: experts have no capacity. router_aux_loss: the balance loss.
        """
        if not self.routers:
            return {}
        counts_LE, loss = self.counts_LE.cpu(), self.loss.cpu()
        dist.all_reduce(counts_LE, group=group)
        if self.bias_rate and applied:
            with torch.no_grad():
                for router, counts_E in zip(self.routers, counts_LE, strict=True):
                    if not hasattr(router, BIAS):
                        continue
                    bias_E = getattr(router, BIAS)
                    bias_E += self.bias_rate * torch.sign(counts_E.double().mean() - counts_E).to(bias_E)
        shares_LE = counts_LE.double() / counts_LE.sum(-1, keepdim=True).clamp_min(1)
        entropy_L = -(shares_LE * shares_LE.clamp_min(1e-12).log()).sum(-1)
        figures = {"router_load_max": float(shares_LE.max()) * counts_LE.shape[1],
                   "router_entropy": float((entropy_L / torch.tensor(float(counts_LE.shape[1])).log()).mean()),
                   "router_idle_experts": int((counts_LE == 0).sum())}
        if self.coefficient:
            dist.all_reduce(loss, group=group)
            figures["router_aux_loss"] = float(loss)
        return figures


def balance_of_rows(logits_NE: torch.Tensor, index_NK: torch.Tensor, row_N: torch.Tensor, num_rows: int,
                    by_sigmoid: bool) -> torch.Tensor:
    """Balance losses of the rows of a micro-batch, summed; see `Routing`. Of slices, this rank's part (collective).

    Args:
        row_N: the row of each token, -1 for padding.
        by_sigmoid: how scores are made of logits; else by softmax.
    """
    experts, top_k = logits_NE.shape[1], index_NK.shape[1]
    scores_NE = logits_NE.float().sigmoid() if by_sigmoid else logits_NE.float().softmax(-1)
    scores_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
    chosen_NE = torch.zeros_like(scores_NE).scatter_(1, index_NK, 1.0)
    place_N = row_N.where(row_N >= 0, num_rows)  # padding goes into a row behind the last

    def sums(values_NX):
        return values_NX.new_zeros(num_rows + 1, values_NX.shape[1]).index_add(0, place_N, values_NX)[:num_rows]

    tokens_R1, chosen_RE = sums(torch.ones_like(scores_NE[:, :1])), sums(chosen_NE)
    if (group := held_slices().group) is not None:  # of whole rows; a slice's scores then give its part of the sum
        dist.all_reduce(tokens_R1, group=group)
        dist.all_reduce(chosen_RE, group=group)
    tokens_R1 = tokens_R1.clamp_min(1)
    return (chosen_RE * experts / top_k / tokens_R1 * sums(scores_NE) / tokens_R1).sum()


class _Beside(torch.autograd.Function):
    """`x` as it is; the gradient of `loss` is 1, so that it is minimised beside what becomes of x."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.loss = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones((), dtype=ctx.loss, device=grad.device)


def _routers(parent):
    """The module beside `experts` that has one weight row for each of them."""
    if not isinstance(getattr(parent, "experts", None), nn.Module):
        return []
    return [child for child in parent.children() if child is not parent.experts and hasattr(child, "top_k")
            and getattr(child, "weight", None) is not None]
