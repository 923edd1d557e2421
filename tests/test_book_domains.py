"""What settings and texts may be: every number has a range, every list of texts is one."""

import importlib
import math
from dataclasses import fields
from typing import get_args

import pytest
from test_house_commands import COMMANDS

from scripts.book.domains import DOMAINS, folder_name, in_domain, list_of_texts, texts_side_by_side
from scripts.studies.lessons import LessonConfig


def test_every_number_has_a_domain_and_every_domain_a_number():
    options = {importlib.import_module(name).main.options for name in COMMANDS} | {LessonConfig}
    numeric = {
        field.name
        for field in (field for kind in options for field in fields(kind))
        if {field.type, *get_args(field.type)} & {int, float}
    }
    assert numeric == {*DOMAINS}


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("dropout", (0, 0.5, math.nextafter(1, 0)), (1, -1e-9, math.nan, math.inf)),
        ("smoothing", (0, 1), (-1e-9, 1.0001, "0", None)),
        ("lr", (1e-30, 1e30), (0, -1, math.inf)),
        ("clip", (0, math.inf), (-1,)),
        ("top_p", (1e-9, 1), (0, 1.5)),
        ("seed", (0, 2**63 - 1), (-1, 2**63)),
        ("sentences", (1, 10**9), (0, math.inf)),
    ],
)
def test_what_is_outside_of_a_domain_is_refused(name, inside, outside):
    assert [in_domain(name, value) for value in inside] == [*inside]
    for value in outside:
        with pytest.raises(ValueError, match=f"^{name} must be ") as refused:
            in_domain(name, value)
        assert DOMAINS[name] in str(refused.value)
    with pytest.raises(ValueError, match="a whole number"):
        in_domain(name, 1.5, whole=True)


def test_names_of_folders_are_plain():
    for name in ("small", "läufe 2", "lr=0.1", "a.b-c_d+e"):
        assert folder_name("name", name) == name
    for name in ("", "..", "a/b", "a\nb", "a\\b", "~", " a", "-a", "a" * 101, "a:b"):
        with pytest.raises(ValueError, match="a plain name"):
            folder_name("name", name)


# Functions of lists of texts, and how many arguments they need.
TAKERS = {
    "ch08_decoding:plain_translate": 2,
    "core.scores:corpus_bleu": 2,
    "fast.translating:translate": 2,
}


@pytest.mark.parametrize("name", TAKERS)
def test_one_text_is_not_a_list_of_texts(name):
    module, _, function = name.partition(":")
    with pytest.raises(TypeError, match="a list of texts, not one text"):
        getattr(importlib.import_module(f"scripts.{module}"), function)(*["A dog."] * TAKERS[name])


def test_bytes_are_not_a_list_either_and_what_is_compared_is_equally_long():
    with pytest.raises(TypeError, match="a list of texts"):
        list_of_texts("texts", b"A dog.")
    assert list_of_texts("texts", iter(("A dog.",))) == ["A dog."]
    with pytest.raises(ValueError, match="there are no outputs"):
        texts_side_by_side(outputs=[], references=[])
    with pytest.raises(ValueError, match="not 1 outputs and 2 references"):
        texts_side_by_side(outputs=["A dog."], references=["A dog.", "A cat."])
