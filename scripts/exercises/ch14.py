"""Chapter 14's exercise."""

from collections.abc import Callable

import numpy as np

from scripts.book.exercises import exercise
from scripts.ch06_training import BOS


def counting_step(tokens: np.ndarray, position: np.ndarray, past: np.ndarray) -> list[np.ndarray]:
    """A step whose `past` is what it has read, and whose logits depend on all of it."""
    R, T = past.shape[2], past.shape[-2]
    assert tokens.shape == (R, 1), "a step takes tokens (R, 1), and a past of as many rows"
    assert list(position) == [T], "past has one place for each token before: feed back the present"
    weights = 2 * np.random.default_rng(0).standard_normal((8, 9, 9))  # (length, V, V)
    new = np.ones((2, 2, 1, 4, 1, 3)) * tokens.reshape(-1, 1, 1, 1)
    present = np.concatenate((past, new), axis=-2)  # (N, 2, R, H, T+1, d_k)
    read = present[0, 0, :, 0, :, 0].astype(int)  # (R, T+1)
    return [weights[np.arange(T + 1), read].sum(axis=1), present]


@exercise(
    lambda: [(counting_step, np.zeros((2, 2, 1, 4, 0, 3)), beam, 8) for beam in (1, 2, 4)],
    "past must follow its text; a score is the sum of its log-probabilities",
    "the texts must differ: equal rows at the first step give copies",
    lambda step, past, beam, length: host_beam(step, past, 1, length) * beam,
    "the best text must come first",
    lambda *inputs: host_beam(*inputs)[::-1],
)
def host_beam(
    step: Callable[..., list[np.ndarray]], past: np.ndarray, beam: int, length: int
) -> list[list[int]]:
    """Scores all continuations of all rows; ids, scores and `past` follow the survivors."""
    ids, scores = np.full((1, 1), BOS), np.zeros((1, 1))
    for position in range(length):
        logits, past = step(tokens=ids[:, -1:], position=np.array([position]), past=past)
        log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)  # (R, V)
        total = (scores + log_probs).ravel()  # (R·V,)
        best = (-total).argsort(kind="stable")[:beam]  # (K,)
        origin, tokens = np.divmod(best, logits.shape[-1])
        ids = np.concatenate((ids[origin], tokens[:, None]), axis=1)
        scores, past = total[best, None], past[:, :, origin]
    return ids[:, 1:].tolist()
