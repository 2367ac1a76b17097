"""The planner beside what others measured: every row of facts/published.csv that has the fields, predicted.

`launch/plan.py --validate [FILE.csv] [--json] [--plot=PNG]` prints the errors per source and family, what misses and
why rows cannot be predicted; exit code 1 when a bound is broken. Peaks of torch's tensors are what is judged; readings of
its cache and of nvidia-smi are shown apart. Groups are halved by one rule (`published.is_fitted`).

No number in the prediction of tensors was fitted: plan.profiles names the source of each. `CACHE_SHARE` was, on the
fitted half, and so were three constants of plan.speed.
"""

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

from tonnage.errors import ConfigError
from tonnage.facts.gpus import GPUS
from tonnage.plan import speed
from tonnage.plan.profiles import predict
from tonnage.plan.published import Published, Row, group_of, is_fitted, predictable, rows
from tonnage.plan.verdict import DOES_NOT_FIT, FITS, TIGHT, verdict

CONTEXT_GIB = 0.7  # of CUDA, 0.5 to 0.9. Source: stas00/ml-engineering, training/performance
COMMUNICATORS_GIB = 1.5  # on more than one GPU. Source: the same
# Of the peak of tensors, what the caching allocator holds beyond it. Fitted: the median of nvidia-smi's reading less the
# two above, in the 65 Mistral rows of IBM's benchmark; 0.06 in the lowest tenth and 0.41 in the highest, since the cache
# fills what memory there is.
CACHE_SHARE = 0.15
LEAST_PEAKS, MEDIAN_ERROR, HIGH_ERROR, DIES_SHARE, TIGHT_SHARE, SPEED_FACTOR = 150, 0.03, 0.10, 0.01, 0.15, 1.25

TENSORS = ("allocated", "active")
# Sources of groups beyond the bounds, and why.
CAUSES = {
    "litgpt resource-tables":
        "its Llama holds one tensor of hidden width a norm more than the source at the commit that the page names; 4-bit "
        "rows hold 3 to 5 % more that nothing found explains; on 2 GPUs later micro-batches, whose lengths are not known, "
        "meet sums of gradients that the longest, the first, does not",
    "torchtune README table 1":
        "the table states batch, length and compile alone; rank, checkpointing and loss are of the shipped configs, which "
        "its A6000 rows contradict (30.3 GiB and 16.2 GiB for one config) and of which the 405B one has a batch of 1",
    "torchtune README table 2 (ladder)":
        "what torch.compile keeps of a loss and a layer is taken from eager kernels; 8-bit AdamW saved 1.8 GiB less "
        "than two bytes a parameter",
    "ColossalChat hardware requirements":
        "accumulation is not stated; on 4 GPUs the logits of the stated batch alone exceed the peak, so it may be global",
    "Liger-Kernel examples chart":
        "chart labels without versions; 20 bytes a parameter for the step are 5.6 GiB below the lowest, which nothing "
        "stated explains",
}


@dataclass(frozen=True)
class Case:
    """A measured row beside its prediction, GiB on the fullest GPU.

    `predicted_gib` is of what `peak_kind` names: tensors; with the allocator's share, reserved; with context and
    communicators, device. `error` is relative and signed; None with the reason in `why`. `half`: fitted or untouched.
    """

    id: str
    source: str
    family: str
    half: str
    predicted_gib: float | None
    published_gib: float | None
    peak_kind: str
    error: float | None
    verdict: str | None
    why: str | None


@dataclass(frozen=True)
class Errors:
    """Of one group of cases: number, median and 90th percentile of |error|, median of the signed error."""

    name: str
    number: int
    middle: float
    high: float
    bias: float


