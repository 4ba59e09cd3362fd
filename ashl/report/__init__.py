"""Compare finished runs: read run folders, rank settings, and show the result.

Data flow: `records` reads run folders into a `Study`; `replicates` groups its runs into settings;
`leaderboard` ranks the settings by a `measure`; `phrases` puts the result into sentences;
`terminal` prints it, `page` writes `report.html`, `flat` makes tables. It reads run folders only,
so that it works without MLflow.
"""
