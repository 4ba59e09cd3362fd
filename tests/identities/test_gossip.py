"""Gossip at its limits, and what mixing keeps: without steps the mean of all models."""

import pytest
import torch

from ashl.compression.contract import EncodeContext
from ashl.compression.modulo import CODE, decode_near, encode_residues, payload_nbytes
from ashl.compression.payload import PayloadError, read_payload, write_payload
from ashl.sync.hop import mix_by_age as hop_mean
from ashl.sync.relay_sum import relay_sum, spanning_tree
from ashl.topology.graph import depths, edges_of
from tests.conf_option import conf_option
from tests.still import gossip, mixed, spread, start_of
from tests.support import simulated

BASE = (
    "optimizer.momentum=0.9",
    "optimizer.weight_decay=0.01",
    "optimizer.lr=0.02",
    "stop.steps=48",
    "model.hidden=[16]",
)
ATC = "sync.order=atc"
KEEPING = {  # modes without steps on four workers
    "d_psgd": {"order": "awc"},
    "matcha": {"budget": 0.5},
    "choco": {"gamma": 0.4},
    "ad_psgd": {"overlap": True},
    "ad_psgd waiting": {"overlap": False},
    "swarm": {"local_steps": 1},
    "noloco": {"local_steps": 1, "alpha": 0.0, "gamma": 1.0},
}


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)


def run(*overrides):
    return simulated(*BASE, "topology=gossip", *overrides)


@pytest.mark.limit("sync=d_psgd")
def test_the_complete_graph_is_bsp():
    whole = run("sync=d_psgd", ATC, "topology.graph=complete")
    close(whole.params, simulated(*BASE, "sync=bsp").params)
    assert all(torch.equal(model, whole.params) for model in whole.models.values())
    assert whole.snapshots[-1][0]["consensus_distance"] == 0
    assert run("sync=d_psgd").snapshots[-1][0]["consensus_distance"] > 0


@pytest.mark.limit("sync=matcha")
def test_matcha_with_all_edges_is_d_psgd():
    """The complete graph has the Metropolis weight 1/n, which is α there."""
    graph = "topology.graph=complete"
    close(
        run("sync=matcha", "sync.budget=1", graph).params,
        run("sync=d_psgd", ATC, graph).params,
    )


def test_in_hop_who_trails_far_behind_jumps_and_nobody_waits_for_it(monkeypatch):
    """The model becomes the mean by age of the received ones, with its own model only if that is
    fresh enough.
    """
    slack = ("sync=hop", "sync.backups=1", "sync.max_lead=4", "topology.graph=complete")
    slow = (
        "cluster.compute=[1,1,1,8]",
        "cluster.link=null",
        "runtime.gradients=false",
        "stop.steps=400",
    )
    ages = []  # weight of a skipping worker's own model in the mean from which it continues

    def mixes(*given):
        ages.extend(given[5:])
        return hop_mean(*given)

    monkeypatch.setattr("ashl.sync.hop.mix_by_age", mixes)
    assert run(*slack, *slow, "sync.skip_lead=4").steps_per_s > 3 * run(*slack, *slow).steps_per_s
    assert min(ages) >= 4
    equal = (*slack, "cluster=homogeneous")
    assert run(*equal, "sync.skip_lead=1").sha256 == run(*equal).sha256
    hop, (own, near, far) = (
        conf_option("sync", "hop", staleness=2),
        torch.tensor([[0.0], [6.0], [12.0]]),
    )
    heard = {0: {4: near, 7: far}, 2: {3: far, 5: far}}
    assert hop_mean(hop, 5, own, 1, heard, age=3).item() == pytest.approx((2 * 6 + 3 * 12) / 5)
    assert hop_mean(hop, 5, own, 1, heard, age=2).item() == pytest.approx((2 * 6 + 3 * 12) / 6)


