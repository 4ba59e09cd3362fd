"""The golden set: runs with outcomes recorded to the bit, so that every effect of a change of the
code shows.

`golden.json` has for each run its sent bytes, its duration, the classes of every nanosecond of
every worker and its final model. `curves.json` has the progress of a few runs. A refactoring passes
with both files untouched: same bits, same bytes, same trace. `python -m pytest tests/golden` runs
most of it, with `-m ""` all of it. After a deliberate change run

python -m pytest tests/golden -n 0 --rewrite-golden

Then look at the difference line by line, and give the reason in CHANGELOG.md. A new mechanism gets
a row here.
"""

from __future__ import annotations

from dataclasses import dataclass

ALWAYS = ("dataset=digits", "stop.steps=72")  # before the line of each run
SMALL = ("model=mlp", "model.hidden=[16]")  # where the line names no model


@dataclass(frozen=True)
class Row:
    """One run, as its line of overrides."""

    line: str
    # bytes or times may hang on the bits of floats: sizes by value, a stage that ends by loss
    by_bits: bool = False
    processes: str | None = None  # also on real processes, which must give the same: quick or slow
    twin: bool = False  # much like a row beside it, so that only `-m slow` or `-m ""` runs it

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*ALWAYS, *(() if "model=" in self.line else SMALL), *self.line.split())

    @property
    def learns(self) -> bool:
        return "runtime.gradients=false" not in self.line


PLAIN = "optimizer.momentum=0 optimizer.weight_decay=0"  # for rules that take steps of their own
RING = "topology=all_reduce"
THREES = f"{RING} sync=local_sgd sync.local_steps=3"
GOSSIP = "topology=gossip"
GROUPS = "topology=partial_all_reduce schedule=single"
SLICED = "overlap=priority overlap.slice=300 overlap.credit=2"
LINKS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.001"
PORTS = f"{LINKS} cluster.server_bandwidth_mbit_s=30"
NODES = f"{LINKS} cluster.node=[0,0,1,1] cluster.intra_node_bandwidth_mbit_s=200"
PAPER = "cluster=ashl_paper"
SLOW = "cluster=one_slow"
EIGHT = "cluster=homogeneous cluster.compute=[1,1,1,1,2,1,1.5,3]"
COSINE = "optimizer.schedule=cosine stop.steps=null"
TIMED = "runtime.gradients=false"
BRIEF = (  # for codecs
    "optimizer.momentum=0 schedule=single cluster=homogeneous cluster.compute=[1,1,2]"
)


