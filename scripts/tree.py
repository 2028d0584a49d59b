"""The tree of both packages, one line per folder and file, from the first sentence of each docstring.

    python scripts/tree.py            # prints it
    python scripts/tree.py --write    # puts it into docs/guide/where_things_live.md

A test compares the page with this, so the tree in the documentation cannot go out of date.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guide" / "where_things_live.md"
BEGIN, END = "<!-- tree: begin -->", "<!-- tree: end -->"
#: Where a line of the tree begins to say what is in the file, and where it ends.
COLUMN, WIDTH = 32, 132


def first_sentence(path: Path) -> str:
    """
    Read the first sentence of a file's docstring.

    :param path: A Python file.
    :return: The first sentence of its docstring without its full stop, on one line; empty without a docstring.
    """
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
    text = re.sub(r":[a-z]+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text).replace("``", "")
    return re.split(r"(?<!eq)\. ", text)[0].removesuffix(".")


def lines_of(folder: Path, depth: int = 0) -> list[str]:
    """
    List a package and its files.

    :param folder: A package.
    :param depth: How deep it lies below the repository's root.
    :return: A line for the package, then one for each of its files, then those of its sub-packages.
    """
    found = [_line(depth, f"{folder.name}/", first_sentence(folder / "__init__.py"))]
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            found.append(_line(depth + 1, path.name, first_sentence(path)))
    for path in sorted(folder.iterdir()):
        if (path / "__init__.py").is_file():
            found += lines_of(path, depth + 1)
    return found


def _line(depth: int, name: str, text: str) -> str:
    line = f"{'  ' * depth + name:<{COLUMN}} {text}".rstrip()
    return line if len(line) <= WIDTH else line[: WIDTH - 4].rpartition(" ")[0] + " ..."


def tree() -> str:
    """
    List both packages.

    :return: Both packages, as a block of text for the documentation.
    """
    lines = [line for package in ("rlt_gym", "rlt_sb3") for line in [*lines_of(ROOT / package), ""]]
    return "\n".join([BEGIN, "```text", *lines[:-1], "```", END])


def main() -> None:
    """Print the tree, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write it into the page")
    if not parser.parse_args().write:
        print(tree())
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + tree() + rest.partition(END)[2])


if __name__ == "__main__":
    main()
