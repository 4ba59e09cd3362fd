"""Timed local work and batches that change, on real processes."""

from tests.conformance.test_kernels import adds_up, real

QUICK = ("cluster=one_slow", "cluster.exchange_s=0.004", "stop.seconds=3", "model.hidden=[16]")


def test_adsp_workers_of_all_speeds_commit_equally_often(tmp_path):
    timing = ("sync.gamma_s=1", "sync.commits=2", "sync.search_s=1e6")
    summary = real(tmp_path / "run", *QUICK, "sync=adsp", "aggregate=uniform", *timing)
    commits = [worker["commits"] for worker in summary["workers"]]
    steps = [worker["steps"] for worker in summary["workers"]]
    assert adds_up(summary)
    assert (
        max(commits) - min(commits) <= 2
    )  # one at check points, and one in flight when the run ended
    assert min(steps[:3]) > 3 * steps[3]
    assert summary["wait_share"] < 0.1
