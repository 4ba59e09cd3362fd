"""Settings of Sphinx for these pages: `sphinx-build -W docs build/docs`."""

from typing import Any

project = "ashl"
author = "the ashl maintainers"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "ashl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
GUIDE = "contributing/guide.md"  # includes CONTRIBUTING.md, which lies outside of this folder


def link_guide(app: Any, page: str, source: list[str]) -> None:
    """Let links to CONTRIBUTING.md, as a forge needs them, lead to the page that includes it."""
    up = "../" * (page.count("/") + 1)
    source[0] = source[0].replace(f"]({up}CONTRIBUTING.md", f"]({up[3:]}{GUIDE}")


def link_pages(app: Any, path: Any, page: str, source: list[str]) -> None:
    """Let links of CONTRIBUTING.md to these pages lead there."""
    source[0] = source[0].replace("](docs/", "](../")


def setup(app: Any) -> None:
    app.connect("source-read", link_guide)
    app.connect("include-read", link_pages)
