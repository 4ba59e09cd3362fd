"""Options that do not work together: each capability that an option may need, the sentence when it
is missing, and that every alternative in the sentence works.
"""

import re

import pytest

from ashl.config.compose import compose
from ashl.errors import UsageError
from ashl.planning.capabilities import CAPABILITIES
from ashl.planning.compile_plan import prepare_plan
from ashl.sync.bsp import BSP
from tests.support_matrix import only_checks

LINKS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.002"
RING = "topology=all_reduce sync=bsp"
SHARDS = f"{LINKS} topology=sharded_server"
REGIONS = "topology=halos topology.regions=[0,0,1,1]"
PLAIN = "optimizer.momentum=0 optimizer.weight_decay=0"
PLANNED = "sync.local_steps=plan schedule.h_preset=[2]"

# The capability that is missing, and settings without it.
CASES = [
    ("loop", "topology=all_reduce sync=asp"),
    ("loop", "topology=gossip sync=asp"),
    ("loop", "topology=partial_all_reduce sync=bsp"),
    ("loop", "topology=gossip schedule=ashl"),
    ("codec", "topology=gossip sync=d_psgd compression=topk"),
    ("codec", "topology=partial_all_reduce sync=ripples_static compression=topk"),
    ("codec", f"sync=spy compression=topk {PLAIN}"),
    ("weights", "topology=gossip sync=d_psgd aggregate.scale=2"),
    ("weights", "sync=asylpg aggregate=uniform"),
    ("outer", "sync=bsp outer=nesterov"),
    ("outer", "topology=partial_all_reduce sync=ripples_static outer=slowmo"),
    ("statistics", "sync=bsp optimizer=bcd"),
    ("overlap", "topology=gossip sync=d_psgd overlap=merged"),
    ("overlap", f"sync=bsp {SHARDS} overlap=wfbp"),
    ("delay", "topology=gossip sync=d_psgd overlap=delayed"),
    ("delay", "sync=easgd overlap=delayed"),
    ("gradients", "topology=all_reduce sync=local_sgd overlap=wfbp"),
    ("gradients", f"compression=laq sync=asp {PLAIN}"),
    ("gradients", f"compression=laq schedule=post_local {PLAIN}"),
    ("differences", f"{RING} overlap=streaming"),
    ("own_loop", "sync=profiling overlap=delayed"),
    ("plain_messages", "sync=ringleader topology.pull_ratio=0.1 compression=topk"),
    ("rounds", "sync=asp sync.local_steps=2 overlap=eager"),
    ("fixed_rounds", "topology=all_reduce sync=qsr overlap=delayed"),
    ("fixed_rounds", "topology=all_reduce sync=lb_bsp overlap=dear"),
    ("fixed_batches", f"sync=lb_bsp compression=laq {PLAIN}"),
    ("merges_of_slices", "sync=backup overlap=priority"),
    ("merges_of_fragments", "sync=asp sync.local_steps=8 overlap=streaming"),
    ("merges_by_region", f"{REGIONS} sync=bsp"),
    ("merges_by_shard", f"sync=easgd {SHARDS}"),
    ("common_drops", f"sync=ssp aggregate.max_staleness=2 {SHARDS}"),
    ("common_drops", f"sync=dssp aggregate=uniform aggregate.max_staleness=2 {SHARDS}"),
    ("single_updates", f"sync=local_sgd topology=all_reduce planner=goodput {PLANNED}"),
    ("single_updates", f"sync=local_sgd overlap=streaming planner=goodput {PLANNED}"),
    ("server", f"{RING} overlap=tictac"),
    ("no_server", "sync=bsp overlap=dear"),
    ("no_server", "sync=bsp compression=sketch_sgd"),
    ("all_reduce", "sync=bsp compression=terngrad compression.shared_scale=true"),
    ("own_densities", f"{RING} compression=random_mask compression.critical_ratio=0.2"),
    ("one_model", "topology=gossip sync=choco compression=sketch_sgd"),
    ("lossless", f"{RING} overlap=wfbp compression=topk"),
    ("unbiased", "sync=asylpg compression=topk"),
    ("shrinking_codec", "topology=gossip sync=choco compression=ef21"),
    ("pull_codec", "sync=bsp compression=power_sgd topology.pull_ratio=0.1"),
    ("codec_by_message", f"{RING} overlap=layerwise compression=gtopk"),
    ("codec_by_message", f"{RING} overlap=layerwise compression=topk compression.clip_norm=1"),
    ("density", f"{RING} overlap=layerwise compression=qsgd overlap.ratio=adaptive"),
    ("no_scale", "sync=bsp compression=sign compression.vote=majority"),
    (
        "scale",
        "sync=bsp compression=sign compression.scale=none compression.per_layer=true"
        " compression.error_feedback=false",
    ),
    (
        "no_codec_momentum",
        f"sync=bsp compression=sign compression.beta=0.9 compression.momentum=0.5 {PLAIN}",
    ),
    ("no_momentum", "sync=bsp compression=topk compression.momentum=0.9"),
    ("no_momentum", f"{RING} compression=fetch_sgd"),
    ("momentum", f"sync=pr_sgd_momentum {PLAIN}"),
    ("steps_of_sgd", "sync=bsp compression=laq"),
    ("plain_steps", "sync=spy"),
    ("adam", "topology=all_reduce sync=zero_one_adam"),
    ("gradient_steps", f"{RING} overlap=wfbp optimizer=bcd"),
    ("elementwise", f"sync=bsp {SHARDS} optimizer=muon"),
    ("elementwise", "sync=bsp overlap=slices optimizer=muon"),
    ("elementwise", f"{RING} overlap=dear optimizer=muon"),
    ("elementwise_outer", f"sync=local_sgd {SHARDS} outer=heloco"),
    ("linear_outer", "sync=local_sgd outer=adam overlap=eager"),
    ("average", "topology=all_reduce sync=local_sgd overlap=loscar outer=nesterov"),
    ("sample_weights", "sync=lb_bsp aggregate=data_share"),
    ("plain_mean", f"{RING} optimizer=bcd aggregate.scale=2"),
    ("joint_weights", "sync=bsp compression=gtopk aggregate.staleness_discount=1"),
    ("even_staleness", f"{RING} overlap=delayed aggregate.staleness_discount=1"),
    ("no_clipping", f"{RING} overlap=dear aggregate.clip_norm=1"),
    ("mlp", f"{RING} optimizer=bcd model=cnn"),
    ("closed_form", f"{RING} optimizer=bcd task=language_model"),
    ("fixed_plan", f"{SHARDS} sync=local_sgd planner=online {PLANNED}"),
    ("nics", "sync=bsp topology=sharded_server"),
    (
        "no_nodes",
        f"sync=bsp {SHARDS} cluster.node=[0,0,1,1] cluster.intra_node_bandwidth_mbit_s=9",
    ),
]


