"""Chapter 14: its quotes are true, and its answers."""

import re

import pytest
import torch
from conftest import ROOT

from scripts.book.instruments import scramble
from scripts.ch04_encoder_decoder import make_model
from scripts.ch06_training import EOS
from scripts.ch08_decoding import beam_search
from scripts.ch14_leaving_home import OnnxDecoderStep, OnnxEncoder
from scripts.core.models import load_model
from scripts.corpora.load import load_corpus
from scripts.exercises import ch14 as ours


def test_the_chapter_quotes_the_pages_script():
    """The right-hand column of its table of NumPy and JavaScript."""
    chapter = (ROOT / "scripts/ch14_leaving_home.py").read_text("utf-8")
    table = chapter.split("JavaScript (`docs/living/model.js`) |\n")[1].split("\n#\n")[0]
    quotes = [re.findall("`([^`]{8,})`", line.split(" | ")[-1]) for line in table.split("\n")[1:]]
    script = (ROOT / "docs/living/model.js").read_text("utf-8")
    assert [len(row) for row in quotes] == [1] * 5
    for (quote,) in quotes:
        assert quote in script, quote


def test_the_longest_piece_that_fits_is_another_cut():
    """The chapter's pitfall: a host that has the list of pieces, but not the merges."""
    tokenizer = load_model(ROOT / "models" / "sample-de-en").tokenizer
    known = {tokenizer.processor.id_to_piece(i) for i in range(len(tokenizer))}
    sources = [source for source, _ in load_corpus("sample")["test"][:40]]
    differ = 0
    for source in sources:
        rest, cut = "▁" + source.replace(" ", "▁"), []
        while rest:
            size = next(n for n in range(len(rest), 0, -1) if rest[:n] in known)
            cut.append(rest[:size])
            rest = rest[size:]
        differ += cut != tokenizer.pieces(source)
    assert 0 < differ < len(sources)


@pytest.mark.parametrize("beam", [1, 2, 4])
def test_the_hosts_beam_around_a_graphs_step_is_chapter_8s(beam):
    """Chapter 8's beam reads every prefix again."""
    torch.manual_seed(1)
    model = make_model(30, 30, N=2, d_model=16, d_ff=32, h=2, dropout=0.0).double().eval()
    scramble(model, size=0.7)  # far from fresh, so that earlier tokens matter
    src, length = torch.tensor([[4, 5, 6, 7, 3]]), 8
    with torch.no_grad():
        model.generator.proj.bias[EOS] = -1e9  # no text ends
        cross = OnnxEncoder(model)(src, torch.ones(1, 1, 5, dtype=torch.bool))

    def step(**given):
        tokens, position, past = (torch.tensor(given[n]) for n in ("tokens", "position", "past"))
        source = cross.expand(-1, -1, len(tokens), -1, -1, -1)
        with torch.no_grad():
            found = OnnxDecoderStep(model)(tokens, position, past, source, None)
        return [x.numpy() for x in found]

    right = [list(h.ids) for h in beam_search(model, src, None, length, beam, alpha=0.0)[0]]
    assert ours.host_beam(step, cross[..., :0, :].numpy(), beam, length) == right


def test_what_a_scale_for_each_row_is_worth():
    """The answer to exercise 2's questions, as the chapter gives it."""
    W = load_model(ROOT / "models" / "sample-de-en").model.generator.proj.weight.detach()
    scales = W.abs().amax(dim=1, keepdim=True) / 127
    errors = [W - scale * (W / scale).round() for scale in (scales, scales.max())]
    rows, one = (error.square().mean().sqrt() for error in errors)
    assert 0.55 < rows / one < 0.65
    rows, one = (error.abs().max() for error in errors)
    assert 0.95 < rows / one < 1.05
