"""How models meet: the mechanism of an exchange, with the loop of each role. Who may go on is the
sync mode's rule.
"""
