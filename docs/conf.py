"""How Sphinx makes the site. docs/build.py lays out what it reads, and calls it."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parent)]

project = "From Attention to Translation"
author = "From Attention to Translation contributors"
copyright = "From Attention to Translation contributors, MIT licence"
language = "en"

extensions = ["myst_nb", "sphinx_copybutton", "notebooks", "names", "cards"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
highlight_language = "none"  # of a block that doesn't say: commands, in README's sections
nb_execution_mode = "off"  # what is shown is what is stored
nb_merge_streams = True
nb_ipywidgets_js = {}  # its default loads from other hosts

mathjax_path = "mathjax/tex-chtml.js"  # build.py puts it into _static
mathjax3_config = {"startup": {"elements": [".math"]}}  # where Sphinx puts equations

html_theme = "sphinx_book_theme"
html_title = project
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system has it
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_js_files = [("cards.js", {"defer": "defer"})]
html_use_index = False  # names link to their definitions; an index would be empty
html_sourcelink_suffix = ""  # a notebook's download ends in .ipynb
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "navbar-logo.html",
        "search-button-field.html",
        "living-link.html",
        "cards-link.html",
        "sbt-sidebar-nav.html",
    ]
}
html_theme_options = {
    "home_page_in_toc": False,
    "navbar_persistent": [],  # the search field is on the left
    "show_toc_level": 2,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
COPIED = ("cell_input", "highlight-python", "highlight-text", "highlight-none")
copybutton_selector = ", ".join(f"div.{name} pre" for name in COPIED)
