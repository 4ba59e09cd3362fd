"""Every key of every option in conf/, with a base configuration in which it is legal and a value
other than its own.

A case is one key of one option with one value. `BESIDE` has the settings that an option needs to be
legal and in use. `VALUES` has the values that no rule can derive from type and default. `COUNTS`
has the settings that make a key count if it is an error beside its option's base. `OUTSIDE` has the
keys that a run in virtual time cannot show, each with its reason. `CROSSING` has other base
configurations, in each of which every key of every group is typed.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ashl.config.catalog import catalog, parameters, target, values
from ashl.config.compose import PRESETS
from ashl.config.construct import import_target

ALWAYS = "runtime=sim tracking=none stop.steps=48 run.compression_stats_every=null"
PLAIN = "optimizer.momentum=0 optimizer.weight_decay=0"
RING = "topology=all_reduce"
GOSSIP = "topology=gossip"
GROUPS = "topology=partial_all_reduce"
LINKS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.001"
NODES = f"{LINKS} cluster.node=[0,0,1,1] cluster.intra_node_bandwidth_mbit_s=200"
SLOW = "cluster=one_slow"
FAILS = "cluster.events=[{time_s:0.1,worker:0,fail:true}]"
DRIFT = "stop.steps=240 cluster.events=[{time_s:0.5,worker:1,compute:6},{time_s:1,worker:0,link:5}]"
PLANNED = "sync=asp sync.local_steps=plan schedule.h_preset=[4]"
IMAGES = (
    "dataset=synthetic dataset.num_train=64 dataset.num_test=20 dataset.batch_size=4 sync=bsp"
    " stop.steps=8"
)
SHORT = "dataset.sequence_length=16 dataset.max_mb=0.01 dataset.batch_size=4 sync=bsp stop.steps=8"
TEXT = f"dataset=text {SHORT}"
SOON = "schedule.loss_switch=1.5 schedule.profile_steps=3 stop.steps=160"
ASHL = f"{SOON} cluster=ashl_paper"
LATE = f"sync=asp {SLOW} aggregate=uniform optimizer.momentum=0"
THREES = f"{RING} sync=local_sgd sync.local_steps=3"

BESIDE: dict[str, str] = {
    "model=cnn": IMAGES,
    "model=lenet": IMAGES,
    "model=linear": "sync=bsp",
    "model=mlp": "sync=bsp",
    "model=gpt": TEXT,
    "model=resnet8": IMAGES,
    "model=resnet20": IMAGES,
    "model=resnet18_small": f"{IMAGES} stop.steps=4",
    "task=classification": "sync=bsp",
    "task=language_model": TEXT,
    "task=regression": "dataset=quadratic model=linear sync=bsp optimizer.lr=0.02",
    "dataset=digits": "sync=bsp",
    "dataset=glyphs": "model=linear sync=bsp dataset.num_train=300 dataset.num_test=50",
    "dataset=shuttle": "model=linear sync=bsp",
    "dataset=quadratic": "model=linear sync=bsp optimizer.lr=0.02",
    "dataset=synthetic": "model=linear sync=bsp",
    "dataset=text": SHORT,
    "optimizer=adam": "sync=bsp",
    "optimizer=adamw": "sync=bsp",
    "optimizer=sgd": "sync=bsp",
    "optimizer=muon": TEXT,
    "optimizer=bcd": f"sync=bsp {RING}",
    "topology=all_reduce": "sync=bsp",
    "topology=gossip": "sync=d_psgd",
    "topology=halos": f"sync=async_local_sgd sync.local_steps=2 topology.updates=4 {NODES}",
    "topology=parameter_server": "sync=bsp",
    "topology=partial_all_reduce": f"sync=ripples_smart {NODES}",
    "topology=sharded_server": f"sync=ssp {LINKS}",
    "sync=adacomm": "sync.every_s=0.3 stop.steps=150",
    "sync=adsp": "aggregate=uniform sync.gamma_s=0.3 sync.search_s=2 stop.steps=200",
    "sync=adsp_ashlrepo": "aggregate=uniform sync.gamma_s=0.3 sync.search_s=2 stop.steps=200",
    "sync=asylpg": f"compression=grid {PLAIN}",
    "sync=lb_bsp": "cluster.jitter=0.3",
    "sync=spy": PLAIN,
    "sync=shl": f"schedule.h_preset=[2] {SLOW}",
    "sync=zero_one_adam": (
        f"{RING} compression=one_bit optimizer=adam sync.freeze_step=8 sync.update_scaler=3 "
        "sync.local_step_scaler=4 sync.local_step_clipper=4 stop.steps=120"
    ),
    "sync=qsr": "optimizer.schedule=cosine stop.steps=null stop.epochs=3",
    "sync=async_local_sgd": "sync.local_steps=2",
    "sync=decoupled": "sync.local_steps=2 cluster.jitter=0.3 stop.steps=200",
    "sync=cr_psgd_catalyst": "sync.growth=1.5 sync.budget=600",
    "sync=ringmaster": f"sync.max_staleness=3 {SLOW}",
    "sync=dssp": f"sync.s_low=1 sync.s_high=6 {SLOW} stop.steps=150",
    "sync=gossip_pga": f"{GOSSIP} sync.period=4",
    "sync=hop": f"{GOSSIP} sync.max_lead=4 topology.graph=complete cluster.jitter=0.3 {SLOW}",
    "sync=noloco": f"{GOSSIP} sync.local_steps=6 topology.graph=complete",
    "sync=relay_sum": f"{GOSSIP} topology.graph=star",
    "sync=d_admm": f"{GOSSIP} optimizer.momentum=0 cluster.jitter=0.3",
    "sync=choco": f"{GOSSIP} compression=topk optimizer.momentum=0",
    "sync=matcha": f"{GOSSIP} topology.graph=complete",
    "sync=swarm": GOSSIP,
    "overlap=dear": f"{RING} sync=bsp model.hidden=[8,8] {LINKS}",
    "overlap=eager": f"{THREES}",
    "overlap=delayed": f"{RING} sync=bsp",
    "overlap=layerwise": f"{RING} sync=bsp compression=topk model.hidden=[8,8,8,8] {LINKS}",
    "overlap=loscar": f"{THREES} aggregate=uniform {LINKS}",
    "overlap=merged": f"{RING} sync=bsp model.hidden=[8,8,8,8] {LINKS}",
    "overlap=overlap_local_sgd": f"{RING} sync=local_sgd {LINKS}",
    "overlap=priority": f"sync=bsp model.hidden=[64,64,64] overlap.slice=1000 {LINKS}",
    "overlap=slices": f"sync=bsp {LINKS}",
    "overlap=streaming": f"{THREES} {LINKS}",
    "overlap=tictac": f"sync=bsp model.hidden=[8,8,8,8] {LINKS}",
    "overlap=wfbp": f"sync=bsp {LINKS}",
    "planner=balanced": PLANNED,
    "planner=paper": PLANNED,
    "planner=dylu": PLANNED,
    "planner=goodput": f"schedule=ashl {DRIFT}",
    "planner=online": f"{PLANNED} {DRIFT}",
    "schedule=ashl": ASHL,
    "schedule=ashl_next": (
        "schedule.decay_stages=3 optimizer.lr=1 eval.every_commits=8 stop.steps=120"
    ),
    "schedule=ashl_plus": ASHL,
    "schedule=ashl_reversed": ASHL,
    "schedule=decay_on_rise": (
        "schedule.decay_stages=3 sync=local_sgd sync.local_steps=plan schedule.h_preset=[4] "
        "optimizer.lr=1 eval.every_commits=4 stop.steps=400"
    ),
    "schedule=one_bit_adam": "schedule.warmup_epochs=1 stop.steps=120",
    "schedule=post_local": (
        "schedule.switch_epochs=1 schedule.local_steps=4 stop.steps=120 compression=topk"
    ),
    "schedule=profile_only": "",
    "schedule=qsr_tail": (
        f"schedule.shl_epochs=1 {SOON} optimizer.schedule=cosine stop.steps=null stop.epochs=6"
    ),
    "schedule=single": f"{PLANNED} compression=topk",
    "schedule=sync_first": (
        f"schedule.warmup_epochs=0.5 {SOON} stop.steps=400 compression=topk"
        " schedule.r_preset=[0.1,0.1]"
    ),
    "runtime=sim": "sync=bsp",
    "outer=co2": "sync=ssp overlap=delayed compression=topk",
    "outer=mla": LATE,
    "outer=heloco": LATE,
    "outer=delayed_nesterov": f"{LATE} aggregate.staleness_discount=1",
    "compression=strom": "sync=bsp optimizer.momentum=0 compression.threshold=0.3",
    "compression=gtopk": f"{RING} sync=bsp optimizer.momentum=0",
    "compression=sketch_sgd": f"{RING} sync=bsp optimizer.momentum=0",
    "compression=laq": "sync=bsp model=linear optimizer.momentum=0 stop.steps=160",
    "compression=atomo": "sync=bsp",
}
for name, graph in (
    ("ad_psgd", ""),
    ("d_psgd", ""),
    ("sgp", " topology.graph=one_peer_exponential"),
):
    BESIDE.setdefault(f"sync={name}", f"{GOSSIP}{graph}")
for name in catalog()["sync"]:
    if name.startswith("ripples"):
        BESIDE.setdefault(f"sync={name}", f"{GROUPS} cluster=homogeneous")
    BESIDE.setdefault(f"sync={name}", "")
for name in catalog()["compression"]:
    BESIDE.setdefault(f"compression={name}", "sync=bsp optimizer.momentum=0")
for name in catalog()["outer"]:
    BESIDE.setdefault(f"outer={name}", "sync=local_sgd sync.local_steps=4")
for name in catalog()["aggregate"]:
    BESIDE.setdefault(f"aggregate={name}", "sync=asp")
for name in catalog()["cluster"]:
    BESIDE.setdefault(f"cluster={name}", "sync=bsp stop.steps=96 runtime.gradients=false")

VALUES: dict[str, str] = {  # by key, or by option and key
    "model.width": "32",
    "model.heads": "2",
    "model.depth": "14",
    "task.ignore_index": "3",
    "dataset.tokenizer": "bytes",
    "dataset.alpha": "0.5",
    "optimizer.others": "[head]",
    "optimizer.horizon_epochs": "20",
    "topology.graph": "complete",
    "topology.degree": "3",
    "topology.workers_per_node": "3",
    "topology.algorithm": "tree",
    "sync.barrier": "1",
    "sync.growth": "1.3",
    "sync.loss_target": "3.0",
    "sync.rise": "0.01",
    "sync.search_s": "0.3",
    "sync=hop sync.max_lead": "2",
    "sync.threshold": "1",
    "sync.group_size": "2",
    "sync=ripples_smart sync.group_size": "4",
    "sync.min_learners": "3",
    "sync.s_low": "2",
    "sync.decay": "0.1",
    "runtime.precision": "bf16",
    "runtime.min_workers": "4",
    "sync.staleness": "0",
    "sync.h_max": "5",
    "sync.max_staleness": "2",
    "sync=async_local_sgd sync.local_steps": "3",
    "sync=async_local_sgd sync.max_staleness": "3",
    "sync=decoupled sync.local_steps": "3",
    "sync.bits": "8",
    "sync.local_steps": "2",
    "overlap.slice": "100",
    "overlap.credit": "2",
    "overlap.ratio": "adaptive",
    "overlap=merged overlap.plan": "bytes",
    "overlap=priority overlap.plan": "bytes",
    "overlap.fragments": "1",
    "overlap.delay": "2",
    "outer.clip": "0.001",
    "outer.max_shrink": "0.01",
    "outer.spread": "0.1",
    "planner.h_max": "3",
    "planner.alpha": "1.0",
    "planner.threshold": "0.01",
    "planner.cooldown_commits": "20",
    "compression.memory": "1",
    "compression.max_age": "1",
    "compression.clip_norm": "0.001",
    "compression.bucket": "32",
    "compression.bits": "4",
    "compression=variance compression.alpha": "2.0",
    "schedule.loss_switch": "0.05",
    "schedule.decay_stages": "1",
    "schedule.decay_factor": "0.95",
    "schedule=decay_on_rise schedule.loss_switch": "[0.9,0.5]",
    "schedule=ashl_next schedule.loss_switch": "[0.9,0.5]",
    "schedule=single schedule.h_preset": "[8]",
    "schedule=decay_on_rise schedule.h_preset": "[8]",
    "schedule=single schedule.r_preset": "[0.5]",
    "schedule=ashl_next schedule.r_preset": "[0.5]",
    "schedule=one_bit_adam schedule.warmup_epochs": "0.5",
    "schedule=sync_first schedule.warmup_epochs": "0.2",
    "schedule.h_max": "4",
    "schedule.staleness": "0",
    "schedule.r_preset": "[0.5,0.05]",
    "cluster.events": "[{time_s:0.1,worker:0,compute:4}]",
    "cluster.churn": "{mtbf_s:1,mttr_s:0.2}",
    "cluster.node": "[0,0,0,1]",
    "cluster.intra_node_bandwidth_mbit_s": "5",
    "cluster.link": "[3,1,1,1]",
    "cluster.num_workers": "2",
    "aggregate.staleness_discount": "0.5",
    "aggregate.clip_norm": "0.001",
    "aggregate.max_staleness": "1",
}
COUNTS: dict[str, str] = {  # by key, or by option and key
    "dataset.alpha": "dataset.partition=dirichlet dataset.alpha=0.9",
    "dataset.partition": PLANNED,
    "dataset.epochs": "stop.steps=null",
    "optimizer.schedule": "optimizer.horizon_epochs=1",
    "optimizer.horizon_epochs": "optimizer.schedule=cosine optimizer.horizon_epochs=2",
    "topology.degree": (
        "topology.graph=random_regular cluster=homogeneous cluster.compute=[1,1,1,1,2,1,1.5,3]"
    ),
    "topology.pull_ratio": "compression=topk",
    "topology.algorithm": "cluster.node=[0,0,1,1]",
    "sync.delay": "sync.barrier=1",
    "sync.barrier": "sync.delay=2",
    "sync.max_lead": "sync.backups=1",
    "overlap.local_weight": "sync=local_sgd",
    "overlap.max_ratio": "overlap.ratio=adaptive",
    "aggregate.momentum": "sync.local_steps=plan schedule.h_preset=[3]",
    "cluster.compress_s": "compression=topk",
    "cluster.failure_detection_s": "cluster.churn={mtbf_s:1,mttr_s:0.2}",
    "cluster.bandwidth_mbit_s": LINKS,
    "cluster.latency_s": LINKS,
    "cluster.server_bandwidth_mbit_s": LINKS,
    "cluster.intra_node_bandwidth_mbit_s": "topology=all_reduce",
    "cluster.intra_node_latency_s": "topology=all_reduce",
    "cluster=mixed cluster.intra_node_bandwidth_mbit_s": f"{NODES} topology=all_reduce",
    "cluster=mixed cluster.intra_node_latency_s": f"{NODES} topology=all_reduce",
    "cluster.node": f"{NODES} topology=all_reduce",
    "compression.feedback_gain": "compression.error_feedback=true",
    "compression.feedback_decay": "compression.error_feedback=true",
    "compression.masking": "compression.momentum=0.9",
    "compression.momentum": "compression.masking=false",
    "compression.levels": "compression.quantizer=qsgd",
    "compression.num_levels": "compression.levels=lloyd",
    "compression.conv_bin": f"{IMAGES} model=cnn",
    "runtime.min_workers": FAILS,
    "runtime.on_worker_failure": FAILS,
}
FILES = (
    "needs files that are not in this package; tests/test_data_images.py and"
    " tests/test_image_folder.py have their own"
)
SAME = "has the keys of cluster=mixed, with other values"
KEPT = ("error_feedback", "feedback_gain", "feedback_decay", "momentum", "masking")
ENLARGES = ("atomo", "qsgd", "random_dropping", "rotated", "subsampling", "terngrad", "uniform")
NEVER: dict[
    str, str
] = {  # by option and key: what its file inherits and what is always refused there
    **{
        f"compression={name} compression.{key}": (
            "a codec that may enlarge an update keeps nothing for later"
        )
        for name in ENLARGES
        for key in KEPT
    },
    "dataset=quadratic dataset.alpha": "there are no classes",
    "dataset=text dataset.alpha": "there are no classes",
    "schedule=ashl_next schedule.profile_steps": "in virtual time costs are declared",
}
OUTSIDE: dict[str, str] = {  # by key, or by option
    **dict.fromkeys(
        [f"cluster={name}" for name in catalog()["cluster"] if name not in ("mixed", "four_nodes")],
        SAME,
    ),
    "cluster=real": "is what is there, on real processes",
    "cluster=profile": "is a file of `ashl profile`",
    **dict.fromkeys(
        [
            f"dataset={name}"
            for name in ("cifar10", "cifar100", "fashion_mnist", "image_folder", "mnist")
        ],
        FILES,
    ),
    **dict.fromkeys(
        [
            f"model={name}"
            for name in ("mobilenet_v2", "resnet18", "resnet50", "vgg11_bn", "vgg16_bn")
        ],
        "names a network of torchvision, whose only key is that name",
    ),
    "runtime=local": "is about real processes",
    "runtime=torchrun": "is about real processes",
    "runtime.threads": "changes how long a run takes on this machine; bits may stay",
    "runtime.cores": "changes how long a run takes on this machine",
    "runtime.device": "needs a GPU",
    "runtime.graphs": "needs a GPU",
    **dict.fromkeys(
        ("tracking=mlflow", "tracking=tensorboard", "tracking=wandb"),
        "is where records are copied to",
    ),
    "tracking=none": "is what is kept of the records",
    "cluster.trace": "needs a file; tests/test_trace.py has one",
    "dataset.path": "needs a file",
    "schedule.codecs": "is timed by real processes alone",
    "schedule.per_layer_group": "is timed by real processes alone",
    "sync=profiling": (
        "is what schedules put before their stages; schedule=profile_only has its keys"
    ),
    "sync=one_bit_adam": "is what schedule=one_bit_adam puts behind its first stage",
    "topology.regions": "says of real processes what cluster.node says in virtual time",
}
CROSSING: dict[str, str] = {
    "bsp": "sync=bsp",
    "asp": "sync=asp",
    "sums": f"{RING} sync=bsp {LINKS}",
    "delayed": f"{RING} sync=bsp overlap=delayed compression=topk",
    "late pushes": f"sync=asp overlap=delayed outer=co2 {SLOW}",
    "local": "sync=local_sgd sync.local_steps=2 compression=topk outer=nesterov",
    "pulls": "sync=asp compression=topk topology.pull_ratio=0.1",
    "easgd": "sync=easgd sync.local_steps=2",
    "gossip": f"{GOSSIP} sync=d_psgd",
    "choco": f"{GOSSIP} sync=choco compression=topk optimizer.momentum=0",
    "duals": f"{GOSSIP} sync=d_admm optimizer.momentum=0",
    "groups": f"{GROUPS} sync=ripples_random",
    "regions": f"topology=halos sync=async_local_sgd sync.local_steps=2 topology.updates=4 {NODES}",
    "slices": f"{RING} sync=bsp overlap=priority {LINKS}",
    "streaming": f"{THREES} overlap=streaming {LINKS}",
    "stages": ASHL,
    "adam": "sync=local_sgd sync.local_steps=2 optimizer=adam outer=adam",
}
BOUND = "is a bound that so short a run does not reach"
QUIET: dict[
    str, str
] = {  # by option or crossing, and key: what may change something, and not in so short a run
    "planner=goodput planner.threshold": BOUND,
    "planner=goodput planner.momentum": BOUND,
    "planner=goodput planner.smoothing": BOUND,
    "slices overlap.credit": "slices are longer than messages, of which one is ready at a time",
    "stages compression.warmup_epochs": BOUND,
    "stages runtime.min_workers": "there are 3 workers",
    "sync=ripples_smart sync.inter_intra": "needs workers on several nodes",
    "sync=adsp sync.search_s": BOUND,
    "sync=adsp sync.rise": BOUND,
    "sync=adsp_ashlrepo sync.search_s": BOUND,
    "sync=adsp_ashlrepo sync.rise": BOUND,
    "sync=adsp_ashlrepo sync.decay": BOUND,
}

OFTEN = "eval.every_commits=8"
OWN: dict[
    str, tuple[str, str]
] = {  # keys of config.yaml itself: a value, and what stands beside it
    "seed": ("1", ""),
    "stop.epochs": ("0.5", ""),
    "stop.steps": ("24", ""),
    "stop.seconds": ("0.4", ""),
    "stop.target_accuracy": ("0.1", OFTEN),
    "stop.target_loss": ("5.0", OFTEN),
    "stop.target_metric": (
        "-5.0",
        f"{OFTEN} task=regression dataset=quadratic model=linear optimizer.lr=0.02",
    ),
    "stop.target_consecutive_evals": ("3", f"{OFTEN} stop.target_accuracy=0.1"),
    "stop.patience": ("1", "eval.every_commits=1"),
    "eval.every_s": ("0.2", ""),
    "eval.every_commits": ("8", ""),
    "run.save_weights": ("false", ""),
    "run.compression_stats_every": ("3", "compression=topk"),
    "run.checkpoint_s": ("0.2", ""),
    "tracking.events": ("none", ""),
}
OWN_OUTSIDE: dict[str, str] = {  # likewise, each with what it is about
    "name": "names the run folder",
    "run.dir": "is the run folder",
    "run.start_from": "needs weights; tests/test_start_from.py has them",
    "plan": "needs a file; test_a_profile_stands_in_for_costs_and_a_plan_for_the_schedule has one",
    "profile": (
        "needs a file; test_a_profile_stands_in_for_costs_and_a_plan_for_the_schedule has one"
    ),
    "sweep": "is what `ashl sweep` runs",
    "allow_targets": "lets a `_target_` name the user's own packages",
}


class Case(NamedTuple):
    option: str
    key: str
    value: str

    @property
    def typed(self) -> str:
        return f"{self.key}={self.value}"

    @property
    def base(self) -> tuple[str, ...]:
        """The overrides of its option's base configuration."""
        return (*ALWAYS.split(), self.option, *BESIDE.get(self.option, "").split())

    @property
    def counts(self) -> tuple[str, ...]:
        """Return the settings that make the key count if it is an error beside the base."""
        return tuple(of(COUNTS, self.option, self.key, "").split())


