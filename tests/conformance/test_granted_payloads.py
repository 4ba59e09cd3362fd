"""Payloads and sums of groups in the order that NCCL needs, checked with gloo in its place.

The stand-in is as strict as NCCL: one thread, one payload at a time, both sides in one order, and
the sender waits for the receiver.
"""

import hashlib
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ashl.device import HOST
from ashl.errors import UsageError
from ashl.plan.plan import Plan
from ashl.planning import device
from ashl.planning.compatibility import survives_failure
from ashl.planning.instantiate import Job, assemble_job
from ashl.runtime.process import TorchKernel
from ashl.runtime.records import Counts, Record, Snapshot, StageEnd
from ashl.runtime.rendezvous import make_group
from ashl.runtime.throttle import Throttle
from ashl.runtime.transport import NO_TIMEOUT, GrantedPayloads, PairwiseGroups
from ashl.stage.contract import Rule
from ashl.stage.program import pairs_of, peers_of, run_stages
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

    def __init__(self, rank: int, pairs: list[tuple[int, int]]) -> None:
        groups = {}
        for pair in pairs:
            group = dist.new_group(list(pair), timeout=NO_TIMEOUT)
            if rank in pair:
                place = pair.index(rank)
                groups[pair[1 - place]] = group, 1 - place
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
    """Keeps how the run ended, and this rank's part of the last model."""

    def __init__(self) -> None:
        super().__init__()
        self.end: Counts | None = None
        self.sha256: str | None = None

    def emit(self, record: Record) -> None:
        super().emit(record)
        if isinstance(record, StageEnd):
            self.end = record.counts

    def snapshot(self, record: Any, vector: Any) -> None:
        if isinstance(record, Snapshot) and record.final and vector is not None:
            self.sha256 = hashlib.sha256(vector.numpy().tobytes()).hexdigest()


class Carried(NamedTuple):
    """The results of one rank after a run."""

    steps: int | None  # counted steps, at the rank that counts
    sha256: str | None  # hash of this rank's part of the last model
    payloads: dict[int, int]  # carried from and to each peer
    groups: list[tuple[int, ...]]  # process groups that it has made for sums


def runs(end: Any, port: int, rank: int, ranks: int, plans: list[str]) -> None:
    """Run one rank of one run after the other, and return what it saw of each."""
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, ranks, rank == 0, timeout=NO_TIMEOUT, wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=NO_TIMEOUT)
    jobs = [assemble_job(Plan.from_json(plan), HOST) for plan in plans]
    stages = jobs[0].stages
    count = device.num_with_vectors(Plan.from_json(plans[0]), stages[0].topology)
    carrier = Strict(rank, pairs_of(stages, count))

    def played(number: int, job: Job) -> Carried:
        before, seen = dict(carrier.begun), Seen()
        carrier.thread, groups = None, list[tuple[int, ...]]()

        def make(members: tuple[int, ...]) -> dist.ProcessGroup:
            groups.append(members)
            name = f"{number}/{members}"
            group = make_group(name, store, members.index(rank), len(members), lambda: False)
            assert group is not None
            return group

        kernel = TorchKernel(
            rank,
            seen,
            lambda clock: Throttle(job.parts.cluster, rank, 16, 0, 4000, clock, store),
            peers=peers_of(job.stages, rank),
            max_bytes=1_000_000,
            exact=True,
            groups={},
            make_subgroup=make,
            payload_transport=GrantedPayloads(carrier, rank),
        )
        kernel.run(partial(run_stages, stages=job.stages))
        store.add(f"done/{number}", 1)
        kernel.run_until(lambda: store.add(f"done/{number}", 0) == ranks)
        kernel.close_connections(10)
        payloads = {peer: count - before[peer] for peer, count in carrier.begun.items()}
        steps = sum(seen.end.steps_by) if seen.end else None
        return Carried(steps, seen.sha256, payloads, groups)

    say(end, store, rank, ranks, lambda: ([played(*run) for run in enumerate(jobs)], None, {}))


