"""The site that `make book` makes: complete, linked, and without need of another host."""

import ast
import json
import posixpath
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from conftest import CHAPTERS, MODULES, ROOT

sys.path[:0] = [str(ROOT / "docs/_ext"), str(ROOT / "docs")]
from cards import CARDS, cards, folded  # noqa: E402
from names import Series, imports, link_names, marks, page_of, source  # noqa: E402

from notebooks import VEGALITE, prepared  # noqa: E402

LOADS = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src"}


class Page(HTMLParser):
    """What a page holds: its anchors, links, loaded files, charts, and the names that it links."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links, self.loads, self.charts, self.names = set(), [], [], [], []
        self.inside, self.data = "", ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids.add(given.get("id"))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
            if given.get("class") == "name":
                self.names.append(given["href"])
        if given.get(LOADS.get(tag)) and given.get("rel") not in ("next", "prev", "canonical"):
            self.loads.append(given[LOADS[tag]])
        if tag == "figure" and given.get("class") == "chart":
            self.charts.append({})
        if tag == "img" and self.charts and not self.charts[-1]:
            self.charts[-1] = {"src": given["src"], "alt": given["alt"]}
        self.inside, self.data = given.get("type", ""), ""

    def handle_data(self, data):
        self.data += data

    def handle_endtag(self, tag):
        if tag == "script" and self.inside == "application/json":
            self.charts[-1]["spec"] = json.loads(self.data)
        self.inside = ""


def pages(site: Path) -> dict[str, Page]:
    """The site's pages by address; the living page and the walk have tests of their own."""
    found = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    names = [name for name in found if not name.startswith(("_static/", "living/", "walk/"))]
    return {name: Page((site / name).read_text("utf-8")) for name in names}


def broken(site: Path, book: dict[str, Page]) -> list[str]:
    """Links and files that lead nowhere, as "page: address"."""
    wrong = []
    for name, page in book.items():
        for address in {*page.links, *page.loads}:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = unquote(urljoin(name, parts.path)) if parts.path else name
            known = parts.fragment in {"", *book[target].ids} if target in book else True
            if not (site / target).is_file() or not known:
                wrong.append(f"{name}: {address}")
    return wrong


@pytest.fixture(scope="session")
def book(site) -> dict[str, Page]:
    return pages(site)


@pytest.fixture(scope="session")
def written() -> Series:
    """What the chapters and modules define, read from their scripts."""
    return Series(ROOT / "scripts")


def notebook(chapter: Path) -> dict:
    return json.loads((ROOT / "notebooks" / f"{chapter.stem}.ipynb").read_text("utf-8"))


def test_every_chapter_is_there_in_order_with_search_and_dark_mode(site, book):
    front = (site / "index.html").read_text("utf-8")
    listed = re.findall(
        r'class="toctree-l1"><a class="reference internal" href="notebooks/(\w+)', front
    )
    assert listed == [path.stem for path in CHAPTERS]
    for path in CHAPTERS:
        text = (site / f"notebooks/{path.stem}.html").read_text("utf-8")
        assert 'rel="prev"' in text and 'rel="next"' in text
        assert "theme-switch" in text and "search-button" in text and "copybutton.js" in text
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 80e6


