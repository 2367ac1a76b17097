"""The loss of a micro-batch: the chunked form equals the plain one, and the head is otherwise left as it was."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from tonnage.config.schema import Adapter, Train
from tonnage.data.collate import collate
from tonnage.data.pack import Row
from tonnage.errors import ConfigError
from tonnage.models.build import add_adapter
from tonnage.trace.tracker import Tracker
from tonnage.train.loss import ChunkedLinearCrossEntropy, LossHead, loss_sum, plain_loss

SIZES = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "pad_token_id": 0}


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gemma(softcap):
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=softcap, attn_implementation="eager")
    return Gemma2ForCausalLM(config)


def row(length, labels=None, seed=0):
    tokens = np.random.default_rng(seed).integers(1, 37, length).astype(np.int32)
    learnt = tokens.copy() if labels is None else np.where(labels, tokens, -100).astype(np.int32)
    learnt[0] = -100
    return Row(tokens, learnt, np.arange(length, dtype=np.int32))


# ---- chunked linear cross entropy

def inputs(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(count)
    hidden, weight, bias = (torch.randn(shape, generator=generator) for shape in ((count, 8), (21, 8), (21,)))
    targets = torch.randint(0, 21, (count,), generator=generator)
    return [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)], targets


def reference(hidden, weight, bias, targets):
    """By the definition, in fp64: sum of log sum exp(logits) - logit of the target."""
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    picked = logits[torch.arange(len(targets)), targets]
    return (logits.exp().sum(1).log() - picked).sum()


def relative(a, b):
    return float(((a.double() - b.double()).norm() / b.double().norm()).detach())


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 7, 13, 100])
def test_chunked_equals_the_definition_in_value_and_gradients(chunk_tokens, with_bias):
    (hidden, weight, bias), targets = inputs(13)
    tensors = [hidden, weight] + [bias] * with_bias
    bias = bias if with_bias else None
    expected = reference(hidden, weight, bias, targets)
    expected_grads = torch.autograd.grad(expected * 2.5, tensors)
    loss = ChunkedLinearCrossEntropy.apply(hidden, weight, bias, targets, chunk_tokens)
    (loss * 2.5).backward()
    assert loss.dtype == torch.float32 and relative(loss, expected) < 1e-6
    for tensor, grad in zip(tensors, expected_grads, strict=True):
        assert tensor.grad.dtype == tensor.dtype and relative(tensor.grad, grad) < 2e-6


def test_a_frozen_head_costs_no_gradient_and_changes_none():
    (hidden, weight, bias), targets = inputs(9)
    expected, = torch.autograd.grad(reference(hidden, weight, bias, targets), [hidden])
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    loss = ChunkedLinearCrossEntropy.apply(hidden, weight, bias, targets, 4)
    loss.backward()
    assert relative(hidden.grad, expected) < 2e-6 and weight.grad is None and bias.grad is None


def test_a_trained_head_on_frozen_states_gets_its_gradient():
    (hidden, weight, _), targets = inputs(9)
    expected, = torch.autograd.grad(reference(hidden, weight, None, targets), [weight])
    ChunkedLinearCrossEntropy.apply(hidden.detach(), weight, None, targets, 4).backward()
    assert relative(weight.grad, expected) < 2e-6


def loss_peak(loss, trains_head):
    """Most bytes that head and loss allocate, forward and backward: 4,096 tokens, 128,000 words; on fake tensors."""
    mode = FakeTensorMode()
    with mode:
        hidden_ND = torch.empty(4096, 256, dtype=torch.bfloat16, requires_grad=True)
        weight_VD = torch.empty(128_000, 256, dtype=torch.bfloat16, requires_grad=trains_head)
        targets_N = torch.zeros(4096, dtype=torch.int64)
        with Tracker(fake_mode=mode) as tracker:
            tracker.enter("loss")
            loss(hidden_ND, weight_VD, targets_N).backward()
        return tracker.peak("loss").total


@pytest.mark.parametrize("trains_head", [False, True])
def test_the_chunked_loss_of_a_large_vocabulary_holds_under_a_fifth_of_the_plain_one(trains_head):
    chunk_tokens = Train().loss_chunk_tokens
    plain = loss_peak(lambda hidden, weight, targets: plain_loss(F.linear(hidden, weight), targets), trains_head)
    chunked = loss_peak(lambda hidden, weight, targets: ChunkedLinearCrossEntropy.apply(
        hidden, weight, None, targets, chunk_tokens), trains_head)
    assert plain > 5 * chunked


def test_no_label_gives_zero_loss_and_zero_gradients():
    (hidden, weight, bias), targets = inputs(0)
    loss = ChunkedLinearCrossEntropy.apply(hidden, weight, bias, targets, 4)
    loss.backward()
    assert float(loss.detach()) == 0.0 and hidden.grad.shape == (0, 8)
    assert not weight.grad.any() and not bias.grad.any()


@pytest.mark.parametrize("chunk_tokens", [1, 50, 1000])
def test_bf16_is_as_near_as_its_rounding_and_does_not_lose_sums_over_chunks(chunk_tokens):
    (hidden, weight, bias), targets = inputs(400, torch.bfloat16)
    expected = reference(hidden, weight, bias, targets)
    grads = torch.autograd.grad(expected, [hidden, weight, bias])
    loss = ChunkedLinearCrossEntropy.apply(hidden, weight, bias, targets, chunk_tokens)
    loss.backward()
    assert relative(loss, expected) < 5e-3
    for tensor, grad in zip((hidden, weight, bias), grads, strict=True):
        assert tensor.grad.dtype == torch.bfloat16 and relative(tensor.grad, grad) < 1e-2


def test_large_logits_do_not_overflow():
    weight = torch.eye(3) * 1000
    loss = ChunkedLinearCrossEntropy.apply(torch.eye(3).requires_grad_(), weight, None, torch.tensor([0, 1, 0]), 2)
    assert float(loss) == 1000.0  # the first two are right, the third misses by the whole logit


def test_two_tokens_at_loss_1_and_98_at_loss_3_are_2_96():
    # of three logits (a, 0, 0), the loss of the first is log(1 + 2 exp(-a))
    def logits(loss, count):
        a = -torch.log((torch.exp(torch.tensor(loss, dtype=torch.float64)) - 1) / 2)
        return torch.tensor([[float(a), 0.0, 0.0]]).repeat(count, 1)
    micros = [logits(1.0, 2), logits(3.0, 98)]
    for loss in (lambda x, t: plain_loss(x, t),
                 lambda x, t: ChunkedLinearCrossEntropy.apply(x, torch.eye(3), None, t, 10)):
        total = sum(float(loss(micro, torch.zeros(len(micro), dtype=torch.int64))) for micro in micros)
        assert total / 100 == pytest.approx(2.96, abs=1e-5)


# ---- in a model

def by_the_models_own_logits(model, rows):
    """Sum over rows, one at a time and unpadded, of the loss of each labelled token given what precedes it."""
    total = 0.0
    for one in rows:
        logits = model(input_ids=torch.from_numpy(one.tokens[None].astype(np.int64)), use_cache=False).logits[0]
        labels = torch.from_numpy(one.labels.astype(np.int64))
        for t in range(1, len(labels)):
            if labels[t] != -100:
                total = total + F.cross_entropy(logits[t - 1].float(), labels[t])
    return total


ROWS = [row(9, seed=1), row(5, np.array([0, 0, 1, 0, 1]), seed=2), row(3, np.zeros(3), seed=3)]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", ["plain", "chunked"])
def test_loss_and_gradients_of_a_micro_batch_are_those_of_its_tokens(kind, flat):
    model, batch = llama(), collate(ROWS, 0, flat)
    expected = by_the_models_own_logits(model, ROWS)
    expected.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = loss_sum(model, LossHead(model, kind, 3), batch)
    loss.backward()
    assert loss.shape == () and float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, grads[name]) < 1e-5, name


@pytest.mark.parametrize("kind", ["plain", "chunked"])
def test_micro_batches_add_up_to_the_window_whatever_the_cut(kind):
    rows = [row(length, seed=length) for length in (4, 9, 2, 7, 3)]
    updates = []
    for cut in ([[0, 1, 2, 3, 4]], [[0, 1], [2, 3], [4]], [[4], [3], [], [2], [1], [0]]):
        model = llama()
        head, count, total = LossHead(model, kind, 4), 4 + 9 + 2 + 7 + 3 - 5, 0.0
        for micro in cut:
            loss = loss_sum(model, head, collate([rows[i] for i in micro], 0))
            (loss / count).backward()
            total += float(loss.detach())
        updates.append((total / count, {name: p.grad for name, p in model.named_parameters()}))
    for loss, grads in updates[1:]:
        assert loss == pytest.approx(updates[0][0], rel=1e-6)
        assert all(relative(grad, updates[0][1][name]) < 1e-5 for name, grad in grads.items())


@pytest.mark.parametrize("kind", ["plain", "chunked"])
def test_a_micro_batch_without_labels_has_a_backward_and_adds_nothing(kind):
    for rows in ([], [row(4, np.zeros(4))]):
        model = llama()
        loss = loss_sum(model, LossHead(model, kind, 4), collate(rows, 0))
        loss.backward()
        assert float(loss.detach()) == 0.0
        grads = [p.grad for p in model.parameters()]
        assert all(grad is not None and not grad.any() for grad in grads)


def test_the_head_leaves_ordinary_calls_unchanged():
    model, ids = llama(), torch.arange(1, 13).reshape(2, 6)
    before = model(input_ids=ids, use_cache=False).logits
    head = LossHead(model, "chunked", 4)
    loss_sum(model, head, collate(ROWS, 0))
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    with pytest.raises(IndexError):
        batch = collate(ROWS, 0)
        with head.expecting(batch):
            model(input_ids=ids[:1, :2], use_cache=False)  # fewer positions than the labels point to
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_a_model_that_caps_its_logits_is_not_trained_by_chunks():
    with pytest.raises(ConfigError, match=r"train.loss=chunked: .*final_logit_softcapping=5.0.*use train.loss=plain"):
        LossHead(gemma(5.0), "chunked", 4)
    model = gemma(5.0)
    model.lm_head.weight.data *= 30  # so that the cap bites
    head = LossHead(model, "auto", 4)
    assert head.kind == "plain"
    expected = float(by_the_models_own_logits(model, ROWS))
    assert float(loss_sum(model, head, collate(ROWS, 0)).detach()) == pytest.approx(expected, rel=1e-5)
    assert LossHead(gemma(None), "auto", 4).kind == "chunked"


def test_auto_is_chunked_where_the_head_is_a_plain_linear_layer():
    assert LossHead(llama(), "auto", 4).kind == "chunked" and LossHead(llama(), "plain", 4).kind == "plain"

    class Scaled(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * 2
    model = llama()
    model.lm_head = Scaled(16, 37, bias=False)
    assert LossHead(model, "auto", 4).kind == "plain"
    model.lm_head = Scaled(16, 37, bias=False)
    with pytest.raises(ConfigError, match="train.loss=chunked: the head is a Scaled"):
        LossHead(model, "chunked", 4)


def test_a_head_that_is_trained_beside_adapters_is_the_one_that_is_used():
    model = add_adapter(llama(), Adapter(rank=2), trains_embeddings=True, dtype=torch.float32)
    trained = [p for name, p in model.named_parameters() if "lm_head" in name and p.requires_grad]
    assert len(trained) == 1
    trained[0].data.mul_(3)  # apart from the one it was copied from
    expected = float(by_the_models_own_logits(model, ROWS))
    head = LossHead(model, "chunked", 3)
    loss = loss_sum(model, head, collate(ROWS, 0))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6) and trained[0].grad.any()
