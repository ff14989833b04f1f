"""The HTML report: its content, escaping, and damaged results."""

# ruff: noqa: RUF001 (true multiplication signs and dashes are what is tested)

import copy
import html
import json
import re
import xml.etree.ElementTree as ET

import pytest

from hasten.core.errors import ConfigurationError
from hasten.core.recipe import Recipe
from hasten.reporting.report import report
from helpers import sample_results as samples

TUNED = ("faster", "no_improvement", "exact_only", "proven", "only_estimates", "searched")
KINDS = (*TUNED, "trained", "quantized", "nothing_quantized")
EVERY = {name: getattr(samples, name) for name in KINDS}
HOSTILE = "<script>alert('1')</script>\"&]]>{{ 7*7 }}\x1b[31m\u202e\ud800"


def page_of(tmp_path, result) -> str:
    (tmp_path / "result.json").write_text(result if isinstance(result, str) else json.dumps(result), encoding="utf-8")
    return report(tmp_path).read_text(encoding="utf-8")


def text_of(page: str) -> str:
    """Returns the text that a reader sees: no style, no tags, plain spaces."""
    bare = re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S)
    return " ".join(html.unescape(bare).replace("\u00a0", " ").split())


def value_paths(value, path=()):
    """Returns the path of every nested value, containers included; of long lists only that of the first item."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from value_paths(inner, (*path, key))


def with_value(result: dict, path: tuple, value) -> dict:
    changed = copy.deepcopy(result)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def test_report_states_the_gain_at_its_top(tmp_path):
    text = text_of(page_of(tmp_path, samples.faster()))
    top = text[: text.index("The frontier")]
    for needed in (
        "5.1× faster",
        "1.6 s instead of 8.2 s",
        "4.6 to 5.7×",
        "0.9752",
        "0.9731",
        "margin of 0.005",
        "Over the strong baseline",
        "The search pays after 23 trainings",
        "4.4×",
        "2 min 31 s",
    ):
        assert needed in top


def test_report_leads_with_the_times_of_a_training(tmp_path):
    text = text_of(page_of(tmp_path, samples.exact_only()))
    top = text[: text.index("The frontier")]
    for needed in (
        "5 h 20 min instead of 12 h 4 min",
        "takes 4 h 50 min to 5 h 40 min, predicted from measured steps: 2.3× faster (2.1 to 2.5×)",
        "Exact the same bits, or the same formula",
        "pays after 1 training",
        "13.33 instead of 30.17, at 2.50 an hour",
    ):
        assert needed in top
    assert "Quality:" not in text, "nothing is stated about a quality that was not measured"


def test_report_lists_the_frontier_with_its_evidence(tmp_path):
    text = text_of(page_of(tmp_path, samples.proven())).replace(": ", ":").replace(", ", ",")
    for needed in (
        "baseline the task as it is 1.00× – –",
        "2.3× 2.2 to 2.4× −0.0004 −0.0031 to +0.0023 precision checked",
        "2.9× 2.7 to 3.0× +0.0021 −0.0011 to +0.0053 proven",
        "To prove it:5 more seeds,about 12 min:--budget +12m",
    ):
        assert needed in text, needed


def test_report_without_improvement_lists_what_is_estimated(tmp_path):
    text = text_of(page_of(tmp_path, samples.only_estimates()))
    assert "No improvement, so far" in text and "A training 1 min 22 s measured" in text
    assert text.count("To prove it: 3 more seeds, about 4 min: --budget +4m") == 3
    assert "Use the recipe" not in text and "recommended" not in text


def test_report_of_a_real_search_states_what_it_found(tmp_path):
    text = text_of(page_of(tmp_path, samples.searched()))
    assert "1 s instead of 3.6 s" in text and "takes 880 ms to 1.2 s, measured: 3.5× faster (3.0 to 4.1×)" in text
    assert "Reaches accuracy 0.96 in 246 ms instead of 2 s: 8.3× faster (4.1 to 16.8×)." in text
    assert "pays after 71 trainings" in text and "To prove it: 6 more seeds, about 40 s: --budget +40s" in text


def test_report_shows_the_measured_times_beside_the_product(tmp_path):
    assert "took 8.2 s as baseline and 1.7 s tuned" in text_of(page_of(tmp_path, samples.faster()))


def test_report_lists_every_trial_with_its_reason(tmp_path):
    text = text_of(page_of(tmp_path, samples.faster())).replace(": ", ":").replace("_ ", "_")
    for trial in samples.faster()["trials"]:
        assert trial["what"] in text and trial["verdict"] in text and trial["why"] in text


def test_report_without_improvement_shows_evidence(tmp_path):
    text = text_of(page_of(tmp_path, samples.no_improvement()))
    assert "No improvement" in text and samples.no_improvement()["why"] in text
    assert "Every trial" in text and "Where the time goes" in text
    assert "Use the recipe" not in text and "Quality:" not in text


@pytest.mark.parametrize(
    ("passed", "message"), [(False, "Faster, but worse quality"), (None, "Faster, but quality not tested")]
)
def test_report_without_the_gate_claims_no_gain(tmp_path, passed, message):
    text = text_of(page_of(tmp_path, with_value(samples.faster(), ("quality", "passed"), passed)))
    assert message in text and "5.1× faster" not in text and "Use the recipe" not in text


@pytest.mark.parametrize("kind", ["faster", "trained"])
def test_report_shows_what_each_method_did(tmp_path, kind):
    text = text_of(
        page_of(tmp_path, EVERY[kind]() | {"effects": {"compile": "2 graphs", "x.py:X": "effect not checked"}})
    )
    assert "What each method did Seen in one step after the warm-up. compile 2 graphs x.py:X effect not checked" in text


def test_report_shows_the_operations_of_a_step_by_precision(tmp_path):
    assert "Operations by precision" not in text_of(page_of(tmp_path, samples.faster()))
    text = text_of(page_of(tmp_path, samples.faster() | {"operations": samples.operations()}))
    shown = text[text.index("Operations by precision") :]
    for needed in ("bfloat16 42 100 % 58 %", "addmm 13 33 % 30 %", "float32 to bfloat16 40 8 %", "3 others"):
        assert needed in shown
    assert "Loss scale: 65536 after step 1, 32768 after step 2; 1 step of 2 overflowed." in shown


def test_report_recipe_can_be_copied(tmp_path):
    page = page_of(tmp_path, samples.faster())
    copied = html.unescape(re.search(r'<pre tabindex="0" aria-label="recipe as TOML">(.*?)</pre>', page, re.S)[1])
    assert Recipe.from_toml(copied).methods == samples.faster()["recipe"]
    assert f"hasten train digits --recipe {tmp_path}/recipe.toml" in text_of(page)


def test_report_shows_the_recipe_of_the_directory(tmp_path):
    (tmp_path / "recipe.toml").write_text("[methods.ema]\ndecay = 0.5\n")
    text = text_of(page_of(tmp_path, samples.trained()))
    assert "decay = 0.5" in text and "--recipe" in text


@pytest.mark.parametrize("kind", EVERY)
def test_report_is_one_small_file_without_external_resources(tmp_path, kind):
    page = page_of(tmp_path, EVERY[kind]())
    assert len(page.encode()) < 100_000
    assert "<script" not in page and "@import" not in page and "url(" not in page
    assert [each for each in re.findall(r'(?:src|href|srcset|action)\s*=\s*"([^"]*)"', page) if each != "data:,"] == []
    assert "http:" not in page and "https:" not in page
    assert [each.name for each in tmp_path.iterdir() if each.name not in ("result.json", "report.html")] == []


@pytest.mark.parametrize("kind", EVERY)
def test_report_is_well_formed(tmp_path, kind):
    page = page_of(tmp_path, EVERY[kind]())
    body = page[page.index("<main>") : page.index("</main>") + len("</main>")]
    ET.fromstring(body)  # raises if a tag is not closed
    for chart in ET.fromstring(body).iter("svg"):
        assert chart.get("role") != "img" or chart.findtext("title")


def test_report_has_a_drawing_for_narrow_and_wide_screens(tmp_path):
    page = page_of(tmp_path, samples.faster())
    assert page.count('class="wide"') == page.count('class="narrow"') == 5


@pytest.mark.parametrize("kind", EVERY)
def test_report_escapes_hostile_text(tmp_path, kind):
    def replaced_values(value, key=None):
        if isinstance(value, dict):
            extra = (
                {HOSTILE: {}}
                if key == "recipe"
                else {HOSTILE: 0.5}
                if key in ("phases", "ceilings", "system_noise")
                else {}
            )
            return {name: replaced_values(inner, name) for name, inner in value.items()} | extra
        if isinstance(value, list):
            return [replaced_values(item) for item in value]
        return HOSTILE if isinstance(value, str) and key not in ("kind", "verdict") else value

    page = page_of(tmp_path, replaced_values(EVERY[kind]()))
    assert "<script" not in page and "\x1b" not in page and "\u202e" not in page
    assert "7*7" in page and "alert(" in page  # shown unchanged: neither evaluated nor lost


SPOILERS = (None, [], {}, "text", 0, -1, 1e17, 5e-324, float("nan"))


def page_or_one_line(tmp_path, result: dict, path: tuple, value) -> None:
    try:
        page_of(tmp_path, with_value(result, path, value))
    except ConfigurationError as refused:
        assert "\n" not in str(refused) and str(tmp_path) in str(refused), (path, value)
    except Exception as error:
        raise AssertionError(f"{path} = {value!r}") from error


@pytest.mark.parametrize("kind", sorted(EVERY.keys() - {"proven", "only_estimates", "searched"}))
def test_report_with_one_wrong_value_is_a_page_or_one_error_line(tmp_path, kind):
    for index, path in enumerate(list(value_paths(EVERY[kind]()))[1:]):
        page_or_one_line(tmp_path, EVERY[kind](), path, SPOILERS[index % len(SPOILERS)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
def test_report_with_three_wrong_values_each_is_a_page_or_one_error_line(tmp_path, kind):
    for index, path in enumerate(list(value_paths(EVERY[kind]()))[1:]):
        for offset in (1, 4, 7):  # the quick test takes offset 0
            page_or_one_line(tmp_path, EVERY[kind](), path, SPOILERS[(index + offset) % len(SPOILERS)])


@pytest.mark.parametrize(
    "value", [True, 1e308, -1e308, float("inf"), 10**400, -(10**400)], ids=lambda value: str(value)[:6]
)
def test_report_accepts_extreme_numbers(tmp_path, value):
    for path in [
        ("speedup", "high"),
        ("system_noise", "spread_percent"),
        ("curves", "tuned", 0, "points", 3, "metric"),
        ("recipe", "num_threads", "count"),
    ]:
        try:
            assert "<h1" in page_of(tmp_path, with_value(samples.faster(), path, value))
        except ConfigurationError as refused:
            assert "\n" not in str(refused)


@pytest.mark.parametrize("kind", sorted(EVERY.keys() - {"only_estimates", "searched"}))
def test_report_accepts_a_missing_key(tmp_path, kind):
    make = EVERY[kind]
    for key in make():
        remaining = {name: value for name, value in make().items() if name != key}
        if key not in ("kind", "evaluations"):
            assert "<h1" in page_of(tmp_path, remaining), key


COMPLETE = json.dumps(samples.faster())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (COMPLETE[: len(COMPLETE) // 2], "not complete JSON"),
        ("", "not complete JSON"),
        ("[1, 2]", "no result of hasten"),
        ('"faster"', "no result of hasten"),
        ("{}", "of an unknown kind"),
        ('{"kind": "../../etc/passwd"}', "of an unknown kind"),
        ('{"kind": ["tune"]}', "of an unknown kind"),
        ("[" * 100_000, "not complete JSON"),
        ("\x00\x01", "not complete JSON"),
        (json.dumps(samples.faster() | {"trials": {"what": 1}}), "trials must be a list, not an object"),
        (
            json.dumps(with_value(samples.faster(), ("speedup", "median"), "much")),
            "speedup: median must be a number from 0 up, not a text",
        ),
    ],
)
def test_report_of_a_broken_result_is_one_error_line(tmp_path, content, message):
    with pytest.raises(ConfigurationError) as refused:
        page_of(tmp_path, content)
    assert message in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert not (tmp_path / "report.html").exists()


def test_report_without_directory_or_result_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no directory"):
        report(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"contains no result\.json"):
        report(tmp_path)


def test_report_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ConfigurationError, match="cannot write"):
        page_of(tmp_path, samples.faster())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["report.html", "result.json"]


def test_report_of_a_training_shows_the_environment(tmp_path):
    (tmp_path / "environment.json").write_text(
        json.dumps(
            {
                "hasten": "0.1.0",
                "torch": "2.13.0",
                "cpu": "Ordinary CPU",
                "nested": {"cores": 2},
                "code": "my-task.py:f-0ab1",
            }
        )
    )
    text = text_of(page_of(tmp_path, samples.trained()))
    assert "Ordinary CPU" in text and "2.13.0" in text and "0.9778" in text
    assert "hasten train my-task.py:f" in text, "the command names the file, not the Task"


def test_report_of_many_trials_and_long_runs_is_small(tmp_path):
    big = samples.faster()
    big["trials"] = big["trials"] * 20
    big["curves"] = {
        arm: [samples.curve(seed, 9.0, 0.97, points=3000) for seed in range(8)] for arm in ("baseline", "tuned")
    }
    assert len(page_of(tmp_path, big).encode()) < 300_000


def test_report_of_a_comparison_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="holds the result of `hasten compare`"):
        page_of(tmp_path, samples.compared())
