"""`ashl demo`: the README's three commands, with a sentence before and after each."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from ashl.config.override import command_text

from .answer import Answer, Json
from .train import Debug


@dataclass(frozen=True)
class Scene:
    """A command of the demo. `after` has the keys of the answer's document in braces, and
    `waiting`.
    """

    command: str
    before: str
    after: str


SCENES = (
    Scene(
        "ashl train runtime=sim cluster=one_slow sync=bsp",
        "Four workers in virtual time, one five times slower, and a barrier at every step:",
        "BSP took {time_s:.3g} virtual seconds, and its workers waited {waiting} of them.",
    ),
    Scene(
        "ashl train runtime=sim cluster=one_slow",
        "The same by ASHL, the default, where fast workers do not wait for the slow one:",
        "ASHL took {time_s:.3g} virtual seconds, and its workers waited {waiting} of them.",
    ),
    Scene(
        "ashl sweep sync=bsp,ssp,asp,local_sgd schedule=single,ashl seed=0,1,2,3,4 runtime=sim"
        " cluster=one_slow stop.target_accuracy=0.95 eval.every_s=0.2",
        "Which method reaches 95 % first? Five methods with five seeds each:",
        "{headline}",
    ),
)


def demo(ctx: typer.Context, json: Json = False, debug: Debug = False) -> Answer:
    """Run the three commands of the README, with a sentence before and after each."""
    assert ctx.parent is not None
    group = ctx.parent.command
    assert isinstance(group, TyperGroup)
    found: list[Mapping[str, Any]] = []
    for scene in SCENES:
        name, *args = shlex.split(scene.command)[1:]
        command = group.get_command(ctx.parent, name)
        assert command is not None
        assert command.callback is not None
        inner = command.make_context(name, args, parent=ctx.parent)
        inner.params["json"] = json
        print(f"\n{scene.before}\n\n$ {scene.command}\n", flush=True)
        answer = inner.invoke(command.callback, **inner.params)
        assert isinstance(answer, Answer)
        if not json:
            answer.show()
        assert isinstance(answer.document, Mapping)
        waiting = f"{100 * answer.document.get('wait_share', 0):.1f} %"  # unused by the sweep
        print(f"\n{scene.after.format(**answer.document, waiting=waiting)}", flush=True)
        found.append({"command": scene.command, "answer": answer.document})
    following = command_text("advise", "runtime=sim", "cluster=one_slow", "--target", "0.95")
    return Answer({"commands": found}, next=following)
