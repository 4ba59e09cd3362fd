"""Checkpoints of real runs: when they are made, which one counts, and what the records keep."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from ashl.errors import AshlError, UsageError
from ashl.launch.environment import JobMembership
from ashl.planning.predict import NO_LIMITS
from ashl.run import checkpoints
from ashl.run.checkpoints import PROCESSES, CheckpointManager
from ashl.run.evaluation import Evaluation
from ashl.run.metrics import CompressionStats
from ashl.run.monitor import MonitorState, Outage
from ashl.run.train import find_restarted_run
from ashl.runtime.effects import Epoch, Save
from ashl.runtime.plain_state import decode, encode
from ashl.runtime.rank_checkpoint import (
    PAUSES,
    RankCheckpointWriter,
    folder_of,
    list_checkpoints,
    part_of,
    write,
)
from ashl.runtime.records import CheckpointPartSaved
from ashl.tracking import jsonl
from tests.disturbed import wait_for

SECOND = 1_000_000_000


class Home:
    """The part of the monitor that a checkpoint uses."""

    def __init__(self, stop_reason: str | None = None, budget_s: float | None = None) -> None:
        self.stop_reason = stop_reason
        self.plan = SimpleNamespace(limits=SimpleNamespace(seconds=budget_s))
        self.heartbeats: dict[int, SimpleNamespace] = {}
        self.run_state = MonitorState(CompressionStats(4), None)

    @property
    def recorder(self) -> "Home":
        return self

    def state(self) -> dict:
        return {"run_state": self.run_state}

    def sizes(self) -> dict[str, int]:
        return {"events.jsonl": 7}


def made(checkpoint_manager: CheckpointManager, number: int, home: Home, **other: object) -> None:
    """All ranks save their parts of a checkpoint."""
    for rank in range(checkpoint_manager.num_ranks):
        save(checkpoint_manager, number, rank, **other)
    checkpoint_manager.complete_checkpoints((), home)


def save(checkpoint_manager: CheckpointManager, number: int, rank: int, **other: object) -> None:
    """A rank saves its part of a checkpoint."""
    content = encode({"rank": rank})
    digest = write(part_of(folder_of(checkpoint_manager.run_dir, number), rank), content)
    part = CheckpointPartSaved(rank, number, 3 * SECOND + rank, digest, **other)
    checkpoint_manager.add_part(part)


def test_the_controller_writes_parts_that_ranks_send(
    tmp_path: Path,
) -> None:
    document = encode({"state": torch.arange(1_500_000.0)})
    checkpoint_manager = CheckpointManager(tmp_path, 1, 1.0, "run")
    checkpoint_manager.add_part(CheckpointPartSaved(0, 4, 3 * SECOND), document)
    checkpoint_manager.complete_checkpoints((), Home())
    saved = checkpoints.find_newest(tmp_path, "run")
    point = checkpoints.restore_point_of(saved, 0, None)
    assert point == (3 * SECOND, 5, (), document)
    assert torch.equal(decode(point.content)["state"], torch.arange(1_500_000.0))
    assert checkpoints.restore_point_of(None, 0, None) == (0, 0, (), b"")


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run folder with checkpoints 1 and 2; 0 is gone."""
    checkpoint_manager = CheckpointManager(tmp_path, 2, 1.0, "run")
    for number in range(3):
        made(checkpoint_manager, number, Home())
    assert list_checkpoints(tmp_path) == [1, 2]
    return tmp_path


def test_equal_sets_have_equal_bytes() -> None:
    """The order of a set depends on the order in which its elements were added."""
    first, second = set[int](), set[int]()
    first |= {0}
    first |= {8}
    second |= {8}
    second |= {0}
    assert list(first) != list(second)
    assert encode(first) == encode(second)


