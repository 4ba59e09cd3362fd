"""Wrong and missing inputs: one sentence with the fix, the right exit code, and no run folder if no
run started.
"""

import json
import shlex
from types import SimpleNamespace

import pytest

from ashl.cli.app import main
from ashl.config.compose import compose
from ashl.run import train as run

PORTS = "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.002"
SERVERS = f"{PORTS} topology=sharded_server"
SUMS = "topology=all_reduce sync=bsp topology.algorithm="
HOSTLESS = "runtime=local cluster=real cluster.num_workers=2"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        # the cluster
        ("cluster.compute=[1,0]", "cluster.compute.1=0 is not possible: should be greater than 0"),
        (
            "cluster.compute=[-1,1]",
            "cluster.compute.0=-1 is not possible: should be greater than 0",
        ),
        ("cluster.compute=[nan,1]", "is not possible"),
        (
            "cluster.compute=[]",
            "cluster.compute=[] is an empty cluster; give the slowdown factor of each worker",
        ),
        (
            "cluster.compute=fast",
            "=fast is not possible: should be a list, for example 'cluster.compute=[fast]'",
        ),
        ("cluster.compute=[a,b]", "cluster.compute.0=a is not possible: should be a number"),
        (
            "cluster.link=[1,2] cluster.compute=[1,2,3]",
            "cluster.link has 2 entries and cluster.compute has 3",
        ),
        (
            "cluster.link=[1,2] cluster.node=[]",
            "cluster.node has 0 entries and cluster.compute has 2",
        ),
        (
            "cluster.compute=[1,2] cluster.num_workers=3",
            "has 2 entries and cluster.num_workers is 3; give",
        ),
        (
            "cluster.num_workers=0",
            "cluster.num_workers=0 is not possible: should be greater than or equal to 1",
        ),
        (
            "cluster.num_workers=2.5",
            "cluster.num_workers=2.5 is not possible: should be a whole number",
        ),
        ("cluster.num_workers=1000000", "should be less than or equal to 100000"),
        (
            "cluster.compute_spread=9",
            "cluster.compute_spread=9 is not possible: should be less than or equal to 3",
        ),
        ("cluster.jitter=-0.1", "cluster.jitter=-0.1 is not possible"),
        ("cluster.intra_node_bandwidth_mbit_s=9", "needs cluster.node"),
        ("'cluster.events=[{time_s: 1, worker: 4, link: 2}]'", "there are only workers 0 to 3"),
        (
            "'cluster.events=[{time_s: 1, worker: 0}]'",
            "changes nothing; add compute=, link= or link_down=",
        ),
        ("cluster.step_s=null", "cluster.step_s: not declared, and runtime=sim needs it"),
        ("cluster.exchange_s=null", "cluster.bandwidth_mbit_s: not declared"),
        ("cluster.server_step_s=null", "cluster.server_step_s: not declared"),
        (
            "cluster=real cluster.num_workers=2",
            "add the profile=FILE that was measured on this one, or take runtime=local",
        ),
        ("cluster=real runtime=local", "set it, for example cluster.num_workers=2"),
        # checkpoints
        ("run.checkpoint_s=0", "run.checkpoint_s=0 is not possible"),
        # combinations
        ("topology=all_reduce sync=backup", "take topology=parameter_server"),
        (
            "sync=backup sync.backups=4",
            "leaves no worker to wait for among 4 workers; take at most 3",
        ),
        ("sync.local_steps=plan", "needs a schedule that plans H per worker; give a number"),
        (
            "topology=partial_all_reduce sync=ripples_smart sync.group_size=5",
            "the run has only 4 workers; set it to at most 4",
        ),
        (
            "topology=partial_all_reduce sync=ripples_random sync.group_size=1",
            "should be greater than or equal to 2",
        ),
        (
            "topology=partial_all_reduce sync=ripples_smart sync.threshold=0",
            "should be greater than or equal to 1",
        ),
        ("topology=halos sync=asp", "and cluster.node is null; set cluster.node"),
        (
            "sync=local_sgd outer=nesterov outer.lr=0",
            "outer.lr=0 is not possible: should be greater than 0",
        ),
        (
            "sync=local_sgd outer=slowmo outer.beta=1",
            "outer.beta=1 is not possible: should be less than 1",
        ),
        (
            "sync=local_sgd outer.lr=0.7",
            "outer=average has no key lr; these have one: adam, co2, heavy_ball, heloco",
        ),
        ("optimizer.schedule=cosine stop.steps=9", "add for example optimizer.horizon_epochs=20"),
        (
            "runtime.gradients=false stop.target_loss=1",
            "no target can be reached; remove stop.target_",
        ),
        ("runtime=local runtime.backend=nccl", "this run is on CPUs; take auto"),
        (
            "runtime.graphs=on",
            "captures steps of CUDA devices, and this run is on a CPU; take off, or auto",
        ),
        ("runtime=torchrun", "start it as `torchrun"),
        # data and model
        (
            "dataset.batch_size=361",
            "Worker 1's shard holds 359 samples, fewer than its batch of 361; take ",
        ),
        (
            "dataset=synthetic dataset.num_train=3",
            "Worker 3's shard is empty: 3 samples do not go round 4 workers",
        ),
        ("dataset.batch_size=0", "should be greater than or equal to 1"),
        ("dataset.partition=dirichlet", "add for example dataset.alpha=0.5"),
        ("dataset.alpha=0.5", "has no effect with dataset.partition=plan"),
        (
            "model=lenet",
            "needs images of at least 28x28 pixels, but a sample of this data set has shape 1x8x8",
        ),
        # values
        ("optimizer.lr=0", "optimizer.lr=0 is not possible: should be greater than 0"),
        ("optimizer.lr=fast", "optimizer.lr=fast is not possible: should be a number"),
        (
            "optimizer.lr=true",
            "optimizer.lr=true is not possible: should be a number, not true or false",
        ),
        (
            "model.hidden=[100000000000]",
            "the model does not fit into this machine's memory; make model.* smaller",
        ),
        ("model.hidden=null", "model.hidden=null is not possible: should be a list"),
        (
            "schedule=ashl schedule.h_preset=[1]",
            "schedule.h_preset=[1] is not possible: should have at least 2 values",
        ),
        ("name=a/b", "cannot contain /, \\ or unprintable characters; set the path"),
        ("optimizer.lr=nan", "optimizer.lr=nan is not possible"),
        ("sync.staleness=1.5", "sync.staleness=1.5 is not possible: should be a whole number"),
        ("stop.target_accuracy=97", "should be less than or equal to 1"),
        ("stop.steps=0", "should be greater than or equal to 1"),
        ("seed=-1", "seed=-1 is not possible"),
        ("tracking.events=some", "should be 'all', 'sampled' or 'none'"),
        # targets
        ("model._target_=os.system", "outside of ashl; allow it with 'allow_targets=[os]'"),
        (
            "model._target_=os.system allow_targets=[os]",
            "names 'os.system', which is not a class defined in os",
        ),
        ("model._target_=ashl.model.nothing.X", "cannot be imported"),
        ("model._target_=ashl.optimizer.sgd.SGD", "which is no model: it has no 'build'"),
        (
            "model._target_=nowhere.X allow_targets=[nowhere]",
            "no module 'nowhere'; start in the folder that holds it",
        ),
        ("model._target_=ashl.model.mlp.Nothing", "is not a class defined in ashl.model.mlp"),
        ("model._target_=ashl.model.mlp.nn", "is not a class defined in ashl.model.mlp"),
        # several servers
        (f"sync=bsp {SERVERS} topology.servers=0", "topology.servers"),
        (
            f"sync=bsp {SERVERS} topology.servers=9 topology.partition_by=layers",
            "take at most as many servers, or topology.partition_by",
        ),
        # algorithms of sums
        (f"{SUMS}hierarchical", "cluster.node is not set; give the node of each worker"),
        (f"{SUMS}hierarchical {HOSTLESS}", "cluster.hosts is not set; give the node"),
        (
            f"{SUMS}auto {HOSTLESS}",
            "supported in virtual time only, gloo or NCCL chooses the algorithm",
        ),
        (
            f"{SUMS}ring runtime=local {PORTS}",
            "take runtime=sim, topology.algorithm=hierarchical, or remove",
        ),
        (
            f"{SUMS}tree overlap=dear {PORTS}",
            "splits an all-reduce into two halves of a ring; take overlap=priority",
        ),
        (f"{SUMS}tree compression=topk", "gathered on a ring; take compression=none"),
        (f"{SUMS}mesh", "topology.algorithm"),
        ("sync=bsp topology.algorithm=tree", "algorithm"),
        (
            f"{SUMS}hierarchical cluster.node=[0,0,1,1] runtime=local {PORTS}",
            "intra_node_bandwidth_mbit_s",
        ),
    ],
)
def test_a_wrong_configuration(overrides: str, says: str, said, workplace) -> None:
    code, sentence = said(*shlex.split(overrides))
    assert says in sentence
    assert code == 2
    assert not list(workplace.iterdir()), "nothing was begun"


