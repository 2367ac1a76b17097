"""The planner's closed form against every allocation of a real step, and against the trace for shapes that are not tiny."""

import json

import memory
import pytest

from tonnage.config.compose import compose_config
from tonnage.config.rules import resolve_layout
from tonnage.facts.models import MODELS
from tonnage.plan.job import job_of
from tonnage.plan.memory import memory as closed_form
from tonnage.plan.planner import architecture_of
from tonnage.trace.step import trace

WITHIN = 0.05
QUICK = [("fsdp", "full", 2), ("zero2", "lora", 2), ("fsdp", "qlora", 2)]
ALL = [(strategy, adapter, ranks) for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3") for adapter in ("full", "lora", "qlora")
       for ranks in (1, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return memory.make_folder(tmp_path_factory.mktemp("proportioned"))


def predicted(config, layout):
    return {phase: sum(terms.values())
            for phase, terms in closed_form(job_of(config, layout, architecture_of(config))).phases.items()}


def held(strategy, adapter, ranks, folder, pools):
    """Predicted peak relative to the real one."""
    real = pools(ranks).run(memory.measure, strategy, adapter, folder)[0]
    config = memory.config_for(strategy, adapter, folder, ranks)
    mine = predicted(config, resolve_layout(config, ranks, "cpu", ranks, under_deepspeed=False))
    return max(mine[phase] for phase in real) / max(peak["total"] for peak in real.values())


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL])
def test_the_peak_of_a_real_step_is_predicted(pools, folder, case):
    assert held(*case, folder, pools) == pytest.approx(1, abs=WITHIN)


# bytes a trained parameter on the host: states, fp32 weights, summed gradients (zero3: twice), the weights to be sent back
ON_HOST = {"zero1": 8 + 4 + 4 + 2, "zero2": 8 + 4 + 4 + 2, "zero3": 8 + 4 + 4 + 4}


@pytest.mark.parametrize("strategy, ranks, most", [("zero2", 1, 1.05), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
    ("zero2", 2, 1.05), ("zero3", 1, 1.05), ("zero3", 2, 1.05), ("zero1", 1, 1.05), ("zero1", 2, 1.2)))])
def test_the_peak_beside_what_is_offloaded_is_predicted(pools, folder, strategy, ranks, most):
    """Here the host is the device: what is offloaded, alive throughout, is taken off the peaks. In bf16."""
    overrides = ["strategy.offload=optimizer"]
    real = pools(ranks).run(memory.measure, strategy, "full", folder, overrides)[0]
    config = memory.config_for(strategy, "full", folder, ranks, overrides)
    layout, a = resolve_layout(config, ranks, "cpu", ranks, under_deepspeed=False), architecture_of(config)
    mine = predicted(config, layout)
    on_host = ON_HOST[strategy] * a.num_parameters / ranks + 2 * a.embedding_parameters * (strategy != "zero3")
    found = max(mine.values()) / (max(peak["total"] for peak in real.values()) - on_host)
    assert 0.95 < found < most


SHAPES = [("llama8b", {}, ["adapter=full"]), ("qwen7b", {}, ["adapter=lora"]),
          ("mixtral8x7b", {}, ["adapter=lora", "batch.micro_rows=4", "model.activation_checkpointing=none"]),
          ("qwen235b", {}, ["adapter=full"]),
          ("deepseek671b", {"first_k_dense_replace": 1}, ["adapter=lora"]),
          ("qwen7b", {}, ["adapter=lora", "precision=fp8"]),
          ("llama8b", {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4,
                       "vocab_size": 8192}, ["adapter=lora", "precision=fp8"]),
          ("mixtral8x7b", {"sliding_window": 1024}, ["adapter=lora", "model.activation_checkpointing=none"]),
          ("qwen7b", {}, ["adapter=lora", "precision=fp8", "strategy.fp8_all_gather=true"]),
          ("qwen7b", {}, ["adapter=lora", "model.activation_checkpointing=selective"]),
          ("llama8b", {}, ["adapter=full", "model.activation_checkpointing=selective", "model.checkpoint_every_layers=2"]),
          ("llama8b", {}, ["adapter=lora", "model.checkpoints_on_host=true"]),
          *(pytest.param(*shape, marks=pytest.mark.slow) for shape in (
              ("llama70b", {}, ["adapter=qlora"]), ("llama8b", {}, ["adapter=full", "precision=fp8"]),
              ("llama8b", {}, ["adapter=full", "precision=fp8", "strategy.fp8_all_gather=true"]),
              ("deepseek671b", {"first_k_dense_replace": 1},
               ["adapter.quantise=fp8", "adapter.targets=[all-linear,experts]"]),
              ("deepseek671b", {"first_k_dense_replace": 1},
               ["adapter.quantise=fp8", "adapter.targets=[all-linear,experts]", "strategy.expert_gpus=8"]))),
          ("qwen235b", {}, ["adapter=full", "strategy.expert_gpus=4"]),
          ("llama8b", {}, ["adapter=lora", "data.seq_tokens=8192", "strategy.sequence_gpus=4"]),
          pytest.param("llama8b", {}, ["adapter=full", "data.seq_tokens=8192", "strategy.sequence_gpus=8", "batch.micro_rows=1",
                                       "model.activation_checkpointing=none"], marks=pytest.mark.slow),
          ("deepseek671b", {"first_k_dense_replace": 1}, ["adapter=lora", "data.seq_tokens=16384", "strategy.sequence_gpus=8"])]


@pytest.mark.parametrize(("name", "changed", "overrides"), SHAPES)
def test_published_shapes_are_predicted_as_they_are_traced(tmp_path, name, changed, overrides):
    """Three layers of the real widths, on 8 ranks; the head and the experts are whole."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name].hf_config | {"num_hidden_layers": 3} | changed))
    config = compose_config(["model=custom", f"model.path={tmp_path}", "strategy=fsdp", "gpus=8", "batch.global_rows=64",
                             "batch.micro_rows=2", *overrides])
    layout = resolve_layout(config, 8, "cuda", 8, under_deepspeed=False)
    mine, traced = predicted(config, layout), trace(config, layout).phases
    assert max(mine[phase] for phase in traced) == pytest.approx(max(peak.total for peak in traced.values()), rel=WITHIN)
    for phase, peak in traced.items():
        assert mine[phase] == pytest.approx(peak.total, rel=0.1), phase
