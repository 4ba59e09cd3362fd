"""Finish times of concurrent flows agree with SimGrid, where Debian's `python3-simgrid` is there."""

from statistics import fmean

import pytest

from tests.benchmarks.flows import Pattern, by_model, by_simgrid, missing, patterns

REASON = missing()


@pytest.mark.skipif(REASON is not None, reason=f"SimGrid is not installed: {REASON}")
@pytest.mark.parametrize("pattern", [*patterns((10,), (4,))], ids=lambda pattern: pattern.name)
def test_flows_end_as_in_simgrid(pattern: Pattern) -> None:
    """A NIC serves one message after the other, so the last of them ends as with shared links, and
    earlier ones end sooner.
    """
    ours, theirs = by_model(pattern), by_simgrid(pattern)
    assert max(ours) == pytest.approx(max(theirs), rel=0.01)
    assert fmean(ours) <= 1.001 * fmean(theirs)
