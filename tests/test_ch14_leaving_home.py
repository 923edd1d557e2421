"""Chapter 14: ONNX Runtime and CTranslate2 find what our own searches find; its quotes are true."""

import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import ctranslate2
import numpy as np
import onnx
import pytest
import torch
from bruteforce import forced_log_probs

from scripts import ROOT
from scripts.book.instruments import scramble
from scripts.ch01_attention import padding_mask
from scripts.ch06_training import BOS, EOS, greedy_decode
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.ch08_decoding import beam_search, dropout_off, hypothesis
from scripts.ch14_leaving_home import (
    STEP_SIZES,
    OnnxDecoderStep,
    OnnxEncoder,
    export_ctranslate2,
    export_graph,
    export_onnx,
    graph_function,
    host_greedy,
    step_gap,
)
from scripts.core.checkpoints import weights
from scripts.core.models import Trained, load_model
from scripts.core.settings import TrainConfig, build_model
from scripts.corpora.load import load_corpus
from scripts.exercises.ch14 import counting_step, host_beam
from scripts.export import main
from scripts.fast.export import step_example

SAMPLE = ROOT / "models" / "sample-de-en"
LIMIT, ALPHA = 60, 0.6


def cut(ids: list[int]) -> list[int]:
    """What comes before eos."""
    return ids[: ids.index(EOS)] if EOS in ids else ids


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The sample's model, its two exports, and 100 test sentences with our greedy tokens."""
    trained, folder = load_model(SAMPLE), tmp_path_factory.mktemp("exports")
    export_onnx(trained, folder / "onnx")
    export_ctranslate2(trained, folder / "ctranslate2")
    lines = sorted((german for german, _ in load_corpus("sample")["test"][:100]), key=len)
    rows, greedy = [source_ids(line, trained.tokenizer) for line in lines], []
    for start in range(0, 100, 50):
        src = pad_rows(rows[start : start + 50])
        greedy += map(cut, greedy_decode(trained.model, src, padding_mask(src), LIMIT).tolist())
    return SimpleNamespace(trained=trained, folder=folder, lines=lines, rows=rows, greedy=greedy)


def onnx_greedy(folder: Path, rows: list[list[int]], max_len: int) -> list[list[int]]:
    """Greedy decoding of encoded sources by the files of `export_onnx`."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    encoder, step = (graph_function(folder / f"{n}.onnx") for n in ("encoder", "decoder_step"))
    return host_greedy(encoder, step, config, rows, max_len)


def by_ctranslate2(shipped, lines: list[str], **settings) -> list:
    """CTranslate2's answers to these lines, greedy unless `settings` say otherwise."""
    pieces = [shipped.trained.tokenizer.pieces(line) for line in lines]
    translator = ctranslate2.Translator(str(shipped.folder / "ctranslate2"), compute_type="float32")
    settings = {"beam_size": 1, "length_penalty": ALPHA, "min_decoding_length": 0} | settings
    return translator.translate_batch(pieces, max_decoding_length=LIMIT, **settings)


def ids_of(shipped, results: list) -> list[list[int]]:
    to_id = shipped.trained.tokenizer.processor.piece_to_id
    return [[to_id(piece) for piece in result.hypotheses[0]] for result in results]


def test_both_find_our_greedy_tokens(shipped):
    onnx_ids = []
    for start in range(0, 100, 50):  # padded batches: the mask matters
        onnx_ids += onnx_greedy(shipped.folder / "onnx", shipped.rows[start : start + 50], LIMIT)
    assert onnx_ids == shipped.greedy
    assert ids_of(shipped, by_ctranslate2(shipped, shipped.lines)) == shipped.greedy
    assert onnx_greedy(shipped.folder / "onnx", shipped.rows[:1], 2) == [shipped.greedy[0][:2]]


