"""Quantised bases and mixtures of experts learn what a plain reference learns, on every engine, on 1 and 2 ranks."""

import pytest
import torch
from equivalence import BF16_TOLERANCE, deviations, within
from moe import make_moe, publish_fp8, reference
from tiny import config_for, open_tiny, whole_weights

from tonnage.train import loop

# fp32; the adapter is on the tokens here and on the weights there
LIMITS = {"loss": 1e-5, "norm": 2e-5, "sgd": 1e-4}
KINDS = {"full": ("full", "none"), "lora": ("lora", "none"), "fp8": ("lora", "fp8"), "nf4": ("qlora", "nf4")}


@pytest.fixture(scope="session")
def families(tmp_path_factory):
    """`families(name, published)`: a folder; published: as FP8."""
    made = {}

    def folder(name, published=False):
        if (name, published) not in made:
            place = tmp_path_factory.mktemp(name)
            made[name, published] = publish_fp8(folder(name), place) if published else make_moe(place, name)
        return made[name, published]
    return folder


@pytest.fixture(scope="session")
def references():
    made = {}
    return lambda *key: made[key] if key in made else made.setdefault(key, reference(*key))


def train(folder, strategy, adapter, base, micro, *overrides):
    """The real loop on one rank of the pool; what it learned."""
    targets = [] if adapter == "full" else ["adapter.targets=[all-linear,experts]"]
    s = open_tiny(config_for(strategy, f"adapter={adapter}", f"adapter.quantise={base}", *targets, "optimizer=sgd",
                             "optimizer.learning_rate=2.0", f"batch.micro_rows={micro}", *overrides), folder)
    before = whole_weights(s.engine)
    routers = {name: s.engine.whole(p).clone() for name, p in s.engine.model.named_parameters() if ".gate.weight" in name}
    loop.train(s)
    after = whole_weights(s.engine)
    for name, parameter in s.engine.model.named_parameters():
        if name in routers and not parameter.requires_grad:
            assert torch.equal(s.engine.whole(parameter), routers[name]), name
    result = {"losses": [line["loss"] for line in s.metrics.lines], "norms": [line["grad_norm"] for line in s.metrics.lines],
              "updates": {name: after[name] - before[name] for name in after}}
    s.engine.close()
    return result


@pytest.mark.parametrize("world, micro", [(1, 3), (2, 2)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral"])
def test_a_mixture_of_experts_learns_what_the_reference_learns(pools, families, references, family, strategy, kind, world,
                                                              micro):
    adapter, base = KINDS[kind]
    expected = references(families(family), adapter, base)
    folder = families(family, published=kind == "fp8")
    result = pools(world).run(train, folder, strategy, adapter, base, micro)[0]
    worst = deviations(result, expected, "sgd")
    print(family, strategy, kind, world, worst)
    assert within(worst, LIMITS), worst


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "fsdp"])
def test_routers_that_their_class_keeps_in_fp32_are_trained_in_bf16_too(pools, families, references, strategy):
    folder = families("deepseek_v3")
    result = pools(2).run(train, folder, strategy, "full", "none", 2, "precision=bf16")[0]
    expected = references(folder, "full", "none")
    # of the first window: after an update, tokens whose two best experts are near go to another in 16 bits
    assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=BF16_TOLERANCE["loss"])
    assert result["norms"][0] == pytest.approx(expected["norms"][0], rel=BF16_TOLERANCE["norm"])


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_rows_that_do_not_spread_evenly_are_quantised_and_learned_the_same(pools, families, strategy):
    words = (families("qwen3_moe"), strategy, "qlora", "nf4")
    expected = pools(1).run(train, *words, 7)[0]
    worst = deviations(pools(3).run(train, *words, 1)[0], expected, "sgd")
    assert within(worst, LIMITS), worst


def quantised_parts(folder, strategy, base):
    """Codes and scales as the engine of one rank gathers them."""
    s = open_tiny(config_for(strategy, "adapter=lora", f"adapter.quantise={base}", "batch.micro_rows=1"), folder)
    found = {name: s.engine.whole(p).clone() for name, p in s.engine.model.named_parameters() if not p.is_floating_point()}
    s.engine.close()
    return found


@pytest.mark.parametrize("base", ["nf4", "int8", "fp8"])
def test_codes_and_scales_do_not_depend_on_the_ranks(pools, families, base):
    folder = families("qwen3_moe")
    expected = pools(1).run(quantised_parts, folder, "ddp", base)[0]
    for strategy in ("zero3", "fsdp"):
        found = pools(3).run(quantised_parts, folder, strategy, base)[0]
        assert expected and found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found), strategy
