"""From a checkpoint to a folder that transformers or peft loads: adapter, or whole weights with the adapter merged in.

The folder is reloaded by the ordinary library calls and its logits are compared with the trained model's before it
gets its name. One process on the CPU, whatever engine trained.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from tonnage.engines.base import materialise
from tonnage.errors import CheckpointError, ConfigError
from tonnage.models import build, load
from tonnage.runtime import runs
from tonnage.train import checkpoint
from tonnage.train.run import run_config
from tonnage.train.session import run_tokenizer

# largest difference of logits / largest logit
RELOAD_TOLERANCE = 1e-4
# merged weights are rounded to 16 bits: that must stay small beside what training has changed
ROUNDING_SHARE = 0.5
FULL_ROUNDING = 0.1  # where every weight was trained and there is no base to compare with


@dataclass(frozen=True)
class Exported:
    """Where the folder is, which step it holds, and how far its logits are from the trained model's (relative)."""

    folder: Path
    step: int
    deviation: float
    sample: str


def export_run(run_folder: Path, kind: str = "auto", which: str = "newest", dtype: str = "bf16",
               out: Path | None = None) -> Exported:
    """Write the weights of a run.

    Args:
        kind: adapter, merged (whole weights), or auto: adapter where one was trained.
        which: newest, best, or a step number.
        dtype: of whole weights; an adapter is always fp32.

    Raises:
        ConfigError: no run, no such checkpoint, `kind` that does not apply, a folder that exists.
        CheckpointError: what was written does not give the trained model's logits.
    """
    facts = runs.read_attempt(run_folder)
    config = run_config(run_folder, facts["number"])
    full = config.adapter.name == "full"
    if kind == "adapter" and full:
        raise ConfigError("kind=adapter: this run trained every weight; use kind=merged")
    kind = ("merged" if full else "adapter") if kind == "auto" else kind
    path = _checkpoint(run_folder, which)
    step = int(path.name.removeprefix("step-"))
    out = out or run_folder / "export" / f"{kind}-{path.name}"
    if out.exists():
        raise ConfigError(f"out={out}: exists; remove it or choose another folder")

    base_folder = facts["model_folder"]
    tokenizer = run_tokenizer(config, base_folder)
    ids = _probe_tokens(tokenizer)
    # the adapter was trained on the base in the run's precision; merging adds in fp32 and rounds once
    model = _trained_model(config, base_folder, path, "fp32" if kind == "merged" else config.precision.name)
    if kind == "adapter" and build.misread_by_peft(model):
        raise ConfigError("kind=adapter: peft 0.21 would take this adapter's gate_proj, up_proj and down_proj for routed "
                          "experts when it is loaded; use kind=merged")
    expected = _logits(model, ids)
    moved = None
    if kind == "merged" and dtype != "fp32" and not full:
        with model.disable_adapter():
            moved = _deviation(_logits(model, ids), expected)

    temporary = out.with_name(f".writing-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if kind == "adapter":
            _write_adapter(model, temporary, config, base_folder)
        else:
            _write_merged(model, temporary, build.DTYPES[dtype])
        tokenizer.save_pretrained(temporary)
        generation = Path(base_folder) / "generation_config.json"
        if generation.is_file():
            shutil.copy(generation, temporary)
        del model
        precision = dtype if kind == "merged" else config.precision.name
        deviation, sample = _verify(temporary, kind, base_folder, precision, ids, expected, tokenizer,
                                    config.model.trust_remote_code, moved)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(out, step, deviation, sample)


def _checkpoint(run_folder, which):
    checkpoints, run_id = run_folder / "checkpoints", runs.run_id(run_folder)
    path = checkpoint.newest_complete(checkpoints, run_id)
    if path is None:
        raise ConfigError(f"run={run_folder}: has no complete checkpoint yet")
    if which == "newest":
        return path
    step = checkpoint.read_position(path)[0].best_step if which == "best" else int(which)
    wanted = checkpoints / f"step-{step or 0:08d}"
    fault = checkpoint.fault_of(wanted, run_id)
    if fault:
        kept = ", ".join(folder.name for folder in sorted(checkpoints.glob("step-*")))
        raise ConfigError(f"which={which}: no complete checkpoint of step {step} ({fault}); there are {kept}")
    return wanted


def _trained_model(config, folder, path, precision):
    """The model as it stands in a checkpoint, on the CPU."""
    with torch.device("meta"):
        model = build.build_model(folder, config.model, config.adapter, "sdpa", build.DTYPES[precision], torch.float32)
    load.load_weights(model, folder, torch.device("cpu"), config.model.allow_pickle)
    materialise(model, torch.device("cpu"))
    stored = checkpoint.StoredTensors(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                if stored.shapes.get(name) != list(parameter.shape):
                    raise CheckpointError(f"{path}: {name} is {stored.shapes.get(name, 'missing')} there and "
                                          f"{list(parameter.shape)} in the model")
                parameter.copy_(stored[name])
    return model.eval()


def _write_adapter(model, folder, config, base_folder):
    """peft's own files; the base is named by its hub id or folder."""
    plain = config.model.path and "/" in config.model.path and not config.model.new_tokens
    named = config.model.path if plain else base_folder
    model.peft_config["default"].base_model_name_or_path = named
    model.save_pretrained(folder)


def _write_merged(model, folder, dtype):
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if model.config.tie_word_embeddings and embedding is not head:
        if torch.equal(embedding, head):
            model.get_output_embeddings().weight = embedding
        else:  # trained apart: a tied config would throw one of them away at loading
            model.config.tie_word_embeddings = False
    model.to(dtype).save_pretrained(folder)


def _verify(folder, kind, base_folder, precision, ids, expected, tokenizer, trust_remote_code, moved):
    """Reload by the libraries' own calls; (deviation of logits, a generated sample).

    `moved`: how far the adapter moves the logits, where rounding could hide it.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dtype = build.DTYPES[precision]
    if kind == "adapter":
        base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=dtype, trust_remote_code=trust_remote_code)
        reloaded = PeftModel.from_pretrained(base, folder)
    else:
        reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    reloaded.eval()
    deviation = _deviation(_logits(reloaded, ids), expected)
    if kind == "adapter" or precision == "fp32":
        allowed = RELOAD_TOLERANCE
    else:
        allowed = FULL_ROUNDING if moved is None else ROUNDING_SHARE * moved
    if not deviation <= allowed:
        raise CheckpointError(f"{folder.name}: reloaded, its logits differ from the trained model's by {deviation:.2g} "
                              f"(allowed {allowed:.2g}); nothing was exported. " + (
                                  "Rounding to 16 bits hides what was trained: keep the adapter (kind=adapter) or use "
                                  "dtype=fp32" if kind == "merged" else "Please report it"))
    prompt = ids[:, :8]
    with torch.no_grad():
        output = reloaded.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16,
                                   do_sample=False, pad_token_id=tokenizer.pad_token_id or 0)
    return deviation, tokenizer.decode(output[0], skip_special_tokens=True)


def _deviation(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


def _logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


def _probe_tokens(tokenizer):
    """Tokens to compare on: ordinary text."""
    text = "The harbour lies north of the town, and every ship that enters it is weighed before it may leave again."
    return tokenizer(text, return_tensors="pt", add_special_tokens=True).input_ids[:, :32]
