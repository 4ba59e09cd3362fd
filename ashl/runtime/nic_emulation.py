"""When the ports of a paced job are free, where workers on one machine share them and are processes of their own.

One document in the job's store has it all. It is changed as a whole: who finds that another process has changed it
meanwhile decides anew, on what holds now.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ashl.cluster.network import Ports

T = TypeVar("T")
KEY = "ports"


class SharedNics:
    """One process's view. Not for several threads at once."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._text = ""  # as it was last seen
        self._changes = 0

    def ask(self, network: Ports, change: Callable[[Ports], T]) -> T:
        """What `change` says on the ports as they are, and what it does to them. It may be asked more than once."""
        return self._change(network, lambda _: change(network))

    def begin(self, network: Ports, name: str, team: tuple[int, ...], cost_ns: int, now_ns: int) -> tuple[int, int]:
        """When the collective of this name begins, and what it costs: the first member to ask decides for all."""

        def change(begun: dict[str, list[int]]) -> tuple[int, int]:
            start, cost, left = begun.pop(name, None) or (network.hold(team, cost_ns, now_ns), cost_ns, len(team))
            if left > 1:
                begun[name] = [start, cost, left - 1]
            return start, cost

        return self._change(network, change)

    def _change(self, network: Ports, change: Callable[[dict[str, list[int]]], T]) -> T:
        while True:
            known: dict[str, Any] = json.loads(self._text) if self._text else {"free": [], "begun": {}}
            network.go_on(({(rank, way, inner): at for rank, way, inner, at in known["free"]}, {}, 0))
            result = change(known["begun"])
            self._changes += 1
            free = [[*port, at] for port, at in network.saved()[0].items()]
            by = [self._rank, self._changes]  # no two texts are the same, or two could believe that theirs is the one
            text = json.dumps({"by": by, "free": free, "begun": known["begun"]})
            self._text = self._store.compare_set(KEY, self._text, text).decode()
            if self._text == text:
                return result
