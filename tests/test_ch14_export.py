"""Chapter 14's exports: ONNX Runtime and CTranslate2 find what our own searches find."""

import json
import os
import sys
import warnings
from types import SimpleNamespace

import ctranslate2
import numpy as np
import pytest
import torch
from bruteforce import forced_log_probs

from scripts import ROOT
from scripts.ch01_attention import padding_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch06_training import BOS, EOS, PAD, UNK, greedy_decode
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.ch08_decoding import beam_search, dropout_off, hypothesis
from scripts.ch14_leaving_home import (
    FrozenPosition,
    OnnxDecoderStep,
    OnnxEncoder,
    encoder_graph,
    export_ctranslate2,
    export_onnx,
    host_greedy,
    onnx_greedy,
    step_graph,
)
from scripts.core.checkpoints import weights
from scripts.core.models import Trained, load_model
from scripts.core.settings import TrainConfig, build_model
from scripts.corpora.load import load_corpus
from scripts.export import main
from scripts.fast.export import graph_config, graph_function, step_example
from scripts.studies.race_decoding import CTranslate2

SAMPLE = ROOT / "models" / "sample-de-en"
SPLITS = {"sample-de-en": "test", "multi30k-de-en": "test_2016_flickr"}
AT_HAND = [name for name in SPLITS if "sample" in name or os.environ.get("MULTI30K_DIR")]
LIMIT, ALPHA = 60, 0.6


def ctranslate2_search(folder, pieces, max_len, beam=1, alpha=0.6, **how):
    """The best translation of each source by the files of `export_ctranslate2`, in pieces."""
    translator = ctranslate2.Translator(str(folder), compute_type="float32")
    ours = {"beam_size": beam, "length_penalty": alpha, "min_decoding_length": 0}
    found = translator.translate_batch(pieces, max_decoding_length=max_len, **ours | how)
    return [result.hypotheses[0] for result in found]


def cut(ids: list[int]) -> list[int]:
    """What comes before eos."""
    return ids[: ids.index(EOS)] if EOS in ids else ids


@pytest.fixture(scope="module", params=AT_HAND)
def shipped(request, tmp_path_factory):
    """A shipped model, its two exports, and 200 test sentences, the shortest first."""
    trained = load_model(ROOT / "models" / request.param)
    folder = tmp_path_factory.mktemp(request.param)
    export_onnx(trained, folder / "onnx")
    export_ctranslate2(trained, folder / "ctranslate2")
    pairs = load_corpus(trained.config.corpus)[SPLITS[request.param]][:200]
    tokenizer = trained.tokenizer
    lines = sorted((german for german, _ in pairs), key=lambda line: len(tokenizer.encode(line)))
    rows = [source_ids(line, tokenizer) for line in lines]
    return SimpleNamespace(trained=trained, folder=folder, lines=lines, rows=rows)


@pytest.fixture(scope="module")
def greedy(shipped) -> list[list[int]]:
    """Our own greedy tokens for those sentences."""
    found = []
    for start in range(0, 200, 50):
        src = pad_rows(shipped.rows[start : start + 50])
        ids = greedy_decode(shipped.trained.model, src, padding_mask(src), LIMIT)
        found += [cut(row) for row in ids.tolist()]
    return found


def ctranslate2_ids(shipped, lines, **how) -> list[list[int]]:
    tokenizer = shipped.trained.tokenizer
    pieces = [tokenizer.pieces(line) for line in lines]
    found = ctranslate2_search(shipped.folder / "ctranslate2", pieces, LIMIT, **how)
    return [[tokenizer.processor.piece_to_id(piece) for piece in row] for row in found]


def test_onnx_finds_our_greedy_tokens(shipped, greedy):
    found = []
    for start in range(0, 200, 50):  # padded batches: the mask matters
        rows = shipped.rows[start : start + 50]
        found += onnx_greedy(shipped.folder / "onnx", rows, LIMIT)
    assert len(found) == 200 and found == greedy
    assert onnx_greedy(shipped.folder / "onnx", shipped.rows[:1], 2) == [greedy[0][:2]]


