"""Exercises of chapter 15: our solutions, and checkers that tell the common mistakes apart."""

from collections.abc import Callable

import torch
from torch import Tensor

from scripts.book.exercises import blame, same_numbers
from scripts.ch15_looking_inside import Look

AxisNames = Callable[[Look, str], tuple[list[str], list[str]]]


def example_look(S: int, T: int) -> Look:
    """A made-up `Look` of distinct pieces, whose maps are random but sound."""
    source = tuple(f"▁quelle{s}" for s in range(S - 1)) + ("</s>",)
    text = tuple(f"▁word{t}" for t in range(T - 1))
    sizes = {"encoder": (S, S), "decoder": (T, T), "cross": (T, S)}
    maps = {kind: torch.rand(2, 2, *size).softmax(-1) for kind, size in sizes.items()}
    src, tgt = torch.arange(S).unsqueeze(0) + 4, torch.arange(T).unsqueeze(0) + 40
    return Look(src, tgt, tgt + 1, source, ("<s>", *text), (*text, "</s>"), maps)


def check_axis_names(candidate: AxisNames) -> None:
    """Holds candidate(look, kind) against the texts: equal lengths hide mistakes, others don't."""
    for look in (example_look(4, 6), example_look(5, 5)):
        source, _ = axis_names(look, "encoder")
        arrows, read = axis_names(look, "decoder")
        written = [arrow.split(" → ")[1] for arrow in arrows]
        for kind in look.maps:
            rows, columns = map(list, candidate(look, kind))
            asks = [source] if kind == "encoder" else [read, written, arrows]
            keys = read if kind == "decoder" else source
            assert kind == "encoder" or not set(rows) & set(source[:-1]), (
                f"{kind}: the rows carry source words, but who asks is the decoder, which holds "
                "what it has written so far."
            )
            assert kind == "encoder" or set(rows) <= {*read, *written, *arrows}, (
                f"{kind}: no query ever read or wrote some of {rows}."
            )
            assert kind != "decoder" or not set(columns) & set(source[:-1]), (
                "decoder: its own attention looks at the target; its columns aren't source words."
            )
            assert kind != "decoder" or columns != written, (
                "decoder: the columns are what was read, from <s> on, not what is written next."
            )
            assert columns == keys, f"{kind}: the columns must be {keys}, not {columns}."
            assert rows in asks, f"{kind}: the rows must be {asks[-1]}, not {rows}."


def axis_names(look: Look, kind: str) -> tuple[list[str], list[str]]:
    """Queries down, keys across; a decoder's query by what it reads and what it writes."""
    source, read, written = (
        [piece.removeprefix("▁") for piece in pieces]
        for pieces in (look.source, look.read, look.written)
    )
    queries = [f"{r} → {w}" for r, w in zip(read, written, strict=True)]
    return (source if kind == "encoder" else queries), (read if kind == "decoder" else source)


def check_rollout(candidate: Callable[[Tensor], Tensor]) -> None:
    """Holds candidate(maps) against the product written out, on three random layers."""
    draws = torch.Generator().manual_seed(0)
    maps = torch.randn(3, 2, 5, 5, generator=draws, dtype=torch.float64).mul(2).softmax(-1)
    means = maps.mean(1)
    first, second, third = (means + torch.eye(5, dtype=torch.float64)) / 2
    right, bare = third @ second @ first, means[2] @ means[1] @ means[0]
    mistakes = {
        "The layers stand in the wrong order: what layer 2 looks at is what layer 1 made, so the "
        "later layer stands on the left.": first @ second @ third,
        "Without the identity the residual road is missing: half of a position is itself.": bare,
        "The identity was added, but not half and half: the rows sum to more than 1.": 8 * right,
        "That is a mean over the layers. What one passes on, the next mixes again: multiply.": (
            (first + second + third) / 3
        ),
        "Multiplied cell by cell. To follow the roads, take a product of matrices.": (
            third * second * first
        ),
    }
    got = candidate(maps)
    if not same_numbers(got, right):
        blame(got, mistakes, "For three layers of two heads it's another matrix.")


def rollout(maps: Tensor) -> Tensor:
    """The product of the layers' mean maps, each mixed with the identity."""
    eye = torch.eye(maps.size(-1), dtype=maps.dtype)
    reached = eye
    for layer in maps.mean(1):
        reached = (layer + eye) / 2 @ reached
    return reached
