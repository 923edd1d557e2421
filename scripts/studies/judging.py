"""Chapter 10's record, of searches compared: `python -m scripts.studies.judging --save`."""

from typing import Any

from scripts import ch10_judging as ch10
from scripts.ch08_decoding import sentence_chrf
from scripts.core.models import Trained
from scripts.core.scores import corpus_bleu, held_out_splits
from scripts.studies.searches import scores_of, searched, texts_of
from scripts.studies.subject import Corpus, Pairs, StudyOptions, Texts, encoded, subject_command

ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
BEAMS = (1, 5)  # greedy search, and the beam that the chapter judges
QUOTED = 5  # sentences, no more: they aren't ours to publish


def beam_against_greedy(greedy: Texts, beam: Texts, references: Texts) -> dict[str, Any]:
    """The comparison for the record. A sentence's `sentence_parts` are a line of ten integers."""
    counts = ch10.sentence_parts([greedy, beam], references)
    compared, names = ch10.paired_difference(counts), ("greedy", "beam of 5")
    lines = [[" ".join(map(str, row)) for row in rows] for rows in counts.tolist()]
    return {
        **{key: round(getattr(compared, key), 4) for key in ("difference", "low", "high", "p")},
        "differing": sum(a != b for a, b in zip(greedy, beam, strict=True)),
        "sentence_parts": dict(zip(names, lines, strict=True)),
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
    return {
        "split": split,
        "sentences": len(pairs),
        "signatures": {"bleu": corpus_bleu(outputs[5], references).signature},
        "beams": [{"beam": k} | scores_of(texts, references) for k, texts in outputs.items()],
        "penalties": by_penalty(trained, pairs),
        "penalties_on_val": by_penalty(trained, corpus["val"][: options.sentences]),
        "beam_against_greedy": beam_against_greedy(outputs[1], outputs[5], references),
        "worst": worst(pairs, outputs[5]),
    }


main = subject_command("scripts.studies.judging", "decoding", analyse_model)

if __name__ == "__main__":
    raise SystemExit(main())
