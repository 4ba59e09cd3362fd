"""The processes of torchft in `tests.benchmarks.storm`: its lighthouse and its replicas.

`python -m tests.benchmarks.storm_torchft lighthouse …` serves the quorum. `… replica …` trains the
model of the storm with `torchft.local_sgd` on torchft's process group of gloo. A replica writes one
line per commit: the machine's monotonic time, its number, the step, and the steps that torchft
counts for it; with `--losses` also the training loss. It ends when the file `stop` is in its
folder, and saves its parameters.
"""

import argparse
import json
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ashl.planning.instantiate import Job, assemble_job
from tests.support import planned

CONNECT = timedelta(seconds=30)  # limit of the first connection, beside a tuned timeout
# default of the command `torchft_lighthouse`; the class of the same name has another one
DEFAULT_LIGHTHOUSE = {
    "join_timeout_ms": 60000,
    "quorum_tick_ms": 100,
    "heartbeat_timeout_ms": 5000,
}


def lighthouse(asked: argparse.Namespace) -> None:
    from torchft.coordination import LighthouseServer

    limits = DEFAULT_LIGHTHOUSE
    if asked.timeout_s is not None:
        limits = {
            "join_timeout_ms": round(1000 * asked.timeout_s),
            "quorum_tick_ms": 20,
            "heartbeat_timeout_ms": round(1000 * asked.timeout_s),
        }
    least = asked.min_replicas
    server = LighthouseServer(bind=f"[::]:{asked.port}", min_replicas=least, **limits)
    print(server.address(), limits, flush=True)
    while True:
        time.sleep(60)


def replica(asked: argparse.Namespace) -> None:
    from torchft.local_sgd import DiLoCo, LocalSGD
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    job = assemble_job(planned(*asked.setting), "cpu")
    model = job.parts.model.build(job.data.sample_shape, job.data.num_classes)
    vector_to_parameters(job.learner.init().clone(), model.parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=asked.lr)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    def save() -> dict:
        return {"model": model.state_dict(), "optimizer": sgd.state_dict()}

    own = TCPStore(asked.host, 0, is_master=True, wait_for_workers=False)
    limits = {}
    if asked.timeout_s is not None:
        limit = timedelta(seconds=asked.timeout_s)
        limits = {"timeout": limit, "quorum_timeout": 5 * limit, "connect_timeout": CONNECT}
    group = ProcessGroupGloo(limits["timeout"]) if limits else ProcessGroupGloo()
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=asked.min_replicas,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=asked.host,
        store_port=own.port,
        lighthouse_addr=asked.lighthouse,
        replica_id=f"replica_{asked.replica}",
        hostname=asked.host,
        **limits,
    )
    if asked.method == "diloco":
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        method = DiLoCo(manager, [model], sgd, outer, sync_every=asked.local_steps)
    else:
        method = LocalSGD(manager, model, sgd, sync_every=asked.local_steps)
    with method:
        train(asked, job, model, sgd, manager)
    parameters = parameters_to_vector(model.parameters()).detach()
    torch.save(
        {"step": manager.current_step(), "parameters": parameters},
        asked.folder / f"final-{asked.replica}.pt",
    )
    manager.shutdown(wait=False)


def train(
    asked: argparse.Namespace,
    job: Job,
    model: nn.Module,
    sgd: torch.optim.Optimizer,
    manager: Any,
) -> None:
    """Take paced steps until the folder has a file `stop`."""
    split = job.data.train
    order = np.random.default_rng(0).permutation(len(split))
    shard = torch.from_numpy(order[asked.replica :: asked.replicas])
    draws = torch.Generator().manual_seed(time.monotonic_ns())
    criterion = nn.CrossEntropyLoss()
    commits = (asked.folder / "commits.jsonl").open("a", buffering=1)
    number, next_s = 0, time.monotonic()
    while not (asked.folder / "stop").exists():
        if number % asked.local_steps == 0:
            next_s = time.monotonic()  # the time of an exchange is not part of the pace
        number += 1
        next_s += asked.step_s
        batch = shard[torch.randint(len(shard), (asked.batch,), generator=draws)]
        sgd.zero_grad()
        criterion(model(split.inputs[batch].float()), split.targets[batch]).backward()
        time.sleep(max(0.0, next_s - time.monotonic()))
        before = manager.current_step()
        sgd.step()  # averages after every H steps
        if (after := manager.current_step()) > before:
            line = {"time_s": time.monotonic(), "replica": asked.replica, "step": after}
            if asked.losses:
                found = parameters_to_vector(model.parameters()).detach()
                line["loss"] = job.learner.evaluate(found)["train_loss"]
                line["participants"] = manager.num_participants()
            commits.write(json.dumps(line | {"steps": asked.local_steps}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["lighthouse", "replica"])
    parser.add_argument("--timeout-s", type=float, help="tuned limit; default: those of torchft")
    parser.add_argument("--port", type=int, default=29510)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--host", default="")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--method", choices=["local_sgd", "diloco"], default="local_sgd")
    parser.add_argument("--local-steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.025)
    parser.add_argument("--lr", type=float, default=0.0003)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--setting", nargs="*", default=[])
    asked = parser.parse_args()
    lighthouse(asked) if asked.part == "lighthouse" else replica(asked)


if __name__ == "__main__":
    main()
