"""What tests share."""

import signal

import pytest

# A shell's background job ignores SIGINT, and hands that on to its children; the tests of interrupts need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    """Leave out what takes minutes unless it is asked for by name: such tests bear other marks as well."""
    for mark in ("exact", "expensive"):
        if mark in config.option.markexpr:
            continue
        long = [item for item in items if item.get_closest_marker(mark)]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)


@pytest.fixture
def one_thread():
    """Torch on one thread: small networks are quicker so, and rounding is always the same."""
    import torch as th

    before = th.get_num_threads()
    th.set_num_threads(1)
    yield
    th.set_num_threads(before)
