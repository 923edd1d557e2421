"""Sphinx extension: a name of the series links to the cell that defines it.

In code, the imports from `scripts.…` and every use of what they bring, and of what the page itself
defines, become links; so do such names in prose. The links are woven into the highlighted HTML at
the places that the syntax tree gives, so text, colours and the copy button stay as they are.
"""

import ast
import html
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from scripts import definitions

BLOCK = re.compile(
    r'(<div class="highlight-i?python3? notranslate"><div class="highlight"><pre>)(.*?)(</pre>)',
    re.DOTALL,
)
PROSE = re.compile(
    r"(?P<skip><script\b.*?</script>|<pre\b.*?</pre>|<(?P<tag>a|h[1-6])\b.*?</(?P=tag)>)"
    r'|(?P<code><code class="docutils literal notranslate"><span class="pre">'
    r"(?P<name>[A-Za-z]\w+)(?:\(\))?</span></code>)",
    re.DOTALL,
)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp)
SCOPES += (ast.DictComp, ast.GeneratorExp)


class Mark(NamedTuple):
    """Where a link goes in a block's plain text: from `start` to `end`, to `module` and `name`."""

    start: int
    end: int
    module: str
    name: str  # "" for the module itself
    defines: bool = False


def bound(node: ast.AST) -> set[str]:
    """The names that a statement or a whole tree assigns, inside functions too."""
    stored = {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return stored | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}


def public(tree: ast.Module) -> dict[str, ast.stmt]:
    """The public functions, classes and constants at a module's top: where each is first made."""
    return {name: node for name, node in reversed(definitions(tree)) if not name.startswith("_")}


class Series:
    """What each module of the series defines, and where it has other names from.

    A module goes by its path below `scripts`: "ch01_attention", "translate", "fast.translating".
    """

    def __init__(self, folder: Path):
        paths = [path for path in sorted(Path(folder).rglob("*.py")) if path.stem != "__init__"]
        trees = {below(p, folder): ast.parse(p.read_text("utf-8")) for p in paths}
        self.defined = {module: set(public(tree)) for module, tree in trees.items()}
        self.imported = {}
        for module, tree in trees.items():
            for node in imports(tree):
                for alias in node.names:
                    self.imported[module, alias.asname or alias.name] = source(node), alias.name
        unique = [module for module in trees if re.match(r"ch\d\d_|(core|fast)\.", module)]
        self.home = {name: module for module in unique for name in self.defined[module]}

    def resolve(self, module: str, name: str) -> tuple[str, str] | None:
        """The module that defines what `module` calls `name`, and its name there.

        If the name is a module's, that module and "".
        """
        if name in self.defined.get(module, ()):
            return module, name
        inside = f"{module}.{name}".lstrip(".")
        if inside in self.defined:
            return inside, ""
        further = self.imported.get((module, name))
        return self.resolve(*further) if further else None


def below(path: Path, folder: Path) -> str:
    """A module's dotted path below the folder `scripts`."""
    return ".".join(path.relative_to(folder).with_suffix("").parts)


def imports(tree: ast.AST) -> list[ast.ImportFrom]:
    """Its `from scripts… import …`, also those inside functions."""
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 0)
    return [node for node in nodes if (node.module or "").split(".")[0] == "scripts"]


def source(node: ast.ImportFrom) -> str:
    """The dotted path below `scripts` of what it imports from; "" is the package itself."""
    return node.module.removeprefix("scripts").lstrip(".")


def uses(node: ast.AST, hidden: frozenset[str] = frozenset()):
    """Names that are read, except those that a function or a comprehension binds itself."""
    if isinstance(node, SCOPES):
        hidden |= bound(node)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in hidden:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from uses(child, hidden)


