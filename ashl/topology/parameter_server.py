"""Parameter server: workers push what they computed, the server merges it and answers with the model.

Rule: on a push of worker i the server folds it into the model (`aggregate` weighs, `outer` steps), then answers every
worker that may go on (`sync.admit`). Traffic per exchange and worker: one push and one pull of the model. Of workers
that are lost and that come: `ashl.topology.membership`; with `runtime.on_loss=reshard` each of the others goes on with
its part of their data from the first round that it begins after the answer that tells it.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from ashl.aggregate.weighted import Push
from ashl.compression.contract import Turn
from ashl.option import Ratio, option
from ashl.plan.plan import WorkerPlan
from ashl.plan.profile import Profile
from ashl.runtime.effects import JOIN, LOST, Message, Tag
from ashl.runtime.node import Node
from ashl.stage.link import Ends
from ashl.stage.rule import CHURN, CODEC, DELAY, OUTER, OVERLAP, PULLS, WEIGHTS, Loop, Network, Rule, Topology
from ashl.stage.stage import GO, LAST, NEXT, STOP, Stage
from ashl.stage.tally import NOTHING, Start, Tally
from ashl.topology import by_fragment
from ashl.topology.by_priority import drained, given_up
from ashl.topology.by_slice import taken
from ashl.topology.delayed import AT_ONCE_S, at_border, worked
from ashl.topology.dismissal import call_in, dismiss
from ashl.topology.ending import leave, record_end, verdict
from ashl.topology.local_work import Work, WorkerState, encoded, local_work
from ashl.topology.members import as_members
from ashl.topology.membership import come, gather, membership, welcome
from ashl.topology.merging import CLOSE, close, merge, merged, more, receive, reply, rule_of
from ashl.topology.replies import PULL, Orders, Pull, parsed
from ashl.topology.sliced import comes_in_parts, following, settled, sliced


class Updates:
    """What goes back and forth: updates up, the model down. A rule may bring other messages (`ServerRule.messages`).

    `plain`: needs an optimizer that leaves its steps nothing but the learning rate to say. `unbiased`: needs a codec
    that keeps the mean. `whole`: made of a worker's whole shard at once, now and then.
    """

    plain: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    async def produce(self, node: Node, stage: Stage, state: WorkerState) -> tuple[Work, Any, float]:
        """(work, body, loss) of a worker's next push."""
        if stage.delayed is not None:
            work = await worked(node, stage, state)
        else:
            work = await (sliced if stage.messages else local_work)(node, stage, state)
        body, loss = await encoded(node, stage, state, work)
        return work, body, loss

    def greeting(self, stage: Stage, state: ServerState) -> Any:
        """What a worker begins with that comes while the others run."""
        return state.params

    def greeted(self, state: WorkerState, body: Any, kept: WorkerState | None) -> None:
        """... at that worker; `kept` is what it was in a checkpoint, where it comes from one."""
        state.params = body

    def changed(self, stage: Stage, state: ServerState, rank: int) -> None:
        """This worker is gone, or is about to come (`tally.gone` says which)."""
        state.rule_state = rule_of(stage).changed(stage, state.rule_state, state.tally, rank)

    def absorb(self, node: Node, stage: Stage, state: ServerState, message: Message) -> Coroutine[Any, Any, bool]:
        """What a push that is not late does to the server's state; whether the model changed."""
        return (by_fragment.taken_in if stage.fragments else merged)(node, stage, state, message)

    async def answer(self, node: Node, stage: Stage, state: ServerState, rank: int, changed: bool) -> Any:
        """The body of the reply to a worker: the model, or what a compressed pull brings of it; None = nothing new."""
        if stage.fragments:
            return await by_fragment.answered(node, stage, state, rank)
        if not changed or stage.topology.pull_ratio is None:
            return state.params if changed else None
        turn = Turn(stage.topology.pull_ratio, stage.seed, stage.server + 1 + rank, state.tally.version)
        pull = partial(stage.link.pull, state.ends, rank, state.params, turn)
        return await node.compute(pull, work=1, kind="compress")

    def take(self, stage: Stage, state: WorkerState, body: Any) -> Any:
        """The model that a worker goes on with after a pull; at a border it is given the server's, as it is."""
        return stage.link.pulled(state.params, body)


