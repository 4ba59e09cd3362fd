"""`ashl export RUN --to torchft`, `deepspeed` and `ddp` without a merge plan: what the scripts say, and what they learn
where the package is installed."""

import ast
import builtins
import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import pytest
import torch

from ashl.cli.app import main
from tests.exported import exported, on_the_batches_of
from tests.support import planned

RUN = "runtime=sim tracking=none model.hidden=[16] topology=all_reduce eval.every_commits=100 cluster.compute=[1,1]"
STREAMING = "sync=local_sgd sync.local_steps=4 outer=nesterov overlap=streaming overlap.delay={} overlap.alpha={}"
BITS = "schedule=one_bit_adam schedule.warmup_epochs=0.5"


def unrun(*overrides: str) -> Path:
    """The folder of a run that has not run, as `ashl advise` leaves one."""
    Path("run").mkdir()
    Path("run/plan.json").write_text(planned(*RUN.split(), "stop.steps=200", *overrides).to_json())
    return Path("run")


SAID = [  # target, run, what its script has to say
    ("torchft", "sync=bsp", ["(0, 32, 100, 2)", "Optimizer(manager, inner)", "learning_rate(k * "]),
    ("torchft", "sync=local_sgd sync.local_steps=5", ["LOCAL_STEPS = 5", "LocalSGD(manager, net, inner, LOCAL_STEPS)"]),
    (
        "torchft",
        "sync=local_sgd sync.local_steps=5 outer=nesterov optimizer=adamw",
        [
            "DiLoCo(manager, [net], inner, outer",
            "SGD(net.parameters(), 0.7, 0.9, nesterov=True)",
            "AdamW(params, 0.001",
        ],
    ),
    (
        "torchft",
        STREAMING.format(1, 0.5),
        ["FRAGMENTS = [[0, 1], [2, 3]]", "LOCAL_STEPS * len(parts)", "sync_delay=1", "alpha=0.5"],
    ),
    ("deepspeed", "sync=bsp optimizer.weight_decay=0", ["per_gpu': BATCH", "optimizer=inner", "weight_decay=0.0"]),
    ("deepspeed", f"{BITS} optimizer=adamw optimizer.weight_decay=0.1", ["'weight_decay': 0.1"]),
    ("deepspeed", BITS, ["'OneBitAdam'", "'freeze_step': 11", "'betas': [0.9, 0.999]", "model_parameters=net.param"]),
    (
        "ddp",
        "sync=bsp",
        ["(0, 32, 100, 2)", "DistributedDataParallel(net, forward_sync_buffers=False)"],
    ),
    ("ddp", "sync=local_sgd sync.local_steps=5", ["WARMUP = 0", "PeriodicModelAverager(LOCAL_STEPS, WARMUP + LOCAL"]),
    ("ddp", "schedule=post_local schedule.switch_epochs=0.5", ["WARMUP = 11", "LOCAL_STEPS = 8"]),
]