def by_server() -> dict[str, Row]:
    """Every sync mode that a server can hold."""
    return {
        "bsp": Row("sync=bsp", processes="quick"),
        "bsp-difference": Row("sync=bsp sync.exchange=difference", processes="slow", twin=True),
        "backup": Row("sync=backup"),
        "backup-difference": Row(
            "sync=backup sync.exchange=difference cluster=one_slow", twin=True
        ),
        "local-sgd": Row("sync=local_sgd sync.local_steps=4", processes="quick"),
        "local-sgd-planned": Row(
            "sync=local_sgd sync.local_steps=plan schedule.h_preset=[3]",
            twin=True,
            processes="quick",
        ),
        "pr-sgd-momentum": Row("sync=pr_sgd_momentum sync.local_steps=4", processes="slow"),
        "cr-psgd": Row("sync=cr_psgd sync.growth=1.3 aggregate=samples", processes="slow"),
        "cr-psgd-catalyst": Row(
            "sync=cr_psgd_catalyst sync.growth=1.5 sync.budget=600", processes="slow"
        ),
        "easgd": Row("sync=easgd sync.local_steps=2"),
        "halos": Row(
            f"topology=halos sync=async_local_sgd sync.local_steps=2 topology.updates=4 {NODES}"
        ),
        "sharded-server": Row(f"topology=sharded_server topology.servers=3 sync=ssp {PORTS}"),
        "sharded-topk": Row(
            "topology=sharded_server topology.partition_by=layers schedule=post_local"
            f" schedule.switch_epochs=0.5 compression=topk stop.steps=120 {PORTS}",
            processes="slow",
        ),
        "rescaled-asgd": Row(f"sync=rescaled_asgd sync.local_steps=2 {SLOW}"),
        "ringleader": Row(f"sync=ringleader {SLOW}"),
        "ssp": Row("sync=ssp"),
        "ssp-unbounded-planned": Row(
            "sync=ssp sync.staleness=null sync.local_steps=plan schedule.h_preset=[2]", twin=True
        ),
        "asp": Row("sync=asp"),
        "dssp": Row(f"sync=dssp sync.s_low=1 sync.s_high=6 {SLOW}"),
        "adacomm": Row("sync=adacomm sync.every_s=0.3 stop.steps=150", by_bits=True),
        "adsp": Row(
            "sync=adsp aggregate=uniform sync.gamma_s=0.3 sync.search_s=2 stop.steps=200",
            by_bits=True,
        ),
        "adsp-ashlrepo": Row(
            "sync=adsp_ashlrepo aggregate=uniform sync.gamma_s=0.3 sync.search_s=2 stop.steps=200",
            by_bits=True,
        ),
        "ahl": Row("sync=ahl schedule.h_preset=[4]"),
        "shl": Row(f"sync=shl schedule.h_preset=[2] {SLOW}"),
        "asylpg": Row(f"sync=asylpg compression=grid model=linear {PLAIN}", by_bits=True),
        "asylpg-dense": Row(
            f"sync=asylpg sync.mu=null sync.l1=0.001 sync.epoch_steps=20 {PLAIN}", twin=True
        ),
        "spy": Row(f"sync=spy model=linear sync.l1=0.01 {PLAIN}", by_bits=True),
        "spy-minibatch": Row(
            f"sync=spy sync.estimator=minibatch sync.share=0.5 {PLAIN}", by_bits=True, twin=True
        ),
        "async-local-sgd": Row("sync=async_local_sgd sync.max_staleness=24"),
        "fedbuff": Row(
            "sync=fedbuff sync.buffer=3 sync.local_steps=2 aggregate=uniform"
            " aggregate.staleness_discount=0.5"
        ),
        "decoupled": Row("sync=decoupled sync.local_steps=2 sync.grace_s=0.01 outer=nesterov"),
        "lb-bsp": Row("sync=lb_bsp dataset.partition=dirichlet dataset.alpha=0.5"),
        "lb-bsp-jitter": Row(
            "sync=lb_bsp sync.alpha=1 aggregate=samples cluster.jitter=0.2", twin=True
        ),
        "qsr": Row(f"sync=qsr sync.alpha=0.05 {COSINE} stop.epochs=3"),
        "server-wfbp": Row(f"sync=bsp overlap=wfbp {LINKS}", processes="slow"),
        "server-tictac": Row(
            f"sync=bsp overlap=tictac {LINKS} cluster.compute=[1,1,2]", processes="slow"
        ),
        "server-slices": Row(
            f"sync=bsp overlap=slices overlap.slice=300 {PORTS}", processes="slow"
        ),
        "server-priority": Row(f"sync=bsp {SLICED} {PORTS}", processes="quick"),
        "rennala": Row("sync=rennala sync.batch=5"),
        "ringmaster": Row(f"sync=ringmaster sync.max_staleness=3 {SLOW}"),
    }


