# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Chapter 14 · Leaving home
#
# After this chapter you can hand a trained model to programs that know nothing of PyTorch, and check that they write the same tokens.
#
# | | |
# |---|---|
# | In the paper | nothing: it ends with the trained model |
# | Time | 20 minutes to read, 40 with the code; about half a minute to run on a CPU |
# | Before, after | [Chapter 13 · Decoding fast](ch13_decoding_fast.ipynb) · [Chapter 15 · Looking inside](ch15_looking_inside.ipynb) |
#
# *If you read only three cells:* the picture of *Two graphs*, `host_greedy`, the coloured square of the *Case*.
#
# You need chapters 4 to 8, not 11 to 13 (`cached_beam_search` finds what chapter 8's `beam_search` finds, faster).
#
# Shapes: **R** rows of a batch, **S** source length, **T** tokens before this step, **D** `d_model`, **H** heads, **d_k** = D / H, **V** vocabulary, **N** decoder layers.

# %% tags=["bootstrap"]
import os, runpy, subprocess, sys  # noqa: E401, F401, I001 (finds the series)

sys.path[:0] = [f"{sys.path[0]}/..", home := "from-attention-to-translation", f"{home}.zip", ".."]
if not any(map(os.path.exists, [f"{home}.zip", *(f"{place}/scripts/book" for place in sys.path)])):
    sys.exit(f"Put {home}.zip, which `make colab` writes, beside this notebook.")
home = runpy.run_module("scripts.book.at_home")["home"]  # unpacks a zip, installs what is missing

# %%
import copy
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from scripts import ROOT
from scripts.book.exercises import check
from scripts.book.figures.speed import gaps_chart, two_graphs
from scripts.ch01_attention import padding_mask
from scripts.ch03_embeddings_and_positions import MAX_LEN
from scripts.ch04_encoder_decoder import EncoderDecoder, LayerNorm
from scripts.ch06_training import greedy_decode
from scripts.ch07_multi30k import pad_rows, source_ids
from scripts.ch08_decoding import decoder_step, dropout_off, keys_values_of, until_end
from scripts.core.models import Trained, load_model
from scripts.corpora.load import load_corpus
from scripts.fast.export import (
    colleagues_example,
    graph_config,
    graph_function,
    need_packages,
    quiet_exporter,
    save_graphs,
    step_example,
)
from scripts.fast.searching import cached_beam_search

# %% [markdown]
# This chapter needs four more packages. Where one is missing, it ends here, and says what to install:

# %%
need_packages("onnx", "onnxscript", "onnxruntime", "ctranslate2")

# %% [markdown]
# ## What has to leave
#
# > **In short.** A translator is four things: numbers, a list of operations, a search, and a tokenizer. We must settle who brings which.
#
# The *exporter* writes files, from Python. The *host* is the program that loads them and has the text: a page of NumPy below, a program that calls CTranslate2, a web page.
#
# | who brings … | ONNX | CTranslate2 | the series' web page |
# |---|---|---|---|
# | the numbers | the exporter | the exporter, under CTranslate2's names | the exporter, in 16 bits |
# | the operations | the exporter, as a list | CTranslate2 | the exporter, as a list |
# | the search | the host | CTranslate2: a fast beam search | the page, in JavaScript |
# | the tokenizer | the host | the host | the page, in JavaScript |
#
# - **ONNX** (Open Neural Network Exchange) is a file format for lists of operations: multiply these, add those. A *runtime* carries them out.
# - **CTranslate2** knows some Transformers (ours, GPT's, BERT's, Whisper's), and runs nothing else.
#
# We take the small model that comes with the series (N = 2, D = 128) and forty sentences of the sample corpus. Each host must write the tokens of chapter 6's `greedy_decode`.

# %%
trained = load_model(ROOT / "models" / "sample-de-en")
model, tokenizer = trained.model, trained.tokenizer
sources = [source for source, _ in load_corpus("sample")["test"][:40]]
rows = [source_ids(source, tokenizer) for source in sources]
src = pad_rows(rows)  # (40, S)
greedy = greedy_decode(model, src, padding_mask(src), max_len=60)  # (40, length)
ours = [until_end(row)[:-1] for row in greedy.tolist()]  # without </s>
texts = [tokenizer.decode(row) for row in ours]
print(sources[0], "→", texts[0])

