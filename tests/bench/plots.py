#!/usr/bin/env python3
"""Draws the plots of docs/benchmarks.md from the tables in tests/bench/results/.

  python3 -m venv .cache/plots && .cache/plots/bin/pip install matplotlib
  .cache/plots/bin/python tests/bench/plots.py [--out=docs/images]

Writes benchmark_kernels.svg, benchmark_rings.svg, benchmark_transports.svg and benchmark_memory.svg. The images
have a light and a dark color scheme; a browser applies the one that the reader prefers. Equal tables and an equal
version of matplotlib give equal files.
"""
import argparse
import csv
import io
import pathlib

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/bench/results"

# Light color: dark color. Every color of the figures that is not a series is one of these.
TEXT, MUTED, GRID, PAGE = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
DARK = {TEXT: "#e6edf3", MUTED: "#9198a1", GRID: "#30363d", PAGE: "#0d1117"}
# Series. Readable on both pages, and distinct with deficient color vision.
BLUE, ORANGE, GREEN, PURPLE, GRAY = "#2f81f7", "#e0823d", "#3a9d5d", "#a371f7", "#8c959f"

plt.rcParams.update({
    "svg.hashsalt": "ringattn", "font.family": "DejaVu Sans", "font.size": 10,
    "text.color": TEXT, "axes.labelcolor": MUTED, "axes.edgecolor": GRID, "axes.titlecolor": TEXT,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none",
    "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.major.size": 0, "ytick.major.size": 0,
    "legend.frameon": False, "legend.fontsize": 10, "figure.facecolor": PAGE, "hatch.linewidth": 1.2,
})


def table(name, **match):
    """The rows of a table whose columns have the given values. Raises if there is none."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if all(row[key] == str(value) for key, value in match.items())]
    if not rows:
        raise ValueError(f"{name}.csv has no row with {match}")
    return rows


def save(figure, path):
    """Writes an SVG whose page, text and grid follow the reader's color scheme."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    rules = "".join(f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
                    for light, dark in DARK.items() for kind in ("fill", "stroke"))
    head, tail = buffer.getvalue().split("<defs>", 1)
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    path.write_text(f"{head}{style}\n <defs>{tail}", encoding="utf-8")


def kernels(path):
    """Hopper kernels at 16K tokens, causal, next to FA4, FA3 and cuDNN."""
    dims = (64, 96, 128, 192, 256)
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 4.1), sharey=True, gridspec_kw={"width_ratios": (4, 3)})
    for axes, direction in zip(panels, ("forward", "backward")):
        rows = {int(row["head_dim"]): row for row in
                table("kernels_hopper", direction=direction, mask="causal", tokens=16384)}
        series = [("ringattn", BLUE, {d: float(rows[d]["ringattn_tflops"]) for d in dims}),
                  ("FlashAttention-4", ORANGE, {d: float(rows[d]["fa4_tflops"]) for d in dims})]
        if direction == "forward":
            fa3 = {int(row["head_dim"]): row for row in table("kernels_fa3", mask="causal", tokens=16384)}
            series.append(("FlashAttention-3 (separate run)", PURPLE, {d: float(fa3[d]["fa3_tflops"]) for d in dims}))
        series.append(("cuDNN", GREEN, {d: float(rows[d]["cudnn_tflops"]) for d in dims}))
        width = 0.84 / len(series)
        for index, (name, color, values) in enumerate(series):
            places = [x + (index - (len(series) - 1) / 2) * width for x in range(len(dims))]
            axes.bar(places, values.values(), width * 0.92, color=color, label=name)
            if name == "ringattn":
                for place, value in zip(places, values.values()):
                    axes.text(place, value + 8, f"{value:.0f}", ha="center", va="bottom", fontsize=8.5)
        axes.set_title(f"{direction}, TFLOP/s")
        axes.set_xticks(range(len(dims)), map(str, dims))
        axes.set_xlabel("head_dim")
        axes.set_ylim(0, 860)
        axes.grid(axis="y")
        axes.spines["left"].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=4)
    figure.tight_layout(rect=(0, 0.08, 1, 1), w_pad=2)
    save(figure, path)


def length(tokens):
    return f"{tokens // 1024}K" if tokens < 1 << 20 else f"{tokens >> 20}M"


