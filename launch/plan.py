"""What a run will need, from its config alone: `python launch/plan.py key=value ...`; --help says more.

No weights, no GPU, no network, and no torch but for --trace.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import _installed  # noqa: F401 - first
from _planning import shape_of

from tonnage.config.compose import compose_config, groups, parse_command_line, recipes
from tonnage.config.schema import Config
from tonnage.errors import EXIT_DOES_NOT_FIT, EXIT_DONE, ConfigError
from tonnage.facts.gpus import gpu_of
from tonnage.plan import text
from tonnage.plan.planner import Plan, make_plan, plan_layout
from tonnage.plan.search import remedies, search
from tonnage.plan.verdict import DOES_NOT_FIT
from tonnage.runtime.driver import first_gpu
from tonnage.runtime.entry import guarded
from tonnage.runtime.logs import quiet_libraries

HELP = """\
python launch/plan.py key=value ...   memory, time, cost and disk of a run, e.g. model=llama8b gpu=rtx4090 gpus=1
  --search            the configurations that fit, fastest first
  --trace             the real step on fake tensors, beside the prediction (takes minutes, needs torch)
  --tables            write conf/tables/
  --ladder            print recipes/README.md
  --validate [FILE]   predict published measurements (or those of FILE.csv) and print the errors; --plot=PNG draws them
  --json              print machine-readable results
  recipe=NAME         a complete run: {recipes}
GPUs: {gpus}
exit code 3: does not fit"""
MODES = ("search", "trace", "tables", "ladder", "validate")


def main(argv: list[str]) -> int:
    flags = {word.removeprefix("--") for word in argv if word in {f"--{name}" for name in (*MODES, "json")}}
    words = [word for word in argv if word.removeprefix("--") not in flags]
    chosen = [mode for mode in MODES if mode in flags]
    if len(chosen) > 1:
        raise ConfigError(f"--{chosen[0]}: not together with --{chosen[1]}")
    if chosen == ["validate"]:
        return validate(words, "json" in flags)
    command = parse_command_line(words)
    if command.help:
        print(HELP.format(recipes=", ".join(recipes()), gpus=", ".join(groups()["gpu"])))
        return EXIT_DONE
    if command.multirun or command.print_config or command.run_folder is not None:
        raise ConfigError("-m, --cfg, run=: are launch/train.py's; a plan is made of keys alone")
    if chosen == ["tables"]:
        return tables(command.overrides)
    if chosen == ["ladder"]:
        return ladder(command.overrides)
    config = compose_config(command.overrides)
    plan = planned(config)
    if chosen == ["search"]:
        return show_search(config, plan, "json" in flags)
    if chosen == ["trace"]:
        return trace(config, plan, "json" in flags)
    return show(config, plan, "json" in flags)


def planned(config: Config) -> Plan:
    """The plan of a config.

    Raises:
        ConfigError: no GPU is named, and none is here.
    """
    gpu = gpu_of(config.gpu.name, config.gpu.memory_gib, config.gpu.price_usd_h) or first_gpu()
    if gpu is None:
        raise ConfigError(f"gpu: must be given where there is none: gpu={'|'.join(groups()['gpu'][1:6])}|..., or gpu=other "
                          f"gpu.memory_gib=...")
    quiet_libraries()  # for a family that transformers has to measure
    architecture = shape_of(config, say=lambda words: print(words, file=sys.stderr, flush=True))
    return make_plan(config, plan_layout(config, architecture, gpu), architecture, gpu)


def show(config: Config, plan: Plan, as_json: bool) -> int:
    """Print the plan; where it does not fit, what does."""
    advice = remedies(config, plan) if plan.verdict == DOES_NOT_FIT else []
    if as_json:
        print(json.dumps(text.as_dict(config, plan) | {"remedies": [asdict(one) for one in advice]}, indent=2))
    else:
        print(text.describe(config, plan))
        if plan.verdict == DOES_NOT_FIT:
            print("\n".join(text.advice_lines(advice)))
    return EXIT_DOES_NOT_FIT if plan.verdict == DOES_NOT_FIT else EXIT_DONE


def show_search(config: Config, plan: Plan, as_json: bool) -> int:
    """Print what fits, fastest first, and why the rest does not."""
    found = search(config, plan)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print(text.describe_search(config, plan, found))
    return EXIT_DONE if found.fitting else EXIT_DOES_NOT_FIT


def trace(config: Config, plan: Plan, as_json: bool) -> int:
    """Print the traced peaks beside the predicted ones."""
    from tonnage.trace.step import trace as trace_step

    traced = trace_step(config, plan.layout, lambda words: print(words, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(text.trace_dict(plan, traced), indent=2))
    else:
        print(text.describe_trace(plan, traced))
    return EXIT_DONE


def tables(overrides: tuple[str, ...]) -> int:
    """Write the accumulation tables."""
    from tonnage.plan.tables import write_tables

    if overrides:
        raise ConfigError(f"{overrides[0]}: --tables takes no keys; it writes the table of every model")
    for file in write_tables(lambda words: print(words, file=sys.stderr, flush=True)):
        print(file)
    return EXIT_DONE


def ladder(overrides: tuple[str, ...]) -> int:
    """Print the page of recipes."""
    from tonnage.plan.ladder import ladder_text

    if overrides:
        raise ConfigError(f"{overrides[0]}: --ladder takes no keys; it is about the recipes")
    print(ladder_text(), end="")
    return EXIT_DONE


def validate(words: list[str], as_json: bool) -> int:
    """Predict measured rows and print how far off that is; 1 where a bound is broken."""
    from tonnage.plan import validate as validation

    plots = [word.removeprefix("--plot=") for word in words if word.startswith("--plot=")]
    files = [word for word in words if not word.startswith("--plot=")]
    if len(files) > 1 or len(plots) > 1:
        raise ConfigError(f"--validate {' '.join(words)}: takes one CSV file, or none for the published rows")
    found = validation.validate(Path(files[0]) if files else None)
    print(json.dumps(validation.to_json(found), indent=1) if as_json else "\n".join(validation.lines(found)))
    if plots:
        validation.plot(found, Path(plots[0]))
    return 1 if found.broken() else EXIT_DONE


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
