"""Records and where they come from: JSONL, JSON, Parquet, CSV, hub data sets; each is brought to one of three forms.

Formats are told apart by a record's columns, as in https://huggingface.co/docs/trl/dataset_formats. Files are read
here, line by line, so that an error can name the line; only hub ids and saved folders go through `datasets`.
"""

import codecs
import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from tonnage.config.schema import DataSet
from tonnage.errors import ConfigError, DataError
from tonnage.runtime.logs import LOG
from tonnage.runtime.paths import may_be_hub_id, missing

EXTENSIONS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
         "tool": "tool"}
# Each format's required fields; with several matches the first wins.
FORMATS = {"chat": ("messages",), "instruct": ("instruction", "output"), "completion": ("prompt", "completion"),
           "text": ("text",)}
FIELDS = ("messages", "conversations", "instruction", "input", "output", "prompt", "completion", "text")
ACCEPTED = ("messages or conversations (chat); instruction, output and maybe input (instruct); prompt, completion "
            "(completion); text (text)")
# A message with one of these would be learned wrongly if the key were left out.
UNSUPPORTED_KEYS = ("tool_calls", "function_call", "reasoning_content", "weight", "train")
# Folders name splits as the hub does: https://huggingface.co/docs/hub/datasets-file-names-and-splits
SPLIT_WORDS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"),
               "test": ("test", "testing", "eval", "evaluation")}


class Chat(NamedTuple):
    """Messages of {role, content}; answers among the first `num_context` messages are never trained."""

    messages: list[dict[str, str]]
    num_context: int = 0


class Completion(NamedTuple):
    """A prompt, not trained, and what follows it."""

    prompt: str
    completion: str


class Text(NamedTuple):
    """Text that is trained from its first token on."""

    text: str


Record = Chat | Completion | Text
Skipped = Callable[[str], None]


def log_skipped(why: str) -> None:
    """To the log file of this rank."""
    LOG.debug(f"skipped a bad record: {why}")


@dataclass
class Counts:
    """What became of one data set's records; read = bad + dropped_long + dropped_unlabelled + kept."""

    read: int = 0
    bad: int = 0
    truncated: int = 0
    dropped_long: int = 0
    dropped_unlabelled: int = 0
    kept: int = 0
    tokens: int = 0
    label_tokens: int = 0
    longest_tokens: int = 0


