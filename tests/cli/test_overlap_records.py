"""Records of a run with overlap: the hidden share, and the buckets of its steps on separate lines."""

import gzip
import json
from pathlib import Path

import pytest

from ashl.cli.app import main

LINKS = (
    "cluster.exchange_s=null cluster.bandwidth_mbit_s=20 cluster.latency_s=0.002 cluster.step_s=0.3"
)
RUN = (
    "runtime=sim cluster.compute=[1,2] topology=all_reduce sync=bsp stop.steps=8"
    f" eval.every_commits=2 {LINKS}"
)


def trained(overlap: str) -> Path:
    assert (
        main(
            [
                "train",
                "-q",
                *RUN.split(),
                "tracking=none",
                f"run.dir={overlap}",
                f"overlap={overlap}",
            ]
        )
        == 0
    )
    return Path(overlap)


def test_what_is_hidden_and_what_overlapped(workplace, capsys) -> None:
    folders = [trained("none"), trained("wfbp")]
    serial, each = (json.loads((folder / "summary.json").read_text()) for folder in folders)
    assert serial["comm_hidden_share"] is None
    assert 0 < each["comm_hidden_share"] < 1
    rows = [json.loads(row) for row in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["perf/comm_hidden_share"] == each["comm_hidden_share"]
    assert all(0 < row["perf/comm_hidden_share"] < 1 for row in rows)
    assert "of the collectives' time behind other work" in capsys.readouterr().out
    assert main(["compare", *map(str, folders)]) == 0
    assert "hidden" in capsys.readouterr().out
    page = Path("report.html").read_text()
    assert f"{100 * each['comm_hidden_share']:.1f} %" in page
    assert ">parts<" in page
    assert ">messages<" in page
    assert main(["export", "wfbp"]) == 0
    assert "comm_hidden_share" in capsys.readouterr().out.splitlines()[0]


def test_parts_and_messages_have_tracks_of_their_own(workplace) -> None:
    """Two layer groups a step: each part is there before its message goes, and the last one ends
    the computing.
    """
    trained("wfbp")
    entries = json.loads(gzip.decompress(Path("wfbp/trace.json.gz").read_bytes()))["traceEvents"]
    names = {
        entry["args"]["name"]: entry["tid"] for entry in entries if entry["name"] == "thread_name"
    }
    assert list(names) == [
        f"worker {rank}{what}" for rank in (0, 1) for what in ("", " parts", " messages")
    ]
    moving = 0
    for rank in (0, 1):
        (computed, *_), parts, sums = (
            [
                (entry["ts"], entry["ts"] + entry["dur"])
                for entry in entries
                if entry["tid"] == tid and kind(entry)
            ]
            for tid in (names[f"worker {rank}{what}"] for what in ("", " parts", " messages"))
        )
        assert len(parts) == len(sums) == 8
        assert (parts[0][0], parts[1]) == (computed[0], (parts[0][1], computed[1]))
        assert all(begin >= ready for (_, ready), (begin, _) in zip(parts, sums, strict=True))
        moving += 1e-6 * sum(end - begin for begin, end in sums)
    summary = json.loads(Path("wfbp/summary.json").read_text())
    exposed = sum(worker["push_s"] + worker["pull_s"] for worker in summary["workers"])
    assert summary["comm_hidden_share"] == pytest.approx(1 - exposed / moving, rel=1e-3)
    trained("none")
    assert b" parts" not in gzip.decompress(Path("none/trace.json.gz").read_bytes())


def kind(entry: dict) -> bool:
    return entry["ph"] == "X" and entry["name"].split()[0] in ("compute", "part", "message")
