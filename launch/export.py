"""Export a run: `python launch/export.py run=FOLDER [kind=adapter|merged] [which=newest|best|N] [dtype=auto] [out=DIR]`.

An adapter is fp32. Merged weights are bf16 where rounding loses little of what was learned, else fp32 (dtype=auto). Where
the base was kept quantised in training, base=original merges into it as it was published (the default), base=trained into
what training saw.
"""

import sys
from pathlib import Path

import _installed  # noqa: F401 - first

from tonnage.errors import EXIT_DONE, ConfigError
from tonnage.runtime import runs
from tonnage.runtime.entry import guarded, read_options
from tonnage.runtime.logs import quiet_libraries

OPTIONS = {"run": None, "kind": "auto", "which": "newest", "dtype": "auto", "out": None,
           "base": "original"}
CHOICES = {"kind": ("auto", "adapter", "merged"), "dtype": ("auto", "bf16", "fp16", "fp32"),
           "base": ("original", "trained")}


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return EXIT_DONE
    options = read_options(argv, OPTIONS, CHOICES)
    if options["run"] is None:
        raise ConfigError("run=: must name the folder of a run; launch/train.py prints it")
    folder = Path(options["run"])
    runs.read_config(folder)
    if options["which"] not in ("newest", "best") and not options["which"].isdigit():
        raise ConfigError(f"which={options['which']}: must be newest, best or a step number")
    from tonnage.train.export import export_run

    done = export_run(folder, options["kind"], options["which"], options["dtype"],
                      Path(options["out"]) if options["out"] else None, options["base"])
    print(f"exported step {done.step} to {done.folder}")
    print(f"reloaded and compared: logits within {done.deviation:.2g} (relative) of what was to be written")
    for note in done.notes:
        print(note)
    print(f"asked {done.question!r}, it answers: {done.answer!r}")
    return EXIT_DONE


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(guarded(lambda: main(sys.argv[1:])))
