"""Gossip asked for wrongly: one sentence with the way out, exit code 2, before anything starts; and
a run that flies apart says why.
"""

import shlex
from functools import partial

import pytest

from ashl.config.compose import compose
from ashl.errors import UsageError
from ashl.planning.compile_plan import compile_plan

FILES = {
    "apart": "0 1\n2 3\n",
    "short": "0 0 0.5\n0 1 0.4\n1 0 0.5\n1 2 0.2\n2 1 0.2\n2 3 0.2\n3 2 0.2\n",
    "uneven": "0 1 0.5\n1 0 0.25\n1 2 0.25\n2 1 0.5\n3 2 0.5\n2 3 0.25\n",
    "zero": "0 0 0\n1 0 1\n2 1 1\n1 2 1\n3 3 1\n1 1 0\n2 2 0\n",
}


@pytest.fixture
def gossips(workplace, said):
    """`said`, of gossip, beside some files with graphs."""
    for name, text in FILES.items():
        (workplace / f"{name}.edges").write_text(text)
    return partial(said, "topology=gossip")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            "sync=d_psgd topology.graph=apart.edges",
            "is not connected: some workers never receive from others",
        ),
        (
            "sync=d_psgd topology.graph=short.edges",
            "the weights at worker 0 add up to 0.9, and should add up to 1",
        ),
        ("sync=sgp topology.graph=zero.edges", "leaves worker 0 a push-sum weight of zero"),
        (
            "sync=d_psgd topology.graph=wheel",
            "neither a file that can be read nor one of ring, star, complete, torus",
        ),
        ("sync=d_psgd topology.graph=uneven.edges", "give the file others, or take sync=sgp"),
        ("sync=d_psgd topology.graph=random_regular topology.degree=4", "take a degree below 4"),
        (
            "sync=choco topology.graph=one_peer_exponential",
            "its graph must not change from round to round",
        ),
        (
            "sync=hop sync.backups=2",
            "leaves a worker with 2 neighbours no neighbour to wait for; take at most 1",
        ),
        ("sync=hop sync.max_lead=1", "sync.max_lead=1: below sync.staleness=2"),
        (
            "sync=hop sync.skip_lead=4",
            "a worker leads a neighbour by at most 3 iterations, so no worker would ever skip",
        ),
        (
            "sync=d_admm sync.barrier=3",
            "sync.barrier=3: more than the 2 neighbours of a worker; take at most 2",
        ),
        ("sync=d_psgd topology=all_reduce", "take topology=gossip"),
    ],
)
def test_a_wrong_configuration(overrides: str, says: str, gossips) -> None:
    code, sentence = gossips(*shlex.split(overrides))
    assert says in sentence
    assert code == 2


def test_choco_with_too_large_a_step_diverges_and_says_why(gossips) -> None:
    code, sentence = gossips(
        "sync=choco",
        "compression=topk",
        "compression.ratio=0.01",
        "sync.gamma=3",
        "stop.steps=2000",
    )
    assert code == 1
    assert "the run diverged: the loss of worker" in sentence
    assert "sync.gamma=3 is too large for this compression" in sentence


@pytest.mark.parametrize(
    ("sync", "has", "needs"),
    [
        ("d_psgd", 5, "4 workers need 4"),
        ("hop", 3, "1 coordinator need 5, or 4 if the coordinator shares"),
    ],
)
def test_a_job_of_another_size_is_told_both_numbers(sync: str, has: int, needs: str) -> None:
    config = compose(["runtime=torchrun", "topology=gossip", f"sync={sync}"], None)
    with pytest.raises(UsageError, match=f"the job has {has} processes, and .*{needs}"):
        compile_plan(config, world_size=has)