# %% [markdown]
# ## Two graphs
#
# > **In short.** The exporter can't follow a Python loop that the data end. So we export one *step*, and the host repeats it. What doesn't change between steps is computed once, by a second graph.
#
# PyTorch's exporter runs a module on tensors without values, and notes each operation. **Predict.** What does it make of chapter 6's `greedy_decode`, whose loop stops when every sentence has its `</s>`?


# %%
class ModelPart(nn.Module):
    """A part of what our translator computes, as a module that can be exported."""

    def __init__(self, model: EncoderDecoder):
        super().__init__()
        self.model = model


class WholeSearch(ModelPart):
    """Source ids (R, S) in, a translation's ids (R, length) out."""

    def forward(self, src: Tensor) -> Tensor:
        return greedy_decode(self.model, src, padding_mask(src), max_len=60)


# %%
try:
    with quiet_exporter(), redirect_stderr(io.StringIO()):  # it would print the whole graph
        torch.export.export(WholeSearch(model), (src,), strict=False)
except Exception as error:
    assert "data-dependent" in str(error)
    print("refused:", *(line.strip() for line in str(error).split("\n") if "ended.all()" in line))

# %% [markdown]
# At this line Python asks whether to go on, and only the data can tell. ONNX itself has loops (`Loop`, `Scan`) and branches (`If`); the exporter can't see Python's.
#
# Between steps the host keeps what chapter 8's `CopiedCache` kept: the keys and values that cross-attention makes of the source, and those that self-attention made of earlier tokens. The encoder's graph gives the first, called `cross`. A step takes the second, `past`, and returns them with its own added, as `present`:
#
# $$ \text{encoder}: (\text{src}, \text{src\_mask}) \mapsto \text{cross} \qquad \text{step}: (\text{tokens}, \text{position}, \text{past}, \text{cross}, \text{src\_mask}) \mapsto (\text{logits}, \text{present}) $$
#
# cross is (N, 2, R, H, S, d_k): for each layer keys, then values, of each row, head and source token. past is (N, 2, R, H, T, d_k). A row is one sentence; for a beam the host repeats each row of cross and src_mask, once for each text.

# %%
two_graphs()

# %% [markdown]
# The two modules call chapter 8's functions.


# %%
class OnnxEncoder(ModelPart):
    """The encoder, and what every decoder layer's cross-attention makes of its memory."""

    def forward(self, src: Tensor, src_mask: Tensor) -> Tensor:
        """src (R, S), src_mask (R, 1, S), to cross (N, 2, R, H, S, d_k)."""
        memory = self.model.encode(src, src_mask)  # (R, S, D)
        layers = self.model.decoder.layers
        return torch.stack([keys_values_of(layer.src_attn, memory) for layer in layers])


