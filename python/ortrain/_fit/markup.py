"""HTML and SVG elements as text. Every text that is not markup itself is escaped."""

from __future__ import annotations

from html import escape

# Elements that have no end tag.
_EMPTY = {"img", "meta", "br"}


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: the name of the element.
        children: markup, and texts or numbers to escape. ``None`` is left out.
        attributes: the attributes. A trailing underscore is dropped (``class_``), other underscores become hyphens;
            ``None`` is left out.

    """
    settings = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY:
        return Markup(f"<{name}{settings}>")
    return Markup(f"<{name}{settings}>{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Return children one after the other."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else escape(_number(child)) for child in children if child is not None
        )
    )


def _number(value: object) -> str:
    """Return a text as it is, and a coordinate with two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
