"""Check layering, single homes of heavy libraries, and that code and option files mirror each
other.
"""

import ast
import graphlib
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from ashl.config.catalog import catalog, parameters, target

ROOT = Path(__file__).resolve().parent.parent

# From the bottom up: a module imports from its own level and from those below it.
LEVELS = (
    {"errors", "option", "size_only", "device"},
    {"config"},
    {"data", "model", "task", "optimizer", "cluster"},
    {"plan"},
    {"planner"},
    {"learn"},
    {"runtime"},
    {"compression"},
    {"overlap"},
    {"stage", "aggregate", "outer"},
    {"topology"},
    {"sync"},
    {"schedule"},
    {"planning"},
    {"tracking", "report"},
    {"launch"},
    {"run", "export", "watch"},
    {"study"},
    {"advice"},
    {"cli", "__init__", "__main__"},  # the entry points
)
ROOT_MODULES = {
    "__init__",
    "__main__",
    "device",
    "errors",
    "option",
    "size_only",
}  # what may lie loose in ashl/
HEIGHTS = {unit: height for height, level in enumerate(LEVELS) for unit in level}
ALGORITHMS = (
    "sync",
    "aggregate",
    "outer",
    "overlap",
    "topology",
    "compression",
    "planner",
    "schedule",
)
CITED = ("sync", "aggregate", "outer", "overlap", "topology", "compression", "planner", "task")
SHARED_BY_CODECS = {
    "__init__",
    "coding",
    "contract",
    "count_sketch",
    "error_metrics",
    "guarantees",
    "kernels",
    "modulo",
    "payload",
    "sparse",
    "wrappers",
}
FOLDERS = {"dataset": "data"}  # a group whose code lies in a folder of another name
PRESETS = ("experiment", "debug")
STANDS_IN = {  # for classes of plain torch
    "ashl.data.plain.PlainDataset",
    "ashl.optimizer.plain.PlainOptimizer",
    "ashl.task.plain.PlainTask",
}  # for classes of plain torch; users own their files

# Third-party modules, and the only files that may import them.
HOMES = {
    "hydra": ("ashl/config/compose.py",),
    "optuna": ("ashl/study/search.py",),
    "submitit": ("ashl/study/jobs.py",),
    "mlflow": ("ashl/tracking/mlflow.py",),
    "torch.utils.tensorboard": ("ashl/tracking/tensorboard.py",),
    "wandb": ("ashl/tracking/wandb.py",),
    "torchvision": ("ashl/data/vision.py",),
    "jinja2": ("ashl/export/", "ashl/report/page.py"),
    "matplotlib": ("ashl/report/figures.py", "ashl/data/glyphs.py"),
    "torch.distributed": (
        "ashl/runtime/",
        "ashl/run/",
        "ashl/export/ddp_hook.py",
        "cli/doctor.py",
    ),
    "psutil": ("ashl/run/interface.py",),
    "safetensors": ("ashl/runtime/plain_state.py",),
    "typer": ("cli/",),
    "time": (
        "ashl/runtime/",
        "ashl/tracking/",
        "ashl/run/",
        "ashl/watch/",
        "ashl/study/jobs.py",
    ),  # the experiment's clock, host seconds
    "datetime": ("ashl/runtime/", "ashl/tracking/", "ashl/run/"),
    "random": ("ashl/device.py",),
    "asyncio": ("ashl/launch/ssh.py", "ashl/launch/start.py"),
    "ashl.tracking": (
        "ashl/tracking/",
        "ashl/report/",
        "ashl/study/",
        "ashl/run/",
        "ashl/advice/",
        "ashl/watch/",
        "cli/answer.py",
        "cli/ui.py",
    ),
    "ashl.runtime.sim": ("ashl/runtime/", "ashl/run/virtual.py"),
    "ashl.runtime.contended_sim": ("ashl/run/virtual.py", "ashl/planning/predict.py"),
    "ashl.runtime.process": ("ashl/runtime/", "ashl/run/"),
}
SEEN_BY_ALGORITHMS = tuple(
    f"ashl.runtime.{name}" for name in ("rank_context", "effects", "records", "sums", "plain_state")
)


def files(*folders: str) -> list[Path]:
    found = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert found, folders
    return found


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """All of its tree, which the interpreter walks more slowly than it parses."""
    return tuple(ast.walk(tree(file)))


@cache
def imports(file: Path) -> tuple[str, ...]:
    """Every dotted name that a file imports, wherever in the file; `from a import b` gives
    `a.b`.
    """
    found: list[str] = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def unit(file: Path) -> str:
    return known(".".join(file.relative_to(ROOT).with_suffix("").parts))