@pytest.mark.parametrize(("to", "what", "says"), SAID)
def test_what_a_script_says(to: str, what: str, says: list[str], workplace: Path) -> None:
    """It compiles, has the run's values, imports what there is and all that it names, and nothing else."""
    assert main(["export", str(unrun(*what.split())), "--to", to, "--out", "written.py"]) == 0
    text = Path("written.py").read_text()
    tree = ast.parse(text)
    body = ast.unparse(tree)
    assert [part for part in says if part not in body] == []
    assert text.endswith("\n")
    bound, used = set(dir(builtins)), {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [own.name for own in node.names]
            names = {(own.asname or own.name).partition(".")[0] for own in node.names}
            assert names <= used
            bound |= names
            for module in modules:
                root = module.partition(".")[0]
                assert root in {*sys.stdlib_module_names, "torch", "ashl", to}
                if root != to and isinstance(node, ast.ImportFrom):
                    assert {own.name for own in node.names} <= set(dir(importlib.import_module(module)))
        elif isinstance(node, ast.FunctionDef | ast.Lambda):
            bound |= {own.arg for own in node.args.args} | ({node.name} if isinstance(node, ast.FunctionDef) else set())
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert used - bound - stored <= {"__name__"}


@pytest.mark.parametrize(
    ("to", "overrides", "says"),
    [
        (
            "torchft",
            "sync=bsp compression=topk",
            "such a script has no compression=topk; name a run with none; of this",
        ),
        ("torchft", "sync=ssp topology=parameter_server", "not all go round by round on the same model; name a run"),
        (
            "torchft",
            "sync=local_sgd sync.local_steps=plan schedule.h_preset=[4] cluster.compute=[1,2]",
            "take different",
        ),
        (
            "deepspeed",
            "sync=local_sgd",
            "it sums gradients, and not what steps made of the model; name a run with sync=bsp",
        ),
        (
            "deepspeed",
            f"{BITS} optimizer.weight_decay=0.1",
            "where optimizer=adam adds it to the gradient; name a run with optimizer=adamw",
        ),
        ("deepspeed", f"{BITS} compression=qsgd", "no compression=qsgd; name a run with one_bit, or sign with"),
        (
            "ddp",
            "sync=local_sgd outer=nesterov",
            "no outer=nesterov; name a run with average; of this run there is --to ",
        ),
        ("ddp", "schedule=post_local optimizer=adam", "name a run with optimizer=sgd and schedule.momentum=keep"),
    ],
)
def test_what_a_target_cannot_say(to: str, overrides: str, says: str, workplace: Path, capsys) -> None:
    unrun(*overrides.split())
    capsys.readouterr()
    assert main(["export", "run", "--to", to]) == 2
    said = capsys.readouterr().err
    assert said.startswith("ashl: run cannot be written for ")
    assert said.count("\n") == 1
    assert says in said


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("plan.json", "{", "run/plan.json is no usable plan: line 1 is not JSON"),
        ("summary.json", '{"steps": 4}', "run/summary.json is damaged; name another run, or delete it"),
        ("plan.json", None, "its plan no number of steps; name one that has ended"),
    ],
)
def test_a_damaged_run_is_not_exported(file: str, text: str | None, says: str, workplace: Path, capsys) -> None:
    run = unrun("sync=bsp")
    if text is None:
        known = json.loads((run / file).read_text())
        text = json.dumps(known | {"limits": known["limits"] | {"steps": None, "epochs": None, "seconds": 9.0}})
    (run / file).write_text(text)
    assert main(["export", "run", "--to", "script"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said


def test_a_script_is_not_named_as_what_it_imports(workplace: Path, capsys) -> None:
    unrun("sync=bsp")
    assert main(["export", "run", "--to", "torchft", "--out", "torchft.py"]) == 2
    assert "hides torchft from itself; take another one, as train_torchft.py" in capsys.readouterr().err


def losses_of(run: Path, workers: int) -> list[float]:
    """The mean over the workers of each round."""
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    rounds = [[row["loss"] for row in rows if row["kind"] == "round" and row["rank"] == k] for k in range(workers)]
    return [fmean(own) for own in zip(*rounds, strict=True)]


def trained(*overrides: str) -> Path:
    assert main(["train", "-q", *RUN.split(), "run.dir=run", "stop.steps=48", *overrides]) == 0
    return Path("run")


def test_averages_come_after_as_many_steps_as_in_the_run(workplace: Path, gloo: None, monkeypatch) -> None:
    run = trained("cluster.compute=[1]", "schedule=post_local", "schedule.switch_epochs=0.1", "schedule.local_steps=4")
    written = on_the_batches_of(run, exported(run, "ddp"), 48)
    assert (written.WARMUP, written.ROUNDS) == (6, 48)  # all hear of the switch one round later
    averaged, losses = list[int](), list[float]()
    averages = "torch.distributed.algorithms.model_averaging.utils.average_parameters_or_parameter_groups"
    monkeypatch.setattr(averages, lambda params, group: averaged.append(len(losses) + 1))
    for loss in written.train(0):
        losses.append(loss)
    assert averaged == list(range(6 + 4, 49, 4))
    rounds = [*losses[:6], *(fmean(losses[k : k + 4]) for k in range(6, 46, 4))]
    assert rounds == pytest.approx(losses_of(run, 1)[: 6 + 10], rel=1e-4)


@pytest.mark.parametrize(
    "what",
    [
        "sync=bsp",
        "sync=local_sgd sync.local_steps=4",
        "sync=local_sgd sync.local_steps=4 outer=nesterov optimizer=adamw",
        STREAMING.format(0, 0),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of their own
def test_torchft_learns_what_the_run_learned(what: str, workplace: Path, monkeypatch) -> None:
    pytest.importorskip("torchft")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=10000)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", lighthouse.address())
    run = trained(*what.split())
    written = on_the_batches_of(run, exported(run, "torchft"), 24)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda rank: list(written.train(rank)), range(2)))
    lighthouse.shutdown()
    assert [fmean(own) for own in zip(*both, strict=True)] == pytest.approx(losses_of(run, 2), rel=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)  # DeepSpeed compiles something on first use
def test_deepspeed_learns_what_the_run_learned(workplace: Path, gloo: None, monkeypatch) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("LOCAL_RANK", "0")
    run = trained("cluster.compute=[1]", "sync=bsp", "optimizer.schedule=cosine", "optimizer.horizon_epochs=2")
    written = on_the_batches_of(run, exported(run, "deepspeed"), 48)
    assert list(written.train(0)) == pytest.approx(losses_of(run, 1), rel=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_one_bit_adam_of_deepspeed_takes_the_section(workplace: Path, gloo: None, monkeypatch) -> None:
    """Its compression is for CUDA; alone, a worker sends nothing, and it is Adam with a variance that stands still."""
    pytest.importorskip("cupy")
    pytest.importorskip("deepspeed.runtime.fp16.onebit.adam")
    monkeypatch.setenv("LOCAL_RANK", "0")
    run = trained("cluster.compute=[1]", *BITS.split())
    written = on_the_batches_of(run, exported(run, "deepspeed"), 48)
    losses = torch.tensor(list(written.train(0)))
    assert losses[-8:].mean() < losses[:8].mean()
