"""The configurations that fit, by predicted speed, and the nearest of them for a run that does not fit."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from tonnage.config.batch import micro_choices
from tonnage.config.rules import sequence_faults
from tonnage.config.schema import Adapter, Config
from tonnage.errors import ConfigError
from tonnage.facts.capabilities import CAPABILITIES, chosen_of, violations
from tonnage.facts.gpus import GPUS
from tonnage.facts.models import MODELS
from tonnage.plan.job import checkpointing_words
from tonnage.plan.planner import Plan, make_plan, most_micro_rows, plan_layout
from tonnage.plan.verdict import DOES_NOT_FIT, FITS

# what a change of these makes another run of: it comes last among the remedies
LEARNED = ("adapter", "adapter.quantise", "optimizer", "precision")
MOST_GPUS = 4096
CHECKPOINTING_KEYS = ("activation_checkpointing", "checkpoint_every_layers", "checkpoints_on_host")
CHECKPOINTING = (("none", 1, False), ("selective", 1, False), ("full", 2, False), ("full", 1, False), ("full", 1, True))
GAIN = 1.05  # in speed, for which a remedy may change more than another does


@dataclass(frozen=True)
class Found:
    """One configuration. `override`: words to add to the command line; `changed`: the keys they change."""

    override: str
    changed: tuple[str, ...]
    verdict: str
    peak_gib: float
    share: float
    peak_phase: str
    tokens_per_s: float | None
    strategy: str
    micro_rows: int
    accumulation_steps: int | None
    host_gib: float

    @property
    def learns_the_same(self) -> bool:
        """Whether it is still the run that was asked for, done in another way."""
        return not any(key in LEARNED for key in self.changed)


@dataclass(frozen=True)
class Search:
    """`fitting`: what learns the same first, then the fastest; `failing` counts what does not fit by (strategy, offload,
    adapter, checkpointing) with the least share of memory that was seen there."""

    fitting: list[Found]
    failing: list[tuple[str, int, float]]
    num_tried: int

    def as_dict(self) -> dict:
        return {"tried": self.num_tried, "fitting": [asdict(one) for one in self.fitting],
                "failing": [{"what": what, "tried": number, "least_share": share} for what, number, share in self.failing]}


def search(config: Config, plan: Plan, extremes: bool = False) -> Search:
    """Every combination of strategy, offload, checkpointing, micro-batch, adapter and its base, optimizer, precision,
    experts over GPUs and a second copy that the capability registry accepts, on the GPUs of `plan`; of micro-batches only
    `auto` and one row for the `extremes`. GPUs share rows where one row of a GPU does not fit, as few as it takes."""
    found, failing, least, seen, fitting = [], Counter(), {}, set(), set()
    for candidate, words in _candidates(config, plan, extremes):
        unshared = tuple(word for key, word in words.items() if key != "strategy.sequence_gpus")
        if candidate.strategy.sequence_gpus > config.strategy.sequence_gpus and unshared in fitting:
            continue  # to share rows is for what does not fit otherwise
        one = _evaluate(candidate, words, plan)
        if one is not None and one.verdict == FITS:
            fitting.add(unshared)
        same = one and (one.strategy, one.micro_rows, *chosen_of(candidate).values(), candidate.adapter.quantise,
                        _checkpointing(candidate), candidate.strategy.expert_gpus, candidate.strategy.hpz_gpus,
                        candidate.strategy.sequence_gpus)
        if one is None or same in seen:
            continue  # `auto` comes first, so that of equal ones the shortest is kept
        seen.add(same)
        if one.verdict != DOES_NOT_FIT:
            found.append(one)
            continue
        what = (f"{one.strategy}{_spread_words(candidate)}, offload {candidate.strategy.offload}, "
                f"{method(candidate.adapter)}, checkpointing {checkpointing_words(*_checkpointing(candidate))}")
        failing[what] += 1
        least[what] = min(least.get(what, one.share), one.share)
    found.sort(key=lambda one: (one.verdict != FITS, not one.learns_the_same, -(one.tokens_per_s or 0), one.share))
    return Search(found, sorted(((what, number, least[what]) for what, number in failing.items()),
                                key=lambda row: row[2]), len(found) + failing.total())


def remedies(config: Config, plan: Plan, most: int = 3) -> list[Found]:
    """The nearest configurations that fit: the fewest changes first, then those that leave alone what is learned, then
    the fastest; none that changes more than another for less than GAIN; one with more GPUs and one with a larger GPU
    where they help."""
    fitting = [one for one in search(config, plan, extremes=True).fitting if one.verdict == FITS]
    fitting.sort(key=lambda one: (len(one.changed) + 2 * sum(key in LEARNED for key in one.changed),
                                  -(one.tokens_per_s or 0)))
    chosen = []
    for one in fitting:
        if not any(set(other.changed) <= set(one.changed)
                   and GAIN * (other.tokens_per_s or 0) >= (one.tokens_per_s or 0) for other in chosen):
            chosen.append(one)
    return chosen[:most] + [one for one in (_more_gpus(config, plan), _larger_gpu(config, plan)) if one is not None]


def _candidates(config: Config, plan: Plan, extremes: bool) -> Iterator[tuple[Config, dict[str, str]]]:
    """Configs and, by key, the words that make them of `config`; what is `auto` is tried as it is, too."""
    layout, same_window = plan.layout, _same_window(config, plan)
    micro = ("auto", 1) if extremes else micro_choices(config.batch, layout.shares, most_micro_rows(config))
    axes = {
        "strategy": dict.fromkeys((config.strategy.name, *CAPABILITIES)),
        "strategy.offload": dict.fromkeys((config.strategy.offload, "none", "optimizer", "all")),
        "optimizer": dict.fromkeys((config.optimizer.name, "adamw", "adamw8bit")),
        "precision": dict.fromkeys((config.precision.name, "bf16")),
        "batch.micro_rows": dict.fromkeys((config.batch.micro_rows, *micro)),
        "strategy.expert_gpus": dict.fromkeys((config.strategy.expert_gpus, 1, _expert_gpus(plan))),
        "strategy.hpz_gpus": dict.fromkeys((config.strategy.hpz_gpus, 1, _hpz_gpus(layout))),
        "strategy.sequence_gpus": dict.fromkeys((config.strategy.sequence_gpus, 1, *_sequence_gpus(config, plan))),
        "checkpointing": dict.fromkeys((_checkpointing(config), *CHECKPOINTING)),
        "adapter": _adapters(config)}
    before = (config.strategy.name, config.strategy.offload, config.optimizer.name, config.precision.name,
              config.batch.micro_rows, config.strategy.expert_gpus, config.strategy.hpz_gpus, config.strategy.sequence_gpus)
    for *values, checkpointing, adapter in itertools.product(*axes.values()):
        words = {key: f"{key}={value}" for key, value, was in zip(axes, values, before, strict=False) if value != was}
        words |= {f"model.{key}": f"model.{key}={str(value).lower()}" for key, value, was in
                  zip(CHECKPOINTING_KEYS, checkpointing, _checkpointing(config), strict=True) if value != was}
        words |= _adapter_words(config.adapter, *adapter)
        values += [replace(config.model, **dict(zip(CHECKPOINTING_KEYS, checkpointing, strict=True))),
                   replace(config.adapter, name=adapter[0], quantise=adapter[1])]
        candidate = _changed(config, *values)
        if words.keys() & {"batch.micro_rows", "strategy.sequence_gpus"}:
            words |= _batch_words(same_window)
            candidate = replace(candidate, batch=replace(candidate.batch, **same_window))
        name, experts = candidate.strategy.name, candidate.strategy.expert_gpus
        if experts > 1 and not (name == "auto" or CAPABILITIES[name].expert_parallel):
            continue
        if "strategy.hpz_gpus" in words and candidate.strategy.hpz_gpus > 1 and name != "zero3":
            continue
        shares_more = candidate.strategy.sequence_gpus > config.strategy.sequence_gpus
        if shares_more and candidate.batch.micro_rows not in ("auto", 1):  # several rows: better each on a GPU of its own
            continue
        if name == "auto" or not (_is_another(candidate, layout) or violations(name, chosen_of(candidate))):
            yield candidate, words


def _checkpointing(config):
    return tuple(getattr(config.model, key) for key in CHECKPOINTING_KEYS)


def _expert_gpus(plan):
    """Over how many GPUs experts can be spread: those of a node, as far as experts divide."""
    experts, gpus = plan.job.architecture.num_experts, min(plan.layout.gpus, plan.layout.gpus_per_node)
    return math.gcd(experts, gpus) if experts else 1


def _hpz_gpus(layout):
    """How many GPUs can hold a second copy of the weights: those of a node, where there are several."""
    return layout.gpus_per_node if layout.gpus > layout.gpus_per_node else 1


def _sequence_gpus(config, plan):
    """Over how many GPUs rows can be shared, the fewest first: those of a node, as far as heads divide; none where that
    is refused."""
    layout = plan.layout
    most = math.gcd(plan.job.architecture.num_heads, layout.gpus, layout.gpus_per_node)
    shared = replace(config, strategy=replace(config.strategy, sequence_gpus=most))
    return [] if sequence_faults(shared, layout.gpus) else [few for few in range(2, most + 1) if most % few == 0]


def _spread_words(candidate):
    chosen = candidate.strategy
    counts = {"experts": chosen.expert_gpus, "a copy": chosen.hpz_gpus, "rows": chosen.sequence_gpus}
    return "".join(f" with {what} over {gpus}" for what, gpus in counts.items() if gpus > 1)


def _adapters(config):
    """(adapter, quantise): the run's own, LoRA, and LoRA on a base in 4 bits, or in FP8 where it is published so."""
    facts = MODELS.get(config.model.name)
    in_fp8 = [("lora", "fp8")] if facts is not None and facts.is_published_in_fp8 else []
    return dict.fromkeys([(config.adapter.name, config.adapter.quantise), ("lora", "none"), ("qlora", "nf4"), *in_fp8])