def marks(text: str, series: Series, module: str, known: dict[str, tuple[str, str]]) -> list[Mark]:
    """The links of a block of code; `known`, the page's names so far, is brought up to date.

    Code that isn't Python (a shell command, a cell with magics) has none.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:  # the syntax tree counts columns in bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = []
    for node in imports(tree):
        start = text.index(node.module, place(node.lineno, node.col_offset))
        if source(node) in series.defined:
            found.append(Mark(start, start + len(node.module), source(node), ""))
        for alias in node.names:
            target = series.resolve(source(node), alias.name)
            if target:
                start = place(alias.lineno, alias.col_offset)
                found.append(Mark(start, start + len(alias.name), *target))
                known[alias.asname or alias.name] = target
    for node in tree.body:  # a name that the page assigns is no longer the series'
        others = bound(node) if not isinstance(node, (*SCOPES, ast.ClassDef)) else set()
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node not in imports(tree):
            others = {alias.asname or alias.name for alias in node.names}
        for name in others - series.defined.get(module, set()):
            known.pop(name, None)
    for name, node in public(tree).items():
        if name in series.defined.get(module, ()):
            start = place(node.lineno, node.col_offset)
            start = re.compile(rf"\b{name}\b").search(text, start).start()
            found.append(Mark(start, start + len(name), module, name, True))
    for node in uses(tree):
        if node.id in known:
            start = place(node.lineno, node.col_offset)
            found.append(Mark(start, start + len(node.id), *known[node.id]))
    return found


def weave(markup: str, wrapped: dict[tuple[int, int], tuple[str, str]]) -> str:
    """`markup` with tags around the stretches of its plain text that are `wrapped`."""
    out, at = [], 0
    for piece in re.split(r"(<[^>]*>)", markup):
        if piece.startswith("<"):
            out.append(piece)
            continue
        text = html.unescape(piece)
        cuts = {at, at + len(text)}
        cuts |= {cut for stretch in wrapped for cut in stretch if at < cut < at + len(text)}
        for start, end in pairwise(sorted(cuts)):
            part = html.escape(text[start - at : end - at], quote=False)
            inside = (tags for (a, b), tags in wrapped.items() if a <= start and end <= b)
            before, after = next(inside, ("", ""))
            out.append(f"{before}{part}{after}")
        at += len(text)
    return "".join(out)


def page_of(module: str) -> str:
    """The page that shows a module."""
    folder = "notebooks" if re.match(r"ch\d\d_", module) else "scripts"
    return f"{folder}/{module.replace('.', '/')}"


def link_names(body: str, series: Series, module: str, address) -> str:
    """A page's body with its names linked; `address(module)` is (its page's address, its title)."""
    known = {name: (module, name) for name in series.defined.get(module, ())}
    anchored = set()

    def opening(mark: Mark) -> str:
        page, title = address(mark.module)
        target = f"#def-{mark.name}" if mark.name else ""
        if mark.defines and mark.name not in anchored:
            anchored.add(mark.name)
            return f'<a class="name" id="def-{mark.name}" href="{target}">'
        if mark.module == module:
            return f'<a class="name" href="{target}">'
        return f'<a class="name" href="{page}{target}" title="{html.escape(title)}">'

    def code(match: re.Match) -> str:
        text = html.unescape(re.sub(r"<[^>]*>", "", match[2]))
        found = marks(text, series, module, known)
        wrapped = {(mark.start, mark.end): (opening(mark), "</a>") for mark in found}
        return match[1] + weave(match[2], wrapped) + match[3]

    def prose(match: re.Match) -> str:
        name = match["name"]
        if match["skip"] or not name:
            return match[0]
        telling = "_" in name or name != name.lower()
        target = known.get(name) or (telling and name in series.home and (series.home[name], name))
        if not target:
            return match[0]
        return opening(Mark(0, 0, *target)) + match["code"] + "</a>"

    return PROSE.sub(prose, BLOCK.sub(code, body))


def write_page(app, page, template, context, doctree):
    """Before a page is written: link its names."""
    if "body" not in context:
        return
    folder, _, name = page.partition("/")
    module = name.replace("/", ".") if folder in ("notebooks", "scripts") else ""

    def address(target: str) -> tuple[str, str]:
        docname = page_of(target)
        return app.builder.get_relative_uri(page, docname), app.env.titles[docname].astext()

    context["body"] = link_names(context["body"], app.series, module, address)


def read_series(app):
    app.series = Series(Path(app.srcdir, "scripts"))


def setup(app):
    app.connect("builder-inited", read_series)
    app.connect("html-page-context", write_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
