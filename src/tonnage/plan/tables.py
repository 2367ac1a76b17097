"""The accumulation tables, conf/tables/<model>.yaml: what `auto` comes to, for every GPU and number of GPUs where it fits.

A row is worked out by the function that settles `auto` in a run, so that a table cannot say anything else; the tests
hold every row against it, and its window against the asked global batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from tonnage.config.compose import CONF, compose_config
from tonnage.config.schema import Config
from tonnage.errors import ConfigError
from tonnage.facts.gpus import GPUS
from tonnage.facts.models import MODELS
from tonnage.plan.planner import architecture_of, make_plan, plan_layout
from tonnage.plan.verdict import FITS

NUM_GPUS = (1, 2, 3, 4, 6, 8, 16, 24, 32, 64, 128, 256)
METHODS = (("adapter=lora",), ("adapter=qlora",), ("adapter=full",))
IN_FP8 = ("adapter=lora", "adapter.quantise=fp8")  # of models that are published so
SMALLEST = 6_000_000_000  # parameters: smaller models fit wherever they are put
FOLDER = CONF / "tables"


@dataclass(frozen=True)
class Row:
    """One line of a table; `peak_gib` and `tokens_per_s` (all GPUs) are predicted, the latter None where not known."""

    gpu: str
    gpus: int
    adapter: str
    quantise: str
    precision: str
    strategy: str
    micro_rows: int
    accumulation_steps: int
    rows_per_step: int
    peak_gib: float
    tokens_per_s: int | None


def table_models() -> list[str]:
    """Names of the models that have a table."""
    return [name for name, facts in MODELS.items() if facts.published_parameters >= SMALLEST]


def methods_of(model: str) -> tuple[tuple[str, ...], ...]:
    """Overrides that say what is trained, and on which base."""
    return (*METHODS, IN_FP8) if MODELS[model].is_published_in_fp8 else METHODS


def config_of(model: str, method: tuple[str, ...]) -> Config:
    """The run that rows are about: the defaults of a run of this model; GPUs are each row's."""
    return compose_config([f"model={model}", *method])


def rows_of(model: str) -> Iterator[Row]:
    """The rows of a model: those that fit."""
    for method in methods_of(model):
        base = config_of(model, method)
        for gpu in GPUS.values():
            for gpus in NUM_GPUS:
                row = _row(base, gpu, gpus)
                if row is not None:
                    yield row


def _row(base, gpu, gpus):
    config = replace(base, gpus=gpus, gpu=replace(base.gpu, name=gpu.name))
    architecture = architecture_of(config)
    try:
        layout = plan_layout(config, architecture, gpu)
    except ConfigError:
        return None
    plan = make_plan(config, layout, architecture, gpu)
    if plan.verdict != FITS:
        return None
    return Row(gpu.name, gpus, config.adapter.name, config.adapter.quantise, config.precision.name, layout.strategy,
               layout.cut.micro_rows, layout.cut.accumulation_steps, layout.cut.global_rows,
               round(plan.memory.peak_bytes / 2**30, 2), round(plan.speed.tokens_per_s) if plan.speed else None)


def table_text(model: str) -> str:
    """The text of a model's table."""
    config = config_of(model, METHODS[0])
    names = ", ".join(Row.__dataclass_fields__)
    lines = [f"# {model}: what auto comes to; written by `python launch/plan.py --tables`, edit nothing here",
             f"# rows of {config.data.seq_tokens:,} tokens, {config.optimizer.name}, checkpointing "
             f"{config.model.activation_checkpointing}, LoRA r={config.adapter.rank}; torchrun's strategies",
             f"columns: [{names}]", "rows:"]
    lines += ["- [" + ", ".join("null" if value is None else str(value) for value in astuple(row)) + "]"
              for row in rows_of(model)]
    return "\n".join(lines) + "\n"


def write_tables(say: Callable[[str], None]) -> list[Path]:
    """Write every table; returns the files."""
    FOLDER.mkdir(exist_ok=True)
    files = []
    for model in table_models():
        say(f"{model}: working out {len(methods_of(model)) * len(GPUS) * len(NUM_GPUS)} combinations")
        files.append(FOLDER / f"{model}.yaml")
        files[-1].write_text(table_text(model))
    return files
