"""Exchanges that go on while the next piece of work is computed: the rules as plain loops, their
time, their ends.
"""

import pytest
import torch

from ashl.planning.instantiate import assemble_job
from tests.conf_option import conf_option
from tests.support import Ran, simulated

SMALL = (
    "model.hidden=[16]",
    "dataset=synthetic",
    "dataset.shape=[64]",
    "optimizer.lr=0.05",
    "cluster.compute=[1,1,3]",
    "cluster.link=[1,2,1]",
)
RING, STEPS = ("topology=all_reduce",), 3
LATE = ("overlap=delayed",)
TIMED = ("runtime.gradients=false",)
LOCAL = ("sync=local_sgd", f"sync.local_steps={STEPS}")


def trainer_of(ran: Ran):
    return assemble_job(ran.plan, "cpu").stages[0].trainer


def mean(vectors) -> torch.Tensor:
    return sum(vector * (1 / len(vectors)) for vector in vectors)


@pytest.mark.limit("overlap=delayed")
@pytest.mark.parametrize("topology", ["all_reduce", "parameter_server"])
def test_late_gradients_are_bsp_one_step_late(topology) -> None:
    """Compute w ← w − η·(momentum of) the mean gradient of the model before, for the number of
    counted steps.
    """
    momentum = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.01")
    ran = simulated(*SMALL, "sync=bsp", f"topology={topology}", *LATE, *momentum, "stop.steps=30")
    trainer = trainer_of(ran)
    params, moments = trainer.init()
    due = None
    for step in range(11):
        gradients = mean([trainer.gradient(params, worker, step)[1] for worker in range(3)])
        if due is not None:
            moments, params = trainer.apply(params, moments, due, 0.05)
        due = gradients
    assert torch.equal(ran.params, params)
    assert ran.end["steps"] == sum(ran.end["steps_by"]) == 30
    assert ran.end["stale_max"] == [1, 1, 1]


def by_pieces(trainer, rounds: int, border, momentum_of=lambda moments, update: (None, update)):
    """Take local steps of three workers; return the applied model and the next start of each
    worker.

    At each boundary `border(landed, start, end)` returns the exchanged vectors and the next starts.
    The applied model then has all updates except the exchanged ones.
    """
    landed, moments = trainer.init()
    starts, kept, outer, due = [landed] * 3, [moments] * 3, None, None
    for index in range(rounds):
        ends = []
        for worker in range(3):
            local = starts[worker]
            for step in range(STEPS):
                _, kept[worker], local = trainer.local_step(
                    local, kept[worker], worker, STEPS * index + step, 0.05
                )
            ends.append(local)
        if due is not None:
            outer, update = momentum_of(outer, due)
            landed = landed + update
        pieces = [border(landed, start, end) for start, end in zip(starts, ends, strict=True)]
        due, starts = mean([sent for sent, _ in pieces]), [start for _, start in pieces]
    outer, update = momentum_of(outer, due)
    return landed + update, starts


@pytest.mark.parametrize("topology", ["all_reduce", "parameter_server"])
@pytest.mark.parametrize("own", [1, 0, 0.5])
def test_late_differences_are_cocod(topology, own) -> None:
    chosen = (*SMALL, *LOCAL, f"topology={topology}", "optimizer.momentum=0.9", "stop.steps=36")
    ran = simulated(*chosen, *LATE, f"overlap.local_weight={own}")
    model, starts = by_pieces(
        trainer_of(ran),
        4,
        lambda landed, start, end: (end - start, landed + (end - start) * own if own else landed),
    )
    assert torch.equal(ran.params, model)
    if own == 1:  # the mean of what workers have is what landed, once all has landed
        torch.testing.assert_close(mean(starts), model, rtol=0, atol=1e-6)


