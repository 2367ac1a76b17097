"""Imported first by each script here: one line where Tonnage is not in this Python, in place of a traceback."""

import importlib.util
import sys

for package in ("tonnage", "torch", "hydra", "transformers"):
    if importlib.util.find_spec(package) is None:
        print(f"error: {package} is not installed in this Python ({sys.executable}); source .venv/bin/activate, or make "
              f"setup", file=sys.stderr)
        sys.exit(2)
