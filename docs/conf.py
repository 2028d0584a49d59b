"""Sphinx configuration."""

from importlib.metadata import version as distribution_version

project = "rlt"
author = "The rlt authors"
project_copyright = "2026, The rlt authors"
release = version = distribution_version("rlt")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax", "sphinx_copybutton"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "rlt"
exclude_patterns = ["_build"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autosummary_generate = False  # tables only; the entries are on the pages
nitpicky = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
