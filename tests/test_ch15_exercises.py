"""Chapter 15's exercise: the checker distinguishes the common mistakes."""

import torch
from exercising import assert_told_apart

from scripts.exercises.ch15 import check_rollout, rollout


def mixed(maps):
    return (maps.mean(1) + torch.eye(maps.size(-1), dtype=maps.dtype)) / 2


def first_on_the_left(maps):
    first, second, third = mixed(maps)
    return first @ second @ third


def no_residual(maps):
    first, second, third = maps.mean(1)
    return third @ second @ first


def not_halved(maps):
    first, second, third = 2 * mixed(maps)
    return third @ second @ first


def averaged(maps):
    return mixed(maps).mean(0)


def cell_by_cell(maps):
    return mixed(maps).prod(0)


def one_head(maps):
    return rollout(maps[:, :1])


def test_each_mistake_in_rollout_has_a_message_of_its_own():
    wrong = {
        "wrong order": first_on_the_left,
        "The identity is missing": no_residual,
        "not half and half": not_halved,
        "a mean over the layers": averaged,
        "cell by cell": cell_by_cell,
        "isn't the matrix": one_head,
    }
    assert_told_apart(check_rollout, wrong)
