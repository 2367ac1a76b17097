"""Weights into a built model, whatever an engine has made of its parameters, and adapters from a seed.

transformers' own loader does the reading (it fuses experts, renames keys and reads only a rank's slices of sharded
parameters), on a twin of the model without adapters that borrows its parameters. Its entry points used here are
private: they are touched in this module only, against transformers 5.24 (see requirements.txt).
"""

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import nn

from tonnage.errors import ModelError

WRAPPERS = (".base_layer", ".original_module")


def load_weights(model: nn.Module, folder: str, device: torch.device, allow_pickle: bool = False) -> None:
    """Fill every base parameter and buffer of `model` from the safetensors of `folder`.

    Parameters may be empty on meta, real, DTensors or partitioned by ZeRO-3.

    Raises:
        ModelError: files that are missing or broken, a parameter that no file has, a shape that does not fit.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.device("meta"):
        twin = type(base)(base.config)
    places = _borrow_parameters(base, twin)
    config = LoadStateDictConfig(pretrained_model_name_or_path=folder, dtype=base.dtype,
                                 dtype_plan=twin._get_dtype_plan(base.dtype), device_map={"": device},
                                 weight_mapping=get_model_conversion_mapping(twin), ignore_mismatched_sizes=True)
    try:
        info, _ = type(twin)._load_pretrained_model(twin, None, weight_files(folder, allow_pickle), config)
        missing = _untied(twin, info.missing_keys)
        if missing or info.mismatched_keys or info.error_msgs or info.conversion_errors:
            raise ModelError(_loading_fault(folder, missing, info))
        type(twin)._finalize_model_loading(twin, config, info)
    except ModelError:
        raise
    except Exception as error:  # safetensors raises its own type, transformers plain RuntimeErrors
        raise ModelError(f"model.path={folder}: the weights cannot be read: {error}") from error
    _return_parameters(twin, places)


def weight_files(folder: str, allow_pickle: bool = False) -> list[str]:
    """The weight files of a model folder, complete: safetensors, or pickles where there are only those and allowed.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    index = single = None
    for stem in ("model.safetensors", "pytorch_model.bin")[:1 + allow_pickle]:
        index, single = Path(folder) / f"{stem}.index.json", Path(folder) / stem
        if index.is_file() or single.is_file():
            break
    if not index.is_file():
        if not single.is_file():
            raise ModelError(f"model.path={folder}: no model.safetensors and no index of shards; point model.path at "
                             f"a folder with safetensors, or set model.allow_pickle=true for pickle files")
        return [str(single)]
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    missing = [name for name in names if not (Path(folder) / name).is_file()]
    if missing:
        raise ModelError(f"model.path={folder}: {len(missing)} of {len(names)} shards are missing: "
                         f"{', '.join(missing[:5])}; fetch them again")
    return [str(Path(folder) / name) for name in names]


def init_adapters(model: nn.Module, seed: int, fill) -> None:
    """Set every adapter matrix from (seed, its name): equal for any engine, layout and number of ranks.

    Args:
        fill: engine's function (parameter, whole fp32 tensor) that stores this rank's part of it.

    A is Kaiming-uniform and B zero, as in https://arxiv.org/abs/2106.09685; DoRA's magnitude is the row norm of the
    base weight, see `init_dora`.
    """
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            fill(parameter, kaiming_by_name(name, seed, getattr(parameter, "ds_shape", parameter.shape)))
        elif ".lora_B." in name:
            fill(parameter, torch.zeros(getattr(parameter, "ds_shape", parameter.shape)))


def kaiming_by_name(name: str, seed: int, shape: tuple[int, int]) -> torch.Tensor:
    """Kaiming-uniform (a = sqrt 5) fp32 tensor [rank, in] drawn from a generator of its own."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


def init_dora(model: nn.Module, whole, fill) -> None:
    """Set DoRA's magnitudes to the row norms of the loaded base weights (B is zero, so W + BA = W).

    Args:
        whole: engine's function (parameter) -> whole tensor.
    """
    for module in model.modules():
        for adapter in getattr(module, "lora_magnitude_vector", {}):
            norm = torch.linalg.norm(whole(module.get_base_layer().weight).float(), dim=1)
            fill(module.lora_magnitude_vector[adapter].weight, norm)


def init_saved_modules(model: nn.Module, whole, fill) -> None:
    """Start peft's trained copies of embeddings and head from the loaded originals; see `init_dora` for the functions."""
    for module in model.modules():
        if hasattr(module, "original_module"):
            originals = {leaf: whole(parameter) for leaf, parameter in module.original_module.named_parameters()}
            for saved in module.modules_to_save.values():
                for leaf, parameter in saved.named_parameters():
                    fill(parameter, originals[leaf])


def _plain_name(name):
    for word in WRAPPERS:
        name = name.replace(word, "")
    return name


def _borrow_parameters(base, twin):
    """Put `base`'s parameters into `twin` under their plain names; returns where each came from."""
    places = {}
    for path, module in base.named_modules():
        if ".modules_to_save" in path or "lora_" in path:
            continue
        for kind in ("_parameters", "_buffers"):
            for leaf, tensor in getattr(module, kind).items():
                if tensor is None:
                    continue
                name = _plain_name(f"{path}.{leaf}" if path else leaf)
                owner, _, last = name.rpartition(".")
                try:
                    target = twin.get_submodule(owner)
                except AttributeError:
                    continue
                if last in getattr(target, kind):
                    places.setdefault(name, []).append((module, leaf))
                    getattr(target, kind)[last] = tensor
    return places


def _return_parameters(twin, places):
    tensors = dict(twin.named_parameters(remove_duplicate=False)) | dict(twin.named_buffers(remove_duplicate=False))
    for name, owners in places.items():
        for module, leaf in owners:
            old = module._parameters.get(leaf)
            if old is not None:
                tensors[name].requires_grad_(old.requires_grad)
            setattr(module, leaf, tensors[name])


def _untied(twin, missing):
    tied = set(getattr(twin, "all_tied_weights_keys", None) or {})
    return sorted(name for name in missing if name not in tied)


def _loading_fault(folder, missing, info):
    if missing:
        return (f"model.path={folder}: {len(missing)} parameters are in no file, first {', '.join(missing[:3])}; "
                f"the files are of another model or incomplete")
    if info.mismatched_keys:
        name, found, expected = sorted(info.mismatched_keys)[0]
        return (f"model.path={folder}: {name} has shape {list(found)}, config.json says {list(expected)}; "
                f"weights and config.json do not belong together")
    return f"model.path={folder}: {info.error_msgs or info.conversion_errors}"
