"""Chapter 26: what Ruvel's pairs hold and lack, the two splits, and what the prose says of runs."""

import re
import sys
from collections import Counter
from functools import reduce
from pathlib import Path

import pandas as pd
import pytest

from scripts.book.figures.own_pair import actor_chart, by_tense, cause_chart
from scripts.book.records import load_record
from scripts.ch26_your_own_pair import (
    LEARNER,
    cause,
    collected,
    honest_split,
    random_split,
    ruvel_corpus,
    with_twins,
)
from scripts.core.data import prepare
from scripts.core.recipes import tuning_recipe
from scripts.corpora import invented
from scripts.corpora.invented import (
    actors,
    by_object,
    crossed,
    negation,
    nouns_of,
    ruvel_pairs,
    usual_order,
    with_ending,
)
from scripts.studies.ruvel import (
    ASKED,
    COMMANDS,
    DRAWS,
    FIFTY,
    MANY,
    MOVED,
    RATES,
    by_shown,
    form_without,
)

ALONE = ("fifty negations", "fifty others")


def words(pairs, side, letters=None):
    """The words of a side; of Ruvel's the first three letters, which no ending changes."""
    return {word[:letters] for pair in pairs for word in re.findall(r"\w+", pair[side].lower())}


def test_endings_follow_the_vowel():
    assert [with_ending(word, "tA") for word in ("havo", "selu", "tiven", "zorun", "simek")] == [
        *("havota", "seluta", "tivente", "zorunta", "simekte")
    ]


@pytest.mark.parametrize("seed", [1, 7])
def test_what_the_pairs_lack_is_only_the_construction(seed):
    plain = ruvel_pairs(2000, seed)
    assert plain == ruvel_pairs(2000, seed) and len({source for source, _ in plain}) == 2000
    negated, moved = (ruvel_pairs(250, seed, name) for name in ("negation", "object first"))
    assert words(negated, 0, 3) - words(plain, 0, 3) == {"nok"}
    assert words(negated, 1) - words(plain, 1) == {"not", "do", "does", "did"}
    assert words(moved, 0, 3) <= words(plain, 0, 3) and words(moved, 1) <= words(plain, 1)
    assert all(" nok " in source and " not " in target for source, target in negated)
    assert all(re.match(r"\w+t[ae] ", source) for source, _ in moved)


def test_three_sentences_mean_the_same_with_either_first():
    """Else those that the chapter's model gets right wouldn't be explained."""
    same = re.compile(r"The ((?:\w+ )?\w+) \w+ the \1\b")
    assert sum(bool(same.match(target)) for _, target in MOVED[:200]) == 3


def test_a_source_has_one_translation():
    """Else not even a perfect model would be exactly right."""
    for construction in ("plain", "negation", "object first", "definite"):
        pairs = ruvel_pairs(2000, 3, construction)
        assert len({source for source, _ in pairs}) == len(pairs)


def test_who_acts_is_told_by_the_first_noun():
    assert nouns_of("The old foxes heard a loaf in the house.") == ["fox", "loaf"]
    being = [("", "The horse calls the quiet dog.")] * 3
    shares = actors(["The dogs call the horse.", "The dog sees it.", "No."], being)
    assert shares == pytest.approx({"the true actor": 0, "the object": 2 / 3, "another": 1 / 3})
    thing, same = ("", "The cats see the big stone."), ("", "The dog calls the dog.")
    assert by_object([thing, same, being[0]]) == {"a thing": [thing], "a being": [being[0]]}


def test_order_and_capital_letters_are_all_that_differs():
    """Else the picture couldn't say which of the two signs makes an actor."""
    assert usual_order("Karuta noma goral orez sil rolal.") == "goral orez sil Karuta noma rolal."
    assert {form: pairs[177][0] for form, pairs in crossed(MOVED[:200]).items()} == {
        ("the actor", "the actor"): "Lirel piri kurette viten.",
        ("the actor", "the object"): "kurette Lirel piri viten.",
        ("both", "the actor"): "Lirel piri Kurette viten.",
        ("both", "the object"): "Kurette Lirel piri viten.",
        ("neither", "the actor"): "lirel piri kurette viten.",
        ("neither", "the object"): "kurette lirel piri viten.",
        ("the object", "the actor"): "lirel piri Kurette viten.",
        ("the object", "the object"): "Kurette lirel piri viten.",
    }


