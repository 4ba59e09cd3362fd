"""Global top-k: workers merge their top-k sets in a tree and keep the k largest sums at each step.

Use when: all-reduce with many workers: the merged message stays as short as one worker's.
Avoid when: workers are few: `topk` is then as short and simpler.
Alternatives: `topk`, gathered; `power_sgd`, summed.

Rule, under an all-reduce: p_j is the sum of worker j's update and residual. The worker selects the
k largest |p_j| and takes c_j·p_j there. In ⌈log2 n⌉ steps along a tree with worker 0 as its root,
for any n, a parent adds its child's set to its own and keeps the k largest sums. The final set of
the root is the update, and is sent back along the tree to all workers. An element that a worker
sent, but that is not part of the final sum, returns to its residual (`error_feedback`). So the
c_j-weighted sent parts and residuals add up to the sum of the c_j·p_j. An element may be dropped on
one branch and survive on another. Therefore each parent sends its child, with the final set, one
bit per element that says whether the child's part is in it. If a worker fails, the survivors repeat
the sum along a tree of their own.
Bits: those of k values and indices up; those and k more down.

At a parameter server there is no tree: the server keeps the k largest elements of the whole sum of
a merge. With `error_feedback` or `momentum` it adds the others to the next merge, because workers
receive the model only. It does so in addition to the residuals of the workers. Without these keys,
the others are lost. An asynchronous merge has one push. This memory has the unit of the pushes,
and is not rescaled with the learning rate. At a stage boundary it is converted like a worker's
residual.

Limits: one worker is top-k. Workers that select the same indices end with their exact sum. The
result depends on the tree, because the largest partial sums need not be part of the largest sums.
If densities differ, the largest is used.

Source: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for
Low Bandwidth Networks", ICDCS 2019.
Differs: in the paper, an element of the final set counts as sent on all branches.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ashl.compression.coding import write_indices
from ashl.compression.contract import (
    CodecInput,
    Collective,
    Elements,
    Keeps,
    Outcome,
    Reduces,
    State,
    Team,
    Traits,
)
from ashl.compression.kernels import (
    as_tensor,
    largest_indices,
    pack_truths,
    packed_bytes,
    pad_to,
    to_device_of,
    unpack_truths,
)
from ashl.compression.payload import (
    EMPTY,
    Parts,
    PayloadError,
    read_payload,
    typed_part,
    write_payload,
)
from ashl.compression.sparse import SPARSE
from ashl.compression.topk import TopK
from ashl.device import to_host
from ashl.option import option
from ashl.size_only import SizeOnly

UP, DOWN = "gtopk_up", "gtopk_down"  # messages along the tree
WORD = 4  # bytes; the bits of a set fill whole words, so that the values after them are aligned


class Final(NamedTuple):
    """The final set, and for each element whether this worker's part is in it."""

    few: Elements
    alive: Tensor


