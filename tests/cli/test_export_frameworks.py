"""`ashl export RUN --to ...`: what the scripts contain, what is refused, and what torchft learns if
it is installed.
"""

import ast
import importlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import pytest
import torch

from ashl.cli.app import main
from ashl.config.catalog import catalog, parameters, target
from ashl.export.scripts import COMMON, FIXED, TARGETS
from ashl.model.mlp import MLP
from ashl.overlap.contract import Delayed
from tests.exported import exported, on_the_batches_of
from tests.support import planned

RUN = (
    "runtime=sim tracking=none model.hidden=[16] topology=all_reduce eval.every_commits=100"
    " cluster.compute=[1,1]"
)


def unrun(*overrides: str) -> Path:
    """The folder of a run that has not run, as `ashl advise` leaves one."""
    Path("run").mkdir()
    Path("run/plan.json").write_text(planned(*RUN.split(), "stop.steps=200", *overrides).to_json())
    return Path("run")


SAID = [  # target, run, what its script has to contain
    (
        "torchft",
        "sync=bsp",
        ["ROUNDS = 100", "BATCH = 32", "Optimizer(manager, inner)", "learning_rate(k * "],
    ),
    (
        "torchft",
        "sync=local_sgd sync.local_steps=5",
        ["LOCAL_STEPS = [5, 5]", "LocalSGD(manager, net, inner, LOCAL_STEPS[rank])"],
    ),
    (
        "torchft",
        "sync=local_sgd sync.local_steps=5 outer=nesterov optimizer=adamw",
        [
            "DiLoCo(manager, [net], inner, outer",
            "SGD(params, 0.7, 0.9, nesterov=True)",
            "AdamW(params, 0.001",
        ],
    ),
    (
        "ddp",
        "sync=bsp",
        ["ROUNDS = 100", "WORKERS = 2", "MESSAGES = [4840]"],
    ),  # 1210 parameters in one message
    ("ddp", "sync=bsp run.start_from=start.pt", ["torch.load('"]),
    (
        "script",
        "sync=bsp optimizer.schedule=linear stop.steps=null stop.epochs=2",
        ["(samples - 0) / (2874.0 - 0)"],
    ),
    (
        "script",
        "sync=bsp optimizer.warmup_epochs=2",
        ["samples < 2874.0", "(0.1 + 0.9 * samples / 2874.0)"],
    ),
    ("script", "sync=bsp compression=topk runtime.gradients=false", ["SENT = [60, 60]"]),
    (
        "script",
        "sync=bsp compression=topk compression.ratio=0.9",
        ["SENT = [1210, 1210]"],
    ),  # dense is no longer
    ("script", "sync=bsp task.ignore_index=3", ["Classification(ignore_index=3).loss"]),
]


@pytest.mark.parametrize(("to", "what", "says"), SAID)
def test_what_a_script_says(to: str, what: str, says: list[str], workplace: Path) -> None:
    """It compiles, has the run's values, and imports what there is and what it uses."""
    torch.save(MLP(hidden=[16]).build((1, 8, 8), 10).state_dict(), "start.pt")
    assert main(["export", str(unrun(*what.split())), "--to", to, "--out", "written.py"]) == 0
    text = Path("written.py").read_text()
    tree = ast.parse(text)
    assert [part for part in says if part not in ast.unparse(tree)] == []
    linted = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F", "written.py"]
    )
    assert linted.returncode == 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ashl"):
            known = dir(importlib.import_module(node.module))
            assert {own.name for own in node.names} <= set(known)


