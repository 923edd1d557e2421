"""The command `translate`: a line out for each line in, whatever it holds, and a clean exit."""

import bz2
import gzip
import io
import lzma
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import ROOT
from scripts import translate as command
from scripts.ch06_training import EOS
from scripts.ch07_multi30k import source_ids
from scripts.ch08_decoding import Hypothesis, beam_search
from scripts.core.models import Trained, load_model
from scripts.corpora.sample import sample_corpus
from scripts.fast import lines, translating

SAMPLE = ("--model", str(ROOT / "models/sample-de-en"), "--device", "cpu")
GREEDY = (*SAMPLE, "--beam", "1")
DOG, CAT = "Ein Hund schläft im Garten.", "Eine Katze schläft."
LONGEST = 120  # seconds that any wait may take, on a busy machine


@pytest.fixture(scope="module")
def trained() -> Trained:
    return load_model(ROOT / "models/sample-de-en")


@pytest.fixture(scope="module")
def german() -> list[str]:
    """Distinct sentences, each of which the tokenizer gives back as it was."""
    return list(dict.fromkeys(source for source, _ in sample_corpus()["train"]))


@pytest.fixture
def translate(trained, monkeypatch, capsysbinary):
    """Runs the command in this process: bytes in, and (exit code, bytes out, standard error)."""
    monkeypatch.setattr(translating, "load_model", lambda folder, device: trained)

    def run(data: bytes, *argv: str) -> tuple[int, bytes, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = command.main(argv)
        out, err = capsysbinary.readouterr()
        return code, out, err.decode()

    return run


def echo_search(trained, rows, options):
    """Stands in for a search: the translation is the source."""
    return [[Hypothesis(tuple(row[:-1]), -1.0, len(row))] if row[:-1] else [] for row in rows]


@pytest.fixture
def echo(monkeypatch):
    """Replaces our search by one that returns what it was asked, at once."""
    monkeypatch.setattr(command, "decode_hypotheses", echo_search)


def split(out: bytes) -> list[str]:
    """Output as lines; each ends in a newline."""
    assert out == b"" or out.endswith(b"\n")
    return out.decode().split("\n")[:-1]


# A line for each line


def test_texts_a_file_and_standard_input_give_the_same(translate, tmp_path):
    data = f"{DOG}\n\n \t\n{CAT}".encode()
    path = tmp_path / "captions.de"
    path.write_bytes(data)
    code, out, err = translate(data, *GREEDY)
    assert (code, err) == (0, "")
    outputs = split(out)
    assert outputs[1:3] == ["", ""] and outputs[0] and outputs[3] and outputs[0] != outputs[3]
    assert translate(b"", *GREEDY, "--input", str(path)) == (0, out, "")
    assert translate(b"", DOG, "", " \t", CAT, *GREEDY) == (0, out, "")
    assert translate(b"", data.decode(), *GREEDY) == (0, out, "")
    assert translate(data + b"\n", *GREEDY) == (0, out, "")  # its last newline ends the last line
    assert translate(data.replace(b"\n", b"\r\n"), *GREEDY) == (0, out, "")
    assert translate(b"", *GREEDY) == (0, b"", "")


def test_only_a_newline_ends_a_line(translate, echo):
    for end in ("\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"):
        code, out, err = translate(f"Hund{end}Hund\n{end}\n{end}Hund{end}".encode(), *GREEDY)
        outputs = split(out)
        assert (code, err, len(outputs)) == (0, "", 3) and outputs[1] == ""
        assert outputs[0].count("Hund") == 2 and outputs[2] == "Hund", repr(end)


ODD = ["\0", f"{DOG}\0", "😀🎉 Hund 👩\u200d👧", "\u202eשלום עולם\u202c", "\x01\x02\x1b[31m"]
ODD += ["e\u0301" * 40, "¿" * 300, "|||", "▁", "</s>", "\ufeff"]


def test_any_text_gives_one_line(translate):
    code, out, err = translate("\n".join([*ODD, DOG]).encode(), *GREEDY)
    alone = translate(f"{DOG}\n".encode(), *GREEDY)[1]
    assert (code, out.count(b"\n")) == (0, len(ODD) + 1) and out.endswith(b"\n" + alone)
    assert re.fullmatch(r"(note: line \d+ has letters that the model has never met: .*\n)*", err)


def test_letters_that_the_model_has_never_met_are_named(translate):
    data = f"{DOG}\n☃☃ {DOG} 日本\u2060\n\ufeff{CAT}\u200b\n".encode()
    code, out, err = translate(data, *GREEDY)
    assert err == "note: line 2 has letters that the model has never met: ☃ 日 本\n"
    assert (code, split(out)[2]) == (0, split(translate(CAT.encode(), *GREEDY)[1])[0])


@pytest.mark.parametrize("width", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_another_encoding_changes_nothing(width, translate, echo):
    text = f"{DOG}\r\n\n„Hund“ – Hund\u0a0aHund 😀\n{CAT}"
    expected = translate(text.encode(), *GREEDY)
    assert expected[1].count(b"\n") == 4
    for whole in [f"\ufeff{text}", text][: 1 + (width == "utf-8")]:  # only that needs no mark
        assert translate(whole.encode(width), *GREEDY) == expected
        chunks = [whole.encode(width)]  # and the first lines don't wait for what follows
        stream = SimpleNamespace(read1=lambda most, chunks=chunks: chunks.pop())
        first = next(lines.line_groups(stream))[0].start.decode()
        assert first.removeprefix("\ufeff") == f"{DOG}\r"


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, b"PK\3\4".__add__])
def test_a_packed_file_is_refused(pack, translate):
    code, out, err = translate(pack(f"{DOG}\n".encode()), *GREEDY)
    assert (code, out) == (2, b"") and re.fullmatch("error: .* packed .* unpack it first\n", err)


