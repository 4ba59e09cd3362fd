"""Save a view of MLflow's page: charts and columns that MLflow 3 does not show by default.

A view is an experiment tag whose value is the state of the page. The format is internal to MLflow
(this is that of 3.17), so a failure to set the tag is ignored.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ashl.tracking.tracker import MAX_WORKERS

KEY = "ashloverview"
TAG = f"mlflow.sharedViewState.{KEY}"
DATE_MS = 1_795_132_800_000  # date of this version of the view, which MLflow shows
# Opens the page about model training, because MLflow also has one about language models.
TRAINING = "workflowType=machine_learning"
MAX_RUNS = 20  # runs that are drawn at first
PARAMS = ("schedule", "sync", "topology", "compression", "seed")
FINALS = ("time_to_target_s", "time_s", "samples_per_s", "wait_share")
# Sections that MLflow makes of the other metrics: folded, below ours.
REST = ("test", "comm", "wait", "final", "time")
LINE = {  # over `time/s`: the run's own clock is also right in virtual time
    "type": "LINE",
    "xAxisKey": "metric",
    "selectedXAxisMetricKey": "time/s",
    "useGlobalXaxisKey": False,
    "yAxisKey": "metric",
    "yAxisExpressions": [],
    "xAxisScaleType": "linear",
    "scaleType": "linear",
    "range": {},
    "lineSmoothness": 0,
    "displayPoints": False,
}
DIFFERENCE = {
    "type": "DIFFERENCE",
    "compareGroups": ["Parameters"],
    "showDifferencesOnly": True,
    "showChangeFromBaseline": False,
}


def link(address: str, experiment: str) -> str:
    """Return the deep link to the saved view; MLflow opens on language models otherwise."""
    query = f"{TRAINING}&compareRunsMode=CHART&viewStateShareKey={KEY}"
    return f"{address.rstrip('/')}/#/experiments/{experiment}/runs?{query}"


def tag(summary: Mapping[str, Any]) -> str:
    """Return the value of the experiment tag `TAG`.

    Args: summary is that of a run, or the outcome of a sweep with `axes`, the keys that vary. Runs
    of a sweep that differ in the seed only are grouped.
    """
    state = zlib.compress(json.dumps(state_of(summary), separators=(",", ":")).encode(), 9)
    packed = f"deflate;{base64.b64encode(state).decode()}"
    dates = {"createdAt": DATE_MS, "updatedAt": DATE_MS}
    return json.dumps({"name": "ashl: overview", **dates, "state": packed})


def state_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the page: the runs' order, groups, columns and charts."""
    axes: Sequence[str] = summary.get("axes", ())
    metric = summary.get("metric")
    usual = metric in (None, "accuracy")
    score = "final/test_accuracy" if usual else "final/test_metric"
    workers = range(min(summary.get("num_workers", MAX_WORKERS), MAX_WORKERS))
    curves = [
        ["test/acc" if usual else f"test/{metric}"],
        [f"wait/w{rank}" for rank in workers],
        *(["train/loss"], ["perf/samples_per_s"], ["perf/wait_share"], ["staleness/mean"]),
    ]
    bars = [score, "final/time_to_target_s", "final/wait_share", "final/samples_per_s"]
    sections = {
        "Over time": [
            LINE | {"metricKey": names[0], "selectedMetricKeys": names} for names in curves
        ],
        "Outcome": [{"type": "BAR", "metricKey": name} for name in bars],
        "Settings that differ": [DIFFERENCE],
    }
    columns = [f"params.`{name}`" for name in dict.fromkeys((*axes, *PARAMS))]
    columns += [f"metrics.`{name}`" for name in (score, *(f"final/{name}" for name in FINALS))]
    grouped = [axis for axis in axes if axis != "seed"] if "seed" in axes else []
    return {
        # Ordered by a metric, MLflow lists a sweep's runs next to each other; else it folds them
        # under the sweep.
        "orderByKey": f"metrics.`{score}`" if axes else "attributes.start_time",
        "orderByAsc": bool(axes) and summary.get("higher_is_better") is False,
        "searchFilter": "tags.`ashl.kind` = 'run'" if axes else "",
        "groupBy": {
            "aggregateFunction": "average",
            "groupByKeys": [{"mode": "param", "groupByData": axis} for axis in grouped],
        }
        if grouped
        else None,
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {name: 165 if name.startswith("metrics") else 130 for name in columns},
        "runsHiddenMode": f"FIRST_{MAX_RUNS}_RUNS",
        "isAccordionReordered": True,  # else MLflow sorts the sections by name
        "compareRunSections": [
            {"uuid": name, "name": name, "display": name in sections, "columns": 2}
            | {"cardHeight": 300}
            for name in (*sections, *REST)
        ],
        "compareRunCharts": [
            chart
            | {"uuid": f"{name} {index}", "metricSectionId": name, "deleted": False}
            | {"isGenerated": False, "runsCountToCompare": MAX_RUNS}
            for name, charts in sections.items()
            for index, chart in enumerate(charts)
        ],
    }
