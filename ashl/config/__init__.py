"""From KEY=VALUE to objects: what can be chosen, composition, `_target_`, a
configuration's name.
"""
