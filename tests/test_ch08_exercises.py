"""Chapter 8's exercises: each checker distinguishes mistakes and accepts other right answers."""

import math

import torch
from bruteforce import every_hypothesis
from exercising import assert_told_apart

from scripts.book.phrases import END, START, PhraseBook, every_sentence
from scripts.ch06_training import BOS, EOS, greedy_decode
from scripts.ch08_decoding import (
    NEXT_WORD,
    Hypothesis,
    beam_by_hand,
    beam_search,
    hypothesis,
    next_log_probs,
    sharpened,
)
from scripts.exercises import ch08 as ours
from scripts.exercises.ch08 import (
    check_likeliest_text,
    likeliest_text,
    misleading_table,
    near_the_best,
)

# The likeliest text


def by_greedy(model, src, max_len):
    ids = greedy_decode(model, src, None, max_len)[0].tolist()
    return hypothesis(ids, -1.0)


def by_a_beam(model, src, max_len):
    return beam_search(model, src, None, max_len, beam=8, alpha=0.0)[0][0]


def depth_first(bound=lambda total, depth: total, ordered=True, cut=True, slack=0.0):
    """Depth-first search with something wrong: its bound, its order, or what counts as a text."""

    def search(model, src, max_len):
        memory, best = model.encode(src, None), Hypothesis((), -math.inf, 0)

        def extend(ids, log_prob):
            nonlocal best
            log_probs = next_log_probs(model, memory, None, torch.tensor([[BOS, *ids]]))[0]
            tokens = log_probs.argsort(descending=ordered).tolist()
            for token in tokens:
                total = log_prob + log_probs[token].item()
                value = bound(total, len(ids) + 1)
                if total == -math.inf or value <= bound(best.log_prob, best.length or 1) - slack:
                    continue
                last = len(ids) + 1 == max_len
                if token == EOS or (last and cut):
                    if value > bound(best.log_prob, best.length or 1):
                        best = hypothesis([*ids, token], total)
                elif not last:
                    extend([*ids, token], total)

        extend([], 0.0)
        return best

    return search


def off_by_the_last_token(model, src, max_len):
    found = likeliest_text(model, src, max_len)
    return Hypothesis(found.ids, found.log_prob + 0.1, found.length)


def end_not_counted(model, src, max_len):
    found = likeliest_text(model, src, max_len)
    return Hypothesis(found.ids, found.log_prob, len(found.ids))


def nothing_if_cut(model, src, max_len):
    found = likeliest_text(model, src, max_len)
    return found if found.length < max_len else None


def never_silent(model, src, max_len):
    """Leaves out the empty text."""
    found = likeliest_text(model, src, max_len)
    return found if found.ids else hypothesis([4, 5, EOS], math.log(0.3))


def test_the_likeliest_text_is_told_from_what_is_nearly_it():
    assert_told_apart(
        check_likeliest_text,
        {
            "you found 'the dog sleeps'": by_greedy,
            "possible winner": by_a_beam,
            "you found 'a dog is sleeping'": depth_first(
                bound=lambda total, depth: total / depth, slack=9.0
            ),
            "cut at the limit": depth_first(cut=False),
            "its log p isn't": off_by_the_last_token,
            "length counts": end_not_counted,
            "gives None": nothing_if_cut,
            "return a Hypothesis": lambda *given: likeliest_text(*given).ids,
            "</s> at once": never_silent,
            "13 are enough": depth_first(ordered=False),
        },
    )


# A phrase book that misleads


def changed(**rows):
    return lambda: misleading_table() | rows


def with_start(row):
    return lambda: misleading_table() | {START: row}


CIRCLE = changed(dog={"dog": 0.5, END: 0.5})
NO_ROW = changed(one={"cat": 1.0})
NOT_ONE = changed(one={"dog": 0.9})
GREEDY = with_start({"the": 0.2, "a": 0.2, "one": 0.6})


def well_known_table() -> dict[str, dict[str, float]]:
    """The chapter's table."""
    return NEXT_WORD


