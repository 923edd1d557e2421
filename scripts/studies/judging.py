"""Where a translator errs, chapter 10's record: `python -m scripts.studies.judging --save`."""

import itertools
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
BEAMS = (1, 2, 3, 4, 5, 8, 12)
LENGTH_EDGES = (1, 8, 11, 14, 18)  # words of the source: where each bucket begins
FREQUENCY_EDGES = (0, 1, 3, 10, 100)  # occurrences in training: where each bucket begins
LISTED, QUOTED = 10, 5  # sentences at either end, and with their texts: they aren't ours to publish


def bucket_labels(edges: Sequence[int]) -> list[str]:
    """The buckets' names: of (0, 1, 3) they are "0", "1–2" and "3+"."""
    inner = itertools.pairwise(edges)
    return [str(a) if b == a + 1 else f"{a}–{b - 1}" for a, b in inner] + [f"{edges[-1]}+"]


def bleu_by_length(
    sources: Texts, outputs: Texts, references: Texts, samples: int = 1000
) -> list[dict[str, Any]]:
    """BLEU of the sentences of each source length, and where 95% of resampled test sets lie.

    A length is a number of words between spaces. Buckets without a sentence are left out.
    """
    counts = ch10.sentence_parts(outputs, references)  # (N, 10)
    buckets = np.digitize([max(1, len(text.split())) for text in sources], LENGTH_EDGES)  # (N,)
    rng, table = np.random.default_rng(0), []
    for number, label in enumerate(bucket_labels(LENGTH_EDGES), start=1):
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
    """For each bucket of training frequency: the reference's words, and how many the output has.

    A word counts as found at most as often as the output has it. `sentences` are those whose rarest
    word falls into the bucket, `bleu` is theirs (None if there are none).
    """
    seen = Counter(word for text in training for word in plain_words(text))
    words, matched, rarest = Counter(), Counter(), [[] for _ in FREQUENCY_EDGES]
    for i, texts in enumerate(zip(outputs, references, strict=True)):
        output, reference = (Counter(plain_words(text)) for text in texts)
        buckets = {word: bisect(FREQUENCY_EDGES, seen[word]) - 1 for word in reference}
        for word, bucket in buckets.items():
            words[bucket] += reference[word]
            matched[bucket] += min(reference[word], output[word])
        if buckets:
            rarest[min(buckets.values())].append(i)
    table = []
    for bucket, label in enumerate(bucket_labels(FREQUENCY_EDGES)):
        sides = [[texts[i] for i in rarest[bucket]] for texts in (outputs, references)]
        row = {"frequency": label, "words": words[bucket], "found": matched[bucket]}
        row["recall"] = round(matched[bucket] / words[bucket], 4) if words[bucket] else None
        row["sentences"] = len(rarest[bucket])
        row["bleu"] = round(corpus_bleu(*sides).score, 2) if rarest[bucket] else None
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


def worst_and_best(pairs: Pairs, outputs: Texts) -> dict[str, list[dict[str, Any]]]:
    """Lines (from 1) and chrF2 of both ends; among equals the longest is best, the first `QUOTED`
    with their texts.
    """
    rows = []
    for line, ((source, reference), output) in enumerate(zip(pairs, outputs, strict=True), start=1):
        row = {"line": line, "chrf2": round(sentence_chrf(output, reference), 1)}
        rows.append(row | {"source": source, "reference": reference, "output": output})
    rows.sort(key=lambda row: (row["chrf2"], len(row["reference"])))
    ends = {"worst": rows[:LISTED], "best": rows[::-1][:LISTED]}
    bare = ("line", "chrf2")
    return {
        end: some[:QUOTED] + [{key: row[key] for key in bare} for row in some[QUOTED:]]
        for end, some in ends.items()
    }


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
        "search": "beam 5, alpha 0.6",
        "signatures": {"bleu": corpus_bleu(outputs[5], references).signature},
        "beams": [{"beam": k} | scores_of(texts, references) for k, texts in outputs.items()],
        "penalties": by_penalty(trained, pairs),
        "penalties_on_val": by_penalty(trained, corpus["val"][: options.sentences]),
        "beam_against_greedy": beam_against_greedy(outputs[1], outputs[5], references),
        "figures": {name: round(score, 2) for name, score in names.items()},
        "lengths": bleu_by_length([source for source, _ in pairs], outputs[5], references),
        "frequencies": recall_by_frequency(outputs[5], references, training),
        **worst_and_best(pairs, outputs[5]),
    }


main = subject_command("scripts.studies.judging", "decoding", analyse_model)

if __name__ == "__main__":
    raise SystemExit(main())