def granted(plans: Sequence[Plan]) -> list[list[Carried]]:
    """Run these plans by grants; return by plan what each rank saw.

    Both ranks of a pair have carried equally many payloads.
    """
    found = started(runs, plans[0].num_ranks, 100, [plan.to_json() for plan in plans])
    assert [rank.error for rank in found] == [None] * len(found)
    by_plan = [[rank.result[k] for rank in found] for k in range(len(plans))]
    for seen in by_plan:
        for rank, own in enumerate(seen):
            for peer, count in own.payloads.items():
                assert count == seen[peer].payloads[rank]
    return by_plan


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
    found = granted([planned(*RUN, *mode) for mode in modes])
    for mode, (*_, server) in zip(modes, found, strict=True):
        assert server.steps is not None, mode
        assert server.steps >= 20, mode
        assert all(server.payloads.values()), mode
    for mode, (*_, server) in zip(ALIKE, found, strict=False):
        expected = simulated(*(word for word in RUN if word not in REAL), *mode).sha256
        assert server.sha256 == expected


THREE = (*(word for word in RUN if "num_workers" not in word), "cluster.num_workers=3")
OTHERS = {  # options and sync modes
    "rounds": (("topology=gossip",), ["d_psgd", "choco"]),
    "pairs": (("topology=gossip",), ["ad_psgd", "swarm"]),
    "sharded_server": (("topology=sharded_server",), ["bsp", "asp", "ssp"]),
    "halos": (("topology=halos", "topology.regions=[0,1,1]", "topology.updates=2"), ["asp"]),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "pairs" else pytest.param(name, marks=pytest.mark.slow) for name in OTHERS],
)
def test_payloads_between_all_ranks_by_grants(name: str) -> None:
    """Ranks with several peers, of which some grant and some are granted, end in order. So do
    those beside a coordinator, which has no communicator.
    """
    chosen, modes = OTHERS[name]
    plans = [planned(*THREE, "schedule=single", *chosen, f"sync={mode}") for mode in modes]
    found = granted(plans)
    for mode, seen in zip(modes, found, strict=True):
        assert [own.steps for own in seen if own.steps is not None][-1] >= 20, mode
        assert sum(sum(own.payloads.values()) for own in seen) > 0, mode


def test_sums_of_groups_by_communicators() -> None:
    """A group of workers makes its process group at its first sum, once."""
    modes = ["ripples_random", "ripples_smart", "ripples_static", "ripples_first_come"]
    chosen = (*THREE, "schedule=single", "topology=partial_all_reduce", "sync.group_size=2")
    plans = [
        planned(
            *(word for word in chosen if mode != "ripples_static" or "group_size" not in word),
            f"sync={mode}",
        )
        for mode in modes
    ]
    for mode, (*workers, coordinator) in zip(modes, granted(plans), strict=True):
        assert coordinator.steps is not None, mode
        assert coordinator.steps >= 20, mode
        made = [group for worker in workers for group in worker.groups]
        assert made, mode
        assert all(made.count(group) == len(group) for group in made), mode


def test_where_nccl_carries_messages(monkeypatch) -> None:
    """NCCL carries sums of all workers by itself, all else if requested, on real processes; such a
    run does not tolerate a failed worker.
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
        (("topology=gossip", "sync=d_psgd"), False),
    ):
        found = assemble_job(planned(*RUN, "schedule=single", *mode), HOST).parts
        assert survives_failure(found) != by_nccl
    with pytest.raises(
        UsageError,
        match=r"messages by NCCL cannot be paced; take cluster=real with it; take runtime\.backend",
    ):
        device.uses_nccl(asked, server, cluster(2))
    for name in ("gossip", "halos", "partial_all_reduce", "sharded_server"):
        other = conf_option("topology", name)
        assert not device.uses_nccl(own, other, parts.cluster)
        assert device.uses_nccl(asked, other, parts.cluster)
