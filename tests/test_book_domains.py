"""What settings and texts may be: every number has a range, every list of texts is one."""

import ast
import importlib
import math
from dataclasses import fields
from typing import get_args

import pytest
from conftest import MODULES, ROOT
from test_house_commands import COMMANDS

from scripts.book.domains import DOMAINS, folder_name, in_domain, list_of_texts
from scripts.studies.lessons import LessonConfig

OPTIONS = {importlib.import_module(name).main.options for name in COMMANDS} | {LessonConfig}
NUMBERS = {
    (options, field.name)
    for options in OPTIONS
    for field in fields(options)
    if {int, float} & {field.type, *get_args(field.type)}
}


def test_every_number_has_a_domain_and_every_domain_a_number():
    assert {name for _, name in NUMBERS} | {"samples", "trials"} == {*DOMAINS}


@pytest.mark.parametrize("name", DOMAINS)
def test_what_is_outside_of_a_domain_is_refused(name):
    domain = DOMAINS[name]
    ends = {domain.low: not domain.above, domain.high: not domain.below}
    ends |= {math.inf: domain.infinite}
    outside = [end for end, belongs in ends.items() if not belongs]
    outside += [math.nextafter(domain.low, -math.inf), math.nan, "3", None]
    outside += [domain.high * 1.001] * math.isfinite(domain.high)
    for value in outside:
        with pytest.raises(ValueError) as refused:
            in_domain(name, value)
        assert str(refused.value).startswith(f"{name} must be {domain}, not ")
    assert all(in_domain(name, end) == end for end, belongs in ends.items() if belongs)
    with pytest.raises(ValueError, match="a whole number"):
        in_domain(name, 1.5, whole=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_numbers_outside_of_their_domains(name):
    main = importlib.import_module(name).main
    needed = ["peers"] * ("benchmark" in main.places)
    for field in {field for options, field in NUMBERS if options is main.options}:
        with pytest.raises(ValueError, match=f"{field} must be"):
            main.parse([*needed, f"--{field}=-1"])


def test_ranges_are_said_in_words():
    said = {
        "dropout": "from 0 to below 1",
        "taught": "from 0 to 1",
        "lr": "more than 0",
        "count": "at least 1",
    }
    said |= {"top_p": "more than 0 and at most 1 (1: off)", "beam": "from 1 to 100 (1: greedy)"}
    assert {name: str(DOMAINS[name]) for name in said} == said


def test_names_of_folders_are_plain():
    for name in ("small", "läufe 2", "lr=0.1", "a.b-c_d+e"):
        assert folder_name("name", name) == name
    for name in ("", ".", "..", "a/b", "/tmp/a", "a\nb", "a\\b", "~", " a", "-a", "a" * 101, "a:b"):
        with pytest.raises(ValueError, match="a plain name"):
            folder_name("name", name)


LISTS = {"Sequence[str]", "Iterable[str]", "list[str]", "Texts"}
LISTS |= {f"{kind}[{of}]" for kind in ("Sequence", "Iterable") for of in LISTS}
NAMES = {"texts", "sentences", "outputs", "references", "hypotheses", "lines", "candidates"}
NAMES |= {"sources", "pieces", "words"}
# With one of these they read ids, or hand the texts on.
OTHERS = {"Rows", "Sequence[Sequence[int]]", "Pairs", "Settings", "nn.Module", "StudyRow"}


def takers_of_texts():
    """Functions of chapters, engine and studies that read lists of texts: the parameters of each.

    What draws a chart shows its texts, and an exercise is the reader's.
    """
    found = {}
    for path in MODULES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        tree = ast.parse(path.read_text("utf-8"))
        for node in tree.body * (not module.startswith(("scripts.book.", "scripts.exercises."))):
            inits = [
                part for part in getattr(node, "body", ()) if "def __init__" in ast.unparse(part)
            ]
            function = inits[0] if isinstance(node, ast.ClassDef) and inits else node
            if isinstance(function, ast.FunctionDef) and ast.unparse(function.body[-1]) != "...":
                kinds = {a.arg: ast.unparse(a.annotation or a) for a in function.args.args}
                texts = any(kinds.get(name) in LISTS for name in NAMES)
                if texts and not OTHERS & {*kinds.values()}:
                    needed = len(kinds) - len(function.args.defaults)
                    given = [name for name in list(kinds)[:needed] if name != "self"]
                    found[f"{module}:{node.name}"] = given
    return found


TAKERS = takers_of_texts()
SCORERS = [name for name, given in TAKERS.items() if "references" in given]
SCORERS.remove("scripts.ch10_judging:bleu_parts")  # of words; it adds up, and nothing adds to 0


def called(name, given):
    """The function of that name, of these arguments."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(*given)


@pytest.mark.parametrize("name", TAKERS)
def test_one_text_is_not_a_list_of_texts(name):
    with pytest.raises(TypeError, match="a list of texts, not one text"):
        called(name, ["Ein Hund." for _ in TAKERS[name]])


@pytest.mark.parametrize("name", SCORERS)
def test_what_is_compared_is_equally_much_and_something(name):
    count = len(TAKERS[name])
    with pytest.raises(ValueError, match="there are no "):
        called(name, [[]] * count)
    with pytest.raises(ValueError, match="as many of each"):
        called(name, [["A dog."] * (1 + (i == 1)) for i in range(count)])


def test_what_a_list_holds_are_texts():
    for texts in ([None], [["A dog."]], b"A dog."):
        with pytest.raises(TypeError, match="a list of texts"):
            list_of_texts("texts", texts)
    assert list_of_texts("texts", iter(("A dog.",))) == ["A dog."]
