"""Builds the site: `python docs/build.py [FOLDER]`, by default docs/_build/html.

Sphinx reads a folder that is laid out like the repository: the notebooks as they are stored, a page
for each module that isn't a chapter, one that lists these, the records, the models' cards. Nothing
is executed, and the site asks no other host for anything.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from contents import parts

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LIVING = DOCS / "living/build.py"  # makes the page that translates, and the walk beside it
READ = [
    "notebooks/*.ipynb",
    "scripts/**/*.py",
    "scripts/fast/*.c",
    "results/**/*.json",
    "tests/*.py",
    "models/*/*.md",
]
READ += ["docs/*.md", "*.txt", "*.toml", "*.yml", "LICENSE", "CITATION.cff"]
READ += ["scripts/corpora/*.txt", "scripts/corpora/*.toml"]
MODULES = """\
# Modules

What the chapters use without explaining it, and what builds on them. A chapter's own module is on
its page.
"""
RECORDS_LINK = ("results/)", "results/index.md)")  # a folder's link, as the site has it
COMMANDS = "Commands: `python -m scripts.NAME --help` says what each takes."
RECORDS = """\
# Records

What took long was run once. A record holds the command that repeats it, what it ran on, and what
came out.
"""


def chapter_list() -> str:
    """The chapters by parts: a table of contents, and a list with what each promises."""
    trees, promises = [], []
    for part, chapters in parts().items():
        contents = [f"{one.name} <notebooks/{one.stem}>" for one in chapters]
        trees += ["```{toctree}", ":hidden:", f":caption: {part}", "", *contents, "```", ""]
        promises.append(f"### {part}\n")
        promises += [
            f"**[{one.name}](notebooks/{one.stem}.ipynb)**\n: {one.promise}\n" for one in chapters
        ]
    short = "● marks the short way: in these chapters you build, train and judge a translator."
    return "\n".join([*trees, f"{short} What you take away from each:", "", *promises])


def record_page(records: list[Path]) -> str:
    """A page that lists the records: file, day, machine and command."""
    parts = [RECORDS]
    for path in records:
        record = json.loads(path.read_text("utf-8"))
        day, device, command = record["date"][:10], record["device"], record["repeat"]
        parts.append(f"**[{path.name}]({path.name})** · {day} · {device}\n")
        parts.append(f"```text\n{command}\n```\n")
    return "\n".join(parts)


def about(path: Path) -> str:
    """The first line of a module's docstring."""
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))).split("\n")[0]


def module_page(path: Path, folder: Path) -> str:
    """A page that shows a module that isn't a chapter; one page lists it, but no menu."""
    place = path.relative_to(folder)
    parts = ["---\norphan: true\n---", f"# scripts/{place}"]
    parts.append(f"[Modules]({'../' * (len(place.parts) - 1)}index.md)")
    parts.append(f"```{{literalinclude}} {path.name}\n:language: python\n```\n")
    return "\n\n".join(parts)


def module_pages(folder: Path) -> None:
    """A page for each module in `folder` that isn't a chapter, and one that lists them."""
    paths = [p for p in sorted(folder.rglob("*.py")) if not re.match(r"ch\d\d_|__", p.name)]
    text = [MODULES]
    for package in sorted({path.parent for path in paths}):
        words = about(package / "__init__.py") if package != folder else COMMANDS
        text.append(f"## {Path('scripts', package.relative_to(folder))}\n\n{words}\n")
        for path in (path for path in paths if path.parent == package):
            page = path.with_suffix(".md")
            page.write_text(module_page(path, folder), "utf-8")
            text.append(f"**[{path.name}]({page.relative_to(folder)})**\n: {about(path)}\n")
    (folder / "index.md").write_text("\n".join(text), "utf-8")


def readme_section(name: str) -> str:
    """README.md's section of that name, without its heading."""
    text = (ROOT / "README.md").read_text("utf-8")
    return text.split(f"\n## {name}\n")[1].split("\n## ")[0].replace(*RECORDS_LINK).strip()


def lay_out(source: Path) -> None:
    """Fills the folder `source` with what Sphinx reads."""
    for path in sorted(path for pattern in READ for path in ROOT.glob(pattern)):
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    module_pages(source / "scripts")
    records = sorted((source / "results").glob("*.json"))
    (source / "results/index.md").write_text(record_page(records), "utf-8")

    for page in (source / "docs").glob("*.md"):
        page.write_text(page.read_text("utf-8").replace(*RECORDS_LINK), "utf-8")
    (source / "docs/index.md").unlink()  # it becomes the site's front page

    index = (DOCS / "index.md").read_text("utf-8")
    index = re.sub(r"<!-- readme: (.+?) -->", lambda found: readme_section(found[1]), index)
    index = re.sub(r"<!-- chapters: .*? -->", lambda _: chapter_list(), index)
    (source / "index.md").write_text(index, "utf-8")
    shutil.copy2(DOCS / "architecture.png", source)


def put_beside(target: Path) -> None:
    """Scripts, the living page, the walk, and what draws charts and math."""
    import altair
    import vl_convert

    shutil.rmtree(target, ignore_errors=True)
    (target / "_static").mkdir(parents=True)
    version = ".".join(altair.SCHEMA_VERSION.split(".")[:2])  # as in scripts/book/look.py
    library = vl_convert.javascript_bundle(vl_version=version)
    library = library.replace("schema/vega/v5.json", "schema/vega/v6.json")  # 6 is what draws
    # Inside a function its names can't clash with those of Sphinx's scripts.
    (target / "_static/vega.js").write_text(f"(() => {{\n{library}\n}})();\n", "utf-8")
    mathjax = Path(find_spec("sphinx-mathjax-offline").origin).parent / "static/mathjax"
    # Formulas are spoken in English; a page loads the packages that it needs, one by one.
    unused = shutil.ignore_patterns("[!be]?.json", "es.json", "all-packages.js")
    for part in ("input/tex", "output/chtml", "a11y", "sre"):
        shutil.copytree(mathjax / part, target / "_static/mathjax" / part, ignore=unused)
    shutil.copy2(mathjax / "tex-chtml.js", target / "_static/mathjax")
    shutil.copytree(ROOT / "scripts", target / "scripts", ignore=shutil.ignore_patterns("__*"))
    command = [sys.executable, str(LIVING), str(target / "living"), "--walk"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def build(target: Path) -> None:
    """The whole site, from scratch, in place of one that was built before."""
    others = {path.name for path in target.glob("*")} - {"living", "walk"}
    if others and not (target / "_static/vega.js").is_file():
        raise SystemExit(f"{target} holds something else: name an empty or a new folder")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "--jobs", "2", "--builder", "html"]
    with tempfile.TemporaryDirectory() as work:
        source, doctrees = f"{work}/source", f"{work}/doctrees"
        lay_out(Path(source))
        put_beside(target)
        options += ["--conf-dir", str(DOCS), "--doctree-dir", doctrees, source, str(target)]
        done = subprocess.run([sys.executable, "-m", "sphinx", *options])
    if done.returncode:
        raise SystemExit("The site has faults, named above.")
    for path in target.rglob("*.map"):  # megabytes for the theme's developers alone
        path.unlink()


if __name__ == "__main__":
    begin = time.monotonic()
    folder = Path(sys.argv[1] if sys.argv[1:] else DOCS / "_build/html").resolve()
    build(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}/index.html: {size / 1e6:.0f} MB in {time.monotonic() - begin:.0f} s")
