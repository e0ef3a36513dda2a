"""Draws panels of the dashboard as SVG, from Prometheus' answers."""

import html
import math

# Panels that the picture shows, by title.
SHOWN = [
    "Hit ratio by tier", "Tokens", "Host memory", "Disk traffic", "Measured bandwidth", "Chunks evicted",
    "Gets", "Batches of workers, p99", "Batches in flight",
]
COLOURS = ["#2f7ed8", "#e67e22", "#27ae60", "#8e44ad", "#c0392b", "#16a085", "#7f8c8d", "#d4ac0d"]
COLUMNS, WIDTH, HEIGHT = 3, 320, 210
BINARY = ["B", "KiB", "MiB", "GiB", "TiB"]
STYLE = """
    .page { fill: #ffffff } .panel { fill: #f7f8fa; stroke: #d5d9e0 } .grid { stroke: #d5d9e0 }
    text { fill: #1f2937 } .note { fill: #4b5563; font-size: 11px }
    @media (prefers-color-scheme: dark) {
      .page { fill: #16181d } .panel { fill: #1f232b; stroke: #39404c } .grid { stroke: #39404c }
      text { fill: #e5e7eb } .note { fill: #b6bcc6 }
    }"""


def draw(dashboard, answers):
    """The picture; `answers` has the series of each panel and query."""
    panels = {panel["title"]: panel for panel in dashboard["panels"]}
    rows = math.ceil(len(SHOWN) / COLUMNS)
    width, height = COLUMNS * WIDTH + 10, rows * HEIGHT + 10
    title = "Panels of the dashboard, drawn from the answers of Prometheus to its queries"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, '
           f'sans-serif" font-size="13" role="img" aria-labelledby="title">', f'  <title id="title">{title}</title>',
           f"  <style>{STYLE}\n  </style>", f'  <rect class="page" width="{width}" height="{height}" rx="10"/>']
    for place, name in enumerate(SHOWN):
        panel = panels[name]
        series = series_of(panel, answers)
        x, y = place % COLUMNS * WIDTH + 10, place // COLUMNS * HEIGHT + 10
        out += plot(panel, series, x, y)
    return "\n".join([*out, "</svg>", ""])


def series_of(panel, answers):
    """Name and points of each series with a number."""
    found = []
    for place, target in enumerate(panel["targets"]):
        for one in answers.get((panel["id"], place), []):
            name = target.get("legendFormat", "")
            for label, value in one["metric"].items():
                name = name.replace("{{%s}}" % label, value)
            points = [(float(at), float(value)) for at, value in one["values"]]
            points = [(at, value) for at, value in points if math.isfinite(value)]
            if points:
                found.append((name, points))
    return found


def plot(panel, series, x, y):
    """One panel."""
    left, right, top, bottom = x + 62, x + WIDTH - 24, y + 30, y + HEIGHT - 66
    out = [f'  <rect class="panel" x="{x}" y="{y}" width="{WIDTH - 10}" height="{HEIGHT - 10}" rx="5"/>',
           f'  <text x="{x + 10}" y="{y + 19}" font-weight="600">{html.escape(panel["title"])}</text>']
    ends = [at for _, points in series for at, _ in points]
    first, last = min(ends, default=0), max(ends, default=1)
    most = max((value for _, points in series for _, value in points), default=0) or 1
    unit = panel["fieldConfig"]["defaults"].get("unit", "")
    for part in (0, 0.5, 1):
        level = bottom - part * (bottom - top)
        out += [f'  <path class="grid" d="M{left} {level:.1f}H{right}"/>',
                f'  <text class="note" text-anchor="end" x="{left - 5}" y="{level + 4:.1f}">'
                f"{shown(most * part, unit)}</text>"]
    for seconds, anchor, place in ((0, "start", left), (last - first, "end", right)):
        out.append(f'  <text class="note" text-anchor="{anchor}" x="{place}" y="{bottom + 14}">{seconds:.0f} s</text>')
    legend_x, legend_y = x + 10, bottom + 30
    for index, (name, points) in enumerate(series[:len(COLOURS)]):
        path = " ".join(f"{left + (at - first) / max(last - first, 1) * (right - left):.1f},"
                        f"{bottom - value / most * (bottom - top):.1f}" for at, value in points)
        out.append(f'  <polyline fill="none" stroke="{COLOURS[index]}" stroke-width="1.6" points="{path}"/>')
        length = 20 + 6.2 * len(name)
        if legend_x + length > x + WIDTH - 10:
            legend_x, legend_y = x + 10, legend_y + 15
        out += [f'  <rect x="{legend_x}" y="{legend_y - 8}" width="9" height="9" fill="{COLOURS[index]}"/>',
                f'  <text class="note" x="{legend_x + 13}" y="{legend_y}">{html.escape(name)}</text>']
        legend_x += length
    return out


def shown(value, unit):
    """A value with its unit."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit in ("bytes", "binBps", "Bps"):
        step = min(int(math.log(value, 1024)), len(BINARY) - 1) if value >= 1 else 0
        return f"{value / 1024**step:.3g} {BINARY[step]}" + ("" if unit == "bytes" else "/s")
    if unit == "s":
        for factor, name in ((1, "s"), (1e3, "ms")):
            if value * factor >= 1:
                return f"{value * factor:.3g} {name}"
        return f"{value * 1e6:.3g} µs"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
