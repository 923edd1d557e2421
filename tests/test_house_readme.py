"""README.md is true: its tables are those of the chapters, the records and the tests."""

import importlib
import json
import re
import shlex
import sys

import pytest
from conftest import CHAPTERS, ROOT
from PIL import Image

sys.path.insert(0, str(ROOT / "docs"))
from readme import (  # noqa: E402
    BLOCKS,
    LIVING_PICTURE,
    PICTURE,
    README,
    block,
    chart_digest,
    erratum_tests,
    living_digest,
)

ERRATA = [*range(1, 29)]


def errata_rows(text):
    """Rows of "Fixed here": number, chapter, the last cell."""
    section = text.split("## Fixed here")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| .+ \| (\d+) \|(.*)\|$", section, re.MULTILINE)
    return [(int(row), int(chapter), cell.strip()) for row, chapter, cell in rows]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_tables_are_those_of_chapters_and_records(name):
    text = README.read_text("utf-8")
    begin, end = block(name, text)
    assert text[begin:end].strip() == BLOCKS[name](), "run: python docs/readme.py"


def test_every_shipped_model_has_its_result():
    shipped = sorted(path.name for path in (ROOT / "models").iterdir() if path.is_dir())
    text = README.read_text("utf-8")
    assert shipped and all(f"(results/{name}.json)" in text for name in shipped)


def test_fixed_here_has_every_row_and_every_row_its_test():
    rows = errata_rows(README.read_text("utf-8"))
    assert [row for row, _, _ in rows] == ERRATA
    for row, chapter, cell in rows:
        named = [(file, name) for name, file in re.findall(r"\[`(\w+)`\]\(([^)]+)\)", cell)]
        assert named, f"erratum {row} names no test"
        assert named == erratum_tests().get(row), "run: python docs/readme.py"
        assert all(f"test_ch{chapter:02d}_" in file for file, _ in named), f"erratum {row}"


def test_names_said_to_be_kept_are_there():
    text = README.read_text("utf-8").split("at home here:")[1].split("have kept")[0]
    names = re.findall(r"`(\w+)`", text)
    code = "\n".join(path.read_text("utf-8") for path in CHAPTERS)
    defined = set(re.findall(r"^(?:def|class) (\w+)", code, re.MULTILINE))
    assert len(names) == 17 and not set(names) - defined


def test_sizes_of_the_corpora_are_those_of_the_corpora():
    from scripts.corpora.sample import SAMPLE_SIZES

    multi30k = json.loads((ROOT / "results" / "multi30k-corpus.json").read_text("utf-8"))
    for page in (README, ROOT / "scripts" / "ch00_start_here.py"):
        text = page.read_text("utf-8")
        assert re.search(r"([\d,]+) (?:sentence )?pairs", text)[1] == f"{SAMPLE_SIZES['train']:,}"
        train = re.search(r"([\d,]+) (?:training )?captions", text)[1]
        assert train == f"{multi30k['pairs']['train']:,}"


def test_every_link_leads_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README.read_text("utf-8")):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_every_task_named_is_one_of_the_makefile():
    makefile, text = (ROOT / "Makefile").read_text("utf-8"), README.read_text("utf-8")
    targets = set(re.findall(r"^([\w-]+):.*##", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE))
    assert {"run", "test", "translate", "notebooks"} <= named <= targets


@pytest.mark.parametrize("page", ["README.md", "Makefile", "docs/index.md", "docs/build.py"])
def test_every_module_named_is_there(page):
    text = (ROOT / page).read_text("utf-8")
    named = set(re.findall(r"\bscripts/[\w/]+\.py\b", text))
    named |= {f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (scripts[\w.]+)", text)}
    named = {name for name in named if "NAME" not in name and "NN" not in name}
    named -= {"scripts/studies/.py"}  # the name is make's argument
    assert not {name for name in named if not (ROOT / name).is_file()}


def quoted_commands():
    pages = [README, *CHAPTERS, *(ROOT / "models").glob("*/README.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    return sorted(set(re.findall(r"(?:`|^)python -m (scripts\.[^`\n#]+)", text, re.MULTILINE)))


@pytest.mark.parametrize("command", quoted_commands())
def test_every_command_quoted_can_be_read(command):
    """Its options exist and have values that fit."""
    module, *words = shlex.split(command)
    main = importlib.import_module(module).main
    if words != ["--help"]:
        main.parse(words)


def test_the_layout_names_every_package():
    layout = README.read_text("utf-8").split("## Layout")[1].split("## ")[0]
    packages = {path.parent.name for path in (ROOT / "scripts").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/", layout, re.MULTILINE)) == packages


def test_the_names_shown_can_be_imported():
    text = README.read_text("utf-8")
    shown = re.findall(r"from (scripts[\w.]+) import (\w+)", text)
    assert len(shown) >= 2
    for module, name in shown:
        code = (ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8")
        assert re.search(rf"^(?:def|class) {name}\b", code, re.MULTILINE), f"{module}.{name}"


def test_the_first_translation_is_what_the_model_says():
    from scripts.core.models import DEFAULT_MODEL, load_model
    from scripts.fast.translating import translate

    german, english = re.search(
        r'make translate TEXT="(.+?)" +# some seconds: (.+)', README.read_text("utf-8")
    ).groups()
    assert translate(load_model(DEFAULT_MODEL, "cpu"), [german]) == [english]


def test_the_picture_is_the_chart_of_chapter_0():
    assert PICTURE.stat().st_size < 200_000
    assert Image.open(PICTURE).text == {"chart": chart_digest()}, "run: python docs/readme.py"


def test_the_picture_of_the_living_page_is_of_this_page():
    assert LIVING_PICTURE.stat().st_size < 300_000
    assert Image.open(LIVING_PICTURE).text == {"page": living_digest()}, "docs/readme.py says how"


def test_every_study_that_make_offers_is_there():
    text = (ROOT / "Makefile").read_text("utf-8")
    (listed,) = re.findall(r"^study:.*train what is missing of ([\w, ]+):", text, re.MULTILINE)
    names = re.split(", | or ", listed)
    assert len(names) > 5 and f"NAME ?= {names[0]}" in text
    assert not [name for name in names if not (ROOT / f"scripts/studies/{name}.py").is_file()]
