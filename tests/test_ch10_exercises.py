"""Chapter 10's exercises: each checker takes our solution, and tells the common mistakes apart."""

import math

import pytest
import torch

from scripts import ch10_decoding_and_bleu as ch10
from scripts.book.exercises import rejection
from scripts.ch10_decoding_and_bleu import (
    END,
    NEXT_WORD,
    START,
    BleuParts,
    CachedDecoding,
    CopiedCache,
    PrefixDecoding,
    beam_by_hand,
    cached_beam_search,
    every_sentence,
    ngram_counts,
    solution_misleading_table,
    solution_typical,
    solution_wu_penalty,
    tokens_13a,
)

# A phrase book that misleads


def changed(**rows):
    return lambda: solution_misleading_table() | rows


def with_start(row):
    return lambda: solution_misleading_table() | {START: row}


CIRCLE = changed(dog={"dog": 0.5, END: 0.5})
NO_ROW = changed(one={"cat": 1.0})
NOT_ONE = changed(one={"dog": 0.9})
GREEDY = with_start({"the": 0.2, "a": 0.2, "one": 0.6})


# The paper's length penalty


def multiplied(found, alpha):
    return found.log_prob * ((5 + found.length) / 6) ** alpha


def six_not_raised(found, alpha):
    return found.log_prob / ((5 + found.length) ** alpha / 6) if alpha else found.log_prob


def chapters_own(found, alpha):
    return found.score(alpha)


def without_six(found, alpha):
    return found.log_prob / (5 + found.length) ** alpha


def always_divided(found, alpha):
    return found.log_prob / ((5 + found.length) / 6) ** max(alpha, 0.1)


def another_constant(found, alpha):
    return found.log_prob / ((4 + found.length) / 5) ** alpha


# Typical sampling


def nucleus(log_probs, mass, temperature=1.0):
    return ch10.sharpened(log_probs, temperature, top_p=mass)


def not_renormalised(log_probs, mass, temperature=1.0):
    p = solution_typical(log_probs, 1.0, temperature)
    return p * (solution_typical(log_probs, mass, temperature) > 0)


def nan_where_ruled_out(log_probs, mass, temperature=1.0):
    """0·(−∞) in the entropy."""
    p = (log_probs / temperature).softmax(-1)
    entropy = -(p * p.log()).sum(-1, keepdim=True)
    return solution_typical(log_probs, mass, temperature) + 0 * entropy


def entropy_of_the_batch(log_probs, mass, temperature=1.0):
    """The first row's words for all rows."""
    p = solution_typical(log_probs, 1.0, temperature)
    chosen = solution_typical(log_probs.mean(0, keepdim=True), mass, temperature) > 0
    kept = p * chosen
    return kept / kept.sum(-1, keepdim=True)


def entropy_before_temperature(log_probs, mass, temperature=1.0):
    """Chooses by the distribution as it was, and sharpens what is left."""
    chosen = solution_typical(log_probs, mass) > 0
    p = (log_probs / temperature).softmax(-1) * chosen
    return p / p.sum(-1, keepdim=True)


def never_all(log_probs, mass, temperature=1.0):
    return solution_typical(log_probs, min(mass, 0.9), temperature)


# BLEU with several references


def parts_of(outputs, references, allowed_of, length_of):
    matches, totals, c, r = [0] * 4, [0] * 4, 0, 0
    for output, texts in zip(outputs, references, strict=True):
        ours, theirs = tokens_13a(output), [tokens_13a(text) for text in texts]
        for n in range(1, 5):
            found = ngram_counts(ours, n)
            matches[n - 1] += (found & allowed_of(theirs, n, found)).total()
            totals[n - 1] += found.total()
        c, r = c + len(ours), r + length_of(len(ours), [len(tokens) for tokens in theirs])
    return BleuParts(matches, totals, c, r)


