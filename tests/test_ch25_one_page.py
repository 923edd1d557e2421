"""Chapter 25: one page, the same machine as in the chapters."""

import ast
import functools
import random
import re

import pytest
import torch
from conftest import ROOT
from torch.testing import assert_close

from scripts import ch25_one_page as page
from scripts.book.records import load_record
from scripts.ch01_attention import padding_mask
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import Batch, LabelSmoothing, cosine_rate, greedy_decode
from scripts.ch06_training import batch_loss as chapters_loss
from scripts.ch07_multi30k import BPETokenizer, encode_pairs
from scripts.ch08_decoding import beam_search, until_end
from scripts.ch25_one_page import (
    BOS,
    EOS,
    FULL,
    PAD,
    SAMPLE,
    Settings,
    Transformer,
    batch_loss,
    learn_pieces,
    learning_rate,
    make_batches,
)
from scripts.core.settings import PRESETS
from scripts.corpora.load import load_corpus

PAGE = ROOT / "scripts/ch25_one_page.py"
NAMES = {
    r"^(encoder|decoder)\.(\d)": r"\1.layers.\2",
    r"norms\.(\d)": r"sublayer.\1.norm",
    r"self_attention": "self_attn",
    r"cross_attention": "src_attn",
    r"\.(query|key|value|output)\.": r".project_\1.",
    r"feed_forward\.0": "feed_forward.expand",
    r"feed_forward\.3": "feed_forward.contract",
    r"(encoder|decoder)_norm": r"\1.norm",
    r"generator": "generator.proj",
    r"embedding": "src_embed.0.lut",
}


def name_in_chapters(name: str) -> str:
    """What the chapters call a parameter of this page."""
    for own, theirs in NAMES.items():
        name = re.sub(own, theirs, name)
    return name


@pytest.fixture
def both():
    """The page's model and the chapters', with the same weights, in float64."""
    torch.manual_seed(0)
    settings = Settings("sample", 60, 2, 32, 64, 4, 0.0, 512, 1, 1e-3, 1)
    chapters = make_model(60, 60, 2, 32, 64, 4, 0.0, norm_first=True, tie="all").double()
    with torch.no_grad():
        for p in chapters.parameters():
            p.add_(0.2 * torch.randn_like(p))  # no norm or bias is as it began
    own, state = Transformer(settings, 60).double(), chapters.state_dict()
    own.load_state_dict({name: state[name_in_chapters(name)] for name in own.state_dict()})
    positions = chapters.src_embed[1].pe[: len(own.positions)]
    assert_close(own.positions, positions, rtol=0, atol=1e-4)  # made in float32
    own.positions = positions
    return own, chapters


SRC = torch.tensor([[11, 12, 13, EOS], [14, EOS, PAD, PAD]])
TGT = torch.tensor([[BOS, 7, 8, 9, EOS], [BOS, 5, EOS, PAD, PAD]])


def test_the_same_weights_give_the_same_logits_loss_and_gradients(both):
    own, chapters = both
    batch = Batch(SRC, TGT)
    x = chapters(SRC, batch.tgt, batch.src_mask, batch.tgt_mask)
    real = batch.tgt_y != PAD
    assert_close(own(SRC, batch.tgt)[real], chapters.generator(x)[real])
    loss = chapters_loss(chapters, batch, LabelSmoothing(0.1))[0] / batch.ntokens
    assert_close(batch_loss(own, SRC, TGT), loss)
    loss.backward()
    batch_loss(own, SRC, TGT).backward()
    theirs = dict(chapters.named_parameters(remove_duplicate=False))
    for name, p in own.named_parameters():
        assert_close(p.grad, theirs[name_in_chapters(name)].grad)


def test_the_same_weights_give_the_same_translations(both):
    own, chapters = both
    greedy = page.greedy_decode(own, *own.eval().encode(SRC), 12)
    expected = greedy_decode(chapters, SRC, padding_mask(SRC), 12, BOS)
    assert list(map(until_end, greedy.tolist())) == list(map(until_end, expected.tolist()))
    for row in SRC:
        src = row[row != PAD].unsqueeze(0)
        expected = beam_search(chapters, src, padding_mask(src), 12, beam=4, alpha=0.6)[0]
        found = page.beam_search(own, src, 12, beam=4, alpha=0.6)
        assert [tuple(i for i in ids if i != EOS) for _, ids in found] == [h.ids for h in expected]
        assert_close([score for score, _ in found], [h.score(0.6) for h in expected])


