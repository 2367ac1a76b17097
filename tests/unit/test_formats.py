"""Records are read with their origin, and what cannot be used is named by file and line."""

import csv
import json

import pytest

from tonnage.config.schema import DataSet
from tonnage.data.formats import Chat, Completion, Counts, Source, Text
from tonnage.errors import ConfigError, DataError

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def write(file, *lines):
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    file.write_bytes(b"\n".join(lines) + b"\n")
    return str(file)


def read(path, on_bad="error", counts=None, skip=0, streaming=False, **keys):
    source = Source(DataSet(path=str(path), **keys), streaming=streaming)
    return list(source.records(on_bad, counts or Counts(), skip))


def test_every_format_is_detected_and_brought_to_its_normal_form(tmp_path):
    file = tmp_path / "x.jsonl"
    cases = [
        ({"messages": TURNS, "id": 3}, Chat(TURNS)),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, Chat(TURNS)),
        ({"instruction": "Add", "input": "1 2", "output": "3"},
         Chat([{"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}])),
        ({"instruction": "hi", "input": "", "output": "yes"}, Chat(TURNS)),
        ({"instruction": "hi", "output": "yes", "text": "all of it"}, Chat(TURNS)),
        ({"prompt": "a", "completion": " b"}, Completion("a", " b")),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, Chat(TURNS, num_context=1)),
        ({"text": "abc"}, Text("abc")),
    ]
    for row, record in cases:
        assert read(write(file, row)) == [(f"{file}:1", record)]


def test_columns_are_mapped(tmp_path):
    file = write(tmp_path / "x.jsonl", {"question": "a", "answer": "b"})
    columns = {"prompt": "question", "completion": "answer"}
    assert read(file, columns=columns)[0][1] == Completion("a", "b")
    with pytest.raises(DataError, match=r"x.jsonl:1: columns question, answer fit no format; accepted.*columns"):
        read(file)
    with pytest.raises(ConfigError, match=r"columns=.*promt is no field"):
        read(file, columns={"promt": "question"})
    with pytest.raises(DataError, match=r"x.jsonl:1: field 'text' is missing; the record has question, answer"):
        read(file, format="text")


BAD = [
    (b"{not json", "bad JSON"), (b"\xff\xfe{}", "bad UTF-8 at byte 1"), ([1], "the record is a list, not an object"),
    ({"messages": "hi"}, "'messages' is a string, must be a list"), ({"messages": []}, "none of its 0 messages"),
    ({"messages": ["hi"]}, "message 1 is a string"),
    ({"messages": [{"role": "user"}]}, "message 1: field 'content' is"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "message 1: unknown role 'bot'; known are system, user"),
    ({"messages": [{"role": "user", "content": None}]}, "'content' is null, must be a string"),
    ({"messages": TURNS[:1]}, "none of its 1 messages is from the assistant"),
    ({"messages": [*TURNS, {"role": "assistant", "content": " \n"}]}, "message 3: empty answer"),
    ({"messages": [TURNS[0], {**TURNS[1], "tool_calls": [{"id": 1}]}]}, "'tool_calls' is not supported"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not valid Unicode at character 1"),
    ({"text": "x"}, "field 'messages' is missing"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_records_are_named_by_line_or_skipped_and_counted(tmp_path, line, message):
    file = write(tmp_path / "x.jsonl", {"messages": TURNS}, b"", line, {"messages": TURNS})
    with pytest.raises(DataError) as error:
        read(file, format="chat")
    assert message in str(error.value) and f"{file}:3: " in str(error.value) and "data.on_bad=skip" in str(error.value)
    counts = Counts()
    found = read(file, "skip", counts)
    assert [origin for origin, _ in found] == [f"{file}:1", f"{file}:4"]
    assert (counts.read, counts.bad) == (3, 1)


@pytest.mark.parametrize(("row", "message"), [
    ({"instruction": "a", "output": "  "}, "'output' is an empty answer"),
    ({"instruction": 3, "output": "b"}, "'instruction' is int 3, must be a string"),
    ({"prompt": "a", "completion": ""}, "the completion is empty"),
    ({"prompt": "a", "completion": TURNS[1:]}, "different kinds"),
    ({"prompt": "a", "completion": 5}, "'completion' is int 5, must be a string or a list"),
    ({"text": " "}, "is empty"),
])
def test_bad_records_of_other_formats(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "x.jsonl", row))


def test_bad_first_record_and_nothing_but_bad_ones(tmp_path):
    file = write(tmp_path / "x.jsonl", b"{", {"text": "a"})
    with pytest.raises(DataError, match="x.jsonl:1: bad JSON"):
        read(file)
    assert read(file, "skip") == [(f"{file}:2", Text("a"))]
    with pytest.raises(DataError, match="each of its records is bad"):
        read(write(tmp_path / "x.jsonl", b"{"), "skip")


def test_a_byte_order_mark_and_windows_line_ends(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert read(file) == [(f"{file}:1", Text("a")), (f"{file}:2", Text("b"))]


def test_skip_starts_at_a_record(tmp_path):
    file = write(tmp_path / "x.jsonl", {"text": "a"}, b"", {"text": "b"}, {"text": "c"})
    assert read(file, skip=1) == [(f"{file}:3", Text("b")), (f"{file}:4", Text("c"))]


def test_json_files(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=2))
    assert read(file) == [(f"{file}:row 1", Text("a")), (f"{file}:row 2", Text("b"))]
    write(file, {"text": "a"}, {"text": "b"})  # lines under the other name
    assert [origin for origin, _ in read(file)] == [f"{file}:1", f"{file}:2"]
    file.write_text('[{"text": "a"},\n{"text": }]')
    with pytest.raises(DataError, match="x.json:2: bad JSON"):
        read(file)


def test_csv(tmp_path):
    file = tmp_path / "x.csv"
    with open(file, "w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerows([["prompt", "completion"], ["a\nb", "42"], ["c", "d" * 200_000]])
    assert read(file) == [(f"{file}:3", Completion("a\nb", "42")), (f"{file}:4", Completion("c", "d" * 200_000))]
    file.write_bytes(b"prompt,completion\na,b\nc,d\xff\ne\n")
    counts = Counts()
    assert [origin for origin, _ in read(file, "skip", counts)] == [f"{file}:2"] and counts.bad == 2
    with pytest.raises(DataError, match=r"x.csv:3: field 'completion' is not valid Unicode"):
        read(file)


def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": TURNS}, {"messages": TURNS}]), file)
    assert read(file) == [(f"{file}:row 1", Chat(TURNS)), (f"{file}:row 2", Chat(TURNS))]
    file.write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match=r"x.parquet: cannot be read as Parquet"):
        read(file)


def test_folders_and_their_splits(tmp_path):
    for name in ("train-00000.jsonl", "train-00001.jsonl", "validation.jsonl"):
        write(tmp_path / name, {"text": name})
    assert [record.text for _, record in read(tmp_path)] == ["train-00000.jsonl", "train-00001.jsonl"]
    assert [record.text for _, record in read(tmp_path, split="validation")] == ["validation.jsonl"]
    with pytest.raises(DataError, match="split=test is not there; its files are of train, validation"):
        read(tmp_path, split="test")
    (tmp_path / "part").mkdir()
    write(tmp_path / "part" / "a.jsonl", {"text": "a"})
    assert [record.text for _, record in read(tmp_path, subset="part")] == ["a"]


def test_a_saved_data_set(tmp_path):
    import datasets

    table = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(str(tmp_path / "both"))
    assert read(tmp_path / "both", streaming=True) == [(f"{tmp_path}/both:row 1", Text("a")),
                                                       (f"{tmp_path}/both:row 2", Text("b"))]
    assert [record.text for _, record in read(tmp_path / "both" / "test")] == ["b"]
    with pytest.raises(DataError, match="split=dev is not there; the data set has train, test"):
        read(tmp_path / "both", split="dev")


def test_nothing_there(tmp_path):
    with pytest.raises(DataError, match=r"gone.jsonl: no such file or folder; check data.path"):
        read(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"no data in this folder; it must hold files ending in .jsonl"):
        read(tmp_path)
    (tmp_path / "x.jsonl").touch()
    with pytest.raises(DataError, match="the file is empty"):
        read(tmp_path / "x.jsonl")
    with pytest.raises(DataError, match="holds no record"):
        read(write(tmp_path / "x.jsonl", b""))
    (tmp_path / "x.doc").write_text("hi")
    with pytest.raises(DataError, match=r"files ending in .doc are not read"):
        read(tmp_path / "x.doc")


def test_an_unreachable_hub_id(monkeypatch):
    import datasets

    def refuse(*args, **keys):
        raise ConnectionError("Couldn't reach the hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match=r"=org/name.*ConnectionError: Couldn't reach the hub; .*HF_TOKEN") as error:
        read("org/name")
    assert "long story" not in str(error.value)


def test_a_hub_data_set_is_read_streamed_or_not(monkeypatch, tmp_path):
    import datasets

    asked = []
    table = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])

    def load(path, subset, *, split, streaming):
        asked.append((path, subset, split, streaming))
        return table.to_iterable_dataset() if streaming else table

    monkeypatch.setattr(datasets, "load_dataset", load)
    for streaming in (False, True):
        found = read("org/name", subset="small", split="test", streaming=streaming, skip=1)
        assert found == [("org/name:row 2", Text("b"))]
    assert asked == [("org/name", "small", "test", False), ("org/name", "small", "test", True)]


def test_identity_follows_the_content_not_the_place(tmp_path):
    (tmp_path / "b").mkdir()
    one, same = write(tmp_path / "x.jsonl", {"text": "a"}), write(tmp_path / "b" / "y.jsonl", {"text": "a"})
    identity = Source(DataSet(path=one)).identity()
    assert identity == Source(DataSet(path=same)).identity()
    write(tmp_path / "x.jsonl", {"text": "b"})  # of the same size
    assert Source(DataSet(path=one)).identity() != identity
