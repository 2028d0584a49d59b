"""Entry of the processes that an environment starts: ``python .../rlt_gym/workers/launch.py MODULE JSON``.

Run by its path, possibly under an interpreter that has LIBERO, numpy and nothing else of ours: so neither this
package's folder nor its neighbors in site-packages come onto ``sys.path``, and ``rlt_gym/__init__.py``, which needs
Gymnasium, is not executed. Everything these processes import is kept at the syntax of Python 3.8.
"""

from __future__ import annotations

import importlib
import os
import sys
import types


def main() -> None:
    """Call ``main`` of the module that the first argument names with the second one."""
    folder = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == folder:  # added by Python, and it hides modules
        del sys.path[0]
    package = types.ModuleType("rlt_gym")
    package.__path__ = [os.path.dirname(folder)]
    sys.modules["rlt_gym"] = package
    importlib.import_module(sys.argv[1]).main(sys.argv[2])


if __name__ == "__main__":
    main()
