"""What checkpointed layers compute again, on a Llama of two layers, counted operation by operation."""

import json
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tonnage.config.schema import Adapter, Model
from tonnage.errors import ConfigError
from tonnage.facts.models import MODELS
from tonnage.models import build, checkpointing

SMALL = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 192, "vocab_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 4}
RANK = 16
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


class Counted(TorchDispatchMode):
    """Counts operations by name; `large` are matrix products but those of an adapter's rank."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        first = checkpointing.PRODUCTS.get(func.name())
        self.counts["large"] += first is not None and args[first].shape[-1] > RANK
        return func(*args, **kwargs or {})


def step(folder, base="llama7b", adapter="lora", **settings):
    """(operations of forward, of backward, gradients) of one step with `settings` of the section model."""
    small = SMALL | (EXPERTS if base == "mixtral8x7b" else {})
    (folder / "config.json").write_text(json.dumps(MODELS[base].hf_config | small))
    model = build.build_model(str(folder), Model(path=str(folder), **settings), Adapter(name=adapter, rank=RANK), "sdpa",
                              torch.float32, torch.float32)
    model.enable_input_require_grads()  # transformers does, where layers are checkpointed
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    with Counted() as forward:
        loss = model(input_ids=torch.arange(12)[None], use_cache=False).logits.square().mean()
    with Counted() as backward:
        loss.backward()
    return forward.counts, backward.counts, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("base", "adapter"), [("llama7b", "lora"), ("llama7b", "full"), ("mixtral8x7b", "lora")])
def test_selective_computes_no_large_product_again_and_gives_the_same_gradients(tmp_path, base, adapter):
    _, plain, expected = step(tmp_path, base, adapter, activation_checkpointing="none")
    forward, selective, found = step(tmp_path, base, adapter, activation_checkpointing="selective")
    _, full, _ = step(tmp_path, base, adapter, activation_checkpointing="full")
    assert selective["large"] == plain["large"] < full["large"] and forward["large"] > 4 * 4
    # norms are among what is computed again
    assert selective["aten::rsqrt"] == full["aten::rsqrt"] == 2 * 4 and not plain["aten::rsqrt"]
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


def test_every_second_layer_is_computed_again_where_that_is_asked_for(tmp_path):
    _, every, _ = step(tmp_path, activation_checkpointing="full")
    _, second, _ = step(tmp_path, activation_checkpointing="full", checkpoint_every_layers=2)
    assert 2 * second["aten::rsqrt"] == every["aten::rsqrt"] == 8


def test_only_the_inputs_of_layers_go_to_the_host(tmp_path, monkeypatch):
    moved = []

    def note(**_):
        return torch.autograd.graph.saved_tensors_hooks(lambda one: moved.append(one.shape) or one, lambda kept: kept)

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", note)
    step(tmp_path, activation_checkpointing="selective", checkpoints_on_host=True)
    assert moved == [(1, 12, 128)] * 4


@pytest.mark.parametrize("change, settings, message", [
    ({"supports_gradient_checkpointing": False}, {}, "=full: LlamaForCausalLM cannot checkpoint; use none"),
    ({"_set_gradient_checkpointing": lambda self, module, value=False: None}, {}, "which is not told how; use none"),
    ({}, {"checkpoint_every_layers": 2}, "no layers that checkpoint one by one; use model.checkpoint_every_layers=1"),
    ({}, {"checkpoints_on_host": True}, None), ({}, {}, None)])
def test_a_model_that_would_take_no_notice_is_refused(tmp_path, monkeypatch, change, settings, message):
    from transformers import LlamaForCausalLM

    for name, value in change.items():
        monkeypatch.setattr(LlamaForCausalLM, name, value)
    monkeypatch.setattr(checkpointing, "GradientCheckpointingLayer", int)  # as of code that does without it
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", lambda **_: nullcontext())
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        step(tmp_path, activation_checkpointing="full", **settings)


def test_selective_leaves_compiled_functions_within_a_layer_compiled():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    function = torch.compile(lambda x: torch.relu(x) * 2, backend=backend)
    x = torch.ones(3, 128, requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda x: function(x @ torch.ones(128, 4)), x, use_reentrant=False,
                                      context_fn=checkpointing._contexts).sum().backward()
    assert len(graphs) == 1 and torch.equal(x.grad, torch.full((3, 128), 8.0))


def test_selective_runs_operators_of_higher_order():
    from torch.nn.attention.flex_attention import flex_attention

    x = torch.randn(1, 2, 16, 32)  # it has no backward on CPUs
    first, again = checkpointing._contexts()
    with first:
        found = flex_attention(x, x, x)
    with again:
        assert torch.equal(flex_attention(x, x, x), found)
    assert torch.allclose(found, flex_attention(x, x, x))
