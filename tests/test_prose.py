"""Check that the prose of the project has no finding, and that the prose check finds what it is
for.
"""

from pathlib import Path

import pytest

from tests.prose import CODE_FOLDERS, PAGES, ROOT, Text, find_all, find_faults, read_python


def test_no_finding_in_the_project() -> None:
    findings = find_all(
        [path for name in (*CODE_FOLDERS, "conf", *PAGES) if (path := ROOT / name).exists()]
    )
    assert not findings


@pytest.mark.parametrize(
    "body",
    [
        "What a worker sends.",
        "Of the workers, the slowest one.",
        "the slowest worker.",
        "Begin the round anew.",
        "Return the workers; who is late waits.",
        "Take a model with one head, say.",
        "Return " + "one word after another " * 7,
    ],
)
def test_faults_of_a_docstring_are_found(body: str) -> None:
    assert list(find_faults(Text("file.py", 1, "docstring", body)))


@pytest.mark.parametrize(
    "body",
    [
        "Return True if the worker waits.",
        "Merge pushes once `what is alike` workers have pushed.",
        "Update rule: w ← w + scale · Σ_i w_i · Δ_i, Σ_i w_i = 1",
    ],
)
def test_plain_docstrings_have_no_finding(body: str) -> None:
    assert not list(find_faults(Text("file.py", 1, "docstring", body)))


def test_docstrings_comments_and_messages_are_read(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Head."""\n# One line,\n# two lines.\nraise ValueError(f"bad {file}")\n',
        encoding="utf-8",
    )
    assert [(text.kind, text.line, text.body) for text in read_python(file, "module.py")] == [
        ("docstring", 1, "Head."),
        ("message", 4, "bad CODE"),
        ("comment", 2, " One line,\n two lines."),
    ]
