"""Compare the codecs of two checkouts: `python -m tests.benchmarks.checkouts FOLDER [CODEC...]`.

FOLDER is the other checkout, an older or a newer one; this checkout is the second. Each has a
process of its own with one thread. It encodes and decodes a vector on request, while the other
process waits. The order alternates from turn to turn. Times are CPU times, and the least of all
turns counts, so that other load on the machine disturbs little.
"""

import argparse
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from tests.benchmarks.table import alternate, show, write_csv

TURNS = 7
CALLS = 2_000_000  # elements that one measurement encodes, at least, in several calls
HOME = Path(__file__).parents[2]

# Program of a checkout's process. Lines of stdin are `begin CODEC`, `encode` or `decode`; each has
# one line of stdout as its answer: bytes of the payload or `none`, else milliseconds. Names that
# changed between checkouts are looked up, the newest name first.
SERVE = """
import sys, time
from functools import partial
from importlib import import_module
import numpy as np, torch
from ashl.learn.allocator import keep_pages
from tests.conf_option import conf_option

def find(*places):
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(import_module("ashl.compression." + module), name)
        except (ImportError, AttributeError):
            pass
    raise SystemExit(f"this checkout has none of {', '.join(places)}")

def is_reduced(codec):
    traits = codec.traits if hasattr(codec, "traits") else codec.flags
    return traits.reduces

Context = find("contract:EncodeContext", "contract:Turn")
Layer = find("contract:Layer", "wrappers.layers:Layer", "around.layers:Layer")
codec_for_layers = find(
    "wrappers:codec_for_layers",
    "wrappers.compose:codec_for_layers",
    "wrappers.compose:for_layers",
    "around.wrapped:for_layers",
)

def prepare(name, x):
    d = x.numel()
    codec = codec_for_layers(conf_option("compression", name), (Layer("weight", (d // 1024, 1024)),))
    sender, payload = codec.encode(None, x, Context())
    if payload is None:
        return {}, "none"
    decode = partial(codec.decode, None, payload, d)
    if is_reduced(codec):
        decode = partial(codec.reduce, None, [payload], [1.0], d)
    tasks = {"encode": partial(codec.encode, sender, x, Context(round=1)), "decode": decode}
    for task in tasks.values():
        task()
    return tasks, payload.nbytes

torch.set_num_threads(1)
calls = int(sys.argv[2])
keep_pages()
vector = np.random.default_rng(0).standard_normal(int(sys.argv[1]), dtype=np.float32)
x = torch.from_numpy(vector)
print("ready", flush=True)
tasks = {}
for line in sys.stdin:
    word, *names = line.split()
    if word == "begin":
        tasks = {}  # release the memory of the codec before
        tasks, answer = prepare(*names, x)
    else:
        start = time.process_time()
        for _ in range(calls):
            tasks[word]()
        answer = 1e3 / calls * (time.process_time() - start)
    print(answer, flush=True)
"""


class Checkout:
    """A process that runs the codecs of the checkout in a folder on a vector of d elements."""

    def __init__(self, folder: Path, d: int) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(d), str(-(-CALLS // d))],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.read_answer()

    def read_answer(self) -> str:
        assert self.process.stdout
        if not (line := self.process.stdout.readline().strip()):
            raise SystemExit(f"the process of {self.folder} ended; its error is above")
        return line

    def request(self, *words: str) -> str:
        """Send a line to the process and return its answer."""
        assert self.process.stdin
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return self.read_answer()

    def measure(self, word: str) -> float:
        """Return the milliseconds of `encode` or `decode`."""
        return float(self.request(word))

    def close(self) -> None:
        """End the process: it exits when its stdin closes."""
        self.process.communicate()


def compare_codec(name: str, before: Checkout, now: Checkout, turns: int) -> list[str] | None:
    """Return a table row with the CPU milliseconds of a codec; None if it sends nothing."""
    if "none" in [side.request("begin", name) for side in (before, now)]:
        return None
    cells = [name]
    for word in ("encode", "decode"):
        sides = {"before": partial(before.measure, word), "now": partial(now.measure, word)}
        taken = alternate(sides, turns)
        before_ms, now_ms = (min(taken[side]) for side in sides)
        cells += [f"{before_ms:.3g}", f"{now_ms:.3g}", f"{now_ms / before_ms:.2f}"]
    return cells


def common_codecs(folder: Path) -> list[str]:
    """Return the names of the codecs that both checkouts have."""
    return sorted(
        file.stem
        for file in (HOME / "conf" / "compression").glob("[!_]*.yaml")
        if (folder / "conf" / "compression" / file.name).is_file()
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.checkouts")
    parser.add_argument("folder", type=Path, help="the other checkout")
    parser.add_argument("names", nargs="*", help="codecs to compare; default: all common ones")
    parser.add_argument("--turns", type=int, default=TURNS, help="measurements of each side")
    parser.add_argument("--elements", type=int, default=25_600_000, help="a multiple of 1024")
    parser.add_argument("--csv", type=Path, help="file to which the rows are written, too")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    torch.set_num_threads(1)  # `show` reports the number
    before, now = Checkout(folder, asked.elements), Checkout(HOME, asked.elements)
    rows = []
    for name in asked.names or common_codecs(folder):
        if cells := compare_codec(name, before, now, asked.turns):
            rows.append(cells)
            print(*cells, file=sys.stderr, flush=True)
    before.close()
    now.close()
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
        f"ms: CPU time, the least of {asked.turns} turns",
    )
    if asked.csv:
        write_csv(asked.csv, columns, rows)


if __name__ == "__main__":
    main()