def test_ctranslate2_finds_our_beam_and_scores_as_we_do(shipped):
    """Or a text that is no better; log-probability / length^α, with eos counted."""
    model, rows, lines = shipped.trained.model, shipped.rows[1::4], shipped.lines[1::4]
    results, src = by_ctranslate2(shipped, lines, beam_size=4, return_scores=True), pad_rows(rows)
    bests = [best for best, *_ in beam_search(model, src, padding_mask(src), LIMIT, 4, ALPHA)]
    texts, others = ids_of(shipped, results), 0
    for row, text, best, result in zip(rows, texts, bests, results, strict=True):
        others += text != list(best.ids)
        ids = [*text, EOS]
        log_prob = forced_log_probs(model, torch.tensor([row]), torch.tensor([ids])).item()
        score = hypothesis(ids, log_prob).score(ALPHA)
        assert score <= best.score(ALPHA) + 1e-5
        assert result.scores[0] == pytest.approx(score, rel=1e-4)
    assert others <= 0.02 * len(rows)


def test_weights_are_stored_once_and_the_operations_are_plain(shipped):
    folder, model = shipped.folder, shipped.trained.model
    count = sum(weight.numel() for weight in weights(model).values())
    for file in ("onnx/weights.bin", "ctranslate2/model.bin"):
        size = (folder / file).stat().st_size  # float32; plus positions, or minus the short biases
        assert 0.98 * 4 * count < size < 4 * count + 600_000
    for name in ("encoder.onnx", "decoder_step.onnx"):
        onnx.checker.check_model(str(folder / "onnx" / name))
        graph = onnx.load(str(folder / "onnx" / name), load_external_data=False)
        assert [(part.domain, part.version) for part in graph.opset_import] == [("", 18)]
        assert not graph.functions and {node.domain for node in graph.graph.node} == {""}


@pytest.fixture(
    scope="module",
    params=[(False, "none"), (True, "decoder")],  # the shipped one is pre-norm, all tied
    ids=["post-norm, nothing tied", "pre-norm, decoder tied"],
)
def untrained(request, tmp_path_factory) -> tuple[Trained, Path]:
    """A small model, every weight random, biases and norms too, so that a wrong name shows.

    With its two exports.
    """
    norm_first, tie = request.param
    sizes = {"layers": 2, "d_model": 32, "d_ff": 48, "heads": 4, "dropout": 0.3}
    config = TrainConfig(corpus="sample", norm_first=norm_first, tie=tie, **sizes)
    tokenizer = load_model(SAMPLE).tokenizer
    torch.manual_seed(7)
    model = build_model(config, len(tokenizer))
    scramble(model, size=0.3)
    trained, folder = Trained(model, tokenizer, config), tmp_path_factory.mktemp("untrained")
    state = torch.get_rng_state()
    export_onnx(trained, folder / "onnx")  # in train mode: an export must cope with that
    export_ctranslate2(trained, folder / "ctranslate2")
    assert model.training and torch.equal(state, torch.get_rng_state())
    return trained, folder


LINES = ["Ein Hund schläft im Garten.", "Zwei Kinder", "Der Pirat kauft einen roten Hut. 你好"]


def test_other_architectures_leave_too(untrained):
    """CTranslate2 by each reference token's log-probability, given those before it."""
    trained, folder = untrained
    model, tokenizer = trained.model, trained.tokenizer
    rows = [source_ids(line, tokenizer) for line in LINES]
    src = pad_rows(rows)
    texts = map(cut, greedy_decode(model, src, padding_mask(src), 20).tolist())
    assert onnx_greedy(folder / "onnx", rows, 20) == list(texts)
    translator = ctranslate2.Translator(str(folder / "ctranslate2"), compute_type="float32")
    target, pieces = "A dog sleeps in the garden.", [tokenizer.pieces(line) for line in LINES]
    results = translator.score_batch(pieces, [tokenizer.pieces(target)] * len(LINES))
    ids = torch.tensor([[*tokenizer.encode(target), EOS]])
    for row, scored in zip(rows, results, strict=True):
        log_prob = forced_log_probs(model, torch.tensor([row]), ids).item()
        assert sum(scored.log_probs) == pytest.approx(log_prob, rel=1e-5)


