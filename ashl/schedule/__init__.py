"""Schedules: each makes the stages of a run from the configuration and the profile."""
