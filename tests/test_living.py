"""The living page: the same ids, tokens and texts in a browser as in Python.

For the model that ships, for one of a reader's own, in other scripts, and for chapter 26's.

The page's own JavaScript runs in Node, and again in headless Chromium. Nothing is skipped: if a
program is missing, the tests fail and say which package has it.
"""

import importlib.util
import json
import os
import random
import re
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from browsing import chromium, run_script, serving
from conftest import ROOT

from scripts.ch01_attention import subsequent_mask
from scripts.ch06_training import BOS, EOS, PAD, UNK, greedy_decode
from scripts.ch07_multi30k import BPETokenizer, encode_pairs, source_ids
from scripts.ch08_decoding import beam_search
from scripts.ch15_looking_inside import look_at, piece_label
from scripts.ch26_your_own_pair import LEARNER, fitted, ruvel_corpus
from scripts.core.data import TrainingData, prepare
from scripts.core.models import DEFAULT_MODEL, load_model, save_model
from scripts.core.settings import PRESETS, TrainConfig
from scripts.corpora.invented import ruvel_pairs
from scripts.corpora.load import load_corpus
from scripts.corpora.plain import plain_text
from scripts.fast.run import fit
from scripts.fast.translating import fast_translate

LIVING = ROOT / "docs" / "living"
SENTENCES = [  # our own
    "Eine Frau mit einem roten Hut liest am Strand ein Buch.",
    "Zwei Kinder bauen am Meer eine Burg aus Sand.",
    "Ein alter Mann repariert vor dem Haus sein Fahrrad.",
    "Im Park spielt eine Gruppe junger Leute Fußball.",
    "Der Pirat kauft um 12 Uhr einen roten Hut und lacht! 😀",
]
MODEL_LIMIT = 256

# Pairs without spaces, from right to left, and with letters that SentencePiece rewrites.
SUBJECTS = ["我", "Анна", "这只猫", "Ђорђе", "𐍈ſŒ", "2 只 köpek"]
HEBREW_SUBJECTS = ["אני", "אנה", "החתול", "ג׳ורג׳", "ﬁ☃", "2 כלבים"]
VERBS = ["看见鱼", "吃了12个苹果", "在家里睡觉", "読む Книгу"]
HEBREW_VERBS = ["רואה דג", "אכל 12 תפוחים", "ישן בבית", "קורא ספר"]
SOURCES = [f"{who}{does}。" for who in SUBJECTS for does in VERBS]
TARGETS = [f"{who} {does}." for who in HEBREW_SUBJECTS for does in HEBREW_VERBS]
OWN_PAIRS = list(zip(SOURCES, TARGETS, strict=True))
OWN_SENTENCES = [SOURCES[0] + SOURCES[-1], "Анна 7 Ünï 龘龘☃吃了鱼! 😀", *SOURCES[5:8]]


