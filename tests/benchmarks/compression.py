"""Top-K beside torch.topk, and what encoding and decoding take: `python -m tests.benchmarks.compression`.

One thread; turn about in one run. torch's side is its fastest: unsorted, into a buffer that is there already.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ashl.compression.index_code import INDEX_CODES
from ashl.compression.link import linked
from ashl.compression.select import largest
from ashl.memory import keep_pages
from tests.benchmarks.table import ratio, show
from tests.conf_option import conf_option

TURNS = 5
SIZES = (1_000_000, 25_000_000)
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


def coding(x: torch.Tensor) -> list[list[str]]:
    values, d = x.numpy(), x.numel()
    rows = []
    for share in RATIOS:
        for code in INDEX_CODES:
            codec = linked(conf_option("compression", "topk", ratio=share, indices=code), ())
            sender, body = codec.encode(None, x)
            select, encode, feedback, decode = turns(
                lambda share=share: largest(values, round(share * d)),
                lambda codec=codec: codec.codec.encode(None, x),
                lambda codec=codec, sender=sender: codec.encode(sender, x),
                lambda codec=codec, body=body: codec.decode(None, body, d),
            )
            name = f"{d:,} at {share:.1%}, {code}"
            rows.append([name, f"{body.nbytes / x.nbytes:.2%}", *(ms(t) for t in (select, encode, feedback, decode))])
    return rows


def main() -> None:
    torch.set_num_threads(1)
    keep_pages()  # as in every process of a run
    vectors = [torch.from_numpy(np.random.default_rng(0).standard_normal(d, dtype=np.float32)) for d in SIZES]
    note = f"ms: median of {TURNS} turns"
    show(
        "the k largest magnitudes",
        ["elements", "torch.topk, ms", "ashl, ms", "torch / ashl", "ashl / copy"],
        [row for x in vectors for row in selection(x)],
        f"{note}; ratios within a turn, median (range); copy: of the vector into a buffer",
    )
    show(
        "Top-K as sent",
        ["elements", "bytes / dense", "select, ms", "encode", "with feedback", "decode"],
        [row for x in vectors for row in coding(x)],
        f"{note}; encode and decode from vector to body and back, selection included",
    )


if __name__ == "__main__":
    main()
