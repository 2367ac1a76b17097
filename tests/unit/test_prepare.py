"""Prepared rows: right labels, a cache key of all that matters and nothing else, a cache that is whole or not."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy_tokenizers as toy

from tonnage.config.schema import Data, DataSet
from tonnage.data import prepare as module
from tonnage.data.prepare import Rows, describe, fingerprint, prepare, prepare_split
from tonnage.data.template import Encoder
from tonnage.errors import ConfigError, DataError, ModelError


@pytest.fixture
def place(tmp_path):
    """A folder with a tokenizer (tok) and chats of growing length (a.jsonl)."""
    toy.save(toy.byte_level(), tmp_path / "tok")
    write_chats(tmp_path / "a.jsonl", [("cat " * size, "yes " * size) for size in range(1, 9)])
    return tmp_path


def write_chats(file, pairs):
    file.write_text("".join(json.dumps({"messages": toy.chat(*pair)}) + "\n" for pair in pairs))


def run(place, *names, seq_tokens=64, packing=False, progress=False, weights=(1.0, 1.0, 1.0), **keys):
    sets = [DataSet(path=str(place / name), weight=weight) for name, weight in zip(names, weights, strict=False)]
    data = Data(cache=str(place / "cache"), **keys)
    return prepare(sets, data, str(place / "tok"), seq_tokens=seq_tokens, packing=packing, progress=progress)


def texts(tokenizer, rows):
    """Decoded labels of each row."""
    return [tokenizer.decode(row.labels[row.labels != -100].tolist()) for row in rows]


def test_rows_hold_the_answers_in_reading_order(place):
    rows = run(place, "a.jsonl")
    assert len(rows) == 8 and texts(toy.byte_level(), rows) == ["yes " * size + "<|im_end|>" for size in range(1, 9)]
    for row in rows:
        assert {array.dtype for array in row} == {np.dtype(np.int32)}
        assert row.labels[0] == -100 and set(row.labels[row.labels != row.tokens]) == {-100}
        assert row.positions.tolist() == list(range(len(row.tokens)))
    assert rows.input_tokens.tolist() == [len(row.tokens) for row in rows]
    assert rows.label_tokens.tolist() == [int((row.labels != -100).sum()) for row in rows]
    assert rows.input_tokens.dtype == rows.label_tokens.dtype == rows.sets.dtype == np.int32
    stats = rows.stats
    assert (stats["read"], stats["kept"], stats["bad"], stats["truncated"]) == (8, 8, 0, 0)
    assert stats["tokens"] == rows.input_tokens.sum() and stats["label_tokens"] == rows.label_tokens.sum()
    assert stats["padding_fraction"] == pytest.approx(1 - rows.input_tokens.sum() / (8 * 64))
    assert rows.first.tokens.tolist() == rows[0].tokens.tolist()
    with pytest.raises(IndexError):
        rows[8]


def test_packed_rows_hold_samples_of_one_set_each_once(place):
    write_chats(place / "b.jsonl", [("dog " * size, "no " * size) for size in range(1, 9)])
    plain = run(place, "a.jsonl", "b.jsonl")
    rows = run(place, "a.jsonl", "b.jsonl", packing=True, weights=(1.0, 2.5))
    assert len(rows) < len(plain) and rows.input_tokens.max() <= 64
    assert rows.input_tokens.sum() == plain.input_tokens.sum()
    assert rows.weights.tolist() == [2.5 if number else 1.0 for number in rows.sets]
    found = []
    for row, number in zip(rows, rows.sets, strict=True):
        borders = np.flatnonzero(row.positions == 0)
        pieces = np.split(np.arange(len(row.tokens)), borders[1:])
        assert all(row.positions[piece].tolist() == list(range(len(piece))) for piece in pieces)
        assert all(row.labels[piece[0]] == -100 for piece in pieces)
        found += [(int(number), tuple(row.tokens[piece]), tuple(row.labels[piece])) for piece in pieces]
    wanted = [(int(number), tuple(row.tokens), tuple(row.labels))
              for row, number in zip(plain, plain.sets, strict=True)]
    assert sorted(found) == sorted(wanted)


def test_no_row_is_longer_than_seq_tokens_and_dropped_samples_are_counted(place):
    cut = run(place, "a.jsonl", seq_tokens=24, max_dropped_fraction=1.0)
    assert cut.input_tokens.max() <= 24 and cut.stats["truncated"] > 0
    start = run(place, "a.jsonl", seq_tokens=24, truncate="start")
    assert start.input_tokens.max() == 24 and all(row.labels[0] == -100 for row in start)
    assert all(text.endswith("<|im_end|>") for text in texts(toy.byte_level(), start))
    drop = run(place, "a.jsonl", seq_tokens=24, truncate="drop", max_dropped_fraction=1.0)
    assert drop.stats["dropped_long"] == 8 - len(drop) > 0 and drop.stats["truncated"] == 0


def test_prompts_that_fill_the_row_are_dropped_up_to_the_bound(place):
    write_chats(place / "b.jsonl", [("cat", "yes")] * 3 + [("cat " * 90, "yes")])
    rows = run(place, "b.jsonl", max_dropped_fraction=0.25)
    assert len(rows) == 3 and rows.stats["dropped_unlabelled"] == 1
    with pytest.raises(DataError, match=r"1 of 4 samples.*0.2:.*data.seq_tokens=64.*data.truncate=start"):
        run(place, "b.jsonl")  # the cached rows are judged too
    write_chats(place / "b.jsonl", [("cat " * 90, "yes")] * 3)
    with pytest.raises(DataError, match="3 of 3 samples were dropped, so there is no row left"):
        run(place, "b.jsonl", max_dropped_fraction=1.0)
    assert not [file for file in (place / "cache").iterdir() if file.name.startswith(".")]


def test_bad_records_stop_or_are_counted(place):
    with open(place / "a.jsonl", "a") as stream:
        stream.write("{oops\n")
    with pytest.raises(DataError, match=r"a.jsonl:9: bad JSON"):
        run(place, "a.jsonl")
    rows = run(place, "a.jsonl", on_bad="skip")
    assert (rows.stats["read"], rows.stats["bad"], len(rows)) == (9, 1, 8)
    assert [re.sub(r"^.*/", "", why)[:19] for why in rows.bad_records] == ["a.jsonl:9: bad JSON"]
    toy.save(toy.byte_level(toy.MISTRAL, eos="</s>"), place / "tok")  # refuses system messages
    conversations = (toy.chat("a", "b"), [{"role": "system", "content": "x"}, *toy.chat("a", "b")])
    (place / "a.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    rows = run(place, "a.jsonl", on_bad="skip")
    assert (rows.stats["read"], rows.stats["bad"], len(rows)) == (2, 1, 1)
    assert "a.jsonl:2: the chat template refuses" in rows.bad_records[0]


def test_the_second_time_nothing_is_tokenised(place, monkeypatch):
    first = run(place, "a.jsonl", packing=True)
    monkeypatch.setattr(module, "load_tokenizer", lambda folder: pytest.fail("tokenised again"))
    again = run(place, "a.jsonl", packing=True)
    assert again.fingerprint == first.fingerprint and again.stats == first.stats
    for one, two in zip(first, again, strict=True):
        assert all(map(np.array_equal, one, two))


def test_fingerprint_changes_with_each_input_and_with_nothing_else(place):
    base = {"sets": [DataSet(path=str(place / "a.jsonl"))], "data": Data(), "tokenizer_folder": str(place / "tok"),
            "seq_tokens": 64, "packing": False}
    shutil.copy(place / "a.jsonl", place / "elsewhere.jsonl")
    shutil.copytree(place / "tok", place / "tok2")
    (place / "tok2" / "model.safetensors").write_text("weights")
    (place / "tok2" / "config.json").write_text("{}")
    key = fingerprint(**base)
    same = [{"sets": [DataSet(path=str(place / "elsewhere.jsonl"))]}, {"tokenizer_folder": str(place / "tok2")},
            {"data": Data(cache="x", buffer_rows=3, max_dropped_fraction=0.5, name="y")}, {"seed": 3}]
    assert {fingerprint(**base | one) for one in same} == {key}
    write_chats(place / "b.jsonl", [("cat", "yes")])
    (place / "t.jinja").write_text(toy.CHATML)
    toy.save(toy.byte_level(toy.GEMMA), place / "tok3")
    data, one = base["data"], base["sets"][0]
    changes = [{"sets": [DataSet(path=str(place / "b.jsonl"))]}, {"sets": [one, one]}, {"seq_tokens": 65},
               {"packing": True}, {"tokenizer_folder": str(place / "tok3")}, {"fraction": 0.5},
               {"fraction": 0.5, "seed": 1}, {"sets": [replace(one, format="chat")]},
               {"sets": [replace(one, columns={"text": "x"})]}, {"data": replace(data, truncate="start")},
               {"data": replace(data, train_on="all")}, {"data": replace(data, system="")},
               {"data": replace(data, on_bad="skip")}, {"data": replace(data, chat_template=str(place / "t.jinja"))}]
    keys = [fingerprint(**base | change) for change in changes]
    (place / "t.jinja").write_text(toy.GEMMA)
    keys.append(fingerprint(**base | changes[-1]))
    with open(place / "a.jsonl", "a") as stream:
        stream.write("\n")
    keys.append(fingerprint(**base))
    assert len({key, *keys}) == 1 + len(keys)


def test_weights_and_order_of_sets_change_the_identity_but_not_the_cache(place):
    write_chats(place / "b.jsonl", [("cat", "yes")])
    one, two = run(place, "a.jsonl", "b.jsonl"), run(place, "a.jsonl", "b.jsonl", weights=(1.0, 0.5))
    assert one.fingerprint != two.fingerprint and len(list((place / "cache").iterdir())) == 1
    assert run(place, "b.jsonl", "a.jsonl").fingerprint not in (one.fingerprint, two.fingerprint)


@pytest.mark.parametrize("harm", ["truncate", "remove", "meta", "empty"])
def test_a_broken_cache_is_built_again(place, harm):
    rows = run(place, "a.jsonl")
    labels = texts(toy.byte_level(), rows)
    folder, = (place / "cache").iterdir()
    if harm == "truncate":
        with open(folder / "tokens.npy", "r+b") as stream:
            stream.truncate(200)
    elif harm == "remove":
        (folder / "trained.npy").unlink()
    elif harm == "meta":
        (folder / "meta.json").write_text('{"key": ')
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    assert texts(toy.byte_level(), run(place, "a.jsonl")) == labels
    assert [file.name for file in (place / "cache").iterdir()] == [folder.name]


def test_two_processes_at_once(place):
    code = ("import sys; from tonnage.config.schema import Data, DataSet; from tonnage.data.prepare import prepare;"
            "p = sys.argv[1]; r = prepare([DataSet(path=p + '/a.jsonl')], Data(cache=p + '/cache'), p + '/tok',"
            "seq_tokens=64, packing=True); print(r.fingerprint, len(r), int(r[0].tokens.sum()))")
    running = [subprocess.Popen([sys.executable, "-c", code, str(place)], stdout=subprocess.PIPE, text=True,
                                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) for _ in range(2)]
    outputs = [one.communicate(timeout=60)[0] for one in running]
    assert outputs[0] == outputs[1] != "" and [one.returncode for one in running] == [0, 0]
    assert len(list((place / "cache").iterdir())) == 1


def test_the_loser_of_a_race_takes_the_winners_folder(place):
    rows = run(place, "a.jsonl")
    folder, = (place / "cache").iterdir()
    aside = place / "cache" / ".other"
    shutil.copytree(folder, aside)
    module._move_in(aside, folder, folder.name)
    assert Rows(folder, "train", [1.0]).fingerprint == rows.fingerprint


def test_holdout_is_disjoint_complete_and_a_function_of_the_seed(place):
    write_chats(place / "b.jsonl", [(f"cat {number}", f"yes {number}") for number in range(20)])

    def split(seed, fraction=0.25, packing=False):
        sets, data = [DataSet(path=str(place / "b.jsonl"))], Data(cache=str(place / "cache"))
        return prepare_split(sets, data, str(place / "tok"), seq_tokens=64, packing=packing, fraction=fraction,
                             seed=seed)

    train, held = split(0)
    known = set(texts(toy.byte_level(), run(place, "b.jsonl")))
    sides = [set(texts(toy.byte_level(), side)) for side in (train, held)]
    assert sides[0] | sides[1] == known and not sides[0] & sides[1] and len(held) == 5
    assert texts(toy.byte_level(), split(0)[1]) == texts(toy.byte_level(), held)
    assert set(texts(toy.byte_level(), split(1)[1])) != sides[1]
    assert train.fingerprint != held.fingerprint
    packed = split(0, packing=True)
    assert packed[1].input_tokens.sum() == held.input_tokens.sum() and len(packed[1]) < 5
    with pytest.raises(DataError, match=r"eval.holdout_fraction=0.01.*of 20 samples this holds out 0"):
        split(0, fraction=0.01)


def test_no_data_and_no_tokenizer(place):
    with pytest.raises(ConfigError, match="data.path=None"):
        run(place)
    shutil.rmtree(place / "tok")
    with pytest.raises(ModelError, match="holds no tokenizer files"):
        run(place, "a.jsonl")


def test_describe_shows_counts_and_the_marked_first_sample(place):
    rows = run(place, "a.jsonl", seq_tokens=24, truncate="start")
    text = describe(rows, toy.byte_level())
    assert f"8 rows from 8 samples (8 read), {rows.input_tokens.sum()} tokens" in text
    assert f"{rows.stats['truncated']} cut to 24; padding {rows.stats['padding_fraction']:.0%}" in text
    assert text.endswith("<|im_start|>user\ncat <|im_end|>\n<|im_start|>assistant\n⟦yes <|im_end|>⟧\n")


def test_progress_is_a_line_now_and_then_without_a_terminal(place, monkeypatch, capsys):
    monkeypatch.setattr(module, "BATCH_RECORDS", 2)
    monkeypatch.setattr(module, "PROGRESS_EVERY_S", 0.0)
    run(place, "a.jsonl", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("tokenising: 8 records, 100%, about 0 s left")


def test_progress_is_a_bar_on_a_terminal(place, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    run(place, "a.jsonl", progress=True)
    assert "tokenising" in screen.getvalue()


def test_thousands_of_short_chats_take_seconds(place):
    encoder = Encoder(toy.byte_level())
    write_chats(place / "b.jsonl", [("the cat sat on the mat", "yes no yes")] * 2000)
    source = module.Source(DataSet(path=str(place / "b.jsonl")))
    begin = time.monotonic()
    batches = list(module.sample_batches(source, encoder, Data(), module.Counts(), seq_tokens=64))
    assert sum(map(len, batches)) == 2000 and time.monotonic() - begin < 6  # idle: 0.4 s
    assert Path(source.data_set.path).name == "b.jsonl" and source.fraction_done == 1.0
