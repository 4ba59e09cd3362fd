"""The codecs of two checkouts, turn about: `python -m tests.benchmarks.checkouts FOLDER`, FOLDER
being the other one.

Each checkout has a process of its own, with two of torch's threads, which encodes and decodes a
vector when it is asked to, while the other one waits. The order changes from turn to turn.
"""

import argparse
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.benchmarks.table import alternate, ratio, show

TURNS = 5
HOME = Path(__file__).parents[2]
SERVE = """
import sys, time
from functools import partial
import numpy as np, torch
from ashl.compression.wrappers.compose import for_layers
import ashl.compression.contract as contract, ashl.compression.wrappers.layers as layers
from ashl.learn.allocator import keep_pages
from tests.conf_option import conf_option
Layer = (contract if "Layer" in vars(contract) else layers).Layer
torch.set_num_threads(2)
keep_pages()
d = int(sys.argv[1])
x = torch.from_numpy(np.random.default_rng(0).standard_normal(d, dtype=np.float32))
buffer = torch.empty_like(x)
print("ready", flush=True)
for line in sys.stdin:
    word, *name = line.split()
    if word == "begin":
        codec = decode = encode = body = sender = None
        codec = for_layers(conf_option("compression", *name), (Layer("weight", (d // 1024, 1024)),))
        sender, body = codec.encode(None, x, contract.Turn())
        if body is None:
            print("none", flush=True)
            continue
        decode = partial(codec.decode, None, body, d)
        if codec.flags.reduces:
            decode = partial(codec.reduce, None, [body], [1.0], d)
        tasks = {"encode": partial(codec.encode, sender, x, contract.Turn(round=1)), "decode": decode}
        for task in tasks.values():
            task()
        print(body.nbytes, flush=True)
    else:
        start = time.perf_counter()
        tasks[word]()
        print(1e3 * (time.perf_counter() - start), flush=True)
"""


class Checkout:
    """A process that runs the codecs of a folder."""

    def __init__(self, folder: Path, d: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, "-c", SERVE, str(d)]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.heard()

    def heard(self) -> str:
        assert self.process.stdout
        if not (line := self.process.stdout.readline().strip()):
            raise SystemExit(f"the process of this checkout ended: {self.process.args}")
        return line

    def asked(self, *words: str) -> str:
        assert self.process.stdin
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return self.heard()

    def timed(self, word: str) -> float:
        """Milliseconds."""
        return float(self.asked(word))


def row(name: str, before: Checkout, now: Checkout, turns: int) -> list[str] | None:
    """Milliseconds of each side of a codec, before and now; None where nothing is sent."""
    if "none" in [side.asked("begin", name) for side in (before, now)]:
        return None
    cells = [name]
    for word in ("encode", "decode"):
        sides = {"before": partial(before.timed, word), "now": partial(now.timed, word)}
        taken = alternate(sides, turns)
        cells += [f"{statistics.median(taken[side]):.1f}" for side in sides] + [
            ratio(taken["now"], taken["before"])
        ]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.checkouts")
    parser.add_argument("folder", type=Path, help="the other checkout")
    parser.add_argument("names", nargs="*", help="these codecs only")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--elements", type=int, default=25_600_000)
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    names = asked.names or sorted(
        file.stem
        for file in (HOME / "conf" / "compression").glob("[!_]*.yaml")
        if (folder / "conf" / "compression" / file.name).is_file()
    )
    before, now = Checkout(folder, asked.elements), Checkout(HOME, asked.elements)
    rows = []
    for name in names:
        if cells := row(name, before, now, asked.turns):
            rows.append(cells)
            print(*cells, file=sys.stderr, flush=True)
    columns = [
        "codec",
        "encode before, ms",
        "now, ms",
        "now / before",
        "decode before, ms",
        "now, ms",
        "now / before",
    ]
    show(
        f"codecs of two checkouts, {asked.elements:,} elements",
        columns,
        rows,
        f"ms: median of {asked.turns} turns",
    )


if __name__ == "__main__":
    main()
