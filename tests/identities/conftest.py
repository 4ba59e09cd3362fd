"""Identities compare runs with runs, or with loops by hand."""

import pytest


@pytest.fixture(autouse=True)
def _forecasts(short_forecasts: None) -> None:
    """Skip the forecast, which no plan here needs."""
