"""Chapter 15: maps and their names, numbers by brute force, alignment, the record."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from scripts.book.records import load_record, sha256
from scripts.ch07_multi30k import SPECIALS
from scripts.ch15_looking_inside import (
    KINDS_OF_ATTENTION,
    alignment_error,
    attention_maps,
    best_links,
    dossiers,
    even_look,
    head_numbers,
    keeps_order,
    look_at,
    map_labels,
    moved_rows,
    piece_label,
    weights_of_words,
    word_of_piece,
)
from scripts.core.models import STUDIED
from scripts.corpora.captions import aligned_pairs, sure_links
from scripts.studies.heads import model_1_links, split_words, word_translation

PAIRS = aligned_pairs()


# Maps and their names


def test_maps_are_attentions_own_weights_and_dropout_is_off(tiny):
    src, tgt = torch.randint(4, 30, (1, 7)), torch.randint(4, 30, (1, 5))
    layer, layer_inputs = tiny.encoder.layers[0].self_attn, []
    layer.register_forward_pre_hook(lambda _, inputs: layer_inputs.append(inputs[0]))
    tiny.train()
    maps = attention_maps(tiny, src, tgt)
    assert tiny.training
    for kind, (T, S) in {"encoder": (7, 7), "decoder": (5, 5), "cross": (5, 7)}.items():
        assert maps[kind].shape == (2, 4, T, S)
        torch.testing.assert_close(maps[kind].sum(-1), torch.ones(2, 4, T).double())
    assert (maps["decoder"].triu(1) == 0).all()
    again = attention_maps(tiny, src, tgt)
    assert all(torch.equal(maps[kind], again[kind]) for kind in maps)
    q, k = (
        linear(layer_inputs[0]).view(1, 7, 4, 4).transpose(1, 2)
        for linear in (layer.project_query, layer.project_key)
    )
    eye = torch.eye(7).double().expand(1, 4, 7, 7)  # with these values, the output is the weights
    torch.testing.assert_close(maps["encoder"][0], F.scaled_dot_product_attention(q, k, eye)[0])


def spell(labels):
    """The text that piece labels make, without special tokens and spaces."""
    return "".join(label.removeprefix("+") for label in labels if label not in SPECIALS)


def test_erratum_21_names_are_of_the_text_that_went_through(trained, park):
    """A decoder's map has target words on both sides; cross-attention has them down, as queries."""
    german, english = (
        trained.tokenizer.decode(ids[0].tolist()).replace(" ", "")
        for ids in (park.src, park.wanted)
    )
    assert english != PAIRS[2].texts[1].replace(" ", "")  # what was decoded, not the reference
    texts = {"encoder": (german, german), "decoder": (english, english), "cross": (english, german)}
    for kind, (asking, answering) in texts.items():
        rows, columns = map_labels(park, kind)
        matrix = park.maps[kind][1, 2]
        assert matrix.shape == (len(rows), len(columns))
        torch.testing.assert_close(matrix.sum(-1), torch.ones(len(rows)).double())
        for end in (0, -1):  # a decoder's row is "read → written", and both halves are the text
            assert spell(row.split(" → ")[end] for row in rows) == asking
        assert spell(columns) == answering
    assert map_labels(park, "cross")[0][0] == "<s> → An"
    labels = [piece_label(piece) for piece in ("▁Hund", "chen", ".", "▁")]
    assert labels == ["Hund", "+chen", ".", "▁"]


def test_titles_say_where_two_heads_look_before_park(park):
    rows, columns = map_labels(park, "cross")
    of_park = park.maps["cross"][:, :, rows.index("a → park"), columns.index("Park")]
    assert of_park[1, 7] > 0.9 and of_park[0, 6] < 0.05


@pytest.mark.parametrize("kind", ["decoder", "cross"])
def test_erratum_22_what_is_exchanged_moves_the_rows_that_read_it(trained, kind):
    look = look_at(trained, PAIRS[3].texts[0])
    assert moved_rows(trained.model, look, kind, "src", at=2).any() == (kind == "cross")
    for at in range(look.tgt.size(1)):
        moved = moved_rows(trained.model, look, kind, "tgt", at)
        assert not moved[:at].any() and (moved[at] or (kind, at) == ("decoder", 0))


# Numbers


