"""Success as a network sees it: a reward without the simulator's predicate."""
