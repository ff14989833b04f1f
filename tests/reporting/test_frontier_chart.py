"""The chart of the frontier: marks, intervals, and labels that do not overlap."""

import random
import xml.etree.ElementTree as ET

import pytest

from hasten.reporting import charts, frontier_chart
from hasten.reporting.frontier_chart import Box, frontier, place_labels
from hasten.reporting.svg import LETTER, LINE
from hasten.reporting.validation import validate
from hasten.reporting.view_model import frontier_rows
from helpers import sample_results as samples

METRIC = {"name": "accuracy", "higher_is_better": True, "unit": ""}
WIDTHS = (charts.WIDE, charts.NARROW)
SAMPLES = (samples.proven, samples.searched, samples.exact_only, samples.only_estimates, samples.faster)


def drawn(sample, width: int, margin: float | None = 0.005) -> ET.Element:
    return ET.fromstring(str(frontier(frontier_rows(validate(sample())), METRIC, margin, width=width)))


def symbols(drawing: ET.Element, *kinds: str) -> list[ET.Element]:
    return [each for each in drawing.iter() if {"symbol", *kinds} <= set((each.get("class") or "").split())]


def box_of(text: ET.Element) -> Box:
    kinds, content = text.get("class").split(), text.text
    x, y, width = float(text.get("x")), float(text.get("y")), LETTER * len(content)
    left = x - width if "end" in kinds else x - width / 2 if "middle" in kinds else x
    return Box(left, y - LINE + 4, left + width, y + 4)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_recipe_has_a_mark_of_its_evidence(width):
    drawing = drawn(samples.proven, width)
    shapes = {kind: [each.tag for each in symbols(drawing, kind)] for kind in ("exact", "precision", "proven")}
    assert shapes == {"exact": ["rect"], "precision": ["polygon"], "proven": ["circle"]}
    assert [each.tag for each in symbols(drawing, "estimated")] == ["circle"]
    assert [each.tag for each in symbols(drawing, "strong_baseline")] == ["polygon"]
    assert [each.tag for each in symbols(drawing, "baseline")] == ["line", "line"], "a cross"
    assert sum(each.get("class") == "ring" for each in drawing.iter("circle")) == 1


def test_marks_lie_at_their_speedup_and_quality():
    drawing = drawn(samples.proven, charts.WIDE)
    ((proven,), (estimated,)) = symbols(drawing, "proven"), symbols(drawing, "estimated")
    assert float(proven.get("cx")) < float(estimated.get("cx")), "to the right is faster"
    assert float(proven.get("cy")) < float(estimated.get("cy")), "up is better"
    (exact,) = symbols(drawing, "exact")
    zero = next(each for each in drawing.iter("text") if each.text == "0")
    assert float(exact.get("y")) + 5.5 == pytest.approx(float(zero.get("y")) - 4, abs=0.2)


def test_unknown_quality_is_drawn_below_the_axis_of_quality():
    def sample():
        result = samples.proven()
        result["frontier"][-1]["quality"] = None
        return result

    drawing = drawn(sample, charts.WIDE)
    ((estimated,), (proven,)) = symbols(drawing, "estimated"), symbols(drawing, "proven")
    forbidden = next(each for each in drawing.iter("rect") if each.get("class") == "forbidden")
    assert float(estimated.get("cy")) > float(forbidden.get("y")) + float(forbidden.get("height"))
    assert float(proven.get("cy")) < float(forbidden.get("y"))
    assert "unknown" in "".join(drawing.itertext()) and "unknown" not in "".join(
        drawn(samples.proven, charts.WIDE).itertext()
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_without_any_quality_the_chart_is_a_list_of_intervals(width):
    drawing = drawn(samples.exact_only, width)
    assert not any(each.get("class") == "forbidden" for each in drawing.iter("rect"))
    texts = [each.text for each in drawing.iter("text")]
    assert "1  baseline" in texts and any(text.startswith("4  bfloat16 +") for text in texts)
    (exact,) = symbols(drawing, "exact")
    (estimated,) = symbols(drawing, "estimated")
    assert float(exact.get("x")) < float(estimated.get("cx")) and float(exact.get("y")) < float(estimated.get("cy"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.__name__)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_texts_overlap_or_leave_the_drawing(sample, width):
    boxes = [box_of(text) for text in drawn(sample, width).iter("text")]
    for index, one in enumerate(boxes):
        assert one.left > -12 and one.right < width + 12
        assert not [other for other in boxes[index + 1 :] if one.overlap(other) > 8], boxes


@pytest.mark.parametrize("count", [1, 4, 9])
@pytest.mark.parametrize("spread", [0, 8, 60])
def test_labels_of_close_points_do_not_overlap(count, spread):
    generator, inside = random.Random(count), Box(50, 20, 330, 300)
    points = [(150 + generator.uniform(0, spread), 150 + generator.uniform(0, spread)) for _ in range(count)]
    names = ["strong baseline", "recommended", "baseline", *"123456"][:count]
    parts = place_labels(names, points, [], inside)
    boxes = [box_of(ET.fromstring(str(part))) for part in parts if part.startswith("<text")]
    assert len(boxes) == count
    for index, one in enumerate(boxes):
        assert one.overlap(inside) == pytest.approx(one.overlap(one)), "inside the plot"
        assert all(one.overlap(other) == 0 for other in boxes[index + 1 :])
        assert all(one.distance(point) > frontier_chart.MARK - 1 for point in points), "no mark is hidden"


def test_label_lies_nearest_to_its_own_mark():
    points = [(100.0, 150.0), (150.0, 150.0), (190.0, 150.0)]
    parts = place_labels(["1 baseline", "2 strong baseline", "3"], points, [], Box(60, 20, 500, 300))
    texts = {each.text: box_of(each) for each in map(ET.fromstring, map(str, parts)) if each.tag == "text"}
    for name, point in zip(("1 baseline", "2 strong baseline", "3"), points, strict=True):
        assert min(points, key=texts[name].distance) == point


def test_legend_lists_only_what_is_drawn():
    rows = frontier_rows(validate(samples.exact_only()))
    names = [name for _, name in frontier_chart.legend(rows)]
    assert names == ["the task as it is", "strong baseline", "exact", "estimated", "recommended"]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ratio", [1.0, 1.001, 0.4, 30.0, 1e9])
def test_extreme_speedups_are_drawn(ratio, width):
    def sample():
        rows = [samples.recipe_of_frontier({}, 1.0, role="baseline"), samples.recipe_of_frontier({"ema": {}}, ratio)]
        return samples.proven() | {"frontier": rows}

    for each in drawn(sample, width).iter("text"):
        assert -12 < float(each.get("x")) < width + 12
