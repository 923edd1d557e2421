"""Your own pairs: from files with mistakes to a model, its scores and a fine-tuned one."""

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import evaluate, train, translate
from scripts.book.records import load_record
from scripts.core.models import load_model
from scripts.core.scores import corpus_bleu
from scripts.core.training import best_weights
from scripts.corpora import inspect
from scripts.corpora.load import load_corpus
from scripts.corpora.pairs import clean_pairs, read_pairs, where_they_part
from scripts.corpora.splits import (
    letters_only,
    load_pairs,
    near_duplicates,
    own_pairs,
    split_pairs,
    words_of,
)

SAMPLE = load_corpus("sample")["train"]
TINY = ["--layers", "1", "--d_model", "16", "--d_ff", "32", "--heads", "2", "--epochs", "1"]
TINY += ["--max_tokens", "512", "--beam", "1", "--device", "cpu", "--precision", "float32"]


def tsv(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), "utf-8")
    return path


def words(count: int, letters: str, space: str, rng: random.Random) -> str:
    return space.join("".join(rng.choices(letters, k=rng.randint(2, 5))) for _ in range(count))


@pytest.fixture(scope="module")
def far_pairs() -> list[tuple[str, str]]:
    """Hebrew and Chinese letters at random: 300 pairs, none near another."""
    rng = random.Random(0)
    counts = [rng.randint(4, 9) for _ in range(300)]
    return [
        (words(n, "אבגדהוזחטי", " ", rng), words(n, "一二三四五六七八", "", rng)) for n in counts
    ]


# Files


MISTAKES = {
    "a side is empty": "Ein Hund.\t",
    "both sides are equal": "Taxi, bitte.\tTaxi, bitte.",
    "the same pair again": "\t".join(SAMPLE[3]),
    "one side is absurdly long for the other": "Ja.\t" + "and so on " * 12,
    "too long: more than about 256 tokens": "und so " * 90 + "\t" + "and so " * 90,
    "lines without a tab": "no tab",
    "more than two columns": "Ein Haus am See.\tA house at the lake.\tseen by me",
    "invisible letters or unusual spaces": "Ein\u00a0Fu\u00adchs schläft.\tA fox sleeps.",
    "letters that went through a wrong encoding": "Die TÃ¼r ist zu.\tThe door is shut.",
    "the source has other targets, too": f"{SAMPLE[5][0]}\tSomething else entirely.",
    "lines with rare letters": "Ein Œuvre mit Ø.\tA work with an Ø.",
    "the sides look swapped": "\t".join(reversed(SAMPLE[9])),
}
LEFT_OUT = list(MISTAKES)[:5]


def test_each_mistake_is_named_and_none_is_fatal(capsys, tmp_path):
    """What is left out is counted under its reason; what is odd stays, and is shown."""
    good = SAMPLE[:400]
    path = tsv(tmp_path / "pairs.tsv", good)
    path.write_text(path.read_text("utf-8") + "\n".join(MISTAKES.values()) + "\n", "utf-8")
    assert inspect.main(["--pairs", str(path), "--save", str(tmp_path / "corpus")]) == 0
    text = capsys.readouterr().out
    left_out, kept = text.split("Worth a look:")
    for mistake in MISTAKES:
        assert mistake in (left_out if mistake in LEFT_OUT else kept), mistake
    report = json.loads((tmp_path / "corpus" / "report.json").read_text("utf-8"))
    gone = sum(note["count"] for note in report["notes"] if note["left_out"])
    assert report["read"] == 412 == gone + sum(report["sizes"].values())
    splits = load_corpus(str(tmp_path / "corpus"), "de-en")
    assert {name: len(pairs) for name, pairs in splits.items()} == report["sizes"]
    held_out = {side for name in ("val", "test") for pair in splits[name] for side in pair}
    assert held_out.isdisjoint(side for pair in splits["train"] for side in pair)


@pytest.mark.parametrize("line", [200, 3000, 5500])
def test_files_of_unequal_length_are_told_where_they_part(line, tmp_path):
    german, english = map(list, zip(*SAMPLE, strict=True))
    del english[line - 1]
    assert abs(where_they_part(german, english) - line) < 15
    for name, lines in (("a.de", german), ("a.en", english)):
        (tmp_path / name).write_text("\n".join(lines) + "\n", "utf-8")
    with pytest.raises(ValueError, match="6,000 lines and .* 5,999 lines; .*stop matching near"):
        read_pairs(tmp_path / "a.de", tmp_path / "a.en")


