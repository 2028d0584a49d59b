"""Everything static is in pyproject.toml; here is what must be computed: where this Python reads .pth files from."""

import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, setup


class WithData(Distribution):
    """setuptools' editable install asks for ``has_data``, which no Distribution has, and so leaves data files out."""

    def has_data(self):
        return self.has_data_files()


site_packages = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
setup(
    distclass=WithData,
    data_files=[(str(site_packages), ["rlt-gymnasium.pth"])],
    # That folder's name has the Python version in it, so a wheel fits this version only.
    options={"bdist_wheel": {"python_tag": f"cp{sys.version_info.major}{sys.version_info.minor}"}},
)