@dataclass(frozen=True)
class Validation:
    """All cases, the speeds, and what nvidia-smi showed beside peaks of tensors."""

    cases: tuple[Case, ...]
    speeds: tuple[speed.Comparison, ...]
    readings: tuple[Case, ...] = ()
    is_shipped: bool = True

    def of(self, *kinds: str) -> list[Case]:
        """Cases with an error, of peaks of these kinds."""
        return [case for case in self.cases if case.error is not None and case.peak_kind in kinds]

    @property
    def half(self) -> dict[str, list[Case]]:
        """Peaks of tensors by half."""
        return {half: [case for case in self.of(*TENSORS) if case.half == half] for half in ("fitted", "untouched")}

    @property
    def frontier(self) -> dict[str, Counter]:
        """Verdicts on runs that died and on runs that ran."""
        judged = [case for case in self.cases if case.verdict]
        return {"out of memory": Counter(case.verdict for case in judged if case.peak_kind == "out of memory"),
                "ran": Counter(case.verdict for case in judged if case.peak_kind != "out of memory")}

    def broken(self) -> list[str]:
        """The bounds that do not hold, as sentences."""
        tensors, untouched, ran = self.of(*TENSORS), self.half["untouched"], self.frontier["ran"]
        factors = [row[2] for row in speed.summary(list(self.speeds)) if row[0] in ("fitted", "untouched")]
        bounds = [
            (f"{len(tensors)} peaks of tensors predicted, fewer than {LEAST_PEAKS}",
             len(tensors) >= LEAST_PEAKS or not self.is_shipped),
            (f"{self.frontier['out of memory'][FITS]} runs out of memory are called '{FITS}'",
             not self.frontier["out of memory"][FITS]),
            (f"{ran[DOES_NOT_FIT]} of {ran.total()} runs that ran are called '{DOES_NOT_FIT}', more than {DIES_SHARE:.0%}",
             ran[DOES_NOT_FIT] <= DIES_SHARE * ran.total()),
            (f"{ran[TIGHT]} of {ran.total()} runs that ran are called '{TIGHT}', more than {TIGHT_SHARE:.0%}",
             ran[TIGHT] <= max(1, TIGHT_SHARE * ran.total())),  # one row proves nothing
            (f"speed: median factor {max(factors, default=1):.2f}, above {SPEED_FACTOR}",
             max(factors, default=1) <= SPEED_FACTOR),
        ]
        if untouched:
            found = errors("untouched", untouched)
            bounds += [(f"untouched half: median |error| {found.middle:.1%}, above {MEDIAN_ERROR:.0%}",
                        found.middle <= MEDIAN_ERROR),
                       (f"untouched half: 90th percentile {found.high:.1%}, above {HIGH_ERROR:.0%}",
                        found.high <= HIGH_ERROR)]
        return [words for words, holds in bounds if not holds]


def validate(path: Path | None = None) -> Validation:
    """Predict every measured row of the file, of facts/published.csv by default."""
    among = rows(path)
    cases, readings = [], []
    for row in among:
        if row.peak_gib is None and not row.did_not_fit:
            continue
        found = predictable(row)
        peak = _peak(found)
        cases.append(_case(row, found, peak))
        shown = re.search(r"nvidia-smi peak \d+ MiB \(= ([\d.]+) GiB", row.notes)
        if shown and row.peak_gib is not None:
            readings.append(_case(replace(row, peak_gib=float(shown[1]), peak_class="device"), found, peak))
    return Validation(tuple(cases), tuple(speed.compare(among)), tuple(readings), is_shipped=path is None)


@cache
def groups() -> tuple[tuple[str, str], ...]:
    """The (source, family) groups with a predicted peak of tensors, of facts/published.csv."""
    found = [predictable(row) for row in rows() if row.has_tensor_peak]
    return tuple(sorted({group_of(item) for item in found if not isinstance(_peak(item), str)}))


def half_of(found: Published) -> str:
    """`fitted` or `untouched`; what is not in facts/published.csv nothing was fitted on."""
    group = group_of(found)
    return "fitted" if group in groups() and is_fitted(group, list(groups())) else "untouched"


def _peak(found: Published | str) -> float | str:
    """Predicted peak of tensors in bytes, or why there is none."""
    if isinstance(found, str):
        return found
    if found.is_stand_in:
        return "the shape is a stand-in, equal in weights and not in activations"
    peak = predict(found)
    if found.seq_is_bound and peak.peak_phase != "step":
        return "lengths vary, and the peak depends on the longest, which is not known"
    return peak.peak_bytes


def _case(row: Row, found: Published | str, peak: float | str) -> Case:
    kind = "out of memory" if row.did_not_fit else row.peak_class or "unspecified"
    family = "" if isinstance(found, str) else found.job.architecture.model_type
    half = "" if isinstance(found, str) else half_of(found)
    if isinstance(peak, str):
        return Case(row.id, row.source, family, half, None, row.peak_gib, kind, None, None, peak)
    gpu = GPUS.get(found.gpu)
    size = peak / 2**30 + outside_gib(kind, peak / 2**30, found.job.gpus)
    why = None if row.peak_gib is not None and kind in (*TENSORS, "reserved", "device") else (
        "it did not fit" if row.did_not_fit else "what was measured is not stated")
    return Case(row.id, row.source, family, half, size, row.peak_gib, kind, None if why else size / row.peak_gib - 1,
                verdict(peak, gpu.memory_gib) if gpu else None, why)


