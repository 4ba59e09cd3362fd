"""The swarm with workers that fail, rejoin and lose their links, at a parameter server, through one
or several stages of any sync modes: the run ends, books balance, and no push is counted twice or
forgotten.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest

from ashl.cluster.spec import Cluster
from ashl.compression.wrappers import wrap_codec
from ashl.errors import AshlError
from ashl.overlap.delayed import OneStepDelayed
from ashl.planning.predict import NO_LIMITS
from ashl.runtime.sim import Sim
from ashl.stage.contract import SERIAL, StageConfig
from ashl.stage.progress import Progress
from ashl.topology.parameter_server import ParameterServer
from tests.conf_option import conf_option
from tests.swarm.drawn import Seen, befallen_cluster, bound, chained, check_books, run
from tests.swarm.stages import drawn_sync, plain


def with_messages(rng: random.Random) -> object:
    """A mode whose messages are more than updates."""
    name = rng.choice(["easgd", "pr_sgd_momentum", "ringleader", "asylpg"])
    own = {
        "easgd": {"local_steps": rng.randint(1, 5)},
        "pr_sgd_momentum": {"local_steps": rng.randint(1, 5)},
        "ringleader": {},
        "asylpg": {"epoch_steps": rng.choice([None, 1, rng.randint(1, 30)])},
    }
    return conf_option("sync", name, **own[name])


def drawn(seed: int) -> tuple[Cluster, list[StageConfig]]:
    rng = random.Random(seed)
    cluster = befallen_cluster(rng)
    n, churn = cluster.num_workers, cluster.churn
    topology = ParameterServer(pull_ratio=rng.choice([None, None, 0.1]))
    seconds = rng.choice(
        [0.5, 5.0, 5.0 if churn else None]
    )  # a worker that fails within each round makes no progress
    limits = replace(NO_LIMITS, steps=rng.randint(1, 200), seconds=seconds, eval_every_commits=1)
    stages, codec = list[StageConfig](), conf_option("compression", "topk", ratio=0.1)
    for index in range(rng.choice([1, 1, 2, 3])):
        sync, other = drawn_sync(rng, topology, n), random.Random(f"{seed} {index} messages")
        sync = with_messages(other) if other.random() < 0.4 else sync
        stage = bound(rng, sync, topology, n, limits)
        until = {rng.choice(["commits", "seconds", "epochs"]): rng.uniform(0, 2)}
        plan = replace(stage.plan, until=until)
        compressed = (topology.pull_ratio is not None or rng.random() < 0.3) and plain(sync)
        stages.append(
            replace(
                stage,
                index=index,
                plan=plan,
                codec=wrap_codec(codec, ()) if compressed else stage.codec,
                overlap=other.choice(
                    [
                        SERIAL,
                        SERIAL,
                        OneStepDelayed(local_weight=1),
                        OneStepDelayed(local_weight=0.5),
                    ]
                )
                if plain(sync)
                else SERIAL,
                trainer=stages[0].trainer if stages else stage.trainer,
                min_workers=1 if rng.random() < 0.8 else rng.randint(1, n),
                joins=cluster.workers_rejoin,
                reshards=seed % 2 == 0,
            )
        )
    return cluster, chained(stages)


class Counted:
    """Count for each worker the pushes that the server received, and those that it merged or
    dropped.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.came, self.settled = Counter[int](), Counter[int]()
        for name, counter in (
            ("observe", self.came),
            ("commit", self.settled),
            ("count_dropped", self.settled),
        ):
            patch.setattr(Progress, name, self.counting(getattr(Progress, name), counter))
        patch.setattr(Progress, "subtract_rounds", self.taking_back(Progress.subtract_rounds))

    def taking_back(self, method):
        def taken_back(progress, worker, rounds, *rest):
            self.settled[worker] -= rounds
            return method(progress, worker, rounds, *rest)

        return taken_back

    @staticmethod
    def counting(method, counter):
        def counted(progress, worker, *rest):
            counter[worker] += 1
            return method(progress, worker, *rest)

        return counted


def play_counted(
    cluster: Cluster, stages: list[StageConfig], seed: int
) -> tuple[Sim, Seen, Counted] | None:
    """Return (kernel, records, counted pushes) of a run; None if too few workers remained."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        try:
            return *run(cluster, stages, seed), counted
        except AshlError as error:
            if "fewer than runtime.min_workers" not in str(error):
                raise
    return None


def check(seed: int) -> None:
    cluster, stages = drawn(seed)
    n = cluster.num_workers
    if (played := play_counted(cluster, stages, seed)) is None:
        return
    sim, seen, counted = played
    end = seen.of("StageEnd")[-1]
    check_books(seen, n, end["end_ns"])
    assert end["steps"] == sum(end["steps_by"])
    for rank in range(n):
        incarnations = 1 + sum(record["rank"] == rank for record in seen.of("WorkerRejoined"))
        assert counted.came[rank] <= counted.settled[rank] <= counted.came[rank] + incarnations, (
            "a push under way at the end"
        )
    for mail in sim._mail[n:]:
        assert {tag[0] for tag in mail.messages} <= {"failed"}, "nobody forgot a message"
