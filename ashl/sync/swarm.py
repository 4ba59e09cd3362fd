"""SwarmSGD: after H local steps a worker averages its model with that of any one neighbour, which
need not wait.

Use when: workers are unequal, links are slow, and pairs may average after several local steps.
Avoid when: shards are strongly skewed: pairs mix slowly.
Alternatives: `ad_psgd` at every step; `local_sgd` by all-reduce.

Rule: worker i takes H local steps and draws a neighbour j at random. Both average their models as
they were before the local steps in progress, and add these steps when they are done.
Waiting: with `overlap` (the paper's non-blocking form) worker i computes while the models travel.
Without it, worker i waits for the answer. The neighbour never waits.
Quantized models: with `bits` each element of a model travels in that many bits, rounded at random.
The receiver decodes it with the help of its own model (`ashl.compression.modulo`). The grid reaches
min(8, 2^(bits − 3)) times the distance between the models at the worker's last exchange: their
largest difference in an element. Its step is at most a quarter of that distance. With a step of
half the distance, rounding errors grow from exchange to exchange. A worker sends its first model in
32 bits. A receiver that cannot decode a model, because it is too far away, keeps its own and sends
the next one in 32 bits. With fewer than 6 bits this happens more often. The time of encoding is not
part of virtual time.

Limits: many bits equal whole models, up to the step of the grid. H = 1 on a bipartite graph is
AD-PSGD, except that workers of both roles ask.
Source: Nadiradze et al., "Asynchronous Decentralized SGD with Quantized and Local Updates", NeurIPS
2021, arXiv 1910.12308.
Differs: in the paper pairs are drawn at random from all edges. Here a worker asks after every H
steps of its own, so a fast worker averages more often. Here the grid follows the distance between
models.

Family: gossip.
Status: situational.
"""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from ashl.compression.contract import EncodeContext, as_float32
from ashl.compression.modulo import CODE, decode_near, encode_residues, payload_nbytes
from ashl.compression.payload import read_payload, write_payload
from ashl.device import to_device, to_host
from ashl.option import Count, Number, option
from ashl.size_only import SizeOnly, Vector
from ashl.stage.contract import StageConfig
from ashl.topology.coordinator import RoamingState
from ashl.topology.graph import MemberGraph
from ashl.topology.pairs import PairRule

REACH = 8.0  # largest reach of the grid, as a multiple of the last distance between models
FINENESS = 4  # smallest number of grid steps in that distance


@option
class Swarm(PairRule):
    """Asynchronous averaging in pairs of neighbours."""

    local_steps: Count | Literal["plan"]
    overlap: bool
    bits: Annotated[int, Number, Field(ge=2, le=16)] | None

    def peers(self, graph: MemberGraph, rank: int) -> tuple[int, ...]:
        """Return the neighbours that this worker may ask: all of them."""
        return graph.neighbours[rank]

    def encode_model(self, stage: StageConfig, state: RoamingState, rank: int, asks: bool) -> Any:
        x = state.params
        apart = state.rule_state  # largest difference of an element at the last exchange
        if self.bits is None:
            return x
        if isinstance(x, SizeOnly):
            return SizeOnly(payload_nbytes(x.nbytes // 4, self.bits))
        step = (apart or 0.0) / max(2 ** (self.bits - 1) / REACH, FINENESS)
        model = as_float32(to_host(x))
        if not float(model.abs().max()) < step * 2**52:
            return x
        context = EncodeContext(seed=stage.seed, worker=rank, round=state.version, layer=int(asks))
        return write_payload(CODE, len(model), encode_residues(model, step, self.bits, context))

    def decode_model(self, state: RoamingState, payload: Any, near: Vector) -> Any:
        if self.bits is None or isinstance(payload, SizeOnly) or isinstance(near, SizeOnly):
            return near if isinstance(near, SizeOnly) else payload
        y = to_host(near)
        if payload.dtype == torch.uint8:
            found = decode_near(read_payload(to_host(payload), CODE, y.numel()), as_float32(y))
            x = y if found is None else found
        else:
            x = to_host(payload)
        state.rule_state = float((x - y).abs().max())
        return to_device(x, str(near.device))
