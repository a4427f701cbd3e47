"""The site, by Sphinx: ``sphinx-build -W -c docs -b html . build/site``.

Its sources are the repository itself, so links between documents, results and notebooks are the
same here and on the site.
"""

import pathlib

from sphinx import addnodes

import boostax

project = "boostax"
author = "The boostax authors"
copyright = author
release = version = boostax.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
# MathJax with the site itself: formulas are drawn without a network.
extensions += ["sphinx-mathjax-offline"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "notebooks/*.ipynb",
    "benchmarks/results/*.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "GOVERNANCE.md",
    "SECURITY.md",
]

html_theme = "furo"
html_title = f"boostax {release}"
html_extra_path = ["site"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["narrow.js"]
html_search_scorer = str(pathlib.Path(__file__).parent / "static" / "scorer.js")
html_copy_source = False
html_show_sphinx = False

# Kept outputs are shown as they are; the tests run the notebooks.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# Scripts and tests are linked to as files; the pages of other repositories are not fetched.
suppress_warnings = ["myst.xref_missing_docs"]

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_custom_sections = ["Cost"]
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False


def setup(app):
    """Let pages link to entries of the reference, which has no fields of tuples."""
    app.connect("doctree-read", _add_targets)
    app.connect("autodoc-skip-member", _skip_fields)


def _add_targets(app, doctree):
    slugs = app.env.metadata[app.env.docname].setdefault("myst_slugs", {})
    for entry in doctree.findall(addnodes.desc_signature):
        slugs |= {name: (0, name, name) for name in entry["ids"]}


def _skip_fields(app, what, name, value, skip, options):
    # The docstring of the class describes them.
    return True if type(value).__name__ == "_tuplegetter" else None