def by_sums() -> dict[str, Row]:
    """Sync modes that meet in an all-reduce."""
    return {
        "ring-bsp": Row(f"{RING} sync=bsp", processes="quick"),
        "ring-bsp-difference": Row(
            f"{RING} sync=bsp sync.exchange=difference optimizer.momentum=0.5"
        ),
        "ring-bsp-links": Row(f"{RING} sync=bsp {LINKS}", twin=True),
        "ring-local-sgd": Row(f"{RING} sync=local_sgd sync.local_steps=4", processes="slow"),
        "ring-pr-sgd-momentum": Row(
            f"{RING} sync=pr_sgd_momentum sync.local_steps=4 outer=nesterov", processes="slow"
        ),
        "ring-local-sgd-planned": Row(
            f"{RING} sync=local_sgd sync.local_steps=plan schedule.h_preset=[2] {NODES}"
        ),
        "ring-lb-bsp": Row(f"{RING} sync=lb_bsp cluster.compute=[1,1,2,3] {LINKS}"),
        "ring-adacomm": Row(
            f"{RING} sync=adacomm sync.local_steps=8 sync.every_s=0.3 stop.steps=150", by_bits=True
        ),
        "ring-qsr": Row(
            f"{RING} sync=qsr sync.alpha=0.05 {COSINE} stop.epochs=3", processes="slow"
        ),
        "ring-catalyst": Row(
            f"{RING} sync=cr_psgd_catalyst sync.growth=1.5 sync.budget=600", processes="slow"
        ),
        "ring-wfbp": Row(f"{RING} sync=bsp overlap=wfbp {LINKS}", processes="quick"),
        "ring-merged": Row(
            f"{RING} sync=bsp overlap=merged overlap.plan=[2] {LINKS} {SLOW}", twin=True
        ),
        "ring-zero-one-adam": Row(
            f"{RING} sync=zero_one_adam compression=one_bit optimizer=adam optimizer.lr=0.01"
            " sync.freeze_step=8 sync.update_scaler=3 sync.local_step_scaler=4"
            " sync.local_step_clipper=4 stop.steps=120",
            processes="slow",
        ),
        "ring-priority": Row(
            f"{RING} sync=bsp {SLICED} cluster.compute=[1,1,2] {LINKS}", processes="quick"
        ),
        "ring-dear": Row(
            f"{RING} sync=bsp overlap=dear cluster.compute=[1,1,2] {LINKS}", processes="quick"
        ),
        "ring-layerwise": Row(
            f"{RING} sync=bsp overlap=layerwise compression=topk {LINKS}", processes="slow"
        ),
        "ring-late": Row(
            f"{RING} sync=bsp optimizer.momentum=0.9 overlap=delayed {SLOW}", processes="quick"
        ),
        "ring-eager": Row(
            f"{THREES} overlap=eager compression=topk outer=nesterov", processes="slow"
        ),
        "ring-late-steps": Row(
            f"{THREES} overlap=delayed compression=topk outer=co2", processes="slow"
        ),
        "ring-anchor": Row(
            f"{RING} sync=local_sgd overlap=overlap_local_sgd outer=slowmo outer.beta=0.7 {LINKS}",
            processes="slow",
        ),
        "ring-streaming": Row(
            f"{THREES} overlap=streaming overlap.fragments=2 outer=nesterov {LINKS}",
            processes="quick",
        ),
        "ring-loscar": Row(f"{THREES} overlap=loscar aggregate=uniform {LINKS}", processes="slow"),
        "ring-bcd": Row(f"{RING} sync=bsp optimizer=bcd", processes="slow"),
    }


def by_gossip() -> dict[str, Row]:
    """Every gossip mode, and every kind of graph."""
    hop = f"{GOSSIP} sync=hop sync.backups=1 sync.max_lead=4 topology.graph=complete"
    return {
        "d-psgd": Row(f"{GOSSIP} sync=d_psgd", processes="quick"),
        "d-psgd-atc-torus": Row(
            f"{GOSSIP} sync=d_psgd sync.order=atc topology.graph=torus cluster=four_nodes"
        ),
        "d-psgd-regular": Row(
            f"{GOSSIP} sync=d_psgd sync.local_steps=2 topology.graph=random_regular {EIGHT}",
            twin=True,
        ),
        "gossip-pga": Row(f"{GOSSIP} sync=gossip_pga sync.period=4", processes="slow"),
        "d-psgd-nodes": Row(f"{GOSSIP} sync=d_psgd {NODES}", twin=True),
        "sgp": Row(f"{GOSSIP} sync=sgp topology.graph=one_peer_exponential", processes="slow"),
        "sgp-overlap": Row(
            f"{GOSSIP} sync=sgp sync.overlap=1 topology.graph=exponential {EIGHT}",
            twin=True,
            processes="slow",
        ),
        "choco-topk": Row(
            f"{GOSSIP} sync=choco compression=topk compression.ratio=0.1 optimizer.momentum=0",
            processes="quick",
        ),
        "choco-sign": Row(
            f"{GOSSIP} sync=choco sync.local_steps=2 compression=sign sync.gamma=0.2"
        ),
        "matcha": Row(f"{GOSSIP} sync=matcha topology.graph=complete"),
        "noloco": Row(f"{GOSSIP} sync=noloco sync.local_steps=6 topology.graph=complete"),
        "relay-sum": Row(f"{GOSSIP} sync=relay_sum topology.graph=star"),
        "d-admm": Row(f"{GOSSIP} sync=d_admm optimizer.momentum=0", processes="slow"),
        "d-admm-late": Row(
            f"{GOSSIP} sync=d_admm sync.delay=2 sync.barrier=1 optimizer.momentum=0"
            " cluster.jitter=0.3",
            twin=True,
        ),
        "ad-psgd": Row(f"{GOSSIP} sync=ad_psgd"),
        "ad-psgd-waits": Row(
            f"{GOSSIP} sync=ad_psgd sync.overlap=false topology.graph=complete {PORTS}", twin=True
        ),
        "swarm-bits": Row(f"{GOSSIP} sync=swarm sync.bits=8 {SLOW}", twin=True),
        "hop-jump": Row(f"{hop} sync.skip_lead=3 {SLOW} stop.steps=200", twin=True),
        "hop": Row(f"{GOSSIP} sync=hop {SLOW}"),
        "hop-backup": Row(f"{hop} cluster.jitter=0.3", twin=True),
        "swarm": Row(f"{GOSSIP} sync=swarm topology.graph=complete"),
        "swarm-waits": Row(
            f"{GOSSIP} sync=swarm sync.overlap=false sync.local_steps=2 {SLOW} {LINKS}", twin=True
        ),
    }