# %%
class OnnxDecoderStep(ModelPart):
    """One token further: what the decoder says after `tokens`, given what it kept of those before."""

    def forward(
        self, tokens: Tensor, position: Tensor, past: Tensor, cross: Tensor, src_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """tokens (R, 1), position (1,), past (N, 2, R, H, T, d_k), cross (N, 2, R, H, S, d_k),
        src_mask (R, 1, S); to logits (R, V) and present (N, 2, R, H, T+1, d_k)."""
        x, present = decoder_step(self.model, tokens, position, past, cross, src_mask)
        return self.model.generator(x), present


# %% [markdown]
# ## Exporting
#
# > **In short.** Say which sizes may vary. Every other size, and every number that isn't a tensor, is taken from one example, for ever.
#
# `Dim("R")` is a size that may have any value. The others keep the example's: N, H, d_k and V belong to the model, so that is right. PyTorch finds out by itself that `present` has T + 1 places. Only the encoder insists on `max=MAX_LEN`: chapter 3's table of positions has no more rows.


# %%
ROWS, SOURCE, EARLIER = Dim("R"), Dim("S", max=MAX_LEN), Dim("T")
STEP_SIZES = {  # which dimensions of a step's inputs vary
    "tokens": {0: ROWS},
    "position": None,
    "past": {2: ROWS, 4: EARLIER},
    "cross": {2: ROWS, 4: SOURCE},
    "src_mask": {0: ROWS, 2: SOURCE},
}


def export_graph(
    module: nn.Module, inputs: dict[str, Any], outputs: list[str], sizes: dict[str, Any]
) -> Any:
    """`module` as an ONNX graph (opset 18), made from example `inputs`; the package onnx's ModelProto.

    `sizes` gives for each input the dimensions that may vary, as a `Dim` each.
    Raises ValueError if one of the packages onnx and onnxscript is missing.
    """
    need_packages("onnx", "onnxscript")
    with dropout_off(module), quiet_exporter():
        program = torch.export.export(module, (), inputs, dynamic_shapes=sizes, strict=False)
        exported = torch.onnx.export(program, output_names=outputs, opset_version=18, verbose=False)
    return exported.model_proto


# %%
def encoder_graph(model: EncoderDecoder) -> Any:
    """`OnnxEncoder` as a graph, for any R and S."""
    ones = torch.ones(2, 5, dtype=torch.int64)
    sizes = {"src": {0: ROWS, 1: SOURCE}, "src_mask": {0: ROWS, 2: SOURCE}}
    inputs = {"src": ones, "src_mask": padding_mask(ones)}
    return export_graph(OnnxEncoder(model), inputs, ["cross"], sizes)


def step_graph(model: EncoderDecoder) -> Any:
    """`OnnxDecoderStep` as a graph, for any R, S and T."""
    inputs = step_example(model, R=3, S=5, T=2)
    return export_graph(OnnxDecoderStep(model), inputs, ["logits", "present"], STEP_SIZES)


# %% [markdown]
# ## A host without PyTorch
#
# > **In short.** Two graphs, one file of weights, a tokenizer and a page of NumPy: that is a translator.
#
# Both graphs use the embedding table, the largest tensor of all. So `save_graphs` puts the large tensors of both into one file, `weights.bin`, each once. `graph_config` lists what else a host must know: sizes and special ids.
#
# A host must also do what our tokenizer and `source_ids` do to a text (chapter 7): call `plain_text` before SentencePiece, and cut the ids to `max_len`, `</s>` kept. For a longer source the encoder's graph fails.
#
# `python -m scripts.export FOLDER` writes this export and CTranslate2's, below.


# %%
def export_onnx(trained: Trained, folder: Path) -> None:
    """Write encoder.onnx, decoder_step.onnx, weights.bin, tokenizer.model and config.json.

    Float32, opset 18; the graphs are `OnnxEncoder` and `OnnxDecoderStep`. Files of these names are
    replaced. Raises ValueError if one of the packages onnx and onnxscript is missing.
    """
    model = trained.model
    graphs = {"encoder.onnx": encoder_graph(model), "decoder_step.onnx": step_graph(model)}
    folder.mkdir(parents=True, exist_ok=True)
    save_graphs(folder, graphs)
    trained.tokenizer.save(folder / "tokenizer.model")
    (folder / "config.json").write_text(json.dumps(graph_config(model), indent=1) + "\n", "utf-8")


# %%
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
export_onnx(trained, folder)
print(f"weights.bin: {(folder / 'weights.bin').stat().st_size / 1e6:.1f} MB")

# %% [markdown]
# `graph_function` makes of a file a function of named arrays, by ONNX Runtime.


# %%
Graph = Callable[..., list[np.ndarray]]  # named arrays in, a list of arrays out


def host_greedy(
    encoder: Graph, step: Graph, config: dict[str, int], rows: Sequence[Sequence[int]], max_len: int
) -> list[list[int]]:
    """Greedy decoding of encoded sources by two graphs: each row's ids, without eos.

    Sources and texts are cut to the graphs' positions, `config["max_len"]`; a source keeps its eos.
    """
    pad, eos, limit = config["pad"], config["eos"], config["max_len"]
    rows = [row if len(row) <= limit else [*row[: limit - 1], eos] for row in rows]
    longest, max_len = max(map(len, rows)), min(max_len, limit)
    src = np.array([[*row, *[pad] * (longest - len(row))] for row in rows])  # (R, S)
    src_mask = (src != pad)[:, None]  # (R, 1, S)
    (cross,) = encoder(src=src, src_mask=src_mask)  # (N, 2, R, H, S, d_k)

    past = cross[..., :0, :]  # (N, 2, R, H, 0, d_k): nothing yet
    tokens = np.full((len(rows), 1), config["bos"])  # (R, 1)
    ids = np.empty((len(rows), 0), dtype=np.int64)  # (R, T)
    while ids.shape[1] < max_len and not (ids == eos).any(axis=1).all():
        at = np.array([ids.shape[1]])  # (1,)
        logits, past = step(tokens=tokens, position=at, past=past, cross=cross, src_mask=src_mask)
        tokens = logits.argmax(axis=-1)[:, None]  # (R, 1)
        ids = np.concatenate((ids, tokens), axis=1)
    return [row[: row.index(eos)] if eos in row else row for row in ids.tolist()]


def onnx_greedy(folder: Path, rows: Sequence[Sequence[int]], max_len: int) -> list[list[int]]:
    """Greedy decoding of encoded sources by the files of `export_onnx`: each row's ids, without eos."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    encoder, step = (graph_function(folder / f"{n}.onnx") for n in ("encoder", "decoder_step"))
    return host_greedy(encoder, step, config, rows, max_len)


# %% [markdown]
# **Predict.** The runtime adds in another order than PyTorch, so the logits' last digits differ. In how many of the forty sentences will rounding change a choice?

# %%
assert onnx_greedy(folder, rows, max_len=60) == ours
print("the same tokens in all forty")

# %% [markdown]
# In none: the logits differ in their sixth digit (measured in the *Case*).
#
# ## Case · Fluent, and wrong
#
# > **In short.** An export may succeed, take every shape, and write wrong sentences without a warning. A comparison at *other* values than the example's finds the fault.
#
# **Symptom.** A colleague exports the same model by the same function, with an example of their own:

# %%
example = colleagues_example(model)  # don't look it up yet
theirs = export_graph(OnnxDecoderStep(model), example, ["logits", "present"], STEP_SIZES)
encoder, their_step = map(graph_function, (folder / "encoder.onnx", theirs.SerializeToString()))
spoiled = host_greedy(encoder, their_step, graph_config(model), rows, max_len=60)
same = sum(a == b for a, b in zip(spoiled, ours, strict=True))
print(f"{same} of {len(rows)} sentences are what they should be")
for i in (0, 1, 4):
    print(f"right:  {texts[i]}\ntheirs: {tokenizer.decode(spoiled[i])}")

# %% [markdown]
# These are English phrases. You would look for the fault in the training.
#
# **Suspects.** (a) The weights. (b) An operation. (c) The sizes: R, S or T. (d) The values of an input.
#
# **Instrument.** Give the graph and our module the same random inputs, and compare their outputs (`step_example` draws them for the sizes, and sets the position to T, which `step_gap` overrides). The export's example had R = 3, S = 5, T = 2 and position 2. **Your turn:** which calls of `step_gap` would show which suspect is guilty?


# %%
def step_gap(step: Graph, model: EncoderDecoder, position: int, **sizes: int) -> float:
    """The largest difference between a step's graph and `OnnxDecoderStep`, at sizes R, S and T."""
    inputs = step_example(model, **sizes) | {"position": torch.tensor([position])}
    with torch.no_grad(), dropout_off(model):
        expected = OnnxDecoderStep(model)(**inputs)
    outputs = step(**{name: value.numpy() for name, value in inputs.items()})
    return max(abs(a - b.numpy()).max() for a, b in zip(outputs, expected, strict=True))


# %%
our_step = graph_function(folder / "decoder_step.onnx")
as_exported = {"position": 2, "R": 3, "S": 5, "T": 2}
for change in ({}, {"R": 7}, {"S": 40}, {"T": 4}, {"position": 4}):
    gaps = [step_gap(step, model, **as_exported | change) for step in (their_step, our_step)]
    theirs_is, ours_is = ("equal" if gap < 1e-4 else "different" for gap in gaps)
    print(f"{change or 'as exported'}: their graph {theirs_is}, our graph {ours_is}")

# %% [markdown]
# Our graph passes all five, so the instrument works. As exported theirs is equal, too (to 0.0001), which clears (a). So a test on the export's own example finds nothing. Other sizes are equal, too, with other values: that clears (b) and (c). That leaves (d), the value of an input. With R = 7 all inputs but one have new values, and nothing changed. That one is the position.

# %%
gaps = [[step_gap(their_step, model, p, R=3, S=5, T=T) for p in range(6)] for T in range(6)]
assert all((gaps[T][p] < 1e-4) == (p == 2) for T in range(6) for p in range(6))
assert all(step_gap(our_step, model, p, R=3, S=5, T=T) < 1e-4 for T in range(6) for p in range(6))
gaps_chart(gaps)

# %% [markdown]
# In a translation the position is T (the framed diagonal): the graph is wrong at each token but the third, and there it reads the past that its own wrong steps made. Now look at what it asks for:

# %%
print("their graph's inputs:", *(part.name for part in theirs.graph.input))
right = step_example(model, R=3, S=5, T=2)
print("position in their example:", example["position"], "in ours:", right["position"])

# %% [markdown]
# **Culprit.** Their example has `int(position)`, and no tensor. A Python number becomes a constant in the graph. For √d_k that is right, for a position wrong: every token stands at position 2. ONNX Runtime alone would have refused an input that the graph doesn't have. Our `graph_function` drops it silently: a convenience that hid the fault.
#
# (`int(position)` *inside* the module is refused, as the loop was. `torch.onnx.export(…, dynamo=False)`, the default before PyTorch 2.9, freezes it, with a warning.)
#
# ## CTranslate2: our weights under its names
#
# > **In short.** This program brings its own operations. It wants our weights under its names, and our conventions in its settings.
#
# Its `TransformerSpec` is an empty Transformer with named places. We fill them, as [chapter 4](ch04_encoder_decoder.ipynb) did for `nn.Transformer`. Three things need care:
#
# - It stacks the projections of query, key and value into one matrix (3D, D), and for cross-attention key and value (2D, D).
# - Its own table of positions differs (it starts at 1, has other wavelengths, all sines first), so we give it ours.
# - It multiplies embeddings by √D itself, so it gets `lut.weight` without that factor.


# %%
def fill_linear(spec: Any, *layers: nn.Linear) -> None:
    """Give CTranslate2's linear layer the weights of ours; several are stacked, outputs first."""
    spec.weight = torch.cat([layer.weight for layer in layers])
    spec.bias = torch.cat([layer.bias for layer in layers])


def fill_norm(spec: Any, norm: LayerNorm) -> None:
    """Give CTranslate2's LayerNorm the weights of ours."""
    spec.gamma, spec.beta = norm.weight, norm.bias


# %%
def fill_attention(spec: Any, attention: nn.Module, norm: LayerNorm) -> None:
    """Give CTranslate2's attention the weights of ours: stacks QKV and output, or Q, KV, output."""
    query, key, value = attention.project_query, attention.project_key, attention.project_value
    stacks = [(query, key, value)] if len(spec.linear) == 2 else [(query,), (key, value)]
    for place, stack in zip(spec.linear, [*stacks, (attention.project_output,)], strict=True):
        fill_linear(place, *stack)
    fill_norm(spec.layer_norm, norm)


def fill_stack(spec: Any, table: Any, embed: nn.Sequential, stack: nn.Module) -> None:
    """Give CTranslate2's encoder or decoder, and its table, our table, positions and layers."""
    table.weight, spec.position_encodings.encodings = embed[0].lut.weight, embed[1].pe
    for place, layer in zip(spec.layer, stack.layers, strict=True):
        norms = [sublayer.norm for sublayer in layer.sublayer]
        fill_attention(place.self_attention, layer.self_attn, norms[0])
        if hasattr(layer, "src_attn"):  # a decoder's
            fill_attention(place.attention, layer.src_attn, norms[1])
        fill_linear(place.ffn.linear_0, layer.feed_forward.expand)
        fill_linear(place.ffn.linear_1, layer.feed_forward.contract)
        fill_norm(place.ffn.layer_norm, norms[-1])
    if not isinstance(stack.norm, nn.Identity):  # pre-norm
        fill_norm(spec.layer_norm, stack.norm)


# %%
def export_ctranslate2(trained: Trained, folder: Path) -> None:
    """Write model.bin, config.json, the vocabulary and tokenizer.model for CTranslate2.

    Float32, tied tables once; `ctranslate2.Translator(folder, compute_type="int8")` may round it on
    loading. Its score is ours if its `length_penalty` is our `alpha` and its
    `min_decoding_length` is 0. Files of these names are replaced. Raises ValueError if the package
    ctranslate2 is missing.
    """
    need_packages("ctranslate2")
    from ctranslate2.specs import TransformerSpec

    config, processor = trained.config, trained.tokenizer.processor
    model = copy.deepcopy(trained.model).float().cpu().requires_grad_(False)
    spec = TransformerSpec.from_config(config.layers, config.heads, pre_norm=config.norm_first)
    fill_stack(spec.encoder, spec.encoder.embeddings[0], model.src_embed, model.encoder)
    fill_stack(spec.decoder, spec.decoder.embeddings, model.tgt_embed, model.decoder)
    fill_linear(spec.decoder.projection, model.generator.proj)

    pieces = [processor.id_to_piece(i) for i in range(len(trained.tokenizer))]
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.add_source_eos = True  # its names of <unk>, <s> and </s> are SentencePiece's, too
    spec.config.layer_norm_epsilon = model.encoder.layers[0].sublayer[0].norm.eps

    spec.validate()
    spec.optimize()  # stores equal tensors once: this finds our tied tables
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
    trained.tokenizer.save(folder / "tokenizer.model")


# %% [markdown]
# CTranslate2 reads and writes pieces, not ids. A source goes in without `</s>`, which it adds; neither limit may exceed the model's 256 positions.


# %%
def by_ctranslate2(folder: Path, **settings: Any) -> list[list[int]]:
    """Each source's ids, as CTranslate2 finds them with the export in `folder` and these settings."""
    from ctranslate2 import Translator

    translator = Translator(str(folder), compute_type="float32")
    pieces = [tokenizer.pieces(source) for source in sources]
    lengths = {"max_input_length": MAX_LEN, "max_decoding_length": 60}
    results = translator.translate_batch(pieces, **lengths, **settings)
    to_id = tokenizer.processor.piece_to_id
    return [[to_id(piece) for piece in result.hypotheses[0]] for result in results]


# %%
like_ours = {"beam_size": 4, "length_penalty": 0.6, "min_decoding_length": 0}
export_ctranslate2(trained, ct2_folder := folder / "ctranslate2")
beams = cached_beam_search(model, src, padding_mask(src), max_len=60, beam=4, alpha=0.6)
best = [list(hypotheses[0].ids) for hypotheses in beams]
assert by_ctranslate2(ct2_folder, **like_ours | {"beam_size": 1}) == ours
assert by_ctranslate2(ct2_folder, **like_ours) == best
print("greedy, and a beam with our settings: the same tokens in all sentences")

# %% [markdown]
# Its defaults aren't ours: a beam of 2, α = 1, and at least one token before `</s>`. **Predict.** How many of forty texts does each default change? Can forbidding the *empty* text change any?

# %%
changed = {}  # for each default the pairs of ids that differ
for name, value in {"beam_size": 2, "length_penalty": 1, "min_decoding_length": 1}.items():
    by_default = by_ctranslate2(ct2_folder, **like_ours | {name: value})
    pairs = zip(best, by_default, strict=True)
    changed[name] = [pair for pair in pairs if pair[0] != pair[1]]
    print(f"{name}={value}: texts that change: {len(changed[name])}")
for pair in changed["min_decoding_length"]:
    print("ours:   {}\ntheirs: {}".format(*map(tokenizer.decode, pair)))

# %% [markdown]
# It can: both times the new text has a better score (only the first reads better). The search stops at four finished texts (chapter 8). The empty one is among them, and a better one comes too late.
#
# ### In 8 bits
#
# CTranslate2 can round the weights of embeddings and linear layers to 8 bits on loading, each row of a matrix with a scale of its own:
#
# $$ W_{ij} \approx s_i\, q_{ij}, \qquad s_i = \frac{\max_j |W_{ij}|}{127}, \qquad q_{ij} \in \{-127, \dots, 127\} $$
#
# No weight moves by more than $s_i / 2$. What goes into a linear layer is rounded, too. Of 1,000 captions about one in twenty comes out differently (chapter 13 has the record).
#
# ## In the browser
#
# > **In short.** ONNX Runtime also runs in browsers. With two graphs and a loop in JavaScript, a model becomes a web page, and no sentence leaves the reader's machine.
#
# The series has such a page in `docs/living`, built by `python docs/living/build.py FOLDER`, with the best model that ships (chapter 21). Its graphs are those above, but its step has one more output: where cross-attention looked. Weights travel in 16 bits, as the model's file stores them; the page computes in 32.
#
# Its loop, `greedy` in `docs/living/decode.js`, is `host_greedy` in another language:
#
# | | NumPy | JavaScript (`docs/living/model.js`) |
# |---|---|---|
# | read the source | `encoder(src=src, src_mask=src_mask)` | `await this.encoder.run({ src, src_mask })` |
# | nothing yet | `cross[..., :0, :]` | `new Tensor("float32", new Float32Array(0), [layers, 2, 1, heads, 0, d_k])` |
# | one step | `step(tokens=tokens, position=at, …)` | `await this.model.decoder.run` |
# | keep the longer past | `logits, past = …` | `this.past = found.present` |
# | a beam's survivors | `past[:, :, origin]` (exercise 1) | `pickRows(this.Tensor, this.past, origin)` |
#
# **Pitfall.** A list of pieces isn't the tokenizer. A host that always takes the longest piece that fits cuts some words differently from chapter 7's merges, on which the model was trained.
#
# ## Summary
#
# - To leave PyTorch, say who brings the numbers, the operations, the search and the tokenizer.
# - ONNX: one graph for the source, one for a step. `present` of one step is `past` of the next, and the loop belongs to the host.
# - An export freezes what isn't a tensor. Compare at sizes *and values* that the example didn't have.
# - CTranslate2 takes weights by name, and its defaults aren't ours.
# - In float32 ONNX Runtime, CTranslate2 and the page (`tests/test_living.py`) wrote the same tokens on every sentence that we tried.
#
# ## Exercises
#
# `check(f)` is silent when your function is right, and otherwise says what is wrong.
#
# ### Exercise 1 · A beam in the host
#
# *code · difficulty ●●○ · worth ●●● · 40 minutes*
#
# Write a beam search in NumPy around a step's graph, for one source and without `</s>`, to keep it short. `BOS` of chapter 6 is the first token that it reads; after each step the `beam` likeliest continuations survive. Return those after `length` steps, each as a list of ids without `BOS`, best first. `step(tokens=…, position=…, past=…)` is the graph with the source's arrays filled in, for any number R of rows: it gives logits (R, V) and the longer past. You get the empty `past` (N, 2, 1, H, 0, d_k) of one row; from the second step on there are `beam` rows. (`solution("host_beam")` shows ours.)
#
# *Further:* let texts end, as in chapter 8, and compare with `beam_search` on this chapter's forty sentences.


# %%
def host_beam(step: Graph, past: np.ndarray, beam: int, length: int) -> list[list[int]]:
    """The `beam` texts that survive `length` steps, best first; past (N, 2, 1, H, 0, d_k)."""
    ...


check(host_beam)

# %% [markdown]
# ### Exercise 2 · Eight bits
#
# *think · difficulty ●○○ · worth ●●○ · 15 minutes*
#
# Predict first, then measure. Round `model.generator.proj.weight` as in *In 8 bits*. By how much is the root mean square error smaller than with one scale for the whole matrix? And the largest error? Why?
#
# <details><summary>An answer</summary>
#
# The root mean square error is 0.6 of the other: most rows have no large weight, so their scales are smaller. The largest error is about the same, since the row of the largest weight has the largest scale.
#
# </details>
#
# ### Exercise 3 · A third home
#
# *project · difficulty ●●● · worth ●●○ · 300 minutes*
#
# Run the two graphs where this series doesn't: in Rust, Go, Swift or C#, all of which have ONNX Runtime. Bring the tokenizer from a library for SentencePiece. Compare it with `onnx_greedy` on a file of sentences, token by token, before you look at its speed.

# %% [markdown]
# Next: [Chapter 15 · Looking inside](ch15_looking_inside.ipynb)
