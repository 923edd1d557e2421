"""Drawings of part III: where time goes, what the fast path is worth, races, two graphs."""

from __future__ import annotations

from scripts import Late
from scripts.book.charts import heatmap, rounded, titled
from scripts.book.figures.diagram import drawn
from scripts.book.look import GREY, INK, LOG, PALETTE, bar_axis, colored

alt, pd = Late("altair"), Late("pandas")


LABELS = {  # at the roofline's dots: how a name stands
    "projection": {"align": "right", "dx": -9, "dy": -5},
    "feed-forward": {"align": "right", "dx": -9, "dy": 14},
    "LayerNorm": {"align": "right", "dx": -9, "dy": 9},
    "residual sum": {"align": "right", "dx": -9, "dy": 4},
    "dropout": {"align": "right", "dx": -9, "dy": 4},
}


def roofline_chart(operations: pd.DataFrame, rate: float, bandwidth: float) -> alt.TopLevelMixin:
    """Speed over intensity, under the roofs of `rate` FLOP/s and `bandwidth` bytes/s.

    A row for each operation; columns: flops, bytes, roof, seconds and fused seconds (or NaN).
    """
    forms = {"seconds": "chapters 1 to 6", "fused seconds": "one call, or oneDNN's product"}
    dots = operations.rename_axis("operation").reset_index()
    dots = dots.melt(["operation", "flops", "bytes", "roof"], list(forms), "form", "time").dropna()
    dots["form"] = dots["form"].map(forms)
    dots["intensity"], dots["speed"] = dots["flops"] / dots["bytes"], dots["flops"] / dots["time"]
    dots["share"], forms = dots["roof"] / dots["time"], list(forms.values())
    dots = dots.drop(columns=["flops", "bytes", "roof", "time"])
    ridge, ends = rate / bandwidth, [0.02, 300.0]
    low, high = dots["speed"].min() / 3e9, rate * 5 / 1e9
    x = alt.X("intensity:Q", title="arithmetic intensity: FLOPs per byte")
    x = x.scale(domain=ends, **LOG).axis(values=[0.1, 1, 10, 100], format="~g", grid=False)
    y = alt.Y("speed:Q", title="speed: billion FLOP/s").scale(domain=[low, high], **LOG)
    y = y.axis(values=[10.0**power for power in range(-2, 6)], format="~g", grid=False)
    regions = {
        "intensity": [ends[0], ridge],
        "region": ["lower limit: memory", "lower limit: arithmetic"],
    }
    regions = pd.DataFrame(regions | {"speed": high})
    roof = pd.DataFrame({"intensity": [ends[0], ridge, ends[1]]})
    roof["speed"] = (roof["intensity"] * bandwidth).clip(upper=rate) / 1e9
    peak = roof[1:2].assign(text=f"ridge: {ridge:.0f} FLOPs a byte")
    shown = rounded(dots.assign(speed=dots["speed"] / 1e9))
    look = {"sort": forms, "title": None}
    shape = alt.Shape("form:N", **look).scale(domain=forms, range=["circle", "diamond"])
    color = colored("form", dict(zip(forms, PALETTE, strict=False)), **look)
    sides = alt.Chart(rounded(regions)).mark_text(align="left", dx=6, dy=12, color=GREY)
    layers = [
        sides.encode(x, y, text="region:N"),
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
    names = alt.Chart(shown[shown["form"] == forms[0]][["operation", "intensity", "speed"]])
    for name in shown["operation"].unique():
        place = LABELS.get(name, {"align": "left", "dx": 9, "dy": 4})
        label = names.mark_text(baseline="middle", **place).encode(x, y, text="operation:N")
        layers.append(label.transform_filter(alt.datum.operation == name))
    slow = shown[(shown["form"] == forms[0]) & (shown["share"] < 0.2)]["operation"]
    return titled(
        alt.layer(*layers).properties(width=560, height=380),
        f"Under a fifth of the roof: {', '.join(slow) or 'nothing'}",
        "Operations of our step (forward, and Adam), each alone. A line joins two ways to the same "
        "result. Grey: the roof.",
    )


def bandwidth_chart(sweep: pd.DataFrame, bandwidth: float) -> alt.TopLevelMixin:
    """Bytes a second over a result's size: columns result (bytes), in place and two others."""
    shown = sweep.melt("result", var_name="operation", value_name="bandwidth")
    shown["result"], shown["bandwidth"] = shown["result"] / 2**20, shown["bandwidth"] / 1e9
    x = alt.X("result:Q", title="size of the result: MiB")
    x = x.scale(base=2, **LOG).axis(values=[1, 4, 16, 64], grid=False)
    y = alt.Y("bandwidth:Q", title="billion bytes a second")
    color = colored("operation", dict(zip(shown["operation"].unique(), PALETTE, strict=False)))
    curves = alt.Chart(rounded(shown)).mark_line(point={"filled": True, "size": 40})
    roof = alt.Chart(rounded(pd.DataFrame({"bandwidth": [bandwidth / 1e9]})))
    cliff = alt.Chart(pd.DataFrame({"result": [32]}))  # from here on glibc keeps no freed memory
    layers = [
        roof.mark_rule(color=GREY, strokeDash=[5, 4]).encode(y),
        roof.mark_text(align="left", dx=6, dy=-8, color=GREY, text="memory").encode(
            y, x=alt.value(0)
        ),
        cliff.mark_rule(color=GREY, strokeWidth=1).encode(x),
        cliff.mark_text(
            align="right", dx=-6, dy=8, color=GREY, text="above 32 MiB: given back"
        ).encode(x, y=alt.value(0)),
        curves.encode(x, y, color.title(None)),
    ]
    in_place, new = sweep["in place"] / 1e9, sweep["new result"] / 1e9
    return titled(
        alt.layer(*layers).properties(width=440, height=280),
        f"A sum moves up to {in_place.max():.0f} GB/s in the cache, "
        f"{in_place.iloc[-1]:.0f} in memory, {new.iloc[-1]:.0f} into new memory",
        "The same sum: in place, into a tensor that is kept, or into a new one each time. Dashed: "
        "the roofline's bandwidth. Above 32 MiB glibc gives a freed tensor's memory back.",
    )


def beyond_chart(operations: pd.DataFrame, floor: float, step: float) -> alt.TopLevelMixin:
    """From a step's `floor` to its measured seconds: what each operation takes `beyond` its own."""
    linears = ["projection", "feed-forward", "logits"]
    beyond = operations["beyond"].sort_values(ascending=False)
    beyond["not in the list"] = step - floor - beyond.sum()
    rows = pd.concat([pd.Series({"floor": floor}), beyond]).rename_axis("operation")
    rows = rows.reset_index(name="seconds")
    rows["end"] = rows["seconds"].cumsum()
    rows["start"] = rows["end"] - rows["seconds"]
    rows.loc[len(rows)] = {"operation": "the step", "seconds": step, "start": 0.0, "end": step}
    rows["place"] = rows[["start", "end"]].max(axis=1)  # a part may take less than its floor
    colors = dict.fromkeys(rows["operation"], PALETTE[0]) | dict.fromkeys(linears, PALETTE[2])
    colors |= {"floor": PALETTE[1], "not in the list": GREY, "the step": INK}
    x = alt.X("start:Q", title="seconds").axis(grid=False, tickCount=5)
    x = x.scale(domain=[0, 1.1 * step], nice=False)
    y = bar_axis("operation", list(rows["operation"]))
    bars = alt.Chart(rounded(rows, 3))
    layers = [
        bars.mark_bar(height=16).encode(
            x, y, x2="end:Q", color=colored("operation", colors, legend=None)
        ),
        bars.mark_text(align="left", dx=7).encode(
            alt.X("place:Q"), y, text=alt.Text("seconds:Q", format=".2f")
        ),
    ]
    return titled(
        alt.layer(*layers).properties(width=430, height=alt.Step(25)),
        f"A step takes {step / floor:.1f} floors; "
        f"{beyond[linears].sum() / (step - floor):.0%} of the excess is linear maps",
        "Green (linear maps) and blue: what each operation takes beyond its own floor, measured "
        "alone, forward and backward, as often as it occurs. Black: the whole step, measured. "
        "Grey: the rest.",
    )


GROWTH_AXES = {
    "length": "length (2,048 tokens a side)",
    "width": "d_model (d_ff = 4 × d_model)",
}


def growth_chart(points: list[dict]) -> alt.TopLevelMixin:
    """Time and FLOPs of the textbook's step along length and width: multiples of the smallest.

    `points` are the record's: path, axis, value, seconds and flops.
    """
    names, costs = {"seconds": "time", "flops": "FLOPs"}, ["time", "FLOPs"]
    points = [p for p in points if p["path"] == "textbook" and p["axis"] in GROWTH_AXES]
    points = pd.DataFrame(points).rename(columns=names)
    by_axis = points.groupby("axis")
    points[costs] /= by_axis[costs].transform("first")
    y = alt.Y("times:Q", title="times as much").axis(values=[1, 2, 4, 8, 16, 32, 64])
    y = y.scale(domain=[0.9, 70], base=2, **LOG)
    color = colored("cost", dict(zip(costs, PALETTE, strict=False)), sort=costs, title=None)
    panels = []
    for axis, title in GROWTH_AXES.items():
        along = points[points["axis"] == axis]
        values = along["value"].tolist()
        x = alt.X("value:Q", title=title).axis(values=values, grid=False, format=",")
        x = x.scale(domain=[values[0], values[-1]], padding=12, base=2, **LOG)
        steady = pd.DataFrame({"value": [values[0], values[-1]]})
        steady["times"] = steady["value"] / values[0]
        grey = alt.Chart(rounded(steady)).mark_line(color=GREY, strokeWidth=1.5, strokeDash=[5, 4])
        lines = alt.Chart(rounded(along.melt(["value"], costs, "cost", "times")))
        lines = lines.mark_line(point={"filled": True, "size": 40})
        layers = grey.encode(x, y) + lines.encode(x, y, color)
        panels.append(layers.properties(width=230, height=200))
    times, slower = by_axis["value"].last() / by_axis["value"].first(), by_axis["time"].last()
    assert slower["width"] > slower["length"]
    return titled(
        alt.hconcat(*panels),
        f"{times['length']:.0f} times the length takes {slower['length']:.1f} times the time, "
        f"{times['width']:.0f} times the width {slower['width']:.0f} times",
        "A step's costs, as multiples of those at the smallest value. Dashed: what would grow in "
        "proportion.",
    )


def two_graphs() -> alt.TopLevelMixin:
    """The encoder's graph, run once, and the step's graph, which the host runs again and again."""
    return titled(
        drawn("two_graphs").chart(),
        "Two graphs, and a loop that belongs to neither",
        "Read upwards. Three things go round: the token that the host chooses, the position that "
        "it counts, and past, which is the previous step's present.",
    )


def equal_chart(equal: list[list[bool]]) -> alt.TopLevelMixin:
    """Where their step equals ours, by tokens read, T, and position; a translation's is framed."""
    steps = pd.DataFrame({"row": range(len(equal)), "column": range(len(equal))})
    frames = alt.Chart(steps).mark_rect(fillOpacity=0, stroke=PALETTE[1], strokeWidth=3)
    titles = {"row_title": "earlier tokens, T", "column_title": "position asked for"}
    square = heatmap(equal, **titles, words=("equal", "different"))
    frames = frames.encode(
        alt.X("column:O", title=titles["column_title"]), alt.Y("row:O", title=titles["row_title"])
    )
    return titled(
        square + frames,
        "Their graph is right where the position is 2, however many tokens came before",
        "Random inputs: 3 rows, 5 source tokens. Our graph is equal everywhere. "
        "Framed: what a translation asks for, position T.",
    )
