"""docs/config.md from the schema: `python -m tonnage.config.docs`."""

import dataclasses

from tonnage.config.compose import ALIASES, describe_type, groups, schema_fields


def config_markdown() -> str:
    """Every key with its type, default and meaning, and the choices of every group."""
    lines = ["# Configuration", "",
             "Generated from `src/tonnage/config/schema.py` by `make docs`. On the command line every key is",
             "`key=value`; lists are `[a,b]`, off is `null`, work it out is `auto`. Precedence: defaults < recipe <",
             "command line. `python launch/train.py --cfg ...` prints the composed config.", "", "## Groups", "",
             "| group | choices |", "| --- | --- |"]
    lines += [f"| `{name}=` | {', '.join(choices)} |" for name, choices in groups().items()]
    lines += ["", "Short for a key: " + ", ".join(f"`{alias}=` is `{name}=`" for alias, name in ALIASES.items()) + "."]
    section = None
    for name, item in schema_fields().items():
        head = name.rpartition(".")[0]
        if head != section:
            section = head
            lines += ["", f"## {head or 'Top level'}", "", "| key | value | default | meaning |",
                      "| --- | --- | --- | --- |"]
        lines.append(f"| `{name}` | {describe_type(item.type)} | `{_default(item)}` | {item.metadata['text']} |")
    return "\n".join(lines) + "\n"


def _default(item):
    value = item.default if item.default is not dataclasses.MISSING else item.default_factory()
    return {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, (bool, type(None))) else value


if __name__ == "__main__":
    print(config_markdown(), end="")
