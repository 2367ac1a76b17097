"""Streams: every sample once an epoch, mixtures by weight, and a resume that continues to the byte."""

import json

import numpy as np
import pytest
import toy_tokenizers as toy

from tonnage.config.schema import Data, DataSet
from tonnage.data import stream as module
from tonnage.data.stream import StreamRows
from tonnage.errors import CheckpointError, DataError


@pytest.fixture
def place(tmp_path):
    """A folder with a tokenizer (tok) and two data sets of numbered samples (a.jsonl, b.csv)."""
    toy.save(toy.byte_level(), tmp_path / "tok")
    write(tmp_path / "a.jsonl", 50)
    (tmp_path / "b.csv").write_text("prompt,completion\n" + "".join(f"cat,no {number}\n" for number in range(30)))
    return tmp_path


def write(file, count, prompt="cat"):
    file.write_text("".join(json.dumps({"prompt": prompt, "completion": f"yes {number} " + "ok " * (number % 7)}) + "\n"
                            for number in range(count)))


def stream(place, *names, weights=(1.0, 1.0), seq_tokens=40, packing=False, seed=0, **keys):
    sets = [DataSet(path=str(place / name), weight=weight) for name, weight in zip(names, weights, strict=False)]
    return StreamRows(sets, Data(**{"buffer_rows": 16, **keys}), str(place / "tok"), seq_tokens=seq_tokens,
                      packing=packing, seed=seed)


def numbers(row):
    """The numbers that name the samples of a row."""
    text = toy.byte_level().decode(row.labels[row.labels != -100].tolist())
    return [int(word) for word in text.replace("<|im_end|>", " ").split() if word.isdigit()]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("buffer_rows", [1, 16, 500])
def test_every_sample_once_an_epoch_each_epoch_in_another_order(place, packing, buffer_rows):
    rows = stream(place, "a.jsonl", packing=packing, buffer_rows=buffer_rows)
    epochs = []
    for _ in range(3):
        seen = []
        while len(seen) < 50:
            row = rows.next_row()
            assert len(row.tokens) <= 40
            found = numbers(row)
            borders = np.flatnonzero(row.positions == 0)
            assert len(borders) == len(found) and all(row.labels[borders] == -100)
            seen += found
        assert sorted(seen) == list(range(50))
        epochs.append(seen)
    if buffer_rows > 1:
        assert epochs[0] != epochs[1] != epochs[2]
    assert rows.counts[0].read >= 150 and rows.counts[0].bad == 0


def test_packing_fills_rows(place):
    rows = stream(place, "a.jsonl", packing=True, buffer_rows=50)
    fills = [len(rows.next_row().tokens) for _ in range(10)]
    assert sum(fills) / (10 * 40) > 0.8


def test_the_order_is_a_function_of_the_seed(place):
    def first(seed):
        rows = stream(place, "a.jsonl", seed=seed)
        return [numbers(rows.next_row()) for _ in range(30)]

    assert first(0) == first(0) != first(1)


def test_a_mixture_by_weight(place):
    rows = stream(place, "a.jsonl", "b.csv", weights=(3.0, 1.0))
    texts = [toy.byte_level().decode(rows.next_row().tokens.tolist()) for _ in range(600)]
    share = sum("yes" in text for text in texts) / 600
    assert share == pytest.approx(0.75, abs=0.05)
    assert [round(one.read, -2) for one in rows.counts] == [500, 200]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 7, 41, 49, 50, 51, 63, 120])
def test_restored_rows_are_those_of_an_uninterrupted_stream(place, tmp_path, packing, steps):
    names = ("a.jsonl", "b.csv")
    rows = stream(place, *names, packing=packing, weights=(2.0, 1.0))
    for _ in range(steps):
        rows.next_row()
    state = {}
    for name, value in rows.state().items():  # through files, as in a checkpoint
        if isinstance(value, np.ndarray):
            np.save(tmp_path / "x.npy", value, allow_pickle=False)
            state[name] = np.load(tmp_path / "x.npy", allow_pickle=False)
        else:
            state[name] = json.loads(json.dumps(value))
    again = stream(place, *names, packing=packing, weights=(2.0, 1.0))
    again.next_row()
    again.restore(state)
    for _ in range(150):
        for one, two in zip(rows.next_row(), again.next_row(), strict=True):
            assert one.dtype == two.dtype and one.tobytes() == two.tobytes()
    assert rows.counts == again.counts


def test_a_state_of_another_stream_is_refused(place):
    state = stream(place, "a.jsonl").state()
    for other in ({"seed": 1}, {"seq_tokens": 41}, {"weights": (2.0,)}, {"buffer_rows": 17}):
        with pytest.raises(CheckpointError, match=r"data.\*"):
            stream(place, "a.jsonl", **other).restore(state)
    with open(place / "a.jsonl", "a") as file:
        file.write('{"prompt": "cat", "completion": "yes 99"}\n')
    with pytest.raises(CheckpointError):
        stream(place, "a.jsonl").restore(state)


def test_bad_records_stop_or_are_counted_each_epoch(place):
    lines = (place / "a.jsonl").read_text().splitlines()
    (place / "a.jsonl").write_text("\n".join([*lines[:20], "{oops", *lines[20:]]))
    rows = stream(place, "a.jsonl")
    with pytest.raises(DataError, match=r"a.jsonl:21: bad JSON"):
        [rows.next_row() for _ in range(50)]
    rows = stream(place, "a.jsonl", on_bad="skip")
    assert sorted(number for _ in range(50) for number in numbers(rows.next_row())) == list(range(50))
    assert (rows.counts[0].read, rows.counts[0].bad) == (51, 1)


def test_too_many_dropped_stop_the_stream_at_the_end_of_the_epoch_or_after_enough(place, monkeypatch):
    write(place / "long.jsonl", 30, prompt="cat " * 60)
    with open(place / "long.jsonl", "a") as file:
        file.write((place / "a.jsonl").read_text())
    rows = stream(place, "long.jsonl")
    with pytest.raises(DataError, match=r"30 of 80 samples were dropped.*max_dropped_fraction=0.2"):
        [rows.next_row() for _ in range(80)]
    monkeypatch.setattr(module, "JUDGED_RECORDS", 40)
    with pytest.raises(DataError, match=r"30 of 40 samples were dropped"):
        [rows.next_row() for rows in [stream(place, "long.jsonl")] for _ in range(80)]


def test_an_epoch_without_a_row_stops(place):
    write(place / "long.jsonl", 30, prompt="cat " * 60)
    with pytest.raises(DataError, match=r"long.jsonl: a whole epoch of 30 records.*gave no row"):
        stream(place, "long.jsonl", max_dropped_fraction=1.0).next_row()


def test_the_buffers_are_bounded(place):
    rows = stream(place, "a.jsonl", "b.csv", packing=True)
    for _ in range(40):
        rows.next_row()
        state = rows.state()
        assert len(state["set0_buffer_lengths"]) <= 8 and len(state["set1_buffer_lengths"]) <= 8
        assert len(state["ready_lengths"]) <= 16
