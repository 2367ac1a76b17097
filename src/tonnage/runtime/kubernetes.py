"""Kubernetes: the PyTorchJob of Kubeflow's training operator for a run; kubectl submits it.

Source: https://www.kubeflow.org/docs/components/training/user-guides/pytorch/ (API kubeflow.org/v1). The operator sets
MASTER_ADDR and MASTER_PORT in each pod, and RANK and WORLD_SIZE, which count pods.
"""

import re
import shlex
from collections.abc import Sequence

import yaml

from tonnage.config.rules import Layout
from tonnage.config.schema import Config
from tonnage.errors import ConfigError

# a pod that is started again goes on with the run; $0 is the run folder, the rest are the words of the command
START = """\
if [ -f "$0/config.yaml" ]; then set -- "run=$0"; fi
exec torchrun --nnodes={nodes} --nproc-per-node={gpus} --node-rank="$RANK" --master-addr="$MASTER_ADDR" \\
  --master-port="$MASTER_PORT" --shutdown-timeout=120 launch/train.py "$@"
"""


def manifest(config: Config, layout: Layout, overrides: Sequence[str]) -> str:
    """The PyTorchJob as YAML: one pod a node, a shared volume for run folders and caches.

    Raises:
        ConfigError: what Kubernetes needs and the config does not say.
    """
    cluster, name = config.cluster, config.run.name
    rules = [
        (not name or not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", name),
         f"run.name={name}: must be given, of small letters, digits and dashes; it names job and run folder"),
        (cluster.image is None, "cluster.image: must be given, an image with this repository as its working directory"),
        (cluster.volume_claim is None, "cluster.volume_claim: must be given, a volume that all pods can write to"),
        (cluster.launcher != "torchrun", f"cluster.launcher={cluster.launcher}: there is only torchrun on Kubernetes")]
    faults = [text for broken, text in rules if broken]
    if faults:
        raise ConfigError("\n".join(faults))
    root = f"{cluster.volume_path}/outputs"
    words = [word for word in overrides if not word.startswith(("run.root=", "run.name="))]
    nodes = layout.gpus // layout.gpus_per_node
    variables = {"TONNAGE_CACHE": f"{cluster.volume_path}/cache", "HF_HOME": f"{cluster.volume_path}/huggingface"}
    if cluster.interface:
        variables |= {"GLOO_SOCKET_IFNAME": cluster.interface, "NCCL_SOCKET_IFNAME": cluster.interface}
    limits = {"nvidia.com/gpu": layout.gpus_per_node} if layout.device == "cuda" else {}
    if cluster.cpus_per_gpu:
        limits["cpu"] = cluster.cpus_per_gpu * layout.gpus_per_node
    if isinstance(cluster.memory_gib, float):
        limits["memory"] = f"{cluster.memory_gib:g}Gi"
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": cluster.image,
        "command": ["bash", "-c", "\n".join([*cluster.setup, START.format(nodes=nodes, gpus=layout.gpus_per_node)]),
                    f"{root}/{name}", *words, f"run.root={root}", f"run.name={name}"],
        "env": [{"name": key, "value": str(value)} for key, value in (variables | cluster.environment).items()],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [{"name": "data", "mountPath": cluster.volume_path}, {"name": "shm", "mountPath": "/dev/shm"}]}
    pod = {"containers": [container], "volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": cluster.volume_claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}}]}  # NCCL and data loaders want more than Docker's 64 MiB

    def replicas(count):
        return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}
    workers = {"Worker": replicas(nodes - 1)} if nodes > 1 else {}
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob",
           "metadata": {"name": name, "namespace": cluster.namespace},
           "spec": {"runPolicy": {"backoffLimit": cluster.starts_without_checkpoint, "cleanPodPolicy": "None"},
                    "pytorchReplicaSpecs": {"Master": replicas(1), **workers}}}
    return f"# launch/train.py {shlex.join(words)}\n" + yaml.dump(job, sort_keys=False, Dumper=_Dumper)


class _Dumper(yaml.SafeDumper):
    """Without anchors: replicas share what they are made of."""

    def ignore_aliases(self, data):
        return True