def by_groups() -> dict[str, Row]:
    """Partial all-reduce."""
    return {
        "ripples-static": Row(
            f"{GROUPS} sync=ripples_static cluster=homogeneous", processes="quick"
        ),
        "ripples-static-nodes": Row(
            f"{GROUPS} sync=ripples_static sync.local_steps=2 cluster=four_nodes_2x", twin=True
        ),
        "ripples-smart": Row(f"{GROUPS} sync=ripples_smart topology.workers_per_node=2"),
        "ripples-smart-nodes": Row(
            f"{GROUPS} sync=ripples_smart sync.local_steps=2 cluster=four_nodes_5x", twin=True
        ),
        "ripples-random": Row(f"{GROUPS} sync=ripples_random {NODES}"),
        "ripples-first-come": Row(f"{GROUPS} sync=ripples_first_come {EIGHT}"),
    }


def codecs() -> dict[str, Row]:
    """Codec families, through a server and by all-reduce, and what goes around them."""
    bsp, asp, ring = f"{BRIEF} sync=bsp", f"{BRIEF} sync=asp", f"{BRIEF} {RING} sync=bsp"
    corrected = f"{bsp} compression=topk compression.momentum=0.9 compression.clip_norm=1"
    return {
        "topk": Row(f"{asp} compression=topk"),
        "topk-corrected": Row(corrected),
        "topk-warm-up": Row(f"{bsp} compression=topk compression.warmup_epochs=1 stop.steps=100"),
        "topk-accordion": Row(
            f"{bsp} compression=topk compression.critical_ratio=0.3 stop.steps=null stop.epochs=4",
            by_bits=True,
        ),
        "topk-layers-int4": Row(
            f"{ring} compression=topk compression.per_layer=true compression.values=int4"
        ),
        "topk-golomb-natural": Row(
            f"{bsp} compression=topk compression.indices=golomb compression.values=natural",
            by_bits=True,
            twin=True,
        ),
        "topk-both-ways": Row(
            f"{asp} compression=topk compression.ratio=0.1 topology.pull_ratio=0.1 {PORTS}"
        ),
        "topk-local-sgd": Row(f"{BRIEF} {THREES} compression=topk", twin=True),
        "ring-topk": Row(f"{ring} compression=topk", processes="slow"),
        "random-mask": Row(
            f"{ring} compression=random_mask compression.ratio=0.2", processes="slow"
        ),
        "random-k": Row(f"{ring} compression=random_k", processes="slow"),
        "random-k-written": Row(
            f"{bsp} compression=random_k compression.indices=bitmap compression.values=bf16",
            twin=True,
        ),
        "subsampling": Row(f"{ring} compression=subsampling compression.ratio=0.25"),
        "random-dropping": Row(f"{bsp} compression=random_dropping", by_bits=True, twin=True),
        "threshold": Row(f"{bsp} compression=threshold", by_bits=True),
        "single-threshold": Row(
            f"{ring} compression=single_threshold", by_bits=True, twin=True, processes="slow"
        ),
        "adacomp": Row(f"{bsp} compression=adacomp", by_bits=True),
        "sbc": Row(f"{asp} compression=sbc", by_bits=True, twin=True),
        "stc": Row(f"{ring} compression=stc", by_bits=True),
        "dryden-lloyd": Row(
            f"{bsp} compression=dryden compression.levels=lloyd", by_bits=True, twin=True
        ),
        "strom": Row(f"{bsp} compression=strom compression.threshold=0.05", by_bits=True),
        "variance": Row(f"{ring} compression=variance", by_bits=True),
        "block-coordinate": Row(f"{ring} compression=block_coordinate compression.blocks=4"),
        "sparse-loco": Row(f"{ring} compression=sparse_loco compression.chunk=256"),
        "demo": Row(f"{ring} compression=demo", twin=True),
        "cast": Row(f"{ring} compression=cast compression.dtype=fp16"),
        "qsgd": Row(f"{asp} compression=qsgd compression.bucket=128"),
        "qsgd-elias": Row(
            f"{ring} compression=qsgd compression.norm=max compression.entropy=elias", by_bits=True
        ),
        "qsgd-feedback": Row(
            f"{bsp} compression=qsgd compression.error_feedback=true compression.feedback_gain=0.5 "
            "compression.levels=15 compression.bucket=64",
            twin=True,
        ),
        "natural": Row(f"{asp} compression=natural"),
        "uniform": Row(f"{bsp} compression=uniform compression.per_layer=true", twin=True),
        "rotated-pco": Row(f"{bsp} compression=rotated compression.entropy=pco", by_bits=True),
        "terngrad": Row(f"{bsp} compression=terngrad compression.clip_sigmas=2.5"),
        "terngrad-shared": Row(
            f"{ring} compression=terngrad compression.shared_scale=true", twin=True
        ),
        "sign": Row(f"{asp} compression=sign"),
        "sign-majority": Row(
            f"{ring} compression=sign compression.scale=none compression.error_feedback=false "
            "compression.vote=majority compression.beta=0.9 optimizer.lr=0.001"
        ),
        "one-bit": Row(f"{ring} compression=one_bit compression.per=column"),
        "grid": Row(f"{bsp} compression=grid compression.bits=4"),
        "atomo": Row(f"{bsp} compression=atomo compression.atoms=singular", by_bits=True),
        "power-sgd": Row(f"{ring} compression=power_sgd", processes="quick"),
        "power-sgd-server": Row(f"{bsp} compression=power_sgd compression.rank=1", twin=True),
        "gtopk": Row(f"{ring} compression=gtopk", processes="slow"),
        "sketch-sgd": Row(f"{ring} compression=sketch_sgd", processes="slow"),
        "fetch-sgd": Row(f"{bsp} compression=fetch_sgd", processes="slow"),
    }


