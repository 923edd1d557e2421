"""Chapter 21's exercises."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scripts.book.exercises import exercise, probe, with_gradients


def shared_letters(hypothesis: str, reference: str) -> float:
    """A similarity up to 0. As chrF, it charges more for a letter too few than for one too many."""
    shared = len(set(hypothesis) & set(reference))
    return 5 * shared / (len(set(hypothesis)) + 4 * len(set(reference))) - 1


TEXTS = [("xyz", "abq", "abc"), ("abc", "m", "mnop"), ("pq", "qp", "qpx"), ("gh", "ij")]


@exercise(
    lambda: [(TEXTS, ["abc", "mn", "qp", "kl"], shared_letters)],
    "not the teacher's hypotheses that are most similar to people's texts",
    "these are the likeliest: compare with the person's text",
    lambda candidates, *rest: [texts[0] for texts in candidates],
    "`similarity` takes the hypothesis first: the order matters",
    lambda *texts: closest_to_people(*texts[:2], lambda text, person: texts[2](person, text)),
)
def closest_to_people(candidates: list, references: list[str], similarity: Callable) -> list[str]:
    """`max` returns the first of equals, which is the likeliest."""
    pairs = zip(candidates, references, strict=True)
    return [max(texts, key=lambda text: similarity(text, reference)) for texts, reference in pairs]


@exercise(
    lambda: [probe(with_gradients, (-torch.rand(5), torch.rand(5)), [3, 2])],
    "not the mean over all candidates of log P(y) times the risk beyond the *others'* mean, or a "
    "gradient flows into the marks, or none into log P",
    "the sign is wrong: what is worse than the others would become likelier",
    lambda *inputs: -policy_loss(*inputs),
    "there is no baseline: everything that isn't perfect is pushed down",
    lambda log_probs, risks, counts: (log_probs * risks.detach()).mean(),
)
def policy_loss(log_probs: Tensor, risks: Tensor, counts: Sequence[int]) -> Tensor:
    """The others' mean is the sum without the candidate's own mark, divided by one fewer."""
    marks = risks.detach()
    baselines = [(own.sum() - own) / (len(own) - 1) for own in marks.split(list(counts))]
    return (log_probs * (marks - torch.cat(baselines))).mean()
