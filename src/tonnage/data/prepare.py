"""Prepared data: tokenised once, cached under a fingerprint of all it depends on, memory-mapped afterwards.

A cache folder holds the samples in reading order and, for each part (train, holdout), which samples make up each row.
It is written aside and renamed, so that it is whole or not there. Format of the arrays:
https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.config.schema import Data, DataSet
from tonnage.data.formats import Counts, Skipped, Source, log_skipped
from tonnage.data.pack import Row, best_fit, check_dropped, cut, make_row
from tonnage.data.template import Encoder, Sample, decode_marked, load_tokenizer, read_template
from tonnage.errors import ConfigError, DataError, ModelError
from tonnage.runtime.cache import cache_root

# Raise it with any change of what is written for the same input: old caches are then not found any more.
DATA_CODE_VERSION = 1
TOKENIZER_FILES = ("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges*", "special_tokens_map.json",
                   "added_tokens.json", "chat_template*", "chat_templates/*", "additional_chat_templates/*")
BATCH_RECORDS = 1000
BAD_RECORDS, SHOWN_RECORDS = "bad_records.json", 3
PROGRESS_EVERY_S = 5.0


class Rows:
    """Prepared rows, memory-mapped; `rows[i]` is a Row.

    Attributes:
        fingerprint: identity of the rows and of their order: content, settings, weights.
        input_tokens, label_tokens: int32[num_rows], non-padding tokens and labels of each row.
        weights: float64[num_rows], of the row's data set. sets: int32[num_rows], its number.
        stats: counts over all sets, and under `sets` for each; `padding_fraction` if rows were padded to seq_tokens.
        first: the first sample. notes: remarks on the chat template.
        bad_records: where each record that was skipped is, and why.
    """

    def __init__(self, folder: Path, part: str, weights: Sequence[float]) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        self._tokens, self._trained, self._starts, labels = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "trained", "starts", "label_tokens"))
        self._members, self._rows, self.sets = (
            np.load(folder / f"{part}_{name}.npy", mmap_mode="r") for name in ("members", "rows", "sets"))
        lengths = np.diff(self._starts)[self._members]
        self.input_tokens = np.add.reduceat(lengths, self._rows[:-1]).astype(np.int32)
        self.label_tokens = np.add.reduceat(labels[self._members], self._rows[:-1]).astype(np.int32)
        self.weights = np.asarray(weights, dtype=np.float64)[self.sets]
        self.fingerprint = _hash({"rows": meta["key"], "part": part, "weights": [float(weight) for weight in weights]})
        self.notes, self.first = meta["notes"], self._sample(0)
        bad = folder / BAD_RECORDS
        self.bad_records: list[str] = json.loads(bad.read_text()) if bad.is_file() else []
        self.stats = _stats(meta, self)

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return make_row([self._sample(number) for number in self._members[self._rows[index]:self._rows[index + 1]]])

    def _sample(self, number: int) -> Sample:
        here = slice(self._starts[number], self._starts[number + 1])
        return Sample(np.array(self._tokens[here]), np.array(self._trained[here]))


def prepare(sets: Sequence[DataSet], data: Data, tokenizer_folder: str, *, seq_tokens: int, packing: bool,
            progress: bool = False) -> Rows:
    """The rows of these data sets, from the cache or newly made; each row holds samples of one set.

    Raises:
        DataError: data that cannot be read, a bad record (unless data.on_bad=skip), too many samples dropped.
        ConfigError, ModelError: no data set named, no usable tokenizer or chat template.
    """
    return _open(sets, data, tokenizer_folder, seq_tokens, packing, 0.0, 0, progress)["train"]


def prepare_split(sets: Sequence[DataSet], data: Data, tokenizer_folder: str, *, seq_tokens: int, packing: bool,
                  fraction: float, seed: int, progress: bool = False) -> tuple[Rows, Rows]:
    """Like `prepare`, with a share of each set's samples held out before packing: (train rows, held-out rows).

    The split is a function of data and seed; every sample is in exactly one of the two.

    Raises:
        DataError: as in `prepare`, or one side would be empty.
    """
    parts = _open(sets, data, tokenizer_folder, seq_tokens, packing, fraction, seed, progress)
    return parts["train"], parts["holdout"]


def fingerprint(sets: Sequence[DataSet], data: Data, tokenizer_folder: str, *, seq_tokens: int, packing: bool,
                fraction: float = 0.0, seed: int = 0, contents: bool = True) -> str:
    """A hash of all that the rows depend on, and of nothing else: no paths, no weights, no output folders.

    `contents=False` takes the sizes of data files for their contents (streams of terabytes).
    """
    if not sets:
        raise ConfigError("data.path=None: no data named; set data.path to a file, a folder or a hub id")
    streaming = not contents
    return _hash({
        "version": DATA_CODE_VERSION,
        "sets": [{"content": Source(one, streaming=streaming).identity(contents=contents), "format": one.format,
                  "columns": one.columns} for one in sets],
        "tokenizer": _tokenizer_identity(tokenizer_folder),
        "chat_template": read_template(data.chat_template) if data.chat_template else None,
        "seq_tokens": seq_tokens, "packing": packing, "truncate": data.truncate, "train_on": data.train_on,
        "system": data.system, "on_bad": data.on_bad, "holdout": [fraction, seed] if fraction else None})


def sample_batches(source: Source, encoder: Encoder, data: Data, counts: Counts, *, seq_tokens: int, skip: int = 0,
                   batch_records: int = BATCH_RECORDS, skipped: Skipped = log_skipped) -> Iterator[list[Sample]]:
    """Yields tokenised samples, cut to `seq_tokens`, from record `skip` on; never reads ahead of what it has yielded.

    `counts` grows by what was read, skipped, cut and dropped; `skipped` is told of each bad record.

    Raises:
        DataError: a bad record, unless data.on_bad=skip.
    """
    records = source.records(data.on_bad, counts, skip, skipped)
    while batch := list(islice(records, batch_records)):
        rendered = []
        for origin, record in batch:
            try:
                rendered.append(encoder.render(record, origin))
            except DataError as error:
                if data.on_bad == "error":
                    raise
                counts.bad += 1
                skipped(str(error))
        samples = (cut(sample, seq_tokens, data.truncate, counts) for sample in encoder.encode(rendered))
        yield [sample for sample in samples if sample is not None]


def describe(rows: Rows, tokenizer: Any) -> str:
    """The start-up text: what was read, cut, dropped and skipped, the padding, and the first sample with its marks."""
    stats = rows.stats
    lines = [
        (f"data: {len(rows):,} rows from {stats['kept']:,} samples ({stats['read']:,} read), "
         f"{int(rows.input_tokens.sum()):,} tokens, {int(rows.label_tokens.sum()):,} of them trained"),
        (f"  longest sample {stats['longest_tokens']:,} tokens; {stats['truncated']:,} cut to "
         f"{stats['seq_tokens']:,}; padding {stats['padding_fraction']:.0%} of rows of that length"),
        (f"  dropped {stats['dropped_unlabelled']:,} without a label, {stats['dropped_long']:,} too long; skipped "
         f"{stats['bad']:,} bad records")]
    lines += [f"    {why}" for why in rows.bad_records[:SHOWN_RECORDS]]
    if len(rows.bad_records) > SHOWN_RECORDS:
        lines += [f"    ... and {len(rows.bad_records) - SHOWN_RECORDS:,} more, named in logs/rank-0.log"]
    if len(stats["sets"]) > 1:
        lines += [f"  set {number}: {one['kept']:,} samples, {one['tokens']:,} tokens"
                  for number, one in enumerate(stats["sets"])]
    lines += [f"  note: {note}" for note in rows.notes]
    return "\n".join([*lines, "  first sample, trained parts in ⟦ ⟧:", decode_marked(tokenizer, rows.first)])


def _open(sets, data, tokenizer_folder, seq_tokens, packing, fraction, seed, progress) -> dict[str, Rows]:
    key = fingerprint(sets, data, tokenizer_folder, seq_tokens=seq_tokens, packing=packing, fraction=fraction,
                      seed=seed)
    root = cache_root(data.cache)
    folder = root / key
    if not _intact(folder, key):
        root.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
        aside.chmod(0o755)  # mkdtemp makes it private, and caches may be shared
        try:
            _build(aside, key, sets, data, tokenizer_folder, seq_tokens, packing, fraction, seed, progress)
            _move_in(aside, folder, key)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    meta = json.loads((folder / "meta.json").read_text())
    check_dropped([Counts(**one) for one in meta["sets"]], data, seq_tokens)
    weights = [one.weight for one in sets]
    return {part: Rows(folder, part, weights) for part in meta["parts"]}


def _build(folder, key, sets, data, tokenizer_folder, seq_tokens, packing, fraction, seed, progress) -> None:
    encoder = Encoder(load_tokenizer(tokenizer_folder), chat_template=data.chat_template, system=data.system,
                      train_on=data.train_on)
    counts, lengths, labels, bad = [Counts() for _ in sets], [], [], []
    with (_appending(folder / "tokens.npy", np.int32) as add_tokens,
          _appending(folder / "trained.npy", np.bool_) as add_trained, _progress(progress, len(sets)) as show):
        for number, data_set in enumerate(sets):
            source = Source(data_set)
            for batch in sample_batches(source, encoder, data, counts[number], seq_tokens=seq_tokens,
                                        skipped=bad.append):
                for sample in batch:
                    add_tokens(sample.tokens)
                    add_trained(sample.trained)
                lengths.extend(len(sample.tokens) for sample in batch)
                labels.extend(int(sample.trained.sum()) for sample in batch)
                show(number + source.fraction_done, sum(one.read for one in counts))
    check_dropped(counts, data, seq_tokens)
    lengths = np.array(lengths, dtype=np.int64)
    np.save(folder / "starts.npy", np.concatenate([[0], np.cumsum(lengths)]))
    np.save(folder / "label_tokens.npy", np.array(labels, dtype=np.int64))
    sample_sets = np.repeat(np.arange(len(sets), dtype=np.int32), [one.kept for one in counts])
    parts = _parts(sample_sets, fraction, seed)
    for part, members in parts.items():
        _save_rows(folder, part, members, lengths, sample_sets, seq_tokens, packing)
    if bad:
        (folder / BAD_RECORDS).write_text(json.dumps(bad))
    sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("*.npy"))}
    meta = {"key": key, "sizes": sizes, "seq_tokens": seq_tokens, "parts": list(parts), "notes": encoder.notes,
            "sets": [asdict(one) for one in counts]}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _parts(sample_sets: np.ndarray, fraction: float, seed: int) -> dict[str, np.ndarray]:
    """Sample numbers of each part, in reading order."""
    if not fraction:
        return {"train": np.arange(len(sample_sets))}
    held = np.zeros(len(sample_sets), dtype=np.bool_)
    for number in np.unique(sample_sets):
        members = np.flatnonzero(sample_sets == number)
        chosen = np.random.default_rng([seed, number]).permutation(members)[:round(fraction * len(members))]
        held[chosen] = True
    if held.all() or not held.any():
        raise DataError(f"eval.holdout_fraction={fraction}: of {len(held)} samples this holds out {held.sum()}, and "
                        "both sides need at least one; choose another fraction, or name eval.path")
    return {"train": np.flatnonzero(~held), "holdout": np.flatnonzero(held)}


def _save_rows(folder, part, members, lengths, sample_sets, seq_tokens, packing) -> None:
    rows: list[Sequence[int]] = []
    row_sets = []
    for number in np.unique(sample_sets[members]):
        mine = members[sample_sets[members] == number]
        packed = [mine[bin] for bin in best_fit(lengths[mine].tolist(), seq_tokens)] if packing else mine[:, None]
        rows.extend(packed)
        row_sets.extend([number] * len(packed))
    np.save(folder / f"{part}_members.npy", np.concatenate(rows).astype(np.int64))
    np.save(folder / f"{part}_rows.npy", np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64))
    np.save(folder / f"{part}_sets.npy", np.array(row_sets, dtype=np.int32))


def _intact(folder: Path, key: str) -> bool:
    """Whether the folder is a whole cache: a folder without, or with other, sizes than meta.json says is not."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        sizes = meta["sizes"].items()
        return meta["key"] == key and all((folder / name).stat().st_size == size for name, size in sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _move_in(aside: Path, folder: Path, key: str) -> None:
    for file in aside.iterdir():  # on disk before its name is, so that a power cut leaves no hollow cache
        with open(file, "rb") as stream:
            os.fsync(stream.fileno())
    broken = aside.with_name(f"{aside.name}-broken")
    with suppress(FileNotFoundError):  # none there, or another process has moved it
        if not _intact(folder, key):
            folder.rename(broken)
    try:
        aside.rename(folder)
    except OSError:  # another process was first; its rows are the same
        if not _intact(folder, key):
            raise
    shutil.rmtree(broken, ignore_errors=True)


@contextmanager
def _appending(path: Path, dtype: Any) -> Iterator[Callable[[np.ndarray], None]]:
    """Writes a one-dimensional .npy of unknown length; numpy pads its header so that it can be written again."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (0,)}
    num_items = 0

    def add(items: np.ndarray) -> None:
        nonlocal num_items
        num_items += len(items)
        stream.write(np.ascontiguousarray(items, dtype=dtype).tobytes())

    with open(path, "wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        size = stream.tell()
        yield add
        stream.seek(0)
        np.lib.format.write_array_header_1_0(stream, {**header, "shape": (num_items,)})
        assert stream.tell() == size, "the header of a longer array must fit where the empty one's was"


@contextmanager
def _progress(show: bool, num_sets: int) -> Iterator[Callable[[float, int], None]]:
    """Calls of the result take (sets done, with a fraction; records read): a bar on a terminal, else lines."""
    if not show:
        yield lambda done, read: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        with Progress(TextColumn("tokenising"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[read]:,}"),
                      TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=num_sets, read=0)
            yield lambda done, read: bar.update(task, completed=done, read=read)
    else:
        begin = last = time.monotonic()

        def line(done: float, read: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= PROGRESS_EVERY_S:
                last = now
                left = f", about {(now - begin) * (num_sets / done - 1):.0f} s left" if done else ""
                print(f"tokenising: {read:,} records, {done / num_sets:.0%}{left}", file=sys.stderr, flush=True)

        yield line


def _stats(meta: dict[str, Any], rows: Rows) -> dict[str, Any]:
    total = {name: sum(one[name] for one in meta["sets"]) for name in meta["sets"][0]}
    total["longest_tokens"] = max(one["longest_tokens"] for one in meta["sets"])
    room = len(rows) * meta["seq_tokens"]
    return {**total, "seq_tokens": meta["seq_tokens"], "rows": len(rows), "sets": meta["sets"],
            "padding_fraction": 1 - int(rows.input_tokens.sum()) / room}


def _tokenizer_identity(folder: str) -> dict[str, str]:
    root = Path(folder)
    files = sorted({file for pattern in TOKENIZER_FILES for file in root.glob(pattern) if file.is_file()})
    if not files:
        raise ModelError(f"{folder}: holds no tokenizer files; model.path must hold tokenizer.json")
    return {str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
