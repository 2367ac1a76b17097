"""The project's own training step on fake tensors: rank 0 of N ranks that do not exist, on the CPU, without weights.

Model code, engine, loss and optimizer are those of a run; only the numbers are missing. So what is traced is what is
allocated. Source: https://docs.pytorch.org/docs/2.13/torch.compiler_fake_tensor.html

For layout.device=cpu the kernels are those of the CPU and a real step allocates the same to the byte (tested); for cuda
attention is the kernel that torch takes there. What differs from a GPU then: sizes are not rounded up to the allocator's
blocks, workspaces inside kernels are not seen, streams do not overlap, and experts get equal shares of the tokens.
"""

import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tonnage.config.rules import Layout
from tonnage.config.schema import Config
from tonnage.engines.base import Parts
from tonnage.errors import ConfigError
from tonnage.facts.capabilities import CAPABILITIES
from tonnage.facts.models import MODELS
from tonnage.models.load import materialise
from tonnage.models.slices import Slices
from tonnage.trace.tracker import PHASES, Peak, Tracker
from tonnage.trace.window import book_fsdp, full_batch, loss_phase, tracked_window
from tonnage.train.loss import LossHead
from tonnage.train.session import engine_parts, make_engine

MICRO_BATCHES = 2  # gradients live through the second one's forward; more change nothing


