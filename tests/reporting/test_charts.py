"""Charts: positions of their shapes, and escaping of texts."""

import xml.etree.ElementTree as ET

import pytest

from hasten.reporting import charts, frontier_chart, view_model
from hasten.reporting.validation import validate
from helpers import sample_results as samples

WIDTHS = (charts.WIDE, charts.NARROW)
METRIC = {"name": "accuracy", "higher_is_better": True, "unit": ""}


def of_class(drawing, tag: str, *names: str) -> list:
    return [
        each for each in ET.fromstring(str(drawing)).iter(tag) if set(names) <= set((each.get("class") or "").split())
    ]


def sample_arms() -> list[dict]:
    result = validate(samples.faster())
    return view_model.arms(result["curves"], 0.97, True, result["time_to_target"])


@pytest.mark.parametrize("width", WIDTHS)
def test_curve_has_a_line_per_seed_with_time_to_the_right(width):
    drawing = charts.curves(sample_arms(), 0.97, METRIC, width=width)
    assert len(of_class(drawing, "polyline", "curve")) == 6
    tuned, baseline = (float(of_class(drawing, "line", "drop", arm)[0].get("x1")) for arm in ("tuned", "baseline"))
    ratio = (baseline - 48) / (tuned - 48)  # 48 is the axis
    assert ratio == pytest.approx(8.2 / 1.6, rel=0.02)


@pytest.mark.parametrize("width", WIDTHS)
def test_text_stays_inside_the_drawing(width):
    result = validate(samples.faster())
    stairs = view_model.staircase(8.2, 1.6, result["contributions"])
    drawings = [
        charts.curves(sample_arms(), 0.97, METRIC, width=width),
        charts.waterfall(8.2, 1.6, stairs, width=width),
        charts.gate(result["quality"]["difference"], 0.005, "", True, width=width),
        charts.phase_bars([("baseline", "0.7 s", samples.BASELINE), ("tuned", "0.1 s", samples.TUNED)], width=width),
    ]
    for drawing in drawings:
        for text in ET.fromstring(str(drawing)).iter("text"):
            kind, x, text_width = text.get("class").split(), float(text.get("x")), 8.2 * len("".join(text.itertext()))
            left = x - text_width if "end" in kind else x - text_width / 2 if "middle" in kind else x
            assert left > -9 and left + text_width < width + 9, ET.tostring(text)


def test_phases_are_to_scale():
    drawing = charts.phase_bars(
        [("baseline", "", {"input": 3.0, "forward": 1.0}), ("tuned", "", {"forward": 1.0})], width=400
    )
    lengths = [float(box.get("width")) for box in of_class(drawing, "rect", "phase")]
    assert lengths == [pytest.approx(299), pytest.approx(99), pytest.approx(99)]


def test_failing_zone_ends_at_the_margin():
    for mean, inside in ((0.001, False), (-0.02, True)):
        drawing = charts.gate(
            {"mean": mean, "low": mean - 0.001, "high": mean + 0.001}, 0.005, "", not inside, width=800
        )
        (zone,), dot = of_class(drawing, "rect", "forbidden"), of_class(drawing, "circle", "dot")[0]
        assert (float(dot.get("cx")) < float(zone.get("width"))) is inside


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("mean", "margin"), [(0.0, 0.0033), (0.05, 0.0001), (-0.2, 0.005), (0.0001, 0.05)])
def test_labels_of_the_gate_do_not_overlap(mean, margin, width):
    drawing = charts.gate({"mean": mean, "low": mean - 0.05, "high": mean + 0.05}, margin, "", True, width=width)
    texts = {"".join(each.itertext()): each for each in ET.fromstring(str(drawing)).iter("text")}
    below, equal = next(text for name, text in texts.items() if name.startswith("margin")), texts["equal quality"]
    assert float(below.get("x")) + 4 < float(equal.get("x")) or float(below.get("y")) + 15 < float(equal.get("y"))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("baseline", "tuned"), [(8.2, 1.6), (8.2, 8.0), (13.9, 13.8), (0.1, 0.05)])
@pytest.mark.parametrize("target", [0.97, 0.945, 0.978])
def test_labels_of_the_curves_do_not_overlap(baseline, tuned, target, width):
    arms = sample_arms()
    for arm, time in zip(arms, (baseline, tuned), strict=True):
        arm["time"] = time
    drawing = ET.fromstring(str(charts.curves(arms, target, METRIC, width=width)))
    texts = [each for each in drawing.iter("text") if "halo" in each.get("class")]
    boxes = [frontier_chart.text_box(float(each.get("x")), float(each.get("y")), each.text) for each in texts]
    assert len(boxes) == 3
    assert all(a.overlap(b) == 0 for index, a in enumerate(boxes) for b in boxes[index + 1 :])
    assert all(box.left > 0 and box.right < width + 1 for box in boxes)


def test_names_are_escaped():
    stairs = view_model.staircase(8.0, 2.0, [{"method": "<b>&", "speedup": {"median": 2.0, "low": 1.0, "high": None}}])
    drawing = str(charts.waterfall(8.0, 2.0, stairs, width=800))
    assert "<b>" not in drawing and "&lt;b&gt;&amp;" in drawing
    ET.fromstring(drawing)


@pytest.mark.parametrize(("low", "high"), [(0.9, 0.98), (0, 14), (0, 1e-6), (-3, 5), (1e6, 1e9), (2, 2)])
def test_ticks_are_round_and_inside(low, high):
    found = charts.ticks(low, high, 5)
    assert 1 <= len(found) <= 7 and all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)


def test_thinned_line_keeps_its_ends():
    line = [(x, x) for x in range(1000)]
    assert (
        charts.thin_out(line, 50)[0] == (0, 0)
        and charts.thin_out(line, 50)[-1] == (999, 999)
        and len(charts.thin_out(line, 50)) == 50
    )
