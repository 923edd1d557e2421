"""Chapter 10's record, of searches compared: `python -m scripts.studies.judging --save`."""

from typing import Any

from scripts import ch10_judging as ch10
from scripts.core.models import Trained
from scripts.core.scores import corpus_bleu, held_out_splits
from scripts.studies.searches import scores_of, searched, texts_of
from scripts.studies.subject import Corpus, Texts, encoded, subject_command

BEAMS = (1, 5)  # greedy search, and the beam that the chapter judges


def beam_against_greedy(greedy: Texts, beam: Texts, references: Texts) -> dict[str, Any]:
    """The comparison for the record. A sentence's `sentence_parts` are a line of ten integers."""
    counts = ch10.sentence_parts([greedy, beam], references)
    compared, names = ch10.paired_difference(counts), ("greedy", "beam of 5")
    lines = [[" ".join(map(str, row)) for row in rows] for rows in counts.tolist()]
    return {
        **{key: round(getattr(compared, key), 4) for key in ("difference", "low", "high", "p")},
        "sentence_parts": dict(zip(names, lines, strict=True)),
    }


def analyse_model(trained: Trained, corpus: Corpus) -> dict[str, Any]:
    """All that the record says about the model."""
    split = held_out_splits(corpus)[0]
    rows, references = encoded(trained, corpus[split])
    hypotheses = searched(trained, rows, BEAMS, [0.6])
    outputs = {beam: texts_of(trained, best) for (beam, _), best in hypotheses.items()}
    return {
        "split": split,
        "sentences": len(rows),
        "signatures": {"bleu": corpus_bleu(outputs[5], references).signature},
        "beams": [{"beam": k} | scores_of(texts, references) for k, texts in outputs.items()],
        "beam_against_greedy": beam_against_greedy(outputs[1], outputs[5], references),
    }


main = subject_command("scripts.studies.judging", "decoding", analyse_model)

if __name__ == "__main__":
    raise SystemExit(main())
