"""Scripts of launch/ and benchmarks/ as modules: they are no packages, and some are called like modules of the tests."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    """The module of a script, e.g. `launch/train`; what stands beside it can be imported by it."""
    file = ROOT / f"{name}.py"
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
