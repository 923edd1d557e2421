"""Builds the living page, the translator that runs in a browser, and the walk beside it.

    python docs/living/build.py FOLDER [--model runs/NAME] [--walk]

Writes the page, the model as two ONNX graphs with their weights, the tokenizer's tables and ONNX
Runtime Web, which comes from the npm registry (docs/package-lock.json says which). Nothing of it is
committed. Any static server will do, below any path; the command says how to see it. The walk
(`--walk`) lies beside a FOLDER named living, and takes the model and half of its code from there.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.book.first_cell import repository
from scripts.ch01_attention import attention
from scripts.ch02_multi_head_attention import split_heads
from scripts.ch04_encoder_decoder import EncoderDecoder
from scripts.ch06_training import BOS, EOS, PAD, UNK
from scripts.ch07_multi30k import BPETokenizer
from scripts.ch14_leaving_home import (
    STEP_SIZES,
    OnnxDecoderStep,
    encoder_graph,
    export_graph,
)
from scripts.core.checkpoints import weights
from scripts.core.models import DEFAULT_MODEL, Trained, load_model
from scripts.core.settings import TrainConfig
from scripts.corpora.captions import aligned_pairs
from scripts.corpora.load import load_corpus
from scripts.fast.export import graph_config, need_packages, save_graphs, step_example

HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parent  # holds package-lock.json, and node_modules once they are installed
PAGE = ["index.html", "style.css", "check.js", "icon.svg"]
PAGE += ["app.js", "common.js", "decode.js", "draw.js", "model.js", "tokenizer.js"]
WALK = ["index.html", "style.css", "walk.js", "heat.js", "plan.js", "tour.js", "worker.js"]
WALK += ["cells.js", "forward.js", "numbers.js", "stops.js"]
# Of the living page's files, those that the walk uses, too.
SHARED = ["style.css", "check.js", "icon.svg", "common.js", "decode.js", "draw.js", "model.js"]
SHARED += ["tokenizer.js", "tokenizer.json", "model.json", "weights.bin"]
MIT = """\
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial
portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES
OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
RUNTIME = ["ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"]


