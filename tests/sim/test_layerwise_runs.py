"""Gradients compressed message by message while backward goes on: the bits of the same codec
applied part by part once backward is over, in the time of the closed form.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ashl.compression.contract import Layer
from ashl.compression.payload import HEADER
from ashl.compression.wrappers import Layerwise, WrappedCodec, inner_codec, wrap_codec
from ashl.config.construct import construct
from ashl.learn.trainer import SizeOnlyTrainer
from ashl.overlap.none import Serial
from ashl.overlap.timeline import buckets_of_tensors, merge_buckets
from ashl.plan.plan import SERIAL
from ashl.planning.instantiate import assemble_job, link_of
from ashl.planning.step_timelines import make_timeline
from ashl.stage.contract import StageConfig
from tests.conf_option import conf_option
from tests.support import planned, run, simulated
from tests.swarm.drawn import run as drawn_run

LINKS = (
    "cluster.exchange_s=null",
    "cluster.bandwidth_mbit_s=20",
    "cluster.latency_s=0.0005",
    "cluster.step_s=0.03",
)
RING = ("topology=all_reduce", "sync=bsp", "cluster.compress_s=0.004", *LINKS)
DEEP = ("model.hidden=[32,32,32]", "stop.steps=14", "run.compression_stats_every=null")
UNEQUAL = ("cluster.compute=[1,1,3]", "cluster.link=[1,2,1]")
MOMENTUM = "optimizer.momentum=0.9"
CORRECTED = ("compression.momentum=0.9", "optimizer.momentum=0")
LAYERWISE = "overlap=layerwise"
SPEC = {
    "_target_": "ashl.overlap.layerwise.Layerwise",
    "plan": "none",
    "ratio": None,
    "max_ratio": 1.0,
}


def by_groups(stage: StageConfig) -> StageConfig:
    """The stage without overlap, its codec applied to each of its messages by itself."""
    codec = Layerwise(
        inner_codec(stage.codec), tuple(part.stop - part.start for part in reversed(stage.buckets))
    )
    if isinstance(stage.codec, WrappedCodec):
        codec = replace(stage.codec, codec=codec)
    return replace(stage, overlap=Serial(), layer_groups=(), pipelines=(), codec=codec)


@pytest.mark.parametrize(
    ("codec", "workers"),
    [
        (("compression=topk", MOMENTUM), UNEQUAL),
        (
            ("compression=topk", MOMENTUM, "overlap.plan=[2,2]"),
            ("cluster.compute=[1,2]", "cluster.link=null"),
        ),
        ((*CORRECTED, "compression=topk", "compression.warmup_epochs=1"), UNEQUAL),
        (
            ("compression=sign", "compression.scale=mean", "compression.error_feedback=true"),
            UNEQUAL,
        ),
        (("compression=threshold",), UNEQUAL),  # payloads of many lengths
    ],
    ids=lambda case: case[0].rpartition("=")[2],
)
def test_the_bits_and_bytes_are_those_of_the_same_codec_part_by_part(codec, workers) -> None:
    """Runs equal the formula with residuals, two and three unequal workers, and a step count that
    ends in a round.
    """
    plan = planned(*RING, *DEEP, *workers, *codec, LAYERWISE)
    ours, theirs = run(plan), run(plan, by_groups)
    assert ours.sha256 == theirs.sha256
    assert ours.time_ns < theirs.time_ns
    if (
        "compression=threshold" not in codec
    ):  # all as long as the longest: of each message, or of the whole
        groups, merges = len(plan.stages[0].overlap["plan"]), ours.end["merges"]
        framing = (HEADER.size + 4 * groups) * (plan.num_workers - 1) * merges
        for own, whole in zip(ours.of("TimeTotals"), theirs.of("TimeTotals"), strict=True):
            assert own["bytes_up"] == own["bytes_down"] == whole["bytes_up"] - framing


@pytest.mark.parametrize("codec", ["topk", "random_k", "terngrad", "uniform"])
def test_codecs_by_layer_come_to_the_same_however_messages_are_cut(codec) -> None:
    """`compression.per_layer=true` selects in each tensor anyhow, so that overlap costs nothing but
    headers.
    """
    feedback = CORRECTED if codec == "topk" else ("compression.error_feedback=false",)
    common = (
        *RING,
        *DEEP,
        *UNEQUAL,
        f"compression={codec}",
        "compression.per_layer=true",
        *feedback,
    )
    plain = simulated(*common)
    for cut in ("none", "[3,1]"):
        ran = simulated(*common, LAYERWISE, f"overlap.plan={cut}")
        assert ran.sha256 == plain.sha256
        assert ran.time_ns < plain.time_ns
        assert ran.plan.stages[0].workers[0].message_bytes - plain.plan.stages[0].workers[
            0
        ].message_bytes in (20, 60)


@pytest.mark.limit("overlap=layerwise")
@pytest.mark.parametrize("codec", ["topk", "random_mask", "qsgd"])
def test_one_message_is_no_overlap(codec) -> None:
    """Bits, bytes and time agree, for summed and for gathered payloads."""
    common = (*RING, *DEEP, *UNEQUAL, f"compression={codec}")
    plain, one = simulated(*common), simulated(*common, LAYERWISE, "overlap.plan=[4]")
    assert (one.sha256, one.time_ns) == (plain.sha256, plain.time_ns)
    assert one.of("TimeTotals")[0]["bytes_up"] == plain.of("TimeTotals")[0]["bytes_up"]
    assert one.ledgers == plain.ledgers


@pytest.mark.limit("overlap=layerwise")
def test_without_compression_it_is_merged() -> None:
    common = (*RING, *DEEP, *UNEQUAL, MOMENTUM)
    ours, merged = (
        simulated(*common, LAYERWISE, "overlap.plan=optimal"),
        simulated(*common, "overlap=merged"),
    )
    assert (ours.sha256, ours.time_ns) == (merged.sha256, merged.time_ns)


BASE = planned(  # two equal workers
    "topology=all_reduce",
    "sync=bsp",
    "runtime.gradients=false",
    "cluster.compute=[1,1]",
    "cluster.link=null",
    "compression=topk",
    "compression.indices=int32",
    "cluster.exchange_s=null",
    "stop.steps=10",
    "dataset.batch_size=8",
    "cluster.step_s=0.03",
    "cluster.compress_s=0.004",
    "cluster.bandwidth_mbit_s=20",
    "cluster.latency_s=0.0005",
)
BOUND = assemble_job(BASE, "cpu").stages[0]


@given(
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 9)), min_size=1, max_size=6),
    st.sampled_from((0.0, 0.002)),
    st.sampled_from(("none", "greedy", "optimal")),
    st.sampled_from((None, "adaptive")),
)
@settings(max_examples=50)
def test_random_chains_take_their_closed_form(drawn, latency_s, cut, ratio) -> None:
    sizes, work = zip(*drawn, strict=True)
    layout, groups = (
        tuple(Layer(str(size), (size,)) for size in sizes),
        buckets_of_tensors([(n,) for n in sizes], work),
    )
    cluster, codec = (
        construct(BASE.cluster | {"latency_s": latency_s}, "cluster"),
        conf_option("compression", "topk"),
    )
    link = partial(link_of, codec, layout)
    chain = make_timeline(BASE.stages[0], cluster, groups, link)
    option = conf_option("overlap", "layerwise", plan=cut, ratio=ratio, max_ratio=0.9).with_plan(
        chain
    )
    end_ns = chain.end_ns(option.plan, option.ratio)
    stage = replace(
        BOUND,
        overlap=option,
        layer_groups=groups,
        pipelines=tuple(link(part.start, part.stop) for part in merge_buckets(groups, option.plan)),
        layout=layout,
        codec=wrap_codec(codec, layout),
        trainer=SizeOnlyTrainer(sum(sizes), 100),
    )
    sim, _ = drawn_run(cluster, (stage,))
    assert sim.now_ns == 5 * end_ns
    if ratio:
        assert end_ns == chain.end_ns(option.plan), "what is hidden costs nothing"


def test_residuals_cross_a_stage_boundary() -> None:
    """Residuals pass from messages to one, from one to messages, and to other messages unchanged,
    or are dropped.
    """
    common = (
        *RING,
        *DEEP,
        *UNEQUAL,
        "compression=topk",
        "compression.per_layer=true",
        "optimizer.lr=0.2",
    )
    plan = planned(*common, LAYERWISE)
    cut, serial = plan.stages[0], replace(plan.stages[0], overlap=SERIAL)
    other = replace(cut, overlap=SPEC | {"plan": [3, 1]})

    def of_two(first: Any, second: Any, **handover: str) -> str:
        stages = (replace(first, until={"commits": 3}), replace(second, handover=handover))
        return run(replace(plan, stages=stages)).sha256

    whole = of_two(serial, serial)
    assert {of_two(*pair) for pair in ((cut, serial), (serial, cut), (cut, other))} == {whole}
    dropped = of_two(serial, serial, residual="drop")
    assert {of_two(*pair, residual="drop") for pair in ((cut, serial), (cut, other))} == {dropped}
    assert dropped != whole
