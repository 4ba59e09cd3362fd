"""Configuration: KEY=VALUE settings are composed into a dict, and specs are constructed into
objects.
"""
