"""The book in a browser: every page drawn, typeset and legible, and used as a reader uses it.

docs/browser/site.mjs does the work in headless Chromium. BOOK_PICTURES=folder keeps screenshots of
the pages read, at the size of a desktop and of a phone, in light and in dark mode.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from browsing import chromium, run_script, serving
from conftest import CHAPTERS, ROOT

SCRIPT = ROOT / "docs/browser/site.mjs"
CHAPTER_PAGES = [f"notebooks/{path.stem}.html" for path in CHAPTERS]
SMALL = "notebooks/ch09_training_run.html"  # few charts
TALL = "notebooks/ch15_looking_inside.html"  # the map with its pickers


def read(task: str, home: str, **request):
    """The answer of a task of site.mjs."""
    return run_script(SCRIPT, task, request={"chromium": chromium(), "home": home} | request)


def faults(answer: dict) -> dict[str, list[str]]:
    """The pages with faults in an answer of the task "pages"."""
    return {name: page["faults"] for name, page in answer.items() if page["faults"]}


@pytest.fixture(scope="module")
def home(site):
    with serving(site) as address:
        yield address


@pytest.mark.audit
def test_pages_are_drawn_typeset_legible_and_ask_no_stranger(site, home):
    """Console, requests, charts, equations; axe-core in light and dark mode, a phone's width.

    Those last three take twice as long as all the rest: only every eighth chapter and each page
    that is one of a kind has them. Pages of modules come from one template: only the longest few
    are read. With BOOK_WHOLE=1 every page is read in full.
    """
    found = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    names = [name for name in found if not name.startswith(("_static/", "living/"))]
    names.sort(key=lambda name: -(site / name).stat().st_size)  # the long ones first
    modules = [name for name in names if name.startswith("scripts/")]
    brief = [name for name in CHAPTER_PAGES if CHAPTER_PAGES.index(name) % 8] + modules[1:6]
    left_out = modules[6:]
    if os.environ.get("BOOK_WHOLE"):
        brief, left_out = [], []
    pictures = os.environ.get("BOOK_PICTURES")
    if pictures:
        Path(pictures).mkdir(parents=True, exist_ok=True)
    pictures = pictures and str(Path(pictures).resolve())
    whole = [name for name in names if name not in (*brief, *left_out)]
    answer = read("pages", home, pages=whole, pictures=pictures)
    if brief:
        answer |= read("pages", home, pages=brief, pictures=pictures, brief=True)
    assert {*CHAPTER_PAGES, "index.html"} <= set(answer) and not faults(answer)
    for name, page in answer.items():
        text = (site / name).read_text("utf-8")
        assert page["charts"] == text.count('<figure class="chart">')
        assert page["equations"] == text.count('class="math notranslate')
    assert all(answer[name]["charts"] for name in CHAPTER_PAGES)


def test_the_front_page_and_a_chapter_are_drawn_and_legible(home):
    answer = read("pages", home, pages=["index.html", SMALL])
    assert not faults(answer) and answer[SMALL]["charts"]


def test_a_reader_searches_unfolds_copies_and_turns_pages(home):
    answer = read("reading", home)
    assert answer["complaints"] == answer["axe"] == []
    assert (answer["system"], answer["kept"]) == ("dark", "light")
    assert any("ch06_training" in address for address in answer["found"][:3])
    assert answer["unfolded"]
    copied, shown = answer["copied"]
    assert copied.strip() == shown.strip() and len(copied) > 20
    assert answer["place"] == "notebooks/ch04_encoder_decoder.html#def-make_model"
    assert answer["definition"] == ["make_model", True]  # it is on the screen


@pytest.mark.audit
def test_each_picker_of_the_map_changes_it(home):
    changed = read("pickers", home, page=TALL)
    assert changed == {"sentence": True, "kind": True, "layer": True, "head": True}


@pytest.mark.audit
def test_without_scripts_pictures_and_text_are_there(home):
    assert read("plain", home, pages=CHAPTER_PAGES) == []


@pytest.mark.audit
def test_the_book_works_from_a_folder(site):
    home = f"{site.as_uri()}/"
    answer = read("pages", home, pages=[CHAPTER_PAGES[1], SMALL], brief=True)
    assert not faults(answer) and all(page["charts"] for page in answer.values())
    answer = read("folder", home)
    assert answer["complaints"] == []
    assert any("ch06_training" in address for address in answer["found"])


# --- Faults, planted in copies of the site ---


def emptied(text: str) -> str:
    """The page without the data of its last chart."""
    start = text.rindex('<script type="application/json">') + len(
        '<script type="application/json">'
    )
    end = text.index("</script>", start)
    spec = json.loads(text[start:end])
    spec["datasets"] = {name: [] for name in spec["datasets"]}
    return text[:start] + json.dumps(spec) + text[end:]


def ending_with(markup: str):
    """A page's text to the same with `markup` at the end of its prose."""
    return lambda text: text.replace("</article>", f"{markup}</article>")


