"""The command `translate`: a line out for each line in, whatever it holds, and a clean exit."""

import bz2
import gzip
import io
import itertools
import lzma
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import ROOT
from scripts import translate as command
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch06_training import EOS
from scripts.ch07_multi30k import source_ids
from scripts.ch08_decoding import Hypothesis, beam_search
from scripts.core.models import STUDIED, Trained, load_model
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
    monkeypatch.setattr(command, "load_model", lambda folder, device: trained)

    def run(data: bytes, *argv: str) -> tuple[int, bytes, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        code = command.main(argv)
        out, err = capsysbinary.readouterr()
        return code, out, err.decode()

    return run


@pytest.fixture
def echo(monkeypatch):
    """Replaces our search by one that returns what it was asked, at once."""

    def search(trained, rows, options):
        return [[Hypothesis(tuple(row[:-1]), -1.0, len(row))] if row[:-1] else [] for row in rows]

    monkeypatch.setattr(command, "decode_hypotheses", search)


def count_lines(data: bytes) -> int:
    """The number of lines: only a newline ends one, but a last line without it counts."""
    return data.count(b"\n") + (not data.endswith(b"\n") and data != b"")


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
    lines = split(out)
    assert lines[1:3] == ["", ""] and lines[0] and lines[3] and lines[0] != lines[3]
    assert translate(b"", *GREEDY, "--input", str(path)) == (0, out, "")
    assert translate(b"", DOG, "", " \t", CAT, *GREEDY) == (0, out, "")
    assert translate(b"", data.decode(), *GREEDY) == (0, out, "")
    assert translate(data + b"\n", *GREEDY) == (0, out, "")  # its last newline ends the last line
    assert translate(b"", *GREEDY) == (0, b"", "")


@pytest.mark.parametrize(
    "text", ["null", "true", "1.5", "[1, 2]", "a: b", "{a: b}", "@x", "\udcff"]
)
def test_a_text_is_a_text_whatever_it_looks_like(text, translate, echo):
    """The parser of the options reads YAML; texts must not be read that way."""
    code, out, _ = translate(b"", text, *GREEDY)
    _, piped, _ = translate(text.encode("utf-8", "surrogateescape"), *GREEDY)
    assert (code, out) == (0, piped) and out.count(b"\n") == 1


def test_only_a_newline_ends_a_line(translate, echo):
    for end in ("\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"):
        code, out, err = translate(f"Hund{end}Hund\n{end}\n{end}Hund{end}".encode(), *GREEDY)
        lines = split(out)
        assert (code, err, len(lines)) == (0, "", 3) and lines[1] == ""
        assert lines[0].count("Hund") == 2 and lines[2] == "Hund", repr(end)


def test_windows_line_ends_change_nothing(translate):
    ends = (f"{DOG}\n\n{CAT}\n".replace("\n", end).encode() for end in ("\n", "\r\n"))
    assert len({translate(data, *GREEDY) for data in ends}) == 1


@pytest.mark.parametrize(
    "text",
    [
        "\0",
        f"{DOG}\0",
        "😀🎉 Hund 👩‍👩‍👧",
        "\u202eשלום עולם\u202c",
        "كلب ينام في الحديقة",
        "漢字",
        "\x01\x02\x1b[31m",
        "e\u0301" * 40,
        "¿" * 300,
        "|||",
        "▁",
        "</s>",
        "\ufeff",
    ],
)
def test_any_text_gives_one_line(text, translate):
    code, out, err = translate(f"{text}\n{DOG}\n".encode(), *GREEDY)
    alone = translate(f"{DOG}\n".encode(), *GREEDY)[1]
    assert (code, out.count(b"\n")) == (0, 2) and out.endswith(b"\n" + alone)
    assert re.fullmatch("(note: line 1 has letters that the model has never met: .*\n)?", err)


def test_letters_that_the_model_has_never_met_are_named(translate):
    data = f"{DOG}\n☃☃ {DOG} 日本\u2060\n\ufeff{CAT}\u200b\n".encode()
    code, out, err = translate(data, *GREEDY)
    assert err == "note: line 2 has letters that the model has never met: ☃ 日 本\n"
    assert (code, split(out)[2]) == (0, split(translate(CAT.encode(), *GREEDY)[1])[0])


@pytest.mark.parametrize("width", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_another_encoding_changes_nothing(width, translate, echo, tmp_path):
    text = f"{DOG}\r\n\n„Hund“ – Hund\u0a0aHund 😀\n{CAT}"
    wanted = translate(text.encode(), *GREEDY)
    assert wanted[1].count(b"\n") == 4
    for whole in (text, f"\ufeff{text}"):  # and with a mark
        path = tmp_path / "captions.de"
        path.write_bytes(whole.encode(width))
        assert translate(b"", *GREEDY, "--input", str(path)) == wanted
        assert translate(whole.encode(width), *GREEDY) == wanted
        chunks = [whole.encode(width)]  # and the first lines don't wait for what follows
        stream = SimpleNamespace(read1=lambda most, chunks=chunks: chunks.pop())
        first = next(lines.line_groups(stream))[0].start.decode()
        assert first.removeprefix("\ufeff") == f"{DOG}\r"


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, b"PK\3\4".__add__])
def test_a_packed_file_is_refused(pack, translate, echo):
    code, out, err = translate(pack(f"{DOG}\n".encode()), *GREEDY)
    assert (code, out) == (2, b"") and re.fullmatch("error: .* packed .* unpack it first\n", err)