@pytest.mark.limit("sync=swarm")
def test_a_swarm_of_few_bits_learns_as_much_in_fewer_bytes():
    swarm = ("sync=swarm", "sync.local_steps=2", "topology.graph=complete", "stop.steps=200")
    exact, fine, few = (run(*swarm, f"sync.bits={bits}") for bits in ("null", 16, 8))
    sent = [
        sum(ledger["bytes_up"] for ledger in each.of("TimeTotals")) for each in (exact, fine, few)
    ]
    torch.testing.assert_close(fine.params, exact.params, rtol=0, atol=2e-3)
    assert sent[1] < 0.65 * sent[0]
    assert sent[2] < 0.42 * sent[0]
    assert few.learner is not None
    found = [few.learner.evaluate(each.params)["test_loss"] for each in (few, exact)]
    assert found[0] < 1.05 * found[1]
    assert run(*swarm, "sync.bits=8", "runtime.gradients=false").end["steps"] >= 200


def test_residues_are_read_by_who_is_near_and_by_nobody_else():
    x = torch.linspace(-30, 50, 1000)
    near = x + 0.9 * torch.sin(torch.arange(1000))
    sums = torch.zeros(1000)
    for number in range(400):
        parts = encode_residues(x, 0.25, 4, EncodeContext(round=number))
        found = decode_near(parts, near)
        assert found is not None
        assert float((found - x).abs().max()) <= 0.2501
        sums += found
    assert float((sums / 400 - x).abs().max()) < 0.05, "of the mean nothing is lost"
    assert decode_near(parts, near + 4) is None
    assert decode_near(parts, torch.full((1000,), torch.nan)) is None
    body = write_payload(CODE, 1000, parts)
    assert body.nbytes == payload_nbytes(1000, 4)
    with pytest.raises(PayloadError, match="expected 900 residues"):
        decode_near(read_payload(body, CODE, 1000), near[:900])


@pytest.mark.parametrize("mode", KEEPING)
@pytest.mark.parametrize("seed", range(4))
def test_without_steps_the_mean_is_kept_and_all_come_together(mode, seed):
    sync = conf_option("sync", mode.split()[0], **KEEPING[mode])
    before, after, _ = mixed(sync, gossip(), 5, 60, seed)
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=1e-5)
    assert spread(after) < 0.2 * spread(before)


def test_a_compressed_choco_keeps_the_mean_too():
    codec = conf_option("compression", "topk", ratio=0.2)
    sync = conf_option("sync", "choco", gamma=0.2)
    before, after, _ = mixed(sync, gossip(), 5, 150, codec=codec)
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=5e-5)
    assert spread(after) < 0.02 * spread(before)


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("graph", ["one_peer_exponential", "star"])
def test_push_sum_conserves_its_mass(graph, overlap):
    """Every model becomes the plain mean, on a graph of unequal degrees and with late messages."""
    before, after, _ = mixed(
        conf_option("sync", "sgp", overlap=overlap), gossip(graph=graph), 5, 120 + 100 * overlap
    )
    torch.testing.assert_close(after, before.mean(0).expand_as(after), rtol=0, atol=1e-5)


@pytest.mark.parametrize("graph", ["ring", "star", "torus"])
def test_what_is_relayed_is_the_sum_of_all_after_the_trees_diameter(graph):
    n = 8
    near = spanning_tree(edges_of(graph, 1, n, 0), n)
    assert sum(map(len, near)) == 2 * (n - 1)
    width = 2 * max(depths(near))  # at least the diameter
    heard = [{} for _ in range(n)]
    for _ in range(width):
        messages = {(i, j): relay_sum(start_of(i), heard[i], j) for i in range(n) for j in near[i]}
        heard = [{j: messages[j, i] for j in near[i]} for i in range(n)]
    whole = sum(start_of(rank) for rank in range(n))
    for rank in range(n):
        total, count = relay_sum(start_of(rank), heard[rank])
        assert count == n
        torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.limit("sync=noloco")
def test_pairs_of_noloco_take_the_mean_of_two():
    sync = conf_option("sync", "noloco", local_steps=1, alpha=0.0, gamma=1.0)
    before, after, _ = mixed(sync, gossip(graph="complete"), 4, 1)
    pairs = {
        tuple(j for j in range(4) if torch.allclose(after[i], after[j], atol=1e-6))
        for i in range(4)
    }
    assert sorted(map(len, pairs)) == [2, 2]
    for pair in pairs:
        torch.testing.assert_close(after[pair[0]], before[list(pair)].mean(0), rtol=0, atol=1e-6)
