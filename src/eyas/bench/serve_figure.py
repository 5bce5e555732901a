"""Plots of a serving benchmark, from its JSON: throughput, ratios, latencies and accept length by load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.bench.plots import COLOURS, GREY, canvas, label, svg

_AXIS = {"closed": "clients at once", "open": "requests a second"}


def serve_figure(content: Mapping[str, Any]) -> bytes:
    """An SVG of `ServeReport.as_dict()`; one kind of load a report."""
    lines = content["lines"]
    sides = list(dict.fromkeys(line["side"] for line in lines))
    baseline = content["baseline"]
    x_name = _AXIS[lines[0]["load"]["kind"]]
    with canvas(2, 3, 11.0, 5.6) as (figure, axes):
        for side, colour in zip(sides, _colours(len(sides)), strict=True):
            mine = [line for line in lines if line["side"] == side]
            at = [line["load"]["level"] for line in mine]
            style = {"color": colour, "marker": "o", "label": side}
            axes[0][0].plot(at, [line["tokens_per_second_median"] for line in mine], **style)
            if side != baseline:
                ratios = axes[0][1].plot(at, [line["ratio_median"] for line in mine], **style)[0]
                least, most = ([pick(line["ratios"]) for line in mine] for pick in (min, max))
                axes[0][1].fill_between(at, least, most, color=ratios.get_color(), alpha=0.2, linewidth=0)
            for place, name in ((axes[0][2], "ttft_ms"), (axes[1][0], "tpot_ms"), (axes[1][1], "e2e_ms")):
                for quantile, dashes in (("p50", "-"), ("p99", ":")):
                    known = [line for line in mine if line[name]]
                    told = style if quantile == "p50" else {**style, "label": None, "marker": None}
                    levels = [line["load"]["level"] for line in known]
                    place.plot(levels, [line[name][quantile] for line in known], linestyle=dashes, **told)
            known = [line for line in mine if line["accept_length"] is not None]
            levels = [line["load"]["level"] for line in known]
            axes[1][2].plot(levels, [line["accept_length"] for line in known], **style)
        axes[0][1].axhline(1.0, color=GREY, linewidth=0.8)
        for side, level in content["crossover"].items():
            if level is not None:
                below = {"xytext": (0, -12), "textcoords": "offset points", "fontsize": 7}
                axes[0][1].annotate(f"{side}: crossover", (level, 1.0), **below)
        titles = (
            ("output tokens/s", "throughput"),
            (f"ratio to {baseline}", "ratio, least to most"),
            ("ms", "TTFT, p50 and p99 (dotted)"),
            ("ms a token", "TPOT, p50 and p99 (dotted)"),
            ("ms", "whole answer, p50 and p99 (dotted)"),
            ("tokens per target pass", "accept length"),
        )
        for place, (y_name, title) in zip((one for row in axes for one in row), titles, strict=True):
            label(place, x_name, y_name, title)
            place.set_xscale("log", base=2)
            place.xaxis.set_major_formatter("{x:g}")
        for place in (axes[0][2], axes[1][0], axes[1][1]):
            place.set_yscale("log")
        axes[0][0].legend(fontsize=7)
        return svg(figure)


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]
