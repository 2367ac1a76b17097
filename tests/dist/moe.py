"""Tiny mixtures of experts of three families, files as DeepSeek-V3 is published, and a reference in plain transformers."""

import json
import math
from pathlib import Path

import torch
from tiny import GLOBAL_ROWS, RaggedRows

from tonnage.models.quantised import FORMATS

RANK, ALPHA = 4, 32.0
SHARED = {"vocab_size": 96, "hidden_size": 160, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
          "max_position_embeddings": 128, "tie_word_embeddings": False, "initializer_range": 0.1}
FAMILIES = {
    "deepseek_v3": {"num_key_value_heads": 4, "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2,
                    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "q_lora_rank": 32,
                    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 48, "num_experts": 8,
                  "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": []},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}}


def make_moe(folder: Path, family: str, **changes) -> str:
    """A model of `family` of 2 layers with random weights in the hub's layout, router biases included.

    Args:
        changes: of config.json.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHARED | FAMILIES[family] | changes))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.uniform_(-0.01, 0.01)
    model.save_pretrained(folder)
    return str(folder)


def publish_fp8(source: str, folder: Path) -> str:
    """The same in block-scaled FP8, as DeepSeek-V3's files are: every linear layer of the decoder but routers."""
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, weight in load_file(Path(source) / "model.safetensors").items():
        linear = weight.ndim == 2 and ".layers." in name and not name.endswith(".gate.weight")
        if linear:
            kept = FORMATS["fp8"].quantise(weight, 1)
            tensors[name] = kept["codes"].view(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = kept["scales"].view(torch.float32)
        else:
            tensors[name] = weight
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((Path(source) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                                     "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def adapted(model) -> list[str]:
    """Matrices that `all-linear` and `experts` adapt, and that are quantised."""
    return [name for name, parameter in model.named_parameters()
            if ".layers." in name and parameter.ndim >= 2 and not name.endswith(".gate.weight")]


def adapter_names(name: str) -> tuple[str, str]:
    """Names of A and B for a matrix of the plain model, as a run's checkpoint has them."""
    stem = f"base_model.model.{name.removesuffix('.weight')}"
    if name.endswith(".weight"):
        return f"{stem}.lora_A.default.weight", f"{stem}.lora_B.default.weight"
    return f"{stem}_lora_A", f"{stem}_lora_B"


def round_trip(weight: torch.Tensor, base: str, leaf: str) -> torch.Tensor:
    """What is left of a weight in format `base`."""
    from tonnage.facts.bases import expert_parts

    kind, parts = FORMATS[base], expert_parts(leaf)
    return kind.dequantise(kind.quantise(weight, parts), tuple(weight.shape), parts, torch.float32)


def reference(folder: str, adapter: str, base: str, rate: float = 2.0) -> dict:
    """Three windows by SGD with momentum, fp32, row by row; adapters are added to the weights: W + alpha / rank B A."""
    from transformers import AutoModelForCausalLM

    from tonnage.models.load import kaiming_by_name

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    names = adapted(model)
    if base != "none":
        weights |= {name: round_trip(weights[name], base, name.rsplit(".", 1)[-1]) for name in names}
    if adapter == "full":
        trained = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    else:
        trained = {}
        for name in names:
            *lead, outputs, inputs = weights[name].shape
            a, b = adapter_names(name)
            trained[a] = kaiming_by_name(a, 0, (*lead, RANK, inputs)).requires_grad_()
            trained[b] = torch.zeros(*lead, outputs, RANK).requires_grad_()
    pairs = list(trained.items())

    def merged():
        if adapter == "full":
            return trained
        found = dict(weights)
        for name, (_, a), (_, b) in zip(names, pairs[::2], pairs[1::2], strict=True):
            found[name] = weights[name] + ALPHA / RANK * b @ a
        return found

    before = {name: tensor.detach().clone() for name, tensor in trained.items()}
    optimizer = torch.optim.SGD(trained.values(), lr=rate, momentum=0.9)
    from tonnage.data.windows import epoch_order

    rows = RaggedRows()
    order = epoch_order(rows.fingerprint, 0, 0, rows.weights)
    losses, norms = [], []
    for start in range(0, len(order), GLOBAL_ROWS):
        window = [rows[int(i)] for i in order[start:start + GLOBAL_ROWS]]
        count, total = sum(int((row.labels[1:] != -100).sum()) for row in window), 0.0
        for row in window:
            ids = torch.tensor(row.tokens[None].astype("int64"))
            logits = torch.func.functional_call(model, merged(), args=(), kwargs={"input_ids": ids}).logits[0, :-1]
            labels = torch.tensor(row.labels[1:].astype("int64"))
            loss = -torch.log_softmax(logits, -1)[labels != -100].gather(1, labels[labels != -100][:, None]).sum()
            (loss / count).backward()
            total += loss.item()
        norm = math.sqrt(sum(float((one.grad.double() ** 2).sum()) for one in trained.values() if one.grad is not None))
        for one in trained.values():
            if one.grad is not None:
                one.grad *= min(1.0, 0.5 / norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
        norms.append(norm)
    return {"losses": losses, "norms": norms, "updates": {n: one.detach() - before[n] for n, one in trained.items()}}


LISTED = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class ListedConfig(LlamaConfig):
    model_type = "listed"


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class ListedMoe(nn.Module):
    # four tokens to each of eight experts, which run one by one, and only those that have a token: by their places, since a
    # choice by scores would turn on the last digit
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 8, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(8))

    def forward(self, x):
        choice = (torch.arange(x.shape[1], device=x.device) // 4 % 8).expand(x.shape[:2])
        score = self.gate(x).softmax(-1).gather(-1, choice[..., None])[..., 0]
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (choice == number).any():
                out[choice == number] = expert(x[choice == number])
        return out * score[..., None]


class ListedForCausalLM(LlamaForCausalLM):
    config_class = ListedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = ListedMoe(config.hidden_size)
"""


def make_listed(folder: Path) -> str:
    """A model whose code is in its folder: eight experts a layer, more than it has layers, in a list."""
    import importlib.util

    from tiny import make_model

    make_model(folder)
    (folder / "listed.py").write_text(LISTED)
    spec = importlib.util.spec_from_file_location("listed", folder / "listed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = json.loads((folder / "config.json").read_text())
    torch.manual_seed(0)
    model = module.ListedForCausalLM(module.ListedConfig(**settings))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    settings |= {"model_type": "listed", "architectures": ["ListedForCausalLM"], "auto_map": {
        "AutoConfig": "listed.ListedConfig", "AutoModelForCausalLM": "listed.ListedForCausalLM"}}
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)