def living_build() -> Any:
    """docs/living/build.py as a module."""
    spec = importlib.util.spec_from_file_location("living_build", LIVING / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = living_build()


def train_own(folder: Path) -> None:
    """A model that has seen each of its pairs forty times, in three seconds; and its page."""
    tokenizer = BPETokenizer.train(SOURCES + TARGETS, 140)
    settings = {"layers": 2, "d_model": 32, "d_ff": 64, "heads": 4, "languages": "Tlon-he"}
    settings |= {"epochs": 40, "max_tokens": 256, "lr": 5e-3, "warmup": 20, "device": "cpu"}
    splits, examples = {"val": OWN_PAIRS[:4]}, encode_pairs(OWN_PAIRS, tokenizer)
    data = TrainingData(splits, tokenizer, examples, examples[:4])
    fit(replace(PRESETS["sample"], **settings), data, folder)
    build_own(folder, OWN_PAIRS)


def train_chapters(folder: Path) -> None:
    """Chapter 26's model, trained as its cells do, in half a minute; and its page."""
    data = prepare(LEARNER, ruvel_corpus())
    save_model(folder, fitted(LEARNER, data))
    build_own(folder, data.corpus["test"])


def build_own(folder: Path, test_pairs: list[tuple[str, str]]) -> None:
    """The page of the model in `folder`, with its test pairs as examples."""
    (folder / "pairs").mkdir()
    (folder / "pairs/test.tsv").write_text("\n".join(map("\t".join, test_pairs)), "utf-8")
    build.build(folder, folder / "x/y")


class Case(NamedTuple):
    """A model, and its page, which lies in x/y of `folder`."""

    model: Path
    folder: Path
    sentences: list[str]
    named: list[str]  # the page's title, and the languages' codes


CHAPTERS = pytest.param("chapter", marks=pytest.mark.audit)


@pytest.fixture(scope="module", params=["shipped", "own", CHAPTERS])
def case(request, once) -> Case:
    """The page, built as `make living` does."""
    if request.param == "shipped":
        folder = once("living", lambda folder: build.build(DEFAULT_MODEL, folder / "x/y"))
        return Case(DEFAULT_MODEL, folder, SENTENCES, ["German to English", "de", "en"])
    if request.param == "chapter":
        folder = once("chapter", train_chapters)
        asked = [pair[0] for pair in ruvel_pairs(4, construction="negation")]
        return Case(folder, folder, [*asked, "Havo ☃ 12 Düner!"], ["qru to English", "und", "en"])
    own = once("own", train_own)
    return Case(own, own, OWN_SENTENCES, ["Tlon to Hebrew", "und", "he"])


@pytest.fixture(scope="module")
def trained(case):
    return load_model(case.model, "cpu")


@pytest.fixture(scope="module")
def site(case) -> Path:
    return case.folder / "x/y"


# --- The tokenizer ---


def strange_texts() -> list[str]:
    """Texts that may trip up a tokenizer."""
    draw = random.Random(7)
    texts = [
        *("", " ", "\t\n\r", "  zwei  Wörter  ", "\u00a0fest\u00a0verbunden\u00a0", "ﬁnden", "ﷺ"),
        *("①②③ ½ x²", "ª º ™ ℃ Ⅷ", "ſ ﬀ ﬃ ﬆ", "Ｅｉｎ　Ｈｕｎｄ", "Straße STRASSE ẞ", "Ð Þ ß ÿ"),
        *("cafe\u0301 café", "u\u0308ber über", "A\u030a \u212b Å", "q\u0307\u0323 q\u0323\u0307"),
        *("ｶﾞｷﾞ ガギ", "한국어 \u1112\u1161\u11ab\u1100\u116e\u11a8", "你好，世界", "مرحبا"),
        *("👩\u200d👩\u200d👧 😀🏽", "🇩🇪", "☃☃ ein ☃", "\ud7ff\ue000\ufffd\U0010ffff"),
        *("\ufeffmit BOM", "null\0byte", "\x1b\x7f\x85", "ein\u2028Hund\u2029lief"),
        *("\u200bnull\u200cbreit\u200d", "soft\u00adhyphen", "▁▁ein▁Hund▁", "  ▁  ", "x ▁"),
        *("<s> </s> <unk> <pad>", "</s>", "1234567890", "3,14 € 5%", "!!! ??? ...", "a" * 300),
        *("„Hallo“, sagte sie – ‚ja‘ …", "Donaudampfschifffahrtsgesellschaftskapitän"),
        *(f"q{3 * letter} -{5 * letter}7" for letter in "softplebdc0"),  # equal pairs: which first?
    ]
    letters = [*"aäoöuüßnerst EI.,-▁éﬁＡ☃中\t\u0308\u0301", "  "]
    texts += ["".join(draw.choices(letters, k=draw.randint(1, 40))) for _ in range(200)]
    everywhere = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000 and i < 0x30000]
    texts += ["".join(draw.choices(everywhere, k=30)) for _ in range(200)]
    plane = [c for c in everywhere if ord(c) < 0x10000]
    texts += ["a".join(plane[i : i + 64]) for i in range(0, len(plane), 64)]  # each letter once
    return texts


def test_ids_and_texts_are_those_of_sentencepiece(site, trained, case):
    tokenizer = trained.tokenizer
    pairs = load_corpus("sample")["test"][:200] + OWN_PAIRS
    texts = [text for pair in pairs for text in pair] + case.sentences + strange_texts()
    texts += [unicodedata.normalize(form, text) for form in ("NFD", "NFKC") for text in texts[:50]]
    draw = random.Random(1)
    rows = [
        [draw.randrange(len(tokenizer)) for _ in range(draw.randint(0, 20))] for _ in range(300)
    ]
    rows += [[UNK], [PAD, BOS, UNK, UNK, 9], [5, EOS, 6], [tokenizer.processor["▁"]] * 3 + [77]]
    assert len(texts) > 1500
    found = run_script(LIVING / "node.mjs", str(site), request={"encode": texts, "decode": rows})
    for text, ids in zip(texts, found["encode"], strict=True):
        assert ids == tokenizer.encode(text), ascii(text)
    for row, text in zip(rows, found["decode"], strict=True):
        assert text == tokenizer.decode(row), row


