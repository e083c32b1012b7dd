"""A hook of mkdocs: on the site, a link that leaves docs/ is its text alone, for only the pages of docs/ are there."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!design/)[^)]*\)")


def on_page_markdown(markdown: str, *, page: object, config: object, files: object) -> str:
    """Called for each page before it is rendered.

    >>> on_page_markdown("[a test](../tests/promises.md), [why](why.md)", page=None, config=None, files=None)
    'a test, [why](why.md)'
    """
    up = "../" * str(getattr(getattr(page, "file", None), "src_uri", "")).count("/")

    def shown(link: re.Match[str]) -> str:
        path = link[0].rsplit("](", 1)[1]
        return link[1] if path.startswith(f"{up}../") else link[0]

    return _OUTSIDE.sub(shown, markdown)
