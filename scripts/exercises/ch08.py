"""Exercises of chapter 8: our solutions, and checkers that tell the common mistakes apart."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

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
    """Searches the table that candidate() gives, by beams of 1, 2 and 3."""
    table = candidate()
    paths: list[tuple[str, ...]] = [(START,)]
    while paths:
        path = paths.pop()
        row = table.get(path[-1], {})
        assert math.isclose(sum(row.values()), 1), (
            f"The row of {path[-1]!r} is missing or doesn't sum to 1. One of its words comes next."
        )
        assert len(path) < 9, "A sentence has eight words and no end yet: is there a circle?"
        paths += [(*path, word) for word in row if word != END]
    likeliest = every_sentence(table)[0][0]
    for beam, finds, message in (
        (1, False, "Greedy decoding finds the likeliest sentence. Begin it with another word."),
        (2, False, "A beam of 2 finds it. At some step its beginning has to be the third best."),
        (3, True, "A beam of 3 misses it, too. No more than two beginnings may ever be better."),
    ):
        assert (beam_by_hand(table, beam)[0][0][0] == likeliest) == finds, message


def misleading_table() -> dict[str, dict[str, float]]:
    """The likelier a first word, the more the table hesitates after it."""
    return {
        START: {"the": 0.40, "a": 0.35, "one": 0.25},
        "the": {"dog": 0.50, "hound": 0.50},
        "a": {"dog": 0.52, "hound": 0.48},
        "one": {"dog": 1.0},
        "dog": {END: 1.0},
        "hound": {END: 1.0},
    }


def check_likeliest_text(candidate: Callable[[nn.Module, Tensor, int], Hypothesis]) -> None:
    """`candidate(model, src, max_len)` on phrase books whose likeliest texts are known."""
    src = torch.tensor([[EOS]])
    silent = {START: {"a": 0.6, END: 0.4}, "a": {"dog": 0.5, "hound": 0.5}}
    for table, limit, wanted, p, why in (
        (NEXT_WORD, 10, "a dog sleeps", 0.16, "Greedy decoding and the best mean miss it."),
        (misleading_table(), 10, "one dog", 0.25, "Something was dropped that could still win."),
        (silent, 10, "", 0.4, "The empty text, </s> at once, may be the likeliest."),
        (NEXT_WORD, 2, "a dog", 0.32, "With max_len = 2 it is cut at the limit."),
    ):
        book = PhraseBook(table)
        calls, found = count_calls(book.generator, partial(candidate, book, src, limit))
        said = book.text(found.ids)
        assert said == wanted, f"The likeliest is {wanted!r}, and you found {said!r}. {why}"
        assert math.isclose(math.exp(found.log_prob), p), "The text is right, its log p isn't."
        assert calls <= 10, f"It asked {calls} times; 10 suffice with the likeliest word first."


def likeliest_text(model: nn.Module, src: Tensor, max_len: int) -> Hypothesis:
    """Depth first, likeliest word first; what is no better than the best finished text is left."""
    memory = model.encode(src, None)  # (1, S, D)
    best = Hypothesis((), -math.inf, 0)

    def extend(ids: list[int], log_prob: float) -> None:
        nonlocal best
        prefix = torch.tensor([[BOS, *ids]])  # (1, T+1)
        ordered = next_log_probs(model, memory, None, prefix)[0].sort(descending=True)
        for more, token in zip(ordered.values.tolist(), ordered.indices.tolist(), strict=True):
            if log_prob + more <= best.log_prob:
                return  # all that follow are no likelier
            if token == EOS or len(ids) + 1 == max_len:
                best = hypothesis([*ids, token], log_prob + more)
            else:
                extend([*ids, token], log_prob + more)

    with dropout_off(model):
        extend([], 0.0)
    return best


def check_near_the_best(candidate: Callable[[Tensor, float, float], Tensor]) -> None:
    """`candidate(log_probs, share, temperature)`: (B, V) to (B, V)."""
    p = torch.tensor([[0.5, 0.25, 0.15, 0.1], [0.3, 0.25, 0.25, 0.2]], dtype=torch.float64)
    sums = candidate(p[:1].log(), 0.4, 1.0).sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums)), "What is left must be brought to sum 1."
    for rows, share, temperature, kept, message in (
        (p[:1], 0.4, 1.0, [[0, 1]], "The bound is a share of the largest p, not a p itself."),
        (p[:1], 1.0, 1.0, [[0]], "With share 1 the likeliest token must stay."),
        (p, 0.6, 1.0, [[0], [0, 1, 2, 3]], "Each row has its own likeliest token."),
        (p[:1], 0.4, 0.5, [[0]], "The temperature comes before the cut."),
    ):
        found = candidate(rows.log(), share, temperature)
        assert [(row > 0).nonzero().flatten().tolist() for row in found] == kept, message


def near_the_best(log_probs: Tensor, share: float, temperature: float = 1.0) -> Tensor:
    """(B, V) to (B, V): tokens with at least `share` of the likeliest one's probability."""
    p = sharpened(log_probs, temperature)
    p = p.masked_fill(p < share * p.amax(dim=-1, keepdim=True), 0.0)
    return p / p.sum(dim=-1, keepdim=True)