def generous(theirs, n, found):
    allowed = ngram_counts(theirs[0], n)
    for tokens in theirs[1:]:
        allowed |= ngram_counts(tokens, n)
    return allowed


def added(theirs, n, found):
    return sum((ngram_counts(tokens, n) for tokens in theirs[1:]), ngram_counts(theirs[0], n))


def first_alone(theirs, n, found):
    return ngram_counts(theirs[0], n)


def unlimited(theirs, n, found):
    known = generous(theirs, n, found)
    return type(found)({gram: times for gram, times in found.items() if gram in known})


def closest(c, lengths):
    return min((abs(n - c), n) for n in lengths)[1]


def closest_listed(c, lengths):
    return min(lengths, key=lambda n: abs(n - c))


def bleu_with(allowed_of=generous, length_of=closest):
    def bleu(outputs, references):
        return parts_of(outputs, references, allowed_of, length_of).score

    return bleu


UNCLIPPED, FIRST_ONLY, ADDED = map(bleu_with, (unlimited, first_alone, added))
SHORTEST = bleu_with(length_of=lambda c, lengths: min(lengths))
LONGEST = bleu_with(length_of=lambda c, lengths: max(lengths))
LISTED = bleu_with(length_of=closest_listed)


def from_nothing_to_one(outputs, references):
    return ch10.solution_many_references(outputs, references) / 100


def lower_cased(outputs, references):
    return ch10.solution_many_references(
        [o.lower() for o in outputs], [[r.lower() for r in texts] for texts in references]
    ) + (1e-3 if len(references) == 3 else 0)


# The cache as everyone has it


class MisplacedCache(CopiedCache):
    """Every token stands at place 0."""

    def step(self, tokens):
        self.length = 0
        return super().step(tokens)


class NotWidened(CopiedCache):
    """Says that it is at <s> what it is not: no mask of the source."""

    def __init__(self, model, src, src_mask):
        super().__init__(model, src, None)


class ShiftingCache(CopiedCache):
    """Rearranges even what should stay."""

    def follow(self, origin):
        super().follow(origin.roll(1, dims=1) if origin[0].unique().numel() == 3 else origin)


class MaskStays(CopiedCache):
    """Drops a sentence and keeps its mask."""

    def keep(self, rows):
        mask = self.src_mask
        super().keep(rows)
        self.src_mask = mask[: len(self.memory)]


