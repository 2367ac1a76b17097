"""`python -m tonnage.trace key=value ... [--json]`: the memory of one training step, traced without weights or GPUs."""

import json
import sys
from dataclasses import asdict

from tonnage.config.compose import compose_config
from tonnage.config.rules import resolve_layout
from tonnage.runtime.entry import guarded
from tonnage.runtime.logs import quiet_libraries

GIB = 2**30


def main(argv: list[str]) -> int:
    as_json = "--json" in argv
    config = compose_config(word for word in argv if word != "--json")
    gpus = 1 if config.gpus == "auto" else config.gpus
    device = "cpu" if config.device == "cpu" else "cuda"
    layout = resolve_layout(config, gpus, device, gpus if config.cluster.gpus_per_node == "auto" else
                            config.cluster.gpus_per_node, under_deepspeed=False)

    from tonnage.trace.step import trace

    result = trace(config, layout, lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(asdict(result) | {"fullest": result.fullest}) if as_json else as_text(result))
    return 0


def as_text(result) -> str:
    """Phases across, categories down, GiB."""
    phases, names = result.phases, list(result.phases)
    rows = [["GiB at the peak of", *names]]
    for category in result.peak.by_category:
        values = [phases[name].by_category[category] for name in names]
        if any(values):
            rows.append([category, *(f"{value / GIB:.3f}" for value in values)])
    rows.append(["total", *(f"{phases[name].total / GIB:.3f}" for name in names)])
    lines = [f"{row[0]:22}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows]
    lines += [f"  {category}: {count} x {num_bytes / 2**20:.1f} MiB{maker and f' of {maker}'}"
              for category, maker, num_bytes, count in result.peak.largest]
    return "\n".join([*lines, f"peak {result.peak.total / GIB:.3f} GiB in {result.fullest}; {result.micro_batches} "
                              f"micro-batches; traced in {result.seconds:.0f} s with {result.tracer_peak_gib:.1f} GiB"])


if __name__ == "__main__":
    quiet_libraries()
    sys.exit(guarded(lambda: main(sys.argv[1:])))
