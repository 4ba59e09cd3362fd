"""Facts of the golden set: those that it records of a run, those that it compares, and their files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.golden.runs import RUNS, Row
from tests.support import Ran, simulated

FOLDER = Path(__file__).parent
GOLDEN, CURVES = FOLDER / "golden.json", FOLDER / "curves.json"
SCORES = {"test_accuracy": "accuracy", "test_loss": "loss"}
BITS = ("params_sha256", *SCORES.values())  # what always hangs on the machine's arithmetic

Facts = dict[str, Any]


def facts_of(row: Row) -> Facts:
    """Everything that is recorded of this run, in virtual time."""
    ran = simulated(*row.overrides)
    end, n = ran.end, ran.plan.num_workers
    ledgers = [record for record in ran.of("TimeTotals") if record["rank"] < n]
    kinds = sorted({kind for totals in ran.ledgers for kind in totals})
    facts = {
        "trace_sha256": trace_of(ran),
        "end_ns": ran.time_ns,
        "steps": end["steps"],
        "samples": end["samples"],
        "commits": sum(end["commits"]),
        "dropped": sum(end["dropped_by"]),
        "bytes_up": sum(record["bytes_up"] for record in ledgers),
        "bytes_down": sum(record["bytes_down"] for record in ledgers),
        "totals_ns": {kind: sum(totals[kind] for totals in ran.ledgers) for kind in kinds},
    }
    if row.learns:
        scores = ran.learner.evaluate(ran.params)
        facts["params_sha256"] = ran.sha256
        facts |= {name: rounded(scores[key], 6) for key, name in SCORES.items()}
    return facts


def trace_of(ran: Ran) -> str:
    """A hash of each rank's spans, (class, start, end) in nanoseconds. Of records it knows nothing
    else.
    """
    spans: dict[int, list[list[Any]]] = {rank: [] for rank in range(ran.plan.num_ranks)}
    for record in ran.of("Round"):
        spans[record["rank"]] += [list(span) for span in record["spans_ns"]]
    return hashlib.sha256(json.dumps([spans[rank] for rank in sorted(spans)]).encode()).hexdigest()


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


@cache
def arithmetic() -> str:
    """Return a fingerprint of this machine's rounding: the bits of the kinds of sums and products
    that runs make.

    A matrix library chooses its kernel by the processor, and the last bits of learned values depend
    on the kernel.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        digest = hashlib.sha256()
        for result in (*network_results(), *other_results()):
            digest.update(np.ascontiguousarray(result).tobytes())
        return digest.hexdigest()[:16]
    finally:
        torch.set_num_threads(threads)


def fixed(*shape: int) -> Tensor:
    """Numbers in [-0.5, 0.5] that no library draws."""
    size = int(np.prod(shape))
    return torch.from_numpy(
        ((np.arange(size) * 7919 % 10007) / 10007 - 0.5).astype(np.float32)
    ).reshape(shape)


def network_results() -> list[np.ndarray]:
    """Losses, outputs and gradients of small networks, in batches for training and for
    evaluation.
    """
    results = []
    for batch, inner in ((32, 16), (500, 16), (32, 32), (360, 10)):
        weights = [fixed(inner, 64), fixed(inner), fixed(10, inner), fixed(10)]
        for weight in weights:
            weight.requires_grad_()
        hidden = torch.relu(functional.linear(fixed(batch, 64), weights[0], weights[1]))
        scores = functional.log_softmax(functional.linear(hidden, weights[2], weights[3]), dim=1)
        loss = functional.nll_loss(scores, torch.arange(batch) % 10)
        results += [loss.detach().numpy(), scores.detach().numpy()]
        results += [gradient.numpy() for gradient in torch.autograd.grad(loss, weights)]
    kernel, images = fixed(4, 1, 3, 3).requires_grad_(), fixed(32, 1, 8, 8)
    loss = functional.conv2d(images, kernel, padding=1).square().mean()
    return [
        *results,
        loss.detach().numpy(),
        *(gradient.numpy() for gradient in torch.autograd.grad(loss, [kernel])),
    ]


def other_results() -> list[np.ndarray]:
    """Compute the operations of optimizers and codecs: long sums, norms, exponentials, roots,
    random numbers, a decomposition.
    """
    x = fixed(10_007)
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    tensors = [x.sum(), x.exp(), x.abs().sqrt(), x.abs().log1p(), x.square().mean(), drawn, x @ x]
    arrays = [np.exp(x.numpy()), np.float64(x.numpy().sum()), np.linalg.norm(x.numpy())]
    return [
        *(t.numpy() for t in tensors),
        *arrays,
        *np.linalg.svd(fixed(16, 64).numpy(), full_matrices=False),
    ]


def compared(row: Row, facts: Facts, same: bool) -> Facts:
    """Return the facts that this machine must reproduce; `same` if its arithmetic is that of the
    record.
    """
    if same or not row.learns:
        return facts
    return {} if row.by_bits else {name: fact for name, fact in facts.items() if name not in BITS}


def changes(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the changed facts of a run, with old and new values."""
    found = []
    for fact in sorted({*was, *now}):
        before, after = was.get(fact), now.get(fact)
        if isinstance(before, dict) and isinstance(after, dict):
            found += changes(f"{name}: {fact}", before, after)
        elif before != after:
            found.append(f"{name}: {fact} was {before} and is {after}")
    return found


@cache
def recorded(path: Path = GOLDEN) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, key: str, by_name: Mapping[str, Any]) -> None:
    """One line for each name, sorted, so that a difference shows which moved."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(by_name[name], sort_keys=True)}"
        for name in sorted(by_name)
    ]
    body = ",\n".join(lines)
    path.write_text(
        f'{{"arithmetic": "{arithmetic()}", "{key}": {{\n{body}\n}}}}\n', encoding="utf-8"
    )
    recorded.cache_clear()


def counted() -> str:
    """Return in words the facts that a machine of another arithmetic compares."""
    timed = sum(not row.by_bits for row in RUNS.values())
    return f"of {len(RUNS)} runs only the timings and bytes of {timed} are compared"