def known(module: str) -> str:
    """The name in `LEVELS` of a module: its folder in ashl/ or the file itself, or cli; "" for
    `ashl` alone.
    """
    parts = module.removeprefix("ashl.").split(".")
    return next((unit for unit in (".".join(parts[:2]), parts[0]) if unit in HEIGHTS), "")


def test_imports_point_downwards() -> None:
    wrong = [
        f"{name(file)} imports {module}"
        for file in files("ashl", "cli")
        for module in imports(file)
        if within(module, "ashl") and HEIGHTS.get(unit(file), 0) < HEIGHTS.get(known(module), 0)
    ]
    assert not wrong


@pytest.mark.parametrize("package", HOMES)
def test_one_home(package: str) -> None:
    strangers = [
        file for file in files("ashl", "cli") if not name(file).startswith(HOMES[package] or ("-",))
    ]
    assert not [
        name(file) for file in strangers if any(within(module, package) for module in imports(file))
    ]


def test_algorithms_know_the_node_and_nothing_else_of_the_runtime() -> None:
    wrong = [
        f"{name(file)} imports {module}"
        for file in files(*(f"ashl/{folder}" for folder in ALGORITHMS))
        for module in imports(file)
        if within(module, "ashl.runtime")
        and not any(within(module, seen) for seen in SEEN_BY_ALGORITHMS)
    ]
    assert not wrong


def test_nothing_lies_loose() -> None:
    assert {file.stem for file in (ROOT / "ashl").glob("*.py")} == ROOT_MODULES


def test_no_circle_of_rooms() -> None:
    """Packages of one level import each other in one direction at most."""
    arrows = {
        (unit(file), known(module))
        for file in files("ashl", "cli")
        for module in imports(file)
        if within(module, "ashl") and unit(file) != known(module)
    }
    assert not [(a, b) for a, b in arrows if a < b and (b, a) in arrows]


def test_no_circle_of_files() -> None:
    """Also not through imports that only type checkers see."""
    modules = {module_of(file): file for file in files("ashl", "cli")}
    arrows = {
        module: {
            parent
            for name in imports(file)
            for parent in (name, name.rpartition(".")[0])
            if parent in modules
        }
        for module, file in modules.items()
    }
    packages = {module for module, file in modules.items() if file.stem == "__init__"}
    graph = {
        module: found - {module} - packages
        for module, found in arrows.items()
        if module not in packages
    }
    tuple(
        graphlib.TopologicalSorter(graph).static_order()
    )  # raises CycleError, which names the files


def module_of(file: Path) -> str:
    """The dotted name of a file; cli/ lies below ashl."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("ashl", *parts) if parts[0] == "cli" else parts).removesuffix(".__init__")


@cache
def calls(file: Path) -> frozenset[str]:
    return frozenset(ast.unparse(node.func) for node in nodes(file) if isinstance(node, ast.Call))


def test_nothing_prints_but_the_command_line_and_the_tracking() -> None:
    speakers = [file for file in files("ashl") if "print" in calls(file)]
    assert all(name(file).startswith("ashl/tracking/") for file in speakers), speakers


def test_no_global_random_state() -> None:
    own = r"(np|numpy)\.random\.(default_rng|Generator|SeedSequence|Philox|PCG64|SFC64)|torch\.Generator"
    shared = r"((np|numpy)\.)?random\.\w+|torch\.(random\.)?(manual_seed|seed|set_rng_state)"
    wrong = {
        f"{name(file)}: {call}"
        for file in files("ashl")
        for call in calls(file)
        if re.fullmatch(shared, call) and not re.fullmatch(own, call)
    }
    assert {text for text in wrong if not text.startswith("ashl/device.py: ")} == set()


def test_every_module_says_what_it_is() -> None:
    speechless = [
        name(file)
        for file in files("ashl", "cli")
        if file.stat().st_size and not ast.get_docstring(tree(file))
    ]
    assert not speechless


# Words that name neither an action nor a value.
VAGUE = """
    of at by in on off over under up down to with beside before after until within inside
    outside between among across along against towards apart ahead behind below above beyond
    around about here there away alone back out whole plain quiet short narrow brief dense
    flat empty blank usual same late free final first most best newest nearest largest
    usable native present idle finite fixed any all some nobody everything come hear lose
    take give say meet bring look hold tell gist course crowd given taken drawn written sent
    known kept held left lost found built standing lasting waiting running ending stopping
    starting opening missing lacking differing
"""
NO_PARTICIPLES = {"embed", "feed", "need", "seed", "speed", "spread"}


def test_functions_are_named_by_an_action_or_a_value() -> None:
    """No function is named by a bare participle, preposition or adjective. `without` is a hook."""
    vague = [
        f"{name(file)}:{node.lineno} {node.name}"
        for file in files("ashl", "cli")
        for node in nodes(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (word := node.name.strip("_")) not in NO_PARTICIPLES
        and (word in VAGUE.split() or re.fullmatch("[a-z]+ed", word))
    ]
    assert not vague


# --- code and configuration mirror each other
# -------------------------------------------------------------------------


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Every class of ashl/ by its dotted name."""
    return {
        ".".join([*file.relative_to(ROOT).with_suffix("").parts, node.name]): node
        for file in files("ashl")
        for node in tree(file).body
        if isinstance(node, ast.ClassDef)
    }


