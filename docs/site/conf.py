"""How Sphinx makes the site of what build.py stages."""

import ortrain

project = "ortrain"
author = "the authors of ortrain"
version = release = ortrain.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
# The anchors that repositories give to headings.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
napoleon_numpy_docstring = False
# A short name in a docstring, such as :class:`Module`, is found wherever it is.
default_role = None

html_theme = "furo"
html_title = f"ortrain {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
