"""The zygotes' own tests see them begin and end with the environments that use them."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_zygote_for_a_file():
    """Keep no zygote, unlike the fixture of this name for the other folders."""
