"""Check the benchmark of two checkouts, which finds names of codecs that change between them."""

import pytest

from tests.benchmarks.checkouts import HOME, Checkout, compare_codec


@pytest.mark.slow
def test_a_checkout_beside_itself() -> None:
    """One codec each without state, with `reduce`, and with a receiver's state."""
    before, now = Checkout(HOME, 4096), Checkout(HOME, 4096)
    for name in ("topk", "fetch_sgd", "diana"):
        cells = compare_codec(name, before, now, turns=2)
        assert cells is not None
        assert len(cells) == 7
    before.close()
    now.close()
