"""Drawings of part III: where time goes, what the fast path is worth, races, two graphs."""

from __future__ import annotations

from scripts import Late
from scripts.book.charts import rounded, titled
from scripts.book.figures.diagram import drawn
from scripts.book.look import GREY, INK, LOG, PALETTE, bar_axis, colored

alt, pd = Late("altair"), Late("pandas")


LABELS = {  # at the roofline's dots: name, and how it stands
    "projection": ("projection", {"align": "right", "dx": -9, "dy": -5}),
    "feed-forward, out": ("feed-forward", {"align": "right", "dx": -9, "dy": 14}),
    "logits": ("logits", {"align": "left", "dx": 9, "dy": 4}),
    "attention": ("attention", {"align": "left", "dx": 9, "dy": 4}),
    "loss": ("loss", {"align": "left", "dx": 9, "dy": 4}),
    "LayerNorm": ("LayerNorm", {"align": "right", "dx": -9, "dy": 9}),
    "residual sum": ("residual sum", {"align": "right", "dx": -9, "dy": 4}),
    "Adam": ("Adam", {"align": "left", "dx": 9, "dy": 4}),
    "ReLU": ("ReLU", {"align": "left", "dx": -4, "dy": -14}),
}


def roofline_chart(operations: pd.DataFrame, rate: float, bandwidth: float) -> alt.TopLevelMixin:
    """Speed over intensity, under the roofs of `rate` FLOP/s and `bandwidth` bytes/s.

    A row for each operation; columns: FLOPs, bytes, roof, seconds and fused seconds (or NaN).
    """
    forms = {"seconds": "chapters 1 to 6", "fused seconds": "one call, or oneDNN's product"}
    dots = operations.rename_axis("operation").reset_index()
    dots = dots.melt(["operation", "FLOPs", "bytes", "roof"], list(forms), "form", "time").dropna()
    dots["form"] = dots["form"].map(forms)
    dots["intensity"], dots["speed"] = dots["FLOPs"] / dots["bytes"], dots["FLOPs"] / dots["time"]
    dots["share"], forms = dots["roof"] / dots["time"], list(forms.values())
    dots = dots.drop(columns=["FLOPs", "bytes", "roof", "time"])
    ridge, ends = rate / bandwidth, [0.02, 300.0]
    low, high = dots["speed"].min() / 3e9, rate * 5 / 1e9
    x = alt.X("intensity:Q", title="arithmetic intensity: FLOPs per byte")
    x = x.scale(domain=ends, **LOG).axis(values=[0.1, 1, 10, 100], format="~g", grid=False)
    y = alt.Y("speed:Q", title="speed: billion FLOP/s").scale(domain=[low, high], **LOG)
    y = y.axis(values=[10.0**power for power in range(-2, 6)], format="~g", grid=False)
    regions = {"intensity": [ends[0], ridge], "end": [ridge, ends[1]], "low": low, "speed": high}
    regions = pd.DataFrame(regions | {"region": ["memory-bound", "compute-bound"]})
    roof = pd.DataFrame({"intensity": [ends[0], ridge, ends[1]]})
    roof["speed"] = (roof["intensity"] * bandwidth).clip(upper=rate) / 1e9
    peak = roof[1:2].assign(text=f"ridge: {ridge:.0f} FLOPs a byte")
    shown = rounded(dots.assign(speed=dots["speed"] / 1e9))
    look = {"sort": forms, "title": None}
    shape = alt.Shape("form:N", **look).scale(domain=forms, range=["circle", "diamond"])
    color = colored("form", dict(zip(forms, PALETTE, strict=False)), **look)
    area = alt.Chart(rounded(regions)).encode(x, y)
    shades = alt.condition(
        "datum.region == 'memory-bound'", alt.value("#E8F1F8"), alt.value("#FCEFE2")
    )
    layers = [
        area.mark_rect().encode(x2="end:Q", y2="low:Q", color=shades),
        area.mark_text(align="left", dx=6, dy=12, color=GREY).encode(text="region:N"),
        alt.Chart(rounded(roof)).mark_line(color=GREY).encode(x, y),
        alt.Chart(rounded(peak)).mark_text(align="left", dx=6, dy=14).encode(x, y, text="text:N"),
        alt.Chart(shown).mark_line(color=GREY, strokeWidth=1).encode(x, y, detail="operation:N"),
        alt.Chart(shown)
        .mark_point(filled=True, size=75, opacity=1)
        .encode(
            x,
            y,
            color.legend(orient="bottom"),
            shape,
            tooltip=["operation", "form", "speed", "share"],
        ),
    ]
    for name, row in shown[shown["form"] == forms[0]].set_index("operation").iterrows():
        label, place = LABELS.get(name, (name, {"align": "right", "dx": -9, "dy": 4}))
        if name != "feed-forward, back":  # beside its twin
            at = alt.Chart(
                row[["intensity", "speed"]].to_frame().T.astype(float).assign(name=label)
            )
            layers.append(at.mark_text(baseline="middle", **place).encode(x, y, text="name:N"))
    norm = shown[shown["operation"] == "LayerNorm"].set_index("form")["share"]
    return titled(
        alt.layer(*layers).properties(width=560, height=380),
        f"Chapter 4's LayerNorm reaches {norm[forms[0]]:.0%} of its roof, "
        f"PyTorch's own {norm[forms[1]]:.0%}",
        "Forward operations of our step, each alone. A line joins two ways to the same result. "
        "Grey: the roof.",
    )