def differences() -> dict[str, Row]:
    """Codecs that send what has changed since a worker's last message."""
    bsp, asp, ring = f"{BRIEF} sync=bsp", f"{BRIEF} sync=asp", f"{BRIEF} {RING} sync=bsp"
    return {
        "diana": Row(f"{bsp} compression=diana"),
        "diana-svrg": Row(
            f"{ring} compression=diana compression.estimator=svrg compression.quantizer=natural",
            twin=True,
        ),
        "ef21": Row(f"{asp} compression=ef21"),
        "ef21-sgdm": Row(
            f"{ring} compression=ef21 compression.compressor=natural compression.beta=0.9",
            twin=True,
        ),
        "econtrol": Row(f"{ring} compression=econtrol"),
        "laq": Row(f"{bsp} compression=laq model=linear", by_bits=True, processes="quick"),
        "lag": Row(
            f"{ring} compression=laq compression.bits=null model=linear",
            by_bits=True,
            twin=True,
            processes="slow",
        ),
    }


def stages() -> dict[str, Row]:
    """Every schedule, every planner, and what happens at a border."""
    soon = "schedule.loss_switch=1.5 schedule.profile_steps=3 stop.steps=160"
    swings = "optimizer.lr=1 eval.every_commits=8 stop.steps=120"
    return {
        "ashl": Row(f"schedule=ashl {soon} {PAPER}", by_bits=True),
        "ashl-declared": Row(
            "schedule=ashl schedule.profile_steps=0 schedule.loss_switch=0.001 stop.steps=200"
        ),
        "ashl-shards": Row(
            f"schedule=ashl {soon} dataset.partition=plan compression.error_feedback=false {PORTS}",
            by_bits=True,
            twin=True,
        ),
        "ashl-plus": Row(f"schedule=ashl_plus schedule.shl_scale=1 {soon}", by_bits=True),
        "ashl-plus-drift": Row(
            f"schedule=ashl_plus schedule.shl_scale=1 {soon}"
            " cluster.events=[{time_s:0.4,worker:0,compute:4}]",
            by_bits=True,
            twin=True,
        ),
        "ashl-next": Row(f"schedule=ashl_next schedule.decay_stages=3 {swings}", by_bits=True),
        "falling": Row(
            "schedule=decay_on_rise schedule.decay_stages=3 sync=local_sgd sync.local_steps=4"
            f" {swings}",
            by_bits=True,
        ),
        "ashl-reversed": Row(f"schedule=ashl_reversed {soon}", by_bits=True),
        "ashl-reversed-reset": Row(
            f"schedule=ashl_reversed schedule.momentum=reset schedule.residual=drop {soon}",
            by_bits=True,
            twin=True,
        ),
        "sync-first": Row(
            f"schedule=sync_first schedule.warmup_epochs=0.5 {soon} stop.steps=220", by_bits=True
        ),
        "qsr-tail": Row(
            f"schedule=qsr_tail schedule.shl_epochs=1 {soon} {COSINE} stop.epochs=6"
            " cluster=homogeneous",
            by_bits=True,
        ),
        "one-bit-adam": Row(
            "schedule=one_bit_adam schedule.warmup_epochs=1 optimizer.lr=0.01 stop.steps=120",
            processes="slow",
        ),
        "post-local": Row(
            "schedule=post_local schedule.switch_epochs=1 schedule.local_steps=4 stop.steps=120"
        ),
        "profile": Row("schedule=profile_only cluster.jitter=0.1"),
        "plan-paper": Row(
            f"sync=ssp sync.local_steps=plan schedule.h_preset=[4] planner=paper {PAPER}"
        ),
        "plan-paper-ratio": Row(
            "sync=asp sync.local_steps=plan schedule.h_preset=[4] schedule.r_preset=[0.1]"
            " planner=paper compression=topk",
            twin=True,
        ),
        "plan-balanced": Row(
            f"sync=asp sync.local_steps=plan schedule.h_preset=[4] planner.h_max=16 {PAPER}"
        ),
        "plan-dylu": Row(
            "sync=asp sync.local_steps=plan schedule.h_preset=[8] planner=dylu stop.steps=160"
        ),
        "plan-online": Row(
            "sync=asp sync.local_steps=plan schedule.h_preset=[2] planner=online stop.steps=240 "
            "cluster.events=[{time_s:0.5,worker:1,compute:6},{time_s:1,worker:0,link:5}]"
        ),
        "plan-goodput": Row(
            "schedule=ashl planner=goodput planner.smoothing=0.5 stop.steps=240", by_bits=True
        ),
    }


