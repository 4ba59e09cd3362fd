"""What `ashl export RUN --to ...` writes, as a module."""

from pathlib import Path
from types import ModuleType
from typing import Any

from ashl.cli.app import main


def exported(run: Path, to: str) -> Any:
    file = f"{to}.py"
    assert main(["export", str(run), "--to", to, "--out", file]) == 0
    module: Any = ModuleType("exported")
    exec(compile(Path(file).read_text(), file, "exec"), module.__dict__)
    return module
