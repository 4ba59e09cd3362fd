"""Configurations that cannot run: one sentence with the way out, exit code 2, and nothing begun."""

import shlex

import pytest

from ashl.config.compose import compose
from ashl.errors import UsageError
from ashl.planning.compile_plan import compile_plan

PORTS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.002"
HOSTLESS = "runtime=local cluster=real cluster.num_workers=2"
RING = "topology=all_reduce sync=bsp"
SERVERS = f"sync=bsp topology=sharded_server {PORTS}"
GROUPS = "topology=partial_all_reduce sync=ripples_smart"
GOSSIP = "topology=gossip sync=d_psgd topology.graph="
HOP = "topology=gossip sync=hop"
LAYERS = f"{RING} {PORTS} compression=topk overlap=layerwise"
STREAM = f"topology=all_reduce sync=local_sgd {PORTS} overlap=streaming overlap.fragments=2"
GRAPHS = {
    "apart": "0 1\n2 3\n",
    "weighted": "0 1 0.5\n",
}

CLUSTERS = {
    "cluster.compute=[1,0]": "cluster.compute.1=0 is not possible: should be greater than 0",
    "cluster.compute=[1e300,1]": "should be less than or equal to",
    "cluster.compute=[]": "is an empty cluster; give the slowdown factor of each worker",
    "cluster.compute=fast": "should be a list, for example 'cluster.compute=[fast]'",
    "cluster.link=[1,2] cluster.compute=[1,2,3]": "link has 2 entries and cluster.compute has 3",
    "cluster.link=[1,2] cluster.node=[]": "cluster.node has 0 entries and cluster.compute has 2",
    "cluster.compute=[1,2] cluster.num_workers=3": "has 2 entries and cluster.num_workers is 3",
    "cluster.num_workers=1000000": "should be less than or equal to 100000",
    "cluster.intra_node_bandwidth_mbit_s=9": "needs cluster.node",
    "'cluster.events=[{time_s: 1, worker: 4, link: 2}]'": "there are only workers 0 to 3",
    "'cluster.events=[{time_s: 1, worker: 0}]'": "add compute=, link= or link_down=",
    "'cluster.events=[{time_s: 1, worker: 0, compute: 1e308}]'": "compute=1e+308 is not possible",
    "cluster.step_s=null": "cluster.step_s: not declared, and runtime=sim needs it",
    "cluster.exchange_s=null": "cluster.bandwidth_mbit_s: not declared",
    "cluster.server_step_s=null": "cluster.server_step_s: not declared",
    "cluster=real cluster.num_workers=2": "add the profile=FILE that was measured on this one",
    "cluster=real runtime=local": "set it, for example cluster.num_workers=2",
    f"{SERVERS} topology.servers=9 topology.partition_by=layers": "take at most as many servers",
}
COMBINATIONS = {
    "sync=backup sync.backups=4": "leaves no worker to wait for among 4 workers; take at most 3",
    "sync.local_steps=plan": "needs a schedule that plans H per worker; give a number",
    f"{GROUPS} sync.group_size=5": "the run has only 4 workers; set it to at most 4",
    "topology=halos sync=asp": "and cluster.node is null; set cluster.node",
    "sync=local_sgd outer.lr=0.7": "outer=average has no key lr; these have one: adam, co2, heavy",
    "optimizer.schedule=cosine stop.steps=9": "add for example optimizer.horizon_epochs=20",
    "runtime.gradients=false stop.target_loss=1": "no target can be reached; remove stop.target_",
    "dataset=quadratic model=linear stop.target_accuracy=0.9": "accuracy",
    "runtime=local runtime.backend=nccl": "this run is on CPUs; take auto",
    "runtime.device=cuda": "runtime.device=cuda",
    "runtime.graphs=on": "captures steps of CUDA devices, and this run is on a CPU; take off",
    "runtime=torchrun": "start it as `torchrun",
    "dataset.batch_size=361": "359 samples, fewer than its batch of 361; take ",
    "dataset=synthetic dataset.num_train=3": "3 samples do not go round 4 workers",
    "dataset.partition=dirichlet": "add for example dataset.alpha=0.5",
    "dataset.alpha=0.5": "has no effect with dataset.partition=plan",
    "model=lenet": "needs images of at least 28x28 pixels, but a sample of this data set has shape",
}
VALUES = {
    "run.checkpoint_s=1e300": "run.checkpoint_s=1e+300 is not possible: should be less than",
    "stop.target_metric=nan": "stop.target_metric=nan is not possible: should be a finite number",
    "stop.target_accuracy=97": "should be less than or equal to 1",
    "stop.steps=0": "should be greater than or equal to 1",
    "stop.steps=true": "stop.steps=true is not possible",
    "seed=-1": "seed=-1 is not possible",
    "seed=100000000000000000000": "seed=100000000000000000000",
    "optimizer.momentum=1": "optimizer.momentum=1 is not possible: should be less than 1",
    "sync=local_sgd outer=slowmo outer.beta=1": "outer.beta=1 is not possible: should be less",
    "compression=topk compression.ratio=1.5": "compression.ratio=1.5 is not possible",
    "optimizer.lr=true": "should be a number, not true or false",
    "optimizer.weight_decay=1e300": "optimizer.weight_decay=1e+300 is not possible",
    "sync=local_sgd outer=adam outer.tau=1e300": "outer.tau=1e+300 is not possible",
    "sync=local_sgd outer=co2 outer.clip=1e300": "outer.clip=1e+300 is not possible",
    "sync.staleness=1.5": "sync.staleness=1.5 is not possible: should be a whole number",
    "tracking.events=some": "should be 'all', 'sampled' or 'none'",
    "model.hidden=[100000000000]": "there is not enough memory; take a smaller dataset.batch_size, data set or model",
    "model.hidden=null": "model.hidden=null is not possible: should be a list",
    "dataset=synthetic dataset.num_train=10000000000": "less than or equal to 1000000000",
    "schedule=ashl schedule.h_preset=[1]": "should have at least 2 values",
    "name=a/b": "cannot contain /, \\ or unprintable characters; set the path",
    "\"name='\x1b2J'\"": "name= 2J: a part of a folder's name cannot contain",
}
TARGETS = {
    "model._target_=os.system": "outside of ashl; allow it with 'allow_targets=[os]'",
    "model._target_=os.system allow_targets=[os]": "which is not a class defined in os",
    "model._target_=ashl.model.nothing.X": "cannot be imported",
    "model._target_=ashl.optimizer.sgd.SGD": "which is no model: it has no 'build'",
    "model._target_=nowhere.X allow_targets=[nowhere]": "start in the folder that holds it",
    "model._target_=ashl.model.mlp.Nothing": "is not a class defined in ashl.model.mlp",
    "model._target_=ashl.model.mlp.nn": "is not a class defined in ashl.model.mlp",
}
SUMS = {
    "hierarchical": "cluster.node is not set; give the node of each worker",
    f"hierarchical {HOSTLESS}": "cluster.hosts is not set; give the node",
    f"hierarchical cluster.node=[0,0,1,1] runtime=local {PORTS}": "intra_node_bandwidth_mbit_s",
    f"auto {HOSTLESS}": "supported in virtual time only, gloo or NCCL chooses the algorithm",
    f"ring runtime=local {PORTS}": "take runtime=sim, topology.algorithm=hierarchical, or remove",
    "tree compression=topk": "gathered on a ring; take compression=none",
}
GRAPH_FAULTS = {
    f"{GOSSIP}apart.edges": "is not connected: some workers never receive from others",
    f"{GOSSIP}weighted.edges": "line 1: expected two ranks from 0 to 3, not '0 1 0.5'",
    f"{GOSSIP}wheel": "neither a file that can be read nor one of ring, star, complete, torus",
    f"{GOSSIP}random_regular topology.degree=4": "take a degree below 4",
    f"{HOP} sync.backups=2": "2 neighbours no neighbour to wait for; take at most 1",
    f"{HOP} sync.max_lead=1": "sync.max_lead=1: below sync.staleness=2",
    f"{HOP} sync.skip_lead=4": "by at most 3 iterations, so no worker would ever skip",
    "topology=gossip sync=d_admm sync.barrier=3": "more than the 2 neighbours of a worker",
}
COMPRESSIONS = {
    "compression=topk compression.ratio=1e-7": "less than one of the model's 9610 elements",
    "compression=topk compression.critical_ratio=1e-7": "critical_ratio=1e-07: sends less than",
    "compression=topk compression.critical_ratio=0.01": "is less than compression.ratio=0.05",
    "compression=topk topology.pull_ratio=1e-7 sync=bsp": "pull_ratio=1e-07: sends less than one",
    "compression=none topology.pull_ratio=0.1": "no effect here, it needs a compression",
    "compression=qsgd compression.error_feedback=true": "set compression.error_feedback=",
    "compression=qsgd compression.momentum=0.9 optimizer.momentum=0": "compression.momentum=null",
    "compression=sign compression.vote=majority sync=bsp": "compression.error_feedback=false",
}
OVERLAPS = {
    f"{LAYERS} overlap.ratio=[0.1]": "lists 1 densities for 2 messages",
    f"{LAYERS} overlap.ratio=adaptive compression.ratio=0.5": "above overlap.max_ratio=0.1",
    f"{LAYERS} overlap.plan=[3]": "holds 3 layer groups, and the model has 2",
    f"{RING} {PORTS} overlap=merged overlap.plan=[1,7]": "holds 8 layer groups",
    f"{RING} {PORTS} overlap=merged overlap.plan=best": "should be 'greedy', 'optimal' or 'bytes'",
    f"{RING} {PORTS} overlap=dear overlap.plan=[1,7]": "holds 8 layer groups",
    f"sync=bsp {PORTS} overlap=tictac overlap.plan=[9]": "holds 9 layer groups",
    f"{STREAM} overlap.fragments=9": "the model has 2 layer groups; take at most 2",
    f"{STREAM} overlap.delay=8": "take overlap.delay=7",
    "sync=bsp cluster.exchange_s=0.01 overlap=wfbp": "no NIC is ever busy; set cluster.exchange_s",
    f"{HOSTLESS} {RING} overlap=merged": "take overlap.plan=bytes",
    f"{HOSTLESS} {RING} overlap=dear": "take overlap.plan=bytes",
    f"{HOSTLESS} {RING} overlap=priority overlap.slice=auto": "overlap.plan=layers overlap.slice",
    f"{HOSTLESS} {RING} overlap=layerwise compression=topk overlap.plan=greedy": "overlap.plan=none",
    f"{HOSTLESS} {RING} overlap=layerwise compression=topk overlap.ratio=adaptive": "ratio=null",
}
WRONG = {
    **CLUSTERS,
    **COMBINATIONS,
    **VALUES,
    **TARGETS,
    **{f"{RING} topology.algorithm={chosen}": says for chosen, says in SUMS.items()},
    **GRAPH_FAULTS,
    **COMPRESSIONS,
    **OVERLAPS,
}


@pytest.mark.parametrize("overrides", WRONG)
def test_a_wrong_configuration(overrides: str, said, workplace) -> None:
    for name, text in GRAPHS.items():
        (workplace / f"{name}.edges").write_text(text)
    before = set(workplace.iterdir())
    code, sentence = said(*shlex.split(overrides))
    assert WRONG[overrides] in sentence
    assert code == 2
    assert set(workplace.iterdir()) == before, "nothing was begun"


@pytest.mark.parametrize(
    ("sync", "has", "needs"),
    [
        ("d_psgd", 5, "4 workers need 4"),
        ("hop", 3, "1 coordinator need 5"),
    ],
)
def test_a_job_of_another_size_is_told_both_numbers(sync: str, has: int, needs: str) -> None:
    config = compose(["runtime=torchrun", "topology=gossip", f"sync={sync}"], None)
    with pytest.raises(UsageError, match=f"the job has {has} processes, and .*{needs}"):
        compile_plan(config, world_size=has)
