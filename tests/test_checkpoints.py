"""Checkpoints of real runs: when they are made, which one counts, and what the records keep."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ashl.errors import AshlError, UsageError
from ashl.launch.membership import JobMembership
from ashl.planning.predict import WITHOUT
from ashl.run import checkpoints, uploads
from ashl.run.authenticated_store import AuthenticatedStore, new_secret
from ashl.run.checkpoints import LOCKSTEP, SERVER, CheckpointManager
from ashl.run.evaluation import Evaluation
from ashl.run.metrics import CompressionStats
from ashl.run.monitor import MonitorState
from ashl.run.train import find_restarted_run
from ashl.runtime.rank_checkpoint import folder_of, list_checkpoints, part_of, write
from ashl.runtime.records import CheckpointPartSaved, Counts, Heartbeat
from ashl.tracking import jsonl

SECOND = 1_000_000_000


class Home:
    """The part of the monitor that a checkpoint uses."""

    @property
    def recorder(self) -> "Home":
        return self

    stopping = None

    def state(self) -> dict:
        return {"books": [1, 2]}

    def sizes(self) -> dict[str, int]:
        return {"events.jsonl": 7}

    def shown_ns(self, merges: int) -> int | None:
        return 0


def beat(version: int, time_s: float) -> Heartbeat:
    counts = Counts(0, 0, version, [], [], [], [], [], 0, None, None, 0.0, None)
    return Heartbeat(2, round(time_s * SECOND), 0, 0, 0.0, {}, 0, 0, {}, counts)


def made(
    checkpoint_manager: CheckpointManager, number: int, versions: tuple[int, ...], **other: object
) -> None:
    """All ranks keep their parts of a checkpoint, at these versions."""
    for rank, version in enumerate(versions):
        digest = write(
            part_of(folder_of(checkpoint_manager.run_dir, number), rank), {"version": version}
        )
        checkpoint_manager.add_part(
            CheckpointPartSaved(rank, number, 0, version, 3 * SECOND + rank, digest, **other),
            Home(),
        )


def test_a_version_is_named_that_nobody_has_come_to(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path, 3, 2.0, "run")
    assert [checkpoint_manager.propose(beat(10 * k, k)) for k in range(2)] == [None, None]
    assert checkpoint_manager.propose(beat(20, 2.0)) == (0, 31)  # a second ahead
    assert checkpoint_manager.propose(beat(40, 4.0)) is None  # one at a time
    made(checkpoint_manager, 0, (31, 31, 31))
    assert checkpoint_manager.propose(beat(50, 3.9)) is None
    assert checkpoint_manager.propose(beat(80, 4.1)) is not None
    assert CheckpointManager(tmp_path, 3).propose(beat(1, 100.0)) is None


@pytest.mark.parametrize("flipped", [False, True])
def test_where_no_folder_is_shared_home_keeps_the_parts_and_gives_them_out(
    tmp_path: Path, flipped: bool
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store, document = (
        AuthenticatedStore(server, new_secret()),
        {"state": torch.arange(1_500_000.0), "stage": 0},
    )  # in two pieces
    checkpoint_manager, home = CheckpointManager(tmp_path, 1, 1.0, "run"), Home()
    checkpoint_manager.wanted = (4, 31)
    sha256, nbytes = uploads.upload_checkpoint_part(store, 0, 4, document)
    record = CheckpointPartSaved(0, 4, 0, 31, 3 * SECOND, sha256, nbytes)
    content = uploads.receive_checkpoint_part(store, record)
    assert content is not None
    content[-1] += flipped
    checkpoint_manager.add_part(record, home, content)
    if flipped:
        assert not list_checkpoints(tmp_path)
        assert (
            "rank 0 could not write its part (the received bytes differ from the sent ones)"
            in checkpoint_manager.warning
        )
        return
    saved = checkpoints.newest(tmp_path, "run")
    for rank, what in ((0, saved), (1, None)):
        uploads.send_restore_point(store, rank, what)
    since_ns, file = uploads.await_restore_point(store, 0, over=lambda: False)
    assert since_ns == 3 * SECOND
    assert torch.equal(torch.load(file, weights_only=True)["state"], document["state"])
    assert uploads.await_restore_point(store, 1, over=lambda: False) == (0, None)
    assert uploads.await_restore_point(store, 2, over=lambda: True) is None, (
        "the run is over before it has begun"
    )


def test_one_that_a_rank_was_past_is_none_and_the_next_is_further_ahead(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path, 2, 1.0, "run")
    checkpoint_manager.propose(beat(0, 0.5))
    assert checkpoint_manager.propose(beat(10, 1.0)) == (0, 31)
    made(checkpoint_manager, 0, (31, 32))
    assert not folder_of(tmp_path, 0).exists()
    assert checkpoint_manager.propose(beat(40, 2.0)) == (1, 101)  # two seconds ahead
    made(checkpoint_manager, 1, (101, 101), error="no space left on device")
    assert "rank 1 could not write its part (no space left on device)" in checkpoint_manager.warning
    assert not list_checkpoints(tmp_path)


def test_at_their_own_pace_none_may_be_older_than_the_server(tmp_path: Path) -> None:
    checkpoint_manager = CheckpointManager(tmp_path, 3, 1.0, "run", SERVER, lead_rank=2)
    for number, versions in enumerate([(33, 31, 31), (31, 30, 31)]):
        checkpoint_manager.wanted, checkpoint_manager.saved = (number, 30), {}
        made(checkpoint_manager, number, versions)
    assert list_checkpoints(tmp_path) == [0]
    found = checkpoints.newest(tmp_path, "run")
    assert (found.how, found.time_ns, found.home_ns) == (SERVER, 3 * SECOND + 2, 3 * SECOND + 2)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run folder with checkpoints 1 and 2; 0 is gone."""
    checkpoint_manager = CheckpointManager(tmp_path, 2, 1.0, "run")
    for number in range(3):
        checkpoint_manager.wanted, checkpoint_manager.saved = (number, 31), {}
        made(checkpoint_manager, number, (31, 31))
    assert list_checkpoints(tmp_path) == [1, 2]
    return tmp_path