def test_pieces_batches_and_rates_are_the_chapters():
    pairs = load_corpus("few")["train"]
    texts = [text for pair in pairs for text in pair]
    pieces, tokenizer = learn_pieces(texts, 300), BPETokenizer.train(texts, 300)
    own = page.encode_pairs(pairs, pieces)
    assert own == [(e.src, e.tgt) for e in encode_pairs(pairs, tokenizer)]
    random.Random(0).shuffle(own)
    batches = make_batches(own, 100)
    assert all(max(side.numel() for side in (src, tgt)) <= 100 for src, tgt in batches)
    rows = [[i for i in row if i != PAD] for src, _ in batches for row in src.tolist()]
    assert sorted(rows) == sorted(source for source, _ in own)
    assert [learning_rate(n, 2e-3, 4, 9) for n in range(1, 10)] == [
        cosine_rate(n, 2e-3, 4, 9) for n in range(1, 10)
    ]


def test_the_full_recipe_is_chapter_9s():
    config, names = PRESETS["small"], {"peak": "lr"}
    for name, value in FULL._asdict().items():
        assert value == getattr(config, names.get(name, name)), name


def test_the_page_quotes_its_records():
    text, chapter_9 = PAGE.read_text("utf-8"), load_record("multi30k-de-en")["test"]
    full, sample = load_record("one-page"), load_record("one-page-sample")
    assert full["settings"] == FULL._asdict()
    bleu = {(score["split"], score["beam"]): score["bleu"] for score in full["scores"]}
    assert all(abs(score["bleu"] - bleu[split, 5]) < 1 for split, score in chapter_9.items())
    runs, changed = sample["runs"], sample["changed"]
    assert [run["seed"] for run in runs] == [*range(1, 9)]

    def ends(*keys):
        values = [functools.reduce(dict.get, keys, run) for run in runs]
        return [min(values), max(values)]

    right = [ends("scores", split, "right") for split in ("test_unseen", "test")]
    scores = [ends("scores", split, "bleu") for split in ("test_unseen", "test")]
    changes = [ends("needs", kind, "changes") for kind in ("full stop and end", "all others")]
    blind = changed["no positions"]["scores"]
    assert changed["it may look ahead"]["scores"]["test"]["bleu"] == 0
    for quoted in (
        f"{full['train_seconds'] / 60:.0f} minutes",
        f"BLEU was {bleu['test_2016_flickr', 5]:.1f} on `test_2016_flickr`",
        f"and {bleu['test_2017_flickr', 5]:.1f} on `test_2017_flickr`",
        f"and {bleu['test_2016_flickr', 1]:.1f} and {bleu['test_2017_flickr', 1]:.1f} greedily",
        f"{100 * right[0][0]:.0f} to {right[0][1]:.0%}, where `test`",
        f"has {100 * right[1][0]:.0f} to {right[1][1]:.0%}",
        "BLEU was {:.1f} to {:.1f}, and {:.1f} to {:.1f}".format(*scores[0], *scores[1]),
        f"at most {changes[0][1]:.0%} of the translations",
        f"another piece {100 * changes[1][0]:.0f} to {changes[1][1]:.0%}",
        "got {:.2f} to {:.2f} with eight".format(*ends("weight_on_the_verb")),
        f"BLEU falls to {blind['test']['bleu']:.1f} on `test`",
        f"and {blind['test_unseen']['bleu']:.1f} on `test_unseen`",
        f"The loss falls to {changed['it may look ahead']['last_loss']:.2f}",
    ):
        assert quoted in text, quoted
    assert (
        sum(
            run["translations"][-1].endswith("a sad singer is waving to an athlete.")
            for run in runs
        )
        == 7
    )
    assert all(
        run["scores"]["test"]["right"] > run["scores"]["test_unseen"]["right"] for run in runs
    )


def test_it_is_one_page():
    """At most 300 lines of code, and of the series only its captions and its charts."""
    cells = re.split(r"(?m)^# %%", PAGE.read_text("utf-8"))
    code = [
        cell for cell in cells[1:] if not cell.startswith((" [markdown]", ' tags=["bootstrap"]'))
    ]
    lines = [line for cell in code for line in cell.split("\n")[1:] if line.strip()]
    assert len(lines) <= 300
    imports = [
        n.module for n in ast.walk(ast.parse("\n".join(lines))) if isinstance(n, ast.ImportFrom)
    ]
    assert all(
        re.match(r"scripts\.(corpora|book)\.", m) for m in imports if m.startswith("scripts")
    )
    assert SAMPLE.corpus == "sample"