def test_the_title_says_who_acts():
    runs = [run["who acts"] for run in load_record("ruvel-actors")["runs"]]
    runs[3]["neither; the object first"]["a being"] = {"the true actor": 0.6, "the object": 0.4}
    with pytest.raises(ValueError, match="title"):
        actor_chart({}, runs)


def test_the_page_has_the_commands_that_the_study_ran():
    page = Path(sys.modules[cause.__module__].__file__).read_text("utf-8")
    assert all(command in page for command in COMMANDS.strip().splitlines())
    record = load_record("ruvel-commands")
    old, asked = (record["scores"][name] for name in ("old", "asked"))
    assert [row["exact"] for row in (*old.values(), *asked.values())] == [0.98, 0.98, 0, 0.533]
    recipe, runs = tuning_recipe(2300, mixed=True), load_record("ruvel-rates")["runs"]
    shares = {lr: sorted(run["negated"] for run in runs if run["lr"] == lr) for lr in RATES}
    assert [shares[lr] for lr in (1e-3, recipe["lr"])] == [[0, 0, 0], [0.435, 0.445, 0.605]]
    assert shares[2e-3] == [0.18, 0.19, 0.2] and min(run["old"] for run in runs) == 0.98
    chapters = [run["mixed, by rate"] for run in load_record("ruvel-controls")["runs"]]
    assert all(run["0.004"]["negated"] > run["0.002"]["negated"] for run in chapters)
    assert record["settings"].items() <= recipe.items()


def test_a_split_at_random_has_twins_and_an_honest_one_none():
    pairs = collected()
    for split, low, high in ((random_split, 0.9, 1.0), (honest_split, 0.0, 0.0)):
        train, held_out = split(pairs, 1 / 9, seed=0)
        assert len(held_out) == 100 or split is honest_split
        assert sorted(train + held_out) == sorted(pairs)
        assert low <= with_twins(train, held_out) <= high


def test_the_record_says_what_the_chapter_says():
    runs, before = load_record("ruvel")["runs"], "before fine-tuning"
    assert [run["seed"] for run in runs] == [*range(1, 9)]

    def ends(*path):
        values = [reduce(dict.__getitem__, path, run) for run in runs]
        return min(values), max(values)

    assert ends("tuned", before, "old") == (0.97, 0.985)
    assert ends("tuned", before, "negated_says_not") == ends("tuned", before, "negated") == (0, 0)
    assert ends("object_first", before) == (0.015, 0.025)
    assert ends("tuned", "fifty negations", "old_says_not") == (0.35, 0.83)
    assert ends("tuned", "fifty negations", "old") == (0.04, 0.285)
    assert ends("tuned", "fifty others", "old_says_not") == (0, 0)
    assert ends("tuned", "mixed", "old") == (0.965, 0.985)
    assert ends("tuned", "mixed", "negated") == (0.41, 0.585)
    assert min(ends("tuned", m, "negated_says_not")[0] for m in ("fifty negations", "mixed")) > 0.98
    shown = [(90.4, 94.9), (59.1, 66.0), (47.7, 58.1), (56.8, 65.1)]
    tests = ("its test set", "fresh")
    case = [(split, test) for split in ("at random", "honest") for test in tests]
    assert [ends("case", *path) for path in case] == shown

    def mean(*path):
        return sum(reduce(dict.__getitem__, path, run) for run in runs) / len(runs)

    cures = [mean("tuned", name, "negated") for name in ("fifty negations", "mixed")]
    assert cures == pytest.approx([0.56, 0.48], abs=0.005)
    kept = [mean("tuned", name, "old") for name in (*ALONE, "mixed")]
    assert kept == pytest.approx([0.16, 0.44, 0.97], abs=0.005)
    assert ends("tuned", "fifty others", "old")[1] < 0.5


