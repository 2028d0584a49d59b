"""Makes ``gymnasium.make("RLToken-LIBERO-v0")`` work with no import of ours.

Gymnasium 1.0 dropped its ``gymnasium.envs`` entry points, so nothing tells it of installed environments. The file
``rlt-gymnasium.pth`` beside the installed packages makes Python import this module at start-up. It must stay cheap:
it waits for an import of Gymnasium, if one ever comes, and then imports ``rlt_gym``, which registers the ids.
"""

import sys


class _AfterGymnasium:
    """Finder that lets the usual ones find Gymnasium and adds a step to its loading, once."""

    def find_spec(self, name, path=None, target=None):
        if name != "gymnasium":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        exec_module = spec.loader.exec_module

        def exec_and_register(module):
            exec_module(module)
            import rlt_gym  # noqa: F401

        spec.loader.exec_module = exec_and_register  # type: ignore[method-assign]
        return spec


if "gymnasium" not in sys.modules:
    sys.meta_path.insert(0, _AfterGymnasium())
