"""The pages are true: links, anchors, commands, keys, options and pictures exist, and examples run."""

import csv
import doctest
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from ashl.cli.app import app, main
from ashl.cli.demo import SCENES
from ashl.cli.launch import LAUNCHED
from ashl.config.catalog import CONF, card_text, catalog, parameters
from ashl.config.compose import axis_of, compose
from ashl.config.construct import construct
from ashl.errors import DataMissingError
from ashl.planning.compile_plan import compile_plan
from ashl.planning.instantiate import declared_profile
from ashl.study.grid import check_point, grid_lines
from tests.first_screen import FILE, answer, rows
from tests.pages import (
    DATA,
    DOCS,
    GENERATED,
    PAGES,
    ROOT,
    anchors,
    links,
    mentioned,
    modules,
    shown,
    words_of,
    written,
)
from tests.support import planned
from tests.support_matrix import only_checks, read_rows, rows_of

README, INDEX = ROOT / "README.md", DOCS / "index.md"
EXTENDING = (DOCS / "how-to/own_model_and_data.md", DOCS / "how-to/add_a_method.md")
MATRIX = DOCS / "reference/support_matrix.md"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
OURS = [
    page for page in PAGES if page.name not in ("CONTRIBUTING.md", "guide.md")
]  # tests/cli/test_contributing.py runs the methods of that page
LINES = sorted({line for page in OURS for line in shown(TEXTS[page])})
CLI = typer.main.get_command(app)
PLACEHOLDER = re.compile(
    r"\[?[A-Z][A-Z_]*\]?|\[?\[[A-Z].*|.*\.\.\."
)  # FILE, [KEY=VALUE]..., RUN_OR_SWEEP...
# The options whose classes the page shows, in its order.
CODED = (
    "model/tiny",
    "dataset/moons",
    "task/huber",
    "optimizer/lion",
    "planner/equal",
    "aggregate/root",
)
OPTIONS = (
    *CODED[:3],
    "task/smooth",
    *CODED[3:],
    "cluster/desk",
    "cluster/four",
    "topology/broadcast",
)
MODULES = tuple(f"mine/{option.rpartition('/')[2]}.py" for option in (*CODED, OPTIONS[-1]))
LINE_OF_A_CARD = re.compile(
    r"^(Use when|Avoid when|Alternatives): (.+?)(?=\n\n|\n[A-Z][\w ]*: )", re.M | re.S
)
MAX_PICTURE = 150_000  # bytes
GENERATING = [page for page in PAGES if GENERATED.search(TEXTS[page])]


@pytest.fixture
def examples(workplace: Path) -> Iterator[Path]:
    """A folder with the modules and options that the pages on options of your own show."""
    text = "\n".join(TEXTS[page] for page in EXTENDING)
    code, options = (re.findall(rf"```{kind}\n(.*?)```", text, re.S) for kind in ("python", "yaml"))
    named = [
        *zip(MODULES, code, strict=True),
        *zip((f"options/{name}.yaml" for name in OPTIONS), options, strict=True),
    ]
    (preset,) = re.findall(r"```yaml\n(.*?)```", TEXTS[DOCS / "how-to/sweep.md"], re.S)
    beside = {
        "mine/__init__.py": "",
        "options/experiment/mine.yaml": preset,
        "profile/profile.json": profile_of_two(),
    }
    for path, content in [*beside.items(), *named]:
        (workplace / path).parent.mkdir(parents=True, exist_ok=True)
        (workplace / path).write_text(content, encoding="utf-8")
    yield workplace
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


