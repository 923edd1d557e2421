"""The charts: one output with JSON and picture, the same on every machine, labels kept apart."""

import base64
import io
import json
import subprocess
import sys

import altair as alt
import numpy as np
import pandas as pd
import pytest

from scripts.book.charts import bars, heatmap, lines, rounded, titled
from scripts.book.look import VEGALITE

WORDS = ["the", "dog", "and", "the", "cat"]


def one_of_each() -> dict[str, alt.TopLevelMixin]:
    curve = pd.DataFrame({"step": [1, 2, 1, 2], "loss": [2.0, 1.0, 3.0, 2.0], "run": list("aabb")})
    return {
        "heatmap": heatmap(np.eye(5), WORDS, WORDS, value_title="weight"),
        "mask": heatmap(np.tril(np.ones((4, 4), bool))),
        "lines": lines(curve, "step", "loss", "run", points=True),
        "bars": bars(pd.DataFrame({"kind": ["a", "b"], "share": [0.5, 0.25]}), "kind", "share"),
    }


@pytest.mark.parametrize("name", one_of_each())
def test_one_output_holds_json_png_and_text(name):
    chart = titled(one_of_each()[name], "A title", "A caption that says what to see.")
    data, metadata = chart._repr_mimebundle_()
    assert set(data) == {VEGALITE, "image/png", "text/plain"}
    assert data["text/plain"] == "[Chart] A title"
    picture = base64.b64decode(data["image/png"])
    assert picture.startswith(b"\x89PNG") and len(picture) < 150_000
    assert metadata["image/png"]["width"] > 100
    assert data[VEGALITE]["title"]["subtitle"] == ["A caption that says what to see."]
    json.dumps(data[VEGALITE], allow_nan=False)


def test_squeezing_keeps_every_pixel():
    import vl_convert
    from PIL import Image

    from scripts.book.look import _squeezed

    spec = one_of_each()["mask"].to_dict()
    plain = vl_convert.vegalite_to_png(spec, vl_version="v5.20", scale=1)
    small = _squeezed(plain)

    assert len(small) < len(plain) / 5
    before, after = (Image.open(io.BytesIO(png)).convert("RGB") for png in (plain, small))
    assert before.size == after.size and before.tobytes() == after.tobytes()


def test_equal_words_keep_their_own_cells_and_labels():
    spec = heatmap(np.arange(25.0).reshape(5, 5), WORDS, WORDS).to_dict()
    (rows,) = spec["datasets"].values()
    assert len({(r["row"], r["column"]) for r in rows}) == 25
    axis = spec["layer"][0]["encoding"]["x"]["axis"]
    assert axis["labelExpr"] == json.dumps(WORDS) + "[datum.value]"


def test_infinite_cells_are_named_and_grey():
    spec = heatmap([[0.0, -np.inf], [np.nan, 1.0]]).to_dict()
    (rows,) = spec["datasets"].values()
    assert [r["text"] for r in rows] == ["0.00", "−∞", "NaN", "1.00"]
    assert [r["value"] for r in rows] == [0.0, None, None, 1.0]
    assert len(spec["layer"]) == 3


def test_rounding_hides_the_noise_of_machines():
    mine = pd.DataFrame({"p": [0.1234567890123, 3e-17, np.nan], "n": [1, 2, 3]})
    yours = pd.DataFrame({"p": [0.1234567890125, 1e-17, np.nan], "n": [1, 2, 3]})
    pd.testing.assert_frame_equal(rounded(mine), rounded(yours), check_exact=True)
    assert rounded(mine)["p"].tolist()[:2] == [0.1235, 0.0]
    assert rounded(pd.DataFrame({"rate": [1.23456e-5]}))["rate"].item() == 1.235e-5


def test_in_colab_its_own_renderer_stays_on():
    code = (
        "import sys, types; sys.modules['google.colab'] = types.ModuleType('colab');"
        "import altair; before = altair.renderers.active; import scripts.book.look;"
        "scripts.book.look.switch_on();"
        "assert altair.renderers.active == before != 'series';"
        "assert altair.theme.active == 'series'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
