"""Stores large arrays in memory, or in a temporary file that the operating system reads as needed."""

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class ArrayStorage:
    """
    Makes arrays, large ones in files.

    :param limit: Most bytes of an array in memory; a larger one lies in a file. ``None`` = every array in memory.
    :param folder: Folder of the files, made if it is missing; ``None`` = the system's temporary folder, which may
        itself be memory.
    """

    limit: int | None = None
    folder: str | os.PathLike[str] | None = None

    def zeros(self, shape: tuple[int, ...], dtype: type | np.dtype) -> np.ndarray:
        """
        Make an array of zeros.

        :param shape: Its shape.
        :param dtype: Its type.
        :return: A new array; a ``numpy.memmap`` if it lies in a file. The file has no name and is gone with the array.
        :raises ValueError: If the file does not fit on the disk, or the folder cannot be written.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if self.limit is None or size <= self.limit:
            return np.zeros(shape, dtype)
        folder = Path(tempfile.gettempdir() if self.folder is None else self.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk would otherwise kill the process later
                return np.memmap(file, dtype=dtype, mode="r+", shape=shape)
        except OSError as error:
            raise ValueError(
                f"{folder} has no room for {size / 2**30:.1f} GiB of frames or tokens ({error}): choose another folder "
                "(scratch), use fewer demonstrations, or raise memory_limit."
            ) from error


#: Every array in memory.
IN_MEMORY = ArrayStorage()
