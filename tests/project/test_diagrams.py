"""The diagrams are what their texts say, can be read, and stand on a page."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import diagrams
import pytest
from pages import PAGES, linked_images

TEXTS = sorted(diagrams.IMAGES.glob("*.txt"))
SVG = "{http://www.w3.org/2000/svg}"

pytestmark = pytest.mark.promise("F366")


def drawn(text: Path) -> diagrams.Diagram:
    return diagrams.read(text.read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_a_diagram_is_what_its_text_gives(text: Path) -> None:
    path = text.with_suffix(".svg")
    assert path.read_text(encoding="utf-8") == diagrams.pictures()[path], f"draw it anew: {diagrams.REGENERATE}"


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_a_diagram_says_what_it_shows_in_light_and_dark(text: Path) -> None:
    picture = ElementTree.fromstring(text.with_suffix(".svg").read_text(encoding="utf-8"))
    diagram, named = drawn(text), picture.get("aria-labelledby", "").split()
    said = [each for each in (picture.find(f"{SVG}title"), picture.find(f"{SVG}desc")) if each is not None]
    assert [(each.get("id"), each.text) for each in said] == list(
        zip(named, (diagram.title, diagram.about), strict=True)
    )
    assert "prefers-color-scheme: dark" in str(picture.findtext(f"{SVG}style"))
    assert [each for each in picture.iter() if each.get("fill") or each.get("stroke")] == []  # no colour beside those


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.stem)
def test_nothing_in_a_diagram_lies_on_something_else(text: Path) -> None:
    diagram = drawn(text)
    labels = {arrow.label: arrow.where for arrow in diagram.arrows if arrow.label}
    whole = diagrams.Area(diagram.width / 2, diagram.height / 2, diagram.width, diagram.height)
    for arrow in diagram.arrows:
        crossed = [name for name, box in diagram.boxes.items() if any(map(box.overlaps, arrow.points()))]
        assert crossed == [], f"{arrow.of} crosses {crossed}"
        over = [label for label, area in labels.items() if any(map(area.overlaps, arrow.points()))]
        assert over == [], f"{arrow.of} crosses the words {over}"
    for (one, area), (other, its) in combinations([*labels.items(), *diagram.boxes.items()], 2):
        assert not area.overlaps(its), f"{one!r} lies on {other!r}"
    for label, area in labels.items():
        assert area.x - area.width / 2 > 0 and area.x + area.width / 2 < whole.width, f"{label!r} leaves the picture"


def test_each_diagram_stands_on_a_page() -> None:
    shown = {image for page in PAGES for image in linked_images(page)}
    assert len(TEXTS) == 6
    assert [text.stem for text in TEXTS if text.with_suffix(".svg") not in shown] == []


@pytest.mark.parametrize(
    ("line", "said"), [("one => other", "no arrow"), ("one -> third", "no such box")], ids=["arrow", "box"]
)
def test_a_text_that_cannot_be_drawn_is_refused(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        diagrams.read(f"title: T\nabout: A.\n\n| one | other |\n\n{line}\n")
