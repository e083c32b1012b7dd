"""The style sheet: contrasts of WCAG 2.2 AA in both themes, and nothing from elsewhere."""

from __future__ import annotations

import math
import re

import pytest

from pgqueue.admin.doctor import SEVERITIES
from pgqueue.jobs.states import STATES
from pgqueue.web import rendering

CSS = (rendering.HERE / "static" / "pgqueue.css").read_text(encoding="utf-8")
THEMES = [
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
]
TEXTS = ("text", "quiet", "link", "bad", "warn", "good")


def linear(colour: str) -> list[float]:
    """Red, green and blue as light, 0 to 1."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour: str) -> float:
    """As WCAG defines it, 0 to 1."""
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


FILLS = ("fill-done", "fill-warn", "fill-bad", "edge")
"""Colours of bars. `edge` is that of the time before a version."""
APART = 20
"""So far are two parts from each other in CIELAB; a tenth of that is a difference that can just be seen."""
DEUTERANOPE = (
    (0.367322, 0.860646, -0.227968),
    (0.280085, 0.672501, 0.047413),
    (-0.011820, 0.042940, 0.968881),
)
"""How eyes without cones for green see light: Machado, Oliveira and Fernandes 2009, severity 1.0, in linear RGB."""


def seen(colour: str, eyes: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    """The colour in CIELAB, as these eyes see it."""
    light = linear(colour)
    red, green, blue = (min(1, max(0, sum(map(float.__mul__, row, light)))) for row in eyes)
    parts = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
    )
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in parts)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.promise("F314")
def test_the_eyes_of_a_deuteranope_confuse_green_and_red() -> None:
    """The measure itself: what everybody tells apart, and these eyes hardly do."""
    plain = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    green, red = "#14622a", "#a3150b"
    assert math.dist(seen(green, plain), seen(red, plain)) > 90
    assert math.dist(seen(green, DEUTERANOPE), seen(red, DEUTERANOPE)) < 30
    assert seen("#ffffff", plain) == pytest.approx((100, 0, 0), abs=0.1)


@pytest.mark.promise("F314")
@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_marks_of_charts_are_seen_on_the_ground_and_told_apart_by_deuteranopes(theme: dict[str, str]) -> None:
    """Naive is green, amber and red: completed and failed look alike."""
    for name in (*FILLS, "link", "text"):
        assert contrast(theme[name], theme["ground"]) >= 3, name
    for name in FILLS:
        for other in FILLS[FILLS.index(name) + 1 :]:
            assert math.dist(seen(theme[name], DEUTERANOPE), seen(theme[other], DEUTERANOPE)) >= APART, (name, other)


@pytest.mark.promise("F144")
@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_texts_and_borders_can_be_seen_on_both_grounds(theme: dict[str, str]) -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    for ground in (theme["ground"], theme["side"], theme["raised"]):
        low = {name: contrast(theme[name], ground) for name in TEXTS if contrast(theme[name], ground) < 4.5}
        assert low == {}
        assert contrast(theme["focus"], ground) >= 3
    for name, on in (("edge", "ground"), ("edge", "raised"), ("edge", "side")):
        assert contrast(theme[name], theme[on]) >= 3, (name, on)
    for name, on in (("text", "line"), ("link", "soft"), ("text", "soft"), ("ground", "text"), ("ground", "link")):
        assert contrast(theme[name], theme[on]) >= 4.5, (name, on)


@pytest.mark.promise("F144")
def test_there_are_two_themes_and_every_colour_is_one_of_them() -> None:
    light, dark = THEMES
    assert set(light) == set(dark)
    assert re.findall(r"#[0-9a-f]{3,8}\b", re.sub(r":root \{.*?\}", "", CSS, flags=re.DOTALL)) == []
    assert set(re.findall(r"var\(--([\w-]+)\)", CSS)) == set(light)
    assert "url(" not in CSS and "@import" not in CSS


@pytest.mark.promise("F478")
def test_a_paragraph_of_links_alone_is_marked_as_such_in_every_template() -> None:
    """A phone makes these links as high as a finger. Naive is a link to more rows that the tests' pages never have."""
    templates = {each.name: each.read_text(encoding="utf-8") for each in (rendering.HERE / "templates").glob("*.html")}
    found, marked = [], 0
    for name, text in templates.items():
        marked += text.count('<p class="alone">')
        for paragraph in re.findall(r"<p>(.*?)</p>", text):
            words = re.sub(r"<(a|button)\b.*?</\1>|\{%.*?%\}|\{\{.*?\}\}|\w+:", "", paragraph)
            if "<a " in paragraph and not re.search(r"[A-Za-z]", words):
                found.append(f"{name}: {paragraph}")
    assert found == [] and marked > 10


@pytest.mark.promise("F244")
def test_a_state_is_a_shape_besides_a_colour_and_each_shape_is_another_one() -> None:
    """The empty text behind the slash keeps readers of screens from saying the shape: the word follows it."""
    shapes = dict(re.findall(r'\.state-(\w+)::before \{ content: ("[^"]+"); content: \2 / ""; \}', CSS))
    assert set(shapes) == {*STATES, "retrying", "waiting", "empty"} and len(set(shapes.values())) == len(shapes)
    severities = dict(re.findall(r'\.severity-(\w+)::before \{ content: ("[^"]+"); content: \2 / ""; \}', CSS))
    assert set(severities) == set(SEVERITIES) and len(set(severities.values())) == 3