@pytest.mark.parametrize("topology", ["all_reduce", "parameter_server"])
def test_eager_diloco_is_each_worker_on_its_own_fresh_part(topology) -> None:
    """Check the paper's rule by hand: worker i's model takes the outer step on d_i(t)/3 + Σ_{j≠i}
    d_j(t − 1)/3.
    """
    chosen = (
        *SMALL,
        *LOCAL,
        f"topology={topology}",
        "outer=nesterov",
        "overlap=eager",
        "stop.steps=45",
    )
    ran = simulated(*chosen)
    trainer, outer = trainer_of(ran), conf_option("outer", "nesterov")
    model, moments = trainer.init()
    models, kept, speeds, landed, speed = [model] * 3, [moments] * 3, [None] * 3, model, None
    before = [torch.zeros_like(model)] * 3
    for index in range(5):
        parts = []
        for worker in range(3):
            local = models[worker]
            for step in range(STEPS * index, STEPS * (index + 1)):
                _, kept[worker], local = trainer.local_step(local, kept[worker], worker, step, 0.05)
            parts.append((local - models[worker]) / 3)
        for worker in range(3):
            update = parts[worker] + sum(before) - before[worker]
            speeds[worker], models[worker] = outer.step(
                speeds[worker], models[worker], update, 0.05
            )
        speed, landed = outer.step(speed, landed, sum(parts), 0.05)
        before = parts
    torch.testing.assert_close(ran.params, landed, rtol=0, atol=1e-5)


def test_overlap_local_sgd_is_the_released_loop() -> None:
    """Check x ← (1 − α)x + αz;  v ← μv − (x − z)/η;  z ← mean of (z − ηv)."""
    alpha, mu, lr = 0.6, 0.7, 0.05
    outer = ("outer=slowmo", f"outer.beta={mu}")
    ran = simulated(*SMALL, *LOCAL, *RING, "overlap=overlap_local_sgd", *outer, "stop.steps=36")
    trainer = trainer_of(ran)
    anchor, moments = trainer.init()
    models, kept, speeds, averaged = (
        [anchor] * 3,
        [moments] * 3,
        [torch.zeros_like(anchor)] * 3,
        anchor,
    )
    for index in range(4):
        for worker in range(3):
            for step in range(STEPS):
                at = STEPS * index + step
                _, kept[worker], models[worker] = trainer.local_step(
                    models[worker], kept[worker], worker, at, lr
                )
        anchor = averaged
        models = [(1 - alpha) * model + alpha * anchor for model in models]
        speeds = [
            mu * speed - (model - anchor) / lr for speed, model in zip(speeds, models, strict=True)
        ]
        averaged = mean([anchor - lr * speed for speed in speeds])
    torch.testing.assert_close(ran.params, averaged, rtol=0, atol=1e-5)


