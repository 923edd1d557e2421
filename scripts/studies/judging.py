"""Where a translator errs, chapter 10's record: `python -m scripts.studies.judging --save`."""

import bisect
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from scripts.book.command import Command
from scripts.book.domains import list_of_texts, texts_side_by_side
from scripts.ch08_decoding import Hypothesis, sentence_chrf
from scripts.ch10_judging import (
    bleu_by_many_names,
    bleu_of_draws,
    paired_difference,
    sentence_parts,
    tokens_13a,
)
from scripts.core.models import Trained
from scripts.core.scores import corpus_bleu, corpus_chrf, held_out_splits
from scripts.fast.translating import DecodeOptions, decode_hypotheses
from scripts.studies import searches
from scripts.studies.subject import Corpus, Pairs, Rows, StudyOptions, Texts, encoded, recorded

ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
BEAMS = (1, 2, 3, 4, 5, 8, 12)
LENGTH_EDGES = (1, 8, 11, 14, 18)  # words of the source: where each bucket begins
FREQUENCY_EDGES = (0, 1, 3, 10, 100)  # occurrences in training: where each bucket begins
QUOTED = 5  # sentences quoted in full at either end; the corpus is not ours to publish


def ranked_texts(
    trained: Trained, found: Sequence[Sequence[Hypothesis]], alpha: float
) -> list[str]:
    """Each source's best hypothesis at length penalty `alpha`, as text; empty if there is none."""
    return [trained.tokenizer.decode(h.ids) for h in searches.first_by(found, alpha)]


def penalty_sweep(
    trained: Trained, rows: Rows, alphas: Sequence[float] = ALPHAS, beam: int = 5
) -> dict[float, list[str]]:
    """The outputs of a beam search at each length penalty; one search serves all (`searches`)."""
    found = decode_hypotheses(trained, rows, DecodeOptions(beam=beam, alpha=0.0), nbest=beam)
    return {alpha: ranked_texts(trained, found, alpha) for alpha in alphas}


def bucket_labels(edges: Sequence[int]) -> list[str]:
    """The buckets' names: of (0, 1, 3) they are "0", "1–2" and "3+"."""
    inner = itertools.pairwise(edges)
    return [str(a) if b == a + 1 else f"{a}–{b - 1}" for a, b in inner] + [f"{edges[-1]}+"]


def bucket_of(value: int, edges: Sequence[int]) -> str:
    """The name of the bucket that holds `value`. Raises ValueError below the first edge."""
    if value < edges[0]:
        raise ValueError(f"{value} is below the first bucket, which begins at {edges[0]}")
    return bucket_labels(edges)[bisect.bisect_right(edges, value) - 1]


def bleu_by_length(
    sources: Texts, outputs: Texts, references: Texts, samples: int = 1000
) -> list[dict[str, Any]]:
    """BLEU of the sentences of each source length, and where 95% of resampled test sets lie.

    A length is a number of words between spaces. Buckets without a sentence are left out.
    """
    together = texts_side_by_side(sources=sources, outputs=outputs, references=references)
    sources, outputs, references = together
    counts = sentence_parts(outputs, references)  # (N, 10)
    names = np.array([bucket_of(max(1, len(text.split())), LENGTH_EDGES) for text in sources])
    rng, table = np.random.default_rng(0), []
    for name in bucket_labels(LENGTH_EDGES):
        inside = np.flatnonzero(names == name)
        if not len(inside):
            continue
        draws = rng.choice(inside, size=(samples, len(inside)), replace=True)
        low, high = np.percentile(bleu_of_draws(counts, draws), [2.5, 97.5])
        found = {"bleu": bleu_of_draws(counts, inside[None])[0], "low": low, "high": high}
        row = {key: round(float(value), 2) for key, value in found.items()}
        table.append({"words": name, "sentences": len(inside)} | row)
    return table


def plain_words(text: str) -> list[str]:
    """The words of a text, lower-cased and without punctuation."""
    return [token for token in tokens_13a(text.lower()) if any(map(str.isalnum, token))]


def recall_by_frequency(
    outputs: Texts, references: Texts, training: Iterable[str]
) -> list[dict[str, Any]]:
    """For each bucket of training frequency: the reference's words, and how many the output has.

    A word counts as found at most as often as the output has it. `sentences` are those whose rarest
    word falls into the bucket, `bleu` is theirs (None if there are none).
    """
    outputs, references = texts_side_by_side(outputs=outputs, references=references)
    training = list_of_texts("training", training)
    seen = Counter(word for text in training for word in plain_words(text))
    labels = bucket_labels(FREQUENCY_EDGES)
    words, found, rarest = Counter(), Counter(), {label: [] for label in labels}
    for i, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        wanted, given = (Counter(plain_words(text)) for text in (reference, output))
        for word, times in wanted.items():
            label = bucket_of(seen[word], FREQUENCY_EDGES)
            words[label] += times
            found[label] += min(times, given[word])
        if wanted:
            rarest[bucket_of(min(seen[word] for word in wanted), FREQUENCY_EDGES)].append(i)
    table = []
    for label in labels:
        sides = [[texts[i] for i in rarest[label]] for texts in (outputs, references)]
        row = {"frequency": label, "words": words[label], "found": found[label]}
        row["recall"] = round(found[label] / words[label], 4) if words[label] else None
        row["sentences"] = len(rarest[label])
        row["bleu"] = round(corpus_bleu(*sides).score, 2) if rarest[label] else None
        table.append(row)
    return table


