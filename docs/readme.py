"""Writes the tables of README.md and of docs/*.md, from chapters, records and tests, and pictures.

    python docs/readme.py

Given a picture of the living page, it also writes docs/living.png:

    LIVING_PICTURES=runs python -m pytest tests/test_living.py -k browser
    python docs/readme.py runs/ladder-all-mean-3/desktop.png
"""

import base64
import hashlib
import io
import json
import re
import sys
from functools import cache
from pathlib import Path
from statistics import mean

from contents import parts
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rungs import ladder_table

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "architecture.png"
LIVING_PICTURE = ROOT / "docs" / "living.png"


def chapter_table():
    lines = ["| chapter | read | with the code | run | script |", "|---|---|---|---|---|"]
    for part, chapters in parts().items():
        lines.append(f"| **{part}** | | | | |")
        lines += [
            f"| [{one.name}](notebooks/{one.stem}.ipynb) | {one.reading} min | {one.coding} min "
            f"| {one.running} | [script](scripts/{one.stem}.py) |"
            for one in chapters
        ]
    return "\n".join(lines)


# Recipes whose trainings are shown, first those whose models ship; docs/ladder.md shows the others.
RECIPES = ("ladder-all-mean", "multi30k-de-en", "sample-de-en", "gpu-small")


def records():
    """The recorded trainings of `RECIPES`: name and record, in order."""
    from scripts.book.records import load_record, record_names

    names = record_names()
    shown = [name for recipe_name in RECIPES for name in names if recipe(name) == recipe_name]
    return {name: load_record(name) for name in shown}


def is_shipped(name):
    return (ROOT / "models" / name).is_dir()


def recipe(name):
    """A record's name without its seed."""
    return re.sub(r"-\d$", "", name)