def test_every_link_and_file_is_there(site, book):
    names = ["living/index.html", "walk/index.html"]
    living = {name: Page((site / name).read_text("utf-8")) for name in names}
    assert len(book) > len(CHAPTERS) and not broken(site, book | living)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_every_chart_has_its_json_its_picture_and_its_words(chapter, site, book):
    outputs = [o for cell in notebook(chapter)["cells"] for o in cell.get("outputs", [])]
    specs = [o["data"][VEGALITE] for o in outputs if VEGALITE in o.get("data", {})]
    charts = book[f"notebooks/{chapter.stem}.html"].charts
    assert specs and [chart["spec"] for chart in charts] == specs
    for chart in charts:
        picture = site / urljoin(f"notebooks/{chapter.stem}.html", chart["src"])
        assert picture.read_bytes().startswith(b"\x89PNG") and len(chart["alt"]) > 10
    text = (site / f"notebooks/{chapter.stem}.html").read_text("utf-8")
    assert "_static/charts.js" in text and "_static/vega.js" in text


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_every_import_leads_to_what_it_imports(chapter, book, written):
    page = book[f"notebooks/{chapter.stem}.html"]
    lines = imports(ast.parse(chapter.read_text("utf-8")))
    assert lines
    for line in lines:
        for alias in line.names:
            if line.module == "scripts" and alias.name in ("Late", "ROOT", "runs_folder"):
                continue  # the package itself has no page
            home, name = written.resolve(source(line), alias.name)
            page_there = posixpath.relpath(page_of(home), "notebooks") + ".html"
            address = f"{page_there if home != chapter.stem else ''}{f'#def-{name}' * bool(name)}"
            assert address in page.names, f"{line.module}.{name}"


def test_every_definition_has_its_anchor(book, written):
    for module, names in written.defined.items():
        missing = {f"def-{name}" for name in names} - book[f"{page_of(module)}.html"].ids
        assert not missing, f"{module}: {missing}; is the notebook in step with its script?"


def test_one_page_lists_the_modules_beside_the_chapters(site, book):
    plain = [path for path in MODULES if path.name != "__init__.py" and path not in CHAPTERS]
    wanted = {path.relative_to(ROOT / "scripts").with_suffix(".html").as_posix() for path in plain}
    assert "core/checkpoints.html" in wanted and wanted <= set(book["scripts/index.html"].links)
    text = (site / "scripts/index.html").read_text("utf-8")
    assert "Crash-safe saving and loading" in text and "What a run needs" in text
    assert "scripts/index.html" in book["index.html"].links
    for path in plain:
        assert (site / path.relative_to(ROOT)).read_bytes() == path.read_bytes()


def test_chapters_can_be_downloaded_as_they_are(site, book):
    for path in CHAPTERS:
        links = book[f"notebooks/{path.stem}.html"].links
        for link, original in {
            f"../_sources/notebooks/{path.stem}.ipynb": ROOT / f"notebooks/{path.stem}.ipynb",
            f"../scripts/{path.name}": path,
        }.items():
            assert link in links
            assert (site / "notebooks" / link).resolve().read_bytes() == original.read_bytes()


def test_the_pages_behind_the_readme_are_there(site, book):
    assert "You are a student." in (site / "index.html").read_text("utf-8")
    pages = "setup", "measured", "speedrun", "ladder", "fixed", "teach", "compared", "contribute"
    for name in pages:
        text = (site / f"docs/{name}.html").read_text("utf-8")
        assert f"docs/{name}.html" in book["index.html"].links and "](" not in text, name
    assert "test_erratum_28" in (site / "docs/fixed.html").read_text("utf-8")


def test_every_chapter_ends_with_its_cards_and_one_page_has_all(site):
    every = (site / "docs/cards.html").read_text("utf-8")
    for number, path in enumerate(CHAPTERS):
        text = (site / f"notebooks/{path.stem}.html").read_text("utf-8")
        wanted = re.findall(r'id="card-\w+"><summary>.+?</summary>', folded(number))
        shown = re.findall(r'<details class="recall" (id=.+?</summary>)', text)
        assert shown == wanted and all(one in every for one in wanted)
        assert "_static/cards.js" in text and '"../docs/cards.html"' in text


def test_every_chapter_has_three_to_five_questions_and_none_is_asked_twice():
    some = cards()
    assert [*some] == [*range(len(CHAPTERS))]
    every = [card for chapter in some.values() for card in chapter]
    assert all(3 <= len(chapter) <= 5 for chapter in some.values())
    assert len({card["question"] for card in every}) == len(every)
    for card in every:
        assert card["question"].endswith("?") and "<" not in card["question"] + card["answer"]
        assert re.fullmatch(r"[A-Z].+\.", card["answer"]), card["answer"]


