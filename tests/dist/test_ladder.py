"""Quantised bases and mixtures of experts learn what a plain reference learns, on every engine, on 1 and 2 ranks."""

from pathlib import Path

import pytest
import torch
from equivalence import BF16_TOLERANCE, deviations, within
from moe import make_listed, make_moe, publish_fp8, reference
from safetensors.torch import load_file
from tiny import config_for, go_on, open_tiny, whole_weights

from tonnage.train import loop

# fp32; the adapter is on the tokens here and on the weights there
LIMITS = {"loss": 1e-5, "norm": 2e-5, "sgd": 1e-4}
KINDS = {"full": ("full", "none"), "lora": ("lora", "none"), "fp8": ("lora", "fp8"), "nf4": ("qlora", "nf4")}
EXPERT_PARALLEL = ("strategy.expert_gpus=2",)
SELECTIVE = ("model.activation_checkpointing=selective",)
SHARED_ROWS = ("strategy.sequence_gpus=2", "model.activation_checkpointing=full")
# strategy, ranks, rows of a micro-batch, more keys; of other families than DeepSeek-V3 some cells are slow tests
LAYOUTS = [("zero3", 1, 3, ()), ("zero3", 2, 2, ()), ("fsdp", 1, 3, ()), ("fsdp", 2, 2, ()), ("fsdp", 2, 1, EXPERT_PARALLEL)]
CELLS = [pytest.param(family, kind, *layout, marks=() if family == "deepseek_v3" or (
    layout[1] == 2 and kind == {"qwen3_moe": "nf4", "mixtral": "lora"}[family]) else pytest.mark.slow)
         for family in ("deepseek_v3", "qwen3_moe", "mixtral") for kind in KINDS for layout in LAYOUTS]
CELLS += [("deepseek_v3", "lora", "fsdp", 2, 2, SHARED_ROWS), ("qwen3_moe", "lora", "fsdp", 2, 2, SHARED_ROWS),
          pytest.param("deepseek_v3", "full", "zero3", 2, 1, SHARED_ROWS, marks=pytest.mark.slow),
          ("deepseek_v3", "fp8", "fsdp", 2, 2, EXPERT_PARALLEL + SHARED_ROWS),
          pytest.param("qwen3_moe", "full", "fsdp", 2, 1, EXPERT_PARALLEL + SHARED_ROWS, marks=pytest.mark.slow),
          ("deepseek_v3", "fp8", "fsdp", 2, 1, EXPERT_PARALLEL + SELECTIVE),
          *(pytest.param("deepseek_v3", "full", *where, SELECTIVE + where_more, marks=pytest.mark.slow)
            for where, where_more in ((("zero3", 2, 2), ()), (("fsdp", 2, 1), EXPERT_PARALLEL)))]


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
    targets = (["train.router_aux_loss=0", "train.router_bias_rate=0"] if adapter == "full" else  # the reference has none
               ["adapter.targets=[all-linear,experts]"])
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


@pytest.mark.parametrize("family, kind, strategy, world, micro, overrides", CELLS)
def test_a_mixture_of_experts_learns_what_the_reference_learns(pools, families, references, family, kind, strategy, world,
                                                              micro, overrides):
    adapter, base = KINDS[kind]
    expected = references(families(family), adapter, base)
    folder = families(family, published=kind == "fp8")
    result = pools(world).run(train, folder, strategy, adapter, base, micro, *overrides)[0]
    worst = deviations(result, expected, "sgd")
    assert within(worst, LIMITS), worst


def test_copies_of_experts_are_summed_over_ranks(pools, families, references):
    """Four ranks, two copies of the experts, which are sharded besides; more ranks than a window's last rows."""
    expected = references(families("qwen3_moe"), "lora", "none")
    result = pools(4).run(train, families("qwen3_moe"), "fsdp", "lora", "none", 1, *EXPERT_PARALLEL)[0]
    pools(4).close()
    assert within(deviations(result, expected, "sgd"), LIMITS)


