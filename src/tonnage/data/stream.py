"""Rows read while training: a mixture of sources, each shuffled in a bounded buffer, tokenised on the fly, resumable.

Every rank reads the same stream, so that a window does not depend on the number of GPUs. All that decides what comes
next (places, buffers, generators) is in `state`; numpy's generators: https://numpy.org/doc/stable/reference/random/.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tonnage.config.schema import Data, DataSet
from tonnage.data.formats import Counts, Source
from tonnage.data.pack import Row, best_fit, check_dropped, make_row
from tonnage.data.prepare import fingerprint, sample_batches
from tonnage.data.template import Encoder, Sample, load_tokenizer
from tonnage.errors import CheckpointError, DataError

State = dict[str, np.ndarray | int | float | str]
# Records of one set after which its share of dropped samples says something.
JUDGED_RECORDS = 1000
BATCH_RECORDS = 64


class StreamRows:
    """An endless stream of rows; `next_row()` gives the next one.

    A sample comes from a data set with probability weight / sum of weights. Each set is read again from its beginning
    when it ends, in another order; within an epoch of a set every sample comes once. With packing, as many samples as
    `data.buffer_rows` are packed at a time, of all sets together.

    Attributes:
        fingerprint: identity of the stream, with sizes of data files for their contents.
        notes: remarks on the chat template.
    """

    def __init__(self, sets: Sequence[DataSet], data: Data, tokenizer_folder: str, *, seq_tokens: int, packing: bool,
                 seed: int) -> None:
        options = {"weights": [one.weight for one in sets], "seed": seed, "buffer_rows": data.buffer_rows}
        key = fingerprint(sets, data, tokenizer_folder, seq_tokens=seq_tokens, packing=packing, contents=False)
        self.fingerprint = json.dumps({"rows": key, **options}, sort_keys=True)
        encoder = Encoder(load_tokenizer(tokenizer_folder), chat_template=data.chat_template, system=data.system,
                          train_on=data.train_on)
        self.notes = encoder.notes
        weights = np.array(options["weights"], dtype=np.float64)
        self._bounds = np.cumsum(weights / weights.sum())
        self._rng = np.random.default_rng([seed, len(sets)])
        room = max(1, data.buffer_rows // len(sets))
        self._sources = [_Shuffled(one, encoder, data, seq_tokens, room, [seed, number])
                         for number, one in enumerate(sets)]
        self._seq_tokens, self._pool_samples = seq_tokens, data.buffer_rows if packing else 1
        self._ready: list[list[Sample]] = []  # rows to come, the next one last

    @property
    def counts(self) -> list[Counts]:
        """What was read, skipped, cut and dropped so far, for each data set."""
        return [source.counts for source in self._sources]

    def next_row(self) -> Row:
        """The next row.

        Raises:
            DataError: a bad record, too many samples dropped, or a whole epoch of a set without a usable one.
        """
        if not self._ready:
            self._pack()
        return make_row(self._ready.pop())

    def _pack(self) -> None:
        pool = []
        begun = [source.epoch + source.ended(source.epoch) for source in self._sources]
        while len(pool) < self._pool_samples:
            source = self._sources[int(np.searchsorted(self._bounds, self._rng.random(), side="right"))]
            pool.append(source.draw())
            # A small data set is packed epoch by epoch, so that no row holds a sample twice.
            if all(one.ended(before) for one, before in zip(self._sources, begun, strict=True)):
                break
        bins = best_fit([len(sample.tokens) for sample in pool], self._seq_tokens)
        order = self._rng.permutation(len(bins))
        self._ready = [[pool[index] for index in bins[number]] for number in order]

    def state(self) -> State:
        """All that decides the rows to come, flat: numbers, strings (JSON) and arrays, for `restore`."""
        state: State = {"fingerprint": self.fingerprint, "rng": _rng_text(self._rng),
                        "ready_rows": np.array([len(row) for row in self._ready], dtype=np.int64)}
        state |= _flat("ready", [sample for row in self._ready for sample in row])
        for number, source in enumerate(self._sources):
            state |= {f"set{number}_{name}": value for name, value in source.state().items()}
        return state

    def restore(self, state: State) -> None:
        """Goes on as if the stream that gave `state` had not been interrupted.

        Raises:
            CheckpointError: the state is of another stream: other data, settings, weights or seed.
        """
        if state["fingerprint"] != self.fingerprint:
            raise CheckpointError(f"data: the checkpoint's stream was {state['fingerprint']}, this one is "
                                  f"{self.fingerprint}; give the same data files, tokenizer and data.* keys, or start "
                                  "with run.fork=true")
        self._rng = _rng_from(state["rng"])
        samples = iter(_samples("ready", state))
        self._ready = [[next(samples) for _ in range(num)] for num in state["ready_rows"]]
        for number, source in enumerate(self._sources):
            prefix = f"set{number}_"
            source.restore({name.removeprefix(prefix): value for name, value in state.items()
                            if name.startswith(prefix)})


class _Shuffled:
    """One data set's samples, epoch after epoch, each epoch drawn at random from a bounded buffer."""

    def __init__(self, data_set: DataSet, encoder: Encoder, data: Data, seq_tokens: int, room: int,
                 seed: list[int]) -> None:
        self._source, self._encoder, self._data = Source(data_set, streaming=True), encoder, data
        self._seq_tokens, self._room, self._seed = seq_tokens, room, seed
        self._batch = max(1, min(BATCH_RECORDS, room // 4))
        self.counts, self.epoch, self._buffer = Counts(), 0, []
        self._begin()

    def _begin(self) -> None:
        """Starts reading this epoch from its first record, with this epoch's generator."""
        self._rng = np.random.default_rng([*self._seed, self.epoch])
        self._read_before, self._kept_before, self._exhausted = self.counts.read, self.counts.kept, False
        self._read_from(0)

    def _read_from(self, record: int) -> None:
        self._batches = sample_batches(self._source, self._encoder, self._data, self.counts,
                                       seq_tokens=self._seq_tokens, skip=record, batch_records=self._batch)

    def draw(self) -> Sample:
        if self.ended(self.epoch):
            self.epoch += 1
            self._begin()
        self._fill()
        at = int(self._rng.integers(len(self._buffer)))
        self._buffer[at], self._buffer[-1] = self._buffer[-1], self._buffer[at]
        sample = self._buffer.pop()
        self._fill()  # so that `ended` knows at once
        return sample

    def ended(self, epoch: int) -> bool:
        """Whether the last sample of this epoch has been drawn."""
        return self.epoch > epoch or (self._exhausted and not self._buffer)

    def _fill(self) -> None:
        while not self._exhausted and len(self._buffer) + self._batch <= self._room:
            batch = next(self._batches, None)
            if batch is None:
                self._exhausted = True
                if self.counts.kept == self._kept_before:
                    raise DataError(f"{self._source.data_set.path}: a whole epoch of {self.counts.read} records, "
                                    f"{self.counts.bad} of them bad, gave no row; raise data.seq_tokens, or check "
                                    "data.format, data.truncate and data.on_bad")
            else:
                self._buffer.extend(batch)
            if self._exhausted or self.counts.read >= JUDGED_RECORDS:
                check_dropped([self.counts], self._data, self._seq_tokens)

    def state(self) -> State:
        numbers = {"epoch": self.epoch, "read_before": self._read_before, "kept_before": self._kept_before,
                   "exhausted": int(self._exhausted)}
        return numbers | {"rng": _rng_text(self._rng), "counts": json.dumps(asdict(self.counts))} | _flat(
            "buffer", self._buffer)

    def restore(self, state: State) -> None:
        self.epoch, self._read_before, self._kept_before = (int(state[name]) for name in
                                                            ("epoch", "read_before", "kept_before"))
        self._exhausted = bool(state["exhausted"])
        self._rng, self.counts = _rng_from(state["rng"]), Counts(**json.loads(state["counts"]))
        self._buffer = _samples("buffer", state)
        self._read_from(self.counts.read - self._read_before)


def _flat(name: str, samples: list[Sample]) -> State:
    return {f"{name}_tokens": np.concatenate([np.zeros(0, np.int32), *(sample.tokens for sample in samples)]),
            f"{name}_trained": np.concatenate([np.zeros(0, np.bool_), *(sample.trained for sample in samples)]),
            f"{name}_lengths": np.array([len(sample.tokens) for sample in samples], dtype=np.int64)}


def _samples(name: str, state: State) -> list[Sample]:
    borders = np.cumsum(state[f"{name}_lengths"])[:-1]
    if not len(state[f"{name}_lengths"]):
        return []
    return [Sample(*pair) for pair in zip(np.split(state[f"{name}_tokens"], borders),
                                          np.split(state[f"{name}_trained"], borders), strict=True)]


def _rng_text(rng: np.random.Generator) -> str:
    return json.dumps(rng.bit_generator.state)


def _rng_from(text: Any) -> np.random.Generator:
    rng = np.random.default_rng(0)
    rng.bit_generator.state = json.loads(str(text))
    return rng