class Source:
    """One data set, readable from any record on.

    `records` yields (origin, record) with origin `file:line`, or `file:row n` where there are no lines.
    `fraction_done` says how far reading has come, 0 to 1.

    Raises:
        DataError: nothing at that path, no data in it, or a hub id that cannot be reached.
    """

    def __init__(self, data_set: DataSet, *, streaming: bool = False) -> None:
        unknown = sorted(set(data_set.columns) - set(FIELDS))
        if unknown:
            raise ConfigError(f"data.sets[].columns={data_set.columns}: {', '.join(unknown)} is no field of ours; "
                              f"map from {', '.join(FIELDS)}")
        self.data_set, self.fraction_done = data_set, 0.0
        self._streaming = streaming
        self._table, self._files = None, []
        path = Path(data_set.path).expanduser()
        if path.is_dir() and (folder := _saved_folder(path, data_set.split)):
            self._files = sorted(folder.glob("*.arrow"))
            self._table = _load_saved(folder)
        elif os.path.exists(path):
            self._files = _split_files(path, data_set) if path.is_dir() else [path]
            _check_files(self._files, path)
        else:
            self._table = _load_hub(data_set, streaming)

    def identity(self, *, contents: bool = True) -> str:
        """A hash of what this source holds, wherever it lies: file contents (or only sizes), or the hub's revision."""
        import xxhash

        total = xxhash.xxh3_128()
        for file in self._files:
            total.update(file.suffix.encode())
            if contents:
                with open(file, "rb") as stream:
                    digest = xxhash.xxh3_128()
                    while block := stream.read(1 << 22):
                        digest.update(block)
                total.update(digest.digest())
            else:
                total.update(f"{file.stat().st_size} ".encode())
        if not self._files:
            one = self.data_set
            revision = (f"{_hub_revision(one)} {one.subset} {one.split}" if self._streaming
                        else self._table._fingerprint)
            total.update(revision.encode())
        return total.hexdigest()

    def records(self, on_bad: str, counts: Counts, skip: int = 0,
                skipped: Skipped = log_skipped) -> Iterator[tuple[str, Record]]:
        """Yields (origin, record) from record number `skip` on; `counts.read` and `counts.bad` grow with it.

        Args:
            skipped: is told where each bad record is and why it is left out.

        Raises:
            DataError: a record that cannot be used (unless `on_bad` is skip), or no record at all.
        """
        kind = self._format(on_bad)
        for origin, payload in islice(self._rows(), skip, None):
            counts.read += 1
            try:
                record = to_record(_parse(payload), kind, self.data_set.columns)
            except _BadRecord as error:
                if on_bad == "error":
                    raise DataError(f"{origin}: {error}; mend the record, or set data.on_bad=skip to count and leave "
                                    "out such records") from None
                counts.bad += 1
                skipped(f"{origin}: {error}")
                continue
            yield origin, record

    def _format(self, on_bad: str) -> str:
        rows = self._rows()
        first = next(rows, None)
        if first is None:
            raise DataError(f"{self.data_set.path}: holds no record; name a file or folder with data in data.path")
        if self.data_set.format != "auto":
            return self.data_set.format
        for origin, payload in chain([first], rows):
            try:
                return detect(_parse(payload), self.data_set.columns, origin)
            except _BadRecord as error:
                if on_bad == "error":
                    raise DataError(f"{origin}: {error}; mend the record, or set data.on_bad=skip") from None
        raise DataError(f"{self.data_set.path}: each of its records is bad; set data.on_bad=error to see why")

    def _rows(self) -> Iterator[tuple[str, Any]]:
        if self._table is not None:
            total = None if self._streaming and not self._files else len(self._table)
            for index, row in enumerate(self._table, 1):
                self.fraction_done = index / total if total else 0.0
                yield f"{self.data_set.path}:row {index}", row
            return
        sizes = [file.stat().st_size for file in self._files]
        done = 0
        for file, size in zip(self._files, sizes, strict=True):
            for place, payload, fraction in _reader(file):
                self.fraction_done = (done + size * fraction) / sum(sizes)
                yield f"{file}:{place}", payload
            done += size


class _BadRecord(DataError):
    """What is wrong with one record; the reader adds where it is and what to do."""


def detect(row: dict[str, Any], columns: dict[str, str], origin: str) -> str:
    """The format of a record with these columns.

    Raises:
        DataError: no format has these columns; lists what was seen and what is accepted.
    """
    seen = {ours for ours in FIELDS if columns.get(ours, ours) in row}
    if "conversations" in seen:
        seen.add("messages")
    for kind, required in FORMATS.items():
        if seen.issuperset(required):
            return kind
    mapped = f" with data.sets[].columns={columns}" if columns else ""
    raise DataError(f"{origin}: columns {', '.join(map(str, row)) or '(none)'}{mapped} fit no format; accepted are "
                    f"{ACCEPTED}; name other columns in data.sets[].columns, e.g. {{prompt: question}}")


def to_record(row: dict[str, Any], kind: str, columns: dict[str, str]) -> Record:
    """One record in its normal form.

    Raises:
        DataError: a missing or wrong-typed field, an unknown role, an empty answer, text that is not Unicode.
    """
    if kind == "chat":
        # "conversations" is the other usual name, taken where a record has it and no "messages"
        usual = columns.get("messages", "messages") in row or columns.get("conversations", "conversations") not in row
        name = "messages" if usual else "conversations"
        return _chat(_field(row, name, columns, list))
    if kind == "instruct":
        instruction, output = (_field(row, name, columns, str) for name in FORMATS[kind])
        extra = _field(row, "input", columns, str) if row.get(columns.get("input", "input")) else ""
        if not output.strip():
            raise _BadRecord(f"field {columns.get('output', 'output')!r} is an empty answer")
        question = f"{instruction}\n\n{extra}" if extra.strip() else instruction
        return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": output}])
    if kind == "completion":
        return _completion(_field(row, "prompt", columns, (str, list)), _field(row, "completion", columns, (str, list)))
    text = _field(row, "text", columns, str)
    if not text.strip():
        raise _BadRecord(f"field {columns.get('text', 'text')!r} is empty")
    return Text(text)


