"""Evaluations of policies on fixed initial states: intervals, paired comparisons, shards."""
