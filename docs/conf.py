"""The documentation as a site, built by `make docs` into build/site: without network, and warnings are errors."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

project = "fastcl"
author = "The fastcl authors"
copyright = "The fastcl authors, Apache-2.0"
version = release = version_of("fastcl")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design", "docstrings", "generated"]
exclude_patterns = ["_site"]
templates_path = ["_site/templates"]
html_static_path = ["assets"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = False
autoclass_content = "class"
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
default_role = "code"
highlight_language = "text"  # formulas and folders; code names its language
suppress_warnings = ["ref.python"]  # a class and a function of one name in two modules are no fault

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "fastcl"
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"index": []}
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
