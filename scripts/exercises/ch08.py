"""Chapter 8's exercises."""

import math
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

import torch
from torch import Tensor, nn

from scripts.book.exercises import exercise, probe
from scripts.book.instruments import count_calls
from scripts.book.phrases import END, START, PhraseBook, every_sentence
from scripts.ch06_training import BOS, EOS
from scripts.ch08_decoding import (
    NEXT_WORD,
    Hypothesis,
    beam_by_hand,
    beam_search,
    dropout_off,
    hypothesis,
    next_log_probs,
)


def searched(function: Callable) -> Iterator:
    """Do sentences end, do rows sum to 1, and which beams find the likeliest sentence?"""
    table, words = function(), {START}
    for _ in range(8):
        words = {following for word in words for following in table[word]} - {END}
    yield not words and all(math.isclose(sum(row.values()), 1) for row in table.values())
    likeliest = every_sentence(table)[0][0]
    yield [beam_by_hand(table, beam)[0][0][0] == likeliest for beam in (1, 2, 3)]


@exercise(
    lambda: [searched],
    "rows sum to 1, sentences end within eight words, and their likeliest begins third best",
    "greedy decoding finds it: at some step its next word must not be the likeliest",
    lambda: {START: {"a": 1.0}, "a": {END: 1.0}},
    "a beam of 2 finds it: at some step its beginning must be only third best",
    lambda: NEXT_WORD,
)
def misleading_table() -> dict[str, dict[str, float]]:
    """The likelier the first word, the less sure the table is about the next ones."""
    return NEXT_WORD | {START: {"the": 0.36, "a": 0.33, "one": 0.31}}


def search(function: Callable, table: dict, max_len: int = 10, dropout: float = 0.0) -> list:
    """Text, log p and length; were few calls enough, and is the model as it was?"""
    book = PhraseBook(table)
    book.generator = nn.Dropout(dropout)
    src = torch.tensor([[EOS]])
    calls, best = count_calls(book.generator, lambda: function(book, src, max_len))
    return [book.text(best.ids), best.log_prob, best.length, calls <= 13, book.training]


LATE = {START: dict.fromkeys("abcdefghi", 0.101) | {"ten": 0.091}, "ten": {"dogs": 1.0}}
LATE |= dict.fromkeys("abcdefghi", {"dogs": 0.4, "hounds": 0.3, "puppies": 0.3})
SILENT = {START: {"a": 0.6, END: 0.4}, "a": {"dog": 0.5, "hound": 0.5}}


@exercise(
    lambda: [probe(search, *x) for x in ((LATE,), (SILENT,), (NEXT_WORD, 2), (NEXT_WORD, 10, 0.5))],
    "not the likeliest text and its log p (perhaps </s> at once, or a cut text) in 13 calls",
    "you dropped a possible winner: only a finished text can rule out what is less likely",
    lambda model, src, max_len: beam_search(model, src, None, max_len, 4, 0.0)[0][0],
    "dropout must be off while you search, and then as it was",
    lambda model, src, max_len: likeliest_text(model.eval(), src, max_len),
)
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
