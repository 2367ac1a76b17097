"""From a command line to a checked `Config`: the only module that knows Hydra.

Hydra composes the groups of conf/ and parses overrides (https://hydra.cc/docs/1.3/advanced/override_grammar/basic/);
the schema types the values. Every key is checked against the schema, `+key=` too, which Hydra itself lets through.
Precedence: defaults < recipe < command line.
"""

import dataclasses
import difflib
import itertools
import os
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from tonnage.config.schema import Config, DataSet
from tonnage.errors import ConfigError
from tonnage.facts.gpus import GPUS

ROOT = Path(__file__).resolve().parents[3]
CONF = ROOT / "conf"
RECIPES = ROOT / "recipes"
ALIASES = {"accumulation": "batch.accumulation_steps"}
# groups whose choices are a table of facts: a YAML file each would say its own name and no more
TABLES = {"gpu": ("auto", "other", *GPUS)}
for _group, _choices in TABLES.items():
    for _choice in _choices:
        ConfigStore.instance().store(group=_group, name=_choice, node={"name": _choice})


@dataclass(frozen=True)
class CommandLine:
    """What a user typed: overrides (`key=value`), flags, and the run folder to go on with, if any."""

    overrides: tuple[str, ...] = ()
    run_folder: Path | None = None
    multirun: bool = False
    print_config: bool = False
    help: bool = False


def parse_command_line(argv: list[str]) -> CommandLine:
    """Split `argv` into overrides and flags; the `--local_rank=N` that deepspeed appends is dropped.

    Raises:
        ConfigError: a flag that is not known.
    """
    overrides, run_folder, flags = [], None, {"multirun": False, "print_config": False, "help": False}
    names = {"-m": "multirun", "--multirun": "multirun", "--cfg": "print_config", "-h": "help", "--help": "help"}
    for word in argv:
        if word.startswith(("--local_rank=", "--local-rank=")):
            continue
        if word in names:
            flags[names[word]] = True
        elif word.startswith("-"):
            raise ConfigError(f"{word}: unknown flag; known are {', '.join(names)}; all else is key=value")
        elif word.startswith("run="):
            run_folder = Path(word.removeprefix("run="))
        else:
            overrides.append(word)
    return CommandLine(tuple(overrides), run_folder, **flags)


def groups() -> dict[str, list[str]]:
    """Config groups, of conf/ and of `TABLES`, and their choices."""
    folders = {folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
               for folder in CONF.iterdir() if folder.is_dir() and folder.name != "tables"}
    return dict(sorted((folders | {group: list(choices) for group, choices in TABLES.items()}).items()))


