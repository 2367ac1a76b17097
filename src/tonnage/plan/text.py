"""A plan in words and columns, and as plain dicts."""

from dataclasses import asdict

from tonnage.config.schema import Config
from tonnage.plan.job import checkpointing_words
from tonnage.plan.memory import PHASES
from tonnage.plan.planner import Plan
from tonnage.plan.search import Found, Search
from tonnage.plan.speed import cost_usd, energy_kwh
from tonnage.plan.verdict import DIES_ABOVE, FITS_BELOW

GIB = 2**30
ACCURACY = ("tensors of FSDP2 within 5 % of the traced step, of ZeRO within 5 % of measured allocations on CPU; not yet "
            "measured on a GPU")
EAGER = "eager attention is predicted up to a third too low"


def describe(config: Config, plan: Plan) -> str:
    """The plan as a person reads it."""
    return "\n".join([*_heading(config, plan), "", *memory_lines(plan), "", *_verdict_lines(plan), *_rest(config, plan)])


def _heading(config, plan):
    job, layout, a = plan.job, plan.layout, plan.job.architecture
    trained = ("all trained" if job.trains_all else
               f"{job.adapter} r={job.rank}: {job.trained_parameters / 1e6:,.1f}M trained")
    active = "" if a.num_active_parameters == a.num_parameters else f", {a.num_active_parameters / 1e9:.1f}B active"
    nodes = layout.gpus // layout.gpus_per_node
    cut = layout.cut
    rows = f"{cut.global_rows} rows of {job.seq_tokens:,} tokens" if cut.global_rows else (
        f"whole rows within {cut.global_tokens:,} tokens, planned as full rows of {job.seq_tokens:,}")
    steps = f" x {cut.accumulation_steps} accumulation steps" if cut.accumulation_steps else ""
    together = f", each row shared by {layout.sequence_gpus} GPUs" if layout.sequence_gpus > 1 else ""
    return [f"{config.model.name}: {a.num_parameters / 1e9:.2f}B parameters{active}; {trained}",
            f"{layout.gpus} x {plan.gpu.title}, {nodes} node{'s' * (nodes > 1)}; strategy {layout.strategy}, offload "
            f"{job.offload}, {job.precision}, {job.optimizer}, {job.loss} loss, checkpointing "
            f"{checkpointing_words(job.checkpointing, job.checkpoint_every_layers, job.checkpoints_on_host)}",
            f"a step is {rows}: {layout.shares} x {cut.micro_rows} rows{steps}{together}"]


def memory_lines(plan: Plan) -> list[str]:
    """Columns of phases, rows of terms, in GiB."""
    phases = {phase: plan.memory.phases[phase] for phase in PHASES}
    return [*_sheet(phases), _row("total", (sum(terms.values()) for terms in phases.values()))]


def _sheet(columns):
    """A heading and a row for each term that is at least half a MiB somewhere."""
    names = dict.fromkeys(name for terms in columns.values() for name, size in terms.items() if size >= 0.0005 * GIB)
    return [f"{'GiB on one GPU':36}" + "".join(f"{phase:>10}" for phase in columns),
            *(_row(name, (terms.get(name) for terms in columns.values())) for name in names)]


def _row(name, sizes):
    return f"  {name:34}" + "".join(" " * 10 if size is None else f"{size / GIB:10.3f}" for size in sizes)


def _verdict_lines(plan):
    peak = plan.memory.peak_bytes / GIB
    accuracy = EAGER if plan.job.attention == "eager" else ACCURACY
    return [f"{plan.verdict}: peak {peak:.2f} GiB in the {plan.memory.peak_phase} phase, {plan.share:.0%} of the "
            f"{plan.gpu.memory_gib:.1f} GiB of {plan.gpu.title}",
            f"  on A100-80GB below {FITS_BELOW:.0%} all ran, above {DIES_ABOVE:.1%} none did (216 runs of others)",
            f"  {accuracy}", *host_lines(plan)]


def host_lines(plan: Plan) -> list[str]:
    """What to say where a node has less memory than the run needs."""
    return [f"host memory {plan.host.memory_gib:.1f} GiB a node is more than "
            f"cluster.memory_gib={plan.host_given_gib:g}"] if plan.lacks_host_memory else []


def _rest(config, plan):
    job, speed, gpu, host = plan.job, plan.speed, plan.gpu, plan.host
    parts = ", ".join(f"{name} {size:.1f}" for name, size in host.terms.items())
    lines = [f"host memory  {host.memory_gib:.1f} GiB a node ({parts})",
             f"disk         {host.checkpoint_gib:.2f} GiB a checkpoint, {host.disk_gib:.2f} GiB with those that are kept"]
    if speed is None:
        return [*lines, "speed        not known: no arithmetic or links on record for this GPU or precision, or FP8 is "
                        "emulated"]
    lines += [f"speed        {speed.tokens_per_s:,.0f} tokens/s with padding ({speed.tokens_per_s_per_gpu:,.0f} each), "
              f"{speed.step_s:.1f} s a step, {speed.mfu:.0%} of the GPU's peak",
              f"             compute {speed.compute_s:.1f} s, waiting for others {speed.exposed_s:.1f} s, host link "
              f"{speed.transfer_s:.1f} s, optimizer {speed.optimizer_s:.1f} s; "
              + ("products in FP8 not held to any measurement" if job.precision == "fp8" else
                 "half of published runs within x1.1")]
    cost, energy = cost_usd(1e9, speed, gpu), energy_kwh(1e9, speed, gpu)
    price = (f"{cost[0]:,.0f} to {cost[1]:,.0f} USD for 1e9 tokens (padding included) at {gpu.price_low_usd_h:.2f} to "
             f"{gpu.price_high_usd_h:.2f} USD a GPU-hour ({gpu.price_source}, {gpu.price_date})" if cost
             else "not known: set gpu.price_usd_h")
    lines.append(f"cost         {price}")
    if config.train.max_steps and plan.layout.cut.global_rows:
        seconds = speed.step_s * config.train.max_steps
        lines.append(f"the run      {config.train.max_steps:,} steps in {seconds / 3600:.1f} h")
    lines.append(f"energy       {energy:,.0f} kWh for 1e9 tokens at {gpu.power_w:.0f} W a GPU" if energy else
                 "energy       not known for this GPU")
    return lines


