"""A typed value either changes something or is refused with what makes it count; a sweep leaves it
out, visibly.
"""

import re

import pytest

from ashl.config.compose import compose
from ashl.config.construct import construct
from ashl.errors import NoEffectError
from ashl.plan.plan import Plan
from ashl.planning.compile_plan import compile_plan
from ashl.planning.instantiate import declared_profile
from ashl.planning.without_effect import CONDITIONS
from ashl.study.grid import grid_lines, make_grid

PORTS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.001"
FAILS = "'cluster.events=[{time_s:1,worker:0,fail:true}]'"
CHOCO = "compression=topk optimizer.momentum=0"
GROUPS = "topology=partial_all_reduce sync=ripples_smart"

# Typed values without an effect: what is typed, beside what, and what is typed instead so that it
# counts.
INERT: list[tuple[str, str, str | None]] = [  # None: it takes what is not here, as a GPU
    ("cluster.bandwidth_mbit_s=20", "sync=bsp", f"{PORTS}"),
    (
        "cluster.server_bandwidth_mbit_s=20",
        f"sync=bsp topology=all_reduce {PORTS}",
        "topology=parameter_server",
    ),
    ("cluster.server_step_s=0.1", "sync=bsp topology=all_reduce", "topology=parameter_server"),
    ("cluster.intra_node_bandwidth_mbit_s=9", "sync=bsp cluster=four_nodes", "topology=all_reduce"),
    ("cluster.node=[0,0,1,1]", "sync=bsp", f"{PORTS} cluster.intra_node_bandwidth_mbit_s=200"),
    ("cluster.node=[0,0,1,1]", "sync=bsp topology=all_reduce", f"{GROUPS}"),
    ("cluster.compress_s=0.1", "sync=bsp", "compression=topk"),
    ("cluster.failure_detection_s=0.5", "sync=asp", FAILS),
    ("runtime.min_workers=2", "sync=asp", FAILS),
    ("runtime.reduction=backend", "runtime=local sync=bsp", "topology=all_reduce"),
    ("optimizer.lr=0.5", "sync=bsp runtime.gradients=false", "runtime.gradients=true"),
    ("sync.max_lead=4", "topology=gossip sync=hop topology.graph=complete", "sync.backups=1"),
    ("dataset.partition=iid", "sync=asp", "sync.local_steps=plan schedule.h_preset=[8]"),
    ("overlap.local_weight=0.5", "sync=bsp overlap=delayed topology=all_reduce", "sync=local_sgd"),
    (
        "compression.momentum=0.9",
        "sync=bsp compression=sign optimizer.momentum=0",
        "compression.masking=false",
    ),
    (
        "compression.clip_norm=1",
        f"{CHOCO} topology=gossip sync=choco",
        "topology=parameter_server sync=bsp",
    ),
    (
        "aggregate.weights=data_share",
        "topology=gossip sync=d_psgd",
        "topology=parameter_server sync=bsp",
    ),
    (
        "aggregate.momentum=0.5",
        "sync=local_sgd aggregate=fednova",
        "sync.local_steps=plan schedule.h_preset=[8]",
    ),
    (
        "topology.workers_per_node=2",
        "topology=partial_all_reduce sync=ripples_random",
        "sync=ripples_smart",
    ),
    ("runtime.share_gpu=true", "runtime=local sync=bsp runtime.device=cpu", None),
    ("dataset.epochs=3", "sync=bsp stop.steps=9", "stop.steps=null"),
    ("stop.target_consecutive_evals=2", "sync=bsp", "stop.target_accuracy=0.9"),
    ("eval.every_commits=5", "sync=bsp eval.every_s=1", "eval.every_s=null"),
    ("run.compression_stats_every=5", "sync=bsp", "compression=topk"),
    ("tracking.experiment=mine", "sync=bsp tracking=none", "tracking=mlflow"),
    (
        "compression.masking=false",
        "sync=bsp compression=topk optimizer.momentum=0",
        "compression.momentum=0.9",
    ),
    (
        "compression.feedback_gain=0.5",
        "sync=bsp compression=natural",
        "compression.error_feedback=true",
    ),
    ("compression.ratio=0.01", "schedule=ashl", "schedule.r_preset=[1.0,null]"),
    (
        "compression.bucket=32",
        "sync=bsp compression=diana compression.quantizer=natural",
        "compression.quantizer=qsgd",
    ),
    ("compression.conv_bin=20", "sync=bsp compression=adacomp", "dataset=synthetic model=cnn"),
    ("optimizer.horizon_epochs=20", "sync=bsp", "optimizer.schedule=cosine"),
    ("optimizer.nesterov=true", "sync=bsp optimizer.momentum=0", "optimizer.momentum=0.9"),
    ("dataset.alpha=0.5", "sync=bsp", "dataset.partition=dirichlet"),
    ("topology.pull_ratio=0.1", "sync=bsp", "compression=topk"),
    ("schedule.r_preset=[0.5]", "sync=local_sgd", "compression=topk"),
    (
        "schedule.momentum=reset",
        "schedule=post_local optimizer.momentum=0",
        "optimizer.momentum=0.9",
    ),
    (
        "schedule.profile_steps=9",
        "schedule=ashl_next",
        "runtime=local cluster=real cluster.num_workers=2",
    ),
    (
        "schedule.pull_ratio=0.2",
        "schedule=ashl_plus topology.pull_ratio=0.1",
        "topology.pull_ratio=null",
    ),
    (
        "schedule.decay_factor=0.5",
        "schedule=decay_on_rise sync=asp schedule.decay_stages=1",
        "schedule.decay_stages=2",
    ),
    ("planner=dylu", "sync=local_sgd", "sync.local_steps=plan schedule.h_preset=[8]"),
    ("aggregate.staleness_discount=0.5", "sync=bsp", "sync=asp"),
    (
        "overlap.max_ratio=0.5",
        f"topology=all_reduce sync=bsp compression=topk overlap=layerwise {PORTS}",
        "overlap.ratio=adaptive",
    ),
]


