"""The tape of a layer, played by hand on tapes small enough to do so."""

import pytest

from tonnage.facts.models import MODELS
from tonnage.plan.activations import Style, Tape, layer_tape, play


def test_a_chain_frees_what_is_neither_used_nor_saved():
    tape = Tape({"x": 1.0})
    tape.add("a", 10, "x", saves=("x",))
    tape.add("b", 20, "a", saves=("b",))
    tape.add("y", 5, "b")
    played = play(tape, "x")
    # forward: a and b together are 30, then a goes, b is saved; backward: b, its gradient, and with y's gone that of a
    assert (played.saved, played.forward, played.inference) == (20, 30, 30)
    assert played.backward == 20 + 20 + 10


def test_selective_checkpointing_begins_again_with_its_products():
    tape = Tape({"x": 1.0})
    tape.add("a", 10, "x", multiplies=128, beside=("sums",))
    tape.sizes["sums"] = 1
    tape.add("b", 20, "a", saves=("b",))
    tape.add("c", 30, "b", saves=("c",))
    tape.add("y", 5, "c", multiplies=128)
    played = play(tape, "x")
    assert (played.saved, played.products) == (50, 10 + 1 + 5)
    # forward: c and b with a kept; again: the products, then b and c besides, a gone after b, and the gradient of y
    assert played.selective == 10 + 20 + 30
    assert played.again == max(16 + 20, 16 + 20 - 10 + 30) + 5


def test_an_addition_hands_its_gradient_on_without_a_copy():
    copied, passed = Tape({"x": 8.0}), Tape({"x": 8.0})
    for tape, passes in ((copied, False), (passed, True)):
        tape.add("a", 8, "x")
        tape.add("y", 8, "x", "a", passes=passes)
    assert play(copied, "x").backward == 8 + 8 + 8  # of y, of x, of a
    assert play(passed, "x").backward == 8 + 8  # y's is a's and x's; then the other one of x


def test_a_gradient_of_two_users_is_summed_into_the_first():
    tape = Tape({"x": 4.0})
    tape.add("a", 4, "x", weight=100)
    tape.add("b", 4, "x")
    tape.add("y", 4, "a", "b")
    assert play(tape, "x").backward >= 100


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_known_layer_can_be_played_and_training_it_all_saves_more(name):
    a = MODELS[name].architecture
    for i in (0, a.num_layers - 1):
        whole = play(layer_tape(a, i, 1, 128, Style(trains_base=True, weight_gradient_bytes=0)), "x")
        frozen = play(layer_tape(a, i, 1, 128, Style(trains_base=False)), "x")
        twice = play(layer_tape(a, i, 2, 128, Style(trains_base=False)), "x")
        assert 0 < frozen.saved < whole.saved and frozen.backward < whole.backward
        assert twice.saved == pytest.approx(2 * frozen.saved) and twice.backward == pytest.approx(2 * frozen.backward)


def test_eager_attention_holds_the_square_of_the_sequence():
    a = MODELS["llama7b"].architecture

    def saved(seq_tokens, flash):
        return play(layer_tape(a, 0, 1, seq_tokens, Style(trains_base=False, flash=flash)), "x").saved

    assert saved(2048, True) == pytest.approx(2 * saved(1024, True))
    squares = [saved(tokens, False) - saved(tokens, True) for tokens in (1024, 2048)]
    assert squares[1] > 3.5 * squares[0]


def test_where_rows_are_shared_a_layer_saves_what_has_travelled():
    a = MODELS["llama8b"].architecture  # 32 heads of 128, 8 of keys
    plain, shared, repeated = (layer_tape(a, 0, 1, 256, Style(trains_base=False, sequence_gpus=count))
                               for count in (1, 8, 16))
    assert play(shared, "x").saved == play(plain, "x").saved  # queries, keys, values, what is attended: of as many numbers
    assert shared.sizes["self_attn.k_proj.rope.travelled"] == 256 * 8 * 128 * 2
    assert repeated.sizes["self_attn.v_proj.repeated.travelled"] == 256 * 16 * 128 * 2
    assert play(repeated, "x").saved == play(plain, "x").saved + 2 * 256 * 8 * 128 * 2
