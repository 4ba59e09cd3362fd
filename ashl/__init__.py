"""ashl: measure, plan and train on unequal machines. Importing this package loads nothing heavy."""

__version__ = "0.1.0"
