"""What a chunked vector environment is made of: base class, episodes, robot, hooks, wrappers; no torch."""