def test_graphs_take_any_size(untrained):
    model, folder = untrained[0].model, untrained[1] / "onnx"
    encoder, step = (graph_function(folder / f"{n}.onnx") for n in ("encoder", "decoder_step"))
    for R, S, T in ((1, 1, 0), (7, 1, 4), (2, 40, 200), (3, 5, 255)):
        assert step_gap(step, model, T, R=R, S=S, T=T) < 1e-4
        src = torch.randint(4, 1000, (R, S), generator=torch.Generator().manual_seed(S))
        mask = torch.arange(S).expand(R, 1, S) < torch.arange(1, R + 1).view(R, 1, 1)  # (R, 1, S)
        with torch.no_grad(), dropout_off(model):
            expected = OnnxEncoder(model)(src, mask)
        (memory,) = encoder(src=src.numpy(), src_mask=mask.numpy())
        torch.testing.assert_close(torch.from_numpy(memory), expected, rtol=1e-4, atol=1e-4)


class CountingStep(OnnxDecoderStep):
    """A step that reads its position off `past`."""

    def forward(self, tokens, past, cross, src_mask):
        position = torch.full((1,), past.size(-2))
        return super().forward(tokens, position, past, cross, src_mask)


def test_a_step_can_read_its_position_off_the_past(untrained):
    model = untrained[0].model
    inputs = step_example(model, R=3, S=5, T=2)
    del inputs["position"]
    sizes = {name: STEP_SIZES[name] for name in inputs}
    exported = export_graph(CountingStep(model), inputs, ["logits", "present"], sizes)
    assert [part.name for part in exported.graph.input] == list(inputs)
    graph = graph_function(exported.SerializeToString())

    def step(position, **inputs):  # `step_gap` gives a position, too
        return graph(**inputs)

    assert all(step_gap(step, model, T, R=2, S=7, T=T) < 1e-4 for T in (0, 1, 2, 5, 255))


def test_the_command_exports(shipped, tmp_path, capsys):
    argv = [str(tmp_path), "--model", str(SAMPLE)]
    assert main([*argv, "--format", "ctranslate2"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["ctranslate2"]
    assert main(argv) == 0  # again, over the existing files
    names = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [str(tmp_path / name) for name in ("ctranslate2", "onnx", "ctranslate2")]
    for path in (path for path in shipped.folder.rglob("*") if path.is_file()):
        assert (tmp_path / path.relative_to(shipped.folder)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("package", ["onnx", "ctranslate2"])
def test_a_missing_package_gets_one_line(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main([str(tmp_path), "--model", str(SAMPLE)]) == 2
    err = capsys.readouterr().err
    assert err == f"error: {package} is not installed: pip install -e '.[export]'\n"
    assert not list(tmp_path.iterdir())


# The chapter's words


def test_the_chapter_quotes_the_pages_scripts():
    """The right-hand column of its table of NumPy and JavaScript."""
    chapter = (ROOT / "scripts/ch14_leaving_home.py").read_text("utf-8")
    table = chapter.split("JavaScript (`model.js`, `decode.js`) |\n")[1].split("\n#\n")[0]
    quotes = [re.findall("`([^`]{8,})`", line.split(" | ")[-1]) for line in table.split("\n")[1:]]
    scripts = [(ROOT / f"docs/living/{name}.js").read_text("utf-8") for name in ("model", "decode")]
    assert len(quotes) == 5 and all(quote in "".join(scripts) for (quote,) in quotes)


def test_the_hosts_wide_beam_finds_what_brute_force_finds():
    nothing = np.zeros((2, 2, 1, 4, 0, 3))

    def log_prob(text):
        past, total = nothing, 0.0
        for t, (before, token) in enumerate(itertools.pairwise((BOS, *text))):
            logits, past = counting_step(np.array([[before]]), np.array([t]), past)
            total += logits[0, token] - np.logaddexp.reduce(logits[0])
        return total

    texts = sorted(itertools.product(range(9), repeat=3), key=log_prob, reverse=True)
    assert host_beam(counting_step, nothing, 81, 3) == list(map(list, texts[:81]))
