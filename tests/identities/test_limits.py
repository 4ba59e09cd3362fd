"""Methods that become each other at their limits, with momentum and weight decay.

Three kinds of limits: equal bits, times and counts (SAME), equal bits (BITS), and equal to rounding
because sums are taken in another order (CLOSE).
"""

import pytest
import torch

from tests.support import Ran, simulated

SAME, BITS, CLOSE = "same", "bits", "close"
BASE = (
    "optimizer.momentum=0.9 optimizer.weight_decay=0.01 optimizer.lr=0.02 stop.steps=48"
    " model.hidden=[16]"
)
EQUAL = "cluster=homogeneous"
ONE = "cluster.compute=[1] cluster.link=null"
TWO = "cluster.compute=[1,2] cluster.link=null"
THREE = "cluster.compute=[1,1,3] cluster.link=null"
THREES = "sync=local_sgd sync.local_steps=3"
SPARSE_STEPS = "outer=nesterov compression=topk compression.ratio=0.2"
RING = "topology=all_reduce"
GOSSIP = "topology=gossip"
ATC = "sync=d_psgd sync.order=atc"
GROUPS = "topology=partial_all_reduce sync.local_steps=3 sync.group_size=4"
COSINE = "schedule=single optimizer.schedule=cosine optimizer.horizon_epochs=2"
FIXED = "sync.local_steps=4"
SINGLE = "sync.local_steps=1"
FALLING = f"sync=local_sgd {FIXED} optimizer.schedule=cosine optimizer.horizon_epochs=1"
PLAN = "planner=dylu schedule=single schedule.h_preset=[4] sync.local_steps=plan"
INSTANT = f"{EQUAL} cluster.exchange_s=0 aggregate=uniform"
FROZEN = (
    "cluster=homogeneous cluster.compute=[1] cluster.exchange_s=0 optimizer.weight_decay=0"
    " dataset.batch_size=8 optimizer.lr=0.2"
)
LATE = f"{THREE} {THREES} stop.steps=31"
STREAM = f"{LATE} {SPARSE_STEPS}"
WHOLE = "overlap=streaming overlap.fragments=1 overlap.delay=0 overlap.alpha=0"
FRAGMENTS = (
    f"{LATE} model.hidden=[16,8] overlap=streaming overlap.fragments=3 overlap.delay=2"
    " outer=nesterov compression=topk stop.steps=52"
)
ALL = "overlap=loscar overlap.share=1 overlap.delay=0"
LEARNERS = (
    "cluster.compute=[1,1,1,3] sync.local_steps=2 outer=nesterov compression=topk stop.steps=64"
)
REGIONS = "sync=async_local_sgd sync.local_steps=2 sync.max_staleness=null stop.steps=64"
GRADIENT_DESCENT = (
    "schedule=single sync=bsp optimizer.momentum=0 optimizer.weight_decay=0 cluster=homogeneous"
    " dataset=quadratic model=linear optimizer.lr=0.8 dataset.partition=interleaved"
    " dataset.batch_size=240 stop.epochs=30"
)
SPARSE = "model.hidden=[16] cluster.num_workers=2 sync.local_steps=3 outer.lr=0.7 stop.steps=24"
PORTS = (
    "cluster=homogeneous cluster.exchange_s=null cluster.bandwidth_mbit_s=20"
    " cluster.server_bandwidth_mbit_s=20 cluster.latency_s=0.002 cluster.step_s=0.03"
    " sync=ssp cluster.compute=[1,2,3,5]"
)
PAPER = "cluster=ashl_paper"
DECAYED = (
    "compression=topk topology.pull_ratio=0.1 aggregate=uniform planner=online overlap=delayed"
    " schedule.h_preset=[1] schedule.r_preset=[0.1] eval.every_commits=10"
)
TOP_K = "compression=topk optimizer.momentum=0"
ADAM = f"{EQUAL} optimizer.lr=0.01 optimizer=adam stop.steps=40 model.hidden=[16]"
SLOW = pytest.mark.slow
# the options that the limit is of, how close it holds, the run, and the run that it equals
LIMITS = [
    ("sync=ssp", SAME, "sync=ssp sync.staleness=null", "sync=asp"),
    ("sync=ssp", CLOSE, "sync=ssp sync.staleness=0", "sync=bsp"),
    ("sync=backup", SAME, "sync=backup sync.backups=0", "sync=bsp"),
    ("sync=local_sgd", CLOSE, f"sync=local_sgd {SINGLE}", "sync=bsp"),
    ("sync=local_sgd", CLOSE, f"sync=local_sgd {SINGLE} {RING}", "sync=bsp"),
    ("", BITS, f"sync=bsp {RING}", "sync=bsp"),
    ("", BITS, f"sync=bsp sync.exchange=difference {RING}", "sync=bsp sync.exchange=difference"),
    ("", BITS, f"sync=local_sgd {FIXED} {RING}", f"sync=local_sgd {FIXED}"),
    ("", CLOSE, "sync=bsp dataset.partition=interleaved dataset.batch_size=8", f"sync=bsp dataset.partition=interleaved dataset.batch_size=32 stop.steps=12 {ONE}"),
    *(("sync=fedbuff", SAME, f"sync=fedbuff sync.buffer=1 {steps} aggregate=uniform aggregate.scale=0.25", f"sync=asp {steps} aggregate=uniform") for steps in (SINGLE, FIXED)),
    ("sync=ringmaster", SAME, "sync=ringmaster sync.max_staleness=null", "sync=asp"),
    ("", SAME, "sync=ringmaster sync.max_staleness=2", "sync=asp aggregate.max_staleness=2"),
    ("sync=async_local_sgd", SAME, f"sync=async_local_sgd {FIXED} sync.max_staleness=null", f"sync=asp {FIXED}"),
    *(("sync=async_local_sgd", SAME, f"sync=async_local_sgd {SINGLE} sync.max_staleness={bound}", f"sync=ringmaster sync.max_staleness={bound}") for bound in (1, 2, 5)),
    ("sync=rennala", SAME, f"{EQUAL} sync=rennala sync.batch=4", f"{EQUAL} sync=bsp"),
    ("planner=dylu", SAME, f"{EQUAL} sync=asp {PLAN}", f"{EQUAL} sync=asp {FIXED}"),
    # Γ/C of exactly four steps, an exchange that takes no time, and no search
    ("sync=adsp", SAME, f"{INSTANT} sync=adsp sync.gamma_s=0.32 sync.commits=4 sync.search_s=null", f"{INSTANT} sync=asp {FIXED}"),
    # four gradients on a frozen model: one large batch with four times the rate, squared
    *(("sync=adsp_ashlrepo", CLOSE, f"{FROZEN} sync=adsp_ashlrepo sync.gamma_s={0.08 * steps} sync.commits=4 sync.floor_s=0.01 sync.search_s=null stop.steps=96", f"{FROZEN} sync=bsp dataset.batch_size={8 * steps} optimizer.lr={0.04 * steps} stop.steps={96 // steps}") for steps in (1, 4)),
    *(("sync=dssp", SAME, f"cluster={cluster} sync=dssp sync.s_low=2 sync.s_high=2", f"cluster={cluster} sync=ssp sync.staleness=2") for cluster in ("mixed", "one_slow")),
    *(
        (option, SAME, f"{EQUAL} {own} {place}", f"{EQUAL} {other} {place}")
        for place in ("topology=parameter_server", RING)
        for option, own, other in (
            ("sync=adacomm", f"sync=adacomm {SINGLE} sync.every_s=0.1", f"sync=local_sgd {SINGLE}"),
            ("sync=adacomm", f"sync=adacomm {FIXED} sync.every_s=1e6", f"sync=local_sgd {FIXED}"),
            ("sync=qsr", f"sync=qsr {FIXED} sync.h_max=4", f"sync=local_sgd {FIXED}"),
            ("sync=qsr", f"sync=qsr {FIXED} sync.alpha=0.01", f"sync=local_sgd {FIXED}"),
            ("sync=cr_psgd", "sync=cr_psgd sync.growth=1 aggregate=samples", "sync=bsp aggregate=samples"),
            ("sync=lb_bsp", "sync=lb_bsp", "sync=bsp"),
            ("sync=lb_bsp", "sync=lb_bsp aggregate=samples", "sync=bsp aggregate=samples"),
        )
    ),
    ("sync=cr_psgd_catalyst", SAME, "sync=cr_psgd_catalyst sync.growth=1 sync.theta=9 sync.budget=1", "sync=bsp"),
    ("sync=cr_psgd_catalyst", BITS, "sync=cr_psgd_catalyst sync.theta=1e-30 sync.budget=100000000", "sync=cr_psgd", SLOW),
    ("", BITS, "experiment=fedpaq optimizer.momentum=0 compression=none", "sync=local_sgd sync.local_steps=10 optimizer.momentum=0", SLOW),
    ("sync=ringleader", SAME, f"sync=ringleader {ONE}", f"sync=bsp {ONE}"),
    ("sync=rescaled_asgd", CLOSE, f"{EQUAL} sync=rescaled_asgd", f"{EQUAL} sync=asp", SLOW),
    ("sync=easgd", CLOSE, f"{ONE} sync=easgd sync.local_steps=3 sync.alpha=0.5", f"{ONE} sync=asp sync.local_steps=3 aggregate.scale=0.5"),
    ("sync=pr_sgd_momentum", CLOSE, f"{RING} sync=pr_sgd_momentum {SINGLE}", f"{RING} sync=bsp"),
    *((f"sync={sync}", CLOSE, f"{GOSSIP} {ONE} sync={sync}", f"{RING} {ONE} sync=local_sgd {SINGLE}") for sync in ("d_psgd", "ad_psgd", "hop", "d_admm")),
    ("sync=sgp", BITS, f"{GOSSIP} topology.graph=one_peer_exponential sync=sgp", f"{GOSSIP} topology.graph=one_peer_exponential {ATC}"),
    ("sync=relay_sum", CLOSE, f"{GOSSIP} {TWO} sync=relay_sum", f"{TWO} sync=bsp"),
    ("sync=choco", CLOSE, f"{GOSSIP} sync=choco sync.gamma=1", f"{GOSSIP} {ATC}"),
    # equal workers, so that all are at the same iteration when the run ends
    ("sync=hop", CLOSE, f"{GOSSIP} {EQUAL} sync=hop sync.staleness=0 sync.backups=0", f"{GOSSIP} {EQUAL} sync=d_psgd sync.order=awc"),
    ("sync=gossip_pga", SAME, f"{GOSSIP} sync=gossip_pga sync.period=null", f"{GOSSIP} {ATC}"),
    ("sync=gossip_pga", CLOSE, f"{GOSSIP} sync=gossip_pga sync.period=1 sync.local_steps=2", f"{RING} sync=local_sgd sync.local_steps=2 aggregate=uniform", SLOW),
    *((f"topology=partial_all_reduce sync=ripples_{sync}", SAME, f"{COSINE} sync=ripples_{sync} {GROUPS}", f"{COSINE} {RING} {THREES}") for sync in ("random", "first_come")),
    ("topology=partial_all_reduce", SAME, f"{COSINE} sync=ripples_smart sync.inter_intra=false {GROUPS}", f"{COSINE} {RING} {THREES}"),
    ("overlap=streaming", SAME, f"{STREAM} {RING} {WHOLE}", f"{STREAM} {RING}"),
    ("overlap=streaming", SAME, f"{STREAM} topology.pull_ratio=0.3 {WHOLE}", f"{STREAM} topology.pull_ratio=0.3"),
    ("overlap=loscar", SAME, f"{LATE} {RING} {ALL}", f"{LATE} {RING}"),
    ("overlap=loscar", SAME, f"{LATE} {ALL}", LATE),
    ("sync=decoupled", SAME, f"{LEARNERS} sync=decoupled sync.min_learners=4 sync.grace_s=5", f"{LEARNERS} sync=local_sgd"),
    *(("topology=halos", SAME, f"{REGIONS} {more} topology=halos topology.regions=[3,3,3,3]", f"{REGIONS} {more}") for more in ("outer=delayed_nesterov", "compression=topk outer=nesterov outer.lr=0.3")),
    *(
        (f"outer={method}", SAME, f"{place} {FALLING} outer={method} {fields}", f"{place} {FALLING}")
        for place in ("topology=parameter_server", RING)
        for method, fields in (
            ("nesterov", "outer.lr=1 outer.momentum=0"),
            ("heavy_ball", "outer.lr=1 outer.momentum=0"),
            ("slowmo", "outer.alpha=1 outer.beta=0"),
            ("co2", "outer.lr=1 outer.momentum=0"),
            ("delayed_nesterov", "outer.beta=0"),
            ("mla", "outer.lr=1 outer.momentum=0"),
            ("heloco", "outer.lr=1 outer.momentum=0 outer.align_threshold=-1"),
        )
    ),
    ("compression=ef21 compression=econtrol", BITS, f"{EQUAL} sync=bsp optimizer.momentum=0 compression=econtrol compression.ratio=1", f"{EQUAL} sync=bsp optimizer.momentum=0"),
    ("", BITS, f"{RING} {FRAGMENTS}", FRAGMENTS),
    ("topology=sharded_server", SAME, f"{PORTS} topology=sharded_server topology.servers=1", PORTS),
    *(("schedule=post_local", SAME, f"{PAPER} {topology} schedule=post_local schedule.local_steps=1 schedule.switch_epochs=0.5", f"{PAPER} {topology} sync=bsp sync.exchange=difference") for topology in ("topology=parameter_server", RING)),
    ("schedule=ashl_next", SAME, f"{PAPER} schedule=ashl_next schedule.decay_stages=1 eval.every_commits=10", f"{PAPER} schedule=single sync=shl {DECAYED}"),
    ("overlap=eager", BITS, f"{RING} cluster.num_workers=1 {THREES} outer=nesterov overlap=eager", f"{RING} cluster.num_workers=1 {THREES} outer=nesterov"),
    ("overlap=eager", SAME, f"{RING} {THREES} overlap=eager", f"{RING} {THREES} overlap=delayed overlap.local_weight=0.25"),
    ("", BITS, f"{RING} {THREES} overlap=delayed {SPARSE_STEPS}", f"{THREES} overlap=delayed {SPARSE_STEPS}"),
    ("", SAME, f"{THREE} sync=bsp overlap=delayed aggregate.max_staleness=1", f"{THREE} sync=bsp overlap=delayed"),
    ("", BITS, f"{RING} {TOP_K} sync=bsp", f"{TOP_K} sync=bsp"),
    *(("compression=topk", CLOSE, f"{RING} {mode} {TOP_K} compression.ratio=1", f"{RING} {mode} optimizer.momentum=0") for mode in ("sync=bsp", THREES)),
]  # fmt: skip
OTHER_MODELS = [
    ("sync=one_bit_adam schedule=one_bit_adam", BITS, f"{ADAM} schedule=one_bit_adam schedule.warmup_epochs=9", f"{ADAM} sync=bsp {RING}", SLOW),
    ("", BITS, f"experiment=sparse_loco compression.ratio=1 compression.values=fp32 {SPARSE}", f"experiment=diloco outer.momentum=0 {SPARSE}"),
    *(("compression=laq", BITS, f"{GRADIENT_DESCENT} {topology} compression=laq compression.bits=null compression.xi=0", f"{GRADIENT_DESCENT} {topology}") for topology in ("topology=parameter_server", RING)),
]  # fmt: skip