def test_bytes_that_are_no_text_are_replaced_and_said_once(translate, echo):
    data = b"Hund\nHund \xff\xfe Hund \x80\n\xc3\nHund \xf0\x9f\x98\nHund \xef\xbf\xbd\n"
    code, out, err = translate(data, *GREEDY)
    assert code == 0 and split(out) == ["Hund", "Hund Hund", "", "Hund", "Hund"]
    assert re.findall(r"note: line (\d) is not UTF-8 .* U\+FFFD.*\n", err) == ["2", "3", "4"]
    assert err.count("\n") == 3  # the last line holds U+FFFD itself, which is valid


def test_random_bytes_keep_their_number_of_lines(translate, echo):
    rng = random.Random(0)
    kinds = [b"\n", b"\r\n", b"\0", b"\xff", b" ", b"Hund", "ä\u2028😀".encode(), b"\xc3", b"\x85"]
    for _ in range(150):
        parts = (
            rng.choice((rng.choice(kinds), rng.randbytes(3))) for _ in range(rng.randrange(80))
        )
        data = b"".join(parts)
        code, out, err = translate(data, *GREEDY)
        assert (code, out.count(b"\n")) == (0, count_lines(data)), data
        assert len(split(out)) == len(out.decode().splitlines()), data  # no other line end either
        assert re.fullmatch(r"(note: line \d+ (is not UTF-8|has letters) .*\n)*", err), data


def test_random_bytes_through_the_model(translate):
    data = random.Random(1).randbytes(1200).replace(b"a", b"\n")
    data += b"\n".join(random.Random(2).randbytes(9) for _ in range(40))
    code, out, _ = translate(data, *GREEDY)
    assert (code, out.count(b"\n")) == (0, count_lines(data))


def test_an_output_holds_no_line_end(trained, echo):
    class Loose:
        """A tokenizer that somebody else might train: its pieces hold line ends."""

        def decode(self, ids):
            return "a\nb\r\nc\u2028d\x85"

    loose = replace(trained, tokenizer=Loose())
    assert command.best_texts(loose, [[5, EOS]], command.TranslateOptions())[0][0] == "a b c d"


# Long input


def test_a_hundred_thousand_lines_come_out_in_order(translate, echo, german):
    lines = [text if i % 5 == 0 else "" for i, text in zip(range(100_000), itertools.cycle(german))]
    code, out, err = translate("\n".join(lines).encode() + b"\n", *GREEDY)
    assert (code, err) == (0, "") and split(out) == lines


def test_a_real_search_keeps_the_order_over_many_groups(translate, german):
    """Groups end where the reading stops, and each is sorted by length: none of it may show."""
    texts = ["" if i % 7 == 3 else german[i % 5] for i in range(600)]
    outputs = split(translate("\n".join(german[:5]).encode(), *GREEDY)[1])
    once = dict(zip(german[:5], outputs, strict=True))
    code, out, _ = translate("\n".join(texts).encode(), *GREEDY)
    assert len(set(once.values())) == 5
    assert code == 0 and split(out) == [once.get(text, "") for text in texts]


