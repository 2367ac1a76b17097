"""What all ranks must have in common before they begin, and the nodes they run on."""

import hashlib
import socket
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from tonnage.errors import ConfigError
from tonnage.runtime.logs import LOG

PACKAGE = Path(__file__).parents[1]


@cache
def code_version() -> str:
    """Version of the package, commit where it is a git checkout, and a hash of its source files."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{file.relative_to(PACKAGE)}\n".encode() + file.read_bytes())
    commit = _answer("git", "-C", str(PACKAGE), "rev-parse", "--short=12", "HEAD")
    return f"{sys.modules['tonnage'].__version__}{f' commit {commit}' if commit else ''} source {digest.hexdigest()[:12]}"


def own_facts(config_hash: str) -> dict[str, str]:
    """What this rank must share with all others, by the names that an error uses."""
    return {"ranks in all": str(dist.get_world_size()), "config": config_hash, "code of tonnage": code_version(),
            "torch": torch.__version__}


def agree(config_hash: str, group: dist.ProcessGroup) -> None:
    """Compare all ranks and write a line for each node to the log (collective).

    Raises:
        ConfigError: on every rank, naming what differs, and on which ranks.
    """
    mine = {"host": socket.gethostname(), "device": _device(), "facts": own_facts(config_hash)}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=group)
    odd = differences(everyone)
    if odd:
        raise ConfigError("\n".join(odd) + "\nall ranks must run the same code on the same run folder; install one version "
                          "on all nodes, or use a disk that they share")
    if dist.get_rank() == 0:
        LOG.info("\n".join(node_lines(everyone)))
        LOG.debug(f"tonnage {code_version()}, torch {torch.__version__}")


def differences(everyone: list[dict]) -> list[str]:
    """A line for each fact that is not the same on all ranks, naming the ranks of the fewest."""
    lines = []
    for name in everyone[0]["facts"]:
        values = [one["facts"].get(name, "not given") for one in everyone]
        common, _ = Counter(values).most_common(1)[0]
        for value in dict.fromkeys(value for value in values if value != common):
            ranks = [rank for rank, other in enumerate(values) if other == value]
            hosts = ", ".join(dict.fromkeys(everyone[rank]["host"] for rank in ranks))
            who = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} ({hosts})"
            lines.append(f"{who}: {name} is {value}, elsewhere {common}")
    return lines


def node_lines(everyone: list[dict]) -> list[str]:
    """`node HOST: 8 ranks, NVIDIA H100 80GB HBM3 79.1 GiB, driver 580.65` for each host, in the order of ranks."""
    hosts = {}
    for one in everyone:
        hosts.setdefault(one["host"], []).append(one["device"])
    return [f"node {host}: {len(devices)} {'rank' if len(devices) == 1 else 'ranks'}, {', '.join(dict.fromkeys(devices))}"
            for host, devices in hosts.items()]


def _device():
    if not torch.cuda.is_available() or "nccl" not in dist.get_backend_config():
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return f"CPU, {int(lines['MemTotal'].split()[0]) / 2**20:.1f} GiB"
    here = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver = _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
    return f"{here.name} {here.total_memory / 2**30:.1f} GiB, driver {driver.splitlines()[0]}"


def _answer(*words):
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
