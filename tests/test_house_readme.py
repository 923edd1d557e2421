"""README.md and docs/*.md are true: their tables, links, commands and names."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import CHAPTERS, ROOT
from PIL import Image

from scripts.corpora.load import load_corpus

sys.path.insert(0, str(ROOT / "docs"))
from readme import (  # noqa: E402
    BLOCKS,
    FIXED,
    LIVING_PICTURE,
    PICTURE,
    README,
    block,
    chart_digest,
    erratum_tests,
    living_digest,
)

PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_tables_are_those_of_chapters_and_records(name):
    page, make = BLOCKS[name]
    text = page.read_text("utf-8")
    begin, end = block(name, text)
    assert text[begin:end].strip() == make(), "run: python docs/readme.py"


def test_readme_is_short():
    assert len(README.read_text("utf-8").splitlines()) <= 200


def test_fixed_here_has_every_row_and_every_row_its_test():
    rows = re.findall(r"^\| (\d+) \| .+ \| (\d+) \|(.*)\|$", FIXED.read_text("utf-8"), re.MULTILINE)
    assert [int(row) for row, *_ in rows] == [*range(1, 29)]
    for row, chapter, cell in rows:
        named = [(file, name) for name, file in re.findall(r"\[`(\w+)`\]\(([^)]+)\)", cell)]
        assert named and named == erratum_tests().get(int(row)), "run: python docs/readme.py"
        assert all(f"test_ch{int(chapter):02d}_" in file for file, _ in named), f"erratum {row}"


def test_names_said_to_be_kept_are_there():
    text = FIXED.read_text("utf-8").split("at home here:")[1].split("have kept")[0]
    names = set(re.findall(r"`(\w+)`", text))
    code = "\n".join(path.read_text("utf-8") for path in CHAPTERS)
    assert len(names) == 17 and not names - {*re.findall(r"^(?:def|class) (\w+)", code, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_tasks_and_modules_are_there(page):
    text = page.read_text("utf-8")
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        # What the site's front page links to lies beside it only on the site.
        on_site = page.name == "index.md"
        assert link.startswith("https://") or on_site or (page.parent / link).exists(), link
    makefile = (ROOT / "Makefile").read_text("utf-8")
    tasks = set(re.findall(r"^([\w-]+):.*##", makefile, re.MULTILINE))
    assert {*re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE)} <= tasks
    modules = set(re.findall(r"\bscripts/[\w/]+\.py\b", text))
    modules |= {f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (scripts[\w.]+)", text)}
    modules = {name for name in modules if "NAME" not in name and "NN" not in name}
    assert not [name for name in modules if not (ROOT / name).is_file()]


def quoted_commands():
    pages = [*PAGES, *CHAPTERS, *(ROOT / "models").glob("*/README.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    return sorted(set(re.findall(r"(?:`|^)python -m (scripts\.[^`\n#]+)", text, re.MULTILINE)))


@pytest.mark.parametrize("command", quoted_commands())
def test_every_command_quoted_can_be_read(command, monkeypatch, tmp_path):
    """Its options exist and have values that fit; mine.tsv is a file of pairs."""
    monkeypatch.chdir(tmp_path)
    lines = ("\t".join(pair) for pair in load_corpus("sample")["train"][:300])
    Path("mine.tsv").write_text("\n".join(lines), "utf-8")
    module, *words = shlex.split(command)
    main = importlib.import_module(module).main
    if words != ["--help"]:
        main.parse(words)


def test_the_layout_names_every_package():
    layout = (ROOT / "docs/contribute.md").read_text("utf-8")
    packages = {path.parent.name for path in (ROOT / "scripts").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/", layout, re.MULTILINE)) == packages


def test_the_first_translation_is_what_the_model_says():
    from scripts.core.models import DEFAULT_MODEL, load_model
    from scripts.fast.translating import translate

    german, english = re.search(
        r'make translate TEXT="(.+?)" +# some seconds: (.+)', README.read_text("utf-8")
    ).groups()
    assert translate(load_model(DEFAULT_MODEL, "cpu"), [german]) == [english]


@pytest.mark.parametrize(
    ("picture", "stamp"),
    [(PICTURE, {"chart": chart_digest}), (LIVING_PICTURE, {"page": living_digest})],
    ids=["chapter 0's chart", "living page"],
)
def test_a_picture_is_of_what_is_there_today(picture, stamp):
    assert picture.stat().st_size < 300_000
    digests = {kind: digest() for kind, digest in stamp.items()}
    assert Image.open(picture).text == digests, "docs/readme.py says how to take it again"
