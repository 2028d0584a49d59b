"""OpenGL's display lists beside MuJoCo's own. All calls need a current context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from OpenGL import GL


def forget_errors() -> None:
    """PyOpenGL would blame its next call for what MuJoCo's own calls left behind."""
    while GL.glGetError():
        pass


def compile_list(number: int, draw: Callable[[], Any]) -> None:
    """
    Compile an OpenGL display list.

    :param number: Of the list, from ``glGenLists``.
    :param draw: What the list is to do.
    """
    GL.glNewList(number, GL.GL_COMPILE)
    draw()
    GL.glEndList()
