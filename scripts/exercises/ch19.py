"""Chapter 19's exercises: our solutions, and checkers that say what is wrong."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from scripts.book.exercises import compare
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch19_ablations import patient, two_sentences


def check_false_alarms(candidate: Callable[[int, float], float]) -> None:
    """Compares candidate(rows, level) with a simulation: by pure chance, p is uniform."""
    for rows, level in ((1, 0.05), (25, 0.05), (2, 0.5), (300, 0.01)):
        draws = torch.rand(20_000, rows, generator=torch.Generator().manual_seed(0))
        simulated = (draws < level).any(dim=1).double().mean().item()
        given, asked = candidate(rows, level), f"{rows} rows at {level}: "
        assert given <= 1, (
            f"{asked}{given:.2f} is not a probability. Chances of events that can happen "
            "together can't just be added."
        )
        never = f"{asked}{given:.2f} is the chance of no alarm at all. Find that of at least one."
        otherwise = f"{asked}{given:.2f}, but an alarm happens in {simulated:.2f} of the simulated "
        compare(given, simulated, {never: 1 - simulated}, otherwise + "studies.", atol=0.02)


def false_alarms(rows: int, level: float) -> float:
    """1 − the probability that no row gives an alarm."""
    return 1 - (1 - level) ** rows


def check_holm(candidate: Callable[[Sequence[float]], Sequence[float]]) -> None:
    """Compares candidate(ps) with values computed by hand."""
    ps = [0.04, 0.001, 0.03, 0.015, 0.08]
    wanted = [0.09, 0.005, 0.09, 0.06, 0.09]
    given = candidate(list(ps))
    assert len(given) == len(ps), f"{len(ps)} values went in, but {len(given)} came out."
    below = [0.08, 0.005, 0.09, 0.06, 0.08]
    mistakes = {
        "Every p was multiplied by m: that is Bonferroni. The k-th smallest is multiplied by "
        "m − k + 1.": [5 * p for p in ps],
        "The right values, but sorted. Return them in the order of ps.": sorted(wanted),
        "0.04 became 0.08, less than the 0.09 of p = 0.03. Take the largest so far.": below,
    }
    compare(given, wanted, mistakes, f"{ps} should become {wanted}, not {given}.")
    assert max(candidate([0.9, 0.8])) <= 1, "An adjusted p is above 1."


def holm(ps: Sequence[float]) -> list[float]:
    """Goes up from the smallest, and never falls below what was reached."""
    adjusted, reached = [0.0] * len(ps), 0.0
    for k, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        reached = max(reached, min(1.0, ps[i] * (len(ps) - k)))
        adjusted[i] = reached
    return adjusted


def check_shared_layers(candidate: Callable[[EncoderDecoder], Any]) -> None:
    """Compares a model of three layers after candidate(model) with one before it."""
    model, before, batch = patient(layers=3), patient(layers=3), two_sentences()
    candidate(model)
    layers, first = model.encoder.layers, before.encoder.layers[0]
    assert len(layers) == 3, f"The encoder should still be 3 layers deep, not {len(layers)}."
    kept = all(map(torch.equal, layers[0].parameters(), first.parameters()))
    assert kept, "The first layer should stay as it was."
    every = [p for layer in layers for p in layer.parameters()]
    pairs = list(zip(list(layers[0].parameters()) * 3, every, strict=True))
    tied = all(a is b for a, b in pairs)
    assert tied or not all(torch.equal(a, b) for a, b in pairs), (
        "The layers are equal, but copies: one step of training makes them differ. Put the very "
        "same module in every place."
    )
    assert tied, (
        "Nothing is shared in the model that you were given. Change it in place; return nothing."
    )
    same = map(torch.equal, model.decoder.parameters(), before.decoder.parameters())
    alone = len({id(layer) for layer in model.decoder.layers}) == 3 and all(same)
    assert alone, "The decoder should be left alone."
    wanted = before.encoder.norm(first(first(first(before.src_embed(batch.src)))))
    torch.testing.assert_close(model.encode(batch.src), wanted)


def shared_layers(model: EncoderDecoder) -> None:
    """The first layer in every place; PyTorch counts a repeated module once."""
    layers = model.encoder.layers
    model.encoder.layers = nn.ModuleList([layers[0]] * len(layers))