def _completion(prompt: str | list, completion: str | list) -> Record:
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise _BadRecord("the completion is empty")
        return Completion(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise _BadRecord("prompt and completion are of different kinds: both must be strings or both message lists")
    return Chat(_chat(prompt + completion).messages, num_context=len(prompt))


def _chat(messages: list[Any]) -> Chat:
    chat = Chat([_message(message, number) for number, message in enumerate(messages, 1)])
    if not any(message["role"] == "assistant" for message in chat.messages):
        raise _BadRecord(f"none of its {len(messages)} messages is from the assistant, so there is no answer to learn")
    return chat


def _message(message: Any, number: int) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _BadRecord(f"message {number} is {_kind(message)}, not an object with role and content")
    role_key, content_key = ("role", "content") if "role" in message else ("from", "value")
    role, content = (_field(message, key, {}, str, f"message {number}: ") for key in (role_key, content_key))
    if role not in ROLES:
        raise _BadRecord(f"message {number}: unknown role {role!r}; known are {', '.join(ROLES)}")
    for key in UNSUPPORTED_KEYS:
        if message.get(key) not in (None, []):
            raise _BadRecord(f"message {number}: key {key!r} is not supported; write what is to be learned in content")
    if ROLES[role] == "assistant" and not content.strip():
        raise _BadRecord(f"message {number}: empty answer")
    return {"role": ROLES[role], "content": content}


def _field(row: dict[str, Any], name: str, columns: dict[str, str], types: Any, where: str = "") -> Any:
    column = columns.get(name, name)
    if column not in row:
        raise _BadRecord(f"{where}field {column!r} is missing; the record has {', '.join(map(str, row)) or 'nothing'}")
    value = row[column]
    if not isinstance(value, types):
        wanted = " or ".join({str: "a string", list: "a list"}[kind] for kind in
                             (types if isinstance(types, tuple) else (types,)))
        raise _BadRecord(f"{where}field {column!r} is {_kind(value)}, must be {wanted}")
    if isinstance(value, str) and not value.isascii():
        try:  # half a surrogate pair is legal in JSON, but is no text
            value.encode()
        except UnicodeEncodeError as error:
            raise _BadRecord(f"{where}field {column!r} is not valid Unicode at character {error.start + 1}") from None
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"{type(value).__name__} {value!r:.40}")


def _parse(payload: Any) -> dict[str, Any]:
    if isinstance(payload, bytes):
        try:
            payload = json.loads(payload.decode())
        except UnicodeDecodeError as error:
            raise _BadRecord(f"bad UTF-8 at byte {error.start + 1} of the line") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise _BadRecord(f"bad JSON: {error}; a line holds one whole object") from None
    if not isinstance(payload, dict):
        raise _BadRecord(f"the record is {_kind(payload)}, not an object")
    return payload


def _reader(file: Path) -> Iterator[tuple[str, Any, float]]:
    """Yields (line or row, bytes of a line or a ready object, fraction of the file read)."""
    if file.suffix == ".parquet":
        return _read_parquet(file)
    if file.suffix in (".csv", ".tsv"):
        return _read_csv(file, "\t" if file.suffix == ".tsv" else ",")
    with open(file, "rb") as stream:
        first = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    return _read_json(file) if file.suffix == ".json" and first == b"[" else _read_lines(file)


def _read_lines(file: Path) -> Iterator[tuple[str, bytes, float]]:
    size, done = max(1, file.stat().st_size), 0
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, 1):
            done += len(line)
            line = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip(b" \t\r\n")
            if line:
                yield str(number), line, done / size