def run(overrides: str) -> Ran:
    return simulated(*overrides.split())


def case(base: str, options: str, how: str, own: str, limit: str, *marks: pytest.MarkDecorator):
    marked = [*marks, *([pytest.mark.limit(*options.split())] if options else [])]
    return pytest.param(how, f"{base} {own}", f"{base} {limit}", id=own, marks=marked)


@pytest.mark.parametrize(
    ("how", "own", "limit"),
    [*(case(BASE, *row) for row in LIMITS), *(case("", *row) for row in OTHER_MODELS)],
)
def test_at_its_limit_it_is_the_other(how: str, own: str, limit: str) -> None:
    own_run, limit_run = run(own), run(limit)
    if how == CLOSE:
        torch.testing.assert_close(own_run.params, limit_run.params, rtol=1e-3, atol=2e-5)
        return
    assert own_run.sha256 == limit_run.sha256
    if how == SAME:
        kept = ("steps", "steps_by", "dropped_by", "commits", "merges", "samples", "stale_max")
        assert own_run.time_ns == limit_run.time_ns
        assert [own_run.end[key] for key in kept] == [limit_run.end[key] for key in kept]


ANY = (
    "sync=bsp",
    "sync=asp",
    "sync=ssp",
    "sync=backup",
    "sync=local_sgd",
    "sync=fedbuff sync.buffer=3",
    "sync=ringmaster sync.max_staleness=3",
    "sync=rennala sync.batch=5",
    "sync=async_local_sgd sync.local_steps=3 sync.max_staleness=9",
    "sync=asp sync.local_steps=plan planner=dylu schedule=single schedule.h_preset=[4]"
    " aggregate=uniform outer=delayed_nesterov",
    "topology=gossip sync=d_psgd",
    "topology=gossip sync=ad_psgd",
    "topology=partial_all_reduce schedule=single sync=ripples_random",
    "topology=partial_all_reduce schedule=single sync=ripples_smart",
)


@pytest.mark.parametrize("mode", ANY)
def test_all_costs_times_an_integer(mode: str) -> None:
    """The tally is multiplied and nothing else changes, for asynchronous modes too."""
    once, thrice = (
        run(
            f"{BASE} {mode} cluster.step_s={0.012 * factor} cluster.exchange_s={0.0072 * factor}"
            f" cluster.server_step_s={0.001 * factor}"
        )
        for factor in (1, 3)
    )
    assert thrice.time_ns == 3 * once.time_ns
    assert thrice.sha256 == once.sha256
