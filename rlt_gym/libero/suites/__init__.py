"""LIBERO's suites, tasks and folders, read without importing LIBERO. Python 3.8."""