def bandwidth_chart(sweep: pd.DataFrame, bandwidth: float) -> alt.TopLevelMixin:
    """Bytes a second over the memory touched: columns touched (bytes) and one a sum."""
    shown = sweep.melt("touched", var_name="operation", value_name="bandwidth")
    shown["touched"], shown["bandwidth"] = shown["touched"] / 2**20, shown["bandwidth"] / 1e9
    x = alt.X("touched:Q", title="memory that the operation touches: MiB")
    x = x.scale(base=2, **LOG).axis(values=[1, 4, 16, 64, 256], grid=False)
    y = alt.Y("bandwidth:Q", title="billion bytes a second")
    color = colored("operation", dict(zip(shown["operation"].unique(), PALETTE, strict=False)))
    curves = alt.Chart(rounded(shown)).mark_line(point={"filled": True, "size": 40})
    roof = alt.Chart(rounded(pd.DataFrame({"bandwidth": [bandwidth / 1e9]})))
    layers = [
        roof.mark_rule(color=GREY, strokeDash=[5, 4]).encode(y),
        roof.mark_text(align="left", dx=6, dy=-8, color=GREY, text="memory").encode(
            y, x=alt.value(0)
        ),
        curves.encode(x, y, color.title(None)),
    ]
    kept = shown[shown["operation"].str.contains("kept")]["bandwidth"]
    new = shown[shown["operation"].str.contains("new")]["bandwidth"]
    return titled(
        alt.layer(*layers).properties(width=440, height=280),
        f"A sum moves {kept.max():.0f} GB/s in the cache, {kept.iloc[-1]:.0f} in memory, "
        f"{new.iloc[-1]:.0f} into new memory",
        "The same sum, with a result that is kept or new each time. "
        "Dashed: the bandwidth of the roofline.",
    )