def rings(path):
    """Share of one GPU's rate that a ring keeps, and the rate next to ring-flash-attention."""
    figure, (share, rate) = plt.subplots(1, 2, figsize=(9.6, 4.1))
    lines = ((2, "2x H100", BLUE), (4, "4x H200", ORANGE))
    for gpus, device, color in lines:
        for direction, style, marker in (("forward", "-", "o"), ("backward", "--", "s")):
            values = {}
            for row in table("rings", device=device, direction=direction):
                if row["of_one_gpu_equal_work"]:  # the later row of two
                    values[int(row["tokens"]) // gpus] = float(row["of_one_gpu_equal_work"])
            share.plot(values.keys(), values.values(), style, marker=marker, color=color, markersize=5,
                       label=f"{device.replace('x', ' ×')}, {direction}")
    share.axhline(1, color=MUTED, linewidth=1)
    share.text(8192, 1.004, "one GPU", color=MUTED, fontsize=9, va="bottom")
    share.set_xscale("log", base=2)
    share.set_xticks([8192 << i for i in range(5)], [length(8192 << i) for i in range(5)])
    share.minorticks_off()
    share.set_ylim(0.8, 1.02)
    share.set_yticks([0.8, 0.85, 0.9, 0.95, 1.0], ["80%", "85%", "90%", "95%", "100%"])
    share.set_xlabel("tokens per GPU")
    share.set_title("share of one GPU's rate, equal work")
    share.grid(axis="y")
    share.legend(loc="lower right")

    lengths = (131072, 262144, 524288)
    groups = [(gpus, tokens) for gpus in (2, 4) for tokens in lengths]
    found = {(int(row["gpus"]), int(row["tokens"])): row for row in table("rings", direction="forward")
             if row["peer_tflops_per_gpu"]}
    groups = [group for group in groups if group in found]
    for offset, column, color, name in ((-0.2, "tflops_per_gpu", BLUE, "ringattn"),
                                        (0.2, "peer_tflops_per_gpu", GRAY, "ring-flash-attention on FA4")):
        values = [float(found[group][column]) for group in groups]
        rate.bar([i + offset for i in range(len(groups))], values, 0.37, color=color, label=name)
        for i, value in enumerate(values):
            rate.text(i + offset, value + 8, f"{value:.0f}", ha="center", va="bottom", fontsize=8.5)
    rate.set_xticks(range(len(groups)), [f"{length(tokens)}\n{gpus} × H100" for gpus, tokens in groups])
    rate.set_ylim(0, 900)
    rate.set_yticks(range(0, 801, 200))
    rate.set_title("forward, TFLOP/s per GPU")
    rate.grid(axis="y")
    rate.spines["left"].set_visible(False)
    rate.legend(loc="upper left", ncols=2, borderaxespad=0)
    figure.tight_layout(w_pad=3)
    save(figure, path)


def transports(path):
    """Time of a forward call by transport: the ring itself, and everything else."""
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 2.9))
    cases = ((panels[0], "64K tokens, one H100", 65536, "1x H100", ("CUDA memory", "host memory", "direct", "relay")),
             (panels[1], "256K tokens, two H200", 262144, "2x H200", ("host memory", "direct", "relay")))
    for axes, title, tokens, device, names in cases:
        rows = {row["transport"]: row for row in
                table("calls_by_transport", tokens=tokens, device=device, **{"pass": "forward"})}
        # Where a call did not report its ring time, that of the fastest transport.
        ring = float(rows[names[0]]["ring_seconds"])
        longest = max(float(rows[name]["call_seconds"]) for name in names)
        for place, name in enumerate(names):
            call = float(rows[name]["call_seconds"])
            computing = float(rows[name]["ring_seconds"] or ring)
            axes.barh(place, computing, 0.62, color=BLUE, label="computation" if place == 0 else None)
            axes.barh(place, call - computing, 0.62, left=computing, color=ORANGE,
                      label="transfers and everything else" if place == 0 else None)
            text = f"{call * 1e3:.0f} ms" if call < 1 else f"{call:.2f} s"
            axes.text(call + 0.015 * longest, place, text, va="center", fontsize=9)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", labelcolor=TEXT)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.16 * longest)
        axes.set_title(title)
        axes.set_xticks([])
        axes.spines[["left", "bottom"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2)
    figure.tight_layout(rect=(0, 0.1, 1, 1), w_pad=3)
    save(figure, path)


def memory(path):
    """Memory of the busiest worker by ring size: the plan's figure as a line, measurements as points."""
    colors = {"ring": BLUE, "pass_q": ORANGE, "all_gather, heads_per_step 1": GREEN, "all_gather": PURPLE,
              "replicated_q": GRAY}
    rows = table("memory_schedules")
    figure, axes = plt.subplots(figsize=(8.4, 3.9))
    ends = []
    for schedule, color in colors.items():
        own = [row for row in rows if row["schedule"] == schedule]
        sizes = [int(row["world_size"]) for row in own]
        plan = [float(row["predicted_kv_mb"]) + float(row["predicted_q_mb"]) for row in own]
        axes.plot(sizes, plan, "-", color=color, linewidth=1.8)
        measured = [(int(row["world_size"]), float(row["measured_mb"])) for row in own if row["measured_mb"]]
        axes.plot(*zip(*measured), "o", color=color, markersize=6, clip_on=False, zorder=3)
        ends.append([plan[-1], schedule, color])
    ends.sort()
    for below, above in zip(ends, ends[1:]):  # labels keep a distance
        above.append(max(above[0], (below[3] if len(below) > 3 else below[0]) + 16))
    for end in ends:
        axes.text(8.5, end[3] if len(end) > 3 else end[0], end[1], color=end[2], va="center").set_in_layout(False)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.minorticks_off()
    axes.set_xlim(0.93, 8)
    axes.set_ylim(0, 290)
    axes.set_xlabel("workers in the ring")
    axes.set_title("MB per worker; lines: plan, points: measured")
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    figure.tight_layout(rect=(0, 0, 0.74, 1))
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs/images")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("kernels", kernels), ("rings", rings), ("transports", transports), ("memory", memory)):
        draw(out / f"benchmark_{name}.svg")
        print(out / f"benchmark_{name}.svg")


if __name__ == "__main__":
    main()
