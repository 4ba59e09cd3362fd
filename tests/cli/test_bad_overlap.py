"""Overlaps asked for wrongly: one sentence with the way out, exit code 2."""

import pytest

LINKS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.002"
RING = "topology=all_reduce sync=bsp"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("sync=bsp overlap=wfbp", "its workers do not sum gradients on their way; take topology=all_reduce sync=bsp"),
        ("topology=gossip sync=d_psgd overlap=merged", "its workers do not sum gradients on their way"),
        ("topology=all_reduce sync=local_sgd overlap=wfbp", "local steps make one update"),
        (f"{RING} overlap=wfbp compression=topk", "a codec sees the whole update; take compression=none"),
        (f"{RING} overlap=wfbp aggregate.clip_norm=1", "clipping needs the norm of the whole gradient"),
        (f"{RING} overlap=wfbp optimizer=bcd", "no gradient of one backward pass"),
        (f"{RING} overlap=merged overlap.plan=[1,7]", "holds 8 layer groups, and the model has 2"),
        (f"{RING} overlap=merged overlap.plan=[2,0]", "overlap.plan"),
        (f"{RING} overlap=merged overlap.plan=best", "overlap.plan"),
        (f"{RING} overlap=wfbp overlap.plan=greedy", "merged"),
        ("schedule=ashl overlap=wfbp", "makes no sense in stage ahl"),
        ("topology=gossip sync=d_psgd overlap=late", "its workers meet in another way; take topology=all_reduce or"),
        ("topology=partial_all_reduce sync=ripples_smart overlap=late", "its workers meet in another way"),
        ("sync=spy optimizer.momentum=0 optimizer.weight_decay=0 overlap=late", "it has messages of its own"),
        (f"{RING} overlap=late optimizer=bcd", "its sweeps need the model that the last one made"),
        (
            f"{RING} overlap=overlap_local_sgd",
            "it is made for local steps, and gradients are exchanged; take sync=local",
        ),
        (f"{RING} overlap=late overlap.own=1.5", "overlap.own"),
        ("sync=local_sgd overlap=overlap_local_sgd overlap.alpha=1", "overlap.alpha"),
    ],
)
def test_a_wrong_overlap(overrides, says, said) -> None:
    code, sentence = said(*overrides.split(), *LINKS.split())
    assert code == 2
    assert says in sentence


def test_a_plan_by_cost_needs_costs(said) -> None:
    code, sentence = said("runtime=local", "cluster=real", "cluster.num_workers=2", *RING.split(), "overlap=merged")
    assert code == 2
    assert "take overlap.plan=bytes" in sentence