def refusal(words: list[str]) -> str | None:
    """Return the sentence with which a plan of these settings is refused, or None."""
    try:
        with only_checks():
            prepare_plan(compose(words))
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("capability", "line"), CASES, ids=[f"{c}:{line}" for c, line in CASES])
def test_what_is_missing_is_said_and_each_alternative_works(capability: str, line: str) -> None:
    words = ["runtime=sim", "tracking=none", *line.split()]
    sentence = refusal(words)
    assert sentence is not None
    assert CAPABILITIES[capability].noun in sentence
    for fix in re.split(r",? or |, ", sentence.rpartition("; ")[2].removeprefix("take ")):
        if fix.startswith("remove ") or fix.endswith("with its defaults"):
            continue
        after = refusal([*words, *re.findall(r"\S+=\S+", fix)])
        assert after is None or CAPABILITIES[capability].noun not in after


def test_every_capability_has_a_case() -> None:
    """Only a topology of the user's own can lack compressed pulls, see tests/test_planning.py."""
    assert {capability for capability, _ in CASES} == CAPABILITIES.keys() - {"pulls"}


def test_an_unknown_capability_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BSP, "needs", {"wings": ""})
    sentence = refusal(["runtime=sim", "tracking=none", "sync=bsp"])
    assert sentence is not None
    assert sentence.startswith("sync=bsp: its `needs` has 'wings', which is no capability; take")
