"""Make the saved view of MLflow's page: charts and columns that MLflow 3 does not show by default.

A view is an experiment tag whose value is the state of the page. The format is internal to MLflow
(this is that of 3.17), so a failure to set the tag is ignored. MLflow titles charts by their
metrics and adds no chart of its own for a metric that has one here.
"""

import base64
import json
import zlib
from collections.abc import Sequence

KEY = "ashloverview"
TAG = f"mlflow.sharedViewState.{KEY}"
NAME = "ashl: overview"
DATE_MS = 1_795_132_800_000  # date of this version of the view, which MLflow shows
MAX_WORKERS = 16  # most lines in a chart
MAX_RUNS = 20  # runs that are drawn at first

COLUMNS = (
    "params.`schedule`",
    "params.`sync`",
    "params.`topology`",
    "params.`compression`",
    "params.`seed`",
    "metrics.`final/test_accuracy`",
    "metrics.`final/time_to_target_s`",
    "metrics.`final/time_s`",
    "metrics.`final/samples_per_s`",
    "metrics.`final/wait_share`",
)
# Sections that MLflow makes of the other metrics: folded, below these.
REST = ("test", "comm", "wait", "final", "time")


def tag(
    num_workers: int = MAX_WORKERS,
    axes: Sequence[str] = (),
    *,
    settings: bool = False,
    metric: str | None = None,
    lower: bool = False,
) -> str:
    """Return the value of the experiment tag `TAG`: the view of runs, or of a sweep.

    Args: axes are the keys that vary in a sweep; settings=True shows the medians over seeds; metric
    is that of the task; lower is True if less of it is better.
    """
    curve, final = ("acc", "accuracy") if metric in (None, "accuracy") else (metric, "metric")
    swept = [f"params.`{key}`" for key in axes]
    usual = [column.replace("test_accuracy", f"test_{final}") for column in COLUMNS]
    columns = (*swept, *(column for column in usual if column not in swept))
    sections = {
        "Over time": [
            _line(f"test/{curve}"),
            _line(*(f"wait/w{rank}" for rank in range(min(num_workers, MAX_WORKERS)))),
            _line("train/loss"),
            _line("perf/samples_per_s"),
            _line("perf/wait_share"),
            _line("staleness/mean"),
        ],
        "Outcome": [
            _chart("BAR", metricKey=f"final/test_{final}"),
            _chart("BAR", metricKey="final/time_to_target_s"),
            _chart("BAR", metricKey="final/wait_share"),
            _chart("BAR", metricKey="final/samples_per_s"),
        ],
        "Settings that differ": [
            _chart(
                "DIFFERENCE",
                compareGroups=["Parameters"],
                showDifferencesOnly=True,
                showChangeFromBaseline=False,
            )
        ],
    }
    state = {
        # Ordered by a metric, MLflow lists a sweep's runs next to each other; else it folds them
        # under the sweep.
        "orderByKey": f"metrics.`final/test_{final}`" if swept else "attributes.start_time",
        "orderByAsc": bool(swept) and lower,
        "searchFilter": "tags.`ashl.kind` = 'setting'" if settings else "",
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {
            column: 165 if column.startswith("metrics") else 130 for column in columns
        },
        "runsHiddenMode": f"FIRST_{MAX_RUNS}_RUNS",
        "isAccordionReordered": True,  # else MLflow sorts the sections by name
        "compareRunSections": [
            {
                "uuid": name,
                "name": name,
                "display": name not in REST,
                "columns": min(2, len(charts)),
                "cardHeight": 300,
            }
            for name, charts in (sections | {name: [{}] * 2 for name in REST}).items()
        ],
        "compareRunCharts": [
            chart | {"uuid": f"{name} {index}", "metricSectionId": name}
            for name, charts in sections.items()
            for index, chart in enumerate(charts)
        ],
    }
    packed = base64.b64encode(
        zlib.compress(json.dumps(state, separators=(",", ":")).encode(), 9)
    ).decode()
    return json.dumps(
        {"name": NAME, "createdAt": DATE_MS, "updatedAt": DATE_MS, "state": f"deflate;{packed}"}
    )


def _line(*metrics: str) -> dict:
    """Return a chart over the metric `time/s`.

    The experiment's own clock, unlike MLflow's, is also right in virtual time.
    """
    return _chart(
        "LINE",
        metricKey=metrics[0],
        selectedMetricKeys=metrics,
        xAxisKey="metric",
        selectedXAxisMetricKey="time/s",
        useGlobalXaxisKey=False,
        yAxisKey="metric",
        yAxisExpressions=[],
        xAxisScaleType="linear",
        scaleType="linear",
        range={},
        lineSmoothness=0,
        displayPoints=False,
    )


def _chart(kind: str, **settings: object) -> dict:
    return {
        "type": kind,
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": MAX_RUNS,
    } | settings
