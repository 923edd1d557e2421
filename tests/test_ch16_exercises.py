"""Chapter 16's exercises: checkers distinguish common mistakes and accept other right answers."""

from contextlib import contextmanager, suppress

import torch
from exercising import assert_told_apart, rejection
from torch import nn

from scripts.book.exercises import check
from scripts.ch16_intervening import heads_silenced_by_hook
from scripts.exercises.ch16 import check_values_silenced, values_silenced


def silencer(rows_of, keep=lambda part: part.clone(), tidy=True):
    """A way to silence the parts that rows_of(layer, slice) names."""

    @contextmanager
    def way(layer, head):
        d_k = layer.project_value.out_features // layer.h
        parts = rows_of(layer, slice(head * d_k, (head + 1) * d_k))
        before = [keep(part) for part in parts]
        for part in parts:
            part.zero_()
        try:
            yield
        except KeyError:
            if tidy:
                restore(parts, before)
            raise
        else:
            restore(parts, before)

    return way


def restore(parts, before):
    for part, old in zip(parts, before, strict=True):
        part.copy_(old)


def value_rows_of(linear, part):
    return [tensor.detach()[part] for tensor in linear.parameters()]


def value_rows(layer, part):
    return value_rows_of(layer.project_value, part)


def as_wide_as_there_are_heads(layer, head):
    return silencer(lambda layer, _: value_rows(layer, slice(4 * head, 4 * head + 4)))(layer, head)


@contextmanager
def without_gradients(layer, head):
    with torch.no_grad(), values_silenced(layer, head):
        yield


@contextmanager
def swallowing(layer, head):
    with values_silenced(layer, head), suppress(KeyError):
        yield


@contextmanager
def by_another_module(layer, head):
    """The layer has other values for a while, in a module of their own."""
    old, new = layer.project_value, nn.Linear(24, 24, dtype=torch.float64)
    new.load_state_dict(old.state_dict())
    for rows in value_rows_of(new, slice(6 * head, 6 * head + 6)):
        rows.zero_()
    layer.project_value = new
    try:
        yield
    finally:
        layer.project_value = old


def test_each_mistake_in_silence_has_a_message_of_its_own():
    wrong = {
        "@contextmanager": values_silenced.__wrapped__,
        "a hook won't do": lambda layer, head: heads_silenced_by_hook([(layer, head)]),
        "Keep a clone": silencer(value_rows, keep=lambda part: part),
        "part of the bias": silencer(lambda layer, part: value_rows(layer, part)[:1]),
        "no_grad must end": without_gradients,
        "is lost": swallowing,
        "leaves the head silent": silencer(value_rows, tidy=False),
    }
    assert_told_apart(check_values_silenced, wrong)
    assert "rows i·d_k" in rejection(check_values_silenced, as_wide_as_there_are_heads)


def test_other_ways_are_taken():
    check(silencer(value_rows), "values_silenced")
    check(by_another_module, "values_silenced")