def _read_json(file: Path) -> Iterator[tuple[str, Any, float]]:
    try:
        rows = json.loads(file.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: bad UTF-8 at byte {error.start + 1}; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{error.lineno}: bad JSON: {error}; the file must be one list of objects") from None
    for index, row in enumerate(rows, 1):
        yield f"row {index}", row, index / len(rows)


def _read_parquet(file: Path) -> Iterator[tuple[str, Any, float]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            index = 0
            for batch in table.iter_batches(1024):
                for row in batch.to_pylist():
                    index += 1
                    yield f"row {index}", row, index / table.metadata.num_rows
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: cannot be read as Parquet: {error}; write the file again") from None


def _read_csv(file: Path, delimiter: str) -> Iterator[tuple[str, Any, float]]:
    csv.field_size_limit(sys.maxsize)  # the default, 131,072 characters, refuses long documents
    size = max(1, file.stat().st_size)
    with open(file, "rb") as raw:
        # Bad bytes become lone surrogates, which the field check then finds in their record.
        text = io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.DictReader(text, delimiter=delimiter, strict=True)
        try:
            for row in rows:
                yield str(rows.line_num), row, min(1.0, raw.tell() / size)
        except csv.Error as error:
            raise DataError(f"{file}:{rows.line_num}: bad CSV: {error}; mend the line") from None


def _split_files(folder: Path, data_set: DataSet) -> list[Path]:
    root = folder / data_set.subset if data_set.subset else folder
    files = sorted(file for file in root.rglob("*") if file.suffix in EXTENSIONS and file.is_file()
                   and not any(part.startswith(".") for part in file.relative_to(root).parts))
    if not files:
        raise DataError(f"{root}: no data in this folder; it must hold files ending in {', '.join(EXTENSIONS)}, or "
                        "be a data set saved by datasets; check data.path")
    words = {file: set(re.split(r"[^a-z]+", str(file.relative_to(root)).lower())) for file in files}
    splits = {name: [file for file in files if words[file] & set(known)] for name, known in SPLIT_WORDS.items()}
    splits = {name: found for name, found in splits.items() if found} or {"train": files}
    if data_set.split not in splits:
        raise DataError(f"{root}: split={data_set.split} is not there; its files are of {', '.join(splits)}; choose "
                        "one of these, or name a file")
    return splits[data_set.split]


def _check_files(files: list[Path], path: Path) -> None:
    for file in files:
        if file.suffix not in EXTENSIONS:
            raise DataError(f"{path}: files ending in {file.suffix or 'nothing'} are not read; accepted are "
                            f"{', '.join(EXTENSIONS)}")
    if not sum(file.stat().st_size for file in files):
        raise DataError(f"{path}: the file is empty; name a file or folder with data in data.path")


def _saved_folder(path: Path, split: str) -> Path | None:
    """The folder of one split written by `save_to_disk`, or None if `path` is no such folder."""
    if (path / "dataset_dict.json").exists():
        if not (path / split / "state.json").exists():
            known = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
            raise DataError(f"{path}: split={split} is not there; the data set has {', '.join(known)}")
        return path / split
    return path if (path / "state.json").exists() and (path / "dataset_info.json").exists() else None


def _load_saved(folder: Path) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # noqa: BLE001 - damaged folders raise anything from KeyError to ArrowInvalid
        raise DataError(f"{folder}: cannot be read as a saved data set: {_first_line(error)}; save it again") from None


def check_path(data_set: DataSet) -> None:
    """What `Source` refuses, as far as this disk can tell: nothing is fetched.

    Raises:
        DataError: as `Source`.
    """
    if os.path.exists(Path(data_set.path).expanduser()):
        Source(data_set)
    else:
        _require_hub_id(data_set.path)


def _require_hub_id(path: str) -> None:
    if not may_be_hub_id(path) or Path(path).suffix in EXTENSIONS:
        raise DataError(f"{path or '(nothing)'}: {missing(path)}; check data.path (a file, a folder or a hub id such as "
                        "org/name)")


def _load_hub(data_set: DataSet, streaming: bool) -> Any:
    path = data_set.path
    _require_hub_id(path)
    import datasets

    try:
        return datasets.load_dataset(path, data_set.subset, split=data_set.split, streaming=streaming)
    except Exception as error:  # noqa: BLE001 - the hub client raises its own, httpx's and OS errors alike
        raise DataError(_unreachable(data_set, error)) from None


def _hub_revision(data_set: DataSet) -> str:
    import huggingface_hub

    try:
        return str(huggingface_hub.HfApi().dataset_info(data_set.path).sha)
    except Exception as error:  # noqa: BLE001 - as above
        raise DataError(_unreachable(data_set, error)) from None


def _unreachable(data_set: DataSet, error: Exception) -> str:
    return (f"data.path={data_set.path}: no file or folder of this name, and as a hub id (split={data_set.split}, "
            f"subset={data_set.subset}) it cannot be loaded: {_first_line(error)}; check the id, set HF_TOKEN if it is "
            "gated, or point data.path at a local copy")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
