"""Runs in virtual time are compared with rules, formulae and other runs."""

import pytest


@pytest.fixture(autouse=True)
def _forecasts(short_forecasts: None) -> None:
    """Shorten the forecasts, which most tests here ignore."""
