"""Rows whose tokens several ranks share: each holds a slice, and for attention heads travel (DeepSpeed-Ulysses).

Everything in a decoder but attention works on tokens one by one. For attention a rank swaps its slice of all heads for all
tokens of some heads, and what is attended goes back: four all-to-alls a layer. Source: arXiv 2309.14509, section 3.

Shapes: B rows, H heads, P ranks that share a row, T tokens of a row, S = T / P of a slice, D width of a head.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

from tonnage.config.rules import slicing_obstacle
from tonnage.errors import ConfigError
from tonnage.facts.architectures import row_facts

# the name of the attention of this module in transformers, which looks for "sdpa" in it before it takes what sdpa takes
SLICED = "sliced_sdpa"


@dataclass(frozen=True)
class Slices:
    """`count` neighbouring ranks, `group`, share the tokens of each row; one: each rank has rows of its own."""

    count: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def over(cls, gpus: int, timeout_s: float) -> "Slices":
        """Of rows that `gpus` ranks share (collective)."""
        return cls() if gpus == 1 else cls(gpus, dist.new_subgroups(gpus, timeout=timedelta(seconds=timeout_s))[0])

    @property
    def number(self) -> int:
        """Which slice this rank holds."""
        return dist.get_rank() % self.count

    @property
    def share(self) -> int:
        """Which share of a window's rows, of `num_shares`."""
        return dist.get_rank() // self.count

    @property
    def num_shares(self) -> int:
        return dist.get_world_size() // self.count

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, inputs of the model are slices, in forward and backward; elsewhere each rank computes whole rows."""
        global _held  # a context variable would not be seen where backward computes a layer again: in autograd's threads
        _held = self
        try:
            yield
        finally:
            _held = WHOLE


WHOLE = Slices()
_held = WHOLE


def held_slices() -> Slices:
    """What the inputs of the model are now."""
    return _held


def register_attention() -> None:
    """Tell transformers of `sliced_attention`; where it needs a mask, it is sdpa's."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(SLICED, sliced_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(SLICED, sdpa_mask)


def require_sliceable(config, sequence_gpus: int, seq_tokens: int) -> None:
    """Refuse a model (transformers' configuration object) whose rows cannot be shared.

    Raises:
        ConfigError: says why.
    """
    text = config.get_text_config()
    obstacle = slicing_obstacle(sequence_gpus, seq_tokens, text.num_attention_heads, **row_facts(text.to_dict()))
    if obstacle is not None:
        raise ConfigError(obstacle)


def sliced_attention(module, query_BHSD, key_BHSD, value_BHSD, attention_mask, **options):
    """transformers' sdpa attention, [B, S, H, D]; over the tokens of all ranks where slices are held.

    Raises:
        ConfigError: a layer that masks by more than the order of tokens.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if _held.count == 1:
        return sdpa_attention_forward(module, query_BHSD, key_BHSD, value_BHSD, attention_mask, **options)
    if attention_mask is not None:
        raise ConfigError(f"strategy.sequence_gpus={_held.count}: {type(module).__name__} masks its attention, and the "
                          f"mask of a slice is not that of a row; use strategy.sequence_gpus=1")
    # of fewer key heads than ranks each is repeated, so that every rank gets those of its queries
    repeats = _held.count // math.gcd(_held.count, key_BHSD.shape[1])
    if repeats > 1:
        key_BHSD, value_BHSD = (x_BHSD.repeat_interleave(repeats, dim=1) for x_BHSD in (key_BHSD, value_BHSD))
    query_BHTD, key_BHTD, value_BHTD = map(_to_heads, (query_BHSD, key_BHSD, value_BHSD))
    here = SimpleNamespace(num_key_value_groups=query_BHTD.shape[1] // key_BHTD.shape[1],
                           is_causal=getattr(module, "is_causal", True))
    attended_BTHD, _ = sdpa_attention_forward(here, query_BHTD, key_BHTD, value_BHTD, None, **options)
    return _to_tokens(attended_BTHD), None


def _to_heads(x_BHSD):
    """[B, H, S, D] -> [B, H / P, T, D]. Tokens travel as the first dimension: slices then need not be put together."""
    sent_PSBHD = x_BHSD.unflatten(1, (_held.count, -1)).permute(1, 3, 0, 2, 4).contiguous()
    return _exchanged(sent_PSBHD).flatten(0, 1).permute(1, 2, 0, 3)


def _to_tokens(x_BTHD):
    """[B, T, H / P, D] -> [B, S, H, D]."""
    got_PSBHD = _exchanged(x_BTHD.movedim(1, 0).contiguous()).unflatten(0, (_held.count, -1))
    return got_PSBHD.permute(2, 1, 0, 3, 4).flatten(2, 3)


def _exchanged(x):
    """The n-th part of the first dimension goes to the n-th rank."""
    return collectives.wait_tensor(collectives.all_to_all_single(x, None, None, _held.group))