class ServerRule(Rule, contract=True):
    """What a server asks its sync mode. The defaults are ASP's: nobody ever waits.

    `state` is the rule's own, made by `begin` and passed on by `observe`; it lies in the server's state, so it is made
    of plain values. Questions change nothing: asked twice, they have the same answer.
    """

    takes_all: ClassVar[bool] = False  # whether the server takes in all that has come before it answers anyone

    def quorum(self, num_workers: int) -> int:
        """How many pushes make a merge. Raises UsageError where there are not so many workers."""
        return 1

    def accepts(self, staleness: int) -> bool:
        """Whether a push is used at all; if not, it is dropped and counted."""
        return True

    def begin(self, stage: Stage, tally: Tally) -> Any:
        """The rule's own state when a stage begins."""
        return None

    def admit(self, state: Any, tally: Tally) -> Iterable[int]:
        """The waiting workers that may go on now."""
        return tally.waiting

    def observe(self, stage: Stage, state: Any, tally: Tally, push: Push) -> Any:
        """A push has been taken in, at `tally.now_s`: the rule's state from here on."""
        return state

    def closes_s(self, state: Any, tally: Tally) -> float:
        """With `takes_all`: when what has come is merged, however few; until then more is taken in. -inf: by a quorum
        alone."""
        return -math.inf

    def steer(self, stage: Stage, state: Any, tally: Tally, rank: int) -> Orders | None:
        """What this worker, which goes on at `tally.now_s`, does next; None = as planned."""
        return None

    def changed(self, stage: Stage, state: Any, tally: Tally, rank: int) -> Any:
        """This worker is gone, or has come (`tally.gone` says which): the rule's state from here on."""
        return state

    def rescaled(self, stage: Stage, state: Any, tally: Tally) -> Any:
        """The run goes on with another number of workers, from `tally.now_s` on: what of the rule's state holds for
        them, too."""
        return self.begin(stage, tally)

    def anneal(self, state: Any) -> float:
        """What the server's learning rate is multiplied with."""
        return 1.0

    def messages(self) -> Updates:
        """What goes back and forth instead of updates and models, in the same loops."""
        return UPDATES


class BarrierRule(ServerRule, contract=True):
    """A server's rule by which nobody goes on before all have come."""

    averages: ClassVar[bool] = True
    in_rounds: ClassVar[bool] = True

    def quorum(self, num_workers: int) -> int:
        return num_workers

    def accepts(self, staleness: int) -> bool:
        return staleness == 0

    def admit(self, state: Any, tally: Tally) -> Iterable[int]:
        return tally.behind()


UPDATES = Updates()


@option
class ParameterServer(Topology):
    """One server (rank n) holds the model; workers talk to it alone.

    With `pull_ratio` a pull carries that share of the difference to the worker's last pull, by the chosen codec.
    """

    asks: ClassVar[type[Rule]] = ServerRule
    carries: ClassVar[frozenset[str]] = frozenset({CODEC, WEIGHTS, PULLS, OUTER, OVERLAP, DELAY, CHURN})
    has_server: ClassVar[bool] = True
    pull_ratio: Ratio | None

    def links(self, stage: Stage, rank: int) -> tuple[int, ...]:
        return stage.workers if rank == stage.server else (stage.server,)

    def exchange_ns(self, stage: Stage, network: Network, rank: int) -> int:
        """What a push and a pull take, uncontended."""
        if stage.fragments:
            parts = (stage.fragment(k) for k in range(len(stage.fragments)))
            return max(self.exchange_ns(part, network, rank) for part in parts)
        up = stage.codec.payload(stage.worker(rank).compression_ratio, stage.link.d)
        down = stage.link.pull_bytes(self.pull_ratio)
        return network.transfer_ns(rank, stage.server, up) + network.transfer_ns(stage.server, rank, down)

    def begin(self, node: Node, stage: Stage) -> WorkerState | ServerState:
        params, moments = stage.trainer.init()
        if node.rank == stage.server:
            return ServerState(params, moments, Tally(stage.num_workers))
        return WorkerState(params, moments)

    async def come(
        self, node: Node, stages: Sequence[Stage], kept: tuple[int, Any] | None = None
    ) -> tuple[int, Any] | None:
        if kept is not None and node.rank == stages[0].server:
            return await gather(node, stages, *kept)
        return await come(node, stages, None if kept is None else kept[1])

    def role(self, stage: Stage, rank: int) -> Loop:
        if rank == stage.server:
            return server
        return by_fragment.worker if stage.fragments else worker