def test_plain_text_is_pythons(site):
    """For every code point. JavaScript knows by itself which letters Unicode calls ignorable."""
    letters = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    found = run_script(LIVING / "node.mjs", str(site), request={"plain": letters})["plain"]
    pairs = zip(letters, found, strict=True)
    assert not [(hex(ord(c)), text) for c, text in pairs if text != plain_text(c)]


# --- The model and the searches ---


def cut(ids: list[int]) -> list[int]:
    return ids[: ids.index(EOS)] if EOS in ids else ids


@pytest.fixture(scope="module")
def answers(site, case):
    """What the page's JavaScript makes of each sentence, greedily and with beams of 4 and 5."""
    wanted = [{"text": text, "beam": beam} for beam in (1, 4, 5) for text in case.sentences]
    found = run_script(LIVING / "node.mjs", str(site), request={"translate": wanted})["translate"]
    return {(one["beam"], one["text"]): texts for one, texts in zip(wanted, found, strict=True)}


def python_texts(trained, text: str, beam: int) -> list:
    row = source_ids(text, trained.tokenizer)
    src, limit = torch.tensor([row]), min(MODEL_LIMIT, 2 * len(row) + 10)
    if beam == 1:
        return [greedy_decode(trained.model, src, None, limit)[0].tolist()]
    return beam_search(trained.model, src, None, limit, beam, trained.config.alpha)[0]


@pytest.mark.parametrize("number", range(5))
def test_greedy_tokens_are_pythons(answers, trained, case, number):
    (found,) = answers[1, case.sentences[number]]
    wanted = python_texts(trained, case.sentences[number], 1)[0]
    assert found["ids"] == wanted and wanted[-1] == EOS
    assert found["text"] == trained.tokenizer.decode(wanted)


def test_a_text_that_is_too_long_is_cut(site, trained, case):
    wanted = [{"text": case.sentences[-2] * 100}]
    found = run_script(LIVING / "node.mjs", str(site), request={"translate": wanted})
    assert found["translate"][0][0]["text"] == fast_translate(trained, [wanted[0]["text"]])[0]


