"""One run, from its start to its records, on either kernel."""
