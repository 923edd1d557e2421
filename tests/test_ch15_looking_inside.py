"""Chapter 15: maps and their names, numbers by brute force, alignment, the record."""

import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from saying import ran

from scripts.book.figures.looking import map_explorer
from scripts.book.records import load_record, sha256
from scripts.ch07_multi30k import SPECIALS
from scripts.ch15_looking_inside import (
    HEAD_NUMBERS,
    KINDS_OF_ATTENTION,
    alignment_error,
    attention_maps,
    best_links,
    cross_word_weights,
    diagonal_links,
    even_look,
    head_numbers,
    look_at,
    map_labels,
    moved_rows,
    piece_label,
    weights_of_words,
    word_of_piece,
)
from scripts.core.models import STUDIED
from scripts.corpora.captions import CAPTIONS, aligned_pairs
from scripts.studies.heads import main, model_1_links, split_words, word_translation

PAIRS = aligned_pairs()


@pytest.fixture(scope="module")
def forced(trained):
    return [look_at(trained, *pair.texts) for pair in PAIRS[:6]]


# Maps and their names


def spell(labels):
    """The text that piece labels make, without special tokens."""
    text = "".join(f" {label}" for label in labels if label not in SPECIALS)
    return re.sub(r" \+| (?=\W)", "", text).strip()


def labels_complaint(trained, look, kind, matrix, rows, columns):
    """What is wrong with a labelled map of a head, in words; "" if nothing is."""
    source, translation = (
        trained.tokenizer.decode(ids[0].tolist()) for ids in (look.src, look.wanted)
    )
    if not torch.allclose(matrix.sum(-1), torch.ones(len(matrix), dtype=matrix.dtype)):
        return "the rows don't sum to 1, so they aren't queries"
    if matrix.shape != (len(rows), len(columns)):
        return f"{len(rows)} by {len(columns)} names for a map of {len(matrix)} by {matrix.size(1)}"
    asks, answers = {
        "encoder": (source, source),
        "decoder": (translation, translation),
        "cross": (translation, source),
    }[kind]
    for side, labels, wanted in (("rows", rows, asks), ("columns", columns, answers)):
        halves = [label.split(" → ") for label in labels]  # read → written, or one name
        for spelt in (spell(half[end] for half in halves) for end in (0, -1)):
            if spelt.replace(" ", "") != wanted.replace(" ", ""):
                return f"the {side} spell {spelt!r}, but the model went through {wanted!r}"
    return ""


def test_maps_are_attentions_own_weights_and_dropout_is_off(tiny):
    src, tgt = torch.randint(4, 30, (1, 7)), torch.randint(4, 30, (1, 5))
    tiny.train()
    maps = attention_maps(tiny, src, tgt)
    assert tiny.training
    for kind, (T, S) in {"encoder": (7, 7), "decoder": (5, 5), "cross": (5, 7)}.items():
        assert maps[kind].shape == (2, 4, T, S)
        torch.testing.assert_close(maps[kind].sum(-1), torch.ones(2, 4, T).double())
    assert (maps["decoder"].triu(1) == 0).all()
    again = attention_maps(tiny, src, tgt)
    assert all(torch.equal(maps[kind], again[kind]) for kind in maps)
    tiny.eval()
    seen = {}
    layer = tiny.encoder.layers[0].self_attn
    handle = layer.register_forward_pre_hook(lambda _, given: seen.update(x=given[0]))
    attention_maps(tiny, src, tgt)
    handle.remove()
    q, k = (
        linear(seen["x"]).view(1, 7, 4, 4).transpose(1, 2)
        for linear in (layer.project_query, layer.project_key)
    )
    eye = torch.eye(7).double().expand(1, 4, 7, 7)
    reference = F.scaled_dot_product_attention(q, k, eye)[0]
    torch.testing.assert_close(maps["encoder"][0], reference)


def test_labels_fit_every_kind(trained, park, forced):
    for look in (park, *forced[:2]):
        for kind in KINDS_OF_ATTENTION:
            named = map_labels(look, kind)
            assert labels_complaint(trained, look, kind, look.maps[kind][1, 2], *named) == ""