REFUSED = [  # target, run, what is refused, what to take, the other targets
    ("torchft", "sync=bsp compression=topk", "compression=topk", "compression=none", "--to script"),
    ("torchft", "sync=ssp topology=parameter_server", "sync=ssp", "sync=bsp or local_sgd", ""),
    (
        "torchft",
        "sync=local_sgd sync.local_steps=plan schedule.h_preset=[4] cluster.compute=[1,2]",
        "its workers differ in weight or steps",
        "aggregate=uniform and a number as sync.local_steps",
        "--to script",
    ),
    ("ddp", "sync=local_sgd", "sync=local_sgd", "sync=bsp", "--to torchft and --to script"),
    (
        "ddp",
        "sync=bsp optimizer=adam sync.exchange=difference",
        "averages gradients",
        "sync.exchange=gradient",
        "",
    ),
    ("script", "schedule=post_local", "schedule=post_local has 2 stages", "schedule=single", ""),
    ("script", "sync=asp topology=parameter_server", "sync=asp", "sync=bsp or local_sgd", ""),
    (
        "script",
        "sync=d_psgd topology=gossip",
        "topology=gossip",
        "topology=all_reduce or parameter_server",
        "",
    ),
    ("script", "sync=bsp overlap=delayed", "overlap=delayed", "overlap=none or wfbp", ""),
    ("script", "sync=bsp optimizer=muon", "optimizer=muon", "optimizer=sgd or adam", ""),
    ("script", "sync=bsp compression=stc", "compression=stc", "compression=none or topk", ""),
    (
        "script",
        "sync=local_sgd outer=slowmo",
        "outer=slowmo",
        "outer=average or heavy_ball or nesterov",
        "",
    ),
    (
        "script",
        "sync=bsp aggregate.clip_norm=1",
        "aggregate.clip_norm=1",
        "aggregate.clip_norm=null",
        "",
    ),
]


@pytest.mark.parametrize(("to", "overrides", "refused", "instead", "able"), REFUSED)
def test_what_a_target_cannot_express(
    to: str, overrides: str, refused: str, instead: str, able: str, workplace: Path, capsys
) -> None:
    unrun(*overrides.split())
    capsys.readouterr()
    assert main(["export", "run", "--to", to]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ashl: run cannot be exported with --to {to}: ")
    assert said.count("\n") == 1
    assert refused in said
    assert f"; take {instead}" in said
    assert able in said


def test_every_parameter_that_a_script_fixes_exists() -> None:
    """A renamed parameter would be exported at any value."""
    for setting in FIXED.split():
        key, _, _ = setting.partition("=")
        group, _, parameter = key.partition(".")
        assert any(
            parameter == known.key
            for file in catalog()[group].values()
            for known in parameters(file)
        ), key


@pytest.mark.parametrize("group", COMMON)
def test_every_option_that_a_script_expresses_exists(group: str) -> None:
    names = {*COMMON[group], *(name for own in TARGETS.values() for name in own.get(group, ()))}
    assert names <= {target(file).split(".")[2] for file in catalog()[group].values()}


@pytest.mark.parametrize("overlap", COMMON["overlap"])
def test_no_overlap_that_a_script_expresses_is_late_or_compresses(overlap: str) -> None:
    module, _, name = target(catalog()["overlap"][overlap]).rpartition(".")
    option = getattr(importlib.import_module(module), name)
    assert not issubclass(option, Delayed)
    assert not option.compresses


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("plan.json", "{", "run/plan.json is no usable plan: line 1 is not JSON"),
        ("summary.json", '{"steps": 4}', "run/summary.json is damaged; name a run that has ended"),
        (
            "plan.json",
            None,
            "is missing, and its plan has no number of steps; name a run that has ended",
        ),
    ],
)
def test_a_damaged_run_is_not_exported(
    file: str, text: str | None, says: str, workplace: Path, capsys
) -> None:
    run = unrun("sync=bsp")
    if text is None:
        known = json.loads((run / file).read_text())
        text = json.dumps(
            known | {"limits": known["limits"] | {"steps": None, "epochs": None, "seconds": 9.0}}
        )
    (run / file).write_text(text)
    assert main(["export", "run", "--to", "script"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said


def test_a_script_is_not_named_as_what_it_imports(workplace: Path, capsys) -> None:
    unrun("sync=bsp")
    assert main(["export", "run", "--to", "torchft", "--out", "torchft.py"]) == 2
    assert (
        "hides torchft from itself; take another one, as train_torchft.py"
        in capsys.readouterr().err
    )


def losses_of(run: Path, workers: int) -> list[float]:
    """The mean over the workers of each round."""
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    rounds = [
        [row["loss"] for row in rows if row["kind"] == "round" and row["rank"] == k]
        for k in range(workers)
    ]
    return [fmean(own) for own in zip(*rounds, strict=True)]


def trained(*overrides: str) -> Path:
    assert main(["train", "-q", *RUN.split(), "run.dir=run", "stop.steps=48", *overrides]) == 0
    return Path("run")


@pytest.mark.parametrize(
    "what",
    [
        "sync=bsp",
        "sync=local_sgd sync.local_steps=4",
        "sync=local_sgd sync.local_steps=4 outer=nesterov optimizer=adamw",
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
    assert [fmean(own) for own in zip(*both, strict=True)] == pytest.approx(
        losses_of(run, 2), rel=1e-4
    )
