"""Chapter 21's exercises: each checker accepts our solution and distinguishes mistakes."""

import pytest
import torch
from exercising import assert_told_apart

from scripts.exercises import ch21 as ours

# The teacher's hypothesis that is closest to the person's text


def likeliest(candidates, references, similarity):
    return [texts[0] for texts in candidates]


def least_like(candidates, references, similarity):
    return [
        min(texts, key=lambda text: similarity(text, reference))
        for texts, reference in zip(candidates, references, strict=True)
    ]


def last_of_equals(candidates, references, similarity):
    return ours.closest_to_people([texts[::-1] for texts in candidates], references, similarity)


def peoples_own(candidates, references, similarity):
    return list(references)


def the_other_way_round(candidates, references, similarity):
    return ours.closest_to_people(candidates, references, lambda a, b: similarity(b, a))


def longest(candidates, references, similarity):
    return [max(texts, key=len) for texts in candidates]


def all_in_one(candidates, references, similarity):
    return [text for texts in candidates for text in texts]


# Each against the others


def loss_with(baseline, reduce=torch.mean, sign=1.0, of=lambda logs: logs):
    def loss(log_probs, risks, counts):
        marks = risks.detach()
        groups = marks.split(list(counts))
        advantage = marks - torch.cat([baseline(group, marks) for group in groups])
        return sign * reduce(of(log_probs) * advantage)

    return loss


def others(group, _):
    return (group.sum() - group) / (len(group) - 1)


def of_all(group, marks):
    return (marks.sum() - group) / (len(marks) - 1)


def own_mean(group, _):
    return group.mean().expand(len(group))


def nothing(group, _):
    return torch.zeros_like(group)


def through_the_marks(log_probs, risks, counts):
    groups = risks.split(list(counts))
    return (log_probs * (risks - torch.cat([others(group, None) for group in groups]))).mean()


def by_source(log_probs, risks, counts):
    both = zip(log_probs.split(list(counts)), risks.detach().split(list(counts)), strict=True)
    return torch.stack([(logs * (m - others(m, None))).mean() for logs, m in both]).mean()


def for_each(log_probs, risks, counts):
    return log_probs * (risks.detach() - risks.detach().mean())


WRONG = {
    "closest_to_people": {
        "likeliest. Compare": likeliest,
        "*least* similar": least_like,
        "equally similar": last_of_equals,
        "people's texts": peoples_own,
        "4 pairs went in": all_in_one,
        "order matters": the_other_way_round,
        "It should be": longest,
    },
    "policy_loss": {
        "sign is wrong": loss_with(others, sign=-1.0),
        "own mark": loss_with(own_mean),
        "over all sources": loss_with(of_all),
        "no baseline": loss_with(nothing),
        "the sum": loss_with(others, reduce=torch.sum),
        "mean was taken first": by_source,
        "not of log P": loss_with(others, of=torch.exp),
        "flows into the marks": through_the_marks,
        "one number": for_each,
        "No gradient reaches": lambda logs, *marks: ours.policy_loss(logs.detach(), *marks),
        "not a float": lambda *given: ours.policy_loss(*given).item(),
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_a_message_of_its_own(name):
    assert_told_apart(getattr(ours, f"check_{name}"), WRONG[name])
