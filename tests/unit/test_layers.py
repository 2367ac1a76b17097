"""The arrows between the parts, held by the syntax tree: who may import whom, and who may import what from outside."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tonnage"
BASE = {"errors"}
GROUND = BASE | {"config", "facts"}
MIDDLE = GROUND | {"runtime"}
TOOLS = {"engines", "models", "data", "report"}
# part -> parts it may import (itself always); launch stands on all but trains through train, plans through plan
MAY_IMPORT = {
    "errors": set(),
    "facts": BASE,
    "config": BASE | {"facts"},
    "runtime": GROUND,
    "report": MIDDLE,
    "data": MIDDLE,
    "models": MIDDLE,
    "engines": MIDDLE | {"models"},
    "plan": GROUND,
    "train": MIDDLE | TOOLS,
    "trace": MIDDLE | TOOLS | {"train", "plan"},
    "launch": MIDDLE | TOOLS | {"train", "plan", "trace"},
}
# library -> the only modules that may import it, wherever in the file
ONLY_IN = {"deepspeed": {"src/tonnage/engines/deepspeed.py"}, "hydra": {"src/tonnage/config/compose.py"},
           "omegaconf": {"src/tonnage/config/compose.py"}}
WITHOUT_TORCH = {"errors", "config", "facts", "plan"}


def modules():
    """(part, path from the root, names it imports) of every module of the package and of launch/."""
    for file in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "launch").glob("*.py")]):
        inside = file.is_relative_to(PACKAGE)
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py") if inside else "launch"
        yield part, str(file.relative_to(ROOT)), imported(file)


def imported(file):
    """Dotted names of all imports of a file, also those inside functions; relative ones spelled out."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = file.relative_to(ROOT / "src").parts[:-node.level]
                module = ".".join([*above, module]).rstrip(".")
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args:
            if isinstance(node.args[0], ast.Constant):
                names.add(node.args[0].value)
    return names


def offenders(fault):
    """Lines `file: imports name` for all imports that `fault(part, file, name)` objects to."""
    return [f"{file}: imports {name}" for part, file, names in modules() for name in sorted(names)
            if fault(part, file, name)]


def part_of(name):
    head, _, rest = name.partition(".")
    return rest.split(".")[0] if head == "tonnage" else None


def test_every_part_has_its_place():
    assert {part for part, _, _ in modules()} - {"__init__"} <= set(MAY_IMPORT)


def test_parts_import_downwards_only():
    def upwards(part, _, name):
        target = part_of(name)
        return target is not None and target != part and target not in MAY_IMPORT.get(part, set())
    assert offenders(upwards) == []


def test_the_arrows_themselves_have_no_circle():
    order = []
    while len(order) < len(MAY_IMPORT):
        ready = [part for part, below in MAY_IMPORT.items() if part not in order and below <= set(order)]
        assert ready
        order += ready


def test_what_must_never_be():
    never = [("models", "engines"), ("data", "models"), ("data", "engines"), ("data", "train"), ("train", "plan"),
             ("plan", "train"), ("runtime", "train"), ("engines", "train")]
    assert offenders(lambda part, _, name: (part, part_of(name)) in never) == []


def test_libraries_stay_where_they_belong():
    def astray(_, file, name):
        library = name.split(".")[0]
        return library in ONLY_IN and file not in ONLY_IN[library]
    assert offenders(astray) == []
    for library, files in ONLY_IN.items():  # or the test would not see a module that moved
        assert files == {file for _, file, names in modules() if any(n.split(".")[0] == library for n in names)}


def test_a_login_node_needs_no_torch():
    heavy = {"torch", "transformers", "peft", "deepspeed", "numpy"}
    assert offenders(lambda part, _, name: part in WITHOUT_TORCH and name.split(".")[0] in heavy) == []
