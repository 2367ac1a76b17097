"""FP8 products against torchao's own layer, what is converted, and what is saved for backward."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tonnage.config.schema import Precision
from tonnage.errors import ConfigError
from tonnage.models.float8 import Float8Linear, convert

EMULATED = Precision(name="fp8", fp8_emulate=True)


def layer(precision=EMULATED, frozen=False, bias=False):
    torch.manual_seed(0)
    linear = nn.Linear(48, 32, bias=bias, dtype=torch.bfloat16)
    linear.weight.requires_grad_(not frozen)
    convert({"one": linear}, set(), precision, False)
    return linear


def gradients(linear, tokens=13):
    """(output, gradient of the input, of the weight)."""
    torch.manual_seed(1)
    x = torch.randn(1, tokens, 48, dtype=torch.bfloat16, requires_grad=True)
    out = linear(x)
    out.backward(torch.randn_like(out))
    return out.detach(), x.grad, linear.weight.grad


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_output_and_gradients_are_those_of_torchao(recipe):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Theirs

    torch.manual_seed(0)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = Theirs.from_float(nn.Linear(48, 32, bias=False, dtype=torch.bfloat16), config)
    mine = layer(Precision(name="fp8", fp8_emulate=True, fp8_recipe=recipe))
    for found, expected in zip(gradients(mine), gradients(theirs), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_results_are_within_the_rounding_of_fp8(recipe):
    torch.manual_seed(0)
    exact = gradients(nn.Linear(48, 32, bias=False, dtype=torch.bfloat16))
    for found, expected in zip(gradients(layer(Precision(name="fp8", fp8_emulate=True, fp8_recipe=recipe))), exact,
                               strict=True):
        assert 1e-3 < float((found - expected).norm() / expected.norm()) < 0.08


@pytest.mark.parametrize("tokens", [1, 13, 16])
def test_scaled_products_take_any_number_of_tokens(tokens):
    """The CPU has torch._scaled_mm too, slow and tensorwise; the units of a GPU refuse what is no multiple of 16."""
    scaled = layer(Precision(name="fp8"))
    for found, expected in zip(gradients(scaled, tokens), gradients(layer(), tokens), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert [one.pad_inner_dim for one in scaled.products] == [False, False, True]


def test_a_frozen_weight_gets_no_gradient_and_its_input_is_not_saved():
    for frozen, saved in ((True, 1), (False, 2)):
        kept, linear = [], layer(frozen=frozen)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda x: x):
            out, grad, weight_grad = gradients(linear)
        assert len(kept) == saved and (weight_grad is None) == frozen and grad is not None


def test_a_bias_is_added_and_trained():
    linear = layer(bias=True)
    out, *_ = gradients(linear)
    assert torch.equal(out - layer()(torch.zeros(1, 13, 48, dtype=torch.bfloat16)), out)
    assert linear.bias.grad is not None


def test_routers_other_classes_and_odd_dimensions_stay_out_and_are_named():
    class Other(nn.Linear):
        pass

    linears = {"a.up": nn.Linear(32, 16), "a.odd": nn.Linear(32, 24), "b.odd": nn.Linear(24, 32),
               "a.gate": nn.Linear(32, 16), "a.own": Other(32, 16)}
    found = convert(linears, {"a.gate"}, EMULATED, True)
    assert [name for name, module in linears.items() if isinstance(module, Float8Linear)] == ["a.up"]
    assert str(found) == ("FP8 (tensorwise, emulated): 1 of 5 linear layers of the decoder; 2 left out: dimensions that "
                          "are no multiples of 16 (a.odd, ...); 1 left out: routers (a.gate); 1 left out: of a class of "
                          "the model's own (a.own); routed experts are not among them and compute in bf16")


def test_a_model_with_nothing_to_convert_is_refused():
    with pytest.raises(ConfigError, match="precision=fp8: none of the 1 linear layers of the decoder can compute in FP8 "
                                          r"\(1 dimensions that are no multiples of 16\); use precision=bf16"):
        convert({"odd": nn.Linear(20, 20)}, set(), EMULATED, False)
