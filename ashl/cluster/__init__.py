"""Declared clusters: speed of each worker and link, and changes of it over time."""
