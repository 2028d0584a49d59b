"""The process that imports LIBERO: simulator, compiled controller, backend of the generic worker. Python 3.8."""
