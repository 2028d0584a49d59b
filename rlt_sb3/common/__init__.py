"""Parts that do not depend on the algorithm: the environment bridge, chunks and their outcome, statistics."""
