"""Pictures for pages that many read: smaller files."""

from __future__ import annotations

import io

WIDTH = 1380
"""Pixels; pictures are drawn larger and brought to this."""
COLOURS = 128


def smaller(png: bytes) -> bytes:
    """The picture at WIDTH pixels, in few colours: lines and type need no more."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as whole:
        picture = whole.convert("RGB")
    if picture.width > WIDTH:
        height = round(picture.height * WIDTH / picture.width)
        picture = picture.resize((WIDTH, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True)
    return buffer.getvalue()
