"""How far virtual time on a profile is from the real cluster: pairs of runs, compared."""