def test_ctranslate2_finds_our_greedy_tokens(shipped, greedy):
    assert ctranslate2_ids(shipped, shipped.lines) == greedy


def test_a_long_source_is_cut_as_translate_cuts_it(shipped, greedy):
    trained, text = shipped.trained, " ".join(shipped.lines[:80])
    row, short = [*trained.tokenizer.encode(text), EOS], shipped.rows[0]
    assert len(row) > 420
    src = torch.tensor([source_ids(text, trained.tokenizer)])  # (1, 256)
    wanted = cut(greedy_decode(trained.model, src, None, LIMIT)[0].tolist())
    assert onnx_greedy(shipped.folder / "onnx", [row, short], LIMIT) == [wanted, greedy[0]]
    found = CTranslate2(trained, shipped.folder / "ctranslate2", "float32", 1)([row], 1)[0]
    assert found[:LIMIT] == wanted


def test_a_text_of_the_host_ends_at_the_graphs_last_position():
    config = graph_config(load_model(SAMPLE).model)
    one, logits = np.zeros((1, 2, 1, 1, 1, 1)), np.eye(1, 9, k=5)  # always token 5

    def step(position, **_):
        assert position < MAX_LEN
        return [logits, one]

    assert host_greedy(lambda **_: [one], step, config, [[4, EOS]], 300) == [[5] * MAX_LEN]


def test_ctranslate2_finds_our_beam_and_never_a_better_one(shipped):
    model, same, ours = shipped.trained.model, 0, []
    rows, lines = shipped.rows[1::4], shipped.lines[1::4]
    theirs = ctranslate2_ids(shipped, lines, beam=4, alpha=ALPHA)
    for start in range(0, 50, 25):
        src = pad_rows(rows[start : start + 25])
        ours += beam_search(model, src, padding_mask(src), LIMIT, 4, ALPHA)
    for row, found, (best, *_) in zip(rows, theirs, ours, strict=True):
        same += list(best.ids) == found
        if list(best.ids) != found:
            ids = [*found, EOS]
            log_prob = forced_log_probs(model, torch.tensor([row]), torch.tensor([ids])).item()
            assert hypothesis(ids, log_prob).score(ALPHA) <= best.score(ALPHA) + 1e-5
    assert same >= 0.98 * len(rows)


def test_ctranslate2_scores_as_we_do(shipped):
    """log-probability / length^α, with eos counted."""
    model, tokenizer, row = shipped.trained.model, shipped.trained.tokenizer, shipped.rows[100]
    best = beam_search(model, torch.tensor([row]), None, LIMIT, 4, ALPHA)[0][0]
    folder = str(shipped.folder / "ctranslate2")
    (found,) = ctranslate2.Translator(folder, compute_type="float32").translate_batch(
        [tokenizer.pieces(shipped.lines[100])],
        beam_size=4,
        length_penalty=ALPHA,
        min_decoding_length=0,  # its default, 1, gives the chance of an early eos to others
        return_scores=True,
    )
    assert found.scores[0] == pytest.approx(best.score(ALPHA), rel=1e-4)
    without_eos = best.log_prob / (best.length - 1) ** ALPHA
    assert found.scores[0] != pytest.approx(without_eos, rel=1e-3)


def test_weights_are_stored_once_and_the_operations_are_plain(shipped):
    import onnx

    folder, model = shipped.folder, shipped.trained.model
    count = sum(weight.numel() for weight in weights(model).values())
    for file in ("onnx/weights.bin", "ctranslate2/model.bin"):
        size = (folder / file).stat().st_size  # float32; plus positions, or minus the short biases
        assert 0.98 * 4 * count < size < 4 * count + 600_000
    assert sum(path.stat().st_size for path in (folder / "onnx").iterdir()) < 35e6
    for name in ("encoder.onnx", "decoder_step.onnx"):
        onnx.checker.check_model(str(folder / "onnx" / name))
        graph = onnx.load(str(folder / "onnx" / name), load_external_data=False)
        assert [(part.domain, part.version) for part in graph.opset_import] == [("", 17)]
        assert not graph.functions and {node.domain for node in graph.graph.node} == {""}
    config = json.loads((folder / "onnx" / "config.json").read_text("utf-8"))
    assert [config[name] for name in ("pad", "unk", "bos", "eos")] == [PAD, UNK, BOS, EOS]
    table = model.generator.proj.weight
    assert config["vocab"] == len(table) and config["heads"] * config["d_k"] == table.size(1)


