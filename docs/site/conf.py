"""Configuration of Sphinx for the pages that build.py stages."""

import builtins

from docutils import nodes
from sphinx import addnodes
from sphinx.util.nodes import make_refnode

import ortrain

project = "ortrain"
author = "the authors of ortrain"
version = release = ortrain.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
# The anchors that repositories give to headings.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
# Longer ones take a line for each parameter.
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
# A name of a docstring that is nowhere is an error, where it is one of ours.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!ortrain\.).*"),
    (r"py:.*", r"ortrain\.(.*\.)?_.*"),
    (r"py:.*", r"ortrain\.api\.outputs\.Tensor"),  # a variable of types
    (r"py:.*", r"ortrain\.trainer\.legacy(_loss_scaler)?\..*"),  # the second classes of their names
]

html_theme = "furo"
html_title = f"ortrain {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False


def no_type_before_a_colon(app, what, name, obj, options, lines):
    """Prevent Napoleon from reading the words before the first colon of an attribute's docstring as its type."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "")


def where_it_is_defined(app, env, node, contnode):
    """A name that users know (``InferenceSession``, ``ortrain.api.Module.eval``) leads to where it is described."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target:
        return None
    domain, names = env.get_domain("py"), target.removeprefix("ortrain.").split(".")
    value = ortrain
    for position, name in enumerate(names):
        value = getattr(value, name, None)
        if isinstance(value, type):
            rest = ".".join(names[position + 1 :])
            places = [
                f"{value.__module__}.{value.__name__}",
                f"ortrain.{value.__name__}",
                f"ortrain.api.{value.__name__}",
            ]
            for place in places:
                full = f"{place}.{rest}" if rest else place
                if full in domain.objects:
                    found = domain.objects[full]
                    return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, contnode, full)
    return None


def types_of_python_are_no_links(app, doctree):
    """Sphinx takes ``bytes`` in a signature for any attribute of that name."""
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node.get("refdomain") == "py" and hasattr(builtins, node.get("reftarget", "")):
            conditional = isinstance(node[0], addnodes.pending_xref_condition)
            node.replace_self(nodes.Text(node["reftarget"]) if conditional else node.children)


def methods_of_scikit_learn(app, what, name, obj, skip, options):
    """scikit-learn gives each estimator methods about the routing of arguments, which it describes itself."""
    return True if name.startswith("set_") and name.endswith("_request") else None


def setup(app):
    """Connect them."""
    app.connect("autodoc-skip-member", methods_of_scikit_learn)
    app.connect("autodoc-process-docstring", no_type_before_a_colon, priority=100)
    app.connect("doctree-read", types_of_python_are_no_links)
    app.connect("missing-reference", where_it_is_defined)
