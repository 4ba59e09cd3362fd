"""Every codec beside a copy of the vector, and Top-K beside torch.topk: `python -m tests.benchmarks.compression`.

Two threads; turn about in one run. torch's side is its fastest: unsorted, into a buffer that is there already.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from ashl.compression.around.wrapped import for_layers
from ashl.compression.base.select import largest
from ashl.compression.contract import Layer, Turn
from ashl.learn.allocator import keep_pages
from tests.benchmarks.table import ratio, show
from tests.conf_option import CONF, conf_option

TURNS = 5
SIZES = (1_000_000, 25_600_000)
RATIOS = (0.001, 0.01, 0.05)


def turns(*tasks: Callable[[], object]) -> list[list[float]]:
    """Milliseconds of each task by turn, after one turn that does not count."""
    taken: list[list[float]] = [[] for _ in tasks]
    for turn in range(TURNS + 1):
        for task, times in zip(tasks, taken, strict=True):
            start = time.perf_counter()
            task()
            if turn:
                times.append(1e3 * (time.perf_counter() - start))
    return taken


def ms(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f}"


def selection(x: torch.Tensor) -> list[list[str]]:
    values, buffer, d = x.numpy(), torch.empty_like(x), x.numel()
    rows = []
    for share in RATIOS:
        k = round(share * d)
        torchs, ours, copy = turns(
            lambda k=k: torch.topk(torch.abs(x, out=buffer), k, sorted=False),
            lambda k=k: largest(values, k),
            lambda: buffer.copy_(x),
        )
        rows.append([f"{d:,} at {share:.1%}", ms(torchs), ms(ours), ratio(torchs, ours), ratio(ours, copy)])
    return rows


def catalogue(x: torch.Tensor, names: Sequence[str]) -> list[list[str]]:
    """Encoding and decoding of each codec with its defaults, without memory around it, beside a copy of the vector."""
    d, buffer = x.numel(), torch.empty_like(x)
    layout = (Layer("weight", (d // 1024, 1024)),)
    rows = []
    for name in names:
        codec = for_layers(conf_option("compression", name), layout)
        sender, body = codec.encode(None, x, Turn())
        if body is None:
            continue
        if codec.flags.reduces:
            decode = partial(codec.reduce, None, [body], [1.0], d)
        else:
            decode = partial(codec.decode, None, body, d)
        encode = partial(codec.encode, sender, x, Turn(round=1))
        encoding, decoding, copying = turns(encode, decode, lambda: buffer.copy_(x))
        bits = f"{32 * body.nbytes / x.nbytes:.3g}"
        rows.append([name, bits, ms(encoding), ratio(encoding, copying), ms(decoding), ratio(decoding, copying)])
    return rows


def floors(x: torch.Tensor) -> list[list[str]]:
    """What nothing can beat, and what most do."""
    d, buffer = x.numel(), torch.empty_like(x)
    k = d // 100
    reading, copying, casting, topk = turns(
        x.sum,
        lambda: buffer.copy_(x),
        lambda: x.to(torch.bfloat16),
        lambda: torch.topk(torch.abs(x, out=buffer), k, sorted=False),
    )
    names = ("read (sum)", "copy into a buffer", "torch's cast to bfloat16", "torch.topk of 1 %")
    return [
        [name, "", ms(times), ratio(times, copying), "", ""]
        for name, times in zip(names, (reading, copying, casting, topk), strict=True)
    ]


def main() -> None:
    """With arguments: only these codecs, `python -m tests.benchmarks.compression qsgd topk`."""
    torch.set_num_threads(2)
    keep_pages()  # as in every process of a run
    names = sys.argv[1:] or sorted(file.stem for file in (CONF / "compression").glob("[!_]*.yaml"))
    vectors = [torch.from_numpy(np.random.default_rng(0).standard_normal(d, dtype=np.float32)) for d in SIZES]
    note = f"ms: median of {TURNS} turns"
    if not sys.argv[1:]:
        show(
            "the k largest magnitudes",
            ["elements", "torch.topk, ms", "ashl, ms", "torch / ashl", "ashl / copy"],
            [row for x in vectors for row in selection(x)],
            f"{note}; ratios within a turn, median (range); copy: of the vector into a buffer",
        )
    show(
        f"every codec, {vectors[-1].numel():,} elements",
        ["codec", "bits", "encode, ms", "encode / copy", "decode, ms", "decode / copy"],
        [*floors(vectors[-1]), *catalogue(vectors[-1], names)],
        f"{note}; bits an element as sent; with the defaults of each, a second message where there is memory",
    )


if __name__ == "__main__":
    main()