def is_option(node: ast.ClassDef) -> bool:
    return any(
        isinstance(decorator, ast.Name) and decorator.id == "option"
        for decorator in node.decorator_list
    )


def fields(dotted: str) -> set[str]:
    """The fields of an option class, its bases' included."""
    node = classes()[dotted]
    own = {
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if "ClassVar" not in ast.unparse(statement.annotation)
    }
    for base in node.bases:
        where = [full for full in classes() if full.endswith(f".{ast.unparse(base)}")]
        own |= fields(where[0]) if len(where) == 1 else set()
    return own


OPTIONS = [
    (group, option, file)
    for group, options in catalog().items()
    for option, file in options.items()
]
OBJECTS = [(group, option, file) for group, option, file in OPTIONS if group not in PRESETS]


def test_option_files_mirror_their_classes() -> None:
    for group, _, file in OBJECTS:
        dotted = target(file)
        assert dotted in classes(), f"{name(file)} names {dotted}, which does not exist"
        assert dotted.startswith(f"ashl.{FOLDERS.get(group, group)}."), name(file)
        assert is_option(classes()[dotted]), f"{dotted} is no @option"
        keys = {parameter.key.split(".")[0] for parameter in parameters(file)}
        assert fields(dotted) == keys, name(file)


def test_a_catalogue_holds_methods_and_its_contract_only() -> None:
    modules = [
        file
        for file in (ROOT / "ashl/compression").glob("*.py")
        if file.stem not in SHARED_BY_CODECS
    ]
    methods = {target(file).split(".")[2] for file in catalog()["compression"].values()}
    assert {file.stem for file in modules} == methods


@pytest.mark.parametrize("group", CITED)
def test_an_algorithm_has_the_name_of_its_file(group: str) -> None:
    assert {option: target(file).split(".")[2] for option, file in catalog()[group].items()} == {
        option: option for option in catalog()[group]
    }


def test_every_option_class_has_a_file() -> None:
    chosen = {target(file) for _, _, file in OBJECTS}
    parts = {  # what is inherited from, or the type of a field of another option
        used.id
        for node in classes().values()
        for part in [
            *node.bases,
            *(field.annotation for field in node.body if isinstance(field, ast.AnnAssign)),
        ]
        for used in ast.walk(part)
        if isinstance(used, ast.Name)
    }
    groups = {f"ashl.{FOLDERS.get(group, group)}" for group in catalog()}
    orphans = {
        dotted
        for dotted, node in classes().items()
        if is_option(node) and node.name not in parts and ".".join(dotted.split(".")[:2]) in groups
    }
    assert orphans - chosen == {
        "ashl.cluster.spec.Measured",
        *STANDS_IN,
    }  # which planning makes of a profile


def test_every_parameter_has_a_comment() -> None:
    bare = [
        f"{name(file)}: {parameter.key}"
        for file in [ROOT / "conf/config.yaml", *(file for _, _, file in OBJECTS)]
        for parameter in parameters(file)
        if not parameter.comment
    ]
    assert bare == []


def test_an_algorithm_names_its_source() -> None:
    """The docstring of its module says where it is from."""
    silent = [
        name(file)
        for file in files(*(f"ashl/{group}" for group in CITED))
        if any(is_option(node) for node in tree(file).body if isinstance(node, ast.ClassDef))
        and not re.search(r"Sources?:|arXiv|\b(19|20)\d\d\b", ast.get_docstring(tree(file)) or "")
    ]
    assert silent == []


def test_packages_are_listed() -> None:
    """Project file: pyproject.toml lists packages by hand, since setuptools cannot find them in two places at
    once.
    """
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        folder.parent.relative_to(ROOT).as_posix()
        for top in ("ashl", "cli", "conf")
        for folder in files(top)
    }
    dotted = {folder.replace("/", ".") for folder in found}
    assert {package if within(package, "ashl") else f"ashl.{package}" for package in dotted} == set(
        listed
    )
    folders = [folder for folder in (ROOT / "conf").glob("[!_]*/") if folder.is_dir()]
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_files_beside_the_code_are_package_data() -> None:
    """A file that no pattern names is missing in the wheel."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    beside = {
        path
        for path in (ROOT / "ashl").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    for package, globs in patterns.items():
        folder = "ashl/**" if package == "*" else package.replace(".", "/")
        beside -= {path for pattern in globs for path in ROOT.glob(f"{folder}/{pattern}")}
    assert not beside