@pytest.mark.parametrize(
    "overrides",
    [
        "stop.steps=true",
        "seed=100000000000000000000",
        "runtime.device=cuda run.dir=run",
        "dataset=quadratic model=linear stop.target_accuracy=0.9",  # it has no accuracy
    ],
)
def test_a_wrong_configuration_of_the_subtle_kind(overrides: str, said, workplace) -> None:
    code, _ = said(*overrides.split())
    assert code == 2
    assert not list(workplace.iterdir())


def test_more_workers_than_samples_are_timed_without_gradients(said) -> None:
    crowd = [
        "sync=asp",
        "cluster=homogeneous",
        f"cluster.compute={[1] * 300}",
        "dataset.batch_size=8",
    ]
    assert said(*crowd, "runtime.gradients=false", "stop.steps=600") == (0, "")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("dataset=mnist", "MNIST/raw/"),
        ("dataset=cifar10 model=resnet8 runtime=local", "cifar-10-batches-py/"),
        ("dataset=image_folder dataset.root=elsewhere", "train/<class>/"),
    ],
)
def test_missing_data(overrides: str, expected: str, said, workplace, monkeypatch) -> None:
    monkeypatch.setattr("ashl.run.launch.launch", None)  # before any worker is started
    code, sentence = said(*overrides.split())
    assert code == 3
    assert expected in sentence
    assert str(workplace / ("elsewhere" if "elsewhere" in overrides else "data")) in sentence
    assert "dataset.root=DIR" in sentence
    assert "dataset=digits" in sentence
    assert not list(workplace.iterdir())