def beam_against_greedy(greedy: Texts, beam: Texts, references: Texts) -> dict[str, Any]:
    """The comparison for the record: its figures, and histograms of the draws and of the swaps."""
    compared = paired_difference(greedy, beam, references)

    def tenths(differences: Sequence[float]) -> list[dict[str, float]]:
        steps = Counter(math.floor(10 * d) for d in differences)  # a tenth of a point each
        return [{"from": at / 10, "draws": steps[at]} for at in sorted(steps)]

    return {
        **{key: round(getattr(compared, key), 4) for key in ("difference", "low", "high", "p")},
        "differing": sum(a != b for a, b in zip(greedy, beam, strict=True)),
        "histogram": tenths(compared.draws),
        "histogram_of_swaps": tenths(compared.swaps),
    }


def scores_of(outputs: Texts, references: Texts) -> dict[str, float]:
    """BLEU, chrF2 and length as in `searches`, and lower-cased BLEU."""
    scores = searches.scores_of(outputs, references)
    lowercased = round(corpus_bleu(outputs, references, lowercase=True).score, 2)
    return {"bleu": scores["bleu"], "bleu_lowercased": lowercased} | scores


def beam_sweep(
    trained: Trained, rows: Rows, references: Texts
) -> tuple[list[dict[str, float]], dict[int, list[str]]]:
    """Scores for each width of the beam, and each width's outputs."""
    table, outputs = [], {}
    for beam in BEAMS:
        found = decode_hypotheses(trained, rows, DecodeOptions(beam=beam, alpha=0.6))
        outputs[beam] = ranked_texts(trained, found, 0.6)
        row = {"beam": beam} | scores_of(outputs[beam], references)
        table.append(row)
        print(f"beam {beam}: BLEU {row['bleu']}", file=sys.stderr)
    return table, outputs


def by_penalty(trained: Trained, pairs: Pairs) -> list[dict[str, float]]:
    """Scores for each length penalty."""
    rows, references = encoded(trained, pairs)
    return [
        {"alpha": alpha} | scores_of(texts, references)
        for alpha, texts in penalty_sweep(trained, rows).items()
    ]


def worst_and_best(
    outputs: Texts, references: Texts, count: int = 10
) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Numbers and chrF2 of the worst and the best sentences; among equals the longest is best."""
    outputs, references = texts_side_by_side(outputs=outputs, references=references)
    scores = [round(sentence_chrf(*both), 1) for both in zip(outputs, references, strict=True)]
    order = sorted(range(len(scores)), key=lambda i: (scores[i], len(references[i]), i))
    ranked = [(i, scores[i]) for i in order]
    return ranked[:count], ranked[::-1][:count]


def listed(found: Sequence[tuple[int, float]], pairs: Pairs, outputs: Texts) -> list[dict]:
    """Line numbers (from 1) and scores for the record; the first `QUOTED` with their texts."""
    rows: list[dict[str, Any]] = [{"line": i + 1, "chrf2": score} for i, score in found]
    for row, (i, _) in zip(rows[:QUOTED], found, strict=False):
        row |= {"source": pairs[i][0], "reference": pairs[i][1], "output": outputs[i]}
    return rows


def analyse_model(trained: Trained, corpus: Corpus, options: StudyOptions) -> dict[str, Any]:
    """All that the record says about translations of the first test split, except its provenance.

    The training split says which words are rare.
    """
    split = held_out_splits(corpus)[0]
    pairs = corpus[split][: options.sentences]
    rows, references = encoded(trained, pairs)
    beams, outputs = beam_sweep(trained, rows, references)
    chosen = outputs[5]
    named = bleu_by_many_names(trained, pairs, chosen)
    worst, best = worst_and_best(chosen, references)
    training = (english for _, english in corpus["train"])
    return {
        "split": split,
        "sentences": len(pairs),
        "search": "beam 5, alpha 0.6",
        "signatures": {
            "bleu": corpus_bleu(chosen, references).signature,
            "bleu_lowercased": corpus_bleu(chosen, references, lowercase=True).signature,
            "chrf2": corpus_chrf(chosen, references).signature,
        },
        "beams": beams,
        "penalties": by_penalty(trained, pairs),
        "penalties_on_val": by_penalty(trained, corpus["val"][: options.sentences]),
        "beam_against_greedy": beam_against_greedy(outputs[1], chosen, references),
        "figures": {name: round(score, 2) for name, score in named.items()},
        "lengths": bleu_by_length([source for source, _ in pairs], chosen, references),
        "frequencies": recall_by_frequency(chosen, references, training),
        "exact": sum(o == r for o, r in zip(chosen, references, strict=True)),
        "worst": listed(worst, pairs, chosen),
        "best": listed(best, pairs, chosen),
    }


def run_analyse(options: StudyOptions) -> None:
    """Make the record, save it if the options say so, and print what it says of a beam of 5."""
    record = recorded("scripts.studies.judging", "decoding", options, analyse_model)
    five = next(row for row in record["beams"] if row["beam"] == 5)
    against = record["beam_against_greedy"]
    print(f"{record['split']}, {record['sentences']:,} sentences, {record['search']}:")
    print(f"BLEU {five['bleu']:.2f} ({record['signatures']['bleu']}), chrF2 {five['chrf2']:.2f}")
    print(f"against greedy decoding {against['difference']:+.2f} BLEU, p = {against['p']:.4f}")


main = Command("scripts.studies.judging", StudyOptions, run_analyse)

if __name__ == "__main__":
    raise SystemExit(main())
