"""sacreBLEU of a model on a corpus: `python -m scripts.evaluate --corpus sample`.

Or on lines of your own: `--input FILE --reference FILE`.

Cased BLEU comes first: the figure that we report. Lower-cased BLEU and chrF2 follow, for
comparison with papers that give them. Each has its signature. With `--against` a second model
translates the same texts, and chapter 10's test says whether their difference is more than chance.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scripts.book.command import Command
from scripts.ch10_judging import paired_difference, sentence_parts
from scripts.core.data import corpus_beside
from scripts.core.models import Trained
from scripts.core.scores import corpus_bleu, corpus_chrf, held_out_splits, unspaced
from scripts.corpora.load import load_corpus
from scripts.corpora.pairs import read_pairs
from scripts.fast.lines import row_groups, text_stream
from scripts.fast.translating import FULL, ModelOptions, decode_texts, model_folder, open_model


@dataclass
class EvaluateOptions(ModelOptions):
    """What to translate and score."""

    corpus: str | None = None
    """What to translate; by default what the model was trained on."""
    split: str | None = None
    """One split of it; by default each test split."""
    input: str | None = None
    """A file of sentences to translate and score, with --reference in place of a corpus."""
    reference: str | None = None
    """Their translations, line by line."""
    against: str | None = None
    """Another model's folder: is the first one's BLEU higher by more than chance in the texts?"""

    def __post_init__(self):
        super().__post_init__()
        if (self.input is None) != (self.reference is None):
            raise ValueError("--input and --reference belong together: give both")
        if self.input is not None and (self.corpus or self.split):
            raise ValueError("either --input and --reference, or --corpus and --split")


def pairs_to_score(options: EvaluateOptions, trained: Trained) -> dict[str, list[tuple[str, str]]]:
    """What `evaluate` was asked to translate, by name. Raises ValueError or FileNotFoundError."""
    if options.input is not None:
        lines = read_pairs(options.input, options.reference)
        for note in lines.notes:
            print(f"note: {note.count:,} {note.what}", file=sys.stderr)
        return {options.input: lines.pairs}
    corpus_name = options.corpus or corpus_beside(model_folder(options), trained.config)
    corpus = load_corpus(corpus_name, trained.config.languages)
    if options.split and options.split not in corpus:
        known = ", ".join(corpus)
        raise ValueError(f"{corpus_name} has no split {options.split!r}: choose from {known}")
    return {s: corpus[s] for s in ([options.split] if options.split else held_out_splits(corpus))}


def score_lines(outputs: Sequence[str], references: Sequence[str], search: str) -> list[str]:
    """Cased BLEU, lower-cased BLEU and chrF2, from 0 to 100, each on a line with its signature."""
    cased, lower = (corpus_bleu(outputs, references, lowercase=low) for low in (False, True))
    letters = corpus_chrf(outputs, references)
    return [
        f"BLEU {cased.score:.2f}  {search}  ({cased.signature})",
        f"lower-cased BLEU {lower.score:.2f}  ({lower.signature})",
        f"{letters.name} {letters.score:.2f}  ({letters.signature})",
    ]


def difference_line(
    outputs: Sequence[str], theirs: Sequence[str], references: Sequence[str], rival: str
) -> str:
    """Our BLEU minus the rival's, as a line: an interval from draws of the texts, p from swaps."""
    texts = theirs, outputs, references
    if unspaced(references):  # letter by letter, as their BLEU
        texts = ([" ".join(text) for text in side] for side in texts)
    *systems, targets = texts
    test = paired_difference(sentence_parts(systems, targets))
    chance = f"95% of draws: {test.low:+.2f} to {test.high:+.2f}; p = {test.p:.4f}"
    return f"{test.difference:+.2f} BLEU against {rival}  ({chance})"


def outputs_of(trained: Trained, sources: Sequence[str], options: EvaluateOptions) -> list[str]:
    """The model's translations of these lines; "" where it finds none."""
    rows = [row for group in row_groups(trained, text_stream(sources)) for row in group]
    return decode_texts(trained, rows, options)


def run_evaluate(options: EvaluateOptions) -> None:
    """Print sacreBLEU's scores of a model with their signatures, and its first translations."""
    trained = open_model(options)
    rival = open_model(replace(options, model=options.against)) if options.against else None
    for name, pairs in pairs_to_score(options, trained).items():
        print(f"translating {len(pairs):,} lines of {name}", file=sys.stderr)
        sources, references = zip(*pairs, strict=True)
        outputs = outputs_of(trained, sources, options)
        lines = score_lines(outputs, references, options.of(trained).in_words())
        if rival:
            theirs = outputs_of(rival, sources, options)
            opponent = f"{options.against}  {options.of(rival).in_words()}"
            lines.append(difference_line(outputs, theirs, references, opponent))
        for line in lines:
            print(f"{name}: {line}")
        for source, reference, output in list(zip(sources, references, outputs, strict=True))[:3]:
            print(f"\n  source       {source}\n  reference    {reference}\n  translation  {output}")


main = Command("scripts.evaluate", EvaluateOptions, run_evaluate, memory=FULL)

if __name__ == "__main__":
    raise SystemExit(main())
