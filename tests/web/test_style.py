"""The style sheet: contrasts of WCAG 2.2 AA in both themes, and nothing from elsewhere."""

from __future__ import annotations

import re

import pytest

from pgqueue.web import rendering

CSS = (rendering.HERE / "static" / "pgqueue.css").read_text(encoding="utf-8")
THEMES = [
    dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
]
TEXTS = ("text", "quiet", "link", "bad", "warn", "good")


def luminance(colour: str) -> float:
    """As WCAG defines it, 0 to 1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.promise("F144")
@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_texts_and_borders_can_be_seen_on_both_grounds(theme: dict[str, str]) -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    for ground in (theme["ground"], theme["raised"]):
        low = {name: contrast(theme[name], ground) for name in TEXTS if contrast(theme[name], ground) < 4.5}
        assert low == {}
        assert contrast(theme["line"], ground) >= 3 and contrast(theme["focus"], ground) >= 3


@pytest.mark.promise("F144")
def test_there_are_two_themes_and_every_colour_is_one_of_them() -> None:
    light, dark = THEMES
    assert set(light) == set(dark)
    assert re.findall(r"#[0-9a-f]{3,8}\b", re.sub(r":root \{.*?\}", "", CSS, flags=re.DOTALL)) == []
    assert set(re.findall(r"var\(--(\w+)\)", CSS)) == set(light)
    assert "url(" not in CSS and "@import" not in CSS
