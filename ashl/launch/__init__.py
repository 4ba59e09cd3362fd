"""Start a job on several machines, and find out in which job a process is: one file per engine."""
