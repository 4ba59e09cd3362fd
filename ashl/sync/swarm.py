"""SwarmSGD: after H local steps a worker averages with any one neighbour, whatever that one is
doing.

Rule: i takes H local steps, draws a neighbour j, and both take the mean of their models as they
were before the local steps that are under way, to which those are added when they are done. With
`overlap` i itself goes on meanwhile (the paper's non-blocking form); otherwise it waits for the
answer.

With `bits` models travel in so many bits an element, rounded at random and read by who has a model
near them (`compression.wire.modulo`), on a grid that reaches min(8, 2^(bits − 3)) times as far as
models were apart at the worker's last meeting. So its step is at most a quarter of that distance:
with half of it, rounding errors grow from meeting to meeting. With fewer than 6 bits, more models
are too far to be read, and more of them travel whole. The first goes whole, and so does the next
where one came that was too far to be read: that end then keeps its own. What encoding costs is not
in virtual time.

Limits: many bits are as good as whole models, to their grain. H = 1 on a graph of two roles is
AD-PSGD but for who asks. Departs from the paper in that a worker asks after every H steps of its
own, so that a fast one meets more often, instead of pairs being drawn from outside, and in that the
grid follows the models.
Source: Nadiradze et al., "Asynchronous Decentralized SGD with Quantized and Local Updates", NeurIPS
2021, arXiv
1910.12308.
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from ashl.compression.contract import EncodeContext
from ashl.compression.wire.arrays import array_of
from ashl.compression.wire.modulo import CODE, nearest, payload_nbytes, residues
from ashl.compression.wire.payload_format import read_payload, write_payload
from ashl.learn.device import to_device, to_host
from ashl.option import Count, Number, option
from ashl.size_only import SizeOnly, Vector
from ashl.stage.stage import Stage
from ashl.topology.coordinator import RoamingState
from ashl.topology.gossip import graph_of
from ashl.topology.pairs import PairRule

REACH = 8.0  # how far a grid reaches at most, in what models were apart
FINENESS = 4  # steps of a grid, at least, in what models were apart


@option
class Swarm(PairRule):
    """Asynchronous averaging in pairs of any neighbours."""

    local_steps: Count | Literal["plan"]
    overlap: bool
    bits: Annotated[int, Number, Field(ge=2, le=16)] | None

    def peers(self, stage: Stage, rank: int) -> tuple[int, ...]:
        """Whom this worker may ask: any neighbour."""
        return graph_of(stage).neighbours(stage, rank)

    def encode_model(self, stage: Stage, state: RoamingState, rank: int, asks: bool) -> Any:
        x, apart = (
            state.params,
            state.rule_state,
        )  # how far another's model was, at the last meeting
        if self.bits is None:
            return x
        if isinstance(x, SizeOnly):
            return SizeOnly(payload_nbytes(x.nbytes // 4, self.bits))
        step = (apart or 0.0) / max(2 ** (self.bits - 1) / REACH, FINENESS)
        if not float(x.abs().max()) < step * 2**52:
            return x
        context = EncodeContext(seed=stage.seed, worker=rank, round=state.version, layer=int(asks))
        return write_payload(
            CODE, x.numel(), residues(array_of(to_host(x)), step, self.bits, context)
        )

    def decode_model(self, state: RoamingState, body: Any, near: Vector) -> Any:
        if self.bits is None or isinstance(body, SizeOnly) or isinstance(near, SizeOnly):
            return near if isinstance(near, SizeOnly) else body
        y = to_host(near)
        if body.dtype == torch.uint8:
            found = nearest(read_payload(to_host(body), CODE, y.numel()), array_of(y))
            x = y if found is None else torch.from_numpy(found)
        else:
            x = to_host(body)
        state.rule_state = float((x - y).abs().max())
        return to_device(x, str(near.device))
