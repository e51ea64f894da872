"""How much of the exchange a timeline (`--trace`) shows hidden behind compute."""

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
    """Per rank, in seconds: compute, exchange, and the share of exchange time during which the
    rank computed; and the share over all ranks. None where nothing was exchanged."""
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    bars = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] >= FIRST_RANK_PROCESS:
            interval = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            rank = bars.setdefault(event["pid"] - FIRST_RANK_PROCESS, {})
            rank.setdefault(event["cat"], []).append(interval)
    ranks, all_exchange, all_hidden = {}, 0.0, 0.0
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
    return {"ranks": ranks,
            "hidden_share": all_hidden / all_exchange if all_exchange > 0 else None}
