"""Compare finished runs: read run folders, rank settings, and show the result.

Data flow: `records` reads run folders into a `Study`; `settings` groups its runs; `leaderboard`
ranks the settings by a `measure` with `statistics`; `answer` puts the result into sentences, and
`sensitivity` finds the winner on each cluster; `tables` prints it, `figures` and `page` write
`report.html`, `export` makes tables of records. It reads run folders only, so that it works without
MLflow.
"""