@option
class GTopK(TopK, Reduces, Collective):
    """Selects the largest elements of the sum of all workers.

    Sets of elements are few, so they are merged in host memory.
    """

    code: ClassVar[int] = 81
    promises: ClassVar[Traits] = Traits(contraction=True, reduces=True)
    values: Literal["fp32"]
    per_layer: Literal[False]

    def peers(self, place: int, size: int) -> tuple[int, ...]:
        parent, children = tree_neighbours(place, size)
        return tuple(sorted(children if parent is None else (parent, *children)))

    async def collective(self, team: Team, source: CodecInput) -> Outcome:
        """Merge up the tree and distribute the final set down the tree."""
        d, (parent, children) = source.x.numel(), tree_neighbours(team.place, team.size)
        sets = [await team.compute(partial(self.select, source, team.weight), work=1)]
        for child in children:
            payload, _ = await team.recv(child, UP)
            sets.append(await team.compute(partial(self.merge_few, sets[-1], payload, d)))
        if parent is None:
            final = Final(sets[-1], torch.ones_like(sets[-1].indices, dtype=torch.bool))
        else:
            await team.send(parent, UP, self.write_few(sets[-1], d))
            payload, _ = await team.recv(parent, DOWN, final=True)
            final = await team.compute(partial(self.read_final, payload, d))
        for child, merged in zip(reversed(children), reversed(sets), strict=False):
            final = final._replace(alive=final.alive & find_common(final.few, merged))
            await team.send(child, DOWN, self.write_few(final.few, d, final.alive))
        return await team.compute(partial(self.finish_sum, source, sets[0], final))

    async def simulate_collective(self, team: Team, ratio: float | None, d: int) -> None:
        """Send messages of the same sizes; each carries its number of elements, of which the
        largest is kept.
        """
        k, (parent, children) = self.num_selected(ratio, d), tree_neighbours(team.place, team.size)
        k = k if self.format.form(k, d) == SPARSE else d
        for child in children:
            _, (other,) = await team.recv(child, UP)
            k = max(k, int(other))
        if parent is not None:
            await team.send(parent, UP, SizeOnly(self.format.nbytes(k, d)), k)
            _, (other,) = await team.recv(parent, DOWN, final=True)
            k = int(other)
        for child in reversed(children):
            size = self.format.nbytes(k, d) + bits_bytes(k)
            await team.send(child, DOWN, SizeOnly(size), k)

    def select(self, source: CodecInput, weight: float) -> Elements:
        """Return the set with which a worker starts: c·p at its own indices."""
        p, d = source.x, source.x.numel()
        k = self.num_selected(source.context.ratio, d)
        if self.format.form(k, d) == SPARSE:
            indices = largest_indices(p, k)
            return Elements(to_host(indices), to_host(p[indices]) * weight)
        return Elements(torch.arange(d), to_host(p) * weight)

    def merge_few(self, own: Elements, payload: Tensor, d: int) -> Elements:
        """Return the largest sums of a worker's set and the set of a child."""
        other = self.read_few(read_payload(to_host(payload), self.code, d), d)
        indices, places = torch.cat([own.indices, other.indices]).unique(return_inverse=True)
        sums = own.values.new_zeros(len(indices))
        sums[places[: len(own.indices)]] = own.values
        sums[places[len(own.indices) :]] += other.values
        chosen = largest_indices(sums, max(len(own.indices), len(other.indices)))
        return Elements(indices[chosen], sums[chosen])

    def write_few(self, few: Elements, d: int, alive: Tensor | None = None) -> Tensor:
        """Encode a set; on the way down, with the bits of its elements."""
        k = len(few.indices)
        bits = EMPTY if alive is None else pad_to(pack_truths(alive), WORD)
        form = self.format.form(k, d)
        indices = write_indices(self.indices, few.indices, d) if form == SPARSE else EMPTY
        return write_payload(self.code, d, Parts(k, few.values, indices, bits, form))

    def read_few(self, parts: Parts, d: int) -> Elements:
        indices, values = self.unpack(parts, d)
        whole = isinstance(indices, slice)
        return Elements(torch.arange(d) if whole else indices.long(), values)

    def read_final(self, payload: Tensor, d: int) -> Final:
        """Decode the final set from a parent.   Raises: PayloadError if it is malformed."""
        parts = read_payload(to_host(payload), self.code, d)
        bits = typed_part(parts.scales, torch.uint8, bits_bytes(parts.count), "bits")
        alive = as_tensor(unpack_truths(bits, parts.count))
        return Final(self.read_few(parts._replace(scales=EMPTY), d), alive)

    def finish_sum(self, source: CodecInput, own: Elements, final: Final) -> Outcome:
        """Return the update; `sent` are the worker's own elements that are part of it."""
        update, sent = torch.zeros_like(source.x), torch.zeros_like(source.x)
        update[to_device_of(update, final.few.indices)] = to_device_of(update, final.few.values)
        through = to_device_of(sent, final.few.indices[final.alive & find_common(final.few, own)])
        sent[through] = source.x[through]
        return Outcome(update, sent)

    def reduce(
        self, memory: State, payloads: Sequence[Tensor], weights: Sequence[float], d: int
    ) -> tuple[State, Tensor]:
        """Return the k largest elements of the sum, at a server, and keep the others as memory."""
        total = torch.zeros(d, device=str(payloads[0].device)) if memory is None else memory.clone()
        for payload, weight in zip(payloads, weights, strict=True):
            self.add(total, payload, weight)
        k = max(read_payload(payload, self.code, d).count for payload in payloads)
        if not k:
            raise PayloadError("received no elements: no worker selected any")
        indices, x = largest_indices(total, k), torch.zeros_like(total)
        x[indices], total[indices] = total[indices], 0.0
        return (total if self.error_feedback or self.momentum is not None else None), x

    def convert_memory(self, memory: State, keeps: Keeps, worth: float) -> State:
        return memory * worth if keeps.residual and isinstance(memory, Tensor) else None


def tree_neighbours(rank: int, n: int) -> tuple[int | None, tuple[int, ...]]:
    """Return (parent, children in merge order) of a rank in a tree of n.

    Of two neighbours at a distance of 2^i, the second sends to the first.
    """
    children, step = [], 1
    while step < n and rank % (2 * step) == 0:
        if rank + step < n:
            children.append(rank + step)
        step *= 2
    return (rank - step if rank else None), tuple(children)


def bits_bytes(k: int) -> int:
    """Return the size of k bits in bytes, in whole words."""
    return -(-packed_bytes(k, 1) // WORD) * WORD


def find_common(few: Elements, other: Elements) -> Tensor:
    """Return bool [count], True for each index of `few` that `other` has, too."""
    return torch.isin(few.indices, other.indices, assume_unique=True)
