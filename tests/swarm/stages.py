"""The swarm again, through several stages of any sync modes: what holds for each of them and across
their borders.
"""

import random
from dataclasses import replace
from itertools import pairwise

from ashl.cluster.spec import Cluster
from ashl.compression.wrappers import wrap_codec
from ashl.overlap.delayed import OneStepDelayed
from ashl.planning.predict import NO_LIMITS
from ashl.runtime.sim import Sim
from ashl.stage.contract import SERIAL, StageConfig
from ashl.sync.adacomm import AdaComm
from ashl.sync.adsp import ADSP
from ashl.sync.asp import ASP
from ashl.sync.async_local_sgd import AsyncLocalSGD
from ashl.sync.backup import Backup
from ashl.sync.bsp import BSP
from ashl.sync.cr_psgd import CRPSGD
from ashl.sync.cr_psgd_catalyst import CRPSGDCatalyst
from ashl.sync.dssp import DSSP
from ashl.sync.easgd import EASGD
from ashl.sync.fedbuff import FedBuff
from ashl.sync.lb_bsp import LBBSP
from ashl.sync.local_sgd import LocalSGD
from ashl.sync.pr_sgd_momentum import PRSGDMomentum
from ashl.sync.qsr import QSR
from ashl.sync.rennala import Rennala
from ashl.sync.rescaled_asgd import RescaledASGD
from ashl.sync.ringleader import Ringleader
from ashl.sync.ringmaster import Ringmaster
from ashl.sync.ssp import SSP
from ashl.topology.all_reduce import AllReduce
from ashl.topology.parameter_server import ParameterServer, ServerRule
from tests.conf_option import conf_option
from tests.swarm.drawn import (
    Seen,
    bound,
    check_mail,
    check_repeat,
    check_time,
    drawn_cluster,
    run,
)


def drawn_sync(rng: random.Random, topology: object, n: int) -> object:
    """Any sync mode that knows the topology."""
    h = rng.randint(1, 5)
    modes: list[object] = [
        BSP(exchange=rng.choice(["gradient", "difference"])),
        LocalSGD(local_steps=h),
    ]
    if isinstance(topology, ParameterServer):
        modes += [
            ASP(local_steps=h),
            SSP(staleness=rng.choice([0, 1, 5, None]), local_steps=h),
            DSSP(s_low=(low := rng.randint(0, 3)), s_high=low + rng.randint(0, 4), local_steps=h),
            Backup(backups=rng.randrange(n), exchange=rng.choice(["gradient", "difference"])),
            FedBuff(buffer=rng.randint(1, n), local_steps=h),
            Rennala(batch=rng.randint(1, 2 * n)),
            Ringmaster(max_staleness=rng.choice([None, 1, n]), local_steps=h),
            AsyncLocalSGD(local_steps=h, max_staleness=rng.choice([None, h, 3 * h])),
            AdaComm(local_steps=h, every_s=rng.uniform(0.01, 1)),
            QSR(local_steps=h, alpha=0.1, h_max=8),
            LBBSP(alpha=rng.uniform(0.1, 1)),
            ADSP(
                gamma_s=rng.uniform(0.2, 1),
                commits=rng.randint(1, 4),
                floor_s=0.05,
                loss_target=0.1,
                search_s=1,
                rise=1,
            ),
        ]
    return rng.choice(modes)


def newer_sync(rng: random.Random, topology: object) -> object:
    """One with batches or messages of its own."""
    h, growth = rng.randint(1, 5), {"growth": rng.uniform(1, 2), "max_batch": 40}
    modes: list[object] = [PRSGDMomentum(local_steps=h)]
    if isinstance(topology, ParameterServer):
        modes += [
            CRPSGD(**growth),
            CRPSGDCatalyst(**growth, theta=0.1, budget=rng.randint(1, 500)),
            RescaledASGD(local_steps=h),
            Ringleader(),
            EASGD(local_steps=h, alpha=0.3),
        ]
    return rng.choice(modes)


def plain(sync: object) -> bool:
    """Return True if it sends only updates, which may be delayed and encoded."""
    return not (
        isinstance(sync, PRSGDMomentum) or (isinstance(sync, ServerRule) and sync.own_messages)
    )


