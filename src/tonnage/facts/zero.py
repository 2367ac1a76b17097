"""DeepSpeed's limits on what is gathered and buffered, in numbers (not bytes); used by the JSON and by the planner.

Source: https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from tonnage.errors import ConfigError


@dataclass(frozen=True)
class ZeroLimits:
    """Keys of `zero_optimization` as DeepSpeed names them.

    Its default of 5e8 for the buckets is 2 GB of fp32 that stage 3 holds for good, whatever is trained; 5e7 still fills
    a link. The others are its defaults.
    """

    reduce_bucket_size: int = 50_000_000
    allgather_bucket_size: int = 50_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000


def zero_limits(extra: dict[str, Any]) -> ZeroLimits:
    """The limits, with those of `strategy.extra` in their place.

    Raises:
        ConfigError: a limit that is no number.
    """
    given = extra.get("zero_optimization", {})
    given = {name: given[name] for name in asdict(ZeroLimits()) if name in given} if isinstance(given, dict) else {}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 1:
            raise ConfigError(f"strategy.extra.zero_optimization.{name}={value}: must be a number of parameters of at "
                              f"least 1")
    return replace(ZeroLimits(), **{name: int(value) for name, value in given.items()})