@dataclass
class ServerState:
    """All that the server needs to go on."""

    params: Any
    moments: Any  # of the optimizer, where gradients are exchanged
    tally: Tally
    evaluated: Start = NOTHING  # the last evaluation
    buffer: list[Push] = field(default_factory=list)  # pushes that came and are not merged yet
    slices: dict[int, list[Push]] = field(default_factory=dict)  # ... by number, where slices are merged
    made: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # (moments, elements) of those that were merged
    ends: Ends = field(default_factory=Ends)  # what the codec keeps here
    fragment_ends: tuple[Ends, ...] = ()  # ... of each, where fragments are exchanged
    outer_state: Any = None  # the outer optimizer's moments
    profile: Profile | None = None  # as measured by a profiling stage
    assigned: tuple[int, Any] | None = None  # what profiling has planned, from this stage on
    entered: int | None = None  # the stage that it is in
    counted: int = 0  # samples of a step of which not all slices are merged yet
    averages: Any = None  # what an online planner has seen
    rule_state: Any = None  # the sync rule's own
    word: int = GO  # NEXT while the work that is under way is waited for
    called: tuple[int, ...] = ()  # who has been asked for the last of it, where exchanges are delayed
    reason: str | None = None
    ahead: Message | None = None  # what has come already
    newcomers: tuple[int, ...] = ()  # who came at the border, and is answered in the next stage
    lives: dict[int, int] = field(default_factory=dict)  # the present one of each worker that has come back
    pulls: list[Tag] = field(default_factory=list)  # of each worker's replies, in its present life
    quorum: int = 1  # how many pushes make a merge now

    workers: tuple[WorkerPlan, ...] = ()  # what each worker does now: the plan's, until it is planned anew

    @property
    def version(self) -> int:
        """Of the model."""
        return self.tally.version

    def enter(self, stage: Stage, now_s: float) -> None:
        """A stage begins: its workers, codecs that begin anew at both ends, and momentum as it is handed over."""
        if self.entered == stage.index:
            return  # it goes on from a checkpoint
        self.entered, self.word, self.called, self.reason, self.ahead = stage.index, GO, (), None, None
        self.slices, self.made, self.counted = {}, {}, 0
        self.tally.begin(now_s)
        self.rule_state = rule_of(stage).begin(stage, self.tally)
        self.workers, self.ends = stage.plan.workers, stage.entered(self.ends, self.tally.samples)
        self.quorum = stage.quorum_of(self.tally.present)
        self.pulls = [stage.tag("pull", self.lives.get(rank, 0)) for rank in stage.workers]
        if stage.resets:
            self.moments = stage.trainer.moments()
        self.outer_state = None if stage.resets_outer else self.outer_state


