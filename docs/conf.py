"""The reference, made from the docstrings: make docs."""

import importlib.util

import attnmask

project = "attnmask"
version = release = attnmask.__version__
project_copyright = "the authors of attnmask, Apache-2.0"

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
default_role = "py:obj"  # `name` is a link where there is such a name, and else stands out
autosummary_generate = False
autodoc_typehints = "none"  # the sections on parameters say more
autodoc_member_order = "bysource"
autodoc_mock_imports = [name for name in ("jax", "torch") if not importlib.util.find_spec(name)]
numpydoc_show_class_members = False
maximum_signature_line_length = 100

html_theme = "alabaster"
html_theme_options = {"description": "Who may attend to whom, for NumPy", "page_width": "72rem"}
html_show_sourcelink = False
