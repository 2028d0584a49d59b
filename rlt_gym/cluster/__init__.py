"""Environments on more than one machine, by Ray."""
