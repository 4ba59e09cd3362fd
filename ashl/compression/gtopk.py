"""gTop-k: workers merge their top-k sets two by two, each time keeping the k largest sums, so that
no message grows.

Rule, under an all-reduce: p_j is worker j's update and residual; it selects the k largest |p_j| and
takes c_j·p_j there. In ⌈log2 n⌉ steps along a tree rooted in worker 0, for any n, a parent adds its
child's set to its own and keeps the k largest sums. The root's set goes back along the tree and is
the update, on all workers. What a worker sent and what did not come through returns to its residual
(`error_feedback`), so that c_j-weighted sent and residuals add up to what was there. An element may
be dropped on one branch and come through on another, hence beside the set each parent tells its
child, with one bit for each element, whether the child's part is in it. Bits: those of k values and
places up, those and k more down. Where a worker is lost, the others begin that sum anew along a
tree of their own.

At a parameter server there are no branches: it keeps the k largest of the whole sum of a merge, and
what it leaves out it adds to the next merge itself, since its workers learn nothing but the model.
It does so where workers keep residuals too; an asynchronous merge is of one push. That memory is in
units of what was sent, and is not rescaled with the learning rate; over the border of a stage it
goes like a worker's residual.

Limits: one worker is top-k; workers that select the same places end with their exact sum. The
result depends on the tree, since the largest of partial sums need not be the largest of the sum.
Where densities differ, the largest counts.

Source: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks", ICDCS 2019; there an element that is in the final set counts as sent on all
branches.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ashl.compression.common.select import largest
from ashl.compression.common.sparsifier import SPARSE
from ashl.compression.contract import (
    CodecInput,
    Collective,
    Keeps,
    Outcome,
    PayloadError,
    Reduces,
    State,
    Team,
    Traits,
)
from ashl.compression.topk import TopK
from ashl.compression.wire.arrays import array_of, beside, read, tensor_of, to_device_index
from ashl.compression.wire.index_code import write_indices
from ashl.compression.wire.payload_format import (
    EMPTY,
    Parts,
    read_payload,
    typed_part,
    write_payload,
)
from ashl.option import option

UP, DOWN = "gtopk_up", "gtopk_down"  # messages along the tree
WORD = 4  # bytes: what follows the bits of a set stays aligned


class Few(NamedTuple):
    """Some elements of a vector: ascending places, and what is there. The host merges them,
    wherever the vector is.
    """

    places: np.ndarray
    values: np.ndarray


class Final(NamedTuple):
    """The root's set, and of each element whether this worker's part is in it."""

    few: Few
    alive: np.ndarray


@option
class GTopK(TopK, Reduces, Collective):
    """Selects together with all others."""

    code: ClassVar[int] = 81
    promises: ClassVar[Traits] = Traits(contraction=True, reduces=True)
    values: Literal["fp32"]
    per_layer: Literal[False]

    def peers(self, place: int, size: int) -> tuple[int, ...]:
        parent, children = tree_neighbours(place, size)
        return tuple(sorted(children if parent is None else (parent, *children)))

    async def collective(self, team: Team, source: CodecInput) -> Outcome:
        """Up and down the tree."""
        d, (parent, children) = source.x.numel(), tree_neighbours(team.place, team.size)
        sets = [await team.compute(partial(self.select, source, team.weight), work=1)]
        for child in children:
            payload, _ = await team.recv(child, UP)
            sets.append(await team.compute(partial(self.merge_few, sets[-1], payload, d)))
        if parent is None:
            final = Final(sets[-1], np.ones(sets[-1].places.size, bool))
        else:
            await team.send(parent, UP, self.written_few(sets[-1], d))
            payload, _ = await team.recv(parent, DOWN, final=True)
            final = await team.compute(partial(self.read_final, payload, d))
        for child, merged in zip(reversed(children), reversed(sets), strict=False):
            final = final._replace(alive=final.alive & within(final.few, merged))
            await team.send(child, DOWN, self.written_few(final.few, d, final.alive))
        return await team.compute(partial(self.finish_sum, source, sets[0], final))

    async def simulate_collective(self, team: Team, ratio: float | None, d: int) -> None:
        """The number of elements goes with each message: of several, the largest stays."""
        k, (parent, children) = self.kept(ratio, d), tree_neighbours(team.place, team.size)
        k = k if self.form(k, d) == SPARSE else d
        await team.compute(empty_few, work=1)
        for child in children:
            _, (other,) = await team.recv(child, UP)
            k = max(k, int(other))
            await team.compute(empty_few)
        if parent is not None:
            await team.send(parent, UP, team.blank(self.size(k, d)), k)
            _, (other,) = await team.recv(parent, DOWN, final=True)
            k = int(other)
            await team.compute(empty_few)
        for child in reversed(children):
            await team.send(child, DOWN, team.blank(self.size(k, d) + bits_bytes(k)), k)

    def select(self, source: CodecInput, weight: float) -> Few:
        """What a worker starts with: c·p at its own places."""
        p, d = array_of(source.x), source.x.numel()
        k = self.kept(source.context.ratio, d)
        places = largest(p, k) if self.form(k, d) == SPARSE else to_device_index(p, np.arange(d))
        with np.errstate(over="ignore", invalid="ignore"):  # of a run that diverges
            return Few(read(places), read(p[places]) * np.float32(weight))

    def merge_few(self, own: Few, payload: Tensor, d: int) -> Few:
        """The largest of the sums with a child's."""
        other = self.read_few(read_payload(payload, self.code, d), d)
        places = np.concatenate([own.places, other.places])
        order = places.argsort(kind="stable")  # of equal places the own comes first
        places = places[order]
        first = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]]))
        with np.errstate(over="ignore", invalid="ignore"):
            sums = np.add.reduceat(np.concatenate([own.values, other.values])[order], first)
        chosen = largest(sums, max(own.places.size, other.places.size))
        return Few(places[first[chosen]], sums[chosen])

    def written_few(self, few: Few, d: int, alive: np.ndarray | None = None) -> Tensor:
        """A set as a body; on the way down with the bits of its elements."""
        k, bits = few.places.size, EMPTY
        if alive is not None:
            bits = np.zeros(bits_bytes(k), np.uint8)
            bits[: -(-k // 8)] = np.packbits(alive, bitorder="little")
        form = self.form(k, d)
        indices = write_indices(self.indices, few.places, d) if form == SPARSE else EMPTY
        return write_payload(self.code, d, Parts(k, few.values, indices, bits, form))

    def read_few(self, parts: Parts, d: int) -> Few:
        places, values = self.unpack(parts, d)
        return Few(np.arange(d) if isinstance(places, slice) else places.astype(np.int64), values)

    def read_final(self, payload: Tensor, d: int) -> Final:
        """What a parent sends down. Raises BodyError."""
        parts = read_payload(payload, self.code, d)
        bits = typed_part(parts.scales, "u1", bits_bytes(parts.count), "bits")
        alive = np.unpackbits(bits, count=parts.count, bitorder="little").view(bool)
        return Final(self.read_few(parts._replace(scales=EMPTY), d), alive)

    def finish_sum(self, source: CodecInput, own: Few, final: Final) -> Outcome:
        """Sent is what of the worker's own came through."""
        update, sent = torch.zeros_like(source.x), torch.zeros_like(source.x)
        array = array_of(update)
        array[to_device_index(array, final.few.places)] = beside(array, final.few.values)
        through = to_device_index(array, final.few.places[final.alive & within(final.few, own)])
        sent[through] = source.x[through]
        return Outcome(update, sent)

    def reduce(
        self, memory: State, payloads: Sequence[Tensor], weights: Sequence[float], d: int
    ) -> tuple[State, Tensor]:
        """At a server: the k largest of the sum; what is left of it is kept for the next merge."""
        total = torch.zeros(d, device=str(payloads[0].device)) if memory is None else memory.clone()
        for payload, weight in zip(payloads, weights, strict=True):
            self.add(total, payload, weight)
        k = max(read_payload(payload, self.code, d).count for payload in payloads)
        if not k:
            raise PayloadError("nothing was selected by anybody")
        places, x = tensor_of(largest(array_of(total), k)), torch.zeros_like(total)
        x[places], total[places] = total[places], 0.0
        return (total if self.error_feedback or self.momentum is not None else None), x

    def convert_memory(self, memory: State, keeps: Keeps, worth: float) -> State:
        return memory * worth if keeps.residual and isinstance(memory, Tensor) else None


def tree_neighbours(rank: int, n: int) -> tuple[int | None, tuple[int, ...]]:
    """(parent, children in the order in which they are merged) of a rank in the tree of n: of two
    neighbours 2^i apart the second sends to the first.
    """
    children, step = [], 1
    while step < n and rank % (2 * step) == 0:
        if rank + step < n:
            children.append(rank + step)
        step *= 2
    return (rank - step if rank else None), tuple(children)


def empty_few() -> None:
    """What a run that is only timed computes."""


def bits_bytes(k: int) -> int:
    """The size of k bits, in whole words."""
    return -(-k // (8 * WORD)) * WORD


def within(few: Few, other: Few) -> np.ndarray:
    """bool [count]: which places of the first are places of the second."""
    return np.isin(few.places, other.places, assume_unique=True)
