"""Where a translator errs, chapter 10's record: `python -m scripts.studies.judging --save`."""

import math
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from scripts import ch10_judging as ch10
from scripts.ch08_decoding import sentence_chrf
from scripts.core.models import Trained
from scripts.core.scores import corpus_bleu, held_out_splits
from scripts.studies.searches import scores_of, searched, texts_of
from scripts.studies.subject import Corpus, Pairs, StudyOptions, Texts, encoded, subject_command

ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
BEAMS = (1, 5)  # greedy search, and the beam that the chapter judges
# Buckets, and where each begins: words of a source, and a word's occurrences in training.
LENGTHS = {"1–7": 1, "8–10": 8, "11–13": 11, "14–17": 14, "18+": 18}
FREQUENCIES = {"0": 0, "1–2": 1, "3–9": 3, "10–99": 10, "100+": 100}
QUOTED = 5  # sentences, no more: they aren't ours to publish


def bleu_by_length(
    sources: Texts, outputs: Texts, references: Texts, samples: int = 1000
) -> list[dict[str, Any]]:
    """BLEU of the sentences of each source length, and where 95% of resampled test sets lie.

    A length is a number of words between spaces. Buckets without a sentence are left out.
    """
    counts = ch10.sentence_parts(outputs, references)  # (N, 10)
    lengths = [max(1, len(text.split())) for text in sources]
    buckets = np.digitize(lengths, [*LENGTHS.values()])  # (N,), from 1
    rng, table = np.random.default_rng(0), []
    for number, label in enumerate(LENGTHS, start=1):
        inside = np.flatnonzero(buckets == number)
        if len(inside):
            draws = rng.choice(inside, size=(samples, len(inside)), replace=True)
            ends = np.percentile(ch10.bleu_of_draws(counts, draws), [2.5, 97.5])
            scores = *ch10.bleu_of_draws(counts, inside[None]), *ends
            bleu, low, high = (round(float(score), 2) for score in scores)
            row = {"words": label, "sentences": len(inside)}
            table.append(row | {"bleu": bleu, "low": low, "high": high})
    return table


def plain_words(text: str) -> list[str]:
    """The words of a text, lower-cased and without punctuation."""
    return [token for token in ch10.tokens_13a(text.lower()) if any(map(str.isalnum, token))]


def recall_by_frequency(
    outputs: Texts, references: Texts, training: Iterable[str]
) -> list[dict[str, Any]]:
    """For each bucket of training frequency: the references' words, and how many outputs have.

    A word counts as found at most as often as the output has it.
    """
    seen = Counter(word for text in training for word in plain_words(text))
    edges, words, found = [*FREQUENCIES.values()], Counter(), Counter()
    for texts in zip(outputs, references, strict=True):
        output, reference = (Counter(plain_words(text)) for text in texts)
        for word, times in reference.items():
            bucket = bisect(edges, seen[word]) - 1
            words[bucket] += times
            found[bucket] += min(times, output[word])
    table = []
    for bucket, label in enumerate(FREQUENCIES):
        row = {"frequency": label, "words": words[bucket], "found": found[bucket]}
        row["recall"] = round(found[bucket] / words[bucket], 4) if words[bucket] else None
        table.append(row)
    return table


def tenths(differences: Sequence[float]) -> list[dict[str, float]]:
    """A histogram in steps of a tenth of a point."""
    steps = Counter(math.floor(10 * difference) for difference in differences)
    return [{"from": at / 10, "draws": steps[at]} for at in sorted(steps)]


def beam_against_greedy(greedy: Texts, beam: Texts, references: Texts) -> dict[str, Any]:
    """The comparison for the record: its figures, and histograms of the draws and of the swaps."""
    compared = ch10.paired_difference(greedy, beam, references)
    return {
        **{key: round(getattr(compared, key), 4) for key in ("difference", "low", "high", "p")},
        "differing": sum(a != b for a, b in zip(greedy, beam, strict=True)),
        "histogram": tenths(compared.draws),
        "histogram_of_swaps": tenths(compared.swaps),
    }


def by_penalty(trained: Trained, pairs: Pairs) -> list[dict[str, float]]:
    """Scores of a beam of 5 for each length penalty."""
    rows, references = encoded(trained, pairs)
    return [
        {"alpha": alpha} | scores_of(texts_of(trained, best), references)
        for (_, alpha), best in searched(trained, rows, [5], ALPHAS).items()
    ]


def worst(pairs: Pairs, outputs: Texts) -> list[dict[str, Any]]:
    """The outputs of lowest chrF2, with their lines (from 1) and texts; among equals the shortest
    reference comes first.
    """
    rows = []
    for line, ((source, reference), output) in enumerate(zip(pairs, outputs, strict=True), start=1):
        row = {"line": line, "chrf2": round(sentence_chrf(output, reference), 1)}
        rows.append(row | {"source": source, "reference": reference, "output": output})
    return sorted(rows, key=lambda row: (row["chrf2"], len(row["reference"])))[:QUOTED]


def analyse_model(trained: Trained, corpus: Corpus, options: StudyOptions) -> dict[str, Any]:
    """All that the record says about the model."""
    split = held_out_splits(corpus)[0]
    pairs = corpus[split][: options.sentences]
    rows, references = encoded(trained, pairs)
    hypotheses = searched(trained, rows, BEAMS, [0.6])
    outputs = {beam: texts_of(trained, best) for (beam, _), best in hypotheses.items()}
    names = ch10.bleu_by_many_names(trained, pairs, outputs[5])
    training = (english for _, english in corpus["train"])
    return {
        "split": split,
        "sentences": len(pairs),
        "signatures": {"bleu": corpus_bleu(outputs[5], references).signature},
        "beams": [{"beam": k} | scores_of(texts, references) for k, texts in outputs.items()],
        "penalties": by_penalty(trained, pairs),
        "penalties_on_val": by_penalty(trained, corpus["val"][: options.sentences]),
        "beam_against_greedy": beam_against_greedy(outputs[1], outputs[5], references),
        "figures": {name: round(score, 2) for name, score in names.items()},
        "lengths": bleu_by_length([source for source, _ in pairs], outputs[5], references),
        "frequencies": recall_by_frequency(outputs[5], references, training),
        "worst": worst(pairs, outputs[5]),
    }


main = subject_command("scripts.studies.judging", "decoding", analyse_model)

if __name__ == "__main__":
    raise SystemExit(main())