def test_erratum_21_decoder_maps_carry_what_the_decoder_read(trained):
    look = look_at(trained, PAIRS[3].texts[0])
    source = [piece_label(piece) for piece in look.source]
    matrix = look.maps["decoder"][0, 0]
    assert matrix.shape == (len(source), len(source))  # the wrong names fit in number
    rows, columns = map_labels(look, "decoder")
    assert columns == [piece_label(piece) for piece in look.read] and columns[0] == "<s>"
    assert labels_complaint(trained, look, "decoder", matrix, rows, columns) == ""
    wrong = labels_complaint(trained, look, "decoder", matrix, source, source)
    assert "rows spell 'Eine Frau" in wrong and "'A woman" in wrong
    assert "columns spell" in labels_complaint(trained, look, "decoder", matrix, rows, source)
    # and the model agrees: the first map doesn't know the source
    assert not moved_rows(trained.model, look, "decoder", "src", at=2).any()
    for at in range(1, look.tgt.size(1)):
        moved = moved_rows(trained.model, look, "decoder", "tgt", at)
        assert not moved[:at].any() and moved[at]


def test_erratum_22_cross_maps_have_target_queries_down_and_decoded_words(trained, park):
    matrix = park.maps["cross"][1, 7]  # (T, S)
    rows, columns = map_labels(park, "cross")
    assert labels_complaint(trained, park, "cross", matrix, rows, columns) == ""
    swapped = labels_complaint(trained, park, "cross", matrix.T, columns, rows)
    assert "aren't queries" in swapped
    assert "names for a map" in labels_complaint(trained, park, "cross", matrix, columns, rows)
    reference = [piece_label(p) for p in trained.tokenizer.pieces(PAIRS[2].texts[1])]
    assert spell(reference) != spell(park.written)
    padded = (reference + ["</s>"] * len(rows))[: len(rows)]
    complaint = labels_complaint(trained, park, "cross", matrix, padded, columns)
    assert "rows spell 'An old man is" in complaint
    for at in range(park.tgt.size(1)):
        moved = moved_rows(trained.model, park, "cross", "tgt", at)
        assert not moved[:at].any() and moved[at]


def test_spelling_joins_pieces():
    assert spell(["Ein", "Schnee", "+mann", ",", "der", "</s>"]) == "Ein Schneemann, der"
    assert [piece_label(p) for p in ("▁Hund", "chen", ".", "▁", "</s>")] == [
        "Hund",
        "+chen",
        ".",
        "▁",
        "</s>",
    ]


def test_the_explorer_packs_every_map_in_less_than_a_megabyte(park, forced):
    maps = []
    for number, look in enumerate([park, *forced[:3]]):
        for kind, weights in look.maps.items():
            rows, columns = map_labels(look, kind)
            one = {"sentence": f"caption {number}", "kind": kind, "weights": weights}
            maps.append(one | {"rows": rows, "columns": columns})
    start = {"sentence": "caption 1", "kind": "cross", "layer": 2, "head": 8}
    spec = map_explorer(maps, start).to_dict()
    rows = spec["data"]["values"]
    assert len(json.dumps(spec)) < 2**20 and len(rows) == 4 * 3
    named = {param["name"]: param for param in spec["params"] if "bind" in param}
    assert set(named) == {"sentence", "kind", "layer", "head"}
    for name, param in named.items():
        assert param["value"] in param["bind"]["options"], name
    assert named["kind"]["bind"]["options"] == list(KINDS_OF_ATTENTION)
    assert named["layer"]["bind"]["options"] == [1, 2, 3]
    assert len(named["head"]["bind"]["options"]) == 8 and named["head"]["value"] == 8
    packed = next(row for row in rows if row["kind"] == "cross")
    numbers = [[list(map(int, text.split())) for text in heads] for heads in packed["maps"]]
    maps = np.array(numbers).reshape(3, 8, len(packed["rows"]), len(packed["columns"]))
    assert np.abs(maps / 1000 - park.maps["cross"].numpy()).max() <= 0.0005 + 1e-12


# Numbers


