"""Chapter 8's exercises: our solutions, and checkers that say what is wrong."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from heapq import heappop, heappush

import torch
from torch import Tensor, nn

from scripts.book.exercises import same_numbers
from scripts.book.instruments import count_calls
from scripts.book.phrases import END, START, PhraseBook, every_sentence
from scripts.ch06_training import BOS, EOS
from scripts.ch08_decoding import (
    NEXT_WORD,
    Hypothesis,
    beam_by_hand,
    dropout_off,
    hypothesis,
    next_log_probs,
    sharpened,
)


def check_misleading_table(candidate: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
    """Searches the table that candidate() gives, with beams of 1, 2 and 3."""
    table, words = candidate(), {START}
    made = isinstance(table, Mapping) and all(isinstance(row, Mapping) for row in table.values())
    assert made, "return a dictionary: for each word a dictionary of the words that may follow"
    for _ in range(8):
        for word in words:
            right = math.isclose(sum(table.get(word, {}).values()), 1)
            assert right, f"The row of {word!r} is missing or doesn't sum to 1."
        words = {following for word in words for following in table[word]} - {END}
    assert not words, "A sentence has eight words and still no end: is there a loop?"
    likeliest = every_sentence(table)[0][0]
    found = [beam_by_hand(table, beam)[0][0][0] == likeliest for beam in (1, 2, 3)]
    assert not found[0], (
        "Greedy decoding finds it. At some step its next word must not be the likeliest."
    )
    assert not found[1], "A beam of 2 finds it. At some step its beginning must be only third best."
    assert found[2], "A beam of 3 misses it too. No more than two beginnings may ever be better."


def misleading_table() -> dict[str, dict[str, float]]:
    """The likelier the first word, the less sure the table is about the next ones."""
    return NEXT_WORD | {START: {"the": 0.36, "a": 0.33, "one": 0.31}}


def check_likeliest_text(candidate: Callable[[nn.Module, Tensor, int], Hypothesis]) -> None:
    """`candidate(model, src, max_len)` on phrase books whose likeliest texts are known."""
    src = torch.tensor([[EOS]])
    silent = {START: {"a": 0.6, END: 0.4}, "a": {"dog": 0.5, "hound": 0.5}}
    nine = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    late = {START: dict.fromkeys(nine, 0.101) | {"ten": 0.091}, "ten": {"dogs": 1.0}}
    late |= dict.fromkeys(nine, {"dogs": 0.4, "hounds": 0.3, "puppies": 0.3})
    late |= dict.fromkeys(("dogs", "hounds", "puppies"), {END: 1.0})
    for table, limit, wanted, p, why in (
        (NEXT_WORD, 10, "a dog sleeps", 0.16, "Greedy decoding and the best mean miss it."),
        (late, 10, "ten dogs", 0.091, "You dropped a possible winner."),
        (silent, 10, "", 0.4, "The empty text, </s> at once, may be the likeliest."),
        (NEXT_WORD, 2, "a dog", 0.32, "With max_len = 2 the text is cut at the limit."),
    ):
        book = PhraseBook(table)
        calls, found = count_calls(book.generator, partial(candidate, book, src, limit))
        made = "return a Hypothesis, as hypothesis(ids, log_prob) makes it"
        assert hasattr(found, "ids"), f"{made}, not {found!r}"
        said = book.text(found.ids)
        assert said == wanted, f"The likeliest text is {wanted!r}, but you found {said!r}. {why}"
        right = math.isclose(math.exp(found.log_prob), p, rel_tol=1e-6)
        assert right, "The text is right, but its log p isn't."
        assert found.length == len(wanted.split()) + (limit > 2), "The length counts </s> as well."
        assert calls <= 13, (
            f"You called the model {calls} times. 13 are enough if the likeliest comes first."
        )
    book = PhraseBook(NEXT_WORD)
    book.generator = nn.Dropout(0.5)
    again = book.text(candidate(book, src, 10).ids) == "a dog sleeps"
    assert again and book.training, "Dropout must be off while you search, and then as it was."


def likeliest_text(model: nn.Module, src: Tensor, max_len: int) -> Hypothesis:
    """Always continues the likeliest of all prefixes, until that is a finished text."""
    with dropout_off(model):
        memory, prefixes = model.encode(src, None), [(0.0, ())]  # (1, S, D); -log p and ids
        while True:
            cost, ids = heappop(prefixes)
            if len(ids) == max_len or EOS in ids:
                return hypothesis(ids, -cost)
            log_probs = next_log_probs(model, memory, None, src.new_tensor([[BOS, *ids]]))  # (1, V)
            for token, log_prob in enumerate(log_probs[0].tolist()):
                heappush(prefixes, (cost - log_prob, (*ids, token)))


def check_near_the_best(candidate: Callable[[Tensor, float, float], Tensor]) -> None:
    """`candidate(log_probs, share, temperature)`: (B, V) to (B, V)."""
    p = torch.tensor([[0.5, 0.25, 0.15, 0.1], [0.3, 0.25, 0.25, 0.2]], dtype=torch.float64)
    for rows, share, temperature, kept, message in (
        (p[:1], 0.4, 1.0, [[0, 1]], "0.5, 0.25, 0.15, 0.1: with share 0.4 the bound is 0.4 · 0.5."),
        (p[:1], 1.0, 1.0, [[0]], "With share 1 the likeliest token must stay."),
        (p, 0.6, 1.0, [[0], [0, 1, 2, 3]], "Each row has its own likeliest token."),
        (p[:1], 0.22, 0.5, [[0, 1]], "Temperature 0.5 squares each p, and comes before the cut."),
    ):
        found = candidate(rows.log(), share, temperature)
        assert [(row > 0).nonzero().flatten().tolist() for row in found] == kept, message
        assert abs(found.sum() - len(rows)) < 1e-6, (
            "What is left must sum to 1: divide it by its sum."
        )
    assert same_numbers(found[:, :2], torch.tensor([[0.8, 0.2]])), (
        "The right tokens stay, but what is drawn from lacks the temperature."
    )


def near_the_best(log_probs: Tensor, share: float, temperature: float = 1.0) -> Tensor:
    """(B, V) to (B, V): tokens with at least `share` of the likeliest one's probability."""
    p = sharpened(log_probs, temperature)
    p = p.masked_fill(p < share * p.amax(dim=-1, keepdim=True), 0.0)
    return p / p.sum(dim=-1, keepdim=True)
