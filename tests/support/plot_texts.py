"""What can be read in a plot."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree


def texts_of(svg: Path) -> list[str]:
    """The texts of an SVG, in the order in which they are drawn."""
    texts = ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}text")
    return ["".join(text.itertext()).strip() for text in texts]
