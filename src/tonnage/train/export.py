"""From a checkpoint to a folder that transformers or peft loads: adapter, or whole weights with the adapter merged in.

The folder is reloaded by the ordinary library calls and its logits are compared with those of what was to be written
before it gets its name. One process on the CPU, whatever engine trained.

A base that was kept quantised in training (adapter.quantise) is exported as it was published and never quantised again; how
far that is from what was trained is said.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tonnage.config.schema import Adapter
from tonnage.errors import CheckpointError, ConfigError
from tonnage.facts.bases import FP8_BLOCK
from tonnage.models import build, load
from tonnage.models.experts import TunedExperts, expert_modules, matrices
from tonnage.models.shards import Checkpoint
from tonnage.runtime import runs
from tonnage.train import checkpoint
from tonnage.train.card import base_name, model_card, only_here
from tonnage.train.run import run_config
from tonnage.train.session import run_tokenizer

# largest difference of logits / largest logit
RELOAD_TOLERANCE = 1e-4
# What rounding the weights to 16 bits may change of an answer's logits, relative to what training has changed of them.
# Half of bf16's step is 0.2 % of a weight: after a short run most weights round back to the base's. Measured on
# SmolLM2-135M: 12 % where the answer became another (4 steps with warm-up), 1 to 2 % after 6 steps at 1e-3.
ROUNDING_SHARE = 0.1
QUESTION, ANSWER_TOKENS = "What is 3 plus 3?", 48


@dataclass(frozen=True)
class Exported:
    """Where the folder is, which step it holds, how far its reloaded logits are from what was written (relative).

    `answer`: what the reloaded model says to `question`. `notes`: what to know about rounding, the base and where it lies.
    """

    folder: Path
    step: int
    deviation: float
    question: str
    answer: str
    notes: tuple[str, ...] = ()


def export_run(run_folder: Path, kind: str = "auto", which: str = "newest", dtype: str = "auto",
               out: Path | None = None, base: str = "original") -> Exported:
    """Write the weights of a run.

    Args:
        kind: adapter, merged (whole weights), or auto: adapter where one was trained that peft can load.
        which: newest, best, or a step number.
        dtype: of whole weights; auto is bf16 if rounding loses little of what was learned (`ROUNDING_SHARE`), else fp32.
            An adapter is always fp32.
        base: what an adapter is merged into: original weights, or trained, the dequantised ones that it saw in training.

    Raises:
        ConfigError: no run, no such checkpoint, `kind` or `base` that does not apply, a folder that exists.
        CheckpointError: what was written does not give the logits it should.
    """
    facts = runs.read_attempt(run_folder)
    config = run_config(run_folder, facts["number"])
    base_folder, path = facts["model_folder"], _checkpoint(run_folder, which)
    kind, adapts_experts = _kind(kind, config, base_folder), build.EXPERTS in config.adapter.targets
    if kind == "adapter" and base == "trained":
        raise ConfigError("base=trained: an adapter is loaded with the base as it was published; use kind=merged")
    step = int(path.name.removeprefix("step-"))
    out = out or run_folder / "export" / f"{kind}-{path.name}"
    if out.exists():
        raise ConfigError(f"out={out}: exists; remove it or choose another folder")

    tokenizer = run_tokenizer(config, base_folder)
    # the adapter was trained on the base in the run's precision; merging adds in fp32 and rounds once, and peft adds those
    # of experts to the weights before it uses them
    precision = "fp32" if kind == "merged" or adapts_experts else config.precision.dtype
    exported = config if base == "trained" else replace(config, adapter=replace(config.adapter, quantise="none"))
    model = _trained_model(exported, base_folder, path, precision)
    question = (config.eval.prompts or [QUESTION])[0]
    prompt = _prompt(question, config, tokenizer)
    ids = _generate(model, prompt, tokenizer)  # what was learned shows in an answer: compare there
    expected = _logits(model, ids)
    answered = slice(prompt.shape[1] - 1, -1)
    name, notes = base_name(config, base_folder), []
    if config.adapter.quantise != "none":
        trained = expected if base == "trained" else _logits(_trained_model(config, base_folder, path, precision), ids)
        notes.append(_about_base(config.adapter.quantise, base, expected[:, answered], trained[:, answered]))
    if kind == "merged":
        before = None if dtype == "fp32" else _untrained_logits(model, ids, config, base_folder, path)
        model = _merge(model)
        if dtype != "fp32":
            asked, dtype = dtype, "bf16" if dtype == "auto" else dtype
            rounded = _round(model, build.DTYPES[dtype], ids)
            share, num_other = _lost(*(logits[:, answered] for logits in (rounded, expected, before)))
            lost = (f"rounding to {dtype} changes the logits of an answer by {share:.0%} of what training has, and "
                    f"{num_other} of its tokens")
            if share <= ROUNDING_SHARE and num_other == 0:
                notes.append(f"written in {dtype}: {lost}")
            elif asked == "auto":
                size = sum(one.numel() for one in model.parameters()) * 4 / 2**30
                del model
                whole = export_run(run_folder, kind, str(step), "fp32", out, base)
                return replace(whole, notes=(
                    f"written in fp32 ({size:.2f} GiB): {lost} (allowed: {ROUNDING_SHARE:.0%}, and none); dtype=bf16 "
                    f"takes that", *whole.notes))
            else:
                notes.append(f"warning: {lost} (advised: at most {ROUNDING_SHARE:.0%}, and none); dtype=fp32 keeps what "
                             "was learned")
            expected = rounded
    else:
        notes += [only_here(name)] * bool(only_here(name))
        if _misread_by_transformers(config, base_folder):
            notes.append(f"warning: the base's FP8 files have matrices that are no multiple of {FP8_BLOCK} wide or high; "
                         f"transformers 5.24 misreads those or refuses them: with it use kind=merged")

    temporary = out.with_name(f".writing-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        if kind == "adapter":
            _save_adapter(model, temporary, name)
        else:
            model.to(build.DTYPES[dtype]).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        generation = Path(base_folder) / "generation_config.json"
        if generation.is_file():
            shutil.copy(generation, temporary)
        (temporary / "README.md").write_text(model_card(config, run_folder, kind, dtype, name, step, base))
        del model
        reloaded = _reload(temporary, kind, base_folder, config, precision)
        deviation = _deviation(_logits(reloaded, ids), expected)
        if not deviation <= RELOAD_TOLERANCE:
            raise CheckpointError(f"{out.name}: reloaded, its logits differ from the trained model's by {deviation:.2g} "
                                  f"(allowed {RELOAD_TOLERANCE:g}); nothing was exported. Please report it")
        tokens = _generate(reloaded, prompt, tokenizer)[0, prompt.shape[1]:]
        answer = tokenizer.decode(tokens, skip_special_tokens=True).strip()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(out, step, deviation, question, answer, tuple(notes))


def _kind(asked, config, base_folder):
    """adapter or merged."""
    if config.adapter.name == "full":
        if asked == "adapter":
            raise ConfigError("kind=adapter: this run trained every weight; use kind=merged")
        return "merged"
    if asked == "merged":
        return asked
    with torch.device("meta"):
        misread = build.misread_by_peft(_build(config, base_folder, "fp32"))
    if misread and asked == "adapter":
        raise ConfigError("kind=adapter: peft 0.21 would take this adapter's gate_proj, up_proj and down_proj for routed "
                          "experts when it is loaded; use kind=merged")
    return "merged" if misread else "adapter"


def _about_base(quantised, base, found, trained):
    """How far what is exported is from the model that was trained, in logits [1, tokens, vocabulary] of an answer."""
    if base == "trained":
        return f"merged into the base that training saw, {quantised} dequantised: not the published weights"
    distance = float((found - trained).norm() / trained.norm())
    num_other = int((found.argmax(-1) != trained.argmax(-1)).sum())
    return (f"trained on a base kept in {quantised}, exported for the published one: that changes the logits of an answer "
            f"by {distance:.2%} and {num_other} of its {found.shape[1]} tokens")


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
    model = _loaded(config, folder, precision)
    _fill(model, path)
    return model.eval()


def _loaded(config, folder, precision):
    """The model before training, on the CPU; an adapter that is zero."""
    with torch.device("meta"):
        model = _build(config, folder, precision)
    load.load_weights(model, folder, torch.device("cpu"), config.model.allow_pickle)
    return model


def _build(config, folder, precision):
    trained = build.DTYPES[precision] if config.adapter.name == "full" else torch.float32
    return build.build_model(folder, config.model, config.adapter, "sdpa", build.DTYPES[precision], trained)


def _fill(model, path):
    """Trained tensors from a checkpoint."""
    stored = checkpoint.StoredTensors(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                if stored.shapes.get(name) != list(parameter.shape):
                    raise CheckpointError(f"{path}: {name} is {stored.shapes.get(name, 'missing')} there and "
                                          f"{list(parameter.shape)} in the model")
                parameter.copy_(stored[name])
        for name, buffer in build.moved_buffers(model).items():
            buffer.copy_(stored[name])


def _untrained_logits(model, ids, config, folder, path):
    """Logits of the base; `model` is afterwards what it was."""
    if config.adapter.name != "full":
        with build.without_adapter(model):
            return _logits(model, ids)
    load.load_weights(model, folder, torch.device("cpu"), config.model.allow_pickle)
    logits = _logits(model, ids)
    _fill(model, path)
    return logits


def _merge(model):
    if hasattr(model, "merge_and_unload"):
        model = build.merge_adapter(model)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if model.config.tie_word_embeddings and embedding is not head:
        if torch.equal(embedding, head):
            model.get_output_embeddings().weight = embedding
        else:  # trained apart: a tied config would throw one of them away at loading
            model.config.tie_word_embeddings = False
    return model


def _round(model, dtype, ids):
    """Round the weights to what `dtype` can hold; their logits, computed in fp32 so that nothing else is measured.

    Raises:
        CheckpointError: a weight is beyond fp16.
    """
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
    logits = _logits(model, ids)
    if not torch.isfinite(logits).all():
        raise CheckpointError(f"dtype={dtype}: some weights are too large for it; use dtype=bf16 or dtype=fp32")
    return logits


def _lost(rounded, expected, before):
    """(change by rounding / change by training, tokens that would be chosen otherwise)."""
    share = float((rounded - expected).norm() / (expected - before).norm())
    return share, int((rounded.argmax(-1) != expected.argmax(-1)).sum())


def _save_adapter(model, folder, base):
    """A folder that peft loads for `base`; adapters of routed experts under its names for them."""
    settings = model.peft_config["default"]
    experts = {name: module for name, module in expert_modules(model).items() if isinstance(module, TunedExperts)}
    settings.base_model_name_or_path = base
    if experts:
        settings.target_parameters = sorted({f"experts.{leaf}" for module in experts.values() for leaf in matrices(module)})
        settings.lora_dropout = 0.0  # which peft has not for experts; a loaded adapter makes no use of it
    model.save_pretrained(folder)
    if experts:  # peft writes what its own layers hold
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        for name, module in experts.items():
            tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in module.peft_tensors().items()}
        save_file(tensors, file, {"format": "pt"})


def _reload(folder, kind, base_folder, config, precision):
    """By the libraries' own calls; whole weights compute in fp32, whatever they are stored in."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    remote = config.model.trust_remote_code
    if kind == "merged":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=remote).eval()
    if _misread_by_transformers(config, base_folder):
        plain = replace(config, adapter=Adapter(name="full"))
        base = _loaded(plain, base_folder, precision)
    else:
        settings = AutoConfig.from_pretrained(base_folder, trust_remote_code=remote)
        if hasattr(settings, "quantization_config"):  # FP8: transformers has no product for it on a CPU
            settings.quantization_config["dequantize"] = True
        base = AutoModelForCausalLM.from_pretrained(base_folder, config=settings, dtype=build.DTYPES[precision],
                                                    trust_remote_code=remote)
    return PeftModel.from_pretrained(base, folder).eval()


def _misread_by_transformers(config, folder):
    """Whether FP8 files have blocks that are cut off: transformers 5.24 takes all blocks of a matrix for equally large."""
    checkpoint = Checkpoint(folder, config.model.allow_pickle)
    return any(size > FP8_BLOCK and size % FP8_BLOCK for name in checkpoint.names() if checkpoint.fp8(name)
               for size in checkpoint.shape(name))


def _prompt(text, config, tokenizer):
    """Tokens of a question as the chat template, if there is one, puts it."""
    if tokenizer.chat_template:
        system = [{"role": "system", "content": config.data.system}] if config.data.system else []
        text = tokenizer.apply_chat_template([*system, {"role": "user", "content": text}], tokenize=False,
                                             add_generation_prompt=True)
    return tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template).input_ids


def _generate(model, prompt, tokenizer):
    with torch.no_grad():
        return model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER_TOKENS,
                              do_sample=False, pad_token_id=tokenizer.pad_token_id or 0)


def _deviation(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


def _logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()
