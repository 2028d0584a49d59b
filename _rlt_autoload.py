"""Makes ``gymnasium.make("RLToken-LIBERO-v0")`` work with no import of ours.

Gymnasium 1.0 dropped its ``gymnasium.envs`` entry points, so nothing tells it of installed environments. The file
``rlt-gymnasium.pth``, which is installed beside this module, makes Python import it at start-up. This module only puts
a finder in front of Python's own: when Gymnasium is imported, if ever, the finder lets it load and then imports
``rlt_gym``, which registers the ids. Programs that never import Gymnasium pay for one small module.

``RLT_NO_AUTOLOAD=1`` in the environment turns it off; ``import rlt_gym`` and ``gymnasium.make("rlt_gym:ID")`` work
either way.

Why the loader is changed: code must run after Gymnasium has loaded, and Python has no hook for that. Importing
``rlt_gym`` inside the finder would load Gymnasium twice, and importing it at start-up would slow down every program.
Python 3.18 will ignore import lines in .pth files (PEP 829); from 3.15 on a .start file can name :func:`install`.
"""

import os
import sys


class GymnasiumFinder:
    """Finder that lets the others find Gymnasium and adds a step to its loading."""

    def find_spec(self, name, path=None, target=None):
        """As the import system calls it; answers for ``gymnasium`` alone."""
        if name != "gymnasium":
            return None
        # Some finders of other packages may be too old to have find_spec.
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module):
                load(module)
                # Not when the spec is found: who only asks whether there is a Gymnasium does not load it.
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                register()

            spec.loader.exec_module = load_and_register
        return spec


def register():
    """Import ``rlt_gym``. Whatever is wrong with it, Gymnasium stays usable."""
    try:
        import rlt_gym  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "rlt_gym":  # of an editable install whose checkout is gone, nothing else may be left
            warn(error)
    except Exception as error:
        warn(error)


def warn(error):
    """Say why the ids are unknown.

    :param error: what the import raised
    """
    import warnings

    warnings.warn(
        f"rlt_gym cannot be imported ({type(error).__name__}: {error}), so its environments are not registered. "
        "RLT_NO_AUTOLOAD=1 leaves it out.",
        stacklevel=2,
    )


def install():
    """Put the finder in front, unless Gymnasium is loaded already or the user does not want it."""
    if "gymnasium" not in sys.modules and os.environ.get("RLT_NO_AUTOLOAD", "0") in ("", "0"):
        sys.meta_path.insert(0, GymnasiumFinder())


install()