def learning() -> dict[str, Row]:
    """Aggregation rules, optimizers, models, partitions and seeds."""
    late = f"sync=asp {SLOW}"
    return {
        "samples": Row("sync=asp aggregate=samples aggregate.staleness_discount=0.5"),
        "uniform-clipped": Row(
            "sync=local_sgd sync.local_steps=3 aggregate=uniform aggregate.clip_norm=0.05"
        ),
        "data-share": Row(
            "sync=ssp aggregate=data_share dataset.partition=plan aggregate.max_staleness=3"
        ),
        "mean-data-share": Row(
            "sync=bsp aggregate.weights=data_share aggregate.scale=0.7", twin=True
        ),
        "fednova": Row("sync=asp sync.local_steps=plan schedule.h_preset=[3] aggregate=fednova"),
        "outer-nesterov": Row(
            "sync=local_sgd sync.local_steps=4 outer=nesterov", processes="quick"
        ),
        "outer-nesterov-ring": Row(
            f"{RING} sync=local_sgd sync.local_steps=4 outer=nesterov", processes="slow"
        ),
        "outer-heavy-ball": Row(
            "sync=bsp sync.exchange=difference outer=heavy_ball compression=topk"
        ),
        "outer-slowmo": Row(
            f"{RING} sync=local_sgd outer=slowmo optimizer.schedule=linear"
            " optimizer.horizon_epochs=1",
            processes="slow",
        ),
        "outer-co2": Row(
            "sync=ssp overlap=delayed outer=co2 outer.penalty=2 outer.clip=0.05 compression=topk"
        ),
        "outer-mla": Row(f"{late} aggregate=uniform outer=mla optimizer.momentum=0"),
        "outer-heloco": Row(f"{late} aggregate=uniform outer=heloco optimizer.momentum=0 seed=3"),
        "outer-adam": Row(
            "sync=fedbuff sync.buffer=3 sync.local_steps=2 aggregate=uniform outer=adam"
        ),
        "outer-yogi": Row(
            f"{TIMED} sync=fedbuff sync.buffer=3 sync.local_steps=2 aggregate=uniform outer=yogi"
        ),
        "outer-border": Row(
            "schedule=post_local schedule.switch_epochs=1 schedule.momentum=reset outer=nesterov"
            " stop.steps=120",
            twin=True,
        ),
        "delayed-nesterov": Row(
            f"{late} aggregate=uniform outer=delayed_nesterov outer.buffer=2 optimizer.momentum=0"
        ),
        "delayed-nesterov-spread": Row(
            f"{late} aggregate=uniform aggregate.staleness_discount=1 outer=delayed_nesterov"
            " outer.spread=0.25 optimizer.momentum=0",
            twin=True,
        ),
        "adam": Row(f"{RING} sync=local_sgd sync.local_steps=4 optimizer=adam optimizer.lr=0.01"),
        "muon": Row(
            f"{RING} sync=local_sgd sync.local_steps=4 optimizer=muon model=mlp"
            " model.hidden=[16,16]",
            processes="slow",
        ),
        "adamw-linear-decay": Row(
            "sync=ssp optimizer=adamw optimizer.schedule=linear stop.steps=null stop.epochs=2"
        ),
        "dirichlet": Row(
            "sync=local_sgd dataset.partition=dirichlet dataset.alpha=0.3 seed=3", twin=True
        ),
        "interleaved-seconds": Row(
            "sync=ssp dataset.partition=interleaved stop.steps=null stop.seconds=0.6 seed=2"
        ),
        "cnn": Row("sync=bsp model=cnn model.channels=[4,8] stop.steps=24"),
        "ssp-seeded": Row(
            "sync=ssp cluster.jitter=0.3 cluster.events=[{time_s:0.5,worker:1,compute:6}] seed=7"
        ),
    }


