"""Recommend a combination of methods: plan candidates, race them, report the answer."""
