"""The cost of the simulator: `python -m tests.benchmarks.simulator`.

It compares the simulator with a plain training loop of one process over as many minibatches, and
all cores with one. Then it measures events per second without gradients, the time of planning, and
memory. Seconds are processor time, which other load does not lengthen, except with several cores.

With `--device cuda` it only compares four workers on one GPU with a plain loop on it. With
`--device cpu` it does so at a small size, which shows that it runs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ashl.cluster.network import make_network
from ashl.cluster.speed import speed_of
from ashl.config.compose import compose
from ashl.config.construct import construct
from ashl.plan.plan import Plan
from ashl.planning.compile_plan import compile_plan, prepare_plan
from ashl.planning.instantiate import assemble_job
from ashl.runtime.parallel_sim import count_cores, use_cores
from ashl.runtime.sim import Sim
from ashl.stage.program import run_stages
from tests.benchmarks.table import alternate, ratio, show, thousands
from tests.support import Ran, planned

TURNS = 9
SPREAD = 8  # workers whose gradients are computed on several cores
CASES = {  # (overrides, minibatches of one turn)
    "mlp/digits": (("model=mlp", "dataset=digits"), 1000),
    "cnn/digits": (("model=cnn", "dataset=digits"), 400),
    "lenet 32x32": (("model=lenet", "dataset=synthetic"), 80),
}
MODES = {
    "bsp": ("sync=bsp",),
    "ssp": ("sync=ssp",),
    "all-reduce": ("sync=bsp", "topology=all_reduce"),
}
TOPOLOGIES = {  # those without a server
    "all-reduce": ("topology=all_reduce", "sync=bsp"),
    "ring of d_psgd": ("topology=gossip", "sync=d_psgd"),
    "pairs of ad_psgd": ("topology=gossip", "sync=ad_psgd"),
    "groups of ripples_smart": (
        "topology=partial_all_reduce",
        "schedule=single",
        "sync=ripples_smart",
    ),
}
RESIDENT = {  # models on a device
    "VGG16-BN": ("model=vgg16_bn",),
    "ResNet-18": ("model=resnet18_small",),
    "LeNet": ("model=lenet",),
}
SIZES = {"cuda": (128, 400, 9), "cpu": (4, 8, 3)}  # batch, minibatches of one turn, turns
WORKERS = (10, 100, 1000)
MANY = (10, 1000, 10_000)
EVENTS = 100_000
TIMED = {  # overrides of runs without gradients
    "bsp": ("sync=bsp",),
    "ssp": ("sync=ssp",),
    "asp": ("sync=asp",),
    "all_reduce": ("sync=bsp", "topology=all_reduce"),
    "d_psgd": ("sync=d_psgd", "topology=gossip"),
    "ad_psgd": ("sync=ad_psgd", "topology=gossip"),
    "ripples_smart": ("sync=ripples_smart", "topology=partial_all_reduce"),
}


def simulation(plan: Plan, cores: int = 1, device: str = "cpu") -> Callable[[], Sim]:
    """A run of the plan in virtual time, with nobody who evaluates or writes."""
    job = assemble_job(plan, device)
    cluster = construct(plan.cluster, "cluster")
    stage = job.stages[0]

    def run() -> Sim:
        speed = speed_of(cluster, stage.plan.workers[0].batch, plan.seed)
        sim = Sim(
            plan.num_ranks,
            speed,
            make_network(cluster, stage.trainer.dense_bytes),
            Ran(plan, rounds="none"),
        )
        with use_cores(sim, cores, plan.num_workers, job.learner):
            sim.run(partial(run_stages, stages=job.stages), tick=lambda: None)
        return sim

    return run


def plain_loop(
    config: Plan, steps: int, device: str = "cpu", graphed: bool = False
) -> Callable[[], None]:
    """Train as a torch user would in one process, with the same model, batch and optimizer."""
    dataset, sgd = construct(config.dataset, "dataset"), config.stages[0].optimizer
    data = dataset.load()
    module = construct(config.model, "model").build(data.sample_shape, data.num_classes).to(device)
    inputs, targets = data.train.inputs.to(device), data.train.targets.to(device)
    if graphed:
        module = torch.cuda.make_graphed_callables(module, (inputs[: dataset.batch_size].clone(),))
    optimizer = torch.optim.SGD(
        module.parameters(),
        sgd["lr"],
        sgd["momentum"],
        weight_decay=sgd["weight_decay"],
        fused=True,
    )
    batches = endless(len(targets), dataset.batch_size)

    def run() -> None:
        for _, places in zip(range(steps), batches, strict=False):
            batch = places.to(device)
            optimizer.zero_grad()
            loss = functional.cross_entropy(module(inputs[batch]), targets[batch])
            loss.backward()
            optimizer.step()
            loss.item()

    return run


def endless(samples: int, batch: int) -> Iterator[Tensor]:
    """Full batches in random order, epoch after epoch."""
    while True:
        yield from torch.randperm(samples)[: samples // batch * batch].split(batch)


def cpu_s(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def against_a_loop() -> None:
    rows = []
    for case, (overrides, steps) in CASES.items():
        base = (
            *overrides,
            f"stop.steps={steps}",
            "eval.every_s=null",
            "eval.every_commits=1000000000",
        )
        plans = {mode: planned(*base, *chosen) for mode, chosen in MODES.items()}
        runs = {mode: simulation(plan) for mode, plan in plans.items()}
        loop = plain_loop(plans["bsp"], steps)
        for run in (loop, *runs.values()):
            run()  # the first of each allocates and plans
        found = alternate(
            {name: partial(cpu_s, run) for name, run in {**runs, "": loop}.items()}, TURNS
        )
        rows.append(
            [
                case,
                thousands([s / steps * 1e6 for s in found[""]]),
                *(ratio(found[m], found[""]) for m in MODES),
            ]
        )
    show(
        "Processor time of the simulator (4 workers) / that of a plain loop over as many"
        " minibatches",
        ["", "loop, µs/step", *MODES],
        rows,
        f"{TURNS} turns; ratios are taken within a turn: median (quartiles)",
    )


def wall_s(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def on_all_cores() -> None:
    cores = count_cores("auto", SPREAD)
    base = (
        f"cluster.num_workers={SPREAD}",
        "stop.steps=400",
        "eval.every_s=null",
        "eval.every_commits=1000000000",
    )
    rows = []
    for case, (overrides, _) in CASES.items():
        plans = {
            mode: planned(*overrides, *base, "cluster=homogeneous", *chosen)
            for mode, chosen in MODES.items()
        }
        row = [case]
        for plan in plans.values():
            runs = {
                name: simulation(plan, count) for name, count in {"all": cores, "one": 1}.items()
            }
            found = alternate({name: partial(wall_s, run) for name, run in runs.items()}, TURNS)
            row.append(ratio(found["all"], found["one"]))
        rows.append(row)
    show(
        f"Time of a simulation of {SPREAD} workers with runtime.cores={cores} / with 1, same bits",
        ["", *MODES],
        rows,
        f"{TURNS} turns; by itself (runtime.cores=auto) it takes several cores for steps of 0.7 ms"
        " and more",
    )


def on_device(device: str) -> None:
    batch, steps, turns = SIZES[device]
    pixels = ("dataset=synthetic", f"dataset.num_train={16 * batch}", "dataset.num_test=10")
    rest = (f"dataset.batch_size={batch}", "sync=bsp", "eval.every_s=null")
    base = (*pixels, *rest, "eval.every_commits=1000000000")

    def taken_s(run: Callable[[], object]) -> float:
        def whole() -> None:
            run()
            if device == "cuda":
                torch.cuda.synchronize()

        return wall_s(whole)

    rows = []
    for case, model in RESIDENT.items():
        for graphs in ("off", "on") if device == "cuda" else ("off",):
            plans = [
                planned(*model, *base, f"runtime.graphs={graphs}", f"stop.steps={n}")
                for n in (4, 4 + steps)
            ]
            loop = plain_loop(plans[0], steps, device, graphs == "on")
            short, long = (simulation(plan, device=device) for plan in plans)
            for run in (loop, short, long):
                run()  # the first of each allocates and captures
            contestants = {
                "loop": partial(taken_s, loop),
                "": lambda a=short, b=long: taken_s(b) - taken_s(a),
            }
            found = {
                name: [steps / max(s, 1e-9) for s in each]
                for name, each in alternate(contestants, turns).items()
            }
            rates = (f"{statistics.median(found[name]):.1f}" for name in contestants)
            rows.append([case, graphs, *rates, ratio(found["loop"], found[""])])
            print(*rows[-1], file=sys.stderr, flush=True)  # the next may take minutes
    where = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else "the CPU, at a size that says nothing of a device"
    )
    show(
        f"Steps/s of four workers in virtual time (bsp, batch {batch}) beside a plain loop, on"
        f" {where}",
        ["", "graphs", "loop", "simulator", "time / loop's"],
        rows,
        f"{turns} turns; ratios are taken within a turn: median (quartiles); what a run takes to"
        " begin does not count",
    )


def events_per_s(run: Callable[[], Sim]) -> float:
    start = time.process_time()
    events = run().events
    return events / (time.process_time() - start)


def events() -> None:
    rows = []
    for mode, overrides in TIMED.items():
        cells = []
        for n in WORKERS:
            factors = [1 + i % 7 / 2 for i in range(n)]
            plan = planned(
                "runtime.gradients=false",
                *overrides,
                f"cluster.compute={factors}",
                "cluster.link=null",
                "cluster.exchange_s=0.01",
                "dataset.batch_size=1",
                f"stop.steps={EVENTS // 3}",
            )
            run = simulation(plan)
            cells.append(thousands([events_per_s(run) for _ in range(3)]))
        rows.append([mode, *cells])
    show(
        "Events per second of processor time, without gradients",
        ["", *(f"{n:,} workers" for n in WORKERS)],
        rows,
        f"medians of 3 runs of about {EVENTS:,} events each; no jitter; the first three with a"
        " parameter server",
    )


def without_server(line: tuple[str, ...], n: int) -> dict[str, Any]:
    """A configuration of n workers of unequal speed in which nothing is learned."""
    config = compose(
        ["runtime=sim", "tracking=none", "runtime.gradients=false", "cluster.link=null", *line],
        None,
    )
    config["cluster"] |= {
        "num_workers": n,
        "compute": [1 + i % 7 / 2 for i in range(n)],
        "exchange_s": 0.01,
    }
    config["dataset"]["batch_size"] = 1
    config["stop"]["steps"] = max(EVENTS // 3, 10 * n)
    return config


def planning() -> None:
    rows = []
    for name, line in {"server, bsp": MODES["bsp"], **TOPOLOGIES}.items():
        configs = [without_server(line, n) for n in WORKERS]
        rows.append(
            [
                name,
                *(
                    f"{min(cpu_s(partial(prepare_plan, config)) for _ in range(3)):.2f}"
                    for config in configs
                ),
            ]
        )
    show(
        "Processor seconds from a composed configuration to a plan with its predictions",
        ["", *(f"{n:,} workers" for n in WORKERS)],
        rows,
        "least of 3",
    )


def peak_mb(overrides: tuple[str, ...], n: int) -> float:
    """The most memory that this process has held, once it has planned and run that."""
    torch.set_num_threads(1)
    simulation(compile_plan(without_server(overrides, n)))()
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return (
        int(line.split()[1]) / 1024
    )  # `ru_maxrss` would begin with that of the process that has started this one


def memory() -> None:
    rows = []
    for name, line in {"server, asp": TIMED["asp"], **TOPOLOGIES}.items():
        cells = []
        for n in MANY:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                cells.append(f"{fresh.submit(peak_mb, line, n).result():.0f}")
        rows.append([name, *cells])
    show(
        "Most memory of a process that plans and simulates, in MiB",
        ["", *(f"{n:,} workers" for n in MANY)],
        rows,
        "without gradients, ten steps of each worker and more; about 300 of them are torch's",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.simulator")
    parser.add_argument(
        "--device",
        choices=tuple(SIZES),
        help="only four workers on this device, beside a plain loop",
    )
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "there is no CUDA device on this machine; --device cpu shows that the comparison runs"
        )
    torch.set_num_threads(1)
    if device:
        on_device(device)
        return
    against_a_loop()
    on_all_cores()
    events()
    planning()
    memory()


if __name__ == "__main__":
    main()
