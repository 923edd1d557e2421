"""Sphinx extension: what a notebook needs on the site beyond what MyST-NB does.

A chart becomes a figure that holds its PNG and its Vega-Lite JSON: _static/charts.js draws the JSON
if scripts run. The first cell folds. Links to files of the repository lead to the site's own pages.
"""

import base64
import html
import json
import re
from pathlib import Path

VEGALITE = "application/vnd.vegalite.v5+json"
PROMPT = "Show the first cell: needed only to run this chapter"
NO_EXCERPTS = (
    'if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;'
)
LINKS = {
    r"\]\(\.\./scripts/([\w/]+)\.py\)": r"](../scripts/\1.md)",
    r"\]\(\.\./models/([\w-]+)/?\)": r"](../models/\1/README.md)",
}


def description(spec: dict) -> str:
    """A chart in words: its title and its caption."""
    title = spec["title"]
    return " ".join([f"{title['text']}.", *title["subtitle"]])


def figure(spec: dict, picture: str, size: dict) -> str:
    """The HTML of a chart: `picture` is its PNG's address, `size` the PNG's width and height."""
    data = json.dumps(spec, ensure_ascii=False, separators=(",", ":")).replace("<", r"\u003c")
    edges = "".join(f' {name}="{round(size[name])}"' for name in ("width", "height"))
    alt = html.escape(description(spec))
    return (
        f'<figure class="chart"><img src="{picture}" alt="{alt}"{edges} loading="lazy">'
        f'<script type="application/json">{data}</script></figure>'
    )


def prepared(notebook: dict, stem: str, up: str) -> tuple[dict, dict[str, bytes]]:
    """The notebook as MyST-NB should read it, and its charts' pictures by file name.

    `stem` begins the pictures' names; `up` leads from the page to the site's top.
    """
    pictures = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"])
            for pattern, target in LINKS.items():
                text = re.sub(pattern, target, text)
            cell["source"] = text
        tags = cell["metadata"].setdefault("tags", [])
        if "bootstrap" in tags:
            tags.append("hide-input")
            cell["metadata"]["mystnb"] = {"code_prompt_show": PROMPT, "code_prompt_hide": "Hide it"}
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if VEGALITE in data:
                name = f"{stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                size = output["metadata"]["image/png"]
                markup = figure(data[VEGALITE], f"{up}_images/charts/{name}", size)
                output["data"] = {"text/html": markup}
    return notebook, pictures


def read_source(app, docname, source):
    """Before a page is read: prepare it if it is a notebook, and store its charts' pictures."""
    if not str(app.env.doc2path(docname)).endswith(".ipynb"):
        return
    up = "../" * docname.count("/")
    notebook, pictures = prepared(json.loads(source[0]), Path(docname).name, up)
    folder = Path(app.outdir, "_images", "charts")
    folder.mkdir(parents=True, exist_ok=True)
    for name, png in pictures.items():
        (folder / name).write_bytes(png)
    source[0] = json.dumps(notebook)


def write_page(app, page, template, context, doctree):
    """Before a page is written: the scripts that it needs, and a button for the .py."""
    if "body" in context:  # a fold is named after what it shows
        context["body"] = context["body"].replace(' aria-label="Toggle hidden content"', "")
    if '<figure class="chart">' in context.get("body", ""):
        app.add_js_file("vega.js", defer="defer")
        app.add_js_file("charts.js", defer="defer")
    if page == "search":  # opened from a folder, a browser can't fetch what excerpts come from
        app.add_js_file(None, body=NO_EXCERPTS, priority=300)
    script = page.replace("notebooks/", "scripts/") + ".py"
    if page.startswith("notebooks/"):
        for group in context.get("header_buttons", []):
            if group.get("label") == "download-buttons":
                group["buttons"].insert(1, {
                    "type": "link",
                    "url": context["pathto"](script, 1),
                    "text": ".py",
                    "tooltip": "Download the same chapter as a script",
                    "icon": "fab fa-python",
                    "label": "download-script-button",
                })  # fmt: skip


def setup(app):
    app.connect("source-read", read_source)
    app.connect("html-page-context", write_page, priority=900)  # after the theme's buttons
    return {"parallel_read_safe": True, "parallel_write_safe": True}