ENCODINGS = {
    "packed": (lambda text: gzip.compress(text.encode()), 0),
    "from Windows": (lambda text: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(), 0),
    "two bytes a letter": (lambda text: text.encode("utf-16"), 1),
    "one byte a letter": (lambda text: text.encode("cp1252"), 1),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_encodings_are_understood_and_told(name, tmp_path):
    encode, notes = ENCODINGS[name]
    (tmp_path / "pairs").write_bytes(encode("Schöne Grüße\tkind regards\nein Wort\ta word\n"))
    read = read_pairs(tmp_path / "pairs")
    assert read.pairs == [("Schöne Grüße", "kind regards"), ("ein Wort", "a word")]
    assert len(read.notes) == notes


def test_near_duplicates_of_held_out_sentences_leave_training():
    """Other case, marks, digits or word order; one word of many; on either side."""
    rng = random.Random(0)
    pairs = [
        (words(12, "abcdefghij", " ", rng), words(12, "klmnopqrst", " ", rng)) for _ in range(200)
    ]
    splits, twins = split_pairs(pairs, seed=1)
    source, target = splits["test"][0]
    near = [(source.upper() + "!", "new one"), ("another", " ".join(reversed(target.split())))]
    near.append((source.rsplit(" ", 1)[0] + " zzz", "yet another"))
    again, left_out = split_pairs(
        [*splits["train"], *near], valid=splits["val"], test=splits["test"]
    )
    assert not twins and len(left_out) == 3 and again["train"] == splits["train"]
    assert split_pairs(pairs, seed=1) == (splits, twins)
    assert split_pairs(pairs, seed=2)[0]["test"] != splits["test"]


def test_vowel_signs_tell_words_apart():
    """A girl isn't a boy's twin; digits, and they alone, are no words."""
    boy, girl = words_of("छोटा लड़का 2!"), words_of("छोटा लड़की")
    assert (boy, girl) == (["छोटा", "लड़का"], ["छोटा", "लड़की"])
    assert near_duplicates({0: "बड़ा लड़का यहाँ", 1: "लड़का, 2 बड़ा"}, ["लड़की बड़ा", "बड़ा लड़का!"]) == {1}
    assert words_of("ที่นี่") == list("ที่นี่") and letters_only("x_1²y").split() == ["x", "y"]
    assert near_duplicates({0: "un café noir"}, ["noir cafe\u0301 un"]) == {0}  # two forms of é


def test_clean_text_is_left_alone():
    pairs = sorted(set(SAMPLE[:2000]))
    kept, notes = clean_pairs(pairs)
    assert [*kept.values()] == pairs and not any(note.left_out for note in notes)


# Runs


@pytest.fixture(scope="module")
def trained_far(far_pairs, tmp_path_factory) -> Path:
    """The folder of runs in which a model has learnt Hebrew to Chinese for an epoch."""
    folder = tmp_path_factory.mktemp("runs")
    path = tsv(folder / "far.tsv", far_pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERIES_RUNS", str(folder))
        patch.setattr(sys, "argv", ["train"])
        assert train.main(["--pairs", str(path), "--languages", "he-zh", *TINY]) == 0
    return folder


def test_any_script_is_trained_scored_and_translated(trained_far, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SERIES_RUNS", str(trained_far))
    run = trained_far / "far"
    assert load_model(run).config.languages == "he-zh"
    record = load_record("record", run)
    assert record["pairs"]["read"] == 300 and "tok:char" in record["test"]["test"]["signature"]
    assert "he to zh" in (run / "README.md").read_text("utf-8")
    assert evaluate.main(["--model", str(run)]) == 0
    assert "test: BLEU" in capsys.readouterr().out
    for number, name in enumerate(("in", "out")):
        lines = [pair[number] for pair in load_pairs(run / "pairs")["test"]]
        (tmp_path / name).write_text("\n".join(lines) + "\n", "utf-8")
    files = ["--input", str(tmp_path / "in"), "--reference", str(tmp_path / "out")]
    assert evaluate.main(["--model", str(run), *files, "--against", str(run)]) == 0
    assert "+0.00 BLEU against" in capsys.readouterr().out
    assert translate.main(["--model", str(run), "--input", str(tmp_path / "in")]) == 0
    assert capsys.readouterr().out.count("\n") == 50


def test_a_run_resumes_with_its_own_pairs_alone(trained_far, far_pairs, capsys, monkeypatch):
    """From any working directory: the pairs lie beside the model."""
    monkeypatch.setenv("SERIES_RUNS", str(trained_far))
    monkeypatch.chdir(trained_far)
    again = ["--languages", "he-zh", *TINY, "--resume"]
    path = trained_far / "far.tsv"
    assert train.main(["--pairs", str(path), *again]) == 0
    tsv(path, far_pairs[::-1])
    assert train.main(["--pairs", str(path), *again]) == 2
    assert "began with other pairs (another pairs)" in capsys.readouterr().err
    tsv(path, far_pairs)


def test_pairs_go_with_a_run_that_is_lengthened(trained_far, monkeypatch):
    """And with one that learns from saved pairs, wherever those are."""
    monkeypatch.setenv("SERIES_RUNS", str(trained_far))
    monkeypatch.setattr(sys, "argv", ["train"])
    assert train.main(["--from", str(trained_far / "far"), "--epochs", "2", "--device", "cpu"]) == 0
    saved = ["--corpus", str(trained_far / "far/pairs"), "--languages", "he-zh", "--name", "again"]
    assert train.main([*saved, *TINY]) == 0
    far, longer, again = (trained_far / name for name in ("far", "far-2", "again"))
    assert load_pairs(longer / "pairs") == load_pairs(far / "pairs") == load_pairs(again / "pairs")
    first, second = (load_record("record", run)["pairs"] for run in (far, again))
    assert first == second and load_model(again).config.corpus == "pairs"


@pytest.mark.audit
def test_two_processes_share_one_split_and_one_report(far_pairs, tmp_path):
    """Without dropout they learn what one process does from batches of the same size."""
    path, own = tsv(tmp_path / "far.tsv", far_pairs), {"SERIES_RUNS": str(tmp_path)}
    command = ["-m", "scripts.train", "--pairs", str(path), "--languages", "he-zh", *TINY]
    command += ["--dropout", "0"]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    for ways in ([*command, "--accumulate", "2", "--name", "one"], [*launch, *command]):
        run = subprocess.run(
            [sys.executable, *ways], env=os.environ | own, text=True, capture_output=True
        )
        assert run.returncode == 0 and run.stdout.count("300  read") == 1, run.stderr
    one, two = (load_record("record", tmp_path / name) for name in ("one", "far"))
    assert two["processes"] == 2 and one["pairs"] == two["pairs"]
    assert load_pairs(tmp_path / "one/pairs") == load_pairs(tmp_path / "far/pairs")
    for part in ("train_loss", "val_ppl"):
        first, second = ([row[part] for row in record["history"]] for record in (one, two))
        assert first == pytest.approx(second, rel=1e-4), part


def test_fine_tuning_says_what_was_forgotten(trained_far, far_pairs, capsys, monkeypatch):
    """It begins with the model's weights, pieces and sizes; both test sets are scored twice."""
    monkeypatch.setenv("SERIES_RUNS", str(trained_far))
    monkeypatch.setattr(sys, "argv", ["train"])
    path = tsv(trained_far / "more.tsv", [(source[::-1], target) for source, target in far_pairs])
    options = ["--pairs", str(path), "--from", str(trained_far / "far"), "--epochs", "1"]
    assert train.main([*options, "--device", "cpu"]) == 0
    assert "before   after  BLEU" in capsys.readouterr().out
    record = load_record("record", trained_far / "more")
    (row,) = record["tuned"]
    assert (record["from"]["model"], row["corpus"], row["split"]) == ("far", "far/pairs", "test")
    old, new = (load_model(trained_far / name) for name in ("far", "more"))
    assert new.tokenizer.model == old.tokenizer.model and new.config.d_model == 16
    assert new.config.languages == "he-zh"


def test_what_judged_a_model_judges_its_fine_tuning(tmp_path):
    """All its test splits together; none of it is in training."""
    before = {"train": [], "val": SAMPLE[:60], "test_a": SAMPLE[60:90], "test_b": SAMPLE[90:120]}
    path = tsv(tmp_path / "more.tsv", SAMPLE[100:400])
    splits = own_pairs({"pairs": [str(path)]}, before=before).splits
    assert splits == {"train": SAMPLE[120:400], "val": SAMPLE[:60], "test": SAMPLE[60:120]}


def test_where_bleu_is_equal_the_loss_decides(tmp_path):
    """As in the first epochs of few pairs, all of which score 0."""
    history = [{"val_bleu": 0.0, "val_ppl": ppl} for ppl in (9.0, 5.0, 7.0)]
    assert best_weights(tmp_path, history).name == "epoch-002.safetensors"


def test_the_sample_corpus_turns_round(monkeypatch, tmp_path):
    english_german = load_corpus("sample", "en-de")
    assert english_german["val"][0] == load_corpus("sample")["val"][0][::-1]
    with pytest.raises(ValueError, match="German and English, de-en or en-de, not 'de-fr'"):
        load_corpus("sample", "de-fr")
    monkeypatch.setenv("SERIES_RUNS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["train"])
    few = ["--corpus", "few", "--languages", "en-de", "--vocab", "200", "--name", "round"]
    assert train.main([*few, *TINY]) == 0
    (sample, *_) = load_record("record", tmp_path / "round")["samples"]
    assert (sample["source"], sample["reference"]) == load_corpus("few", "en-de")["test"][0]


def test_texts_without_spaces_are_scored_letter_by_letter():
    score = corpus_bleu(["一只狗在公园里跑"], ["一只狗在公园里玩"])
    assert score.score > 50 and "tok:char" in score.signature
    assert "tok:13a" in corpus_bleu(["a b c d"], ["a b c 犬"]).signature