def step_account_chart(
    account: pd.DataFrame, floors: pd.Series, measured: float
) -> alt.TopLevelMixin:
    """Seconds of a step by operation (columns forward and backward), sorted, and the sum beside
    the `measured` step. Operations that aren't in `floors` have a floor of zero.
    """
    total, step = "sum of the parts", "the step, measured"
    parts, spent = account.sum(axis=1), account.copy()
    order = [*parts.sort_values(ascending=False).index, total, step]
    spent.loc[total] = account.sum()
    spent.loc[step, "measured"] = measured
    spent = spent.rename_axis("operation").reset_index()
    spent = spent.melt("operation", var_name="pass", value_name="seconds").dropna()
    ends = spent.groupby("operation", as_index=False)["seconds"].sum()
    least = pd.concat([floors, pd.Series({total: floors.sum(), step: floors.sum()})])
    least = least.rename_axis("operation").reset_index(name="seconds")
    shades = {"forward": PALETTE[0], "backward": PALETTE[5], "measured": INK}
    x = alt.X("seconds:Q").axis(grid=False, tickCount=5)
    x = x.scale(domain=[0, 1.15 * ends["seconds"].max()], nice=False)
    y = bar_axis("operation", order)
    look = {"sort": list(shades), "title": None}
    layers = [
        alt.Chart(rounded(spent, 3))
        .mark_bar(height=16)
        .encode(
            x,
            y,
            colored("pass", shades, **look).legend(orient="bottom"),
            order=alt.Order("pass:O", sort="descending"),
        ),
        alt.Chart(rounded(ends, 3))
        .mark_text(align="left", dx=7)
        .encode(x, y, text=alt.Text("seconds:Q", format=".2f")),
        alt.Chart(rounded(least, 3))
        .mark_tick(color=PALETTE[1], thickness=4, height=20, opacity=1)
        .encode(x, y),
    ]
    free = 1 - parts[floors.index].sum() / parts.sum()
    return titled(
        alt.layer(*layers).properties(width=400, height=alt.Step(25)),
        f"The parts are {parts.sum() / measured:.0%} of the step, "
        f"and {free:.0%} of them is what the floor counts as free",
        "Each operation alone, as often as it occurs, and the whole step, as it comes. "
        "Orange: the floor. Operations without a mark have a floor of zero.",
    )


GROWTH_AXES = {
    "length": "length (2,048 tokens a side)",
    "tokens": "tokens a side",
    "width": "d_model (d_ff = 4 × d_model)",
    "depth": "layers on either side",
}


def growth_chart(frame: pd.DataFrame, costs: list[str]) -> alt.TopLevelMixin:
    """Costs along the four axes, as multiples of the smallest: columns axis, value and `costs`.

    Column `slope` is that of the first cost, from the value before.
    """
    used = frame.melt(["axis", "value", "slope"], costs, "cost", "times").round({"slope": 1})
    used["times"] /= used.groupby(["axis", "cost"])["times"].transform("first")
    used = rounded(used)
    y = alt.Y("times:Q", title="times as much").axis(values=[1, 2, 4, 8, 16, 32, 64])
    y = y.scale(domain=[0.5, 70], base=2, **LOG)
    color = alt.Color("cost:N", sort=list(used["cost"].unique()), title=None)
    panels = []
    for axis, along in used.groupby("axis", sort=False):
        values = sorted(along["value"].unique().tolist())
        ends = [values[0], values[-1]]
        x = alt.X("value:Q", title=GROWTH_AXES[axis]).axis(values=values, grid=False, format=",")
        x = x.scale(domain=ends, padding=12, base=2, **LOG)
        steady = pd.DataFrame({"value": ends, "times": [1.0, ends[1] / ends[0]]})
        grey = alt.Chart(steady).mark_line(color=GREY, strokeWidth=1.5, strokeDash=[5, 4])
        chart = alt.Chart(along).mark_line(point={"filled": True, "size": 40})
        first = along[along["cost"] == costs[0]]
        middle = (first["value"] * first["value"].shift()) ** 0.5
        texts = alt.Chart(first.assign(value=middle, times=0.63).dropna())
        texts = texts.mark_text(fontSize=11, color=PALETTE[0])
        layers = [
            grey.encode(x, y),
            chart.encode(x, y, color),
            texts.encode(x, y, text=alt.Text("slope:Q", format=".1f")),
        ]
        panels.append(alt.layer(*layers).properties(width=230, height=170))
    return titled(
        alt.concat(*panels, columns=2),
        "At a fixed number of tokens length costs little; in the end time grows most with width",
        "The textbook's step, as multiples of its cost at each axis's smallest value. Both axes "
        "of each panel are logarithmic. Numbers: the slope of time in each part. Dashed: slope 1.",
    )


def two_graphs() -> alt.TopLevelMixin:
    """The encoder's graph, run once, and the step's graph, which the host runs again and again."""
    return titled(
        drawn("two_graphs").chart(),
        "Two graphs, and a loop that belongs to neither",
        "Read upwards. Two things go round: the token, which the host chooses, and past, which is "
        "the last step's present. Blue and orange: graphs. Pink: the host. Green: keys and "
        "values. With a beam the host repeats the rows of cross: R = B · beam.",
    )
