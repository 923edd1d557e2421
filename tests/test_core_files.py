"""Files that are there whole or not at all, and that notice damage."""

import errno
import os
import random
import re
from typing import Any

import pytest
import torch

from scripts.book.files import write_whole
from scripts.book.records import sha256
from scripts.core.checkpoints import keep_newest, load_tensors, save_tensors, saved_states

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


def some_tensors() -> dict[str, torch.Tensor]:
    """Tensors of each dtype, with 0-dimensional, empty and transposed ones among them."""
    numbers = 100 * torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    tensors = {str(dtype).removeprefix("torch."): numbers.to(dtype) for dtype in DTYPES}
    scalars = {f"one {name}": tensor[1, 2].clone() for name, tensor in tensors.items()}
    return tensors | scalars | {"none": numbers[:0].clone(), "transposed": numbers.T.clone()}


def test_tensors_come_back_as_they_were_from_equal_files(tmp_path):
    """Equal, or a file's SHA-256, which records carry, would say nothing about what is in it."""
    meta = {"rate": 0.1, "text": "Mädchen", "list": [1, None]}
    for i in range(8):
        save_tensors(tmp_path / str(i), some_tensors(), meta)
    assert len({sha256(path) for path in tmp_path.iterdir()}) == 1
    loaded, loaded_meta = load_tensors(tmp_path / "0")
    assert loaded_meta == meta and loaded.keys() == some_tensors().keys()
    for name, tensor in some_tensors().items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].equal(tensor)


def test_any_flipped_bit_is_noticed(tmp_path):
    """50 positions in the header and 50 in the data, a random bit at each."""
    path, luck = tmp_path / "file", random.Random(0)
    save_tensors(path, some_tensors(), {"text": "Mädchen"})
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for at in (*luck.sample(range(header), 50), *luck.sample(range(header, len(whole)), 50)):
        spoiled = bytearray(whole)
        spoiled[at] ^= 1 << luck.randrange(8)
        path.write_bytes(spoiled)
        with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
            load_tensors(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch, call):
    """The disk may refuse as late as the flush or the rename: the old content stays."""
    path = tmp_path / "file"
    write_whole(path, b"old")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as caught:
        patch.setattr(os, call, refuse)
        write_whole(path, b"new and longer")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    write_whole(path, b"new and longer")
    assert path.read_bytes() == b"new and longer" and list(tmp_path.iterdir()) == [path]


def test_only_the_newest_are_kept(tmp_path):
    """And the thousandth epoch comes after the one before."""
    names = [f"epoch-{number}.safetensors" for number in ("998", "999", "1000")]
    for name in names:
        (tmp_path / name).touch()
    for count in (9, 2, 0):
        keep_newest(saved_states(tmp_path, "epoch"), count)
        names = names[-count:] if count else []
        assert [path.name for path in saved_states(tmp_path, "epoch")] == names