def test_the_newest_whole_one_counts(kept: Path) -> None:
    found = checkpoints.find_newest(kept, "run")
    assert (found.number, found.how, found.ranks_ns, found.broken) == (
        2,
        PROCESSES,
        [3 * SECOND, 3 * SECOND + 1],
        None,
    )
    with pytest.raises(
        UsageError,
        match=r"another run; only stop\.\*, runtime and the number of workers may change",
    ):
        checkpoints.find_newest(kept, "other")
    part = part_of(folder_of(kept, 2), 1)
    part.write_bytes(part.read_bytes()[:-1] + b"?")  # flipped
    found = checkpoints.find_newest(kept, "run")
    assert found.number == 1
    assert (
        found.broken
        == f"{kept}/checkpoint/2 cannot be resumed from (rank1.safetensors is not what was written)"
    )
    part.write_bytes(part.read_bytes()[:-100])  # cut off
    assert checkpoints.find_newest(kept, "run").number == 1
    (folder_of(kept, 1) / "manifest.json").write_text("{")
    with pytest.raises(UsageError, match="run this setting again"):
        checkpoints.find_newest(kept, "run")


def test_files_are_looked_for_in_their_own_folder_only(kept: Path) -> None:
    manifest = folder_of(kept, 2) / "manifest.json"
    text = json.loads(manifest.read_text())
    manifest.write_text(
        json.dumps(text | {"files": {"../1/rank0.safetensors": text["files"]["rank0.safetensors"]}})
    )
    assert checkpoints.find_newest(kept, "run").number == 1


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"holds no checkpoint; a run takes checkpoints with run\.checkpoint_s=SECONDS",
    ):
        checkpoints.find_newest(tmp_path, "run")


def test_records_of_later_moments_are_taken_back(kept: Path) -> None:
    # rank 0 is saved at 3 s; a round that ends at that moment is the first one after the pause
    ends = [2.0, 2.0, 2.9, 3.0 - 1e-8, 3.0, 3.5]
    rounds = [{"kind": "round", "rank": i % 2, "end_s": end} for i, end in enumerate(ends)]
    failure = {"kind": "worker_failed", "rank": 1, "time_s": 3.6}
    lines = [json.dumps(line) + "\n" for line in [*rounds, failure, {"kind": "stage", "rank": 1}]]
    (kept / "events.jsonl").write_text("".join(lines))
    (kept / "metrics.jsonl").write_text('{"time_s": 3.0}\n{"time_s": 3.1}\n{"time_s": 9.0}\n')
    sizes = {"events.jsonl": len("".join(lines)), "metrics.jsonl": 32}
    saved = checkpoints.find_newest(kept, "run")._replace(sizes=sizes, lead_ns=3 * SECOND + 1)
    left = checkpoints.truncate_records(kept, saved)
    assert (kept / "events.jsonl").read_text() == "".join([*lines[:4], lines[-1]])
    assert left == {"events.jsonl": len("".join([*lines[:4], lines[-1]])), "metrics.jsonl": 16}
    with open(kept / "metrics.jsonl", "a") as file:
        file.write('{"time_s":')  # the run goes on, and is killed before its next checkpoint
    again = checkpoints.find_newest(kept, "run")
    assert again.sizes == left
    assert checkpoints.truncate_records(kept, again) == left


def test_records_are_taken_back_whole_however_often_that_is_interrupted(
    kept: Path, monkeypatch
) -> None:
    text = "".join(json.dumps({"time_s": t}) + "\n" for t in (2.0, 3.5, 3.0, 9.0))
    (kept / "metrics.jsonl").write_text(text)
    saved = checkpoints.find_newest(kept, "run")._replace(
        sizes={"metrics.jsonl": len(text)}, lead_ns=3 * SECOND + 1
    )

    class KilledError(Exception):
        pass

    def killed(*args: object) -> None:
        raise KilledError

    def killed_after(*args: object) -> None:
        write_json(*args)
        raise KilledError

    write_json = checkpoints.jsonl.write_json
    for at in (killed, killed_after):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.jsonl, "write_json", at)
            with pytest.raises(KilledError):
                checkpoints.truncate_records(kept, saved)
        assert (kept / "metrics.jsonl").read_text() == text
    assert checkpoints.truncate_records(kept, saved) == {"metrics.jsonl": 32}
    assert (kept / "metrics.jsonl").read_text() == '{"time_s": 2.0}\n{"time_s": 3.0}\n'