def test_who_acts_by_letter_and_order():
    runs = load_record("ruvel-actors")["runs"]
    assert [run["seed"] for run in runs] == [*range(1, 9)]

    def shares(form, who):
        return [run["who acts"][form]["a being"][who] for run in runs]

    nouns = {"the actor": "the true actor", "the object": "the object"}
    one = [shares(f"{a}; {b} first", nouns[a]) for a in nouns for b in nouns]
    ties = ("both", "neither")
    tie = [shares(f"{a}; {b} first", nouns[b]) for a in ties for b in nouns]
    assert max(shares("the object; the object first", "the true actor")) < 0.025  # exercise 3
    assert min(map(min, one)) > 0.82 and min(map(min, tie)) > 0.65


def test_the_letter_on_a_thing_takes_the_actors_place():
    runs = [run["who acts"] for run in load_record("ruvel-actors")["runs"]]

    def acts(who, role="the object"):
        return [run[f"{who}; the object first"]["a thing"][role] for run in runs]

    actor = [sum(acts(who, "the true actor")) / len(runs) for who in ("the actor", "both")]
    assert [round(share, 2) for share in actor] == [0.98, 0.28]
    assert max(acts("both") + acts("the object")) == 0


def test_in_the_past_a_verb_must_have_been_shown_in_the_past():
    runs = load_record("ruvel-actors")["runs"]
    assert by_tense(runs).to_numpy().tolist() == [[45, 1], [80, 66]]
    others = [by_tense(runs[:3], fifty)["only in the other tense"] for fifty in "234"]
    assert [table["past"] for table in others] == [0, 1, 2]
    assert pd.concat(others)["present"].dropna().tolist() == [13, 58]
    kept = {"did": [], "does": []}
    for run in runs:
        for helper, shares in kept.items():
            row = run["negations"]["1"][f"{helper}; the other tense"]
            shares.append(row["kept"] / row["of"])
    assert min(kept["did"]) > 0.71 and max(kept["does"]) < 0.26
    drawn = [
        run["negations"]["1"][f"{h}; another verb"] for run in runs for h in ("did", "do", "does")
    ]
    assert not any(row["right"] for row in drawn)
    wrong, asked = Counter(), Counter()
    for run in runs:
        for name, row in run["negations"]["1"].items():
            asked[name.split("; ")[0]] += row["of"]
            wrong[name.split("; ")[0]] += row["of"] - row["right"]
    shares = [round(counts["did"] / counts.total(), 2) for counts in (asked, wrong)]
    assert shares == [0.51, 0.73]  # "half", "nearly three quarters"


def test_the_fifty_show_each_verb_but_one():
    shown, asked = ([negation(target)[1] for _, target in pairs] for pairs in (FIFTY, MANY))
    assert {*asked} - {*shown} == {"draw"}


def test_a_cause_is_what_alone_is_wrong():
    """A wrong word elsewhere, or another verb, would count as the helper or the form."""
    right = "The dog did not hide a box."
    wrong = {
        "The dog does not hide a box.": "helper",
        "The dog did not hid a box.": "verb form",
        "The dog do not hides a box.": "helper and verb form",
        "The dog does not hide box.": "not explained",
        "The dog did not see a box.": "not explained",
        "The dog hid a box.": "not explained",
    }
    assert {output: cause(output, right) for output in wrong} == wrong
    with pytest.raises(ValueError, match="most"):  # three of six
        cause_chart([*wrong.values()], ["did"] * 6)


def test_by_what_the_fifty_show():
    fifty = [
        ("", "The dog did not sing."),
        ("", "The dogs do not eat."),
        ("", "A cat does not run."),
    ]
    asked = ["did not sing", "do not sing", "does not eat", "did not eat", "did not sit"]
    parts = by_shown([("", f"The dog {text}.") for text in asked], fifty)
    assert list(parts) == [
        ("did", "this helper"),
        ("do", "the other tense"),
        ("does", "this tense"),
        ("did", "the other tense"),
        ("did", "another verb"),
    ]
    assert [form_without(h, "carry") for h in ("do", "does", "did")] == [
        "carry",
        "carries",
        "carried",
    ]


