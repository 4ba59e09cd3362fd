"""Kubernetes: a JobSet manifest with one ReplicatedJob per machine kind, and what a pod is told.

Limits: the manifest was checked against the fields of JobSet v1alpha2, and was not run.
"""

from collections.abc import Mapping
from typing import Any

import yaml

from ashl.errors import UsageError
from ashl.launch.job import SECRET, HostRanks, Launch, Machine
from ashl.launch.membership import PORT, JobMembership, read_natural, read_place, read_port

NAME = "ashl"
IMAGE = "ashl"  # without `--option image=…`
OFFSET = "ASHL_RANK_OFFSET"  # the first rank of a ReplicatedJob
VARIABLES = ("JOB_COMPLETION_INDEX", "PET_NODE_RANK", "PET_NNODES")


def manifest(launch: Launch) -> str:
    """Return the manifest for `kubectl apply -f -`.

    A line `KEY=VALUE` of the hosts file selects nodes by a label. Every rank is a pod. A failed pod
    starts again without the others, and its worker rejoins if the topology admits it. The secret
    of the job is the key `secret` of a Kubernetes Secret, which the user creates.
    """
    image = dict(option.partition("=")[::2] for option in launch.options).get("image", IMAGE)
    shares = launch.shares or (HostRanks(Machine("", launch.size), range(launch.size)),)
    jobs = [replicated_job(launch, number, share, image) for number, share in enumerate(shares)]
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": NAME},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": NAME},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["ranks-0"]},
            "replicatedJobs": jobs,
        },
    }
    return yaml.safe_dump(document, sort_keys=False)


def replicated_job(launch: Launch, number: int, share: HostRanks, image: str) -> dict[str, Any]:
    """Return the ReplicatedJob of one machine kind: an indexed Job with one pod per rank."""
    count, kind = len(share.ranks), share.machine.kind
    known = {
        "WORLD_SIZE": str(launch.size),
        OFFSET: str(share.ranks.start),
        "MASTER_ADDR": f"{NAME}-ranks-0-0-0.{NAME}",  # the pod of rank 0
        "MASTER_PORT": str(launch.port or PORT),
        **{name: value for name, value in launch.env.items() if name != SECRET},
    }
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in known.items()]
    env += [{"name": SECRET, "valueFrom": {"secretKeyRef": {"name": NAME, "key": "secret"}}}]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [
            {"name": "rank", "image": image, "command": launch.rank_command, "env": env}
        ],
    }
    if kind:
        pod["nodeSelector"] = {kind[0]: kind[1]}
    elif share.machine.name:
        pod["nodeSelector"] = {"kubernetes.io/hostname": share.machine.name}
    job = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 3 * count,
        "template": {"spec": pod},
    }
    return {"name": f"ranks-{number}", "replicas": 1, "template": {"spec": job}}


def read(env: Mapping[str, str]) -> JobMembership | None:
    """Return the job of a pod of an indexed Job, or of one that Kubeflow Trainer made; None if the
    environment says no number of processes.

    Raises: UsageError if the variables contradict each other or name no master.
    """
    if "PET_NODE_RANK" in env and "PET_NNODES" in env:
        if env.get("PET_NPROC_PER_NODE", "1") not in ("1", "auto", "cpu", "gpu"):
            raise UsageError(
                f"PET_NPROC_PER_NODE={env['PET_NPROC_PER_NODE']}: this pod has several ranks; start"
                " them by torchrun, or set it to 1"
            )
        rank, size = read_place(env, "Kubeflow", "PET_NODE_RANK", "PET_NNODES")
        host, port = env.get("PET_MASTER_ADDR"), read_port(env, "PET_MASTER_PORT")
    elif "JOB_COMPLETION_INDEX" in env and "WORLD_SIZE" in env:
        size = read_natural(env, "WORLD_SIZE")
        rank = read_natural(env, "JOB_COMPLETION_INDEX") + int(env.get(OFFSET, "0"))
        host, port = env.get("MASTER_ADDR"), read_port(env)
    else:
        return None
    if rank >= size:
        raise UsageError(f"rank {rank} of a pod, but {size} processes count ranks from 0")
    if size == 1:
        return None
    if not host:
        raise UsageError(
            "the pod does not say where rank 0 is; set MASTER_ADDR to the DNS name of its pod"
        )
    return JobMembership(rank, size, host, port, None)