def outside_gib(kind: str, tensors_gib: float, gpus: int) -> float:
    """What a reading of this kind holds beside tensors: the cache; to nvidia-smi, context and communicators too."""
    if kind not in ("reserved", "device"):
        return 0.0
    process = CONTEXT_GIB + COMMUNICATORS_GIB * (gpus > 1) if kind == "device" else 0.0
    return CACHE_SHARE * tensors_gib + process


def errors(name: str, cases: list[Case]) -> Errors:
    """The errors of cases that have one."""
    sizes = sorted(abs(case.error) for case in cases)
    return Errors(name, len(cases), median(sizes), sizes[math.ceil(0.9 * len(sizes)) - 1],
                  median(case.error for case in cases))


def tables(found: Validation) -> dict[str, list[Errors]]:
    """Errors of tensors by half, of every group, and of other readings by source."""
    tensors = found.of(*TENSORS)

    def grouped(cases, name):
        names = sorted({name(case) for case in cases})
        return [errors(each, [case for case in cases if name(case) == each]) for each in names]

    halves = [errors(name, cases) for name, cases in ({"all": tensors} | found.half).items() if cases]
    return {
        "peaks of tensors": halves,
        "by source and family (f fitted, u untouched)": grouped(
            tensors, lambda case: f"{case.half[0]} {case.source}, {case.family}"),
        "cache and nvidia-smi, with the allocator's share": grouped(
            found.of("reserved", "device") + [case for case in found.readings if case.error is not None],
            lambda case: f"{case.peak_kind}: {case.source}, {case.family}"),
    }


def lines(found: Validation) -> list[str]:
    """The report as text."""
    text = []
    for title, table in tables(found).items():
        text.append(f"\n{title:70} rows  median   90 %    bias")
        text += [f"{row.name:70} {row.number:4} {row.middle:7.1%} {row.high:6.1%} {row.bias:+7.1%}" for row in table]
    for (source, family), cases in _missed(found).items():
        text.append(f"\n{source}, {family}: beyond {MEDIAN_ERROR:.0%} in the median or {HIGH_ERROR:.0%} in the highest "
                    f"tenth: {CAUSES.get(source, 'no cause found')}")
        text += [f"  {case.id:24} predicted {case.predicted_gib:6.2f} GiB, measured {case.published_gib:6.2f}  "
                 f"{case.error:+.1%}" for case in cases]
    text += [f"\n{what}: " + ", ".join(f"{number} {word}" for word, number in counter.most_common())
             for what, counter in found.frontier.items()]
    text.append("\ntokens/s, factor between ours and theirs")
    text += [f"{name:70} {number:4}  x{middle:.2f}  90 % x{high:.2f}"
             for name, number, middle, high, _ in speed.summary(list(found.speeds))]
    text.append("\nwithout an error, and why")
    text += [f"  {number:4}  {why}" for why, number in Counter(case.why for case in found.cases if case.why).most_common()]
    return text + [f"\nbroken: {words}" for words in found.broken()]


def _missed(found: Validation) -> dict[tuple[str, str], list[Case]]:
    """The groups whose errors are beyond what is asked of the untouched half, with their rows."""
    by_group = {}
    for case in found.of(*TENSORS):
        by_group.setdefault((case.source, case.family), []).append(case)
    return {group: cases for group, cases in sorted(by_group.items())
            if errors("", cases).middle > MEDIAN_ERROR or errors("", cases).high > HIGH_ERROR}


def to_json(found: Validation) -> dict:
    """An object with `rows`, each {id, predicted_gib, published_gib, peak_kind, error, verdict, why}."""
    names = ("id", "predicted_gib", "published_gib", "peak_kind", "error", "verdict", "why")
    return {"rows": [{name: asdict(case)[name] for name in names} for case in found.cases], "broken": found.broken()}


def plot(found: Validation, path: Path) -> None:
    """Predicted against measured peaks of tensors as a PNG; needs matplotlib (requirements-dev.txt)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot: needs matplotlib; pip install -r requirements-dev.txt") from error

    figure = Figure(figsize=(6, 6), dpi=120, layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="measured, GiB", ylabel="predicted, GiB",
                              title="Peak of tensors on one GPU")
    for (half, cases), colour in zip(found.half.items(), ("tab:blue", "tab:orange"), strict=True):
        axes.plot([case.published_gib for case in cases], [case.predicted_gib for case in cases], "o", color=colour,
                  alpha=0.6, markersize=5, label=f"{half} half, {len(cases)} rows")
    ends = [2.5, 100]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="gray", alpha=0.2,
                      label="±10 %")
    ticks = [3, 5, 10, 20, 40, 80]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set(xlim=ends, ylim=ends)
    axes.legend()
    figure.savefig(path)