def _adapter_words(was, name, quantise):
    """The words, by key, that make another of an adapter; the preset qlora brings its format where none was stated."""
    words = {} if name == was.name else {"adapter": f"adapter={name}"}
    if quantise != was.quantise and not ("adapter" in words and name == "qlora" and was.quantise == "none"):
        words["adapter.quantise"] = f"adapter.quantise={quantise}"
    return words


def method(adapter: Adapter) -> str:
    """What is trained, and on what: `lora`, `qlora`, `lora on fp8`."""
    implied = "nf4" if adapter.name == "qlora" else "none"
    return adapter.name if adapter.quantise == implied else f"{adapter.name} on {adapter.quantise}"


def _is_another(candidate, layout):
    """Whether the strategy does on these GPUs what one with less sharding does."""
    name, one_node = candidate.strategy.name, layout.gpus <= layout.gpus_per_node
    alone = layout.gpus == 1 and name in ("zero3", "fsdp") and candidate.strategy.offload == "none"
    return alone or name == "hsdp" and one_node


def _changed(config, strategy, offload, optimizer, precision, micro_rows, expert_gpus, hpz_gpus, sequence_gpus, model,
             adapter):
    return replace(
        config, strategy=replace(config.strategy, name=strategy, offload=offload, expert_gpus=expert_gpus,
                                 hpz_gpus=hpz_gpus, sequence_gpus=sequence_gpus),
        batch=replace(config.batch, micro_rows=micro_rows), model=model, adapter=adapter,
        optimizer=replace(config.optimizer, name=optimizer), precision=replace(config.precision, name=precision))


