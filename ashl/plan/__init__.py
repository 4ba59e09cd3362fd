"""Plans and profiles: the checked data between a configuration and a run."""