FONT = "@font-face { font-family: f; src: url(http://example.org/f.woff) } h1 { font-family: f }"
STRANGE = '<img src="http://example.org/x.png" alt="">'
HEADLESS = '<table><tr style="display: none"><th>h</th></tr><tr><td>1</td></tr></table>'
LONG = f'<div class="cell_input"><pre>{140 * "x"}</pre></div>'
IN_CHAPTER = {  # what is planted, and what is found then
    "script": (str, ["404: _static/charts.js", "isn't drawn"]),
    "data": (emptied, ["has no visible marks"]),
    "picture": (ending_with(STRANGE), ["foreign: http://example.org/x.png"]),
    "font": (ending_with(f"<style>{FONT}</style>"), ["foreign: http://example.org/f.woff"]),
    "error": (ending_with("<script>gone()</script>"), ["ReferenceError: gone is not defined"]),
    "equation": (ending_with(r'<p class="math">\(\frac{1}\)</p>'), ["has an error"]),
    "heading": (ending_with(HEADLESS), ["a table's heading can't be seen: h"]),
    "dollars": (ending_with("<p>$$x$$</p>"), ["$$ is left in the text"]),
    "long": (ending_with(LONG), ["a line is too long for the page: xxx"]),
}
IN_PROSE = {
    "pale": (ending_with('<p style="color: #888">pale</p>'), ["light: color-contrast: 1 × "]),
    "dim": (ending_with('<p style="color: #444">dim</p>'), ["dark: color-contrast: 1 × "]),
    "nameless": (ending_with('<button id="no-name"></button>'), ["button-name: 1 × "]),
    "wide": (ending_with('<p style="width: 700px">wide</p>'), ["pixels stick out on a phone"]),
}


@pytest.mark.audit
@pytest.mark.parametrize(
    ("page", "planted", "brief"),
    [(SMALL, IN_CHAPTER, True), ("results/index.html", IN_PROSE, False)],
    ids=["in a chapter", "in prose"],
)
def test_what_is_planted_is_found_and_nothing_else(page, planted, brief, site, tmp_path):
    ignored = shutil.ignore_patterns("living", "_sources", "*.html")
    for name, (change, _) in planted.items():
        shutil.copytree(site, tmp_path / name, ignore=ignored, copy_function=os.link)
        (tmp_path / name / page).write_text(change((site / page).read_text("utf-8")), "utf-8")
    if "script" in planted:
        (tmp_path / "script/_static/charts.js").unlink()
    with serving(tmp_path) as home:
        names = [f"{name}/{page}" for name in planted]
        answer = read("pages", home, pages=names, brief=brief, patience=8000)
    for name, (_, wanted) in planted.items():
        found = [one.replace(f"{home}{name}/", "") for one in answer[f"{name}/{page}"]["faults"]]
        for part in wanted:
            assert any(part in one for one in found), f"{name}: {part} isn't in {found}"
        expected = (*wanted, "WARN ", "Error: <") if name == "data" else wanted  # Vega's own words
        others = [one for one in found if not any(part in one for part in expected)]
        assert not others, f"{name}: {others}"
        if name == "script":
            assert len(found) == 1 + answer[f"{name}/{page}"]["charts"]
