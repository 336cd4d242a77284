"""What ``sphinx-build -n -W docs site`` needs to know; a broken link or reference fails it."""

import dkv

project = "dkv"
author = "The DKV authors"
version = release = dkv.__version__
html_title = f"dkv {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx_copybutton"]
html_theme = "furo"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # [text](page.md#a-heading), as on GitHub

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say it, with shapes
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
