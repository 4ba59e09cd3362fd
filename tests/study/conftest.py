"""Set-up of these tests: forecasts are short."""

import pytest


@pytest.fixture(autouse=True)
def _forecasts(short_forecasts: None) -> None:
    """Shorten the forecasts, which most tests here ignore."""