def test_the_newest_whole_one_counts(kept: Path) -> None:
    found = checkpoints.newest(kept, "run")
    assert (found.number, found.how, found.ranks_ns, found.broken) == (
        2,
        LOCKSTEP,
        [3 * SECOND, 3 * SECOND + 1],
        None,
    )
    with pytest.raises(
        UsageError,
        match=r"another run; only stop\.\*, runtime and the number of workers may change",
    ):
        checkpoints.newest(kept, "other")
    part = part_of(folder_of(kept, 2), 1)
    part.write_bytes(part.read_bytes()[:-1] + b"?")  # flipped
    found = checkpoints.newest(kept, "run")
    assert found.number == 1
    assert (
        found.broken
        == f"{kept}/checkpoint/2 cannot be resumed from (rank1.pt is not what was written)"
    )
    part.write_bytes(part.read_bytes()[:-100])  # cut off
    assert checkpoints.newest(kept, "run").number == 1
    (folder_of(kept, 1) / "manifest.json").write_text("{")
    with pytest.raises(UsageError, match="run this setting again"):
        checkpoints.newest(kept, "run")


def test_files_are_looked_for_in_their_own_folder_only(kept: Path) -> None:
    manifest = folder_of(kept, 2) / "manifest.json"
    text = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(text | {"files": {"../1/rank0.pt": text["files"]["rank0.pt"]}}))
    assert checkpoints.newest(kept, "run").number == 1


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"holds no checkpoint; a run takes checkpoints with run\.checkpoint_s=SECONDS",
    ):
        checkpoints.newest(tmp_path, "run")