@pytest.mark.parametrize("kind", KINDS_OF_ATTENTION)
def test_head_numbers_are_those_of_plain_loops(park, kind):
    matrix = park.maps[kind][2, 5].tolist()
    keys = park.read if kind == "decoder" else park.source
    T, S = len(matrix), len(matrix[0])
    late = matrix[T // 2 :] if kind == "decoder" else matrix

    def offset(o):
        found = [matrix[t][t + o] for t in range(T) if 0 <= t + o < S]
        return sum(found) / len(found)

    wanted = [
        sum(-w * math.log2(w) for row in matrix for w in row if w > 0) / T,
        *(offset(o) for o in (0, -1, 1)),
        sum(w for row in late for w, k in zip(row, keys, strict=True) if k in ("<s>", "</s>"))
        / len(late),
    ]
    torch.testing.assert_close(head_numbers(park, kind)[2, 5], torch.tensor(wanted).double())
    assert len(HEAD_NUMBERS) == len(wanted)


def test_even_attention_sees_what_it_may(park):
    even = even_look(park)
    assert even.maps["decoder"].shape[:2] == (1, 1)
    T = park.tgt.size(1)
    wanted = torch.ones(T, T).tril() / torch.arange(1, T + 1).unsqueeze(1)
    torch.testing.assert_close(even.maps["decoder"][0, 0], wanted)
    n = len(park.source)
    assert torch.allclose(even.maps["encoder"], torch.tensor(1 / n))


# Captions, words, alignment


def test_captions_are_fifty_whole_and_their_links_in_range():
    assert len(PAIRS) == 50 and len({pair.texts for pair in PAIRS}) == 50
    for pair in PAIRS:
        assert pair.sure <= pair.possible
        linked = {j for _, j in pair.possible}
        free = [w for j, w in enumerate(pair.english) if j not in linked]
        assert set(free) <= {"a", "the"}, pair.texts  # articles that German leaves out
        untouched = set(range(len(pair.german))) - {i for i, _ in pair.possible}
        assert all(pair.german[i] == "," for i in untouched), pair.texts
        assert (len(pair.german) - 1, len(pair.english) - 1) in pair.sure  # the full stops


@pytest.mark.parametrize(
    "line, message",
    [
        ("Ein Hund . | A dog . | 0-0 1-1 3-2", "beyond the sentence"),
        ("Ein Hund . | A dog . | 0-0 1p3", "beyond the sentence"),
        ("Ein Hund . | A dog . | 0-0 1x1", "not a link"),
    ],
)
def test_a_link_that_leads_nowhere_is_refused(line, message):
    with pytest.raises(ValueError, match=message):
        aligned_pairs(line)


def test_the_form_of_a_caption():
    (pair,) = aligned_pairs("Er schläft , ja . | He is asleep . | 0-0 1p1 1-2 4-3")
    assert pair.sure == {(0, 0), (1, 2), (4, 3)} and pair.possible - pair.sure == {(1, 1)}
    assert pair.texts == ("Er schläft, ja.", "He is asleep.")
    assert len(CAPTIONS.strip().splitlines()) == 50


def test_pieces_find_their_words(trained):
    for pair in PAIRS:
        for text, words in zip(pair.texts, (pair.german, pair.english), strict=True):
            owners = word_of_piece(trained.tokenizer.pieces(text), words)
            assert owners == sorted(owners) and set(owners) == set(range(len(words)))
    with pytest.raises(ValueError, match="don't spell"):
        word_of_piece(["▁Ein", "▁Hund"], ["Ein", "Hut"])


def test_word_weights_add_keys_and_average_queries():
    torch.manual_seed(1)
    weights = torch.randn(2, 3, 4, 5).double().softmax(-1)
    rows, columns = [0, 0, 1, -1], [-1, 0, 1, 1, 2]
    words = weights_of_words(weights, rows, columns)
    assert words.shape == (2, 3, 2, 3)
    for n, h, j, i in itertools.product(range(2), range(3), range(2), range(3)):
        cells = [
            sum(weights[n, h, t, s].item() for s in range(5) if columns[s] == i)
            for t in range(4)
            if rows[t] == j
        ]
        assert math.isclose(words[n, h, j, i].item(), sum(cells) / len(cells))


def test_alignment_errors_are_pooled_over_sentences():
    one, two = ({(0, 0)}, {(0, 0)}), ({(0, 1)}, {(i, i) for i in range(9)})
    pooled = alignment_error(*([one[k], two[k]] for k in (0, 1, 1)))
    assert math.isclose(pooled, 1 - 2 / 12)


def test_the_query_that_writes_knows_the_alignment(forced):
    pairs = PAIRS[: len(forced)]
    sure, possible = [p.sure for p in pairs], [p.possible for p in pairs]

    def rate(moment):
        words = [cross_word_weights(*both, moment) for both in zip(forced, pairs, strict=True)]
        return alignment_error([best_links(w[1].mean(0)) for w in words], sure, possible)

    diagonal = alignment_error([diagonal_links(p) for p in pairs], sure, possible)
    assert rate("writing") < diagonal < rate("reading")
    by_hand = forced[0].maps["cross"][..., 1, :-1]  # "small" is one piece: row 1 writes it
    owners = word_of_piece(forced[0].source, pairs[0].german)[:-1]
    words = cross_word_weights(forced[0], pairs[0], "writing")[..., 1, :]
    for i in range(len(pairs[0].german)):
        chosen = torch.tensor([owner == i for owner in owners])
        torch.testing.assert_close(words[..., i], by_hand[..., chosen].sum(-1))


def test_diagonal_links_are_the_diagonal():
    (pair,) = aligned_pairs("a b c | x y z | 0-0")
    assert diagonal_links(pair) == {(0, 0), (1, 1), (2, 2)}


def brute_force_model_1(pairs, rounds):
    """IBM Model 1 with dictionaries."""
    sources = {s for german, _ in pairs for s in ("", *german)}
    targets = {t for _, english in pairs for t in english}
    p = {(s, t): 1.0 for s in sources for t in targets}
    for _ in range(rounds):
        count = dict.fromkeys(p, 0.0)
        for german, english in pairs:
            for t in english:
                total = sum(p[s, t] for s in ("", *german))
                for s in ("", *german):
                    count[s, t] += p[s, t] / total
        sums = {s: sum(count[s, t] for t in targets) for s in sources}
        p = {(s, t): c / sums[s] for (s, t), c in count.items()}
    return p


@pytest.mark.parametrize("rounds", [1, 2, 6])
def test_ibm_model_1_is_that_of_plain_loops(rounds):
    pairs = [pair.texts for pair in PAIRS[:6]]
    pairs = [(split_words(german), split_words(english)) for german, english in pairs]
    reference = brute_force_model_1(pairs, rounds)
    met = {(s, t) for german, english in pairs for s in ("", *german) for t in english}
    wanted = {pair: reference[pair] for pair in met}
    assert word_translation(pairs, rounds) == pytest.approx(wanted, rel=1e-7, abs=1e-7)


def test_a_word_that_model_1_never_met_explains_nothing():
    ours = aligned_pairs("T-Shirt Hund | dog | 1-0")  # learned as three words
    assert model_1_links([("Hund", "dog")], ours) == ["1-0"]


# The record and its command


def test_the_record_is_of_the_shipped_model_and_whole():
    record = load_record("heads-multi30k")
    assert record["weights_sha256"] == sha256(STUDIED / "model.safetensors")
    assert record["splits"] == {"val": 1014, "test_2016_flickr": 1000}
    heads = [(row["kind"], row["layer"], row["head"]) for row in record["heads"]]
    kinds = itertools.product(KINDS_OF_ATTENTION, range(1, 4), range(1, 9))
    assert heads == list(kinds)
    for row in record["heads"]:
        assert 0 <= row["silent p"] <= 1 and 0 <= row["mean p"] <= 1
    assert len(record["ibm_model_1"]["links"]) == 50
    layers = [(row["kind"], row["layer"]) for row in record["layers"]]
    assert layers == list(itertools.product(KINDS_OF_ATTENTION, range(1, 4)))
    starts = {p["nats"] for p in record["pruning"] if p["silent"] == 0}
    ends = [p["nats"] for p in record["pruning"] if p["silent"] == 72]
    assert starts == {0} and max(ends) - min(ends) < 1e-4  # all orders begin and end the same way


def test_the_records_numbers_are_those_of_our_captions_by_and_large(trained, forced):
    record = load_record("heads-multi30k")
    rows = [row for row in record["heads"] if row["kind"] == "encoder"]
    ours = torch.stack([head_numbers(look, "encoder") for look in forced]).mean(0).flatten(0, 1)
    for at, name in enumerate(HEAD_NUMBERS):
        if name in ("previous", "next", "same place"):
            assert np.abs(ours[:, at].numpy() - [row[name] for row in rows]).max() < 0.2, name


@pytest.mark.parametrize("mistake", [["--sentences", "many"], ["--corpus", "war"], ["inspekt"]])
def test_a_mistake_is_a_line_and_exit_code_2(mistake, capsys):
    assert main(mistake) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_missing_model_is_a_line_too(capsys, tmp_path):
    assert main(["--model", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err


# What the chapter says.


def test_what_the_chapter_says_of_one_head():
    """The explorer, and the map that it opens with: cross-attention's head 2.8."""
    said = ran("ch15")
    sizes = (said.trained.config.layers, said.trained.config.heads, len(said.captions))
    assert sizes == (3, 8, 50)
    assert len(json.dumps(map_explorer(said.maps, said.start).to_dict())) < 2**20
    (rows, columns), weights = map_labels(said.park, "cross"), said.park.maps["cross"][1, 7]
    looked_at = {row: columns[i] for row, i in zip(rows, weights.argmax(-1), strict=True)}
    in_question = ("bench → in", "in → a", "a → park")
    assert [looked_at[row] for row in in_question] == ["Im", "Im", "Park"]
    assert looked_at["<s> → An"] == "alter" and looked_at["a → bench"] == "Bank"
    half, all_of_it, _ = (weights[rows.index(row)].max() for row in in_question)
    assert 0.5 < half < 0.6 and all_of_it > 0.99


def test_what_the_chapter_says_of_numbers():
    said = ran("ch15")
    heads, even = said.heads, said.record["even"]
    encoder, decoder, cross = (heads[heads["kind"] == kind] for kind in KINDS_OF_ATTENTION)
    most = encoder.nlargest(5, "previous")
    assert most["previous"].iloc[:4].between(0.305, 0.425).all() and (most["layer"][:4] > 1).all()
    assert most["previous"].iloc[4] < 0.17
    assert (most["previous"].iloc[:4] / even["encoder"]["previous"]).between(4, 6.2).all()
    most = decoder.nlargest(4, "previous")["previous"]
    assert most.between(0.32, 0.425).all() and most.iloc[2] - most.iloc[3] < 0.04
    assert 4 < cross["same place"].mean() / even["cross"]["same place"] < 4.5
    for kind, rows in (("encoder", encoder), ("decoder", decoder), ("cross", cross)):
        assert rows["separator"].mean() < even[kind]["separator"]
    above = decoder[decoder["separator"] > 2 * even["decoder"]["separator"]]
    assert above["name"].tolist() == ["1.4", "1.7"]


def test_what_the_chapter_says_of_alignment():
    said = ran("ch15")
    error, rates = said.errors, said.rates
    assert said.record["ibm_model_1"]["trained_on"] == 29_050
    assert (rates["writing"] < rates["reading"]).all() and said.best == [(0, 4), (1, 7)]
    assert (rates["writing"] > error["the same relative place"]).sum() == 13
    rounded = [round(error[name], 2) for name in list(error)[1:]]
    assert rounded == [0.36, 0.25, 0.21, 0.14]
    best = said.again["best head of the other half"]
    low = {name: np.quantile(draws - best, 0.025) for name, draws in said.again.items()}
    assert abs(low["mean over all heads"]) < 0.01 < low["the same relative place"]
    assert np.quantile(said.again["IBM Model 1"] - best, 0.975) < 0