def test_bytes_that_are_no_text_are_replaced_and_said_once(translate, echo):
    data = b"Hund\nHund \xff\xfe Hund \x80\n\xc3\nHund \xf0\x9f\x98\nHund \xef\xbf\xbd\n"
    code, out, err = translate(data, *GREEDY)
    assert code == 0 and split(out) == ["Hund", "Hund Hund", "", "Hund", "Hund"]
    assert re.findall(r"note: line (\d) is not UTF-8 .* U\+FFFD.*\n", err) == ["2", "3", "4"]
    assert err.count("\n") == 3  # the last line holds U+FFFD itself, which is valid
    assert translate(b"", "Hund \udcff", *GREEDY) == translate(b"Hund \xff", *GREEDY)


def test_an_output_holds_no_line_end(trained, echo):
    """Even if somebody else's tokenizer has pieces that do."""
    loose = replace(trained, tokenizer=SimpleNamespace(decode=lambda ids: "a\nb\r\nc\u2028d\x85"))
    assert command.best_texts(loose, [[5, EOS]], command.TranslateOptions())[0][0] == "a b c d"


# Long input


def test_a_search_keeps_the_order_over_many_groups(translate, german):
    """Groups end where the reading stops, and each is sorted by length: none of it may show."""
    texts = ["" if i % 7 == 3 else german[i % 5] for i in range(600)]
    outputs = split(translate("\n".join(german[:5]).encode(), *GREEDY)[1])
    once = dict(zip(german[:5], outputs, strict=True))
    code, out, _ = translate("\n".join(texts).encode(), *GREEDY)
    assert len(set(once.values())) == 5
    assert code == 0 and split(out) == [once.get(text, "") for text in texts]


def test_memory_does_not_grow_with_the_input():
    """A line of 13 MB and 100,000 more, of which only a few are held at once."""
    chunks = [b"Hund " * 13_000] * 200 + [b"\n" + b"Hund\n" * 10_000] * 10
    stream = SimpleNamespace(read1=lambda most: chunks.pop(0) if chunks else b"")
    tracemalloc.start()
    sizes = Counter(line.size for group in lines.line_groups(stream) for line in group)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sizes == {13_000_000: 1, 4: 100_000, 0: 9} and peak < 4 * 2**20