def drawn(seed: int) -> tuple[Cluster, list[StageConfig]]:
    """Draw two or three stages; each except the last ends by one of the rules that need no loss."""
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    cluster = replace(
        cluster, step_s=max(0.001, cluster.step_s or 0.0)
    )  # ADSP counts seconds, not steps
    n = cluster.num_workers
    seconds = rng.choice([None, None, rng.uniform(0, 3)])
    limits = replace(NO_LIMITS, steps=rng.randint(1, 300), seconds=seconds, eval_every_commits=1)
    topology = rng.choice(
        [ParameterServer(pull_ratio=None), ParameterServer(pull_ratio=None), AllReduce()]
    )
    codec = conf_option("compression", "topk", ratio=0.1)
    stages = []
    for index in range(rng.randint(2, 3)):
        sync, other = drawn_sync(rng, topology, n), random.Random(f"{seed} {index} newer")
        sync = newer_sync(other, topology) if other.random() < 0.3 else sync
        stage = bound(rng, sync, topology, n, limits)
        rule = rng.choice(["commits", "seconds", "epochs", "plateau"])
        until = {rule: rng.uniform(0, 3)}
        handover = {
            "momentum": rng.choice(["keep", "reset"]),
            "residual": rng.choice(["keep", "drop"]),
        }
        compressed = (
            isinstance(topology, ParameterServer) and rng.random() < 0.3 and plain(stage.sync)
        )
        stages.append(
            replace(
                stage,
                index=index,
                plan=replace(stage.plan, until=until, handover=handover if index else {}),
                codec=wrap_codec(codec, ()) if compressed else stage.codec,
                trainer=stages[0].trainer if stages else stage.trainer,
                overlap=random.Random(f"{seed} {index}").choice(
                    [SERIAL, SERIAL, OneStepDelayed(local_weight=1)]
                )
                if plain(stage.sync)
                else SERIAL,
            )
        )
    return cluster, [replace(stage, following=stage is not stages[-1]) for stage in stages]


def check_borders(seen: Seen, stages: list[StageConfig], n: int) -> None:
    """Stages follow each other; at each border every worker's time adds up to it; counts
    only grow.
    """
    ends = seen.of("StageEnd")
    assert [end["stage"] for end in ends] == list(range(len(ends)))
    for before, after in pairwise(ends):
        assert before["end_ns"] <= after["end_ns"]
        assert all(
            a <= b
            for key in ("commits", "steps_by", "dropped_by")
            for a, b in zip(before[key], after[key], strict=True)
        )
        borders = [
            record for record in seen.of("StageBoundary") if record["stage"] == before["stage"]
        ]
        assert sorted(record["rank"] for record in borders) == list(range(n))
        assert all(sum(record["totals_ns"].values()) == before["end_ns"] for record in borders)
    for end, stage in zip(ends, stages, strict=False):
        assert end["reason"] in {"steps", "seconds", *stage.plan.until}
        assert end["steps"] == sum(end["steps_by"])
        # groups: the end of the stage may drop one request whose staleness has been counted
        requests = max(end["commits"]) + 1
        assert max(end["stale_max"]) * requests >= max(end["stale_sum"])


def check_leads(seen: Seen, stages: list[StageConfig]) -> None:
    """SSP's bound holds within its stage, after any earlier stage."""
    starts = [[0] * stages[0].num_workers, *(end["commits"] for end in seen.of("StageEnd"))]
    times = [end["merges"] for end in seen.of("StageEnd")]
    for record in seen.commits:
        index = sum(merges < record["merges"] for merges in times)
        if (
            index < len(stages)
            and isinstance(sync := stages[index].sync, SSP)
            and sync.staleness is not None
        ):
            clocks = [
                now - then for now, then in zip(record["commits"], starts[index], strict=True)
            ]
            assert max(clocks) - min(clocks) <= sync.staleness + 1


def check_bytes(seen: Seen, stages: list[StageConfig]) -> None:
    """One end receives all that the other end sends, under any compression."""
    n = stages[0].num_workers
    ledgers = {record["rank"]: record for record in seen.of("TimeTotals")}
    if n in ledgers:
        assert sum(ledgers[rank]["bytes_up"] for rank in range(n)) == ledgers[n]["bytes_down"]
        assert sum(ledgers[rank]["bytes_down"] for rank in range(n)) == ledgers[n]["bytes_up"]


def played(seed: int) -> tuple[Sim, Seen, list[StageConfig]]:
    cluster, stages = drawn(seed)
    return *run(cluster, stages, seed), stages


def check(seed: int) -> None:
    sim, seen, stages = played(seed)
    check_mail(sim)
    check_borders(seen, stages, stages[0].num_workers)
    check_time(seen, stages[0].num_workers, seen.of("StageEnd")[-1]["end_ns"])
    check_leads(seen, stages)
    check_bytes(seen, stages)
    check_repeat(seed, seen, lambda: played(seed)[1])