def go_on_spread(folder, run_folder, until, expert_gpus, optimizer="adamw"):
    """From the newest checkpoint to step `until`; (losses, weights and optimizer states)."""
    from test_engines import states

    config = config_for("fsdp", "adapter=lora", "adapter.targets=[all-linear,experts]", "train.epochs=2",
                        "optimizer.learning_rate=0.01", "batch.micro_rows=2", f"optimizer={optimizer}",
                        f"strategy.expert_gpus={expert_gpus}")
    s = open_tiny(config, folder, run_folder=Path(run_folder))
    found = go_on(s, Path(run_folder), until), states(s.engine)
    s.engine.close()
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("then", [pytest.param(2, marks=pytest.mark.slow), 1])
def test_a_run_goes_on_with_experts_spread_otherwise(pools, families, tmp_path, then, optimizer):
    folder, whole, part = families("deepseek_v3"), tmp_path / "whole", tmp_path / "part"
    whole.mkdir(), part.mkdir()
    losses, expected = pools(2).run(go_on_spread, folder, str(whole), 5, 2, optimizer)[0]
    pools(2).run(go_on_spread, folder, str(part), 2, 2, optimizer)
    found_losses, found = pools(2).run(go_on_spread, folder, str(part), 5, then, optimizer)[0]
    if then == 2:
        assert found_losses == losses[2:] and all(torch.equal(found[name], expected[name]) for name in expected)
    else:
        assert found_losses == pytest.approx(losses[2:], rel=1e-5 if optimizer == "adamw" else 1e-2)


# ---- routers

def balanced(folder, strategy, micro, adapter, *overrides):
    """Two windows with balancing; (figures a step, what routers are then, by name)."""
    config = config_for(strategy, f"adapter={adapter}", f"batch.micro_rows={micro}", "optimizer=sgd",
                        "optimizer.learning_rate=0.5", *overrides)
    s = open_tiny(config, folder)
    loop.train(s)
    found = {name: s.engine.whole(p).clone() for name, p in s.engine.model.named_parameters() if ".gate.weight" in name}
    found |= {name: buffer.clone() for name, buffer in s.engine.model.named_buffers() if "correction_bias" in name}
    s.engine.close()
    keys = ("loss", "router_load_max", "router_entropy", "router_idle_experts", "router_aux_loss")
    return [{key: line[key] for key in keys if key in line} for line in s.metrics.lines], found


@pytest.mark.parametrize("strategy, world, micro, overrides", [
    ("fsdp", 1, 1, ()), ("fsdp", 2, 2, ()), ("fsdp", 2, 1, EXPERT_PARALLEL), ("zero3", 2, 3, ()),
    ("fsdp", 2, 2, ("model.activation_checkpointing=full",)), ("fsdp", 2, 2, SHARED_ROWS)])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_balancing_does_not_depend_on_the_cut(pools, families, family, strategy, world, micro, overrides):
    options = ["train.router_aux_loss=0.5", *(["train.router_bias_rate=0.01"] if family == "deepseek_v3" else [])]
    expected, routers = pools(1).run(balanced, families(family), "fsdp", 7, "full", *options)[0]
    figures, found = pools(world).run(balanced, families(family), strategy, micro, "full", *options, *overrides)[0]
    assert all(line["router_aux_loss"] >= 0.9 for line in expected)  # 1 is even, of any one row
    for line, wanted in zip(figures, expected, strict=True):
        assert line == pytest.approx(wanted, rel=1e-5)
    for name, tensor in routers.items():
        assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-6), name
    biases = [name for name in routers if name.endswith("bias")]
    assert len(biases) == (family == "deepseek_v3") and all(torch.equal(found[name], routers[name]) for name in biases)


def saved_and_resumed(folder, run_folder):
    """Router biases after a window that moves them far, and those of a fresh session that resumes."""
    import torch.distributed as dist

    from tonnage.train import checkpoint

    def biases(s):
        return {name: buffer.clone() for name, buffer in s.engine.model.named_buffers() if "correction_bias" in name}

    config = config_for("fsdp", "adapter=full", "optimizer.learning_rate=1e-3", "train.router_bias_rate=0.5")
    s = open_tiny(config, folder, run_folder=Path(run_folder))
    s.num_steps = s.last_saved = 1
    loop.train(s)
    path = checkpoint.save(Path(run_folder), s.engine, s.position, "tiny", s.source.state(), dist.group.WORLD)
    found = biases(s)
    s.engine.close()
    again = open_tiny(config, folder, run_folder=Path(run_folder))
    checkpoint.load(path, again.engine, 1)
    resumed = biases(again)
    again.engine.close()
    return found, resumed, str(path)