@pytest.mark.limit("overlap=overlap_local_sgd")
def test_without_a_pull_workers_never_meet() -> None:
    """α = 0 and the anchor is the mean of workers that each learn alone, with momentum or
    without.
    """
    ran = simulated(
        *SMALL, *LOCAL, *RING, "overlap=overlap_local_sgd", "overlap.alpha=0", "stop.steps=36"
    )
    trainer = trainer_of(ran)
    alone = []
    for worker in range(3):
        model, moments = trainer.init()
        for step in range(4 * STEPS):
            _, moments, model = trainer.local_step(model, moments, worker, step, 0.05)
        alone.append(model)
    torch.testing.assert_close(ran.params, mean(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sync", ["asp", "ssp", "local_sgd"])
def test_one_worker_with_a_server_resumes_as_alone(sync) -> None:
    """A worker alone with all of its own progress has plain local SGD, to rounding; its own updates
    are never late.
    """
    one = (
        "cluster=homogeneous",
        "cluster.num_workers=1",
        "stop.steps=24",
        f"sync.local_steps={STEPS}",
    )
    alone = simulated(*SMALL[:4], *one, f"sync={sync}")
    ran = simulated(*SMALL[:4], *one, f"sync={sync}", *LATE)
    torch.testing.assert_close(ran.params, alone.params, rtol=0, atol=1e-5)
    assert ran.time_ns < alone.time_ns


@pytest.mark.parametrize(("sync", "steps"), [(("sync=bsp",), 1), (LOCAL, STEPS)])
@pytest.mark.parametrize("exchange_s", [0.004, 0.2])
def test_a_round_takes_the_longer_of_its_steps_and_its_exchange(sync, steps, exchange_s) -> None:
    """The first piece, a round for each merge but the first, and what the last one takes to land,
    to the nanosecond.
    """
    rounds, compute = 8, 30_000_000 * steps  # of the slowest
    for topology in ("all_reduce", "parameter_server"):
        links = (
            "cluster.link=null",
            "cluster.step_s=0.01",
            f"cluster.exchange_s={exchange_s}",
            *TIMED,
        )
        chosen = (
            *SMALL[:5],
            *links,
            *sync,
            f"topology={topology}",
            f"stop.steps={3 * rounds * steps}",
        )
        serial, late = simulated(*chosen), simulated(*chosen, *LATE)
        exchange = (
            (serial.time_ns - rounds * compute) // rounds
            if topology == "all_reduce"
            else round(exchange_s * 1e9)
        )
        lands = exchange if topology == "all_reduce" else exchange // 2  # a push, without its pull
        assert late.time_ns == compute + (rounds - 1) * max(compute, exchange) + lands
        assert late.plan.stages[0].predicted_steps_per_s == pytest.approx(
            3 * steps / max(compute, exchange) * 1e9
        )
        assert any("changes what is learned" in note for note in late.plan.notes)


@pytest.mark.parametrize(
    "sync",
    [
        "asp",
        "ssp",
        "dssp",
        "local_sgd",
        "backup sync.backups=1",
        "fedbuff",
        "ringmaster",
    ],
)
def test_work_in_flight_at_a_stage_boundary_counts_once(sync, workplace) -> None:
    """A first stage of six commits per worker: no step of it is lost, and the second one goes on
    with what there is.
    """
    from tests.conformance.test_stage_processes import of_two

    chosen = ("overlap=delayed", *(f"sync={sync}".split()))
    plan = of_two(chosen, {}, 1)
    (workplace / "plan.json").write_text(plan.to_json())
    ran = simulated(
        "model.hidden=[16]",
        "cluster=homogeneous",
        *chosen,
        f"plan={workplace / 'plan.json'}",
        "stop.steps=400",
    )
    first, last = ran.of("StageEnd")
    rounds = [record for record in ran.of("Round") if record["stage"] == 0]
    merged = sum(record["steps"] for record in rounds if not record["dropped"])
    assert first["steps"] == merged == sum(first["steps_by"])
    assert sum(record["steps"] for record in rounds) == merged + sum(first["dropped_by"])
    assert last["reason"] == "steps"


@pytest.mark.parametrize(
    ("mode", "stop"),
    [
        ("all_reduce sync=bsp", "stop.seconds=1"),
        ("all_reduce sync=local_sgd", "stop.steps=31"),
        ("all_reduce sync=local_sgd", "stop.seconds=1"),
        ("parameter_server sync=local_sgd", "stop.epochs=0.5"),
        ("parameter_server sync=local_sgd", "stop.seconds=1"),
    ],
)
def test_ends_are_met_as_elsewhere(stop, mode) -> None:
    """Counts are passed by less than a step of each worker, and nothing counts after the budget."""
    chosen = (*SMALL, *TIMED, f"topology={mode.split()[0]}", mode.split()[1], stop)
    late, serial = simulated(*chosen, *LATE), simulated(*chosen)
    assert (
        late.end["reason"] == serial.end["reason"] == stop.partition("=")[0].removeprefix("stop.")
    )
    if "seconds" in stop:
        assert late.time_ns <= 1_000_000_000
        assert late.end["steps"] >= serial.end["steps"] > 0
    else:
        assert late.end["steps"] == serial.end["steps"]
        assert late.time_ns < serial.time_ns
    assert late.end["steps"] == sum(late.end["steps_by"])


def test_what_diverges_says_so_and_ends() -> None:
    for mode in (("sync=bsp", *RING), ("sync=asp",)):
        ran = simulated(*SMALL[:3], *mode, *LATE, "optimizer.lr=1e30", "stop.steps=300")
        assert ran.end["reason"] == "diverged"


def test_stages_of_ashl_are_late_and_its_profiling_is_not() -> None:
    ran = simulated(
        *SMALL[:4],
        "schedule=ashl",
        "schedule.loss=running",
        "schedule.loss_switch=2.2",
        *LATE,
        "stop.epochs=4",
    )
    targets = [stage.overlap["_target_"].rpartition(".")[2] for stage in ran.plan.stages]
    assert targets == ["Serial", "OneStepDelayed", "OneStepDelayed"]
    assert [end["reason"] for end in ran.of("StageEnd")][:2] == ["profiled", "loss"]
    assert ran.end["steps"] == sum(ran.end["steps_by"])
