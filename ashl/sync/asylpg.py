"""AsyLPG: asynchronous SGD with variance reduction, with fewer bits both ways; it converges linearly where SGD stalls.

Rule: an epoch begins with a snapshot x̃ of the model, sent to all, of which each worker pushes its full gradient; their
mean over all samples is ∇f(x̃). Then nobody waits for anybody: worker a holds some Q(x) of the past and pushes
C(∇f_a(Q(x)) − ∇f_a(x̃)) = C(ζ) of its next minibatch, with any unbiased codec C (`compression=grid` is the paper's); at
each arrival the server steps along v = C(ζ) + ∇f(x̃), x ← prox_{γ·l1·‖·‖₁}(x − γ·v), and answers with Q(x): every
element rounded at random to a multiple of Δ = ‖x‖_∞/(2^(b−1) − 1), with the fewest bits b for which d·Δ²/4 ≤
μ‖x − x̃‖². After `epoch_steps` such steps workers are held until all have arrived, and the next epoch begins. Bits: 32·d
each way once an epoch; b·d + 32 down, and those of C up, with every step.

Limits: full passes cost time, and the longer an epoch the fewer; the nearer x is to x̃, the more bits go down, and
beyond 16 it is sent as it is. With compression=none and mu=null it is asynchronous SVRG. The step is the optimizer's:
plain SGD in the paper. γ must not fall with time for linear convergence, and has to be smaller the longer the delays.

Source: Yu, Wu and Huang, "Double Quantization for Communication-Efficient Distributed Optimization", NeurIPS 2019,
Algorithm 1; Reddi et al., "On Variance Reduction in Stochastic Gradient Descent and its Asynchronous Variants", NIPS
2015 (without compression).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from ashl.compression.contract import Turn
from ashl.compression.grid import MOST, WHOLE, Grid, meant, rounded
from ashl.compression.wire.arrays import array_of
from ashl.compression.wire.body import HEADER, Parts, read_body, write_body
from ashl.learn.device import numbers, to_host
from ashl.option import Count, NonNegative, Positive, option
from ashl.runtime.effects import Message
from ashl.runtime.node import Node
from ashl.size_only import SizeOnly, Vector
from ashl.stage.rule import CODEC
from ashl.stage.stage import Stage
from ashl.stage.tally import Tally
from ashl.sync.prox import shrunk
from ashl.topology.estimate import Anchor, over_shard, reduced
from ashl.topology.local_work import Work, WorkerState, encoded
from ashl.topology.parameter_server import ServerRule, ServerState, Updates


@dataclass
class Epoch:
    """What the server knows of the epoch: x̃, ∇f(x̃) once all have sent theirs (before that, its sum over samples), how
    many samples it is over, the workers that have not sent theirs, and the steps left."""

    anchor: Any
    missing: set[int]
    left: int
    gradient: Any = None
    samples: int = 0
    done: int = 0

    def admits(self, tally: Tally) -> bool:
        """Whether those that wait may go on: all at once at either end of the full gradients, else as they come."""
        return len(tally.waiting) == tally.num_workers or bool(self.done and self.left)


@option
class AsyLPG(ServerRule):
    """Steps along variance-reduced gradients as they come."""

    exchange: ClassVar[str] = "gradient"
    estimator: ClassVar[str] = "minibatch"  # its own is made of them
    carries: ClassVar[frozenset[str]] = frozenset({CODEC})
    epoch_steps: Count | None
    mu: Positive | None
    l1: NonNegative

    def admit(self, state: Epoch, tally: Tally) -> Iterable[int]:
        return tally.waiting if state.admits(tally) else ()

    def messages(self) -> Snapshots:
        return Snapshots(self)


@dataclass(frozen=True)
class Snapshots(Updates):
    """Full gradients at a snapshot and what has changed since go up, snapshots and models in few bits come down."""

    unbiased: ClassVar[bool] = True
    rule: AsyLPG

    async def produce(self, node: Node, stage: Stage, state: WorkerState) -> tuple[Work, Any, float]:
        """The full gradient at a snapshot; after it, what a minibatch says has changed since."""
        start = node.now
        if state.anchor is None:
            loss, gradient, samples = await over_shard(node, stage, state)
            state.anchor = Anchor(state.params, gradient, state.drawn)
            return Work(gradient, loss, 1, samples, node.now - start, state.version), gradient, loss
        loss, change = await reduced(node, stage, state)
        work = Work(change, loss, 1, state.batch, node.now - start, state.version)
        return work, *await encoded(node, stage, state, work)

    async def absorb(self, node: Node, stage: Stage, state: ServerState, message: Message) -> bool:
        """A full gradient joins the sum; anything else is a step."""
        return await node.compute(partial(self.merged, stage, state, message), work=1, kind="apply")

    def merged(self, stage: Stage, state: ServerState, message: Message) -> bool:
        tally, worker, (steps, samples) = state.tally, message.src, message.meta[:2]
        if state.rule_state is None:
            state.rule_state = self.opened(stage, state.params)
        epoch = state.rule_state
        tally.commit(worker, int(steps), int(samples))
        stepped = not epoch.missing
        if stepped:
            zeta = stage.link.decode(state.ends, worker, message.body)
            lr = stage.trainer.rate(tally.samples)
            state.moments, x = stage.trainer.apply(state.params, state.moments, zeta + epoch.gradient, lr)
            state.params = shrunk(x, lr * self.rule.l1)
            tally.merge()
            epoch.done, epoch.left = epoch.done + 1, max(0, epoch.left - 1)
        else:
            part = message.body * samples
            epoch.gradient = part if epoch.gradient is None else epoch.gradient + part
            epoch.samples += int(samples)
            epoch.missing.discard(worker)
            if not epoch.missing:
                epoch.gradient = epoch.gradient * (1 / epoch.samples)
        if not epoch.left and len(tally.waiting) == tally.num_workers:
            state.rule_state = self.opened(stage, state.params)
        return stepped

    async def answer(self, node: Node, stage: Stage, state: ServerState, rank: int, changed: bool) -> Any:
        """A snapshot, nothing where the model still is the snapshot, or the model in few bits."""
        return await node.compute(partial(self.body, stage, state, rank), work=1, kind="compress")

    def body(self, stage: Stage, state: ServerState, rank: int) -> Any:
        epoch = state.rule_state
        if epoch.missing:
            return epoch.anchor
        if not epoch.done:
            return None
        turn = Turn(seed=stage.seed, worker=stage.server + 1 + rank, round=state.tally.version)
        return written(state.params, epoch.anchor, turn, self.rule.mu)

    def take(self, stage: Stage, state: WorkerState, body: Any) -> Any:
        """The model after a pull; a dense one is a snapshot."""
        if body.nbytes == stage.trainer.dense_bytes and not is_encoded(body):
            state.anchor = None
            return body
        if isinstance(body, SizeOnly):
            return state.params
        return stage.link.made(read_model(body, stage.trainer.num_params))

    def opened(self, stage: Stage, params: Vector) -> Epoch:
        """A new epoch; without `epoch_steps` it is as long as minibatches take to go over the data."""
        steps = self.rule.epoch_steps or max(1, stage.epoch_samples // stage.worker(0).batch)
        return Epoch(params, set(stage.workers), steps)


def written(x: Any, anchor: Any, turn: Turn, mu: float | None) -> Any:
    """The body of Q(x)."""
    if isinstance(x, SizeOnly):
        bits = 32 if mu is None else MOST // 2
        return SizeOnly(HEADER.size + 4 + -(-bits * (x.nbytes // 4) // 8))
    array, few = array_of(to_host(x)), bits_of(x, anchor, mu)
    parts = Parts(array.size, array, form=WHOLE) if few is None else rounded(array, few, turn)
    return write_body(Grid.code, x.numel(), parts)


def bits_of(x: Any, anchor: Any, mu: float | None) -> int | None:
    """The fewest bits for which E‖Q(x) − x‖² ≤ μ‖x − x̃‖²; None where 16 are too few."""
    apart, top = numbers([torch.linalg.vector_norm(x.double() - anchor), x.abs().max()])
    if mu is None or not apart or not math.isfinite(top):
        return None
    steps = top * math.sqrt(x.numel() / mu) / (2 * apart)
    bits = 1 + max(1, math.ceil(math.log2(steps + 1)))
    return bits if bits <= MOST else None


def is_encoded(body: Vector) -> bool:
    return not isinstance(body, SizeOnly) and body.dtype == torch.uint8


def read_model(body: Any, d: int) -> Any:
    """Q(x) as a vector. Raises BodyError."""
    return torch.from_numpy(meant(read_body(body, Grid.code, d), d))