def as_dict(config: Config, plan: Plan) -> dict:
    """The plan for programs; sizes in bytes, None is not known."""
    return {
        "model": config.model.name, "parameters": plan.job.architecture.num_parameters,
        "trained_parameters": plan.job.trained_parameters, "gpu": plan.gpu.name, "gpu_memory_gib": plan.gpu.memory_gib,
        "layout": asdict(plan.layout), "levers": _levers(plan.job), "verdict": plan.verdict, "share": plan.share,
        "peak_phase": plan.memory.peak_phase,
        "peak_bytes": plan.memory.peak_bytes, "phases": plan.memory.phases,
        "host_memory_gib": plan.host.memory_gib, "checkpoint_gib": plan.host.checkpoint_gib, "disk_gib": plan.host.disk_gib,
        "speed": asdict(plan.speed) if plan.speed else None,
        "usd_per_1e6_tokens": cost_usd(1e6, plan.speed, plan.gpu) if plan.speed else None,
        "kwh_per_1e6_tokens": energy_kwh(1e6, plan.speed, plan.gpu) if plan.speed else None}


def _levers(job):
    """What of a run decides its memory and speed besides model and layout."""
    return {name: getattr(job, name) for name in (
        "adapter", "rank", "quantise", "precision", "optimizer", "offload", "checkpointing", "checkpoint_every_layers",
        "checkpoints_on_host", "shard_gpus", "expert_gpus", "hpz_gpus", "fp8_all_gather", "attention", "loss", "packing",
        "compile")}


def _line(one: Found) -> str:
    speed = "speed not known" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f} tokens/s"
    return f"{one.peak_gib:7.1f} GiB ({one.share:.0%}, {one.verdict}), host {one.host_gib:,.0f} GiB a node, {speed}"


def advice_lines(advice: list[Found]) -> list[str]:
    """What fits, as words to add to the command line."""
    if not advice:
        return ["nothing that was tried fits; shorten data.seq_tokens, or see --search"]
    return ["what fits, to be added to the command line:"] + [f"  {one.override:70} {_line(one)}" for one in advice]


def describe_search(config: Config, plan: Plan, found: Search, most: int = 12) -> str:
    """The fastest of what fits, and the groups of what does not."""
    lines = [*_heading(config, plan)[:1], f"{plan.layout.gpus} x {plan.gpu.title}: {found.num_tried} configurations tried, "
             f"{len(found.fitting)} fit or are tight; those that learn the same first, then the fastest", ""]
    shown, seen = [], set()
    for one in found.fitting:  # of those that differ in the micro-batch alone, the first
        rest = one.strategy, tuple(word for word in one.override.split() if "micro_rows" not in word)
        if rest not in seen:
            seen.add(rest)
            shown.append(one)
    for one in shown[:most]:
        cut = f"{one.micro_rows} rows x {one.accumulation_steps or '?'}"
        lines.append(f"{_line(one):52} {cut:14} {one.override or '(as it is)'}")
    if found.failing:
        lines += ["", "does not fit (least share of memory seen):"]
        lines += [f"  {share:6.0%}  {what} ({number})" for what, number, share in found.failing[:most]]
    return "\n".join(lines)


def trace_dict(plan: Plan, traced) -> dict:
    """Traced and predicted bytes per phase."""
    return {"seconds": traced.seconds, "tracer_peak_gib": traced.tracer_peak_gib, "phases": {
        phase: {"traced_bytes": peak.total, "predicted_bytes": sum(plan.memory.phases[phase].values()),
                "by_category": peak.by_category} for phase, peak in traced.phases.items()}}


def describe_trace(plan: Plan, traced) -> str:
    """Traced and predicted peaks, and what the traced ones are made of."""
    totals = {phase: peak.total for phase, peak in traced.phases.items()}
    predicted = {phase: sum(plan.memory.phases[phase].values()) for phase in totals}
    blocks = [f"  {category}: {count} x {size / 2**20:.1f} MiB{maker and f' of {maker}'}"
              for category, maker, size, count in traced.peak.largest]
    return "\n".join([
        *_sheet({phase: peak.by_category for phase, peak in traced.phases.items()}),
        _row("traced", totals.values()), _row("predicted", predicted.values()),
        f"  {'predicted / traced':34}" + "".join(f"{predicted[phase] / totals[phase]:10.3f}" for phase in totals),
        f"peak: traced {traced.peak.total / GIB:.3f} GiB, predicted {max(predicted.values()) / GIB:.3f} GiB "
        f"({max(predicted.values()) / traced.peak.total - 1:+.1%}); {traced.seconds:.0f} s, "
        f"{traced.tracer_peak_gib:.2f} GiB of this machine's memory",
        "largest blocks at the peak:", *blocks])