@cache
def profile_of_two() -> str:
    """A profile of two workers, which commands of the pages use."""
    plan = planned("sync=bsp", "cluster.num_workers=2")
    found = declared_profile(
        construct(plan.cluster, "cluster"), plan.choices["model"], plan.num_params, 32
    )
    assert found is not None
    return found.to_json()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_anchors(page: Path) -> None:
    broken = []
    for link in links(TEXTS[page]):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and anchor not in anchors(target.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_navigation() -> None:
    """The tables of contents of the index list it, and each page of results is in their table."""
    pages = {page for page in PAGES if page.parent != ROOT} - {INDEX}
    listed = {DOCS / f"{line}.md" for line in TEXTS[INDEX].splitlines() if "/" in line}
    assert {page for page in pages if page.parent.name != "contributing"} <= listed
    results = DOCS / "results/index.md"
    linked = {(results.parent / link).resolve() for link in links(TEXTS[results])}
    assert linked == set(results.parent.glob("*.md")) - {results}
    assert "docs/index.md" in links(TEXTS[README])


def test_the_readme_keeps_its_lines() -> None:
    text = TEXTS[README]
    lines = text.splitlines()
    assert "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/ashl train" in lines
    assert (
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest" in lines
    )
    assert all(scene.command in text for scene in SCENES)
    assert {"-m slow -n 0", "-m gpu -n 0"} <= set(re.findall(r"-m \w+ -n 0", text))


def test_the_number_of_the_readme_is_in_its_table() -> None:
    first, *others = read_csv(FILE)[1:]
    (claim,) = re.findall(
        r"\*\*.*`(\w+)` reaches 95 % .* ([\d.]+) times as fast .*\*\*\n\(`(\w+)`; 95 % interval ([\d.]+ to [\d.]+)",
        TEXTS[README],
    )
    slower = next(row for row in others if row[0] == claim[2])
    assert claim == (first[0], slower[3], slower[0], slower[4])
    assert TEXTS[README].count(SCENES[-1].command) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_readmes_command_prints_its_table() -> None:
    """Sums of floats differ between machines, so numbers are compared within 10 %."""
    made, kept = rows(answer()), read_csv(FILE)
    assert [row[0] for row in made] == [row[0] for row in kept]
    for ours, theirs in zip(made[1:], kept[1:], strict=True):
        for place in (1, 3):
            assert float(ours[place]) == pytest.approx(float(theirs[place]), rel=0.1)


def read_csv(file: Path) -> list[list[str]]:
    with file.open(encoding="utf-8", newline="") as text:
        return list(csv.reader(text))


def test_the_page_of_gpus_lists_their_tests() -> None:
    marked = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(
            r"^pytestmark = \[\s*pytest\.mark\.gpu", file.read_text(encoding="utf-8"), re.M
        )
    }
    assert set(re.findall(r"tests/[\w/]+\.py", TEXTS[DOCS / "how-to/gpu.md"])) == marked


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_modules_that_are_run_exist(page: Path) -> None:
    assert [name for name in modules(TEXTS[page]) if find_spec(name) is None] == []


@pytest.mark.parametrize("line", LINES)
def test_a_command_is_possible(line: str, examples: Path) -> None:
    """Its options are known, and where it says what to run, that composes and can be planned."""
    name, *args = words_of(line)
    if not args:
        return
    args = [word for word in args if word != "[OPTIONS]"]
    named = [word for word in args if not PLACEHOLDER.fullmatch(word.rpartition("=")[2])]
    given = CLI.commands[name].make_context(name, args, resilient_parsing=False).params  # type: ignore[attr-defined]
    if name == "launch" and (
        words := [word for word in given["command"] if not PLACEHOLDER.fullmatch(word)]
    ):
        assert words[0] in LAUNCHED
        CLI.commands[words[0]].make_context(words[0], words[1:])  # type: ignore[attr-defined]
    if name == "list":
        folder = given["config_dir"] if given["config_dir"] in (None, Path("options")) else None
        group, option = (
            word if word in named else None for word in (given["group"], given["option"])
        )
        assert group is None or group in catalog(folder)
        assert group is None or option is None or option in catalog(folder)[group]
    if name not in ("train", "profile", "sweep") or given["config_dir"] not in (
        None,
        Path("options"),
    ):
        return
    overrides = [word for word in given["overrides"] or () if word in named]
    world = re.search(r"torchrun .*--nproc-per-node[ =](\d+) .*-m ashl\.cli ", line)
    nodes = re.search(r"torchrun .*--nnodes (\d+) ", line)
    assert world or not line.startswith("torchrun")
    points = swept(overrides, given) if name == "sweep" else {tuple(overrides)}
    for point in points:
        can_be_planned(
            point,
            given["config_dir"],
            int(world[1]) * int(nodes[1] if nodes else 1) if world else None,
        )


def swept(overrides: list[str], given: dict) -> set[tuple[str, ...]]:
    """The first point of a grid and the last one; what lies between has been looked at by its
    words.
    """
    overrides = [text for text in overrides if not text.startswith("launcher.")]
    # other seeds compose in the same way
    overrides = [text.partition(",")[0] if text.startswith("seed=") else text for text in overrides]
    folder = given["config_dir"]
    overrides = [
        axis_of(text, folder).singles[0] if "interval(" in text else text for text in overrides
    ]
    lines = grid_lines(overrides, given["config_dir"])
    first, last = lines[0].alternatives, lines[-1].alternatives
    return {
        tuple(alternatives[0] for alternatives in first),
        tuple(alternatives[-1] for alternatives in last),
    }


