"""Figures as PDF, by CairoSVG: it draws hatchings and clips, which the libraries without Cairo
leave out.
"""

import importlib


def lacks() -> str:
    """Why there are none, and what to install; "" where all is there."""
    try:
        importlib.import_module("cairosvg")
    except ImportError:
        return 'as SVG; for PDF beside them pip install "ashl[pdf]"'
    except OSError:  # the C library below it
        return (
            "as SVG; for PDF beside them install the C library cairo, as in apt install libcairo2"
        )
    return ""


def made_of(svg: str) -> bytes:
    """A figure as a page of its own size; text stays text."""
    import cairosvg

    return cairosvg.svg2pdf(bytestring=svg.encode())
