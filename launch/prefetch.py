"""Fetch weights and tokenise data on a machine with network: `python launch/prefetch.py key=value ...`, as launch/train.py.

Nodes without network then find both in the caches ($HF_HOME, $TONNAGE_CACHE), which must be on a disk they share.
"""

import sys

import _installed  # noqa: F401 - first

from tonnage.config.compose import compose_config, parse_command_line
from tonnage.errors import EXIT_DONE
from tonnage.runtime.entry import guarded
from tonnage.runtime.logs import quiet_libraries


def main(argv: list[str]) -> int:
    command = parse_command_line(argv)
    if command.help:
        print(__doc__)
        return EXIT_DONE
    config = compose_config(command.overrides)
    from tonnage.models.folder import resolve_folder
    from tonnage.train.session import prepare_data

    folder = resolve_folder(config.model)
    print(f"model: {folder}")
    for name, rows in zip(("training", "held-out"), prepare_data(config, folder, progress=True), strict=True):
        print(f"{name} rows: " + ("none to prepare" if rows is None else f"{len(rows):,}, {rows.fingerprint}"))
    return EXIT_DONE


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(guarded(lambda: main(sys.argv[1:])))
