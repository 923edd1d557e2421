"""Chapter 14's exercise: our solution, and a checker that says what is wrong."""

from collections.abc import Callable

import numpy as np

from scripts.ch06_training import BOS


def host_beam(
    step: Callable[..., list[np.ndarray]], past: np.ndarray, beam: int, length: int
) -> list[list[int]]:
    """Scores all continuations of all rows; ids, scores and `past` follow the survivors."""
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
    """Compares the texts with ours, for a step whose `past` is what it has read."""
    weights = 2 * np.random.default_rng(0).standard_normal((8, 9, 9))  # (length, V, V)

    def step(tokens: np.ndarray, position: np.ndarray, past: np.ndarray) -> list[np.ndarray]:
        shapes, R = (np.shape(tokens), np.shape(position)), past.shape[2]
        assert shapes == ((R, 1), (1,)), (
            "a step takes tokens (R, 1), position (1,) and R rows of past, one for each text, but "
            f"yours are {shapes[0]}, {shapes[1]} and {R} rows"
        )
        kept = past.shape == (2, 2, R, 4, past.shape[4], 3)
        assert kept, "past must stay (N, 2, R, H, T, d_k): choose rows along its third axis"
        before = "past has one place for each token before position: feed back the last present"
        assert list(position) == [past.shape[-2]], before
        new = np.ones((2, 2, 1, 4, 1, 3)) * tokens.reshape(-1, 1, 1, 1)
        present = np.concatenate((past, new), axis=-2)  # (N, 2, R, H, T+1, d_k)
        read = present[0, 0, :, 0, :, 0].astype(int)  # (R, T+1)
        return [weights[np.arange(read.shape[1]), read].sum(axis=1), present]

    for beam in (1, 2, 4):
        given = step, np.zeros((2, 2, 1, 4, 0, 3)), beam, len(weights)
        texts, right = candidate(*given), host_beam(*given)
        lists = isinstance(texts, list) and all(isinstance(text, list) for text in texts)
        assert lists and [*map(len, texts)] == [len(weights)] * beam, (
            f"return a list of {beam} texts, each a list of {len(weights)} ids without BOS"
        )
        copies = f"the texts must differ: {beam} equal rows at the first step give copies"
        assert len({*map(tuple, texts)}) == beam, copies
        assert texts == right or sorted(texts) != sorted(right), "the best text must come first"
        assert texts == right, (
            "past must follow its text; a score is the sum of its log-probabilities"
        )
