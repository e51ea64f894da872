"""Where a ring pass's time went, from a timeline (`--trace`)."""

import json

FIRST_RANK_PROCESS = 10  # client/cli/trace.cc


def union(intervals):
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def overlap(interval, merged):
    begin, end = interval
    return sum(max(0.0, min(end, e) - max(begin, b)) for b, e in merged)


def analyse(path):
    """Returns per rank, in seconds: compute, exchange, the share of exchange time during which the
    rank computed, its pass's begin after the first rank's, from there to its first kernel, and its
    span from begin to end. Over all: the hidden share, the slowest rank's span, and how far apart
    the ranks begin and end. Each rank's clock starts at its command to reserve memory, so the
    offsets between ranks are no more precise than those messages' arrivals. None where nothing was
    exchanged."""
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    bars = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] >= FIRST_RANK_PROCESS:
            interval = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            rank = bars.setdefault(event["pid"] - FIRST_RANK_PROCESS, {})
            rank.setdefault(event["cat"], []).append(interval)
    ranks, all_exchange, all_hidden = {}, 0.0, 0.0
    begins, ends = {}, {}
    for number, categories in sorted(bars.items()):
        compute = union(categories.get("compute", []))
        exchange = categories.get("exchange", [])
        total = sum(end - begin for begin, end in exchange)
        hidden = sum(overlap(interval, compute) for interval in exchange)
        all_exchange += total
        all_hidden += hidden
        ranks[number] = {"compute_seconds": sum(e - b for b, e in compute),
                         "exchange_seconds": total,
                         "hidden_share": hidden / total if total > 0 else None}
        if work := [*compute, *exchange]:
            begins[number] = min(begin for begin, _ in work)
            ends[number] = max(end for _, end in work)
            ranks[number]["span_seconds"] = ends[number] - begins[number]
            if compute:
                ranks[number]["first_kernel_seconds"] = compute[0][0] - begins[number]
    for number, begin in begins.items():
        ranks[number]["begin_seconds"] = begin - min(begins.values())
    return {"ranks": ranks,
            "hidden_share": all_hidden / all_exchange if all_exchange > 0 else None,
            "slowest_span_seconds": max(
                (rank["span_seconds"] for rank in ranks.values() if "span_seconds" in rank),
                default=None),
            "begin_skew_seconds": max(begins.values()) - min(begins.values()) if begins else None,
            "end_skew_seconds": max(ends.values()) - min(ends.values()) if ends else None}
