"""Asynchronous collection: processes in which copies of the learner's model play, and the learner's side of them."""
