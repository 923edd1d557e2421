"""Chapter 16's exercises: checkers distinguish common mistakes and accept other right answers."""

from contextlib import contextmanager

from exercising import assert_told_apart

from scripts.ch16_intervening import heads_silenced, heads_silenced_by_hook
from scripts.exercises.ch16 import check_values_silenced


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


def value_rows(layer, part):
    return [tensor.detach()[part] for tensor in layer.project_value.parameters()]


@contextmanager
def does_nothing(layer, head):
    yield


def test_each_mistake_in_silence_has_a_message_of_its_own():
    wrong = {
        "still speaks": does_nothing,
        "Keep a clone": silencer(value_rows, keep=lambda part: part),
        "part of the bias": silencer(lambda layer, part: value_rows(layer, part)[:1]),
        "`finally`": silencer(value_rows, tidy=False),
    }
    assert_told_apart(check_values_silenced, wrong)


def test_other_ways_are_taken():
    check_values_silenced(silencer(value_rows))
    check_values_silenced(lambda layer, head: heads_silenced([(layer, head)]))
    check_values_silenced(lambda layer, head: heads_silenced_by_hook([(layer, head)]))