def planned(*overrides: str) -> Plan:
    texts = [text.strip("'") for text in " ".join(overrides).split()]
    texts = ["runtime=sim", "tracking=none", *texts]
    return compile_plan(compose(texts), None, texts, strict=True)


@pytest.mark.parametrize(("typed", "beside", "fix"), INERT)
def test_what_has_no_effect_is_refused_and_counts_with_what_the_sentence_names(
    typed: str, beside: str, fix: str | None
) -> None:
    with pytest.raises(NoEffectError) as caught:
        planned(beside, typed)
    assert caught.value.key == typed.partition("=")[0]
    if fix is not None:
        planned(beside, typed, fix)


def test_a_default_that_is_typed_and_a_value_of_a_preset_are_no_error() -> None:
    planned(
        "sync=bsp",
        "cluster.bandwidth_mbit_s=null",
        "planner=balanced",
        "cluster.compress_s=0.0",
        "stop.target_consecutive_evals=1",
    )
    planned("experiment=diloco")


def test_a_list_that_says_how_many_workers_there_are_counts() -> None:
    assert planned("sync=bsp", "cluster.node=[0,0,1,1,2,2]").num_workers == 6


def test_a_sweep_merges_what_becomes_equal_and_says_why() -> None:
    grid = make_grid(
        grid_lines(["runtime=sim", "sync=bsp", "cluster.bandwidth_mbit_s=1,1000", "seed=0,1"], None)
    )
    assert len(grid.settings) == grid.merged == 2
    assert grid.unused == {"cluster.bandwidth_mbit_s": 4}
    assert "cluster.exchange_s=null" in grid.reasons["cluster.bandwidth_mbit_s"]
    assert all("cluster.bandwidth_mbit_s" not in setting.axes for setting in grid.settings)


def test_a_profile_stands_in_for_costs_and_a_plan_for_the_schedule(tmp_path) -> None:
    plan = planned("sync=bsp")
    found = declared_profile(
        construct(plan.cluster, "cluster"), plan.choices["model"], plan.num_params, 32
    )
    assert found is not None
    for name, text in (("profile", found.to_json()), ("plan", plan.to_json())):
        (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(NoEffectError, match=r"needs profile=null"):
        planned("sync=bsp", f"profile={tmp_path}/profile.json", "cluster.step_s=0.5")
    with pytest.raises(NoEffectError, match=r"needs plan=null"):
        planned(f"plan={tmp_path}/plan.json", "schedule=ashl_plus")


def test_no_key_needs_itself() -> None:
    for condition in CONDITIONS:
        needed = set(re.findall(r"[a-z]+\.[a-z_]+", condition.needs))
        assert needed.isdisjoint(condition.keys), condition.keys
