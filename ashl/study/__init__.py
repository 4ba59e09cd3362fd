"""Run many runs as a study: grids, races, searches, calibrations and replays, all resumable."""
