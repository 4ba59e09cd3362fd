"""Payloads that a server grants, as NCCL needs it, checked with gloo in its place.

The stand-in is as strict as NCCL: one thread, one payload at a time, both sides in one order, and
the sender waits for the receiver.
"""

import hashlib
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ashl.device import HOST
from ashl.errors import UsageError
from ashl.plan.plan import Plan
from ashl.planning import device
from ashl.planning.compatibility import survives_failure
from ashl.planning.instantiate import assemble_job
from ashl.runtime.process import TorchKernel
from ashl.runtime.records import Counts, Record, Snapshot, StageEnd
from ashl.runtime.throttle import Throttle
from ashl.runtime.transport import NO_TIMEOUT, GrantedPayloads, PairwiseGroups
from ashl.stage.contract import Rule
from ashl.stage.program import peers_of, run_stages
from ashl.topology.parameter_server import ServerRule
from tests.conf_option import CONF, conf_option
from tests.kernels import Quiet, say, started
from tests.laws.machines import cluster
from tests.support import planned, simulated

WORKERS = 2
REAL = ("runtime=local", "cluster=real")
RUN = (
    *REAL,
    f"cluster.num_workers={WORKERS}",
    "model.hidden=[4]",
    "dataset.batch_size=16",
    "schedule.h_preset=[2]",
    "stop.steps=24",
)
PLAIN = (
    "optimizer=sgd",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
)  # what sync=spy asks for


class Strict(PairwiseGroups):
    """A payload connection over gloo.

    A payload's number and size precede it, and the receiver confirms it before the sender
    continues.
    """

    def __init__(self, rank: int) -> None:
        groups = {}
        for worker in range(WORKERS):
            group = dist.new_group([worker, WORKERS], timeout=NO_TIMEOUT)
            if rank in (worker, WORKERS):
                peer, place = (WORKERS, 1) if rank == worker else (worker, 0)
                groups[peer] = group, place
        super().__init__(groups, HOST)
        self.thread: threading.Thread | None = None
        self.under_way = self.carried = 0
        self.begun = dict.fromkeys(groups, 0)

    @contextmanager
    def alone(self, peer: int) -> Generator[int]:
        self.thread = self.thread or threading.current_thread()
        assert threading.current_thread() is self.thread, "NCCL is asked by one thread"
        assert not self.under_way, "and one thing at a time"
        self.under_way, self.begun[peer] = 1, self.begun[peer] + 1
        yield self.begun[peer]
        self.under_way, self.carried = 0, self.carried + 1

    def send(self, peer: int, body: Tensor) -> None:
        with self.alone(peer) as number:
            super().send(peer, torch.tensor([number, body.numel()]))
            super().send(peer, body)
            super().recv(peer, came := torch.zeros(1, dtype=torch.int64))
            assert came.item() == number

    def recv(self, peer: int, flat: Tensor) -> None:
        with self.alone(peer) as number:
            super().recv(peer, head := torch.zeros(2, dtype=torch.int64))
            assert head.tolist() == [number, flat.numel()], "both sides begin the same body"
            super().recv(peer, flat)
            super().send(peer, torch.tensor([number]))


class Seen(Quiet):
    """Keeps how the run ended, and the server's last model."""

    def __init__(self) -> None:
        super().__init__()
        self.end: Counts | None = None
        self.sha256: str | None = None

    def emit(self, record: Record) -> None:
        super().emit(record)
        if isinstance(record, StageEnd):
            self.end = record.counts

    def snapshot(self, record: Any, vector: Any) -> None:
        if isinstance(record, Snapshot) and record.final:
            self.sha256 = hashlib.sha256(vector.numpy().tobytes()).hexdigest()