@pytest.fixture(
    scope="module",
    params=[(False, "all"), (False, "none"), (True, "decoder"), (True, "none")],
    ids=lambda how: f"{'pre' if how[0] else 'post'}-norm, tie {how[1]}",
)
def untrained(request) -> Trained:
    """A small model, every weight random, biases and norms too, so that a wrong name shows."""
    norm_first, tie = request.param
    sizes = {"layers": 2, "d_model": 32, "d_ff": 48, "heads": 4, "dropout": 0.3}
    config = TrainConfig(corpus="sample", norm_first=norm_first, tie=tie, **sizes)
    tokenizer = load_model(SAMPLE).tokenizer
    torch.manual_seed(7)
    model = build_model(config, len(tokenizer))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return Trained(model, tokenizer, config)  # in train mode: an export must cope with that


LINES = ["Ein Hund schläft im Garten.", "Zwei Kinder", "Der Pirat kauft einen roten Hut. 你好"]


def test_other_architectures_leave_by_onnx(untrained, tmp_path):
    state = torch.get_rng_state()
    export_onnx(untrained, tmp_path)
    assert untrained.model.training and torch.equal(state, torch.get_rng_state())
    rows = [source_ids(line, untrained.tokenizer) for line in LINES]
    src = pad_rows(rows)
    ours = greedy_decode(untrained.model, src, padding_mask(src), 20).tolist()
    assert onnx_greedy(tmp_path, rows, 20) == [cut(row) for row in ours]


def test_other_architectures_leave_by_ctranslate2(untrained, tmp_path):
    """Each reference token's log-probability, given those before it."""
    export_ctranslate2(untrained, tmp_path)
    tokenizer = untrained.tokenizer
    translator = ctranslate2.Translator(str(tmp_path), compute_type="float32")
    target = "A dog sleeps in the garden."
    found = translator.score_batch(
        [tokenizer.pieces(line) for line in LINES], [tokenizer.pieces(target)] * len(LINES)
    )
    ids = torch.tensor([[*tokenizer.encode(target), EOS]])
    for line, scored in zip(LINES, found, strict=True):
        row = torch.tensor([source_ids(line, tokenizer)])
        ours = forced_log_probs(untrained.model, row, ids).item()
        assert sum(scored.log_probs) == pytest.approx(ours, rel=1e-5)


def graph_gap(model, graph, R: int, S: int, T: int) -> float:
    """The largest difference between a step's graph and `OnnxDecoderStep` at these sizes."""
    inputs = step_example(model, R, S, T)
    with torch.no_grad(), dropout_off(model):
        right = OnnxDecoderStep(model)(**inputs)
    found = graph_function(graph.SerializeToString())(**{n: x.numpy() for n, x in inputs.items()})
    pairs = zip(found, right, strict=True)
    return max((torch.from_numpy(one) - other).abs().max().item() for one, other in pairs)


def test_graphs_take_any_size(untrained):
    model = untrained.model
    step, encoder = step_graph(model), graph_function(encoder_graph(model).SerializeToString())
    for R, S, T in ((1, 1, 0), (1, 3, 1), (7, 1, 4), (2, 40, 200), (3, 5, 255)):
        assert graph_gap(model, step, R, S, T) < 1e-4
        src = torch.randint(4, 1000, (R, S), generator=torch.Generator().manual_seed(S))
        mask = torch.arange(S).expand(R, 1, S) < torch.arange(1, R + 1).view(R, 1, 1)  # (R, 1, S)
        with torch.no_grad(), dropout_off(model):
            wanted = OnnxEncoder(model)(src, mask)
        (found,) = encoder(src=src.numpy(), src_mask=mask.numpy())
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-4)