@pytest.mark.parametrize("unit", ["€".encode(), b" ", b"\xff"])
def test_a_line_of_five_megabytes_costs_what_a_cut_one_does(unit, translate, echo):
    """And a letter at the cut is left out, not replaced: no second note."""
    start = time.perf_counter()
    code, out, err = translate(b"x\n" + unit * (5_000_000 // len(unit)) + b"\ny\n", *GREEDY)
    assert time.perf_counter() - start < 3  # all of it would take a minute for some
    assert (code, out.count(b"\n"), err.count("\n")) == (0, 3, 1)
    assert re.match(r"note: line 2 .*has (5,000,000|4,999,998) bytes \(only the first 65,536", err)


def test_a_long_line_is_cut_and_translated_like_its_beginning(translate):
    code, out, err = translate(b"Hund " * 1000, *GREEDY)
    assert re.fullmatch(r"note: line 1 has \d,\d+ tokens \(only the first 256 .*\)\n", err)
    assert (code, split(out)) == (0, split(translate(b"Hund " * 255, *GREEDY)[1]))


def test_lines_are_the_same_however_a_stream_cuts_its_bytes():
    rng = random.Random(0)
    for i in range(400):
        data = bytes(rng.choices(b"ab\n\r\xff", k=rng.randrange(60)))
        expected = data.removesuffix(b"\n").split(b"\n") if data else []
        if i % 2 and b"\xff" not in data:
            data = data.decode().encode(rng.choice(("utf-16", "utf-32")))
        stream = io.BytesIO(data)
        dripping = SimpleNamespace(read1=lambda _, stream=stream: stream.read(rng.randrange(1, 9)))
        groups = lines.line_groups(dripping)
        assert [line.start for group in groups for line in group] == expected, data


# Scores and draws


def test_scores_stand_behind_a_tab(translate, trained):
    data, beam = f"{DOG}\n\n{CAT}\n".encode(), (*SAMPLE, "--beam", "4")
    plain = split(translate(data, *beam)[1])
    code, out, _ = translate(data, *beam, "--scores", "--alpha", "0.6")
    rows = [line.split("\t") for line in split(out)]
    assert code == 0 and [text for text, _ in rows] == plain and rows[1] == ["", "0.0000"]
    src = torch.tensor([source_ids(DOG, trained.tokenizer)])
    best = beam_search(trained.model, src, None, 60, beam=4)[0][0]
    assert float(rows[0][1]) == pytest.approx(best.score(0.6), abs=2e-3)
    mean = split(translate(data, *beam, "--scores", "--alpha", "1")[1])[0].split("\t")[1]
    assert float(mean) == pytest.approx(best.log_prob / best.length, abs=2e-3)


def test_a_draw_depends_on_its_line_and_number_alone(translate, german):
    draw = (*SAMPLE, "--sample", "--temperature", "1.5", "--seed")
    text = german[0]  # twenty times: more than the first group holds
    whole = split(translate("\n".join([text] * 20).encode(), *draw, "3")[1])
    again = split(translate(f"{text}\n\n{text}\n{text}".encode(), *draw, "3")[1])
    other = split(translate("\n".join([text] * 20).encode(), *draw, "4")[1])
    assert again == [whole[0], "", *whole[2:4]]  # though there are fewer lines
    assert len({*whole}) > 1 and other[:-1] == whole[1:]  # line 0 with seed 4 is line 1 with 3
    assert translate(DOG.encode(), *draw, "9223372036854775807")[0] == 0  # the largest seed


# Real processes


@pytest.fixture
def start():
    """Starts the command as a process of its own; what still runs at the end is killed."""
    processes = []

    def run(*argv: str, **streams) -> subprocess.Popen:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | streams
        script = [sys.executable, "-m", "scripts.translate", *argv]
        # A shell's background jobs ignore Ctrl-C, and this test may run in one.
        restore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        processes.append(subprocess.Popen(script, cwd=ROOT, bufsize=0, **pipes, **restore))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def read_lines_of(process: subprocess.Popen, count: int) -> bytes:
    """What the process prints until it has printed `count` lines."""
    out, deadline = b"", time.monotonic() + LONGEST
    while out.count(b"\n") < count:
        seconds = deadline - time.monotonic()
        assert seconds > 0 and select.select([process.stdout], [], [], seconds)[0], f"only {out!r}"
        piece = os.read(process.stdout.fileno(), 65536)
        assert piece, process.stderr.read()
        out += piece
    return out


def test_a_slow_pipe_gets_each_answer_at_once_and_ctrl_c_ends_it(start):
    process = start(*GREEDY)
    for question in (f"{DOG}\n", "\n", f"{CAT}\n{DOG}\n", DOG[:8]):
        process.stdin.write(question.encode())  # and the pipe stays open
        answers = read_lines_of(process, question.count("\n")) if "\n" in question else b""
        assert answers.count(b"\n") == question.count("\n")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LONGEST)
    assert (process.returncode, out, err) == (130, b"", b"interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to write to")
def test_a_full_disk_is_said_in_one_line(start):
    with open("/dev/full", "wb") as full:
        process = start(DOG, *GREEDY, stdout=full)
        _, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 2 and re.fullmatch(rb"error: .*No space left.*\n", err)


def test_make_hands_over_texts_and_files_untouched(tmp_path):
    """A stand-in for Python says how it was called and what it was given."""
    name, python = 'it\'s $(touch here) "quoted" $HOME.de', tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit\nprintf "<%s>" "$@"\n[ $# != 2 ] || cat\n')
    python.chmod(0o755)
    make = ["make", "--no-print-directory", "translate", f"VENV={tmp_path}"]
    for words, called in (
        ([f"TEXT={name}", "FILE=", "MODEL="], f"{name}\n"),
        ([f"FILE={name}", f"MODEL={name}"], f"<--model={name}><--input={name}>"),
    ):
        done = subprocess.run([*make, *words], cwd=ROOT, capture_output=True, timeout=LONGEST)
        assert done.stdout.decode() == f"<-m><scripts.translate>{called}", done.stderr
    assert not (ROOT / "here").exists()