def of(table: dict[str, str], option: str, key: str, otherwise: str | None = None) -> str | None:
    """Return a table's entry for a key of an option, or for the key in any option."""
    return table.get(f"{option} {key}", table.get(key, otherwise))


def cases() -> Iterator[Case]:
    """Every key of every option with each value that is tried."""
    for group, options in catalog().items():
        if group in PRESETS:
            continue
        for name, file in options.items():
            option, own = f"{group}={name}", values(file)
            if option in OUTSIDE:
                continue
            for parameter in parameters(file):
                key = f"{group}.{parameter.key}"
                if key not in OUTSIDE:
                    for value in others(option, key, target(file), own[parameter.key]):
                        yield Case(option, key, value)


def crossing(every: list[Case], name: str, chosen: dict[str, str]) -> Iterator[Case]:
    """The cases of every key of every chosen option that the base does not type itself, each key
    with one value.
    """
    seen = {text.partition("=")[0] for text in CROSSING[name].split()}
    options = {f"{group}={option}" for group, option in chosen.items()}
    for case in every:
        if case.option in options and case.key not in seen:
            seen.add(case.key)
            yield case


def others(option: str, key: str, cls: str, default: Any) -> list[str]:
    """Values other than the default: those of the table, all other words of a choice, or another
    number.
    """
    if (value := of(VALUES, option, key)) is not None:
        return [value]
    group, _, name = key.partition(".")
    hints = list(parts(get_type_hints(import_target(cls, group, ())).get(name))) if cls else []
    words = [word for hint in hints if get_origin(hint) is Literal for word in get_args(hint)]
    if default in words:
        return [
            str(word).lower() if isinstance(word, bool) else str(word)
            for word in words
            if word != default
        ]
    if default is None and words:
        return [str(words[0])]
    if isinstance(default, bool):
        return ["false" if default else "true"]
    if isinstance(default, int):
        return [str(2 * default + 1)]
    if isinstance(default, float):
        return [str(default / 2 if default else 0.5)]
    if isinstance(default, list):
        return ["[" + ",".join(str(x * 2 if x >= 1 else x / 2) for x in default) + "]"]
    return ["true"] if bool in hints else ["2"] if int in hints else ["0.5"]


def parts(hint: Any) -> Iterator[Any]:
    """The members of a union, without annotations."""
    if get_origin(hint) is Annotated:
        yield from parts(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from parts(part)
    else:
        yield hint
