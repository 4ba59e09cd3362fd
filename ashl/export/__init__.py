"""Runs as scripts for other tools: what each can say, and what it cannot."""
