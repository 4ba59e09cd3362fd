"""Options of the user's own: a file for each part that a module of the user's makes."""

from pathlib import Path

BASES = {"dataset": "defaults: [_own]\n", "optimizer": "defaults: [sgd]\n"}


def choose_own(module: str, **targets: str) -> list[str]:
    """Write `options/GROUP/mine.yaml` for each target; return the words that choose these options."""
    words = ["--config-dir", "options", f"allow_targets=[{module}]"]
    for group, target in targets.items():
        folder = Path("options", group)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mine.yaml").write_text(f"{BASES.get(group, '')}_target_: {target}")
        words.append(f"{group}=mine")
    return words
