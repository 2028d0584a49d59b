"""What tests share."""

import os
import signal

import pytest

# A shell's background job ignores SIGINT, and hands that on to its children; the tests of interrupts need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported, here and in processes that tests start: small networks are quicker on one thread, and
# rounding is always the same
os.environ["OMP_NUM_THREADS"] = "1"


#: Marks of tests that take minutes: left out unless asked for by name (``-m exact``) or with ``--all``.
LONG = ("exact", "expensive", "all_tasks")


@pytest.fixture(scope="module", autouse=True)
def one_zygote_for_a_file():
    """A zygote lives as long as an environment that uses it, here also from one test of a file to the next."""
    from rlt_gym.workers import processes  # not before the number of threads is set

    zygotes, original = set(), processes.zygote_for

    def kept(*arguments):
        zygote = original(*arguments)
        zygotes.add(zygote)
        return zygote

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "zygote_for", kept)
        yield


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help=f"also the tests marked {', '.join(LONG)}")


def pytest_collection_modifyitems(config, items):
    """Leave out what takes minutes, and skip what needs the official assets or a GPU where there are none."""
    wanted = [mark for mark in LONG if config.option.all or mark in config.option.markexpr]
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in LONG if mark not in wanted)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    if not os.path.isdir(os.environ.get("RLT_LIBERO_ASSETS", "")):
        for item in items:
            if item.get_closest_marker("official"):
                item.add_marker(pytest.mark.skip(reason="RLT_LIBERO_ASSETS names no folder with the official assets"))
    on_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if on_gpu:
        import torch

        for item in on_gpu if not torch.cuda.is_available() else ():
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))