def timing() -> dict[str, Row]:
    """Some tens of workers that learn nothing."""
    some = (
        f"{TIMED} cluster=homogeneous cluster.jitter=0.1"
        f" cluster.compute=[{','.join(['1', '1.5', '2', '4'] * 8)}]"
    )
    return {
        "many-bsp": Row(f"{some} sync=bsp {PORTS} stop.steps=320"),
        "many-asp-topk": Row(f"{some} sync=asp compression=topk {PORTS} stop.steps=480"),
        "many-ring": Row(f"{some} {RING} sync=local_sgd {LINKS} stop.steps=480", twin=True),
        "many-ad-psgd": Row(
            f"{some} {GOSSIP} sync=ad_psgd topology.graph=complete {LINKS} stop.steps=480",
            twin=True,
        ),
        "many-ripples": Row(
            f"{TIMED} {GROUPS} sync=ripples_smart cluster=four_nodes_5x stop.steps=640"
        ),
        "many-local-sgd": Row(
            f"{some} sync=local_sgd sync.local_steps=plan schedule.h_preset=[4] stop.steps=640",
            twin=True,
        ),
    }


RUNS: dict[str, Row] = {
    name: row
    for part in (
        by_server,
        by_sums,
        by_gossip,
        by_groups,
        codecs,
        differences,
        stages,
        learning,
        timing,
    )
    for name, row in part().items()
}
