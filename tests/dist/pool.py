"""Ranks for tests: processes over gloo that stay and run one function after another, so libraries load once."""

import multiprocessing as mp
import os
import queue
import traceback
from datetime import timedelta

import torch.distributed as dist


class Pool:
    """`world` ranks; `run(function, *args)` calls a module-level function on each and returns their results."""

    def __init__(self, world: int):
        self.world, self.processes = world, []

    def _start(self):
        context = mp.get_context("spawn")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.inboxes = [context.Queue() for _ in range(self.world)]
        self.outbox = context.Queue()
        self.processes = [context.Process(target=_serve, daemon=True, args=(
            rank, self.world, self.store.port, self.inboxes[rank], self.outbox)) for rank in range(self.world)]
        for process in self.processes:
            process.start()

    def run(self, function, *args, timeout_s: float = 300.0) -> list:
        """Results in rank order. A failure on any rank fails here, and the ranks are started anew for the next call."""
        if not self.processes:
            self._start()
        for inbox in self.inboxes:
            inbox.put((function, args))
        results = [None] * self.world
        for _ in range(self.world):
            try:
                rank, value, fault = self.outbox.get(timeout=timeout_s)
            except queue.Empty:
                self.close()
                raise TimeoutError(f"{function} took over {timeout_s} s on {self.world} ranks") from None
            if fault:
                self.close()
                raise AssertionError(f"rank {rank} of {self.world}:\n{fault}")
            results[rank] = value
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []


def _serve(rank, world, port, inbox, outbox):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    from tonnage.runtime.logs import quiet_libraries

    quiet_libraries()
    import torch

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    while True:
        function, args = inbox.get()
        try:
            outbox.put((rank, function(*args), None))
        except BaseException:
            outbox.put((rank, None, traceback.format_exc()))
