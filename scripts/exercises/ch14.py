"""Chapter 14's exercises: for each our solution under its name, and `check_NAME`, which judges."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from scripts.ch06_training import BOS


def host_beam(
    step: Callable[..., list[np.ndarray]], past: np.ndarray, beam: int, length: int
) -> list[list[int]]:
    """Weighs all continuations of all rows; tokens, ids and `past` follow the survivors."""
    ids, scores = np.full((1, 1), BOS), np.zeros((1, 1))
    for at in range(length):
        logits, past = step(tokens=ids[:, -1:], position=np.array([at]), past=past)
        log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)  # (R, V)
        total = (scores + log_probs).ravel()  # (R·V,)
        best = (-total).argsort(kind="stable")[:beam]  # (K,)
        origin, tokens = np.divmod(best, logits.shape[-1])
        ids = np.concatenate((ids[origin], tokens[:, None]), axis=1)
        scores, past = total[best, None], past[:, :, origin]
    return ids[:, 1:].tolist()


def check_host_beam(candidate: Callable[..., list[list[int]]]) -> None:
    """Holds the texts against ours, around a step whose `past` is what it has read."""
    weights = 2 * np.random.default_rng(0).standard_normal((8, 9, 9))  # (length, V, V)

    def step(tokens: np.ndarray, position: np.ndarray, past: np.ndarray) -> list[np.ndarray]:
        before = "past has one place for each token before position: hand back the last present"
        assert position.tolist() == [past.shape[-2]], before
        new = np.ones((2, 2, 1, 4, 1, 3)) * tokens.reshape(-1, 1, 1, 1)
        present = np.concatenate((past, new), axis=-2)  # (N, 2, R, H, T+1, d_k)
        read = present[0, 0, :, 0, :, 0].astype(int)  # (R, T+1)
        return [weights[np.arange(read.shape[1]), read].sum(axis=1), present]

    for beam in (1, 2, 4):
        given = step, np.zeros((2, 2, 1, 4, 0, 3)), beam, len(weights)
        texts, right = candidate(*given), host_beam(*given)
        copies = f"{beam} different texts are wanted: equal rows at the first step make copies"
        assert len({*map(tuple, texts)}) == beam, copies
        assert texts == right or sorted(texts) != sorted(right), "the best text comes first"
        assert texts == right, "past follows its text; a score is the sum of its log-probabilities"


def eight_bit_rows(W: Tensor) -> tuple[Tensor, Tensor]:
    """Divides each row by its scale, and rounds to the nearest whole number.

    For the generator of the small model the root mean square error is 0.6 of that with one scale.
    The largest error is about the same: the row of the largest weight has the largest scale.
    """
    scales = (W.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-30)  # (out, 1)
    return (W / scales).round().to(torch.int8), scales


def check_eight_bit_rows(candidate: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """The bound on each row's error; a row of zeros; rows of very different size."""
    W = torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    W *= torch.tensor([[100.0], [1.0], [0.01], [0.0], [1.0]])
    W[4, 0] = -20.0  # the largest of its row is negative
    numbers, scales = candidate(W.clone())
    assert numbers.dtype == torch.int8, f"the whole numbers are {numbers.dtype}, not torch.int8"
    assert scales.shape == (5, 1), f"scales {tuple(scales.shape)}: each row has its own, (out, 1)"
    assert scales.isfinite().all() and (numbers[3] == 0).all(), "a row of zeros must stay zeros"
    assert scales[0] != scales[1], "one scale for the whole matrix: small rows are lost"
    half = W.abs().amax(dim=1, keepdim=True) / 127 * (0.5 + 1e-6)  # (out, 1)
    near = ((scales * numbers - W).abs() <= half).all()
    assert near, "a weight moves by more than half a step: round to the nearest, max|row| to 127"
