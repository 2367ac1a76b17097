"""Which parameters decay, and which optimizer is built over them."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tonnage.config.schema import Adapter, Optimizer
from tonnage.models.build import add_adapter
from tonnage.train.optimizer import build_optimizer, parameter_groups


def llama(tied=False):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attention_bias=True, tie_word_embeddings=tied))


def split(model, **keys):
    """Names of parameters with and without decay."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, Optimizer(weight_decay=0.1, **keys))
    assert sorted({group["weight_decay"] for group in groups}) == sorted(group["weight_decay"] for group in groups)
    found = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in groups}
    assert sum(len(group["params"]) for group in groups) == sum(p.requires_grad for p in model.parameters())
    return found.get(0.1, set()), found.get(0.0, set())


LINEARS = {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"} | {
    f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def test_linear_weights_decay_and_norms_biases_and_embeddings_do_not():
    decayed, plain = split(llama())
    assert decayed == LINEARS | {"lm_head.weight"}
    assert plain == ({f"model.layers.0.self_attn.{name}_proj.bias" for name in "qkvo"}
                     | {f"model.{name}.weight" for name in ("norm", "embed_tokens", "layers.0.input_layernorm",
                                                            "layers.0.post_attention_layernorm")})


def test_a_head_that_is_the_embedding_does_not_decay_and_is_there_once():
    decayed, plain = split(llama(tied=True))
    assert decayed == LINEARS and "model.embed_tokens.weight" in plain


def test_embeddings_of_positions_do_not_decay():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    decayed, plain = split(model)
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= plain
    assert decayed == {f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc",
                                                                     "mlp.c_proj")}


def test_decay_all_decays_everything():
    decayed, plain = split(llama(), decay_all=True)
    assert not plain and decayed == {name for name, _ in llama().named_parameters()}


def test_adapters_decay_and_what_is_frozen_is_left_out():
    model = add_adapter(llama(), Adapter(rank=2), trains_embeddings=False, dtype=torch.float32)
    decayed, plain = split(model)
    assert not plain and len(decayed) == 2 * len(LINEARS) and all("lora_" in name for name in decayed)


def test_trained_embeddings_beside_adapters_do_not_decay():
    model = add_adapter(llama(), Adapter(rank=2), trains_embeddings=True, dtype=torch.float32)
    decayed, plain = split(model)
    assert [name for name in plain if "lora_" in name] == [] and len(plain) == 1 and "embed_tokens" in min(plain)
    assert {name for name in decayed if "lora_" not in name} == {name for name in decayed if "lm_head" in name} != set()


def test_a_partitioned_weight_decays_as_the_whole_one_would():
    # as ZeRO-3 leaves them: the parameter itself is empty, the whole shape is beside it
    model = llama()
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    decayed, _ = split(model)
    assert decayed == LINEARS | {"lm_head.weight"}


@pytest.mark.parametrize("name, kind", [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_the_optimizer_is_built_with_what_the_config_says(name, kind):
    built = build_optimizer(llama(), Optimizer(name=name, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6, momentum=0.7))
    assert type(built) is kind and [group["weight_decay"] for group in built.param_groups] == [0.1, 0.0]
    for group in built.param_groups:
        assert group["lr"] == 0.0  # the loop sets it before each step
        if name == "adamw":
            assert (group["betas"], group["eps"]) == ((0.8, 0.9), 1e-6)
        else:
            assert (group["momentum"], group["nesterov"]) == (0.7, False)


def eight_bit(parameters):
    from tonnage.engines.eight_bit import AdamW8bit

    return AdamW8bit([{"params": parameters}], lr=1e-3)


def signed_values():
    """Blocks whose largest value is negative, positive, tiny and zero."""
    torch.manual_seed(0)
    values = torch.randn(32, 256) * torch.logspace(-12, 3, 32)[:, None]
    values[3, 7], values[4, 7], values[5] = -1.0, 1.0, 0.0
    return values.flatten()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_what_was_dequantised_is_quantised_to_the_same_codes(name):
    parameter = torch.zeros(8192)
    optimizer = eight_bit([parameter])
    optimizer.write([parameter], name, signed_values() if name == "exp_avg" else signed_values().square(), 1)
    first, plain = optimizer.state[parameter][name], optimizer.read([parameter], name)
    optimizer.write([parameter], name, plain, 1)
    again = optimizer.state[parameter][name]
    assert first is not again and torch.equal(first.codes, again.codes) and torch.equal(first.scale, again.scale)


def test_torchao_still_needs_the_map_that_reaches_to_minus_one():
    # gone once this fails: then eight_bit.AdamW8bit needs no _subclass_zeros
    from torchao.optim.subclass_8bit import OptimState8bit

    state, again = OptimState8bit.zeros((8192,)), OptimState8bit.zeros((8192,))
    state.copy_(signed_values())
    again.copy_(state.dequantize())
    assert not torch.equal(again.scale, state.scale)


def test_pieces_of_a_flat_tensor_learn_as_parameters_of_their_own():
    torch.manual_seed(0)
    flat, gradient = torch.randn(10_000), torch.randn(10_000)
    alone = [flat[:9000].clone(), flat[9000:].clone()]
    pieces, plain = eight_bit([flat]), eight_bit([*alone])
    assert [piece.numel() for piece in pieces.split(flat, 0, 9000)] == [8960, 40]  # full blocks, and the rest in fp32
    pieces.split(flat, 9000, 1000)
    flat.grad, alone[0].grad, alone[1].grad = gradient, gradient[:9000].clone(), gradient[9000:].clone()
    with torch.compiler.set_stance("force_eager"):
        pieces.step()
        plain.step()
    assert pieces.param_groups[0]["params"] == [flat] and len(pieces.state) == 4
    assert torch.equal(flat, torch.cat(alone))  # the first update is computed before anything is quantised
    kinds = [type(state["exp_avg"]).__name__ for state in pieces.state.values()]
    assert kinds.count("OptimState8bit") == 1