def test_a_frozen_position_is_found_out(untrained):
    with pytest.warns(torch.jit.TracerWarning, match="to a Python integer"):
        frozen = step_graph(untrained.model, FrozenPosition)
    assert graph_gap(untrained.model, frozen, 2, 4, T=2) < 1e-4  # as recorded
    assert graph_gap(untrained.model, frozen, 2, 4, T=3) > 1e-2


def test_only_the_warning_of_an_integer_is_heard(monkeypatch):
    """The chapter names the others: about √d_k, and about a check of lengths."""
    model = load_model(SAMPLE).model
    with warnings.catch_warnings(record=True) as heard:
        step_graph(model)
        encoder_graph(model)
    assert not heard
    loud = warnings.simplefilter
    monkeypatch.setattr(warnings, "simplefilter", lambda _: loud("always"))
    with warnings.catch_warnings(record=True) as heard:
        step_graph(model)
        encoder_graph(model)
    said = [str(one.message) for one in heard if one.category is torch.jit.TracerWarning]
    kinds = {text.split(" might")[0].removeprefix("Converting a tensor to a ") for text in said}
    assert kinds == {"Python float", "Python boolean"}


def test_the_command_exports(tmp_path, capsys):
    argv = [str(tmp_path / "new"), "--model", str(SAMPLE)]
    assert main(argv) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in out] == [
        str(tmp_path / "new" / name) for name in ("onnx", "ctranslate2")
    ]
    trained = load_model(SAMPLE)
    row = source_ids(LINES[0], trained.tokenizer)
    wanted = cut(greedy_decode(trained.model, torch.tensor([row]), None, LIMIT)[0].tolist())
    assert onnx_greedy(tmp_path / "new" / "onnx", [row], LIMIT) == [wanted]
    pieces = [trained.tokenizer.pieces(LINES[0])]
    (found,) = ctranslate2_search(tmp_path / "new" / "ctranslate2", pieces, LIMIT)
    assert trained.tokenizer.processor.decode(found) == trained.tokenizer.decode(wanted)
    for name in ("onnx", "ctranslate2"):
        copied = (tmp_path / "new" / name / "tokenizer.model").read_bytes()
        assert copied == (SAMPLE / "tokenizer.model").read_bytes()
    assert main(argv) == 0  # again, over the existing files


@pytest.mark.parametrize("name", ["onnx", "ctranslate2"])
def test_one_format_is_written_alone(name, tmp_path):
    assert main([str(tmp_path), "--model", str(SAMPLE), "--format", name]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("package", ["onnx", "ctranslate2"])
def test_a_missing_package_gets_one_line(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main([str(tmp_path), "--model", str(SAMPLE)]) == 2
    err = capsys.readouterr().err
    assert err == f"error: {package} is not installed: pip install -e '.[export]'\n"
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ValueError, match="onnxruntime is not installed"):
        graph_function(b"")


def test_bad_exports_get_one_line(tmp_path, capsys):
    taken = tmp_path / "file"
    taken.touch()
    (tmp_path / "runs/onnx").mkdir(parents=True)
    (tmp_path / "runs/onnx/model.safetensors").touch()
    for argv, says in (
        ([], "folder"),
        ([str(taken), "--model", str(SAMPLE)], f"can't write to {taken / 'onnx'}"),
        ([str(tmp_path), "--model", str(tmp_path)], "no config.json"),
        ([str(tmp_path), "--format", "pickle"], "format"),
        ([str(tmp_path / "runs")], "onnx holds a model: choose another folder"),
        ([str(tmp_path), "--beam", "4"], "unrecognized"),
    ):
        assert main([*argv]) == 2
        done = capsys.readouterr()
        assert done.out == "" and done.err.startswith("error: ") and done.err.count("\n") == 1
        assert says in done.err
