"""Chapter 25's page as it stands, run with eight seeds: `python -m scripts.studies.page_seeds`.

One more run with each of the changes that its first two exercises ask for. A quarter of an hour.
"""

import contextlib
import io
from typing import Any

import torch
from tqdm import tqdm

from scripts import ROOT
from scripts.studies.subject import record_command

PAGE = ROOT / "scripts/ch25_one_page.py"
SEEDS = range(1, 9)
CHANGES = {
    "it may look ahead": ("tgt.device).tril()", "tgt.device)"),
    "no positions": ("words + self.positions[: ids.size(1)]", "words"),
}


def page_run(seed: int, change: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """What the page finds with another seed, and with a change of its text."""
    source, names = PAGE.read_text("utf-8"), {"__name__": "__main__"}
    for old, new in (("torch.manual_seed(1)", f"torch.manual_seed({seed})"), change):
        if old and source.count(old) != 1:
            raise ValueError(f"the page has {old!r} not once, but {source.count(old)} times")
        source = source.replace(old, new) if old else source
    expected = contextlib.suppress(AssertionError) if any(change) else contextlib.nullcontext()
    with contextlib.redirect_stdout(io.StringIO()), expected:  # a change breaks the page's claims
        exec(compile(source, PAGE, "exec"), names)
    verb = [i for i, piece in enumerate(names["english"]) if "wa" in piece][:1]
    at_verb = names["weights"][:, verb].mean(dim=(0, 1)) if verb else []
    places = [i for i, piece in enumerate(names["german"]) if piece in ("▁w", "ink", "t", "▁zu")]
    return {
        "seed": seed,
        "last_loss": round(names["looks"][-1][1], 3),
        "translations": [text for _, _, text in names["looks"]],
        "scores": {
            split: {name: round(value, 3) for name, value in score.items()}
            for split, score in names["scores"].items()
        },
        "weight_on_the_verb": round(sum(float(at_verb[i]) for i in places), 3) if verb else None,
        "needs": names["needs"].round(3).to_dict("index"),
    }


def page_with_seeds() -> dict[str, Any]:
    """Eight runs of the page, and one with each change."""
    runs = [page_run(seed) for seed in tqdm(SEEDS)]
    torch.set_flush_denormal(True)  # the model that may look ahead has many, and they are slow
    names = ("last_loss", "scores")
    changed = {why: page_run(1, change) for why, change in CHANGES.items()}
    return {
        "runs": runs,
        "changed": {why: {name: run[name] for name in names} for why, run in changed.items()},
    }


main = record_command("scripts.studies.page_seeds", "one-page-sample", lambda _: page_with_seeds())

if __name__ == "__main__":
    raise SystemExit(main())