async def worker(node: Node, stage: Stage, state: WorkerState) -> int:
    """Compute on the model last pulled, push what came of it, wait for the reply; returns the last word. Where
    exchanges are delayed, the next piece of work is computed between a push and its reply."""
    state.enter(stage, node.rank)
    messages, word, push, pull = rule_of(stage).messages(), GO, stage.tag("push"), stage.tag("pull", state.life)
    server, in_parts, answer = stage.topology.server_of(stage, node.rank), comes_in_parts(stage), node.recv(pull)
    while word in (GO, LAST):
        if state.coming is None or await settled(node, stage, state):
            node.mark(stage.index, state)
        work, body, loss = await messages.produce(node, stage, state)
        meta = (work.steps, work.samples, loss, work.version, work.step_s, state.pull_s)
        await node.send(server, push, body, meta)
        ahead, asked = None, 0.0
        if stage.delayed is not None and not state.last:
            ahead, asked = await local_work(node, stage, state), node.now
        message = await answer
        reply = parsed(Pull, message.meta)
        word = reply.word
        if stage.reshards:
            state.away = as_members(message.meta[PULL:])
        if reply.dropped and not stage.codec.flags.lossless and not math.isnan(loss):
            stage.link.undo(state.ends, body)
        if message.body is not None:
            if in_parts and word == GO:
                state.coming = message.body
            else:
                state.params = message.body if word == NEXT else messages.take(stage, state, message.body)
        seen = message.body is not None and (ahead is None or node.now - asked > AT_ONCE_S)
        state.pull_s = node.now - message.start_ns / 1e9 if seen else 0.0
        state.pending = ahead and at_border(node, stage, state, ahead)
        state.follow(reply)
        state.last = word == LAST
        if word in (NEXT, STOP):
            if stage.by_priority:
                await given_up(node, stage, state)
            await node.drop(stage.tag("back"))  # slices of a model that comes as a whole now, or no more
            leave(node, stage, word, reply.end_ns)
        node.round(stage.index, state.round, work.steps, reply.staleness, dropped=bool(reply.dropped), loss=loss)
        state.round += 1
    return word


async def server(node: Node, stage: Stage, state: ServerState) -> int:
    """Merge and answer until the stage is over, then answer every worker once more; returns the last word.

    Before the next stage begins, the work that is under way is waited for and merged; at the end of the run it is not.
    """
    tally, rule, push = state.tally, rule_of(stage), stage.tag("push")
    state.enter(stage, node.now)
    slices = {stage.tag("slice"): taken} if stage.overlap.by_slice or stage.by_priority else {}
    incoming, others, deadline_s = (push, *slices, LOST, JOIN), {**slices, CLOSE: close}, stage.judge.deadline_s
    endless = node.recv(*incoming) if math.isinf(deadline_s) else None
    while state.newcomers:
        await welcome(node, stage, state, state.newcomers[0])
    while True:
        node.mark(stage.index, state)
        message = state.ahead or await (endless or node.recv(*incoming, before_s=deadline_s))
        state.ahead = None
        node.ledger.cut()  # nobody asks for the server's rounds, so they are not kept
        if message is None:
            state.word, state.reason = STOP, "seconds"
            break
        take_in = receive if message.tag == push else others.get(message.tag, membership)
        if await take_in(node, stage, state, message) and stage.judge.take(state, node.now):
            node.snapshot(state.params, counts=tally.report())
        word, reason = verdict(node, stage, tally)
        if word == STOP or state.word == GO:
            state.word, state.reason = word, reason
        if state.word == STOP:
            break
        if state.word == NEXT:
            await call_in(node, stage, state)
            if len(tally.waiting) == tally.present:
                if state.buffer:
                    await node.compute(partial(merge, stage, state, None), work=1, kind="apply")
                break
            continue
        if rule.takes_all:
            state.ahead = await more(node, stage, state, incoming)
        if state.ahead is None:
            ranks = []
            for rank in sorted(rule.admit(state.rule_state, tally)):
                if await reply(node, stage, state, rank):
                    ranks.append(rank)
            if stage.overlap.pulls:
                await following(node, stage, ranks, state.params)
    await drained(node, stage, state)
    if state.word == STOP:
        node.mark(stage.index, None)
    await node.drop(*slices)  # of pushes that are too late
    await dismiss(node, stage, state, state.word)
    record_end(node, stage, tally, state.reason)
    return state.word