MEASURE = """
import sys
from scripts import translate
from scripts.studies.race_training import peak_bytes
from scripts.ch08_decoding import Hypothesis

def echo(trained, rows, options):
    return [[Hypothesis(tuple(row[:-1]), -1.0, len(row))] if row[:-1] else [] for row in rows]

translate.decode_hypotheses = echo
small, large, model = sys.argv[1:]
assert translate.main(["--input", small, "--model", model, "--device", "cpu"]) == 0
before = peak_bytes()
assert translate.main(["--input", large, "--model", model, "--device", "cpu"]) == 0
print((peak_bytes() - before) / 2**20, file=sys.stderr)
"""


def test_memory_does_not_grow_with_the_input(tmp_path, german):
    """A line of 100 MB and 200,000 more: together 110 MB, of which only a few are held at once."""
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"Hund " * 20_000 + b"\n" + b"Hund\n" * 2000)
    with large.open("wb") as file:
        for _ in range(100):
            file.write(b"Hund " * 200_000)
        file.write(b"\n" + f"{german[0]}\n\n\n\n".encode() * 50_000)
    argv = [sys.executable, "-c", MEASURE, str(small), str(large), SAMPLE[1]]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=LONGEST)
    assert done.returncode == 0, done.stderr
    *_, note, grown = done.stderr.decode().splitlines()
    assert "line 1 has 100,000,000 bytes" in note
    assert done.stdout.count(b"\n") == 2001 + 200_001
    assert float(grown) < 30