@cache
def can_be_planned(point: tuple[str, ...], folder: Path | None, world_size: int | None) -> None:
    point = tuple(
        single for single in point if single != "dataset.download=true"
    )  # nothing is fetched here
    try:
        if world_size is not None:
            compile_plan(compose(point, folder), world_size, point)
        else:
            check_point(point, lambda overrides: compose(overrides, folder), {})
    except DataMissingError:
        pass  # the line is right, and the data are not on this machine


@cache
def keys() -> set[str]:
    """Every key of every option, those outside the groups, and the groups."""
    known = catalog()
    found = {
        f"{group}.{p.key}"
        for group, options in known.items()
        for file in options.values()
        for p in parameters(file)
    }
    return found | {parameter.key for parameter in parameters(CONF / "config.yaml")} | known.keys()


@pytest.mark.parametrize("page", OURS, ids=name_of)
def test_keys_and_options_that_are_mentioned_exist(page: Path) -> None:
    known = catalog()
    own = {tuple(option.split("/")) for option in (*OPTIONS, "experiment/mine")}
    for key, value in mentioned(TEXTS[page], {key.partition(".")[0] for key in keys()}):
        assert key in keys(), f"{key} in {page.name}"
        if key in known and value and "(" not in value and not PLACEHOLDER.fullmatch(value):
            assert all(
                (key, option) in own or option in known[key] for option in value.split(",")
            ), f"{key}={value}"


@pytest.mark.parametrize("page", GENERATING, ids=name_of)
def test_generated_parts_are_those_of_the_program(page: Path) -> None:
    assert written(TEXTS[page]) == TEXTS[page], "run `python -m tests.pages`"


def test_everything_that_is_generated_has_its_place() -> None:
    """Each group of options, command, card of a method and file of results."""
    found = {match.group(2, 3) for text in TEXTS.values() for match in GENERATED.finditer(text)}
    assert {name for kind, name in found if kind == "conf"} == {"outside", *catalog()}
    assert {name for kind, name in found if kind == "help"} == set(CLI.commands)  # type: ignore[attr-defined]
    assert {name for kind, name in found if kind == "csv"} == {p.stem for p in DATA.glob("*.csv")}
    assert {"sync", "topology", "compression", "overlap", "outer"} <= {
        name for kind, name in found if kind == "cards"
    }


@pytest.mark.parametrize("group", ["sync", "topology", "compression", "overlap", "outer"])
def test_a_card_says_when_to_choose_a_method(group: str) -> None:
    """Its alternatives are options that exist."""
    for file in catalog()[group].values():
        lines = dict(re.findall(LINE_OF_A_CARD, card_text(file)))
        assert lines.keys() == {"Use when", "Avoid when", "Alternatives"}, file
        for name in re.findall(r"`(\w+)`", lines["Alternatives"]):
            assert name in catalog()[group], file
        for key, name in re.findall(r"`(\w+)=(\w+)`", lines["Alternatives"]):
            known = name in catalog()[key] if key in catalog() else {key, f"{group}.{key}"} & keys()
            assert known, file


@pytest.mark.parametrize(
    ("sync", "topology"),
    [
        ("bsp", "all_reduce"),
        ("asp", "sharded_server"),
        ("d_psgd", "gossip"),
        ("ripples_smart", "partial_all_reduce"),
    ],
)
def test_rows_of_the_support_matrix_are_the_answers_of_the_checks(sync: str, topology: str) -> None:
    """The sentences of the notes are compared by the slow test of the whole page."""
    with only_checks():
        found = rows_of(topology, sync, lambda sentence: "")
    assert not isinstance(found, str)
    answers = [[overlaps, *(cell.strip() for cell in cells)] for overlaps, cells in found]
    assert read_rows(TEXTS[MATRIX], topology, sync) == answers, "run `python -m tests.pages`"


@pytest.mark.slow
def test_the_whole_support_matrix_is_current() -> None:
    assert written(TEXTS[MATRIX], slow=True) == TEXTS[MATRIX], "run `python -m tests.pages`"


def test_pictures_are_small_and_whole() -> None:
    pictures = [ROOT / link for link in links(TEXTS[README]) if link.endswith((".svg", ".png"))]
    assert len(pictures) == 2
    assert all(picture.stat().st_size < MAX_PICTURE for picture in pictures)
    drawn = (ROOT / "docs" / "live_table.svg").read_text(encoding="utf-8")
    assert "url(http" not in drawn, "a picture must not fetch anything"