@pytest.mark.parametrize("beam", [4, 5])
@pytest.mark.parametrize("number", range(5))
def test_beams_are_pythons(answers, trained, case, number, beam):
    text = case.sentences[number]
    found, wanted = answers[beam, text], python_texts(trained, text, beam)
    assert len(found) == beam
    assert [cut(one["ids"]) for one in found] == [list(h.ids) for h in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one["logProb"] == pytest.approx(other.log_prob, abs=1e-4)
        assert one["score"] == pytest.approx(other.score(trained.config.alpha), abs=1e-4)


@pytest.mark.parametrize("number", range(2))
def test_candidates_and_attention_are_pythons(answers, trained, case, number):
    text = case.sentences[number]
    (found,) = answers[1, text]
    look = look_at(trained, text)
    cross = look.maps["cross"]  # (N, H, T, S)
    weights = torch.tensor(found["weights"]).unflatten(-1, (*cross.shape[:2], -1))  # (T, N, H, S)
    torch.testing.assert_close(weights.permute(1, 2, 0, 3), cross, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(torch.tensor(found["mean"]), cross[1].mean(0), rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        states = trained.model(look.src, look.tgt, None, subsequent_mask(look.tgt.size(1)))
        best = trained.model.generator(states)[0].log_softmax(-1).topk(5)  # (T, 5) each
    log_probs, ids = best.values.tolist(), best.indices.tolist()
    assert [[one["token"] for one in step] for step in found["candidates"]] == ids
    for step, wanted in zip(found["candidates"], log_probs, strict=True):
        assert [one["logProb"] for one in step] == pytest.approx(wanted, abs=1e-3)


def test_beams_of_a_beam_share_no_cache(answers):
    """Each text of a beam carries its own steps: as many as tokens, each a distribution."""
    for texts in answers.values():
        for one in texts:
            assert len(one["candidates"]) == len(one["weights"]) == len(one["ids"])
            assert torch.tensor(one["mean"]).sum(-1) == pytest.approx(1, abs=1e-4)


# --- The files ---


def test_the_page_is_small_and_whole(site):
    sizes = {path.relative_to(site).as_posix(): path.stat().st_size for path in site.rglob("*.*")}
    assert sum(sizes.values()) < 35e6 and sizes["weights.bin"] < 16e6
    worker = (site / "sw.js").read_text("utf-8")
    kept = json.loads(re.search(r"const FILES = (\[.*?\]);", worker, re.DOTALL)[1])
    assert set(kept) == {"./", *sizes} - {"sw.js"} and "@" not in worker
    assert re.search(r'const VERSION = "[0-9a-f]{12}";', worker)
    assert "../" not in (site / "index.html").read_text("utf-8")  # it is no part of the book's site
    for name in build.PAGE:
        text = (LIVING / name).read_text("utf-8")
        hosts = set(re.findall(r"https?://([\w.]+)", text)) - {"www.w3.org", "localhost"}
        assert not hosts, f"{name} names other hosts: {hosts}"


def test_what_the_page_proposes_suits_the_model(tmp_path):
    turned, grammar, other = (
        " ".join(build.examples(tmp_path, TrainConfig(corpus=corpus, languages=languages)))
        for corpus, languages in (("multi30k", "en-de"), ("sample", "de-en"), ("sw", "sw-en"))
    )
    assert "in the garden" in turned and "einer grünen Kiste" in grammar and not other


# --- A browser ---


@pytest.fixture(scope="module")
def address(case):
    with serving(case.folder) as found:
        yield f"{found}x/y/"


@pytest.fixture(scope="module")
def visit(case, site, address):
    """What a reader sees, in headless Chromium. LIVING_PICTURES=folder keeps the screenshots."""
    pictures = os.environ.get("LIVING_PICTURES")
    request = {
        "chromium": chromium(),
        "url": address,
        "file": (site / "index.html").as_uri(),
        "sentences": [{"text": text, "beam": b} for b in (1, 4) for text in case.sentences],
        "forward": "ArrowLeft" if "he" in case.named else "ArrowRight",
        "pictures": pictures and f"{pictures}/{case.model.name}",
    }
    return run_script(LIVING / "browser.mjs", request=request)


def test_a_browser_translates_as_python_does(visit, trained, case):
    tokenizer = trained.tokenizer
    first, *others = build.examples(case.model, trained.config)
    assert visit["opening"] == tokenizer.decode(python_texts(trained, first, 1)[0])
    assert visit["examples"] == others and len(others) == 4
    assert visit["named"] == case.named
    found = iter(visit["translations"])
    for text in case.sentences:
        (wanted,), one = python_texts(trained, text, 1), next(found)
        assert one["text"] == tokenizer.decode(wanted)
        pieces = [tokenizer.processor.id_to_piece(i) for i in wanted]
        assert one["tokens"] == [piece_label(piece) for piece in pieces]
    for text in case.sentences:
        wanted, one = python_texts(trained, text, 4), next(found)
        assert one["texts"] == [tokenizer.decode(h.ids) for h in wanted]
        assert one["text"] == one["texts"][0]


def test_a_browser_has_no_complaint_and_asks_no_stranger(visit):
    assert visit["complaints"] == []
    assert visit["axe"] == {"light": [], "beam": [], "dark": []}
    assert visit["wider"] <= 0  # nothing sticks out on a phone


def test_the_page_answers_its_reader(visit):
    before, after, focus = visit["keyboard"]
    assert before != after and after == focus
    assert 6 <= len(visit["candidates"]) <= 7 and all("%" in one for one in visit["candidates"])
    assert visit["pickerMoves"] and visit["cells"] > 20
    assert sum(map(float, visit["table"])) == pytest.approx(1, abs=0.1)
    assert visit["stopped"] == "Stopped." and visit["focus"] == "go"
    assert visit["hurried"] == 2  # of four that were asked for at once
    assert visit["soft"][0] == visit["soft"][1]  # a hyphen that can't be seen changes nothing
    assert visit["nothing"]
    assert visit["empty"] == ["Nothing to translate.", "—"]
    assert visit["offline"] == visit["opening"]


def test_where_it_cannot_work_the_page_says_so(visit):
    assert "http://localhost:8000/y/" in visit["trouble"]["file"]
    assert "no WebAssembly" in visit["trouble"]["no WebAssembly"]
    assert "JavaScript" in visit["trouble"]["no JavaScript"]
    assert "didn't run" in visit["trouble"]["no script"]
