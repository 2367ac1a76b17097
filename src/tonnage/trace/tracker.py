"""Every tensor storage of a training step, real or fake: when it is born, when it dies, what it is for.

torch has trackers of its own (torch.distributed._tools: MemTracker, FSDPMemTracker). They do not serve here: the FSDP
one refuses a second call of the root, and with it a window of two micro-batches or a second step; neither knows
DeepSpeed's flat buffers; both fix a tensor's category when it is born, so that temporaries of the optimizer are booked
as its states. This one keeps a ledger of births and deaths and asks what a storage was only when all is over.

What a kernel allocates inside itself (workspaces) passes through no dispatcher and is not seen.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

CATEGORIES = ("weights", "master weights", "gathered weights", "gradients", "unreduced gradients", "communication",
              "optimizer states", "activations", "recomputed", "loss", "temporaries", "inputs", "other")
PHASES = ("forward", "loss", "backward", "step")


@dataclass(slots=True)
class Block:
    """One allocation: a storage, or what it is after a resize.

    `span` counts the phases entered before its birth, `maker` is the operator that was at work.
    """

    num_bytes: int
    born: int
    phase: str
    span: int
    recomputed: bool
    maker: str
    category: str | None = None
    died: float = float("inf")
    died_span: float = float("inf")

    def kind(self) -> str:
        """Its category: what it was marked as, otherwise what its life shows."""
        if self.category:
            return self.category
        if self.phase not in PHASES:
            return "other"
        if self.phase == "loss":
            return "loss"
        if self.phase == "forward":  # the loss is the span after, backward the one after that
            return "activations" if self.died_span > self.span + 1 else "temporaries"
        return "recomputed" if self.recomputed else "temporaries"


@dataclass(frozen=True)
class Peak:
    """Bytes alive at the fullest moment of a phase: in all, by category, and what they mostly are.

    `largest`: (category, operator that made them, bytes of one, how many), the most bytes first.
    """

    total: int
    by_category: dict[str, int]
    largest: list[tuple[str, str, int, int]]


class Tracker(TorchDispatchMode):
    """Books each new storage on `device`, within `with`, and un-books it when it dies.

    Args:
        device: type of the device that counts; meta tensors hold nothing.
        fake_mode: of the fake tensors to book; None books real ones. Others (DTensor works out shapes on fake tensors
            of its own) are left out.
    """

    def __init__(self, device: str = "cpu", fake_mode=None):
        super().__init__()
        self.device, self.fake_mode = device, fake_mode
        self.blocks: list[Block] = []
        self.live: dict[int, tuple[Block, weakref.ref]] = {}
        self.total = self.clock = self.span = 0
        self.phase, self.maker = "setup", ""
        self.fullest: dict[str, tuple[int, int]] = {}

    # ---- the ledger

    def enter(self, phase: str) -> None:
        """A new phase begins now."""
        self.phase, self.span = phase, self.span + 1
        self._note_peak()

    def start(self) -> None:
        """Forget peaks and the dead: what counts begins now."""
        self.blocks = [block for block, _ in self.live.values() if block.num_bytes]
        self.fullest = {}

    def book(self, tensor: torch.Tensor, category: str | None = None) -> None:
        """See to it that the storages of `tensor` are in the ledger, as `category` if given: the latest word holds."""
        for part in _parts(tensor):
            if part.device.type != self.device or getattr(part, "fake_mode", None) is not self.fake_mode:
                continue
            storage = part.untyped_storage()
            key = storage._cdata
            if key not in self.live:
                self._add(key, storage, storage.nbytes(), category)
            elif category:
                self.live[key][0].category = category

    def book_all(self, tensors: Iterable[torch.Tensor], category: str) -> None:
        """`book` each of them; what is None is passed over."""
        for tensor in tensors:
            if tensor is not None:
                self.book(tensor, category)

    def _add(self, key, storage, num_bytes, category):
        self.clock += 1
        block = Block(num_bytes, self.clock, self.phase, self.span,
                      self.phase == "backward" and torch.is_grad_enabled(), self.maker, category)
        if num_bytes:
            self.blocks.append(block)
        self.live[key] = block, weakref.ref(storage, lambda _, key=key: self._remove(key))
        self.total += num_bytes
        self._note_peak()

    def _remove(self, key):
        block, _ = self.live.pop(key)
        self.clock += 1
        block.died, block.died_span = self.clock, self.span
        self.total -= block.num_bytes
        return block

    def _resized(self, storage, num_bytes):
        """FSDP frees and refills gathered weights by resizing their storage: each filling is a block of its own."""
        if storage._cdata in self.live and num_bytes != self.live[storage._cdata][0].num_bytes:
            self._remove(storage._cdata)
            self.maker = "resize_"
            self._add(storage._cdata, storage, num_bytes, "gathered weights")

    def _note_peak(self):
        if self.total > self.fullest.get(self.phase, (-1, 0))[0]:
            self.fullest[self.phase] = self.total, self.clock

    # ---- what it says

    def peak(self, phase: str, num_largest: int = 12) -> Peak:
        """The fullest moment of `phase` since `start`."""
        total, clock = self.fullest.get(phase, (0, 0))
        alive = [block for block in self.blocks if block.born <= clock < block.died]
        sums = dict.fromkeys(CATEGORIES, 0)
        for block in alive:
            sums[block.kind()] += block.num_bytes
        counts = Counter((block.kind(), block.maker, block.num_bytes) for block in alive)
        largest = sorted(((*kind, count) for kind, count in counts.items()), key=lambda row: -row[2] * row[3])
        return Peak(total, sums, largest[:num_largest])

    # ---- how it sees

    def __enter__(self):
        self._resize = torch.UntypedStorage.resize_
        plain, resized = self._resize, self._resized

        def resize(storage, num_bytes):
            plain(storage, num_bytes)
            resized(storage, storage.nbytes())

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # its local tensors come here next
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        self.maker = name = func._schema.name
        for result in [results] if isinstance(results, torch.Tensor) else tree_iter(results):
            if isinstance(result, torch.Tensor):
                self.book(result)
        # the collectives of torch 2.13's FSDP2 and c10d say what a buffer is for
        if name.startswith(("fsdp::", "c10d::")):
            self._book_collective(name, args, kwargs)
        return results

    def _book_collective(self, name, args, kwargs):
        if name == "fsdp::all_gather_copy_in":
            self.book(args[1], "gathered weights")
        elif name == "fsdp::split_with_sizes_copy":
            self.book_all(kwargs["out"], "gathered weights")
        elif name == "fsdp::chunk_cat":
            self.book_all(args[0], "unreduced gradients")
            self.book(kwargs["out"], "communication")
        elif name.startswith("c10d::"):
            category = "gathered weights" if "allgather" in name else "communication"
            for tensor in tree_iter(args):
                if isinstance(tensor, torch.Tensor):
                    self._book_if_nameless(tensor, category)

    def _book_if_nameless(self, tensor, category):
        for part in _parts(tensor):
            block, _ = self.live.get(part.untyped_storage()._cdata, (None, None))
            if block is None or block.category is None:
                self.book(part, category)


def _parts(tensor):
    """The plain tensors that a tensor consists of; itself, for most."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    return [part for one in inner if isinstance(one, torch.Tensor) for part in _parts(one)]