def test_the_examples_of_the_page_run(examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [
        "model=tiny",
        "dataset=moons",
        "planner=equal",
        "aggregate=root",
        "cluster=desk",
        "schedule.h_preset=[4]",
    ]
    chosen += ["optimizer=lion", "optimizer.lr=0.01"]
    small = [
        "sync=local_sgd",
        "sync.local_steps=plan",
        "runtime=sim",
        "tracking=none",
        "stop.steps=80",
        "run.dir=out",
    ]
    assert (
        main(["train", "--config-dir", "options", "allow_targets=[mine]", *chosen, *small, "-q"])
        == 0
    )
    summary = json.loads(Path("out/summary.json").read_text())
    assert (summary["num_workers"], summary["final"]["test_accuracy"] > 0.7) == (2, True)
    assert summary["stages"][0]["local_steps"] == [4, 4]
    capsys.readouterr()
    assert main(["list", "model", "tiny", "--config-dir", "options"]) == 0
    assert "of the hidden layer" in capsys.readouterr().out


@pytest.mark.slow
def test_the_blocks_of_python_run(workplace: Path) -> None:
    """The page on Python makes a run, and the page on records loads its weights."""
    names: dict[str, object] = {}
    for page in ("python", "records"):
        text = TEXTS[DOCS / f"reference/{page}.md"]
        for block in re.findall(r"```python\n(.*?)```", text, re.S):
            exec(block, names)
    assert names["seconds"]
    assert names["again"]["status"] == "finished"  # type: ignore[index]


def test_a_loss_and_its_metric_run(examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["sync=bsp", "runtime=sim", "tracking=none", "stop.epochs=4", "run.dir=out"]
    own = [
        "--config-dir",
        "options",
        "allow_targets=[mine]",
        "task=huber",
        "dataset=quadratic",
        "model=linear",
    ]
    assert main(["train", *own, *small]) == 0
    summary = json.loads(Path("out/summary.json").read_text())
    last = json.loads(Path("out/metrics.jsonl").read_text().splitlines()[-1])
    assert (summary["metric"], summary["final"]["test_accuracy"]) == ("mae", None)
    assert summary["final"]["test_metric"] == last["test/mae"] < 0.5
    assert "mae " in capsys.readouterr().out
    assert main(["train", *own, *small, "stop.target_accuracy=0.9"]) == 2
    assert (
        "task=huber reports the metric mae, not accuracy; take stop.target_metric"
        in capsys.readouterr().err
    )
    aim = ["stop.target_metric=0.5", "run.dir=aimed", "eval.every_commits=1"]
    assert main(["train", *own, *small, *aim]) == 0
    aimed = json.loads(Path("aimed/summary.json").read_text())
    assert (aimed["exit_reason"], aimed["target_metric"]) == ("target_metric", 0.5)
    assert aimed["final"]["test_metric"] <= 0.5
    assert "mae 0.5 reached after" in capsys.readouterr().out


def outcome(name: str, *overrides: str) -> dict:
    own = [
        "--config-dir",
        "options",
        "allow_targets=[mine]",
        "tracking=none",
        "stop.steps=40",
        "model.hidden=[8]",
    ]
    assert main(["train", *own, f"run.dir={name}", *overrides, "-q"]) == 0
    return json.loads(Path(name, "summary.json").read_text())


def test_a_topology_is_two_files(examples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found by every loop, judge, record and both kernels; its limit holds to the bit, and what it
    lacks is refused.
    """
    mode = (
        "sync=local_sgd",
        "sync.local_steps=2",
        "cluster.step_s=0.001",
        "cluster.exchange_s=0.001",
    )
    whole = outcome("whole", *mode, "topology=all_reduce", "runtime=sim")
    broadcast = outcome("broadcast", *mode, "topology=broadcast", "runtime=sim")
    assert broadcast["params_sha256"] == whole["params_sha256"]
    assert (
        broadcast["bytes_up"] == 2 * whole["bytes_up"]
    )  # n(n − 1) models instead of a ring's 2(n − 1), for n = 4
    real = outcome("real", *mode, "topology=broadcast", "runtime=local")
    assert real["params_sha256"] == whole["params_sha256"]
    assert real["measures"]["update_norm"] == broadcast["measures"]["update_norm"], (
        "the page's metric"
    )
    own = ["--config-dir", "options", "allow_targets=[mine]", "runtime=sim", "--dry-run"]
    assert main(["train", *own, *mode, "topology=broadcast", "compression=topk"]) == 2
    assert "compression=topk: needs compressed updates" in capsys.readouterr().err


def test_shell_lines_are_read() -> None:
    """The test of commands would pass where it finds none."""
    assert len(LINES) > 40
    assert {words_of(line)[0] for line in LINES} == set(CLI.commands)  # type: ignore[attr-defined]
    assert shlex.split(LINES[0])


WITH_EXAMPLES = sorted(file for file in (ROOT / "ashl").rglob("*.py") if ">>> " in file.read_text())


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda file: file.stem)
def test_an_example_in_a_docstring_runs(file: Path) -> None:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