class WatchedDecoderStep(OnnxDecoderStep):
    """Chapter 14's step, which also says where its cross-attention looked."""

    def forward(
        self, tokens: Tensor, position: Tensor, past: Tensor, cross: Tensor, src_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of `OnnxDecoderStep`; to its logits, present, and attention (N, R, H, S)."""
        readers = [layer.src_attn for layer in self.model.decoder.layers]
        queries: list[Tensor] = []  # (R, 1, D) each
        with ExitStack() as hooks:
            for reader in readers:
                hook = reader.project_query.register_forward_hook(
                    lambda *call: queries.append(call[-1])
                )
                hooks.callback(hook.remove)
            logits, present = super().forward(tokens, position, past, cross, src_mask)
        looked = [
            attention(split_heads(query, reader.h), keys, values, src_mask.unsqueeze(1))[1]
            for reader, query, (keys, values) in zip(readers, queries, cross, strict=True)
        ]  # (R, H, 1, S) each: computed once more, as the step keeps none; it is a small product
        return logits, present, torch.stack(looked).squeeze(-2)


def watched_graph(model: EncoderDecoder) -> Any:
    """`WatchedDecoderStep` as an ONNX graph, for any R, S and T."""
    inputs = step_example(model, R=3, S=5, T=2)
    outputs = ["logits", "present", "attention"]
    return export_graph(WatchedDecoderStep(model), inputs, outputs, STEP_SIZES)


def stored_tensors(graphs: Mapping[str, Any]) -> dict[int, tuple[int, bool]]:
    """What `save_graphs` put into weights.bin: first byte to (bytes, whether these are float32)."""
    from onnx import TensorProto

    found = {}
    for graph in graphs.values():
        for tensor in graph.graph.initializer:
            place = {part.key: part.value for part in tensor.external_data}
            if place:
                is_float = tensor.data_type == TensorProto.FLOAT
                found[int(place["offset"])] = (int(place["length"]), is_float)
    return dict(sorted(found.items()))


def pack(content: bytes, tensors: Mapping[int, tuple[int, bool]]) -> tuple[bytes, list[list]]:
    """The tensors of weights.bin, 16 bits a number where that loses nothing, and a list of parts.

    A part is [first byte in weights.bin, count, "half" or "bytes"]; each is padded to 4 bytes. The
    shipped model is stored in float16, so this halves what a reader loads, and changes nothing.
    """
    packed, parts = bytearray(), []
    for start, (length, is_float) in tensors.items():
        raw = content[start : start + length]
        numbers = np.frombuffer(raw, np.float32) if is_float else np.empty(0, np.float32)
        with np.errstate(over="ignore"):
            halves = numbers.astype(np.float16)
        if is_float and np.array_equal(halves.astype(np.float32), numbers):
            packed += halves.tobytes()
            parts.append([start, len(halves), "half"])
        else:
            packed += raw
            parts.append([start, length, "bytes"])
        packed += bytes(-len(packed) % 4)
    return bytes(packed), parts


def tensor_places(
    model: EncoderDecoder, content: bytes, tensors: Mapping[int, tuple[int, bool]]
) -> dict[str, list]:
    """Where weights.bin holds the model's tensors: [first byte, rows, columns, whether transposed].

    By name, tied ones under each of theirs. What has less than a kilobyte is in the graphs instead.
    """
    starts = {content[start : start + length]: start for start, (length, _) in tensors.items()}
    places = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        matrix = np.atleast_2d(tensor.detach().numpy())
        for transposed, stored in enumerate((matrix, matrix.T)):
            start = starts.get(stored.tobytes())
            if start is not None:
                places.setdefault(name, [start, *matrix.shape, transposed])
    return places


def tokenizer_tables(tokenizer: BPETokenizer) -> dict[str, Any]:
    """What tokenizer.js needs: pieces and scores by id, special ids, normalisation rules (base64).

    Raises ValueError for a SentencePiece model with something that tokenizer.js doesn't know.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model)
    normal, trainer, kind = proto.normalizer_spec, proto.trainer_spec, proto.SentencePiece
    kinds = {i: piece.type for i, piece in enumerate(proto.pieces)}
    special = {"pad": PAD, "unk": UNK, "bos": BOS, "eos": EOS}
    known = {
        "byte-pair merges": trainer.model_type == trainer.BPE,
        "a space in front": normal.add_dummy_prefix and not trainer.treat_whitespace_as_suffix,
        "runs of spaces as one": normal.remove_extra_whitespaces and normal.escape_whitespaces,
        "nothing undone after decoding": not proto.denormalizer_spec.precompiled_charsmap,
        "no bytes, user's or unused pieces": all(
            kinds[i] == (kind.UNKNOWN if i == UNK else kind.CONTROL if i in special.values() else 1)
            for i in kinds
        ),
    }
    if not all(known.values()):
        missing = ", ".join(name for name, holds in known.items() if not holds)
        raise ValueError(f"tokenizer.js expects of a SentencePiece model: {missing}")
    return {
        "pieces": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "special": special,
        "rules": base64.b64encode(normal.precompiled_charsmap).decode(),
    }


def npm_packages() -> Path:
    """docs/node_modules, as package-lock.json has it; npm installs what is missing."""
    folder = PACKAGES / "node_modules"
    wanted = json.loads((PACKAGES / "package-lock.json").read_text("utf-8"))["packages"]
    files = {PACKAGES / name / "package.json": package for name, package in wanted.items() if name}
    if all(
        file.is_file() and json.loads(file.read_text("utf-8"))["version"] == package["version"]
        for file, package in files.items()
    ):
        return folder
    if not (npm := shutil.which("npm")):
        raise SystemExit(
            "The living page needs npm once, for ONNX Runtime Web: install Node.js 20 or newer "
            "(on Debian: apt-get install nodejs npm) and run this again."
        )
    print("npm ci (ONNX Runtime Web)", file=sys.stderr)
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    done = subprocess.run([npm, "ci", *quiet], cwd=PACKAGES, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit("npm ci failed in docs: is the npm registry within reach?")
    return folder


def write_runtime(folder: Path) -> None:
    """ONNX Runtime Web: its module, its WebAssembly and a note of where they come from."""
    package = npm_packages() / "onnxruntime-web"
    about = json.loads((package / "package.json").read_text("utf-8"))
    folder.mkdir()
    for name in RUNTIME:
        shutil.copyfile(package / "dist" / name, folder / name)
    (folder / "README.txt").write_text(
        f"ONNX Runtime Web {about['version']}, from the npm package {about['name']}, unchanged.\n"
        f"Copyright (c) Microsoft Corporation. License: {about['license']}.\n"
        f"{about['description']}.\n\n{MIT}",
        "utf-8",
    )


def write_model(trained: Trained, folder: Path) -> dict[str, Any]:
    """The two graphs, weights.bin and tokenizer.json; gives what model.json says of them."""
    model = trained.model
    graphs = {"encoder.onnx": encoder_graph(model), "decoder_step.onnx": watched_graph(model)}
    save_graphs(folder, graphs)
    whole = (folder / "weights.bin").read_bytes()
    tensors = stored_tensors(graphs)
    packed, parts = pack(whole, tensors)
    places = tensor_places(model, whole, tensors)
    (folder / "weights.bin").write_bytes(packed)
    tables = json.dumps(tokenizer_tables(trained.tokenizer), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(tables, "utf-8")
    return {
        **graph_config(model),
        "languages": trained.config.languages.split("-", 1),
        "alpha": trained.config.alpha,
        "parameters": sum(weight.numel() for weight in weights(model).values()),
        "look": [str(min(1, len(model.decoder.layers) - 1)), "mean"],  # what the map shows at first
        "weights": {"size": len(whole), "parts": parts, "places": places},
    }


def examples(model: Path, config: TrainConfig) -> list[str]:
    """Up to five short sentences to try: of the model's own test pairs, else of the series'.

    The longest, with which the page opens, has the most to show. None for an unknown language.
    """
    own, sources = model / "pairs" / "test.tsv", []
    if own.is_file():
        sources = [line.split("\t")[0] for line in own.read_text("utf-8").split("\n")]
    elif config.languages in ("de-en", "en-de"):
        captions = [pair.texts for pair in aligned_pairs()]
        pairs = load_corpus("sample")["test"] if config.corpus == "sample" else captions
        sources = [pair[config.languages == "en-de"] for pair in pairs]
    short = [text for text in dict.fromkeys(sources) if 0 < len(text) <= 80]
    return sorted(short[:5], key=len, reverse=True)


def leave_site(page: str) -> str:
    """The page with the series' public address behind its links to the site, or without them."""
    link = f'<a href="{repository()}">\\1</a>' if repository() else r"\1"
    return re.sub(r'<a href="\.\./.*?">(.*?)</a>', link, page)


def write_worker(folder: Path, others: Mapping[str, Path]) -> None:
    """sw.js, with the list of all files and a version that changes with any of them.

    `others` are files of another folder by the address that the page knows them by.
    """
    files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    files |= others
    digest = hashlib.sha256()
    for name, path in files.items():
        digest.update(name.encode() + path.read_bytes())
    names = ["./", *files]
    worker = (HERE / "sw.js").read_text("utf-8")
    worker = worker.replace("@VERSION@", digest.hexdigest()[:12])
    worker = worker.replace('"@FILES@"', json.dumps(names, indent=2))
    (folder / "sw.js").write_text(worker, "utf-8")


def build_walk(living: Path) -> Path:
    """Write the walk beside the living page, whose model and code it uses; gives its folder.

    Raises ValueError for a model that it can't open, post-norm or with tensors that are too small,
    and if its folder holds something else.
    """
    model = json.loads((living / "model.json").read_text("utf-8"))
    if living.name != "living":
        raise ValueError(f"the walk looks for its model in ../living, not in {living.name}")
    if not {"encoder.norm.weight", "generator.proj.bias"} <= model["weights"]["places"].keys():
        raise ValueError("the walk needs a pre-norm model with d_model of 256 or more")
    folder = living.with_name("walk")
    if folder.exists() and not (folder / "forward.js").is_file():
        raise ValueError(f"{folder} holds something else")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE.with_name("walk"), folder, ignore=lambda _, names: {*names} - {*WALK})
    write_worker(folder, {f"../living/{name}": living / name for name in SHARED})
    return folder


def build(model: Path, folder: Path) -> None:
    """Write `model`'s page into `folder`, made anew; ValueError if that holds something else."""
    need_packages("onnx", "onnxscript")
    trained = load_model(model, "cpu")
    if folder.exists() and not (folder / "ort").is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds something else: name an empty or a new folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_runtime(folder / "ort")
    for name in PAGE:
        shutil.copyfile(HERE / name, folder / name)
    if not (folder.parent / "_static").is_dir():  # it stands alone
        (folder / "index.html").write_text(
            leave_site((HERE / "index.html").read_text("utf-8")), "utf-8"
        )
    about = write_model(trained, folder) | {"examples": examples(model, trained.config)}
    loaded = ["weights.bin", "encoder.onnx", "decoder_step.onnx", "tokenizer.json"]
    loaded.append(f"ort/{RUNTIME[1]}")
    about["files"] = {name: (folder / name).stat().st_size for name in loaded}
    (folder / "model.json").write_text(json.dumps(about, ensure_ascii=False) + "\n", "utf-8")
    write_worker(folder, {})


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the page that translates in a browser.")
    parser.add_argument("folder", type=Path, help="where to write it; made anew")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a model's folder")
    parser.add_argument("--walk", action="store_true", help="write the walk beside it, too")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.walk and folder.name != "living":
        parser.error("--walk needs a FOLDER named living")  # before minutes of work
    try:
        build(options.model, folder)
        if options.walk:
            build_walk(folder)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(
        f"{folder}: {size / 1e6:.1f} MB, for any static host. To see it here: python -m http.server"
    )
    print(f"--directory {folder.parent}, and then http://localhost:8000/{folder.name}/")
    if options.walk:
        print("The walk: http://localhost:8000/walk/")


if __name__ == "__main__":
    main()
