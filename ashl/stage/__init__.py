"""One stage, running: its rules bound together, what is counted, when it is over, and a rank's way
through all.
"""
