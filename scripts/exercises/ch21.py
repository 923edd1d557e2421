"""Chapter 21's exercises: our solutions, and checkers that say what is wrong."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scripts.book.exercises import compare


def common_letters(hypothesis: str, reference: str) -> float:
    """A similarity up to 0. As chrF, it charges more for a letter too few than for one too many."""
    both = len(set(hypothesis) & set(reference))
    return 5 * both / (len(set(hypothesis)) + 4 * len(set(reference))) - 1


def check_closest_to_people(candidate: Callable[..., list[str]]) -> None:
    """Checks candidate(candidates, references, similarity) on pairs for which rules differ."""
    candidates = [("xyz", "abq", "abc"), ("abc", "m", "mnop"), ("pq", "qp", "qpx"), ("gh", "ij")]
    references = ["abc", "mn", "qp", "kl"]
    found = list(candidate(candidates, references, common_letters))
    assert len(found) == 4, f"4 pairs went in, but {len(found)} texts came out."
    right = ["abc", "mnop", "pq", "gh"]  # nothing is like "kl": a tie
    mistakes = {
        ("xyz", "abc", "pq", "gh"): "These are the likeliest. Compare with the person's text.",
        ("abc", "mn", "qp", "kl"): "These are people's texts: return the teacher's hypotheses.",
        ("xyz", "abc", "qpx", "gh"): "These are the *least* similar ones.",
        ("abc", "mnop", "qp", "ij"): "'pq' and 'qp' are equally similar, but 'pq' is likelier.",
        ("abc", "m", "pq", "gh"): "`similarity` takes the hypothesis first: the order matters.",
    }
    assert tuple(found) not in mistakes, mistakes[tuple(found)]
    assert found == right, f"It should be {right}, not {found}."


def closest_to_people(
    candidates: Sequence[Sequence[str]],
    references: Sequence[str],
    similarity: Callable[[str, str], float],
) -> list[str]:
    """`max` returns the first of equals, which is the likeliest."""
    both = zip(candidates, references, strict=True)
    return [max(texts, key=lambda text: similarity(text, reference)) for texts, reference in both]


def check_policy_loss(candidate: Callable[[Tensor, Tensor, Sequence[int]], Tensor]) -> None:
    """Compares the gradient of candidate(log_probs, risks, counts) with the formula's."""
    log_probs = torch.tensor([-1.0, -2.0, -9.0, -4.0, -5.0], dtype=torch.float64)
    risks = torch.tensor([0.2, 0.8, 0.8, 0.1, 0.7], dtype=torch.float64, requires_grad=True)
    given = log_probs.clone().requires_grad_()
    loss = candidate(given, risks, [3, 2])
    assert loss.dim() == 0, f"The loss must be one number, the mean over all, not {loss}."
    assert loss.requires_grad, "No gradient reaches the log-probabilities."
    push, through = torch.autograd.grad(loss, (given, risks), allow_unused=True)
    assert push is not None, "No gradient reaches the log-probabilities that you were given."
    flows = through is not None and through.any()
    assert not flows, "A gradient flows into the marks. They are constants: detach them."
    marks = risks.detach()
    easy, hard = marks.split([3, 2])

    def against_others(group: Tensor) -> Tensor:
        return group - (group.sum() - group) / (len(group) - 1)

    one, two = against_others(easy), against_others(hard)
    right, by_source = torch.cat((one, two)) / 5, torch.cat((one / 3, two / 2)) / 2
    own, pooled = torch.cat((easy - easy.mean(), hard - hard.mean())), against_others(marks)
    mistakes = {
        "The sign is wrong: what is worse than the others would become likelier.": -right,
        "The candidate's own mark is in its baseline: take the mean of the *others*.": own / 5,
        "The baseline is over all sources: easy ones always win. Use one per source.": pooled / 5,
        "There is no baseline: everything that isn't perfect is pushed down.": marks / 5,
        "That is the sum, not the mean over all candidates.": 5 * right,
        "Each source's mean was taken first. Here all candidates count the same.": by_source,
        "That is the gradient of P, not of log P.": right * log_probs.exp(),
    }
    compare(push, right, mistakes, f"The gradient should be {right.tolist()}, not {push}.")


def policy_loss(log_probs: Tensor, risks: Tensor, counts: Sequence[int]) -> Tensor:
    """The others' mean is the sum without the candidate's own mark, divided by one fewer."""
    marks = risks.detach()
    baselines = [(own.sum() - own) / (len(own) - 1) for own in marks.split(list(counts))]
    return (log_probs * (marks - torch.cat(baselines))).mean()