def test_a_capital_letter_is_known_of_12_of_14_beings_and_of_no_thing():
    data = prepare(LEARNER, ruvel_corpus())
    seen = {p for source, _ in data.corpus["train"] for p in data.tokenizer.pieces(source)}

    def known(nouns):
        words = (with_ending(stem, "tA").capitalize() for stem, *_ in invented.rows(nouns))
        return [word for word in words if seen.issuperset(data.tokenizer.pieces(word))]

    beings = [row[0] for row in invented.rows(invented.BEINGS)]
    assert len(known(invented.BEINGS)) == 12 == len(beings) - 2 and not known(invented.THINGS)
    assert not {"Minete", "Alenite"} & {*known(invented.BEINGS)}
    moved = ruvel_pairs(200, construction="object first")
    asked = [ruvel_pairs(250, construction="negation")[50:], moved, by_object(moved)["a thing"]]
    asked += [data.corpus["test"], data.corpus["val"]]
    warned = [
        sum(not seen.issuperset(data.tokenizer.pieces(source)) for source, _ in pairs)
        for pairs in asked
    ]
    assert warned == [200, 113, 99, 0, 0]  # as exercise 1's answer says


def test_the_causes_are_as_the_chapter_says():
    runs = load_record("ruvel-causes")["runs"]
    assert [run["seed"] for run in runs] == [*range(1, 9)]

    means = [sum(run["50 passes"][part] for run in runs) / 8 for part in ("old", "negated")]
    assert means == pytest.approx([0.53, 0.48], abs=0.005)
    old = [run["50 passes"]["old"] for run in runs]
    assert (min(old), max(old)) == (0.28, 0.7)


def test_the_fifties_are_new():
    assert DRAWS[1] == FIFTY and not {*ASKED} & {pair for fifty in DRAWS.values() for pair in fifty}


def test_the_rarest_stem_occurs_23_times_in_training():
    words = Counter(re.findall(r"\w+", " ".join(s for s, _ in ruvel_corpus()["train"]).lower()))
    lists = [getattr(invented, name) for name in ("BEINGS", "THINGS", "PLACES", "POSTPOSITIONS")]
    lists += [invented.DESCRIBING_BEINGS, invented.DESCRIBING_THINGS, *invented.VERBS.values()]
    stems = {row[0] for text in lists for row in invented.rows(text)}
    counts = [sum(n for word, n in words.items() if word.startswith(stem)) for stem in stems]
    assert min(counts) == 23


def test_the_place_decides_also_where_each_object_has_its_ending():
    record = load_record("ruvel-endings")
    assert record["definite"] == {"plain": 0.488, "definite": 1}  # "half of the objects"
    runs = record["runs"]
    assert [run["seed"] for run in runs] == [*range(1, 9)]
    acts = [run["who acts"]["a being"]["the object"] for run in runs]
    assert min(acts) > 0.86
    assert min(run["exact"]["test"] for run in runs) > 0.98  # they have learnt this Ruvel


def test_the_controls_say_what_the_chapter_says():
    runs = load_record("ruvel-controls")["runs"]
    drawn = [run["another draw"] for run in runs]
    honest = drawn + [run["case"]["honest"] for run in load_record("ruvel")["runs"]]
    assert max(scores["its test set"] - scores["fresh"] for scores in honest) < 2
    fresh = {n: [run["case"][n]["fresh"] for run in runs] for n in ("8", "40")}
    assert all(21 < score < 30.5 for score in fresh["8"])
    assert all(70 < score < 74 for score in fresh["40"])


def test_fifty_with_the_object_first_give_what_the_chapter_says():
    runs = load_record("ruvel-controls")["runs"]

    def ends(*path):
        values = [reduce(dict.__getitem__, path, run) for run in runs]
        return [round(min(values), 3), round(max(values), 3)]

    assert ends("object first", "exact") == [0.12, 0.27]
    assert ends("object first", "who acts", "a thing", "the true actor") == [0.98, 1]
    assert ends("object first", "who acts", "a being", "the true actor") == [0.231, 0.374]