@pytest.mark.parametrize("unit", ["Hund ", "Hund", "ä", "😀", " ", "\0", "\xff"])
def test_a_line_of_five_megabytes_costs_what_a_cut_one_does(unit, translate, echo):
    raw = unit.encode("latin-1" if unit == "\xff" else "utf-8")
    started = time.perf_counter()
    code, out, err = translate(b"x\n" + raw * (5_000_000 // len(raw)) + b"\ny\n", *GREEDY)
    seconds = time.perf_counter() - started
    assert (code, out.count(b"\n")) == (0, 3)
    assert re.match(r"note: line 2 .*has 5,000,000 bytes \(only the first 65,536", err)
    assert err.count("\n") == 1 and seconds < 3  # all of it would take a minute for some


def test_a_long_line_is_cut_and_translated_like_its_beginning(translate, trained):
    def timed(data: bytes) -> tuple[float, tuple[int, bytes, str]]:
        started = time.perf_counter()
        done = translate(data, *GREEDY)
        return time.perf_counter() - started, done

    words = MAX_LEN - 1
    while len(trained.tokenizer.encode("Hund " * words)) >= MAX_LEN:
        words -= 1
    normal, (_, fits, silent) = timed(b"Hund " * words + b"\n")
    assert silent == "" and len(trained.tokenizer.encode("Hund " * words)) >= MAX_LEN - 2
    longer, (code, out, err) = timed(b"\n" + b"Hund " * 1_000_000 + b"\n")
    assert code == 0 and out.count(b"\n") == 2 and out.startswith(b"\n")
    assert re.fullmatch(
        r"note: line 2 has 5,000,000 bytes \(.*\) and has [\d,]+ tokens \(.* 256 .*\)\n", err
    )
    assert longer < 3 * normal + 2
    _, _, err = translate(b"Hund " * 1000, *GREEDY)
    assert re.fullmatch(
        r"note: line 1 has \d,\d+ tokens \(only the first 256 are translated\)\n", err
    )


def test_a_letter_at_the_cut_is_left_out_not_replaced(trained, capsys):
    data = b"x" + "ä".encode() * lines.LINE_BYTES  # the limit falls into the middle of a letter
    ((line,),) = lines.line_groups(io.BytesIO(data + b"\n"))
    lines.encode_line(trained, line, 1)
    assert len(line.start) == lines.LINE_BYTES and line.size == len(data)
    assert "UTF-8" not in capsys.readouterr().err


def test_lines_are_the_same_however_they_arrive():
    """However a stream cuts its bytes into pieces."""

    class Dripping:
        def __init__(self, data: bytes, rng: random.Random):
            self.data, self.rng = data, rng

        def read1(self, most: int) -> bytes:
            size = min(most, self.rng.randrange(1, 9))
            piece, self.data = self.data[:size], self.data[size:]
            return piece

    rng = random.Random(0)
    for i in range(400):
        data = bytes(rng.choices(b"ab\n\r\xff", k=rng.randrange(60)))
        expected = data.removesuffix(b"\n").split(b"\n") if data else []
        if i % 2 and b"\xff" not in data:
            data = data.decode().encode(rng.choice(("utf-16", "utf-32")))
        groups = lines.line_groups(Dripping(data, rng))
        assert [line.start for group in groups for line in group] == expected, data


# Scores and draws


def test_scores_stand_behind_a_tab(translate, trained):
    data = f"{DOG}\n\n{CAT}\n".encode()
    how = (*SAMPLE, "--beam", "4")
    plain = split(translate(data, *how)[1])
    code, out, _ = translate(data, *how, "--scores", "--alpha", "0.6")
    rows = [line.split("\t") for line in split(out)]
    assert code == 0 and [text for text, _ in rows] == plain and rows[1] == ["", "0.0000"]
    src = torch.tensor([source_ids(DOG, trained.tokenizer)])
    best = beam_search(trained.model, src, None, 60, beam=4)[0][0]
    assert float(rows[0][1]) == pytest.approx(best.score(0.6), abs=2e-3)
    mean = split(translate(data, *how, "--scores", "--alpha", "1")[1])[0].split("\t")[1]
    assert float(mean) == pytest.approx(best.log_prob / best.length, abs=2e-3)


def test_a_draw_depends_on_its_line_and_number_alone(translate, german):
    how = (*SAMPLE, "--sample", "--temperature", "1.5", "--seed")
    lines = [german[0], german[0], *german[1:20]]
    _, whole, _ = translate("\n".join(lines).encode(), *how, "3")
    _, again, _ = translate("\n".join([lines[0], "", *lines[2:4]]).encode(), *how, "3")
    _, other, _ = translate("\n".join(lines).encode(), *how, "4")
    whole, again, other = split(whole), split(again), split(other)
    assert again == [whole[0], "", *whole[2:4]]  # though there are fewer lines
    assert whole[0] != whole[1]  # the same text, another draw
    assert other[0] == whole[1]  # line 0 with seed 4 is line 1 with seed 3
    assert translate(DOG.encode(), *how, "9223372036854775807")[0] == 0  # the largest seed


def test_narrow_draws_are_greedy(translate, german):
    data = "\n".join(german[:4]).encode()
    greedy = translate(data, *GREEDY)
    for narrow in (("--top_k", "1"), ("--top_p", "1e-9"), ("--temperature", "1e-9")):
        assert translate(data, *SAMPLE, "--sample", *narrow) == greedy
    wide = translate(data, *SAMPLE, "--sample", "--temperature", "5", "--scores")
    assert wide[0] == 0 and all(float(line.split("\t")[1]) < -1 for line in split(wide[1]))


# Mistakes


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["x", "--input", "y"], "either texts or --input"),
        (["--input", "no/such/file"], "can't read 'no/such/file'"),
        (["--input", "."], "can't read '.'"),
        (["--input", ""], "can't read ''"),
        (["x", "--top_p", "0.5"], "add --sample"),
        (["x", "--sample", "--top_p", "0"], "top_p"),
        (["x", "--sample", "--top_p", "1.5"], "top_p"),
        (["x", "--scores", "--volume", "11"], "unrecognized"),
        (["--precision", "int8"], "AVX512-VNNI): use --precision auto"),  # before the first line
    ],
)
def test_a_mistake_gets_one_line(argv, says, translate, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    code, out, err = translate(b"", *SAMPLE, *argv)
    assert (code, out) == (2, b"") and says in err
    assert err.startswith("error: ") and err.count("\n") == 1


# Real processes


@pytest.fixture
def start():
    """Starts the command as a process of its own; what still runs at the end is killed."""
    started = []

    def run(*argv: str, **streams) -> subprocess.Popen:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | streams
        script = (sys.executable, "-m", "scripts.translate")
        # A shell's background jobs ignore Ctrl-C, and this test may run in one.
        restore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
        started.append(subprocess.Popen([*script, *argv], cwd=ROOT, bufsize=0, **pipes, **restore))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def read_lines_of(process: subprocess.Popen, count: int) -> bytes:
    """What the process prints until it has printed `count` lines."""
    out, deadline = b"", time.monotonic() + LONGEST
    while out.count(b"\n") < count:
        left = deadline - time.monotonic()
        assert left > 0 and select.select([process.stdout], [], [], left)[0], f"only {out!r}"
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


def test_ctrl_c_in_the_middle_of_a_file_leaves_what_was_finished(start, tmp_path):
    path = tmp_path / "captions.de"
    path.write_text(f"{DOG}\n{CAT}\n" * 50_000, "utf-8")
    process = start(*GREEDY, "--input", str(path))
    out = read_lines_of(process, 1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=LONGEST)
    lines = split(out + rest)
    assert (process.returncode, err) == (130, b"interrupted\n")
    assert 16 <= len(lines) < 100_000 and len(set(lines[::2])) == len(set(lines[1::2])) == 1


def test_a_reader_that_has_seen_enough_is_no_fault(start, tmp_path):
    path = tmp_path / "captions.de"
    path.write_text(f"{DOG}\n" * 2000, "utf-8")
    process = start(*GREEDY, "--input", str(path))
    assert read_lines_of(process, 1).startswith(b"A ")
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(LONGEST) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to write to")
def test_a_full_disk_is_said_in_one_line(start):
    with open("/dev/full", "wb") as full:
        process = start(DOG, *GREEDY, stdout=full)
        _, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 2 and re.fullmatch(rb"error: .*No space left.*\n", err)


def test_strange_bytes_through_a_real_pipe(start):
    data = b"\xff\n\0\r\n\n" + f"{DOG}\r\n\u2028\n😀 שלום\n".encode() + b"\xc3"
    process = start(*GREEDY)
    out, err = process.communicate(data, timeout=LONGEST)
    assert process.returncode == 0 and out.count(b"\n") == 7 and out.endswith(b"\n")
    assert split(out)[2] == split(out)[4] == "" and b"\r" not in out
    assert err.count(b"\n") == 3 and err.count(b"is not UTF-8") == 2


@pytest.mark.parametrize(
    "name", ["captions.de", 'it\'s $(touch here) "quoted" $HOME.de', "--help", "ä b"]
)
def test_make_hands_over_texts_and_files_untouched(name, tmp_path):
    """A stand-in for Python says how it was called and what it was given."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && exit\nprintf "<%s>" "$@"\nif [ $# = 2 ]; then cat; fi\n'
    )
    python.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k not in ("TEXT", "FILE", "MODEL")}
    how = {"cwd": ROOT, "capture_output": True, "timeout": LONGEST, "env": environment}
    make = ["make", "--no-print-directory", "translate", f"VENV={tmp_path}"]
    called_as = "<-m><scripts.translate>"
    for given, called in (
        ([f"FILE={name}"], f"{called_as}<--input={name}>"),
        ([f"TEXT={name}"], f"{called_as}{name}\n"),
        ([f"FILE={name}", f"MODEL={name}"], f"{called_as}<--model={name}><--input={name}>"),
    ):
        done = subprocess.run([*make, *given], **how)
        assert (done.returncode, done.stdout.decode()) == (0, called), done.stderr
    done = subprocess.run(make, **how)
    assert done.returncode != 0 and b"FILE=path" in done.stdout
    assert not (ROOT / "here").exists()


def test_without_the_best_model_chapter_9s_translates(monkeypatch, tmp_path):
    """The one notebook carries chapter 9's model alone."""
    monkeypatch.setattr(command, "DEFAULT_MODEL", tmp_path / "nowhere")
    found = translating.open_model(translating.ModelOptions(device="cpu")).model.parameters()
    for one, other in zip(found, load_model(STUDIED).model.parameters(), strict=True):
        assert one.equal(other)
