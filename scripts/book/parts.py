"""What chapters 22 to 24 read of records: translators with other parts, and chapter 22's models."""

from __future__ import annotations

from collections.abc import Sequence

from scripts import Late
from scripts.book.records import load_record
from scripts.book.verdict import Verdict, verdicts

pd = Late("pandas")

RIVALS_OF_PARTS = {  # each row, and the one that it has to beat; first chapter 22's eleven
    **dict.fromkeys(("RMSNorm", "SwiGLU", "rotary", "QK-norm", "grouped-query"), "2017"),
    **dict.fromkeys(("multi-query", "zeroed outputs", "Muon", "today"), "2017"),
    "today, not zeroed": "today",
    "today, Muon": "today",
    "ReLU²": "2017",
    "multi-query, across too": "multi-query",
    "latent, decoder alone": "rotary",  # which the encoder has
    "latent": "latent, decoder alone",
    "latent, across too": "latent",
    "window of 4": "2017",
    "linear attention": "2017",
    "experts": "SwiGLU",
}


def counted_runs() -> pd.DataFrame:
    """The runs of three passes that count; those with seed 0 chose the rates."""
    runs = pd.DataFrame(load_record("block-multi30k")["runs"])
    return runs[(runs["seed"] > 0) & (runs["epochs"] == 3)]


def block_means(rows: Sequence[str]) -> pd.DataFrame:
    """A line for each row: its rate, and mean seconds, validation losses (nats) and BLEU."""
    digits = {"lr": 4, "seconds": 0, "loss": 3, "bleu": 1}
    runs = counted_runs()
    return runs.groupby("row")[[*digits]].mean().loc[[*rows]].round(digits)


def block_verdicts(score: str = "BLEU") -> dict[str, Verdict]:
    """BLEU, or the loss, of each row against its rival's, all tested together."""
    scores = counted_runs().groupby("row")[score.lower()].agg(list).to_dict()
    return verdicts(scores, RIVALS_OF_PARTS)


def small_runs(measure: str, steps: int = 60) -> pd.DataFrame:
    """Loss or sharpness of chapter 22's small models: a row for each rate and seed."""
    runs = pd.DataFrame(load_record("block-rates")["runs"])
    runs = runs[runs["steps"] == steps]
    return runs.pivot(index=["rate", "seed"], columns="part", values=measure)


def added_loss(parts: Sequence[str], steps: int = 60) -> pd.DataFrame:
    """Each small model's loss minus its base's, in nats, at the same rate with the same seed.

    A base is Qwen3; it is slowed, untied or flipped if the model is.
    """
    loss = small_runs("loss", steps)
    bases = {"slowed": "Qwen3, slowed", "untied": "untied", "flipped": "flipped"}
    base = {part: next((bases[kind] for kind in bases if kind in part), "Qwen3") for part in parts}
    return pd.DataFrame({part: loss[part] - loss[base[part]] for part in parts})
