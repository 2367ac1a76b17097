"""Export a run: `python launch/export.py run=FOLDER [kind=adapter|merged] [which=newest|best|N] [dtype=bf16] [out=DIR]`."""

import sys
from pathlib import Path

from tonnage.errors import EXIT_DONE, ConfigError
from tonnage.runtime import runs
from tonnage.runtime.entry import guarded, read_options
from tonnage.runtime.logs import quiet_libraries

OPTIONS = {"run": None, "kind": "auto", "which": "newest", "dtype": "bf16", "out": None}
CHOICES = {"kind": ("auto", "adapter", "merged"), "dtype": ("bf16", "fp16", "fp32")}


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
                      Path(options["out"]) if options["out"] else None)
    print(f"exported step {done.step} to {done.folder}")
    print(f"reloaded and compared: logits within {done.deviation:.2g} (relative) of the trained model")
    print(f"it generates: {done.sample!r}")
    return EXIT_DONE


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(guarded(lambda: main(sys.argv[1:])))
