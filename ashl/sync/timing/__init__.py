"""How profiling times what: orders between the server and its workers, and what each of them
measures.
"""
