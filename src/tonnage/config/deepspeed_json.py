"""The DeepSpeed JSON, generated from the typed config; no deepspeed import, so that a dry run can print it.

Source of the keys: https://www.deepspeed.ai/docs/config-json/
"""

import difflib
from typing import Any

from tonnage.config.schema import Config
from tonnage.errors import ConfigError

# DeepSpeed takes unknown top-level keys in silence: `zero_optimisation` would train at stage 0
TOP_LEVEL_KEYS = frozenset("""
    activation_checkpointing amp aio autotuning bf16 checkpoint comms_logger communication_data_type compile
    compression_training csv_monitor curriculum_learning data_efficiency data_types dump_state eigenvalue elasticity
    expert_parallel flops_profiler fp16 gradient_accumulation_steps gradient_clipping gradient_predivide_factor
    graph_harvesting hybrid_engine load_universal_checkpoint memory_breakdown nebula prescale_gradients
    progressive_layer_drop seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print
    tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism wandb wall_clock_breakdown zero_allow_comm_data_type_fp32
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization""".split())

# ZeRO++'s gathers and reductions in 8 and 4 bits: their kernels are for GPUs alone, and what they round is not exact
QUANTISED_TRAFFIC = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
TYPED_KEYS = {"train_batch_size": "batch.global_rows", "optimizer": "optimizer", "scheduler": "schedule",
              "amp": "precision", "torch_autocast": "precision"}


def deepspeed_json(config: Config, strategy: str, micro_rows: int) -> dict[str, Any]:
    """What `deepspeed.initialize` is given for strategy zero0 to zero3; plain ints, floats, bools, texts and dicts.

    One accumulation step: the loop sums the micro-batches of a window itself and sets the boundary.

    Raises:
        ConfigError: `strategy.extra` contradicts a generated key or has one that DeepSpeed does not know.
    """
    stage, precision = int(strategy.removeprefix("zero")), config.precision.dtype
    generated = {
        "train_micro_batch_size_per_gpu": micro_rows,
        "gradient_accumulation_steps": 1,
        # stage 0 returns no norm and steps on NaN in fp32: the engine clips and checks there itself
        "gradient_clipping": 0.0 if stage == 0 else float(config.optimizer.clip_norm or 0.0),
        "zero_optimization": _zero(config, stage),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    # said also where they are off, so that strategy.extra cannot switch them on
    generated["bf16"] = {"enabled": precision == "bf16"}
    generated["fp16"] = {"enabled": precision == "fp16"}
    if precision == "fp16":
        generated["fp16"] |= {"loss_scale": 0.0, "initial_scale_power": 16}
    if precision != "fp32":
        # sums in 16 bits lose small gradients: 1,024 ones add up to 256 in bf16
        generated["data_types"] = {"grad_accum_dtype": "fp32"}
        generated["communication_data_type"] = "fp32"
    _check_keys(config.strategy.extra)
    return _merged(generated, config.strategy.extra, "strategy.extra")


def _zero(config, stage):
    zero = {"stage": stage, "contiguous_gradients": True,
            # reported to corrupt gradients at stage 2: https://github.com/deepspeedai/DeepSpeed/issues/5347
            "overlap_comm": False}
    if config.strategy.hpz_gpus > 1:
        zero["zero_hpz_partition_size"] = config.strategy.hpz_gpus
    offload = config.strategy.offload
    if offload != "none":
        device = {"device": "nvme", "nvme_path": config.strategy.nvme_path} if offload == "nvme" else {"device": "cpu"}
        zero["offload_optimizer"] = dict(device)
        if offload in ("all", "nvme"):
            zero["offload_param"] = dict(device)
    return zero


def _check_keys(extra):
    for name in extra:
        if name in TYPED_KEYS:
            raise ConfigError(f"strategy.extra.{name}: is decided by {TYPED_KEYS[name]}; set that instead")
        if name not in TOP_LEVEL_KEYS:
            near = difflib.get_close_matches(name, TOP_LEVEL_KEYS, n=1)
            raise ConfigError(f"strategy.extra.{name}: DeepSpeed has no such key"
                              + (f"; did you mean {near[0]}?" if near else ""))
    inside = extra.get("zero_optimization")
    if not isinstance(inside, dict):
        return
    if inside.get("zero_hpz_partition_size", 1) != 1:
        raise ConfigError("strategy.extra.zero_optimization.zero_hpz_partition_size: is decided by strategy.hpz_gpus; set "
                          "that instead")
    for name in QUANTISED_TRAFFIC:
        if inside.get(name):
            raise ConfigError(f"strategy.extra.zero_optimization.{name}={inside[name]}: what ZeRO++ sends in 8 and 4 bits "
                              f"is rounded, and neither planned for nor tested here; leave it out, or use "
                              f"strategy.hpz_gpus, which keeps gathers within a node")


def _merged(generated, extra, path):
    merged = dict(generated)
    for name, value in extra.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(merged[name], value, f"{path}.{name}")
        elif name in merged and merged[name] != value:
            raise ConfigError(f"{path}.{name}={value}: contradicts {merged[name]}, which is generated from the typed "
                              f"keys; change those instead")
        else:
            merged[name] = value
    return merged
