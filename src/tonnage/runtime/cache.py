"""Where unpacked models and prepared data are kept."""

import os
from pathlib import Path


def cache_root(wanted: str = "auto") -> Path:
    """`wanted`, or for auto TONNAGE_CACHE, or ~/.cache/tonnage."""
    if wanted != "auto":
        return Path(wanted).expanduser()
    return Path(os.environ.get("TONNAGE_CACHE") or Path.home() / ".cache" / "tonnage")