def test_biases_that_were_moved_are_saved_resumed_and_exported(pools, families, tmp_path):
    from dataclasses import replace

    from tonnage.train.export import _trained_model

    folder = families("deepseek_v3")
    moved, resumed, path = pools(2).run(saved_and_resumed, folder, str(tmp_path))[0]
    config = config_for("fsdp", "adapter=full")
    config = replace(config, model=replace(config.model, path=folder))
    exported = dict(_trained_model(config, folder, Path(path), "fp32").named_buffers())
    assert moved and all(tensor.abs().max() > 0.4 for tensor in moved.values())
    for name, tensor in moved.items():
        assert torch.equal(resumed[name], tensor) and torch.equal(exported[name], tensor)


def test_balance_loss_by_its_definition(families):
    """Of one row, written out; and its gradient reaches the router."""
    from tonnage.data.collate import MicroBatch
    from tonnage.train.routing import balance_of_rows

    torch.manual_seed(0)
    logits, experts, top_k, tokens = torch.randn(7, 4, requires_grad=True), 4, 2, 5  # two positions are padding
    index = logits.detach().topk(top_k).indices
    row_of_tokens = MicroBatch(torch.zeros(1, 7), None, None, None, tokens, 0, (tokens,)).row_of_tokens()
    found = balance_of_rows(logits, index, row_of_tokens, num_rows=1, by_sigmoid=False)
    scores = logits[:tokens].softmax(-1)
    share = torch.stack([(index[:tokens] == e).sum() / tokens * experts / top_k for e in range(experts)])
    expected = sum(share[e] * scores[:, e].mean() for e in range(experts))
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    found.backward()
    assert logits.grad[:tokens].any() and not logits.grad[tokens:].any()


def test_an_adapter_leaves_routers_alone_and_balancing_is_refused(pools, families):
    figures, routers = pools(1).run(balanced, families("deepseek_v3"), "fsdp", 7, "lora")[0]
    published = load_file(Path(families("deepseek_v3")) / "model.safetensors")
    assert len(routers) == 2  # a layer's weight and its bias
    assert all(torch.equal(tensor, published[name.removeprefix("base_model.model.")]) for name, tensor in routers.items())
    assert all(set(line) == {"loss", "router_load_max", "router_entropy", "router_idle_experts"} for line in figures)
    assert all(1 <= line["router_load_max"] <= 8 and 0 < line["router_entropy"] <= 1 for line in figures)
    with pytest.raises(AssertionError, match="train.router_aux_loss=0.1: routers are frozen under an adapter"):
        pools(1).run(balanced, families("deepseek_v3"), "fsdp", 7, "lora", "train.router_aux_loss=0.1")


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "fsdp"])
def test_routers_that_their_class_keeps_in_fp32_are_trained_in_bf16_too(pools, families, references, strategy):
    folder = families("deepseek_v3")
    result = pools(2).run(train, folder, strategy, "full", "none", 2, "precision=bf16")[0]
    expected = references(folder, "full", "none")
    # of the first window: after an update, tokens whose two best experts are near go to another in 16 bits
    assert result["losses"][0] == pytest.approx(expected["losses"][0], rel=BF16_TOLERANCE["loss"])
    assert result["norms"][0] == pytest.approx(expected["norms"][0], rel=BF16_TOLERANCE["norm"])


@pytest.mark.parametrize("strategy", [pytest.param("zero3", marks=pytest.mark.slow), "fsdp"])
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


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp", "ddp"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_experts_in_a_list_of_which_ranks_use_others_do_not_stall_a_step(pools, tmp_path, strategy, adapter):
    """A model that this project does not know; its layers are told from its experts, of which there are more."""
    folder, more = make_listed(tmp_path), ("model.trust_remote_code=true", "adapter.targets=[all-linear]")
    expected = pools(1).run(train, folder, "ddp", adapter, "none", 2, *more)[0]
    result = pools(2).run(train, folder, strategy, adapter, "none", 1, *more)[0]
    assert any("experts.7." in name for name in result["updates"])  # 29 tokens at most reach it in some rows only
    assert within(deviations(result, expected, "sgd"), LIMITS)