def test_records_that_another_process_writes_are_left_alone(kept: Path) -> None:
    (kept / "metrics.jsonl").write_text(text := '{"time_s": 3.0}\n{"time_s": 9.0}\n')
    saved = checkpoints.find_newest(kept, "run")._replace(
        sizes={"metrics.jsonl": len(text)}, lead_ns=3 * SECOND + 1
    )
    other = jsonl.Lines(kept / "metrics.jsonl", len(text))
    with pytest.raises(AshlError, match="another process is writing"):
        checkpoints.truncate_records(kept, saved)
    other.close()
    assert (kept / "metrics.jsonl").read_text() == text


def test_rules_know_the_last_evaluation_that_is_left(tmp_path: Path) -> None:
    """Evaluations after the time of the checkpoint are dropped; a rule that waits for scores has
    those before it.
    """

    class Judging(Home):
        def state(self) -> dict:
            losses = (2.0, 1.0, 1.5, 1.8)
            found = [
                Evaluation(
                    time_s=t,
                    merges=t,
                    train_loss=loss,
                    test_loss=loss,
                    test_accuracy=1 / loss,
                    test_metric=1 / loss,
                )
                for t, loss in enumerate(losses, start=1)
            ]
            run_state = MonitorState(
                CompressionStats(4),
                None,
                outages=[Outage(0, 2 * SECOND, "failed"), Outage(0, 4 * SECOND, "after its part")],
                evaluations=found,
                scores={"rises": 2.0},
                best=torch.ones(1),
            )
            return {"run_state": run_state}

    made(CheckpointManager(tmp_path, 1, 1.0, "run"), 0, Judging())
    run_state = checkpoints.read_monitor_state(
        checkpoints.find_newest(tmp_path, "run"), replace(NO_LIMITS, target_loss=1.0)
    )["run_state"]
    assert [one.train_loss for one in run_state.evaluations] == [2.0, 1.0, 1.5]
    assert run_state.scores["train_loss"] == 1.5
    assert run_state.scores["rises"] == 1.0
    assert run_state.target.reached_s == 2
    assert torch.equal(run_state.best, torch.ones(1)), "the best is among them"
    assert [outage.cause for outage in run_state.outages] == ["failed"]


def test_a_torchrun_restart_resumes_if_there_is_a_checkpoint(kept: Path, capsys) -> None:
    first, again = (JobMembership(0, 2, "here", 1, 0, attempt=str(attempt)) for attempt in range(2))
    config, nowhere = {"run": {"dir": str(kept)}}, {"run": {"dir": None}}
    assert [find_restarted_run(config, job) for job in (None, first)] == [None, None]
    assert [find_restarted_run(run, again) for run in (config, nowhere)] == [kept, None]
    assert (
        capsys.readouterr().err
        == f"ashl: restarted: the run in {kept} resumes from its last checkpoint\n"
    )
    (kept / "summary.json").write_text('{"status": "interrupted"}')
    assert find_restarted_run(config, again) == kept
    (kept / "summary.json").write_text('{"status": "finished"}')
    assert find_restarted_run(config, again) is None
    (kept / "summary.json").write_text('{"status": "diverged"}')
    with pytest.raises(AshlError, match="has diverged, and would again"):
        find_restarted_run(config, again)


@pytest.mark.parametrize(("stop_reason", "budget_s"), [("interrupted", None), (None, 2.0)])
def test_a_run_that_is_to_stop_leaves_no_checkpoint(
    stop_reason: str | None, budget_s: float | None, tmp_path: Path
) -> None:
    """It would stop again as soon as it went on."""
    home = Home(stop_reason, budget_s)
    made(CheckpointManager(tmp_path, 1, 1.0, "run"), 0, home)
    assert not folder_of(tmp_path, 0).exists()


def test_a_checkpoint_that_is_complete_after_its_stage_has_ended_is_discarded(
    tmp_path: Path,
) -> None:
    """A resumed run would begin with the end of the stage that it continues."""
    home = Home()
    home.run_state.stages.append(SimpleNamespace(end_ns=4 * SECOND))
    made(CheckpointManager(tmp_path, 1, 1.0, "run"), 0, home)
    assert not folder_of(tmp_path, 0).exists()


