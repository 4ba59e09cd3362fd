"""The gain of overlap in virtual time: `python -m tests.benchmarks.overlap`.

It times a step and its all-reduce by the closed form that the simulator matches to the nanosecond.
There are two clusters with their declared steps, and links from 10 Mbit/s to 10 Gbit/s. Nothing is
trained.
"""

from dataclasses import replace
from functools import partial

from ashl.config.construct import construct
from ashl.overlap.dear import DeAR
from ashl.overlap.layerwise import hidden_ratios
from ashl.overlap.merged import plan_greedily, plan_optimally
from ashl.overlap.priority import Priority
from ashl.overlap.timeline import merge_buckets
from ashl.planning.instantiate import layer_groups, layout_of, link_of
from ashl.planning.step_timelines import make_timeline
from tests.benchmarks.table import show
from tests.conf_option import conf_option
from tests.support import planned

CLUSTERS = ("ashl_paper", "four_nodes")
MODELS = ("lenet", "resnet8", "vgg11_bn")
MBIT_S = (10, 100, 1_000, 10_000)
LATENCY_S = 0.0005
SHARE = 0.01
SELECT_S = 2e-9  # of an element: about what exact Top-K takes on one core


def rows(cluster: str, model: str) -> list[list[str]]:
    overrides = (
        f"cluster={cluster}",
        f"model={model}",
        "dataset=synthetic",
        "topology=all_reduce",
        "sync=bsp",
    )
    plan = planned(*overrides, "overlap=wfbp", "runtime.gradients=false")
    groups, found = layer_groups(plan), []
    for bandwidth in MBIT_S:
        links = {"exchange_s": None, "bandwidth_mbit_s": bandwidth, "latency_s": LATENCY_S}
        chain = make_timeline(
            plan.stages[0], replace(construct(plan.cluster, "cluster"), **links), groups
        )
        assert chain is not None
        n, best = len(groups), plan_optimally(chain)
        serial = chain.end_ns((n,))
        least = max(chain.ready_ns[-1] + chain.cost(n - 1, n), chain.ready_ns[0] + chain.cost(0, n))
        slices, halves = (
            Priority(plan="tuned", slice="auto", credit="auto").with_plan(chain),
            DeAR(plan="tuned"),
        )
        across = (slices.step_ns(chain), halves.step_ns(chain))
        backward = (
            chain.end_ns((1,) * n),
            chain.end_ns(plan_greedily(chain)),
            chain.end_ns(best),
            least,
        )
        shares = [end / serial for end in (*backward, *across)]
        row = [f"{cluster}, {model}", f"{bandwidth:,}", f"{serial / 1e6:,.4g}"]
        found.append([*row, *(f"{share:.3f}" for share in shares), f"{len(best)} of {n}"])
    return found


def compressed_rows(cluster: str, model: str) -> list[list[str]]:
    """The same with Top-K."""
    overrides = (
        f"cluster={cluster}",
        f"model={model}",
        "dataset=synthetic",
        "topology=all_reduce",
        "sync=bsp",
    )
    topk = ("compression=topk", f"compression.ratio={SHARE}", "overlap=layerwise")
    plan = planned(*overrides, *topk, "runtime.gradients=false")
    groups, found = layer_groups(plan), []
    link = partial(link_of, conf_option("compression", "topk", ratio=SHARE), layout_of(plan.layers))
    for bandwidth in MBIT_S:
        links = {"exchange_s": None, "bandwidth_mbit_s": bandwidth, "latency_s": LATENCY_S}
        machines = replace(
            construct(plan.cluster, "cluster"), compress_s=SELECT_S * plan.num_params, **links
        )
        chain, dense = (
            make_timeline(plan.stages[0], machines, groups, how) for how in (link, None)
        )
        assert chain is not None
        assert dense is not None
        n, best = len(groups), plan_optimally(chain)
        one, each = chain.end_ns((n,)), (1,) * n
        ends = (
            chain.end_ns(each),
            chain.end_ns(plan_greedily(chain)),
            chain.end_ns(best),
            dense.end_ns(plan_optimally(dense)),
        )
        shares = hidden_ratios(chain, best, SHARE, 0.1)
        sizes = [part.stop - part.start for part in merge_buckets(groups, best)]
        kept = (
            sum(share * size for share, size in zip(shares, sizes, strict=True)) / plan.num_params
        )
        row = [
            f"{cluster}, {model}",
            f"{bandwidth:,}",
            f"{one / 1e6:,.4g}",
            *(f"{end / one:.3f}" for end in ends),
        ]
        found.append([*row, f"{len(best)} of {n}", f"{100 * kept:.2g} %"])
    return found


def main() -> None:
    show(
        "A step and its sum with overlap, as a share of one without; latency"
        f" {LATENCY_S * 1e3:g} ms",
        [
            "",
            "Mbit/s",
            "none, ms",
            "wfbp",
            "greedy",
            "optimal",
            "bound",
            "priority",
            "dear",
            "messages",
        ],
        [row for cluster in CLUSTERS for model in MODELS for row in rows(cluster, model)],
        "bound: no cut can be below that stops at the barrier; messages: of the optimal plan, of so"
        " many layer groups",
    )
    show(
        f"The same with Top-K of {SHARE:.0%}, message by message, as a share of Top-K in one"
        " message",
        [
            "",
            "Mbit/s",
            "one, ms",
            "each",
            "greedy",
            "optimal",
            "dense",
            "messages",
            "adaptive keeps",
        ],
        [
            row
            for cluster in CLUSTERS
            for model in MODELS
            for row in compressed_rows(cluster, model)
        ],
        f"selecting takes {SELECT_S * 1e9:g} ns an element; dense: without compression, merged;"
        " adaptive: of the model in the same messages and the same time, at most 10 %",
    )


if __name__ == "__main__":
    main()
