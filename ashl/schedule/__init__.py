"""Which stages a run goes through: (configuration, profile) → stages."""
