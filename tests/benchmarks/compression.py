"""Every codec beside a copy of the vector, and Top-K beside torch.topk: `python -m
tests.benchmarks.compression`.

It uses two threads, and measures interleaved in one run. torch's side is its fastest: unsorted,
into an existing buffer. `--device cuda` measures the codecs that compute on a device, beside their
targets. `--device cpu` runs the same kernels in the host's memory, which shows that they run, not
their speed.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import numpy as np
import torch

from ashl.compression.contract import EncodeContext, Layer
from ashl.compression.kernels import largest_indices
from ashl.compression.wrappers import codec_for_layers
from ashl.learn.allocator import keep_pages
from tests.benchmarks.table import ratio, show
from tests.conf_option import CONF, conf_option

TURNS = 5
SIZES = (1_000_000, 25_600_000)
RATIOS = (0.001, 0.01, 0.05)
AIMS = {
    "sign": 3,
    "cast": 3,
    "qsgd": 5,
    "terngrad": 5,
    "natural": 5,
    "topk": 15,
}  # encodings on a device, in copies
PLACE = "ashl.compression.kernels.is_on_host"  # function that decides between NumPy and torch


def turns(*tasks: Callable[[], object]) -> list[list[float]]:
    """Milliseconds of each task by turn, after one turn that does not count."""
    finish = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    taken: list[list[float]] = [[] for _ in tasks]
    for context in range(TURNS + 1):
        for task, times in zip(tasks, taken, strict=True):
            finish()
            start = time.perf_counter()
            task()
            finish()
            if context:
                times.append(1e3 * (time.perf_counter() - start))
    return taken


def ms(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f}"


def selection(x: torch.Tensor) -> list[list[str]]:
    buffer, d = torch.empty_like(x), x.numel()
    rows = []
    for share in RATIOS:
        k = round(share * d)
        torchs, ours, copy = turns(
            lambda k=k: torch.topk(torch.abs(x, out=buffer), k, sorted=False),
            lambda k=k: largest_indices(x, k),
            lambda: buffer.copy_(x),
        )
        rows.append(
            [f"{d:,} at {share:.1%}", ms(torchs), ms(ours), ratio(torchs, ours), ratio(ours, copy)]
        )
    return rows


def catalogue(x: torch.Tensor, names: Sequence[str]) -> list[list[str]]:
    """Encoding and decoding of each codec with its defaults, without memory around it, beside a
    copy of the vector.
    """
    d, buffer = x.numel(), torch.empty_like(x)
    layout = (Layer("weight", (d // 1024, 1024)),)
    rows = []
    for name in names:
        codec = codec_for_layers(conf_option("compression", name), layout)
        sender, body = codec.encode(None, x, EncodeContext())
        if body is None:
            continue
        if codec.traits.reduces:
            decode = partial(codec.reduce, None, [body], [1.0], d)
        else:
            decode = partial(codec.decode, None, body, d)
        encode = partial(codec.encode, sender, x, EncodeContext(round=1))
        encoding, decoding, copying = turns(encode, decode, lambda: buffer.copy_(x))
        bits = f"{32 * body.nbytes / x.nbytes:.3g}"
        rows.append(
            [
                name,
                bits,
                ms(encoding),
                ratio(encoding, copying),
                ms(decoding),
                ratio(decoding, copying),
            ]
        )
    return rows


def on_device(x: torch.Tensor, names: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """The same of those that work where x lies, at a share of 1 % where they keep one; and the
    names of the others.
    """
    d, buffer, elsewhere = x.numel(), torch.empty_like(x), []
    layout = (Layer("weight", (d // 1024, 1024)),)
    best, copy = turns(
        lambda: torch.topk(torch.abs(x, out=buffer), d // 100, sorted=False),
        lambda: buffer.copy_(x),
    )
    rows = [["torch.topk of 1 %", "", ms(best), ratio(best, copy), "", "", ""]]
    for name in names:
        codec = codec_for_layers(conf_option("compression", name), layout)
        if codec.on_host:
            elsewhere.append(name)
            continue
        body = codec.encode(None, x, EncodeContext(ratio=0.01))[1]
        encode = partial(codec.encode, None, x, EncodeContext(ratio=0.01, round=1))
        encoding, decoding, copying = turns(
            encode, partial(codec.decode, None, body, d), lambda: buffer.copy_(x)
        )
        bits, aim = f"{32 * body.nbytes / x.nbytes:.3g}", f"{AIMS[name]}" if name in AIMS else ""
        rows.append(
            [
                name,
                bits,
                ms(encoding),
                ratio(encoding, copying),
                aim,
                ms(decoding),
                ratio(decoding, copying),
            ]
        )
    return rows, elsewhere


def show_device(device: str, x: torch.Tensor, names: Sequence[str]) -> None:
    """Measure on the device, or on tensors of the host in its place."""
    if device == "cuda":
        rows, elsewhere = on_device(x.cuda(), names)
        name = torch.cuda.get_device_name()
    else:
        with mock.patch(PLACE, return_value=False):
            rows, elsewhere = on_device(x, names)
        name = "no device: the same kernels in the host's memory"
    columns = ["codec", "bits", "encode, ms", "encode / copy", "aim", "decode, ms", "decode / copy"]
    note = (
        f"ms: median of {TURNS} turns; in the host's memory alone: {', '.join(elsewhere) or 'none'}"
    )
    show(f"codecs on tensors, {x.numel():,} elements, {name}", columns, rows, note)


def floors(x: torch.Tensor) -> list[list[str]]:
    """Measure lower bounds (read, copy) and torch's own operations."""
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
    """Measure all codecs, or only the named ones: `python -m tests.benchmarks.compression qsgd
    topk`.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compression")
    parser.add_argument("names", nargs="*", help="these codecs only")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="codecs on tensors: of a GPU, or of the host"
    )
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "there is no CUDA device on this machine; --device cpu runs the same kernels on its"
            " memory"
        )
    torch.set_num_threads(2)
    keep_pages()  # as in every process of a run
    names = asked.names or sorted(file.stem for file in (CONF / "compression").glob("[!_]*.yaml"))
    if unknown := [name for name in names if not (CONF / "compression" / f"{name}.yaml").is_file()]:
        raise SystemExit(
            f"there is no compression={unknown[0]}; `ashl list compression` has those that"
            " there are"
        )
    vectors = [
        torch.from_numpy(np.random.default_rng(0).standard_normal(d, dtype=np.float32))
        for d in SIZES
    ]
    if asked.device:
        show_device(asked.device, vectors[-1], names)
        return
    note = f"ms: median of {TURNS} turns"
    if not asked.names:
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
        f"{note}; bits an element as sent; with the defaults of each, a second message where there"
        " is memory",
    )


if __name__ == "__main__":
    main()
