"""The three numbers of a batch, against sharing out rows one by one."""

import itertools
import re

import pytest

from tonnage.config.batch import resolve_batch
from tonnage.config.schema import Batch
from tonnage.errors import ConfigError

WORLDS = (1, 2, 3, 4, 6, 7, 8, 16, 64)
MICROS = (1, 2, 4)
GLOBALS = (64, 128, 256)


def steps_by_dealing(rows, gpus, micro):
    """Deal rows to ranks one by one, then take micro-batches until the busiest rank has none left."""
    hands = [0] * gpus
    for row in range(rows):
        hands[row % gpus] += 1
    steps, left = 0, max(hands)
    while left > 0:
        left -= micro
        steps += 1
    return steps


def resolve(gpus, seq_tokens=2048, **keys):
    return resolve_batch(Batch(**keys), gpus, seq_tokens)


@pytest.mark.parametrize("gpus", WORLDS)
def test_rows_and_micro_batch_give_the_steps(gpus):
    for micro, rows in itertools.product(MICROS, GLOBALS):
        cut = resolve(gpus, global_rows=rows, micro_rows=micro)
        assert cut.accumulation_steps == steps_by_dealing(rows, gpus, micro)
        assert cut.global_rows == rows and cut.global_tokens is None


@pytest.mark.parametrize("gpus", WORLDS)
def test_three_numbers_that_agree_are_taken_and_all_others_refused(gpus):
    for micro, rows in itertools.product(MICROS, GLOBALS):
        right = steps_by_dealing(rows, gpus, micro)
        for steps in {1, right - 1, right, right + 1, 2 * right} - {0}:
            if steps == right:
                assert resolve(gpus, global_rows=rows, micro_rows=micro, accumulation_steps=steps
                               ).accumulation_steps == right
            else:
                with pytest.raises(ConfigError) as error:
                    resolve(gpus, global_rows=rows, micro_rows=micro, accumulation_steps=steps)
                check_proposals(str(error.value), gpus)


def check_proposals(message, gpus):
    assert message.startswith("batch.accumulation_steps=") and f"{gpus} GPUs" in message
    triples = re.findall(r"batch.global_rows=(\d+) batch.micro_rows=(\d+) batch.accumulation_steps=(\d+)", message)
    assert len(triples) >= 2
    for rows, micro, steps in (map(int, triple) for triple in triples):
        assert steps_by_dealing(rows, gpus, micro) == steps


def test_proposals_keep_what_was_asked_for_where_they_can():
    with pytest.raises(ConfigError) as error:
        resolve(4, global_rows=128, micro_rows=2, accumulation_steps=8)
    message = str(error.value)
    assert "batch.global_rows=128 batch.micro_rows=2 batch.accumulation_steps=16" in message  # rows and micro-batch
    assert "batch.global_rows=128 batch.micro_rows=4 batch.accumulation_steps=8" in message  # rows and steps
    assert "batch.global_rows=64 batch.micro_rows=2 batch.accumulation_steps=8" in message  # micro-batch and steps


@pytest.mark.parametrize("gpus, micro, steps", list(itertools.product(WORLDS, MICROS, (1, 3, 8))))
def test_micro_batch_and_steps_give_the_rows(gpus, micro, steps):
    cut = resolve(gpus, micro_rows=micro, accumulation_steps=steps)
    assert cut.global_rows == micro * steps * gpus and (cut.micro_rows, cut.accumulation_steps) == (micro, steps)


@pytest.mark.parametrize("gpus, steps, rows", list(itertools.product(WORLDS, (1, 2, 8), GLOBALS)))
def test_rows_and_steps_give_the_smallest_micro_batch_or_are_refused(gpus, steps, rows):
    fitting = [micro for micro in range(1, rows + 1) if steps_by_dealing(rows, gpus, micro) == steps]
    if fitting:
        assert resolve(gpus, global_rows=rows, accumulation_steps=steps).micro_rows == min(fitting)
    else:
        with pytest.raises(ConfigError) as error:
            resolve(gpus, global_rows=rows, accumulation_steps=steps)
        check_proposals(str(error.value), gpus)


def test_steps_that_no_micro_batch_gives_are_refused_with_triples_that_agree():
    # 9 rows on one GPU: micro-batches of 2 take 5 steps, of 1 take 9
    with pytest.raises(ConfigError) as error:
        resolve(1, global_rows=9, accumulation_steps=6)
    check_proposals(str(error.value), 1)


def test_three_gpus_on_a_batch_that_does_not_divide():
    cut = resolve(3, micro_rows=4)
    assert (cut.global_rows, cut.micro_rows, cut.accumulation_steps) == (128, 4, 11)  # shares of 43, 43 and 42


def test_more_gpus_than_rows():
    cut = resolve(64, global_rows=16, micro_rows=4)
    assert (cut.global_rows, cut.micro_rows, cut.accumulation_steps) == (16, 1, 1)


@pytest.mark.parametrize("seq_tokens, micro", [(512, 8), (1024, 4), (2048, 2), (3000, 1), (4096, 1), (8192, 1)])
def test_auto_is_128_rows_and_a_micro_batch_within_4096_tokens(seq_tokens, micro):
    cut = resolve(1, seq_tokens)
    assert (cut.global_rows, cut.micro_rows, cut.accumulation_steps) == (128, micro, 128 // micro)


def test_global_tokens_leave_rows_and_steps_open():
    cut = resolve(2, 1024, global_tokens=10_000)
    assert (cut.global_rows, cut.global_tokens, cut.micro_rows, cut.accumulation_steps) == (None, 10_000, 4, None)
    assert resolve(2, 1024, global_tokens=10_000, micro_rows=3).micro_rows == 3


@pytest.mark.parametrize("name", ["global_rows", "accumulation_steps"])
def test_global_tokens_are_not_given_with_rows_or_steps(name):
    with pytest.raises(ConfigError, match=f"batch.{name}=8: not with batch.global_tokens=1000.*leave it auto"):
        resolve(2, global_tokens=1000, **{name: 8})
