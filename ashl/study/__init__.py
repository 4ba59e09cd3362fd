"""Studies: from a grid of settings to finished runs, resumable, with the settings that fall behind
dropped early.
"""
