"""The book in a browser: every page drawn, typeset and legible, and used as a reader uses it.

docs/browser/site.mjs does the work in headless Chromium. BOOK_PICTURES=folder keeps screenshots.
"""

import os
import shutil

import pytest
from browsing import chromium, run_script, serving
from conftest import CHAPTERS, ROOT

SCRIPT = ROOT / "docs/browser/site.mjs"
CHAPTER_PAGES = [f"notebooks/{path.stem}.html" for path in CHAPTERS]
SMALL = "notebooks/ch09_training_run.html"  # few charts
TALL = "notebooks/ch15_looking_inside.html"  # the map with its pickers


def read(task: str, home: str, **request):
    """The answer of a task of site.mjs."""
    request |= {"chromium": chromium(), "home": home, "pictures": os.environ.get("BOOK_PICTURES")}
    return run_script(SCRIPT, task, request=request)


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
    are read.
    """
    found = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    names = [name for name in found if not name.startswith(("_static/", "living/", "walk/"))]
    names.sort(key=lambda name: -(site / name).stat().st_size)  # the long ones first
    modules = [name for name in names if name.startswith("scripts/")]
    brief = [name for name in CHAPTER_PAGES if CHAPTER_PAGES.index(name) % 8] + modules[1:6]
    whole = [name for name in names if name not in (*brief, *modules[6:])]
    answer = read("pages", home, pages=whole) | read("pages", home, pages=brief, brief=True)
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
def test_a_card_that_was_answered_is_remembered_and_comes_back(home):
    answer = read("recall", home, page=CHAPTER_PAGES[1])
    assert answer["complaints"] == answer["axe"] == []
    assert answer["kept"] == "I knew it" and answer["read"]
    assert answer["when"] == ["Comes back tomorrow.", "Due today.", ""]
    link, way = answer["sidebar"]
    assert link == "Recall cards (1 due)" and "1 of 10 chapters read" in way
    assert "Next: 0 · Start here" in way
    assert answer["due"] == [1, 2] and answer["next"]
    assert answer["last"].startswith("No card is due.") and answer["all"] > 3 * len(CHAPTER_PAGES)


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


PLANTED = {  # what is put at the end of a page, and what is then found
    '<img src="http://example.org/x.png" alt="">': "foreign: http://example.org/x.png",
    "<script>gone()</script>": "ReferenceError: gone is not defined",
    r'<p class="math">\(\frac{1}\)</p>': "has an error",
    "<p>$$x$$</p>": "$$ is left in the text",
    f'<div class="cell_input"><pre>{140 * "x"}</pre></div>': "a line is too long for the page: xxx",
    '<p style="color: #888">pale</p>': "light: color-contrast: ",
    '<button id="no-name"></button>': "button-name: ",
    '<p style="width: 700px">wide</p>': "pixels stick out on a phone",
}


@pytest.mark.audit
def test_what_is_planted_is_found(site, tmp_path):
    copy = tmp_path / "site"
    shutil.copytree(site, copy, ignore=shutil.ignore_patterns("living", "walk", "_sources"))
    text = (copy / SMALL).read_text("utf-8")
    (copy / SMALL).write_text(text.replace("</article>", "".join(PLANTED) + "</article>"), "utf-8")
    (copy / "_static/charts.js").unlink()
    with serving(copy) as home:
        found = read("pages", home, pages=[SMALL], patience=8000)[SMALL]["faults"]
    for wanted in (*PLANTED.values(), "404: ", "isn't drawn"):
        assert any(wanted in one for one in found), f"{wanted} isn't in {found}"
