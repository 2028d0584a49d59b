"""Demonstrations: files in LIBERO's HDF5 layout and LeRobot datasets, and sets of them in memory."""
