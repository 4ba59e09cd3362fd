"""Wrappers of any codec on a link: error feedback, momentum, clipping, schedules, layers."""