def test_a_part_that_is_not_written_leaves_no_checkpoint(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path, 2, 1.0, "run")
    made(checkpoint_manager, 0, Home(), error="no space left on device")
    assert "could not write its part (no space left on device)" in checkpoint_manager.warning
    assert not list_checkpoints(tmp_path)


def test_parts_of_two_checkpoints_may_arrive_mixed(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path, 2, 1.0, "run")
    for rank, number in ((0, 0), (0, 1), (1, 0), (1, 1)):
        digest = write(part_of(folder_of(tmp_path, number), rank), bytes([rank, number]))
        part = CheckpointPartSaved(rank, number, (3 + number) * SECOND + rank, digest)
        checkpoint_manager.add_part(part)
    checkpoint_manager.complete_checkpoints((), Home())
    assert list_checkpoints(tmp_path) == [0, 1]
    found = checkpoints.find_newest(tmp_path, "run")
    assert (found.time_ns, found.lead_ns) == (4 * SECOND + 1, 4 * SECOND + 1)
    assert not checkpoint_manager.parts


def test_no_part_is_awaited_of_a_failed_worker(tmp_path: Path) -> None:
    """It has none, or one that it wrote before it failed; a resumed run begins with the next
    epoch.
    """
    checkpoint_manager = CheckpointManager(tmp_path, 3, 1.0, "run")
    for rank in (0, 2):
        save(checkpoint_manager, PAUSES + 4, rank)
    checkpoint_manager.complete_checkpoints((), Home())
    assert not list_checkpoints(tmp_path), "the part of a running worker may be on its way"
    checkpoint_manager.complete_checkpoints({1, 2}, Home())
    found = checkpoints.find_newest(tmp_path, "run")
    assert (found.number, found.absent) == (PAUSES + 4, [1])
    assert found.saved_ns(2) == 3 * SECOND + 2
    assert found.lead_ns == found.time_ns == 3 * SECOND + 2
    for rank in range(3):
        point = checkpoints.restore_point_of(found, rank, None)
        assert point[:3] == (found.time_ns, PAUSES + 5, (1,))
        assert (decode(point.content) is None) == (rank == 1)
        assert checkpoints.first_epoch(point.number, point.absent, 3).number == 2
    assert checkpoints.first_epoch(found.number, (), 3) == Epoch(1, (0, 1, 2), (0, 0, 0))


def test_a_checkpoint_completes_while_a_worker_rejoins(tmp_path: Path) -> None:
    """The worker takes part in later pauses only. Its records count up to its rejoin, which is
    repeated when the run is resumed.
    """
    checkpoint_manager, home = CheckpointManager(tmp_path, 3, 1.0, "run"), Home()
    outages = home.run_state.outages
    outages += [Outage(1, 1 * SECOND, "failed", rejoined_ns=2 * SECOND)]
    outages += [Outage(1, 3 * SECOND, "failed", rejoined_ns=3 * SECOND + 5)]
    for number in (6, 7):
        for rank in (0, 2):
            save(checkpoint_manager, number, rank)
    checkpoint_manager.complete_checkpoints((), home)
    assert not list_checkpoints(tmp_path), "the pauses of the worker are not known yet"
    home.heartbeats[1] = SimpleNamespace(first_pause=7)
    checkpoint_manager.complete_checkpoints((), home)
    assert list_checkpoints(tmp_path) == [6], "a part of pause 7 is on its way"
    found = checkpoints.find_newest(tmp_path, "run")
    assert (found.absent, found.saved_ns(1)) == ([1], 3 * SECOND + 5)
    one = {"kind": "round", "rank": 1, "end_s": 2.5}
    rejoin = {"kind": "worker_rejoined", "rank": 1, "time_s": (3 * SECOND + 5) / 1e9}
    kept = [checkpoints.is_up_to(found, "events.jsonl", record) for record in (one, rejoin)]
    assert kept == [True, False]
    restored = checkpoints.read_monitor_state(found, NO_LIMITS)["run_state"].outages
    assert [outage.rejoined_ns for outage in restored] == [2 * SECOND, None]
    save(checkpoint_manager, 7, 1)
    checkpoint_manager.complete_checkpoints((), home)
    assert (list_checkpoints(tmp_path), checkpoints.find_newest(tmp_path, "run").absent) == (
        [6, 7],
        [],
    )


