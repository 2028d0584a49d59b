"""Policies played on fixed initial states, and what is made of the outcomes: intervals, pairs, shards."""
