"""What exporting needs besides the model: packages, files for large tensors, runtimes.

The graphs themselves, and what the other programs' names mean, are in chapter 14.
"""

import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scripts.book.instruments import dropout_off
from scripts.ch02_multi_head_attention import MultiHeadedAttention
from scripts.ch04_encoder_decoder import DecoderLayer, EncoderDecoder, EncoderLayer, LayerNorm
from scripts.ch06_training import BOS, EOS, PAD, UNK


def need_packages(*names: str, extra: str = "export") -> None:
    """Raise ValueError, with the remedy, if one of these packages is missing."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        raise ValueError(f"{absent[0]} is not installed: pip install -e '.[{extra}]'")


def step_example(model: EncoderDecoder, R: int, S: int, T: int) -> dict[str, Tensor]:
    """Random inputs of a decoder step, by name: R rows, S source tokens, T earlier tokens."""
    sizes, dtype = graph_config(model), model.generator.proj.weight.dtype
    each, d_k = (sizes["layers"], 2, R, sizes["heads"]), sizes["d_k"]
    draw = torch.Generator().manual_seed(0)  # its own: exporting must not disturb any other
    inputs = {
        "tokens": torch.randint(sizes["vocab"], (R, 1), generator=draw),
        "position": torch.tensor([T]),
        "past": torch.randn(*each, T, d_k, generator=draw, dtype=dtype),
        "cross": torch.randn(*each, S, d_k, generator=draw, dtype=dtype),
        "src_mask": torch.rand(R, 1, S, generator=draw) < 0.7,
    }
    inputs["src_mask"][..., 0] = True  # no source is empty
    return inputs


def colleagues_example(model: EncoderDecoder) -> dict[str, Any]:
    """The example in chapter 14's case."""
    inputs = step_example(model, R=3, S=5, T=2)
    return inputs | {"position": int(inputs["position"])}  # the slip: a number, and no tensor


class ModelPart(nn.Module):
    """A part of what a translator computes, as a module that can be exported; it keeps `model`."""

    def __init__(self, model: EncoderDecoder):
        super().__init__()
        self.model = model


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """While it lasts, PyTorch's exporter logs nothing, and is silent about two things.

    Nobody here can mend them. Its other warnings, and its errors, come through.
    """
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Attention keeps its last weights as an attribute, for chapter 2's pictures.
            warnings.filterwarnings("ignore", "The tensor attributes .*attn")
            # PyTorch 2.13 copies objects of a class of its own that it has deprecated.
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
            yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def refused(shows: str) -> Iterator[None]:
    """What is inside must raise; prints the sentence of the message with `shows`."""
    try:
        with quiet_exporter(), redirect_stderr(io.StringIO()):  # it would print the whole graph
            yield
    except Exception as error:
        line = next(line for line in str(error).split("\n") if shows in line)
        print("refused:", line.strip("- ").split(". ")[0])
    else:
        raise AssertionError("nothing was refused")


def graph_config(model: EncoderDecoder) -> dict[str, int]:
    """The sizes that a host must know, and the special ids."""
    layers = model.decoder.layers
    return {
        "layers": len(layers),
        "heads": layers[0].self_attn.h,
        "d_k": layers[0].size // layers[0].self_attn.h,
        "vocab": model.generator.proj.out_features,
        "max_len": model.tgt_embed[1].pe.size(0),
        "pad": PAD,
        "unk": UNK,
        "bos": BOS,
        "eos": EOS,
    }


def save_graphs(folder: Path, graphs: Mapping[str, Any]) -> None:
    """Write ONNX graphs into `folder` by name; large tensors go to weights.bin, equal ones once."""
    from onnx.external_data_helper import set_external_data

    places: dict[bytes, int] = {}
    with open(folder / "weights.bin", "wb") as file:
        for name, graph in graphs.items():
            for node in graph.graph.node:
                node.ClearField("metadata_props")  # notes for debugging: hundreds of kilobytes
            for tensor in graph.graph.initializer:
                content = tensor.raw_data
                if len(content) < 1024:
                    continue  # small ones stay in the graph, where the runtime may need them early
                if content not in places:
                    file.write(bytes(-file.tell() % 64))  # aligned, so that a runtime can map it
                    places[content] = file.tell()
                    file.write(content)
                set_external_data(tensor, "weights.bin", places[content], len(content))
                tensor.ClearField("raw_data")
            (folder / name).write_bytes(graph.SerializeToString())


def module_function(module: nn.Module) -> Callable[..., list[np.ndarray]]:
    """A module, its dropout off, as a function of named arrays, as a graph is in chapter 14."""

    def call(**arrays: np.ndarray) -> list[np.ndarray]:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        with torch.no_grad(), dropout_off(module):
            return [output.numpy() for output in module(**tensors)]

    return call


def fill_linear(place, *layers: nn.Linear) -> None:
    """Give CTranslate2's linear layer the weights of ours; several are stacked, outputs first."""
    place.weight = torch.cat([layer.weight for layer in layers])
    place.bias = torch.cat([layer.bias for layer in layers])


def fill_norm(place, norm: LayerNorm) -> None:
    """Give CTranslate2's LayerNorm the weights of ours."""
    place.gamma, place.beta = norm.weight, norm.bias


def fill_attention(place, attention: MultiHeadedAttention, norm: LayerNorm) -> None:
    """Give CTranslate2's attention the weights of ours: the query is apart in cross-attention."""
    *inputs, output = place.linear
    query, *others = attention.project_query, attention.project_key, attention.project_value
    if len(inputs) == 1:
        fill_linear(*inputs, query, *others)
    else:
        fill_linear(inputs[0], query)
        fill_linear(inputs[1], *others)
    fill_linear(output, attention.project_output)
    fill_norm(place.layer_norm, norm)


def fill_layer(place, layer: EncoderLayer | DecoderLayer) -> None:
    """Give CTranslate2's layer the weights of ours."""
    fill_attention(place.self_attention, layer.self_attn, layer.sublayer[0].norm)
    if len(layer.sublayer) == 3:  # a decoder's layer
        fill_attention(place.attention, layer.src_attn, layer.sublayer[1].norm)
    fill_linear(place.ffn.linear_0, layer.feed_forward.expand)
    fill_linear(place.ffn.linear_1, layer.feed_forward.contract)
    fill_norm(place.ffn.layer_norm, layer.sublayer[-1].norm)


def open_translator(folder: Path):
    """CTranslate2's `Translator` of a model that `export_ctranslate2` wrote, in float32."""
    import ctranslate2

    return ctranslate2.Translator(str(folder), compute_type="float32")
