"""Recorded traces: what a file says is what happens, and one that says something else is
refused.
"""

from pathlib import Path

import pytest

from ashl.cluster.speed import Factors
from ashl.cluster.trace import with_trace_events
from ashl.config.construct import construct
from ashl.errors import UsageError
from tests.support import planned, simulated

RUN = (
    "cluster=homogeneous",
    "cluster.compute=[1,2]",
    "sync=asp",
    "stop.steps=60",
    "runtime.gradients=false",
)
LINKS = ("cluster.exchange_s=null", "cluster.bandwidth_mbit_s=100", "cluster.latency_s=0.001")


def test_a_run_follows_its_trace_as_it_would_events(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("time_s,worker,step_s,mbit_s\n0.1,0,0.06,\n0.2,,,50\n")
    links = ", ".join(f"{{time_s: 0.2, worker: {worker}, link: 2}}" for worker in (0, 1))
    said = f"[{{time_s: 0.1, worker: 0, compute: 3}}, {links}]"
    recorded, declared = (
        simulated(*RUN, *LINKS, by) for by in (f"cluster.trace={file}", f"cluster.events={said}")
    )
    assert recorded.plan.cluster == declared.plan.cluster
    assert recorded.time_ns == declared.time_ns > simulated(*RUN, *LINKS).time_ns


def test_what_a_line_leaves_open_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    lines = "".join(f"{k / 1000},{k % 2},{1 + k % 7},\n" for k in range(4000))
    file.write_text(f"time_s,worker,compute,link\n{lines}4,0,,9\n")
    factors = Factors(
        construct(planned(*RUN, f"cluster.trace={file}").cluster, "cluster"), "compute"
    )
    last = 1 + 3998 % 7
    assert [factors.factor_of(0, round(s * 1e9)) for s in (0, 0.0019, 0.002, 3.9985, 9)] == [
        1,
        1,
        3,
        last,
        last,
    ]
    assert factors.factor_of(1, 0) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "",
            (
                "names the columns, time_s and any of worker, compute, step_s, link, mbit_s, and it"
                " is empty"
            ),
        ),
        ("0,0,2\n", "and it has '0', '0', '2'"),
        ("time_s,worker\n0,0\n", "and it has 'time_s', 'worker'"),
        ("time_s,speed,compute\n", "'speed'"),
        ("time_s,compute\n0,2\nsoon,2\n", "line 3: time_s=soon is not a valid number"),
        ("time_s,compute\n-1,2\n", "line 2: time_s=-1 is not a valid number"),
        ("time_s,compute\n1,nan\n", "line 2: compute=nan"),
        ("time_s,compute\n1,0\n", "line 2: compute=0 is not positive"),
        ("time_s,worker,link\n1,2,3\n", "line 2: worker=2 is not one of the workers 0 to 1"),
        (
            f"time_s,worker,link\n1,{'9' * 5000},3\n",
            "line 2: worker=99999999999999999999 is not one of the workers",
        ),
        (
            "time_s,worker,link\n1,2\n",
            "line 2: the number of cells differs from the first line; give 3 cells",
        ),
        ("time_s,mbit_s\n1,2\n", "cluster.bandwidth_mbit_s as its factor 1, which is not declared"),
        ('time_s,link\n1,"2\n', "is no CSV text"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        with_trace_events(
            {
                "trace": str(file),
                "compute": [1, 2],
                "step_s": 0.1,
                "bandwidth_mbit_s": None,
                "events": [],
            }
        )
    assert why in str(error.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(
        UsageError, match=r"cluster\.trace=nowhere\.csv cannot be read: No such file"
    ):
        planned(*RUN, "cluster.trace=nowhere.csv")