def results_table():
    from scripts.core.cards import minutes_of
    from scripts.core.models import DEFAULT_MODEL

    found = records()
    recipes = {}  # each with a record for each seed
    for name, record in found.items():
        recipes.setdefault(recipe(name), {})[name] = record
    lines = ["| model | test set | BLEU | greedy | lower-cased | search | parameters | trained |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for title, runs in recipes.items():
        name = max(runs, key=is_shipped)  # the first, if none ships
        record = runs[name]
        minutes = [max(1, round(minutes_of(run))) for run in runs.values()]
        took = " to ".join(map(str, sorted({min(minutes), max(minutes)})))
        for split in record["test"]:
            tests = [run["test"][split] for run in runs.values()]
            kinds = ("bleu", "bleu_greedy", "bleu_lowercased")
            scores = (", ".join(f"{test[kind]:.1f}" for test in tests) for kind in kinds)
            searches = "; ".join(dict.fromkeys(test["search"] for test in tests))
            lines.append(
                f"| [{title}](../results/{name}.json) | {split} | {' | '.join(scores)} "
                f"| {searches} | {record['parameters'] / 1e6:.1f} M "
                f"| {took} min, {record['device']} |"
            )
    lines += ["", "The commands:", "", "```"]
    lines += [record["repeat"] for record in found.values()] + ["```"]
    signatures = {test["signature"] for r in found.values() for test in r["test"].values()}
    lines += ["", "Signature: " + ", ".join(f"`{s}`" for s in sorted(signatures)) + "."]
    name = DEFAULT_MODEL.name  # what ships
    record = found[name]
    lines += ["", f"The first three of test_2016_flickr, as `{name}` translates them:", ""]
    lines += ["| German | reference | translation |", "|---|---|---|"]
    parts = ("source", "reference", "translation")
    lines += [f"| {' | '.join(pair[part] for part in parts)} |" for pair in record["samples"][:3]]
    return "\n".join(lines)


def speed_table():
    """The race of chapter 12: how many times as long as ours in 16 bits a step takes."""
    from scripts.book.records import load_record

    peers, base, steps = (load_record(f"speed-{name}") for name in ("peers", "base", "steps"))
    reports = peers["reports"]
    columns = ["float32", "float32, memory kept", "bf16", "bf16, memory kept"]

    def cell(name):
        report = reports.get(name)
        if report is None:
            return ""
        low, high = (pick(report["rounds"] or [1.0]) for pick in (min, max))
        spread = f" ({low:.2f} to {high:.2f})" if low < high else ""
        return f"{report['times']:.2f}{spread}"

    lines = [f"| program | {' | '.join(columns)} | peak memory, bf16 |", "|---|" + "---|" * 5]
    for program in dict.fromkeys(name.split(", ")[0] for name in reports):
        kept = ", memory kept" * (program != "ours")
        names = [f"{program}, {column}" for column in columns]
        if program == "ours":  # which always keeps freed memory
            names = ["", "ours, float32", "", "ours, bf16"]
        peak = reports[f"{program}, bf16{kept}"]["peak_bytes"] / 2**20
        lines.append(f"| {program} | {' | '.join(map(cell, names))} | {peak:,.0f} MiB |")
    used = {name: report["mfu"] for name, report in base["reports"].items()}
    wide, half = (
        part["reports"]["without small things in C"]["times"] for part in (steps, steps["half"])
    )
    corpus = peers["corpus"].replace("multi30k", "Multi30k")
    said = (
        "Time of a full training step per real target token, as a multiple of ours in bf16, "
        f"which takes {reports['ours, bf16']['seconds_per_step']:.2f} seconds a step: d_model 256, "
        f"3+3 layers, 8,192 pieces, batches of {peers['max_tokens']:,} tokens a side in length "
        f"buckets from {corpus}; {peers['device']}, a processor with bfloat16 products. Two "
        f"processes take turns; medians of {peers['rounds']} rounds, and their range. The "
        "others' bf16 is PyTorch's autocast. *Memory kept*: the process keeps what it frees "
        "(chapter 12), as ours always does. The small operations of our step are in C, if there "
        f"is a compiler; without one it takes {wide:.2f} times as long in float32, {half:.2f} in "
        f"bf16. In float32, on the paper's base model, our path reaches {used['ours']:.0%} of the "
        f"machine's matrix rate, the textbook's {used['textbook']:.0%}. The commands:"
    )
    lines += ["", said]
    return "\n".join([*lines, "", "```", peers["repeat"], base["repeat"], "```"])


def decoding_table():
    """Chapter 13's race: sentences a second, and our speed over CTranslate2's, round by round."""
    from scripts.book.figures.decoding import speed_frame
    from scripts.book.records import load_record

    race = load_record("decoding-speed")
    frame = speed_frame(race).query("program != 'ours, exact stop'").set_index(["program", "beam"])
    order = frame["sentences_per_second"].xs(1, level="beam").sort_values(ascending=False).index
    lines = [
        "| sentences a second | greedy | beam 4 | BLEU: greedy, beam | our speed / its: greedy "
        "| beam 4 |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for name in order:
        both = [frame.loc[(name, beam)] for beam in (1, 4)]
        rates = " | ".join(f"{row['sentences_per_second']:,.0f}" for row in both)
        scores = ", ".join(f"{row['bleu']:.1f}" for row in both)
        against = [frame.loc[(name.replace("CTranslate2", "ours"), beam)] for beam in (1, 4)]
        ratios = [
            f"{row['ratio']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f})"
            if name.startswith("CTranslate2")
            else ""
            for row in against
        ]
        lines.append(f"| {name} | {rates} | {scores} | {' | '.join(ratios)} |")
    alone = {(r["program"], r["beam"]): (r["p50"], r["p99"]) for r in race["one_at_a_time"]}
    lines += ["", "| one sentence at a time, ms | greedy | beam 4 |", "|---|---|---|"]
    for name in sorted(order, key=lambda name: (name.split(", ")[1], name)):
        both = " | ".join("{:.0f}, {:.0f}".format(*alone[name, beam]) for beam in (1, 4))
        lines.append(f"| {name} | {both} |")
    lines += ["", f"Above: sentences of {race['split']} ({race['sentences']:,}) a second, from "]
    lines[-1] += f"token ids to token ids; {race['device']}; medians of rounds in turns, with the "
    lines[-1] += "same weights. CTranslate2 gets the fastest of five batch sizes. Below: "
    lines[-1] += "milliseconds for a sentence on one thread, the median and the 99th percentile "
    lines[-1] += "of 200. The processor has 8-bit products (AVX512-VNNI); on another machine "
    lines[-1] += "the order may differ. The command:"
    return "\n".join([*lines, "", "```", race["repeat"], "```"])


def speedrun_table():
    """The entries of the race to 40 BLEU, the fastest first."""
    from scripts.book.records import load_record, record_names

    rows = []  # each with its seconds
    for name in record_names("speedrun-*"):
        entry = load_record(name)
        seconds, scores = ([r[key] for r in entry["runs"]] for key in ("seconds", "test_bleu"))
        each = ", ".join(f"{time:,.0f}" for time in seconds)
        row = (
            f"| {mean(seconds):,.0f} ({each}) | {mean(scores):.2f} "
            f"| {entry['device']}, {entry['runs'][0]['precision']} "
            f"| [{entry['date'][:10]}](../results/{name}.json) | {entry['by']} "
            f"| `{entry['repeat']}` |"
        )
        rows.append((mean(seconds), row))
    if not rows:
        return "There is no entry yet: yours can be the first."
    lines = ["| seconds (each seed) | BLEU | machine | date | by | command |", "|---" * 6 + "|"]
    return "\n".join([*lines, *(row for _, row in sorted(rows))])


def results_in_brief():
    """What ships: BLEU with its own search, of the seed that ships."""
    lines = ["| model | test_2016_flickr | test_2017_flickr | parameters | trained |"]
    lines.append("|---|---|---|---|---|")
    for name, record in records().items():
        if is_shipped(name) and "test_2016_flickr" in record["test"]:
            scores = " | ".join(f"{test['bleu']:.1f}" for test in record["test"].values())
            size, device = f"{record['parameters'] / 1e6:.1f} M", record["device"]
            lines.append(f"| [{name}](results/{name}.json) | {scores} | {size} | {device} |")
    return "\n".join(lines)


def speed_in_brief():
    """Other programs' time over ours: a training step in 16 bits, a test set in 32 bits."""
    from scripts.book.figures.decoding import speed_frame
    from scripts.book.records import load_record

    training = load_record("speed-peers")["reports"]
    decoding = speed_frame(load_record("decoding-speed")).set_index(["program", "beam"])
    lines = ["| another program's time over ours | against | times |", "|---|---|---|"]
    for program in ("textbook", "nn.Transformer", "MarianMTModel", "x-transformers"):
        times = training[f"{program}, bf16, memory kept"]["times"]
        lines.append(f"| a training step, bf16 | {program} | {times:.2f} |")
    for precision in ("float32", "int8"):
        times = decoding.loc[(f"ours, {precision}", 4), "ratio"]
        lines.append(f"| translating, beam 4, {precision} | CTranslate2 | {times:.2f} |")
    return "\n".join(lines)


PAGES = ("measured", "fixed", "speedrun", "ladder")
MEASURED, FIXED, SPEEDRUN, LADDER = (ROOT / f"docs/{page}.md" for page in PAGES)
BLOCKS = {  # the page of each generated table, and what makes it
    "chapters": (README, chapter_table),
    "results-in-brief": (README, results_in_brief),
    "speed-in-brief": (README, speed_in_brief),
    "results": (MEASURED, results_table),
    "speed": (MEASURED, speed_table),
    "decoding": (MEASURED, decoding_table),
    "speedruns": (SPEEDRUN, speedrun_table),
    "ladder": (LADDER, ladder_table),
}


def block(name, text):
    """Where a generated block begins and ends: after its opening mark, before its closing one."""
    begin = text.index("-->\n", text.index(f"<!-- {name}:")) + len("-->\n")
    return begin, text.index(f"<!-- end of {name} -->")


@cache
def erratum_tests():
    """The tests that check each row of the errata: pairs of file and function."""
    found = {}
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for name, row in re.findall(
            r"^def (test_erratum_(\d\d)_\w+)", path.read_text("utf-8"), re.M
        ):
            found.setdefault(int(row), []).append((f"../tests/{path.name}", name))
    return found


def named_test(row):
    """The last cell of row `row`: its tests, each with a link to its file."""
    return "<br>".join(f"[`{name}`]({file})" for file, name in erratum_tests().get(row, []))


def picture_chart():
    """The chart that the picture shows, in the series' style."""
    from scripts.book.look import switch_on
    from scripts.ch00_start_here import architecture_chart

    switch_on()
    return architecture_chart()


def chart_digest():
    """The SHA-256 of what the picture shows: the chart's JSON."""
    spec = json.dumps(picture_chart().to_dict(), sort_keys=True)
    return hashlib.sha256(spec.encode()).hexdigest()


def living_digest():
    """The SHA-256 of what the living page's look depends on: its files and its model."""
    from scripts.core.models import DEFAULT_MODEL

    parts = [
        ROOT / "docs/living" / name for name in ("index.html", "style.css", "app.js", "draw.js")
    ]
    parts.append(DEFAULT_MODEL / "model.safetensors")
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()


def write_stamped(path, png, kind, digest):
    """Write a PNG file, with the digest of what it shows as a text in it."""
    texts = PngInfo()
    texts.add_text(kind, digest)
    Image.open(io.BytesIO(png)).save(path, pnginfo=texts, optimize=True)


def write_picture():
    """docs/architecture.png from chapter 0's chart, stamped with the chart's digest."""
    data, _ = picture_chart()._repr_mimebundle_()
    png = base64.b64decode(data["image/png"])
    write_stamped(PICTURE, png, "chart", chart_digest())


def refresh():
    """Bring all generated tables up to date."""
    for name, (page, make) in BLOCKS.items():
        text = page.read_text("utf-8")
        begin, end = block(name, text)
        page.write_text(f"{text[:begin]}{make()}\n{text[end:]}", "utf-8")
    fill = lambda m: f"{m[1]} {named_test(int(m[2]))} |"  # noqa: E731
    table = re.sub(
        r"^(\| (\d+) \| .+ \| \d+ \|).*\|$", fill, FIXED.read_text("utf-8"), flags=re.MULTILINE
    )
    FIXED.write_text(table, "utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    write_picture()
    for picture in sys.argv[1:]:
        write_stamped(LIVING_PICTURE, Path(picture).read_bytes(), "page", living_digest())
    refresh()
