"""The ladder's table for docs/ladder.md, from its records. A run is called RUNG-SEED."""

from statistics import mean

ABOUT = {
    "small": "chapter 9's recipe, in 16 bits",
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


def pairs_seen(record):
    """How many pairs a run has read, with repetition; a mean of runs as many as they all."""
    from scripts.book.records import load_record

    if parts := record.get("learned_from", {}).get("mean_of", []):
        return sum(pairs_seen(load_record(f"ladder-{part}")) for part in parts)
    return len(record["history"]) * record["train_pairs"]


def ladder_table():
    """A row for each rung: what it is, what its runs cost, and the BLEU of each seed."""
    from scripts.book.records import load_record, record_names

    head = "rung | what it is | pairs, millions | hours | greedy | beam 5 | chosen α"
    lines = [f"| {head} | test 2016 | test 2017 |", "|---" * 9 + "|"]
    for rung, about in ABOUT.items():
        names = [name for name in record_names("ladder-*") if name[7:-2] == rung]
        records = [load_record(name) for name in names]
        scores = [
            [max(record["chosen_by_val_bleu"].values()) for record in records],
            [record["val_bleu_beam"] for record in records],
            [max(record.get("val_bleu_by_alpha", {"": None}).values()) for record in records],
        ]
        for test in ("test_2016_flickr", "test_2017_flickr"):
            scores.append([record.get("test", {}).get(test, {}).get("bleu") for record in records])
        cells = [", ".join(f"{x:.1f}" for x in row if x is not None) for row in scores]
        seen, hours = max(map(pairs_seen, records)) / 1e6, mean(one["hours"] for one in records)
        lines.append(f"| {rung} | {about} | {seen:.2f} | {hours:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)
