"""Kubernetes: a JobSet manifest with one ReplicatedJob per machine kind.

Limits: the manifest was checked against the fields of JobSet v1alpha2, and was not run.
"""

from typing import Any

import yaml

from ashl.launch.environment import PORT, RANK_OFFSET, SECRET
from ashl.launch.job import HostRanks, Launch, Machine

NAME = "ashl"
IMAGE = "ashl"  # without `--option image=…`


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
        RANK_OFFSET: str(share.ranks.start),
        "MASTER_ADDR": f"{NAME}-ranks-0-0-0.{NAME}",  # the pod of rank 0
        "MASTER_PORT": str(PORT),
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