WRONG = {
    "misleading_table": {
        ch10.well_known_table: "beam of 2 finds",
        ch10.table_too_hard: "beam of 3 misses",
        GREEDY: "Greedy decoding finds",
        CIRCLE: "is there a circle",
        NO_ROW: "has no row",
        NOT_ONE: "sums to 0.9",
        lambda: {"the": {END: 1.0}}: "how a sentence begins",
        lambda: {START: {"a": 0.5, "b": 0.5}, "a": {END: 1.0}, "b": {END: 1.0}}: "Two sentences",
    },
    "wu_penalty": {
        ch10.penalty_without_end: "scored as 3 tokens",
        ch10.penalty_with_every_end: "cut at the limit",
        multiplied: "was multiplied",
        six_not_raised: "isn't raised to alpha",
        chapters_own: "not the paper's",
        without_six: "no 5 + 1 below",
        always_divided: "With alpha = 0",
        another_constant: "has another score",
    },
    "typical": {
        ch10.typical_below_mass: "crosses the mass",
        ch10.typical_with_ties: "lets all equals in",
        ch10.typical_then_temperature: "after the softmax it is too late",
        nucleus: "*distance* from the entropy",
        not_renormalised: "doesn't sum to 1",
        nan_where_ruled_out: "0·(−∞)",
        entropy_of_the_batch: "other rows of the batch",
        entropy_before_temperature: "whose entropy",
        never_all: "With mass 1",
    },
    "many_references": {
        ch10.mean_of_sentence_bleus: "mean of the sentences' BLEU",
        ch10.references_as_one: "references' counts were added",
        UNCLIPPED: "repeats itself",
        FIRST_ONLY: "only one of the references",
        from_nothing_to_one: "0 to 1",
        lower_cased: "With one reference each",
        SHORTEST: "shortest reference",
        LONGEST: "references of 4 and 8",
        LISTED: "references of 6 and 4",
    },
    "copied_cache": {
        ch10.UnmovedCache: "the cache didn't follow",
        ch10.MixedFamilies: "only the first sentence",
        PrefixDecoding: "come from the cache",
        MisplacedCache: "stand at place 1",
        NotWidened: "At <s>",
        ShiftingCache: "Nothing was to be moved",
        MaskStays: "its mask as well",
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_the_solution_passes(name):
    check, solution = (getattr(ch10, f"{kind}_{name}") for kind in ("check", "solution"))
    assert check(solution) is None


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    check = getattr(ch10, f"check_{name}")
    answers = {wrong: rejection(check, wrong) for wrong in WRONG[name]}
    for wrong, words in WRONG[name].items():
        assert words in answers[wrong], (wrong, answers[wrong])
    assert len(set(answers.values())) == len(answers)


def test_other_right_answers_pass():
    """A checker asks for the thing, not for our way to it."""

    def word_by_word(log_probs, mass, temperature=1.0):
        rows = []
        for row in (log_probs / temperature).log_softmax(-1).tolist():
            p = [math.exp(x) for x in row]
            entropy = -sum(q * x for q, x in zip(p, row, strict=True) if q > 0)
            order = sorted(range(len(p)), key=lambda i: abs(-row[i] - entropy))
            kept, total = [0.0] * len(p), 0.0
            for i in order:
                if total >= mass:
                    break
                kept[i], total = p[i], total + p[i]
            rows.append([q / total for q in kept])
        return torch.tensor(rows, dtype=torch.float64)

    ch10.check_typical(word_by_word)
    ch10.check_copied_cache(CachedDecoding)  # our own, which moves no rows
    ch10.check_wu_penalty(lambda h, alpha: h.log_prob * (6 / (5 + h.length)) ** alpha)
    assert "counts were added" in rejection(ch10.check_many_references, ADDED)


def test_the_misleading_table_misleads_the_beam_in_tensors():
    table = solution_misleading_table()
    likeliest = " ".join(every_sentence(table)[0][0])
    book, src = ch10.PhraseBook(table), torch.tensor([[3]])
    for beam in (1, 2, 3):
        ids = cached_beam_search(book, src, None, 10, beam, alpha=0.0)[0][0].ids
        assert (f"{book.text(ids)} {END}" == likeliest) == (beam == 3)
    assert every_sentence(NEXT_WORD)[0][0] == beam_by_hand(NEXT_WORD, 2)[0][0][0]


def test_the_two_length_penalties_agree_at_one_token_and_grow_alike():
    one, many = (ch10.hypothesis([7] * n, -2.0) for n in (1, 100_000))
    assert solution_wu_penalty(one, 0.6) == one.score(0.6) == -2
    ratio = solution_wu_penalty(many, 0.6) / many.score(0.6)
    assert ratio == pytest.approx(6**0.6, rel=1e-4)


def test_the_copied_cache_serves_the_search(monkeypatch):
    """A beam search finds the same texts with it."""
    torch.manual_seed(1)
    model = ch10.make_model(8, 8, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).eval()
    src = ch10.pad_rows([[4, 5, 6, 3], [5, 3], [6, 6, 3]])
    mask = ch10.padding_mask(src)
    wanted = cached_beam_search(model, src, mask, 12, 3, 0.6)
    monkeypatch.setattr(ch10, "decoding_of", CopiedCache)
    found = cached_beam_search(model, src, mask, 12, 3, 0.6)
    assert [[h.ids for h in hs] for hs in found] == [[h.ids for h in hs] for hs in wanted]
