"""Import this first: ``libero.py`` in this folder bears the name of the package that it measures."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Searched last, so that installed packages come first. Processes that are spawned inherit the order.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE] + [str(HERE)]
