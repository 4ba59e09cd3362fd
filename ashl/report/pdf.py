"""Convert figures to PDF with CairoSVG, which draws hatchings and clips."""

import importlib


def lacks() -> str:
    """Return why PDF is not possible and what to install; "" if all is installed."""
    try:
        importlib.import_module("cairosvg")
    except ImportError:
        return 'as SVG; for PDF beside them pip install "ashl[pdf]"'
    except OSError:  # the C library cairo is missing
        return (
            "as SVG; for PDF beside them install the C library cairo, as in apt install libcairo2"
        )
    return ""


def made_of(svg: str) -> bytes:
    """Return a figure as a PDF page of its own size; text stays text."""
    import cairosvg

    return cairosvg.svg2pdf(bytestring=svg.encode())
