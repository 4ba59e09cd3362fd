"""From a configuration's text to objects: overrides, `_target_`, and the name by which a configuration is known."""