def test_records_of_later_moments_are_taken_back(kept: Path) -> None:
    rounds = [{"kind": "round", "rank": r, "end_s": t} for t in (2.0, 3.0, 3.5) for r in (0, 1)]
    lines = [json.dumps(line) + "\n" for line in [*rounds, {"kind": "stage", "rank": 1}]]
    (kept / "events.jsonl").write_text("".join(lines))
    (kept / "metrics.jsonl").write_text('{"time_s": 3.0}\n{"time_s": 3.1}\n{"time_s": 9.0}\n')
    sizes = {"events.jsonl": len("".join(lines)), "metrics.jsonl": 32}
    saved = checkpoints.newest(kept, "run")._replace(sizes=sizes, home_ns=3 * SECOND + 1)
    left = checkpoints.truncate_records(kept, saved)
    assert (kept / "events.jsonl").read_text() == "".join([*lines[:4], lines[-1]])
    assert left == {"events.jsonl": len("".join([*lines[:4], lines[-1]])), "metrics.jsonl": 16}
    with open(kept / "metrics.jsonl", "a") as file:
        file.write('{"time_s":')  # the run goes on, and is killed before its next checkpoint
    again = checkpoints.newest(kept, "run")
    assert again.sizes == left
    assert checkpoints.truncate_records(kept, again) == left


def test_a_round_that_the_server_had_merged_stays_though_its_answer_came_later(kept: Path) -> None:
    rounds = [
        {"kind": "round", "rank": r, "round": k, "end_s": 2.0 + k} for k in range(3) for r in (0, 1)
    ]
    lines = [json.dumps(line) + "\n" for line in rounds]
    (kept / "events.jsonl").write_text("".join(lines))
    sizes = {"events.jsonl": len("".join(lines))}
    checkpoints.truncate_records(
        kept, checkpoints.newest(kept, "run")._replace(sizes=sizes, how=SERVER, rounds=[1, 2])
    )
    assert (kept / "events.jsonl").read_text() == "".join([*lines[:2], lines[3]])


def test_records_are_taken_back_whole_however_often_that_is_interrupted(
    kept: Path, monkeypatch
) -> None:
    text = "".join(json.dumps({"time_s": t}) + "\n" for t in (2.0, 3.5, 3.0, 9.0))
    (kept / "metrics.jsonl").write_text(text)
    saved = checkpoints.newest(kept, "run")._replace(
        sizes={"metrics.jsonl": len(text)}, home_ns=3 * SECOND + 1
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
    saved = checkpoints.newest(kept, "run")._replace(
        sizes={"metrics.jsonl": len(text)}, home_ns=3 * SECOND + 1
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
                evaluations=found,
                scores={"rises": 2.0},
                best=torch.ones(1),
            )
            return {"books": run_state}

    checkpoint_manager = CheckpointManager(tmp_path, 1, 1.0, "run")
    checkpoint_manager.wanted = (0, 31)
    digest = write(part_of(folder_of(tmp_path, 0), 0), {})
    checkpoint_manager.add_part(CheckpointPartSaved(0, 0, 0, 31, 3 * SECOND, digest), Judging())
    run_state = checkpoints.monitor_of(
        checkpoints.newest(tmp_path, "run"), replace(WITHOUT, target_loss=1.0)
    )["books"]
    assert [one.train_loss for one in run_state.evaluations] == [2.0, 1.0, 1.5]
    assert run_state.scores["train_loss"] == 1.5
    assert run_state.scores["rises"] == 1.0
    assert run_state.target.reached_s == 2
    assert torch.equal(run_state.best, torch.ones(1)), "the best is among them"


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


def test_a_run_that_is_to_stop_leaves_no_checkpoint(tmp_path: Path) -> None:
    """It would stop again as soon as it went on."""
    home, checkpoint_manager = Home(), CheckpointManager(tmp_path, 1, 1.0, "run")
    home.stopping = "interrupted"
    checkpoint_manager.wanted = (0, 31)
    checkpoint_manager.add_part(
        CheckpointPartSaved(0, 0, 0, 31, 3 * SECOND, write(part_of(folder_of(tmp_path, 0), 0), {})),
        home,
    )
    assert not folder_of(tmp_path, 0).exists()
