"""Multi30k's texts: found or downloaded, checked, and read as pairs of lines."""

import gzip
import hashlib
import os
import zlib
from contextlib import suppress
from pathlib import Path

MULTI30K_URL = "https://github.com/multi30k/dataset/raw/master/data/task1/raw/"
MULTI30K_SPLITS = ("train", "val", "test_2016_flickr", "test_2017_flickr")
MULTI30K_SHA256 = {  # of the texts themselves, whichever gzip packed them
    "train.de": "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72",
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    "test_2017_flickr.de": "c3078bc3b36808bf9d20eb2347ed6137016179ef59ec0d2b9b8ecc3fb2880081",
    "test_2017_flickr.en": "ce1450ddc5ab0834502579d77a170849952e15a2938b34cc503bdc25ebb4fb98",
}
GZIP = b"\x1f\x8b"  # how a packed file begins, whatever its name


def multi30k_text(name: str) -> bytes:
    """One text of Multi30k, such as train.de: from `MULTI30K_DIR` if that is set, else downloaded.

    Raises FileNotFoundError if it isn't to be had, ValueError if the file is another text; each
    says what to do.
    """
    if folder := os.environ.get("MULTI30K_DIR"):
        return checked_text(multi30k_file(Path(folder).expanduser(), name), name)
    return download_multi30k(name)


def multi30k_file(folder: Path, name: str) -> Path:
    """The path of a text, packed or not: in the folder, or where the dataset's repository has it.

    Raises FileNotFoundError.
    """
    names = f"{name}.gz", name, f"data/task1/raw/{name}.gz", f"data/task1/raw/{name}"
    for path in (folder / part for part in names):
        if path.is_file():
            return path
    lacks = f"MULTI30K_DIR is {folder}, which has neither {name}.gz nor {name}"
    raise FileNotFoundError(f"{lacks}: name the folder that has Multi30k's files")


def checked_text(path: Path, name: str) -> bytes:
    """A file's text, unpacked, its lines ended by a newline alone; ValueError if it is another."""
    text = path.read_bytes()
    try:
        if text.startswith(GZIP):
            text = gzip.decompress(text)
    except (OSError, EOFError, zlib.error):
        text = b""
    text = text.replace(b"\r\n", b"\n")  # as Git for Windows writes lines
    if hashlib.sha256(text).hexdigest() != MULTI30K_SHA256[name]:
        raise ValueError(
            f"{path} isn't Multi30k's {name}, or is damaged (its text has another SHA-256): "
            "delete it and fetch it again"
        )
    return text


def download_multi30k(name: str) -> bytes:
    """Fetch one text into the user's cache: three more tries, a progress bar, a checksum.

    Raises FileNotFoundError if the download fails, comes damaged or can't be kept.
    """
    import pooch

    cache = Path(pooch.os_cache("from-attention-to-translation"))
    path = cache / f"{name}.gz"

    def fetch_checked(url: str, output: str, fetcher: pooch.Pooch) -> None:
        pooch.HTTPDownloader(progressbar=True)(url, output, fetcher)
        checked_text(Path(output), name)  # before it is kept: if that fails, pooch tries again

    fetcher = pooch.create(cache, MULTI30K_URL, registry={path.name: None}, retry_if_failed=3)
    try:
        with suppress(FileNotFoundError, ValueError):
            return checked_text(path, name)  # fetched before
        path.unlink(missing_ok=True)
        fetcher.fetch(path.name, downloader=fetch_checked)
        return checked_text(path, name)
    except (OSError, ValueError) as error:  # no network, no room, or damaged on the way
        raise FileNotFoundError(
            f"could not download a whole {path.name} into {cache} ({type(error).__name__}): go "
            "online, let that folder be written, put the files in a folder and set MULTI30K_DIR to "
            "it, or use the `sample` corpus"
        ) from error


def read_lines(name: str) -> list[str]:
    """The lines of one text of Multi30k, stripped; only a newline separates them."""
    text = multi30k_text(name).decode()
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


def multi30k() -> dict[str, list[tuple[str, str]]]:
    """The four splits of Multi30k, German to English."""
    return {
        split: [*zip(*(read_lines(f"{split}.{x}") for x in ("de", "en")), strict=True)]
        for split in MULTI30K_SPLITS
    }
