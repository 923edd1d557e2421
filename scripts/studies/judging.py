"""Chapter 10's record, of searches compared: `python -m scripts.studies.judging --save`."""

from typing import Any

from scripts.ch10_judging import sentence_parts
from scripts.core.models import Trained
from scripts.core.scores import corpus_bleu, held_out_splits
from scripts.studies.searches import scores_of, searched, texts_of
from scripts.studies.subject import Corpus, encoded, subject_command

BEAMS, NAMES = (1, 5), ("greedy", "beam of 5")  # the searches that the chapter judges


def compare_searches(trained: Trained, corpus: Corpus) -> dict[str, Any]:
    """Scores of both searches; each sentence's `sentence_parts` are a line of ten integers."""
    split = held_out_splits(corpus)[0]
    rows, references = encoded(trained, corpus[split])
    best = searched(trained, rows, BEAMS, [0.6]).values()
    outputs = dict(zip(BEAMS, (texts_of(trained, some) for some in best), strict=True))
    counts = sentence_parts([*outputs.values()], references).tolist()
    lines = ([" ".join(map(str, parts)) for parts in texts] for texts in counts)
    return {
        "split": split,
        "sentences": len(rows),
        "signatures": {"bleu": corpus_bleu(outputs[5], references).signature},
        "beams": [{"beam": k} | scores_of(texts, references) for k, texts in outputs.items()],
        "beam_against_greedy": {"sentence_parts": dict(zip(NAMES, lines, strict=True))},
    }


main = subject_command("scripts.studies.judging", "decoding", compare_searches)

if __name__ == "__main__":
    raise SystemExit(main())