@pytest.mark.parametrize("kind", KINDS_OF_ATTENTION)
def test_head_numbers_are_those_of_plain_loops(park, kind):
    matrix = park.maps[kind][2, 5].tolist()
    keys = park.read if kind == "decoder" else park.source
    T, S = len(matrix), len(matrix[0])
    late = matrix[T // 2 :] if kind == "decoder" else matrix
    separators = [s for s, key in enumerate(keys) if key in ("<s>", "</s>")]

    def share_at_offset(o):
        weights = [matrix[t][t + o] for t in range(T) if 0 <= t + o < S]
        return sum(weights) / len(weights)

    by_loops = [
        sum(-w * math.log2(w) for row in matrix for w in row if w > 0) / T,
        *(share_at_offset(o) for o in (0, -1, 1)),
        sum(row[s] for row in late for s in separators) / len(late),
    ]
    torch.testing.assert_close(head_numbers(park, kind)[2, 5], torch.tensor(by_loops).double())


# Captions, words, alignment


def test_even_attention_sees_what_it_may(park):
    maps, T = even_look(park).maps, park.tgt.size(1)
    causal = torch.ones(T, T).double().tril() / torch.arange(1, T + 1).unsqueeze(1)
    torch.testing.assert_close(maps["decoder"], causal[None, None])
    assert torch.allclose(maps["encoder"], torch.tensor(1 / len(park.source)).double())


def test_the_captions_and_the_form_of_one():
    assert len({pair.texts for pair in PAIRS}) == 50
    for pair in PAIRS:
        assert (len(pair.german) - 1, len(pair.english) - 1) in pair.sure  # the full stops
    (pair,) = aligned_pairs("Er schläft , ja . | He is asleep . | 0-0 1p1 1-2 4-3")
    assert pair.sure == {(0, 0), (1, 2), (4, 3)} and pair.possible - pair.sure == {(1, 1)}
    assert pair.texts == ("Er schläft, ja.", "He is asleep.")
    assert sure_links("0-0 1p1 1-2 14-13") == {(0, 0), (1, 2), (14, 13)}


def test_the_order_is_kept_where_no_two_sure_links_cross():
    for pair in PAIRS:
        links = itertools.combinations(pair.sure, 2)
        crossed = any((a - c) * (b - d) < 0 for (a, b), (c, d) in links)
        assert keeps_order(pair) != crossed


def test_pieces_find_their_words(trained):
    for pair in PAIRS:
        for text, words in zip(pair.texts, (pair.german, pair.english), strict=True):
            owners = word_of_piece(trained.tokenizer.pieces(text), words)
            assert owners == sorted(owners) and set(owners) == set(range(len(words)))
    with pytest.raises(ValueError, match="don't spell"):
        word_of_piece(["▁Ein", "▁Hund"], ["Ein", "Hut"])


def test_word_weights_add_keys_and_average_queries():
    weights = torch.randn(2, 3, 4, 5, dtype=torch.float64).softmax(-1)
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


def test_a_row_is_linked_to_its_heaviest_column():
    weights = torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
    assert best_links(weights) == {(2, 0), (0, 1)}  # (German, English)


def test_alignment_errors_are_pooled_over_sentences():
    links, sure = [{(0, 0)}, {(0, 1)}], [{(0, 0)}, {(i, i) for i in range(9)}]
    assert math.isclose(alignment_error(links, sure, sure), 1 - 2 / 12)


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


def test_ibm_model_1_is_that_of_plain_loops():
    pairs = [tuple(map(split_words, pair.texts)) for pair in PAIRS[:6]]
    table, reference = word_translation(pairs, 3), brute_force_model_1(pairs, 3)
    met = {(s, t) for german, english in pairs for s in ("", *german) for t in english}
    assert table == pytest.approx({pair: reference[pair] for pair in met}, rel=1e-7, abs=1e-7)
    # "T-Shirt" is learned as three words, so the whole word explains nothing.
    captions = aligned_pairs("T-Shirt Hund | dog | 1-0")
    assert model_1_links([("Hund", "dog")], captions) == ["1-0"]


# The record


def test_the_record_is_of_the_shipped_model_and_whole():
    record = load_record("heads-multi30k")
    assert record["weights_sha256"] == sha256(STUDIED / "model.safetensors")
    heads = [(row["kind"], row["layer"], row["head"]) for row in record["heads"]]
    assert heads == list(itertools.product(KINDS_OF_ATTENTION, range(1, 4), range(1, 9)))
    errors = torch.arange(24.0).view(3, 8)
    lines = dossiers(record, errors)
    assert len(lines) == 72 and lines["AER"].count() == 24
    assert lines.loc["cross 2.8", "AER"] == errors[1, 7]