MINE = """
from ashl.model.mlp import MLP
from ashl.option import option

@option
class Wide(MLP):
    '''A wide one.'''
"""


def test_allow_targets(said, workplace, monkeypatch) -> None:
    (workplace / "wide_models.py").write_text(MINE)
    monkeypatch.syspath_prepend(workplace)
    wanted = ["model._target_=wide_models.Wide", "sync=ssp", "run.dir=mine", "stop.steps=8"]
    assert said(*wanted) == (
        2,
        (
            "model names 'wide_models.Wide', outside of ashl; allow it with"
            " 'allow_targets=[wide_models]'"
        ),
    )
    assert said(*wanted, "allow_targets=[wide_models]") == (0, "")
    assert json.loads((workplace / "mine/summary.json").read_text())["steps"] == 8


FAULTY = """
from ashl.model.mlp import MLP
from ashl.option import option

@option
class Unmade(MLP):
    def __post_init__(self):
        raise RuntimeError("not like this")

@option
class Unbuilt(MLP):
    def build(self, sample_shape, num_classes):
        return sample_shape.nothing
"""


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("x = = 3", "X", "cannot be imported: SyntaxError: invalid syntax ({file}, line 1)"),
        (
            "import nowhere",
            "X",
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere' ({file}, line 1)",
        ),
        (FAULTY, "Unmade", "cannot be made: RuntimeError: not like this ({file}, line 8)"),
        (
            FAULTY,
            "Unbuilt",
            "failed, not ashl: AttributeError: 'tuple' object has no attribute 'nothing' ({file}",
        ),
    ],
)
def test_a_fault_of_the_users_own_is_told_as_that(
    text, name, says, said, workplace, monkeypatch
) -> None:
    module = f"faulty_{len(text)}_{name.lower()}"
    (workplace / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(workplace)
    code, sentence = said(f"model._target_={module}.{name}", f"allow_targets=[{module}]")
    assert says.format(file=workplace / f"{module}.py") in sentence
    assert code == 2


@pytest.mark.parametrize("mode", ["sync=ssp", "sync=backup", "sync=local_sgd topology=all_reduce"])
def test_a_loss_that_is_no_number(mode: str, said, workplace) -> None:
    code, sentence = said("optimizer.lr=1e30", "run.dir=run", *mode.split())
    summary = json.loads((workplace / "run/summary.json").read_text())
    assert code == 1
    whose = "the workers' mean loss became" if "all_reduce" in mode else "the loss of worker"
    assert f"the run diverged: {whose}" in sentence
    assert "near step" in sentence
    assert "lower optimizer.lr" in sentence
    assert (summary["status"], summary["stages"][0]["exit_reason"]) == ("diverged", "diverged")
    assert "near step" in summary["exit_reason"]
    assert summary["final"]["test_accuracy"] is not None
    parts = ["compute_s", "compress_s", "push_s", "pull_s", "wait_s", "down_s"]
    assert all(
        sum(w[part] for part in parts) == pytest.approx(summary["time_s"])
        for w in summary["workers"]
    )
    assert (workplace / "run/trace.json.gz").is_file()


def test_a_second_run_into_the_same_folder(said, workplace) -> None:
    assert said("run.dir=run", "stop.steps=8") == (0, "")
    before = {file.name: file.read_bytes() for file in (workplace / "run").iterdir()}
    assert said("run.dir=run", "stop.steps=9") == (
        2,
        "run already holds a run; choose another run.dir.",
    )
    assert {file.name: file.read_bytes() for file in (workplace / "run").iterdir()} == before


def test_two_runs_of_the_same_second(workplace, monkeypatch) -> None:
    monkeypatch.setattr(run.time, "strftime", lambda how: "now")
    config = compose(["runtime=sim"])
    assert len({run.make_run_folder(config, SimpleNamespace(name="x")) for _ in range(2)}) == 2


@pytest.mark.parametrize("place", ["file", "file/run", "/proc/ashl"])
def test_a_folder_that_cannot_be_written(place: str, said, workplace) -> None:
    (workplace / "file").write_text("mine")
    code, sentence = said(f"run.dir={place}", "stop.steps=8")
    assert code in (1, 2)
    assert place in sentence
    assert "choose another run.dir" in sentence
    assert "already holds a run" not in sentence
    assert (workplace / "file").read_text() == "mine"


@pytest.mark.parametrize("how", ["preset", "option", "sweep"])
def test_no_file_allows_code_to_be_imported(how: str, said, workplace, monkeypatch) -> None:
    monkeypatch.syspath_prepend(workplace)
    (workplace / "evil.py").write_text("raise AssertionError('imported')")
    own = {
        "preset": (
            "experiment/mine.yaml",
            "# @package _global_\nallow_targets: [evil]\nmodel: {_target_: evil.X}\n",
        ),
        "option": (
            "tracking/mine.yaml",
            "# @package _global_\nallow_targets: [evil]\ntracking: {_target_: evil.X}\n",
        ),
        "sweep": (
            "experiment/mine.yaml",
            "# @package _global_\nsweep: [{allow_targets: '[evil]', sync: bsp}]\n",
        ),
    }[how]
    path = workplace / "options" / own[0]
    path.parent.mkdir(parents=True)
    path.write_text(own[1])
    group = own[0].split("/")[0]
    if how == "sweep":
        assert main(["sweep", "--config-dir", "options", "experiment=mine"]) == 2
        return
    code, sentence = said("--config-dir", "options", f"{group}=mine")
    assert code == 2
    assert (
        "a file cannot allow code to be imported; if you trust it, type 'allow_targets=[evil]'"
        " on the" in sentence
    )