def runs(end: Any, port: int, rank: int, ranks: int, plans: list[str]) -> None:
    """Run one rank of one run after the other; return the counted steps, the model and the number
    of payloads of each.
    """
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, ranks, rank == 0, timeout=NO_TIMEOUT, wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=NO_TIMEOUT)
    carrier = Strict(rank)

    def played(number: int, plan: str) -> tuple[int | None, str | None, int]:
        job = assemble_job(Plan.from_json(plan), HOST)
        carrier.thread, carrier.carried, seen = None, 0, Seen()
        kernel = TorchKernel(
            rank,
            seen,
            lambda clock: Throttle(job.parts.cluster, rank, 16, 0, 4000, clock, store),
            peers=peers_of(job.stages, rank),
            max_bytes=1_000_000,
            exact=True,
            groups={},
            payload_transport=GrantedPayloads(carrier, rank == WORKERS),
        )
        kernel.run(partial(run_stages, stages=job.stages))
        store.add(f"done/{number}", 1)
        kernel.run_until(lambda: store.add(f"done/{number}", 0) == ranks)
        kernel.close_connections(10)
        return sum(seen.end.steps_by) if seen.end else None, seen.sha256, carrier.carried

    say(end, store, rank, ranks, lambda: ([played(*run) for run in enumerate(plans)], None, {}))


ALIKE = [("sync=bsp",), ("sync=local_sgd", "sync.local_steps=2", "compression=qsgd")]
SOME = [
    *ALIKE,
    ("sync=asp", "overlap=delayed"),
    ("sync=ssp", "compression=topk", "topology.pull_ratio=0.2"),
    ("sync=ringleader",),
    ("sync=bsp", "overlap=wfbp"),
    ("schedule=ashl", "schedule.profile_steps=1", "schedule.h_preset=[4,2]"),
]
SERVER_MODES = [  # the modes that a parameter server's loops run
    path.stem
    for path in sorted((CONF / "sync").glob("*.yaml"))
    if isinstance(sync := conf_option("sync", path.stem), ServerRule)
    and type(sync).loop is Rule.loop
]
ALL = [(f"sync={name}", *(PLAIN if name == "spy" else ())) for name in SERVER_MODES]


@pytest.mark.parametrize(
    "modes", [SOME, pytest.param(ALIKE + ALL, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_servers_modes_by_grants(modes: list[tuple[str, ...]]) -> None:
    """They end by their count, what one side carried the other did, and the model is the
    simulator's.
    """
    plans = [planned(*RUN, *mode).to_json() for mode in modes]
    found = started(runs, WORKERS + 1, 100, plans)
    assert [rank.error for rank in found] == [None] * (WORKERS + 1)
    *workers, server = [rank.result for rank in found]
    for mode, (steps, _, carried), *others in zip(modes, server, *workers, strict=True):
        assert steps >= 20, mode
        assert carried == sum(own for _, _, own in others) > 0, mode
    for mode, (_, sha256, _) in zip(ALIKE, server, strict=False):
        assert sha256 == simulated(*(word for word in RUN if word not in REAL), *mode).sha256


def test_where_nccl_carries_messages(monkeypatch) -> None:
    """A server grants payloads if requested, on real processes; such a run does not tolerate a
    failed worker.
    """
    monkeypatch.setattr(device, "device_of", lambda runtime: "cuda:0")
    monkeypatch.setattr(device, "nccl_available", lambda: True)
    parts = assemble_job(planned(*RUN, "sync=ssp"), HOST).parts
    server, own = parts.stages[0].topology, parts.runtime
    asked = replace(own, backend="nccl")
    assert not device.uses_nccl(own, server, parts.cluster), (
        "by itself a server's messages go by gloo"
    )
    assert device.uses_nccl(asked, server, parts.cluster)
    assert survives_failure(parts)
    assert not survives_failure(replace(parts, runtime=asked))
    for mode, by_nccl in (
        (("topology=all_reduce", "sync=bsp"), True),
        (("topology=partial_all_reduce", "sync=ripples_smart", "sync.group_size=2"), False),
    ):
        found = assemble_job(planned(*RUN, "schedule=single", *mode), HOST).parts
        assert survives_failure(found) != by_nccl
    with pytest.raises(
        UsageError,
        match=r"transfers by NCCL cannot be paced; take cluster=real with it; take runtime\.backend",
    ):
        device.uses_nccl(asked, server, cluster(2))
    for name in ("gossip", "halos", "partial_all_reduce", "sharded_server"):
        other = conf_option("topology", name)
        assert not device.uses_nccl(own, other, parts.cluster)
        with pytest.raises(
            UsageError, match=r"messages of topology=parameter_server; take runtime\.backend=auto"
        ):
            device.uses_nccl(asked, other, parts.cluster)
