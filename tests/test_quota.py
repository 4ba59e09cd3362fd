"""How often a quota has held a process back, as the system says it."""

from pathlib import Path

from ashl.runtime.quota import throttled


def said(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.stat").write_text(text)


def test_a_quota_of_this_group_and_of_those_around_it(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    assert throttled(own, tmp_path) is None
    own.write_text("7:memory:/job\n2:cpu,cpuacct:/job/part\n1:name=systemd:/job\n0::/slice/job\n")
    assert throttled(own, tmp_path) is None
    said(tmp_path / "cpu,cpuacct" / "job", "nr_periods 9\nnr_throttled 3\n")
    assert throttled(own, tmp_path) == 3
    said(tmp_path / "slice" / "job", "usage_usec 100\nnr_throttled 4\n")
    said(tmp_path / "slice", "usage_usec 100\n")  # no quota can be set here
    said(tmp_path / "other", "nr_throttled 100\n")
    assert throttled(own, tmp_path) == 7


def test_what_this_system_says() -> None:
    held = throttled()
    assert held is None or held >= 0
