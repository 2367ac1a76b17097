"""What a path in a config may mean: a place on this disk, or a name on the hub."""

import os
import re
from pathlib import Path

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # data sets may have no owner


def may_be_hub_id(path: str) -> bool:
    """Whether `path` has the form of a hub id and nothing on this disk shows that a place here was meant."""
    return bool(HUB_ID.fullmatch(path)) and not os.path.exists(path) and broken_link(path) is None


def broken_link(path: str) -> Path | None:
    """The first link on the way to `path` that leads nowhere, or in a circle: Python calls what lies behind it absent."""
    way = [Path(path), *Path(path).parents]
    return next((part for part in reversed(way) if os.path.islink(part) and not os.path.exists(part)), None)


def missing(path: str) -> str:
    """Why there is nothing at `path`, for an error."""
    link = broken_link(path)
    return "no such file or folder" + (f" ({link} is a link that leads nowhere)" if link else "")
