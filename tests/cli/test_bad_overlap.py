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
            "topology=gossip sync=d_psgd overlap=merged",
            "its workers exchange no gradients; take topology=all_reduce or",
        ),
        ("topology=all_reduce sync=local_sgd overlap=wfbp", "local steps give one update"),
        (
            f"{RING} overlap=wfbp compression=topk",
            "the codec encodes the whole update; take compression=none",
        ),
        (
            f"{LAYERS} compression=gtopk",
            "has a protocol over all workers' whole updates; take compression=topk",
        ),
        (f"{LAYERS} compression=power_sgd", "has a protocol over all workers' whole updates"),
        (
            f"{LAYERS} compression=terngrad compression.shared_scale=true",
            "has a protocol over all workers' whole updates",
        ),
        (
            f"{LAYERS} compression=fetch_sgd optimizer.momentum=0",
            "compression=fetch_sgd merges the payloads of whole updates at once",
        ),
        (f"{LAYERS} compression=adacomp", "keeps state for the whole update"),
        (
            f"{LAYERS} compression=topk compression.clip_norm=1",
            "whole gradient; take compression.clip_norm=null",
        ),
        (
            f"{LAYERS} compression=topk compression.critical_ratio=0.2",
            "take compression.critical_ratio=null",
        ),
        (
            f"{LAYERS} compression=topk aggregate.clip_norm=1",
            "clipping needs the norm of the whole gradient",
        ),
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
            f"{LAYERS} compression=qsgd overlap.ratio=adaptive",
            "this compression has none; take overlap.ratio=null",
        ),
        (
            f"{LAYERS} compression=none overlap.ratio=[0.1,0.1]",
            "this compression has none; take overlap.ratio=null",
        ),
        (
            f"{LAYERS} compression=topk overlap.plan=[3]",
            "holds 3 layer groups, and the model has 2",
        ),
        (
            "sync=bsp overlap=layerwise compression=topk",
            "a server merges whole pushes",
        ),
        (
            f"{RING} overlap=wfbp aggregate.clip_norm=1",
            "clipping needs the norm of the whole gradient",
        ),
        (
            f"{RING} overlap=wfbp optimizer=bcd",
            "it does not exchange the gradient of one backward pass",
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
        (
            "sync=profiling overlap=wfbp",
            "a profiling stage exchanges no updates; take another sync mode",
        ),
        (
            "sync=profiling overlap=delayed",
            "a profiling stage exchanges no updates; take another sync mode",
        ),
        (f"{RING} overlap=wfbp overlap.plan=greedy", "merged"),
        (
            "sync=spy optimizer.momentum=0 optimizer.weight_decay=0 overlap=wfbp",
            "it has its own messages",
        ),
        ("sync=asp overlap=wfbp", "local steps give one update"),
        (
            f"{RING} overlap=tictac",
            "there is no server to pull from; take topology=parameter_server",
        ),
        ("sync=bsp overlap=tictac overlap.plan=[9]", "holds 9 layer groups, and the model has 2"),
        ("schedule=ashl overlap=wfbp", "not supported in stage ahl"),
        (
            "topology=gossip sync=d_psgd overlap=delayed",
            "the topology has no delayed exchange; take topology=all_reduce or",
        ),
        (
            "topology=partial_all_reduce sync=ripples_smart overlap=delayed",
            "the topology has no delayed exchange",
        ),
        (
            "sync=spy optimizer.momentum=0 optimizer.weight_decay=0 overlap=delayed",
            "each of its messages depends on the reply",
        ),
        (
            f"{RING} overlap=delayed optimizer=bcd",
            "each sweep of the optimizer needs the model of the one before",
        ),
        (
            f"{RING} overlap=overlap_local_sgd",
            "it needs local steps, and gradients are exchanged; take sync=local",
        ),
        (
            f"{RING} overlap=delayed aggregate.staleness_discount=1",
            "all updates have the same staleness, and aggregate.staleness_discount needs differences",
        ),
        (f"{RING} overlap=delayed overlap.local_weight=1.5", "overlap.local_weight"),
        (
            f"{RING} overlap=eager",
            "it needs local steps, and gradients are exchanged; take sync=local_sgd",
        ),
        (
            "sync=asp sync.local_steps=2 overlap=eager",
            "it needs the updates of all workers in one merge; take sync=local_sgd, or overlap=delayed",
        ),
        (
            "sync=local_sgd outer=adam overlap=eager",
            "its steps on parts of an update do not add up; take",
        ),
        ("sync=local_sgd overlap=overlap_local_sgd overlap.alpha=1", "overlap.alpha"),
        (
            "sync=asp sync.local_steps=8 overlap=streaming",
            "a server steps on a fragment after all workers have pushed it; take",
        ),
        (f"{RING} overlap=streaming", "gradients are exchanged; take sync=local_sgd"),
        (
            f"{STREAM} overlap.fragments=9",
            "9: the model has 2 layer groups; take at most 2",
        ),
        (
            f"{STREAM} overlap.delay=8",
            "leaves none of the 8 steps between two exchanges after an exchange is applied; take overlap.delay=7",
        ),
        (f"{STREAM} overlap.alpha=1", "overlap.alpha"),
        (
            f"{LOSCAR} compression=topk",
            "its random elements are a compression already; take compression=none",
        ),
        (
            f"{LOSCAR} outer=nesterov",
            "momentum does not fit elements that change with each exchange; take outer=average",
        ),
        (f"{LOSCAR} overlap.share=0", "overlap.share"),
        ("schedule=ashl overlap=dear", "not supported in stage ahl"),
        (
            "sync=bsp overlap=dear",
            "a server merges whole pushes; take topology=all_reduce, or overlap=priority",
        ),
        (
            "sync=backup overlap=priority",
            "a slice is merged after all workers have pushed it, by one sum and one step; take",
        ),
        (
            "sync=backup overlap=slices",
            "a slice is merged after all workers have pushed it, by one sum and one step; take sync",
        ),
        (
            "sync=bsp overlap=slices optimizer=muon",
            "it needs an optimizer that steps element by element",
        ),
        (
            f"{RING} overlap=slices",
            "there is no server to pull from; take topology=parameter_server",
        ),
        ("sync=bsp overlap=slices overlap.slice=0", "overlap.slice"),
        (f"{RING} overlap=priority overlap.credit=0", "overlap.credit"),
        (f"{RING} overlap=priority overlap.slice=0", "overlap.slice"),
        (
            f"{RING} overlap=priority compression=topk",
            "the codec encodes the whole update; take compression=none",
        ),
        (
            f"{RING} overlap=dear aggregate.clip_norm=1",
            "clipping needs the norm of the whole gradient",
        ),
        ("topology=all_reduce sync=local_sgd overlap=dear", "local steps give one update"),
        (f"{RING} overlap=dear overlap.plan=[1,7]", "holds 8 layer groups, and the model has 2"),
        (
            f"{RING} overlap=dear optimizer=bcd",
            "it does not exchange the gradient of one backward pass",
        ),
    ],
)
def test_a_wrong_overlap(overrides, says, said) -> None:
    code, sentence = said(*overrides.split(), *LINKS.split())
    assert code == 2
    assert says in sentence


