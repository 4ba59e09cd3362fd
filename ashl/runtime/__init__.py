"""Where algorithms run: a small vocabulary of effects and two kernels, exact virtual time and real
processes.
"""