@dataclass(frozen=True)
class Trace:
    """Peaks of a step's phases on one rank, in bytes, and what it took to find them."""

    phases: dict[str, Peak]
    micro_batches: int
    seconds: float
    tracer_peak_gib: float

    @property
    def fullest(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def peak(self) -> Peak:
        """The fullest moment of the step."""
        return self.phases[self.fullest]


def trace(config: Config, layout: Layout, say: Callable[[str], None] = lambda text: None) -> Trace:
    """Trace a step of `config` on `layout`; not the first, which has no optimizer states yet.

    Every position carries a label: the most that a step of this shape can need.

    Args:
        say: told what is being done.

    Raises:
        ConfigError: something that cannot be traced.
    """
    _require_traceable(config, layout)
    started = time.monotonic()
    micro_batches = min(MICRO_BATCHES, layout.cut.accumulation_steps or MICRO_BATCHES)
    fake_mode = FakeTensorMode()
    with model_folder(config) as folder, fake_group(layout.gpus), _host_apart(), ExitStack() as stack:
        say(f"building {config.model.name} without weights")
        engine = make_engine(config, layout.strategy, layout.gpus_per_node, layout.cut, torch.device("cpu"))
        engine.prepare(_weightless(engine_parts(config, folder, _attention(config)), fake_mode))
        head = LossHead(engine.model, config.train.loss, config.train.loss_chunk_tokens)
        tracker = Tracker(fake_mode=fake_mode)
        for part in (fake_mode, _Answers(), tracker, loss_phase(tracker, head), _one_sample_a_row(config),
                     _attention_of(layout.device), _even_experts()):
            stack.enter_context(part)
        book_fsdp(tracker, engine)
        slices = Slices.over(layout.sequence_gpus, config.cluster.timeout_s)
        stack.enter_context(slices.held())
        width = -(-config.data.seq_tokens // slices.count)
        batches = [full_batch(layout.cut.micro_rows, width) for _ in range(micro_batches)]
        _make_states(engine)
        tracker.start()

        def note(what):
            say(f"{what} traced ({time.monotonic() - started:.0f} s)")
            book_fsdp(tracker, engine)

        say(f"one step on fake tensors ({time.monotonic() - started:.0f} s)")
        tracked_window(tracker, engine, head, batches, 1.0, 1e-4, note)
        phases = {phase: tracker.peak(phase) for phase in PHASES}
    return Trace(phases, micro_batches, time.monotonic() - started,
                 resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def _require_traceable(config, layout):
    for key, value, untraceable, instead in (
            ("strategy", layout.strategy, CAPABILITIES[layout.strategy].engine != "fsdp", "strategy=fsdp, hsdp or ddp"),
            ("strategy.offload", config.strategy.offload, config.strategy.offload != "none", "strategy.offload=none"),
            ("optimizer", config.optimizer.name, config.optimizer.name == "adamw8bit", "optimizer=adamw"),
            ("model.compile", str(config.model.compile).lower(), config.model.compile, "model.compile=false")):
        if untraceable:
            raise ConfigError(f"{key}={value}: cannot be traced: a trace runs FSDP2 on one device, uncompiled; trace "
                              f"{instead}, or leave the trace out")


def _attention(config):
    return config.model.attention if config.model.attention == "eager" else "sdpa"


@contextmanager
def model_folder(config: Config) -> Iterator[str]:
    """A folder with the model's config.json: model.path where it is one, else made from the facts.

    Raises:
        ConfigError: a model that is neither.
    """
    path = config.model.path
    if path and (Path(path) / "config.json").is_file():
        yield path
        return
    if config.model.name not in MODELS:
        raise ConfigError(f"model.path={path}: a trace needs a folder with a config.json, or a model of docs/models.md")
    with tempfile.TemporaryDirectory(prefix="tonnage-trace-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[config.model.name].hf_config))
        yield folder


@contextmanager
def fake_group(gpus: int) -> Iterator[None]:
    """Rank 0 of `gpus` ranks whose collectives do nothing."""
    import torch.distributed._tools.fake_collectives  # noqa: F401 - torch 2.13: shapes of collectives on fake tensors
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
    try:
        # it knows no time-outs and says so by an error
        with mock.patch.object(dist.ProcessGroup, "set_timeout", lambda *_: None):
            yield
    finally:
        dist.destroy_process_group()


def _weightless(parts, fake_mode):
    """The same parts with empty fake tensors for weights, and adapters left as they come."""
    def load(model, device):
        with fake_mode:
            materialise(model, device)
    return Parts(parts.build, load, parts.optimizer, lambda model, engine: None)


def _make_states(engine):
    """Create the optimizer states by an update without gradients, which is what the first step leaves behind."""
    for _, parameter in engine.trained():
        parameter.grad = torch.zeros_like(parameter)
    engine.step(0.0)


class _Answers(TorchDispatchMode):
    """Reading a number off a fake tensor gives 1: a finite norm that is clipped."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **kwargs or {})


def _one_sample_a_row(config):
    """transformers 5.24 takes fake positions for packed ones, to be on the safe side, and builds a mask [B, 1, T, T].

    Without packing a row is one sample and there is none.
    """
    if config.data.packing:
        return ExitStack()
    return mock.patch("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)


def _host_apart():
    """Within, there is a device besides the host: what layers keep there takes no memory of it, and comes back as new."""
    def to_host(tensor):
        return tensor.shape, tensor.dtype

    def to_device(kept):
        return torch.empty(kept[0], dtype=kept[1])

    return mock.patch("transformers.modeling_utils.save_on_cpu",
                      lambda **_: torch.autograd.graph.saved_tensors_hooks(to_host, to_device))


def _even_experts():
    """Within, each rank sends as many tokens to every rank that holds experts: how many it would is not known."""
    from transformers.distributed import expert_parallel as ep

    def dispatch(self, hidden, top_k_index, top_k_weights):
        group, ranks = self.ep_mesh.get_group(), self.ep_mesh.size()
        order = torch.argsort(top_k_index.reshape(-1))
        each, rest = divmod(order.numel(), ranks)
        sizes = [each + (rank < rest) for rank in range(ranks)]
        sent = hidden[order // top_k_index.size(-1)]
        received = ep._WaitTensor.apply(ep.all_to_all_single_autograd(sent, sizes, sizes, group))
        experts = torch.arange(order.numel(), device=order.device).remainder(self.num_local_experts).unsqueeze(-1)
        return received, experts, torch.ones_like(experts, dtype=received.dtype), ep._AllToAllState(
            top_k_weights, order, sizes, sizes, hidden.size(0))

    return mock.patch.object(ep.AllToAllEP, "_dispatch_tokens", dispatch)


def _attention_of(device):
    """Within, attention is the kernel that torch 2.13 chooses on `device`."""
    if device == "cpu":
        return ExitStack()
    return mock.patch("torch.nn.functional.scaled_dot_product_attention", _cuda_attention)


def _cuda_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Flash attention where it can be; with a mask, in fp32, or for heads of two sizes the memory-efficient kernel.

    The latter has no grouped queries: with them torch falls back to plain attention. Source: the checks in
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
    """
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    kernels = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= 256:
        return kernels._scaled_dot_product_flash_attention(query, key, value, **options)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    if enable_gqa:
        return kernels._scaled_dot_product_attention_math(query, key, value, attn_mask, enable_gqa=True, **options)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return kernels._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True, **options)[0]