def _evaluate(candidate, words, plan, gpu=None):
    """The candidate's `Found`, or None where a rule refuses it."""
    try:
        layout = plan_layout(candidate, plan.job.architecture, gpu or plan.gpu)
    except ConfigError:
        return None
    found = make_plan(candidate, layout, plan.job.architecture, gpu or plan.gpu)
    return Found(
        override=" ".join(words.values()), changed=tuple(words), verdict=found.verdict,
        peak_gib=found.memory.peak_bytes / 2**30, share=found.share, peak_phase=found.memory.peak_phase,
        tokens_per_s=found.speed.tokens_per_s if found.speed else None, strategy=layout.strategy,
        micro_rows=layout.cut.micro_rows, accumulation_steps=layout.cut.accumulation_steps,
        host_gib=found.host.memory_gib)


def _more_gpus(config, plan):
    """The fewest GPUs, doubling, on which the run fits with strategy and micro-batch left to be worked out."""
    free, gpus = _freed(config, plan), plan.layout.gpus * 2
    while gpus <= MOST_GPUS:
        words = {"gpus": f"gpus={gpus}"} | _freeing(config, plan)
        one = _evaluate(replace(free, gpus=gpus), words, plan)
        if one is not None and one.verdict == FITS:
            return one
        gpus *= 2
    return None


def _larger_gpu(config, plan):
    """The smallest GPU of the table on which it fits as it is."""
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory_gib):
        if gpu.memory_gib > plan.gpu.memory_gib:
            stated = {"gpu.memory_gib": config.gpu.memory_gib, "gpu.price_usd_h": config.gpu.price_usd_h}
            words = {key: f"{key}=null" for key, value in stated.items() if value is not None}
            one = _evaluate(_freed(config, plan), {"gpu": f"gpu={gpu.name}"} | words | _freeing(config, plan), plan, gpu)
            if one is not None and one.verdict == FITS:
                return one
    return None


def _freeing(config, plan):
    return {key: f"{key}=auto" for key, value in (("strategy", config.strategy.name),
                                                  ("batch.micro_rows", config.batch.micro_rows))
            if value != "auto"} | _batch_words(_same_window(config, plan))


def _freed(config, plan):
    return replace(config, strategy=replace(config.strategy, name="auto"),
                   batch=replace(config.batch, micro_rows="auto", **_same_window(config, plan)))


def _same_window(config, plan):
    """What to change of `batch`, by key, for the window of the run where GPUs and rows cut it otherwise."""
    if config.batch.accumulation_steps == "auto":
        return {}
    if config.batch.global_rows != "auto" or config.batch.global_tokens is not None:
        return {"accumulation_steps": "auto"}
    # else it is what the steps make of micro-batches and GPUs
    return {"accumulation_steps": "auto", "global_rows": plan.layout.cut.global_rows}


def _batch_words(changes):
    return {f"batch.{key}": f"batch.{key}={value}" for key, value in changes.items()}