def test_a_plan_by_cost_needs_costs(said) -> None:
    real = ("runtime=local", "cluster=real", "cluster.num_workers=2", *RING.split())
    for overlap, instead in (
        ("overlap=merged", "overlap.plan=bytes"),
        ("overlap=dear", "overlap.plan=bytes"),
        ("overlap=priority overlap.slice=auto", "overlap.plan=layers overlap.slice=40000"),
    ):
        code, sentence = said(*real, *overlap.split())
        assert code == 2
        assert f"take {instead}" in sentence


@pytest.mark.parametrize("asked", ["plan=greedy", "ratio=adaptive"])
def test_a_plan_of_compressed_messages_needs_costs(asked, said) -> None:
    real = (
        "runtime=local",
        "cluster=real",
        "cluster.num_workers=2",
        *LAYERS.split(),
        "compression=topk",
    )
    code, sentence = said(*real, f"overlap.{asked}")
    assert code == 2
    assert "take overlap.plan=none overlap.ratio=null" in sentence


def test_an_optimizer_that_needs_the_whole_vector(said, tmp_path, monkeypatch) -> None:
    """One of a user's own that does not say that it goes element by element."""
    (tmp_path / "whole.py").write_text(
        "from ashl.option import option\n"
        "from ashl.optimizer.sgd import SGD\n"
        "@option\n"
        "class Normed(SGD):\n"
        "    elementwise = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    chosen = (
        *RING.split(),
        *LINKS.split(),
        "allow_targets=[whole]",
        "optimizer._target_=whole.Normed",
    )
    code, sentence = said(*chosen, "overlap=dear")
    assert code == 2
    assert "it needs an optimizer that steps element by element" in sentence


def test_slices_of_a_push_need_a_port(said) -> None:
    code, sentence = said("sync=bsp", "cluster.exchange_s=0.01", "overlap=wfbp")
    assert code == 2
    assert "no NIC is ever busy; set cluster.exchange_s=null with" in sentence