@pytest.mark.parametrize(
    ("lost", "instead"),
    [
        (r"\[\[07\]\][^\[]+", ""),  # a chapter
        (r"\[\[03\]\][^\[]+(?=\[\[03)", ""),  # all its cards but the last
        (r'(?m)^answer = "A token.+"$', ""),
        (r'(?m)^answer = "A token.+"$', 'answer = ""'),
    ],
)
def test_the_build_stops_where_cards_or_an_answer_are_missing(lost, instead, tmp_path):
    text = CARDS.read_text("utf-8")
    broken = re.sub(lost, instead, text)
    assert broken != text
    (tmp_path / "cards.toml").write_text(broken, "utf-8")
    with pytest.raises(ValueError, match="needs 3 to 5 questions with answers"):
        cards(tmp_path / "cards.toml")


@pytest.fixture
def series(tmp_path) -> Series:
    """Two small chapters and a module."""
    (tmp_path / "ch01_one.py").write_text(
        "from scripts.tools import draw\ndef attend(x):\n    return x\nLIMIT = 3\n_hidden = 1\n"
    )
    (tmp_path / "ch02_two.py").write_text("from scripts.ch01_one import attend\ndef twice(): ...\n")
    (tmp_path / "tools.py").write_text("def draw(): ...\n")
    return Series(tmp_path)


def test_names_lead_home_and_shadowed_ones_nowhere(series):
    code = (
        "from scripts.ch01_one import (\n    LIMIT,\n    attend as look,\n)\n"
        "def twice(LIMIT):\n    return look(LIMIT)\n"
        "'ä'; look(LIMIT).look(look=1)\n"
        "LIMIT = 4\nprint(LIMIT)\n"
    )
    found = marks(code, series, "ch02_two", {})
    linked = [(code[m.start : m.end], m.module, m.name, code[: m.start].count("\n")) for m in found]
    assert sorted(linked, key=lambda one: one[3:] + one[:1]) == [
        ("scripts.ch01_one", "ch01_one", "", 0),
        ("LIMIT", "ch01_one", "LIMIT", 1),
        ("attend", "ch01_one", "attend", 2),
        ("twice", "ch02_two", "twice", 4),
        ("look", "ch01_one", "attend", 5),
        ("look", "ch01_one", "attend", 6),
    ]
    assert marks("%time no python", series, "ch02_two", {}) == []


def test_links_are_woven_into_the_colours(series):
    block = '<div class="highlight-ipython3 notranslate"><div class="highlight"><pre>{}</pre>'
    body = block.format(
        '<span class="kn">from</span> <span class="nn">scripts.ch01_one</span> '
        '<span class="kn">import</span> <span class="n">attend</span>\n'
        '<span class="n">attend</span><span class="p">(</span><span class="mi">1</span> &lt; 2)\n'
    )
    body += (
        '<p><code class="docutils literal notranslate"><span class="pre">attend</span></code></p>'
    )
    linked = link_names(body, series, "ch02_two", lambda m: (f"{m}.html", "One & two"))
    a = '<a class="name" href="ch01_one.html#def-attend" title="One &amp; two">'
    assert linked.count(a) == 3
    assert '<span class="nn"><a class="name" href="ch01_one.html" ' in linked
    assert f'<span class="n">{a}attend</a></span><span class="p">(' in linked and "&lt; 2" in linked
    assert re.sub(r"</?a[^>]*>", "", linked) == body


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    command = [sys.executable, str(ROOT / "docs/build.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and "holds something else" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_chart_without_its_picture_stops_the_build():
    output = {"data": {VEGALITE: {"title": "T"}}, "metadata": {}}
    cell = {"cell_type": "code", "metadata": {}, "source": [], "outputs": [output]}
    with pytest.raises(KeyError, match="image/png"):
        prepared({"cells": [cell]}, "ch00", "../")
