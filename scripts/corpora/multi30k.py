"""Multi30k's files: found or downloaded, checked, and read as pairs of lines."""

import gzip
import hashlib
import os
from pathlib import Path

MULTI30K_URL = "https://github.com/multi30k/dataset/raw/master/data/task1/raw/"
MULTI30K_SPLITS = ("train", "val", "test_2016_flickr", "test_2017_flickr")
MULTI30K_SHA256 = {
    "train.de.gz": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en.gz": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de.gz": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en.gz": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de.gz": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en.gz": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    "test_2017_flickr.de.gz": "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee",
    "test_2017_flickr.en.gz": "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074",
}


def multi30k_file(name: str) -> Path:
    """The path of one gzip file of Multi30k: in `MULTI30K_DIR` if that is set, else downloaded.

    Raises FileNotFoundError if it is in neither place, ValueError if its checksum is wrong; both
    say what to do.
    """
    folder = os.environ.get("MULTI30K_DIR")
    if not folder:
        return download_multi30k(name)
    path = Path(folder) / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: point MULTI30K_DIR at the gzip files")
    if hashlib.sha256(path.read_bytes()).hexdigest() != MULTI30K_SHA256[name]:
        raise ValueError(f"{path} is damaged (wrong SHA-256): delete it and fetch it again")
    return path


def download_multi30k(name: str) -> Path:
    """Fetch one file into the user's cache: three more tries, a progress bar, a checksum.

    Raises FileNotFoundError if the download fails and ValueError if what came is damaged.
    """
    import pooch

    fetcher = pooch.create(
        path=pooch.os_cache("from-attention-to-translation"),
        base_url=MULTI30K_URL,
        registry={name: f"sha256:{MULTI30K_SHA256[name]}"},
        retry_if_failed=3,
    )
    otherwise = "put the files in a folder and set MULTI30K_DIR to it, or use the `sample` corpus"
    try:
        return Path(fetcher.fetch(name, progressbar=True))
    except ValueError as error:
        raise ValueError(
            f"{name} came damaged from {MULTI30K_URL} (wrong SHA-256): try again, or {otherwise}"
        ) from error
    except Exception as error:
        raise FileNotFoundError(
            f"could not download {name} ({type(error).__name__}): go online, or {otherwise}"
        ) from error


def read_lines(name: str) -> list[str]:
    """The lines of one file of Multi30k, stripped; only a newline separates them."""
    text = gzip.decompress(multi30k_file(name).read_bytes()).decode()
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


def multi30k() -> dict[str, list[tuple[str, str]]]:
    """The four splits of Multi30k, German to English."""
    return {
        split: [*zip(*(read_lines(f"{split}.{x}.gz") for x in ("de", "en")), strict=True)]
        for split in MULTI30K_SPLITS
    }
