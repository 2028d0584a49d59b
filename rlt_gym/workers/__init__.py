"""Supervised worker processes for any simulator: start, messages, shared memory, restart, end. Python 3.8."""