def recipes() -> list[str]:
    """Names of the recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def compose_config(overrides: typing.Iterable[str], base: dict | None = None) -> Config:
    """The checked configuration of `overrides` over `base` (a former run's config) or over the defaults and a recipe.

    Raises:
        ConfigError: a key that does not exist (with the nearest that does), a value of the wrong type, an unknown
            choice or recipe, a value that is still missing.
    """
    return with_absolute_paths(to_schema(compose_mapping(overrides, base)))


def compose_mapping(overrides: typing.Iterable[str], base: dict | None = None) -> dict:
    """As `compose_config`, as plain nested dicts and before the types are checked."""
    overrides = list(overrides)
    (recipe_choices, recipe_values), (typed_choices, typed_values) = (
        _choices_and_values(items) for items in (_recipe_items(overrides), _override_items(overrides)))
    choices = recipe_choices | typed_choices
    replaced = [group for group, choice in typed_choices.items() if recipe_choices.get(group) != choice]
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            composed = compose("config", overrides=[f"{group}={choice}" for group, choice in choices.items()])
        config = composed if base is None else OmegaConf.create(base)
        OmegaConf.set_struct(config, False)
        for group in choices:
            # what the preset does not state stays: over a former run's config that is the run's own
            config[group] = OmegaConf.merge(config.get(group, {}), composed[group])
        for key, value in recipe_values:
            group, _, rest = key.partition(".")
            # what a preset chosen on the command line states goes over what the recipe says
            if not (group in replaced and rest in composed[group]):
                OmegaConf.update(config, key, value, merge=False)
        for key, value in typed_values:
            OmegaConf.update(config, key, value, merge=False)
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key}: must be given; add {error.full_key}=...") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_line(error)) from error


def with_absolute_paths(config: Config) -> Config:
    """`config` with local paths made absolute, so that a run goes on from any working directory.

    A relative path is looked for here, then in the repository (the data and recipes it ships). `~` is the home folder:
    no shell replaces it behind `key=`.
    """
    replace = dataclasses.replace
    data = replace(config.data, path=_absolute(config.data.path), chat_template=_absolute(config.data.chat_template),
                   sets=[replace(one, path=_absolute(one.path)) for one in config.data.sets])
    return replace(config, data=data, eval=replace(config.eval, path=_absolute(config.eval.path)),
                   model=replace(config.model, path=_absolute(config.model.path)))


def _absolute(path):
    path = path and os.path.expanduser(path)
    for place in (Path.cwd(), ROOT):
        if path and os.path.exists(place / path):
            return str((place / path).resolve())
    return path


def expand_sweep(overrides: typing.Iterable[str]) -> list[list[str]]:
    """The cross product of comma-separated values: one list of overrides a run."""
    axes = []
    for override in _parse(overrides):
        try:
            axes.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
                        if override.is_sweep_override() else [override.input_line])
        except HydraException as error:  # glob()
            raise ConfigError(f"{override.input_line}: name the values, as in {override.key_or_group}=a,b") from error
    return [list(point) for point in itertools.product(*axes)]


def to_schema(mapping: dict) -> Config:
    """`mapping` (nested dicts) as a typed `Config`.

    Raises:
        ConfigError: names the key, its value and the rule.
    """
    try:
        return TypeAdapter(Config).validate_python(mapping)
    except ValidationError as error:
        lines = {}
        for fault in error.errors():
            name, annotation = _field_at(fault["loc"])
            if annotation is None:
                lines[name] = f"{name}: no such key{_did_you_mean(name)}"
            else:
                lines[name] = f"{name}={_value_at(mapping, name)!r}: must be {describe_type(annotation)}"
        raise ConfigError("\n".join(lines.values())) from error


def schema_fields(cls: type = Config, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Dotted key -> field of every leaf of the schema, in order."""
    leaves = {}
    for item in dataclasses.fields(cls):
        name = prefix + item.name
        if dataclasses.is_dataclass(item.type):
            leaves |= schema_fields(item.type, name + ".")
        else:
            leaves[name] = item
    return leaves


def describe_type(annotation: Any) -> str:
    """An annotation in words, for errors and docs: `a whole number of at least 1, or auto`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        if getattr(args[1], "description", None):
            return args[1].description
        bounds = [f"{word} {value:g}" for limit in args[1].metadata for name, word in
                  (("ge", "of at least"), ("gt", "above"), ("le", "of at most"), ("lt", "below"))
                  if (value := getattr(limit, name, None)) is not None]
        return " ".join([describe_type(args[0])] + [" and ".join(bounds)] * bool(bounds))
    if origin is typing.Literal:
        return " or ".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(describe_type(arg) for arg in args)
    if origin is list:
        return f"a list of {describe_type(args[0]).removeprefix('a ').replace('mapping of', 'mappings of')}" + (
            "" if dataclasses.is_dataclass(args[0]) else "s")
    if origin is tuple:
        return f"{len(args)} values, each {describe_type(args[0])}"
    if origin is dict:
        return "a mapping"
    if dataclasses.is_dataclass(annotation):
        return f"a mapping of {', '.join(item.name for item in dataclasses.fields(annotation))}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text",
            type(None): "null (off)"}[annotation]


def _parse(overrides):
    parser, parsed = OverridesParser.create(), []
    for word in overrides:
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            raise ConfigError(_not_readable(parser, word)) from error
        if not override.key_or_group or override.package is not None:  # Hydra's key@package=value has no use here
            raise ConfigError(_not_readable(parser, word))
        parsed.append(override)
    return parsed


def _not_readable(parser, word):
    """What to write instead of `word`; the parser's own words are about its grammar and help nobody."""
    key, equals, value = word.partition("=")
    rule = f"{word if word.strip() else repr(word)}: cannot be read: must be key=value, as in optimizer.learning_rate=1e-4"
    if not equals or not re.fullmatch(r"[\w./+~]*\w", key):
        return rule
    if value.startswith("["):
        return f"{rule}; a list is '{key}=[a, b]'"
    if value.startswith("{"):
        return f"{rule}; a mapping is '{key}={{name: a}}'"
    quoted = f'{key}="{value}"'
    try:
        parser.parse_override(quoted)
    except HydraException:
        return rule
    return f"{rule}; a value with special characters goes in quotes: '{quoted}'"


def _choices_and_values(items):
    choices, values = {}, []
    for key, value in items:
        if key in groups() and isinstance(value, str):
            _require_choice(key, value)
            choices[key] = value
        else:
            values.append((_checked_key(key), value))
    return choices, values


def _override_items(overrides):
    items = []
    for override in _parse(overrides):
        if override.is_delete():
            raise ConfigError(f"{override.input_line}: keys cannot be deleted; set {override.key_or_group}=null")
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: several values are a sweep; add -m for one run each")
        if override.key_or_group != "recipe":
            items.append((override.key_or_group, override.value()))
    return items


def _recipe_items(overrides):
    names = [override.value() for override in _parse(overrides) if override.key_or_group == "recipe"]
    if not names:
        return []
    file = RECIPES / f"{names[-1]}.yaml"
    if not file.is_file():
        raise ConfigError(f"recipe={names[-1]}: no such recipe{_nearest(str(names[-1]), recipes())}")
    try:
        mapping = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(mapping, dict):
        raise ConfigError(f"{file}: must be a mapping of keys to values")
    return list(_flatten(mapping))


def _flatten(mapping, prefix=""):
    keys = schema_fields()
    for name, value in mapping.items():
        if isinstance(value, dict) and prefix + name not in keys:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _checked_key(name):
    """`name` if the schema has it, or a section or a free mapping above it.

    Raises:
        ConfigError: with the nearest names.
    """
    name = ALIASES.get(name, name)
    keys = schema_fields()
    inside_mapping = any(name.startswith(known + ".") and typing.get_origin(item.type) is dict
                         for known, item in keys.items())
    if name in keys or inside_mapping:
        return name
    if any(known.startswith(name + ".") for known in keys):
        choices = groups().get(name)
        raise ConfigError(f"{name}: a section; set one of its keys" + (f" or choose {', '.join(choices)}" if choices
                                                                       else ""))
    raise ConfigError(f"{name}: no such key{_did_you_mean(name)}")


def _require_choice(group, choice):
    choices = groups()[group]
    if choice not in choices:
        raise ConfigError(f"{group}={choice}: no such choice{_nearest(choice, choices)}")


def _did_you_mean(name):
    names = list(schema_fields()) + list(ALIASES) + list(groups())
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if name.startswith("data.sets."):
        near = [f"data.sets.{name.split('.')[2]}.{known}" for known in difflib.get_close_matches(
            name.rsplit(".", 1)[-1], [item.name for item in dataclasses.fields(DataSet)], n=1)]
    # a right last word in the wrong section is a near miss too: learning_rate -> optimizer.learning_rate
    tail = name.rsplit(".", 1)[-1]
    near += [known for known in names if known.rsplit(".", 1)[-1] == tail and known not in near]
    return f"; did you mean {', '.join(near[:3])}?" if near else "; docs/config.md lists all keys"


def _nearest(name, known):
    near = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {', '.join(near)}?" if near else f"; there are {', '.join(known)}"


def _field_at(location):
    """(dotted name, annotation or None) of pydantic's error location, which also names members of unions."""
    cls, names, annotation = Config, [], None
    for part in location:
        if isinstance(part, int) and typing.get_origin(annotation) is list:
            annotation = typing.get_args(annotation)[0]
            cls = annotation if dataclasses.is_dataclass(annotation) else None
            names.append(str(part))
            continue
        items = {item.name: item for item in dataclasses.fields(cls)} if cls else {}
        if part in items:
            annotation = items[part].type
            cls = annotation if dataclasses.is_dataclass(annotation) else None
            names.append(str(part))
        elif cls:
            return ".".join(names + [str(part)]), None
        else:
            break
    return ".".join(names), annotation


def _value_at(mapping, name):
    for part in name.split("."):
        if isinstance(mapping, list):
            mapping = mapping[int(part)]
        else:
            mapping = mapping.get(part) if isinstance(mapping, dict) else None
    return mapping


def _first_line(error):
    return str(error).strip().splitlines()[0]
