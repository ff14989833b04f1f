"""The page in a real browser: a drawn digit is sent and its scores are shown."""

import shutil
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("httpx")

from helpers.served import running  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ONE = [(150, 40), (140, 90), (140, 150), (140, 200), (140, 245)]  # strokes of the digit 1, in pixels of the canvas


@pytest.fixture(scope="module")
def page(exported):
    """The page of a server in a browser; an error of its script fails the test."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with running(exported) as (client, _, _), playwright.sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 760})
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(str(client.base_url))
        yield page
        browser.close()
        assert not errors


@pytest.mark.slow
def test_drawn_digit_is_recognized(page):
    box = page.locator("#drawing").bounding_box()
    page.mouse.move(box["x"] + ONE[0][0], box["y"] + ONE[0][1])
    page.mouse.down()
    for x, y in ONE[1:]:
        page.mouse.move(box["x"] + x, box["y"] + y, steps=5)
    page.mouse.up()
    page.wait_for_selector(".bar.best")
    shares = page.locator(".bar").all_inner_texts()
    assert len(shares) == 10 and page.locator(".best span").first.inner_text() == "1"
    page.locator("#clear").click()
    assert page.locator(".bar").count() == 0


@pytest.mark.slow
def test_edited_json_is_sent_and_a_refusal_is_shown(page):
    page.fill("#body", '{"inputs": [[1, 2]]}')
    page.click("#send")
    page.wait_for_selector("#error:not(:empty)")
    assert "must be [batch, 64]" in page.locator("#error").inner_text()
    page.fill("#body", f'{{"inputs": [[{", ".join(["0.5"] * 64)}]]}}')
    page.click("#send")
    page.wait_for_selector(".bar.best")
    assert page.locator("#error").inner_text() == ""


@pytest.mark.slow
def test_uploaded_image_is_sent(page, tmp_path):
    from PIL import Image

    path = Path(tmp_path, "digit.png")
    Image.new("L", (8, 8), 128).save(path)
    page.locator("#clear").click()
    page.set_input_files("#file", path)
    page.wait_for_selector(".bar.best")
    assert page.locator("#time").inner_text().endswith("ms")
