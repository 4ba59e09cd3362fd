"""Overlaps asked for wrongly: one sentence with the way out, exit code 2."""

import pytest

LINKS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.002"
RING = "topology=all_reduce sync=bsp"
LOSCAR = "topology=all_reduce sync=local_sgd overlap=loscar"
STREAM = "topology=all_reduce sync=local_sgd overlap=streaming overlap.fragments=2"
LAYERS = f"{RING} overlap=layerwise"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            f"{LAYERS} compression=topk overlap.ratio=[0.1]",
            "lists 1 densities for 2 messages",
        ),
        (
            f"{LAYERS} compression=topk overlap.ratio=[0.1,2]",
            "overlap.ratio.1=2 is not possible: should be less than",
        ),
        (
            f"{LAYERS} compression=topk overlap.ratio=adaptive compression.ratio=0.5",
            "above overlap.max_ratio=0.1, and overlap.ratio=adaptive needs",
        ),
        (
            f"{LAYERS} compression=topk overlap.plan=[3]",
            "holds 3 layer groups, and the model has 2",
        ),
        (f"{RING} overlap=merged overlap.plan=[1,7]", "holds 8 layer groups, and the model has 2"),
        (
            f"{RING} overlap=merged overlap.plan=[2,0]",
            "overlap.plan.1=0 is not possible: should be greater than or equal",
        ),
        (
            f"{RING} overlap=merged overlap.plan=[]",
            "overlap.plan=[] is not possible: should have at least 1 values",
        ),
        (
            f"{RING} overlap=merged overlap.plan=best",
            (
                "overlap.plan=best is not possible: should be 'greedy', 'optimal' or 'bytes', or a"
                " list"
            ),
        ),
        (
            f"{RING} overlap=priority overlap.slice=x",
            "overlap.slice=x is not possible: should be 'auto', or a whole",
        ),
        (f"{RING} overlap=wfbp overlap.plan=greedy", "merged"),
        ("sync=bsp overlap=tictac overlap.plan=[9]", "holds 9 layer groups, and the model has 2"),
        (f"{RING} overlap=delayed overlap.local_weight=1.5", "overlap.local_weight"),
        ("sync=local_sgd overlap=overlap_local_sgd overlap.alpha=1", "overlap.alpha"),
        (
            f"{STREAM} overlap.fragments=9",
            "9: the model has 2 layer groups; take at most 2",
        ),
        (
            f"{STREAM} overlap.delay=8",
            "leaves none of the 8 steps between two exchanges after an exchange is applied; take overlap.delay=7",
        ),
        (f"{STREAM} overlap.alpha=1", "overlap.alpha"),
        (f"{LOSCAR} overlap.share=0", "overlap.share"),
        ("sync=bsp overlap=slices overlap.slice=0", "overlap.slice"),
        (f"{RING} overlap=priority overlap.credit=0", "overlap.credit"),
        (f"{RING} overlap=priority overlap.slice=0", "overlap.slice"),
        (f"{RING} overlap=dear overlap.plan=[1,7]", "holds 8 layer groups, and the model has 2"),
    ],
)
def test_a_wrong_overlap(overrides, says, said) -> None:
    code, sentence = said(*overrides.split(), *LINKS.split())
    assert code == 2
    assert says in sentence


@pytest.mark.parametrize(
    ("overrides", "instead"),
    [
        (f"{RING} overlap=merged", "overlap.plan=bytes"),
        (f"{RING} overlap=dear", "overlap.plan=bytes"),
        (
            f"{RING} overlap=priority overlap.slice=auto",
            "overlap.plan=layers overlap.slice=40000",
        ),
        (
            f"{LAYERS} compression=topk overlap.plan=greedy",
            "overlap.plan=none overlap.ratio=null",
        ),
        (
            f"{LAYERS} compression=topk overlap.ratio=adaptive",
            "overlap.plan=none overlap.ratio=null",
        ),
    ],
)
def test_a_plan_by_cost_needs_costs(overrides, instead, said) -> None:
    real = ("runtime=local", "cluster=real", "cluster.num_workers=2")
    code, sentence = said(*real, *overrides.split())
    assert code == 2
    assert f"take {instead}" in sentence


def test_slices_of_a_push_need_a_port(said) -> None:
    code, sentence = said("sync=bsp", "cluster.exchange_s=0.01", "overlap=wfbp")
    assert code == 2
    assert "no NIC is ever busy; set cluster.exchange_s=null with" in sentence
