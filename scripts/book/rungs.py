"""The ladder: recipes for a small translator, each trained to its end; a table from their records.

A run is called RUNG-SEED, its record ladder-RUNG-SEED. Chapter 21 tells the story.
"""

import statistics
from typing import Any

from scripts.book.records import load_record, record_names

ABOUT = {
    "small": "today's recipe",
    "muon": "Muon",
    "long": "longer, dropout 0.3",
    "reverse": "English to German, Muon",
    "reverse-adam": "English to German, Adam",
    "reverse-onward": "English to German, from chapter 9's model",
    "diverse": "diversified, k = 1",
    "diverse-more": "diversified, k = 2",
    "final": "diversified by what was at hand",
    "risk": "minimum risk, from chapter 9's model",
    "risk-long": "the same, on all pairs, in larger steps",
    "risk-again": "and all pairs once more",
    "risk-mean": "mean of two of risk-long, one of risk-again",
    "onward": "no risk, six more epochs, dropout 0.3",
    "onward-mean": "mean of two of onward",
    "widened": "diversified, from chapter 9's model",
    "widened-mean": "mean of two of widened",
    "all-mean": "mean of two of risk-long, one of risk-again, two of widened",
    "both-means": "mean of two of all-mean, so of ten runs",
    "widened-best": "diversified by the best mean, from its weights",
    "risk-best": "minimum risk, from the best mean",
    "best-mean": "mean of two of widened-best, two of risk-best",
}


def runs_of(rung: str) -> list[str]:
    """The runs of a rung that are on record, in the order of their seeds."""
    named = (name.removeprefix("ladder-") for name in record_names("ladder-*"))
    return [run for run in named if run.rpartition("-")[0] == rung]


def val_bleu(record: dict[str, Any]) -> float:
    """Greedy validation BLEU of the weights that a run left."""
    return max(record["chosen_by_val_bleu"].values())


def pairs_seen(record: dict[str, Any]) -> int:
    """How many pairs a run has read, with repetition; a mean of runs as many as they all."""
    if parts := record.get("learned_from", {}).get("mean_of", []):
        return sum(pairs_seen(load_record(f"ladder-{part}")) for part in parts)
    return len(record["history"]) * record["train_pairs"]


def ladder_table() -> list[dict[str, Any]]:
    """A row for each rung: what it is, what its runs cost, and BLEU on validation.

    The gain is over the first rung's mean; None for a rung that translates back.
    """
    rows: list[dict[str, Any]] = []
    for rung, about in ABOUT.items():
        records = [load_record(f"ladder-{run}") for run in runs_of(rung)]
        each, beams = map(val_bleu, records), (record["val_bleu_beam"] for record in records)
        row = {
            "rung": rung,
            "about": about,
            "seeds": len(records),
            "epochs": max(len(record["history"]) for record in records),
            "seen": round(max(map(pairs_seen, records)) / 1e6, 2),
            "hours": round(sum(record["hours"] for record in records), 2),
            "each": [*each],
            "each_beam": [*beams],
        }
        row["val_bleu"] = round(statistics.mean(row["each"]), 3)
        row["beam"] = round(statistics.mean(row["each_beam"]), 3)
        first = (rows or [row])[0]["val_bleu"]
        row["gain"] = None if rung.startswith("reverse") else round(row["val_bleu"] - first, 2)
        rows.append(row)
    return rows
