"""What finished runs say together: who is first, by how much and how sure; in the terminal, as one
page, as tables.

Reads run folders and nothing else, so that it works with MLflow off or away.
"""