def test_a_pause_that_a_failure_ended_is_discarded(tmp_path: Path) -> None:
    """Its remaining parts never come; the next epoch has greater numbers."""
    checkpoint_manager = CheckpointManager(tmp_path, 2, 1.0, "run")
    made(checkpoint_manager, 7, Home())
    save(checkpoint_manager, 8, 0)
    made(checkpoint_manager, PAUSES, Home())
    assert list_checkpoints(tmp_path) == [7, PAUSES]
    assert not folder_of(tmp_path, 8).exists()
    assert not checkpoint_manager.parts
    save(checkpoint_manager, PAUSES + 1, 1)
    assert checkpoint_manager.parts


def test_the_lowest_worker_takes_the_place_of_a_failed_lead_rank(tmp_path: Path) -> None:
    """Evaluations count up to its pause."""
    checkpoint_manager = CheckpointManager(tmp_path, 3, 1.0, "run", lead_rank=0)
    for rank in (1, 2):
        save(checkpoint_manager, 0, rank)
    checkpoint_manager.complete_checkpoints({0}, Home())
    found = checkpoints.find_newest(tmp_path, "run")
    assert (found.lead_ns, found.time_ns) == (3 * SECOND + 1, 3 * SECOND + 2)


def test_a_rank_reports_any_error_for_which_it_cannot_write_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller awaited the part, and the run took no checkpoint without a word."""

    def run_out_of_memory(document: object) -> bytes:
        raise MemoryError("cannot allocate the content of the file")

    monkeypatch.setattr("ashl.runtime.rank_checkpoint.encode_tensors", run_out_of_memory)
    reported: list[CheckpointPartSaved] = []
    writer = RankCheckpointWriter(1, tmp_path, lambda part, _: reported.append(part), 1.0)
    writer._write({}, CheckpointPartSaved(1, 4, 0))
    assert reported == [
        CheckpointPartSaved(1, 4, 0, error="cannot allocate the content of the file")
    ]


def test_a_rank_continues_if_its_disk_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stopped at the next pause forever."""
    answers = threading.Event()
    monkeypatch.setattr("ashl.runtime.rank_checkpoint.WRITE_S", 0.01)
    monkeypatch.setattr("ashl.runtime.rank_checkpoint.capture_rank", lambda *_: {})
    monkeypatch.setattr("ashl.runtime.rank_checkpoint.write", lambda *_: str(answers.wait()))
    reported: list[CheckpointPartSaved] = []
    writer = RankCheckpointWriter(1, tmp_path, lambda part, _: reported.append(part), 1.0)
    accounting = SimpleNamespace(cursor=0, attribute_until=lambda *_: None)
    ctx: Any = SimpleNamespace(now_ns=5, time_accounting=accounting)
    for number in range(2):
        writer.save(ctx, Save(0, None), None, number)
    reason = "its previous part is not written after 0.01 s; is the disk too slow?"
    assert reported == [CheckpointPartSaved(1, 1, 5, error=reason)]
    answers.set()
    wait_for(lambda: len(reported) == 2)
    writer.save(ctx, Save(0, None), None, 2)
    wait_for(lambda: len(reported) == 3)
    assert [(part.number, part.sha256) for part in reported[1:]] == [(0, "True"), (2, "True")]


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "here", "items": 5, "shape": [1]}',
        '{"kind": "here", "items": 0, "shape": [7]}',
        '{"kind": "dict"}',
        '{"kind": "unknown", "items": []}',
        '{"kind": "dataclass", "name": "ashl.nowhere:Cls", "items": {}}',
        '{"kind": "dataclass", "name": "ashl.errors:AshlError", "items": {}}',
        '{"kind": "dataclass", "name": "os:stat_result", "items": {}}',
        "3 4",
    ],
)
def test_a_state_that_does_not_fit_its_description_is_refused(text: str) -> None:
    described = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)
    content = safetensors.torch.save({"0": described, "1": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"checkpoint|Extra data"):
        decode(content)