def table_too_hard() -> dict[str, dict[str, float]]:
    """The answer's first word is only the fourth best."""
    table = misleading_table()
    start = {"the": 0.27, "a": 0.25, "some": 0.245, "one": 0.235}
    return table | {START: start, "some": {"dog": 0.5, "hound": 0.5}}


def test_each_unfit_table_is_told_apart():
    wrong = {
        "beam of 2 finds": well_known_table,
        "beam of 3 misses": table_too_hard,
        "Greedy decoding finds": GREEDY,
        "is there a loop": CIRCLE,
        "'cat' is missing": NO_ROW,
        "'one' is missing": NOT_ONE,
        "'<s>' is missing": lambda: {"the": {END: 1.0}},
    }
    assert_told_apart(ours.check_misleading_table, wrong)


def test_the_misleading_table_misleads_the_beam_in_tensors():
    table = misleading_table()
    likeliest = " ".join(every_sentence(table)[0][0])
    book, src = PhraseBook(table), torch.tensor([[3]])
    for beam in (1, 2, 3):
        ids = beam_search(book, src, None, 10, beam, alpha=0.0)[0][0].ids
        assert (f"{book.text(ids)} {END}" == likeliest) == (beam == 3)
    assert every_sentence(NEXT_WORD)[0][0] == beam_by_hand(NEXT_WORD, 2)[0][0][0]


# Near the best


def absolute_bound(log_probs, share, temperature=1.0):
    p = sharpened(log_probs, temperature)
    p = p.masked_fill(p < share, 0.0)
    return p / p.sum(dim=-1, keepdim=True)


def never_equal(log_probs, share, temperature=1.0):
    p = sharpened(log_probs, temperature)
    p = p.masked_fill(p <= share * p.amax(dim=-1, keepdim=True), 0.0)
    return p / p.sum(dim=-1, keepdim=True)


def best_of_the_batch(log_probs, share, temperature=1.0):
    p = sharpened(log_probs, temperature)
    p = p.masked_fill(p < share * p.max(), 0.0)
    return p / p.sum(dim=-1, keepdim=True)


def cut_before_temperature(log_probs, share, temperature=1.0):
    kept = near_the_best(log_probs, share) > 0
    return sharpened(log_probs.masked_fill(~kept, -math.inf), temperature)


def not_brought_to_1(log_probs, share, temperature=1.0):
    p = sharpened(log_probs, temperature)
    return p * (near_the_best(log_probs, share, temperature) > 0)


def only_cut_by_temperature(log_probs, share, temperature=1.0):
    kept = near_the_best(log_probs, share, temperature) > 0
    return log_probs.masked_fill(~kept, -math.inf).softmax(dim=-1)


def in_place(log_probs, share, temperature=1.0):
    log_probs /= temperature
    return near_the_best(log_probs, share)


def test_each_mistake_near_the_best_is_told_apart():
    wrong = {
        "the bound is 0.4 · 0.5": absolute_bound,
        "must stay": never_equal,
        "Each row": best_of_the_batch,
        "before the cut": cut_before_temperature,
        "must sum to 1": not_brought_to_1,
        "lacks the temperature": only_cut_by_temperature,
        "`log_probs` itself was changed": in_place,
    }
    assert_told_apart(ours.check_near_the_best, wrong)


def test_another_way_near_the_best_passes():
    """A checker asks for the right result, not for our way to it."""

    def in_logarithms(log_probs, share, temperature=1.0):
        best = log_probs.amax(dim=-1, keepdim=True)
        far = (log_probs - best) / temperature < math.log(share)
        return (log_probs / temperature).masked_fill(far, -math.inf).softmax(dim=-1)

    ours.check_near_the_best(in_logarithms)


def test_brute_force_and_the_exercise_agree():
    model = PhraseBook({START: {"a": 0.5, "b": 0.5}, "a": {"b": 0.9, "</s>": 0.1}})
    src = torch.tensor([[EOS]])
    everything = every_hypothesis(model, src, len(model.words), 3)
    best = max(everything, key=lambda h: h.log_prob)
    assert likeliest_text(model, src, 3).ids == best.ids
