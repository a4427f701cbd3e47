"""The site, by Sphinx: ``sphinx-build -W -c docs -b html . build/site``.

Its sources are the repository itself, so links between documents, results and notebooks are the
same here and on the site.
"""

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
