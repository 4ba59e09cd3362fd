"""Measurements of profiling: orders of the server, and the timings that its workers take."""
