"""The summary as Markdown. Every table is a pure function of summary["parts"]; parts that did not run have no
rows. Figures to keep go into tests/bench/results/*.csv and, if they are headlines, docs/benchmarks.md."""

PASSES = ("forward", "backward")


def number(value, digits=3):
    """About `digits` significant figures, never an exponent."""
    if value is None:
        return ""
    if isinstance(value, (str, bool)):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    decimals = digits - 1
    while size >= 10 and decimals > 0:
        size /= 10
        decimals -= 1
    while size < 1 and decimals < 6:
        size *= 10
        decimals += 1
    return f"{value:.{decimals}f}"


def ms(seconds):
    return number(None if seconds is None else seconds * 1e3)


def gigabytes(count, digits=4):
    return number(None if count is None else count / 1e9, digits)


def per_second(count, seconds):
    return number(count / seconds / 1e9) if count and seconds else ""


def table(title, columns, rows):
    if not rows:
        return []
    return ["", f"### {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|",
            *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def ring_passes(parts):
    for name, part in parts.items():
        for command in PASSES:
            if "case" in part and command in part:
                yield name, part["case"], command, part[command]


def parts_table(parts):
    return table("Parts", ("part", "result", "seconds", "what failed"), [
        (name, "ok" if part["ok"] else "FAILED", part.get("seconds", ""),
         part.get("error", part.get("skipped", "")).replace("\n", " ").replace("|", "/")[:300])
        for name, part in parts.items()])


def kv_tables(parts):
    part = parts.get("kv", {})
    us = lambda seconds: number(seconds * 1e6)  # noqa: E731
    rows = [(f"{s['programs']} programs on {s['world_size']} workers, {s['transport']}",
             f"{s['results']} results, {s['failed']} failed") for s in part.get("sweeps", [])]
    if "loss" in part:
        rows.append((f"{part['loss']['killed']} killed during decode",
                     f"typed error after {part['loss']['error_seconds']} s, new cache after "
                     f"{part['loss']['new_cache_seconds']} s"))
    if "doorbell" in part:
        rows.append(("doorbell and empty captured launch, us p50 and p99",
                     f"{part['doorbell']['p50']:.1f}, {part['doorbell']['p99']:.1f}"))
    if "beside" in part:
        found = part["beside"]
        rows += [("decode next to requests on all workers: step p50, p99, us",
                  f"{us(found['decode']['seconds_per_output_token']['p50'])}, "
                  f"{us(found['decode']['seconds_per_output_token']['p99'])}"
                  f" while {number(found['decode']['runs_of_requests'])} runs of requests ended"
                  + ("" if found["requests_outlasted_decode"] else " (the requests ended first)")),
                 ("those requests per second, with and without decode",
                  f"{number(found['requests']['calls_per_second'])}, "
                  f"{number(found['requests_alone']['calls_per_second'])}")]
    bound = part.get("doorbell", {}).get("p50")
    waiting = part.get("doorbell", {}).get("waiting", {})

    def overhead(s, kernels):
        """(kernels, step - kernels, its ratio to the doorbell, and to a doorbell that waits as long), where measured."""
        name = f"{s['length']} keys, {s['world_size']} ranks"
        kernel = part.get(kernels, {}).get(name)
        if kernel is None or bound is None:
            return "", "", "", ""
        rest = s["seconds_per_output_token"]["p50"] * 1e6 - kernel
        return number(kernel), number(rest), number(rest / bound), number(rest / waiting[name]) if waiting else ""

    return table("K/V caches", ("check", "result"), rows) + table(
        "Decode steps of one layer and one sequence, microseconds",
        ("workers", "keys", "transport", "steps", "step p50", "step p99", "call p50", "device p50", "round trip p50",
         "kernels in a row", "step - kernels", "/ doorbell", "/ waiting doorbell",
         "kernels after idle", "step - kernels", "/ doorbell", "/ waiting doorbell",
         "GB/s per worker"),
        [(s["world_size"], s["length"], s["transport"], s["steps"], us(s["seconds_per_output_token"]["p50"]),
          us(s["seconds_per_output_token"]["p99"]), us(s["call_seconds"]["p50"]), us(s["device_seconds"]["p50"]),
          us(s["round_trip_seconds"]["p50"]), *overhead(s, "kernels"), *overhead(s, "kernels_after_idle"),
          gigabytes(s["kv_bytes_per_second_and_worker"]))
         for s in part.get("steps", [])])


def checks_table(parts):
    rows = []
    for name, part in parts.items():
        if "up_seconds" in part:
            rows.append((f"{name}: start of the service",
                         f"{part['up_seconds']} s, {len(part['devices'])} workers"))
        if "cases" in part and "failed" in part:
            rows.append((name, f"{part['cases']} cases, {part['failed']} failed"))
        if "worst" in part:
            rows.append((f"{name}: ring, one worker and CPU workers",
                         f"{len(part['cases'])} cases, at most {number(part['worst']['ratio'])} of the "
                         f"bound apart ({part['worst']['where']})"))
        if "deterministic" in part:
            found = part["deterministic"]
            rows.append((f"{name}: {found['runs']} passes each way of {found['tokens']} tokens on {found['rings']} rings, "
                         f"{found['requests_beside']} concurrent requests",
                         f"{found['different_results']} different results"))
        for program in ("cuda_device_test", "peer_ring_test", "nccl_ring_test"):
            if isinstance(part.get(program), dict):
                rows.append((program, f"{part[program]['passed']} passed, failed: "
                                      f"{part[program]['failed'] or 'none'} {part[program]['said']}"))
        if name.startswith("quickstart") and "devices" in part:
            rows.append((name, f"exits {part['exit_code']}, devices {part['devices']}"))
    return table("Checks", ("what", "result"), rows)


def ring_table(parts):
    return table(
        "Rings, TFLOP/s per GPU; times in ms",
        ("case", "tokens", "heads", "pass", "ring", "its kernels", "one GPU", "ring / one GPU",
         "one GPU, equal work", "ring / that",
         "exchange hidden", "balance", "service's time", "slowest rank's kernels",
         "slowest rank's span", "around the ranks", "begin skew", "end skew"),
        [(name, case["tokens"], f"{case['heads']}/{case['kv_heads']}", command,
          number(f["ring_tflops_per_gpu"]), number(f["kernel_tflops_per_gpu"]),
          number(f.get("single", {}).get("kernel_tflops_per_gpu")),
          number(f.get("of_single")),
          number(f.get("single_equal_work", {}).get("kernel_tflops_per_gpu")),
          number(f.get("of_single_equal_work")), number(f["timeline"]["hidden_share"]),
          number(f["balance"]), ms(f["ring_seconds"]), ms(max(f["kernel_seconds"])),
          ms(f["timeline"]["slowest_span_seconds"]),
          ms(f["ring_seconds"] - (f["timeline"]["slowest_span_seconds"] or 0.0)),
          ms(f["timeline"]["begin_skew_seconds"]), ms(f["timeline"]["end_skew_seconds"]))
         for name, case, command, f in ring_passes(parts)])


def clocks_table(parts):
    rows = []
    for name, _, command, f in ring_passes(parts):
        for where, clocks in (("ring", f.get("clocks")), ("one GPU", f.get("single", {}).get("clocks")),
                              ("one GPU, equal work", f.get("single_equal_work", {}).get("clocks"))):
            if clocks:
                rows.append((name, command, where, ", ".join(
                    f"{clock:.0f} ({power:.0f})" for clock, power in clocks.values())))
    return table("Clocks where each GPU drew most power (one GPU's request leaves the others idle)",
                 ("case", "pass", "request", "MHz (watts)"), rows)


def rank_table(parts):
    rows = []
    for name, _, command, f in ring_passes(parts):
        for rank, line in f["timeline"]["ranks"].items():
            rows.append((name, command, rank, ms(f["kernel_seconds"][int(rank)]),
                         ms(f["ring_wait_seconds"][int(rank)]), ms(line["exchange_seconds"]),
                         number(line["hidden_share"]), ms(line.get("begin_seconds")),
                         ms(line.get("first_kernel_seconds")), ms(line.get("span_seconds"))))
    return table("Ranks, times in ms",
                 ("case", "pass", "rank", "kernels", "ring wait", "exchange", "hidden",
                  "begins after the first", "its first kernel after that", "span"), rows)


def end_to_end_table(parts):
    rows = [(name, case["tokens"], f"{case['heads']}/{case['kv_heads']}", command,
             f["client_seconds"], f["ring_seconds"], f["stage_seconds"].get("upload"),
             per_second(f["bytes_up"], f["stage_seconds"].get("upload")),
             f["stage_seconds"].get("download"),
             per_second(f["bytes_down"], f["stage_seconds"].get("download")))
            for name, case, command, f in ring_passes(parts)]
    return table("End to end, seconds (files in and out)",
                 ("case", "tokens", "heads", "pass", "call", "ring", "upload", "GB/s", "download",
                  "GB/s"), rows)


def wire_table(parts):
    rows = []
    for name, part in parts.items():
        for command in PASSES:
            if isinstance(f := part.get(command), dict) and "loopback_bytes_per_second" in f:
                loopback = f["loopback_bytes_per_second"]
                rows.append((
                    name, f["tokens"], command, number(f["call_seconds"]), number(f["ring_seconds"]),
                    gigabytes(f["bytes_up"], 3), gigabytes(f["upload_bytes_per_second"], 3),
                    gigabytes(f["bytes_down"], 3), gigabytes(f["payload_bytes_per_second"], 3),
                    gigabytes(loopback, 3),
                    number(f["ring_seconds"] + (f["bytes_up"] + f["bytes_down"]) / loopback)))
    return table("A call beside the ring and the wire (`ringattn bench`: from memory, medians)",
                 ("part", "tokens", "pass", "call, s", "ring, s", "GB up", "upload GB/s", "GB down",
                  "both ways GB/s", "plain TCP GB/s", "ring + bytes at TCP's rate, s"), rows)


# Seconds of a call outside its ring: from its arrival until every worker has memory for it, both
# transports' copies, and time in no stage; then the time of the ring's stage in which no rank
# computed.
BESIDE_RING = ("queue", "upload", "download", "elsewhere", "words around the ring")


def beside_ring(f):
    return (*(number(f["stage_seconds"].get(stage)) for stage in BESIDE_RING[:-1]),
            number(f["last_compute_seconds"] - f["rank_seconds"]))


def host_memory_table(parts):
    rows = [(name, f["tokens"], f["pass"], number(f["call_seconds"]), number(f["ring_seconds"]),
             gigabytes(f["bytes_up"], 3), gigabytes(f["bytes_down"], 3), *beside_ring(f),
             number(f.get("bound_seconds")), number(f.get("relay_seconds")))
            for name, part in parts.items() for f in part.get("host_memory", ())]
    return table("A call whose tensors lie in host memory, seconds",
                 ("part", "tokens", "pass", "call", "ring", "GB up", "GB down", *BESIDE_RING,
                  "ring + copies at pinned memory's rate", "by the coordinator"), rows)


def packed_table(parts):
    return table(
        "Packed inputs, GB/s of the upload stage", ("part", "heads x dim", "way", "GB up", "apart", "qkv", "of apart"),
        [(name, f"{f['heads']} x {f['head_dim']}", f["way"], gigabytes(f["bytes_up"]),
          gigabytes(f["apart_bytes_per_second"], 3), gigabytes(f["qkv_bytes_per_second"], 3), number(f["of_apart"]))
         for name, part in parts.items() for f in part.get("packed_inputs", ())])


def direct_table(parts):
    rows = [(name, f["tokens"], f["pass"], number(f["call_seconds"]), number(f["ring_seconds"]),
             gigabytes(f["bytes_up"], 3), gigabytes(f["bytes_down"], 3),
             *(number(f["stage_seconds"].get(stage)) for stage in ("upload", "download")),
             gigabytes(f["payload_bytes_per_second"], 3), number(f["relay_seconds"]),
             gigabytes(f["relay_payload_bytes_per_second"], 3))
            for name, part in parts.items() for f in part.get("direct", ())]
    return table("A call whose tensors go straight to the workers, seconds",
                 ("part", "tokens", "pass", "call", "ring", "GB up", "GB down", "upload", "download",
                  "both ways GB/s", "by the coordinator", "its GB/s"), rows)


def cuda_memory_table(parts):
    rows = [(name, f["tokens"], f["pass"], f["memory"], number(f["call_seconds"]),
             number(f["ring_seconds"]), gigabytes(f["bytes_up"], 3), gigabytes(f["bytes_down"], 3),
             *beside_ring(f), number(f.get("bound_seconds")), number(f["host_seconds"]))
            for name, part in parts.items() for f in part.get("cuda_memory", ())]
    return table("A call whose tensors lie in CUDA memory, seconds",
                 ("part", "tokens", "pass", "memory", "call", "ring", "GB up", "GB down", *BESIDE_RING,
                  "ring + copies at the links' rate", "by host memory"), rows)


def residual_table(parts):
    rows = []
    for name, part in parts.items():
        ratios = part.get("time_ratios")
        for way in ("forward", "forward_kept", *(f"backward_{way}" for way in (
                "residual", "residual_host_memory", "stateless", "stateless_with_forward"))) if ratios else ():
            f = part[way]
            rows.append((name, way.replace("_", " "), number(f["client_seconds"]), number(f["ring_seconds"]),
                         gigabytes(f["bytes_up"], 4), gigabytes(f["bytes_down"], 4),
                         *(number(ratios[residual].get(way)) for residual in ratios)))
    return table("A training step's calls, seconds (files in and out)",
                 ("part", "call", "seconds", "ring", "GB up", "GB down", "residual / this",
                  "residual by host memory / this"), rows)


def in_flight_table(parts):
    rows = []
    for name, part in parts.items():
        for case, f in part.items():
            if isinstance(f, dict) and isinstance(f.get("clients"), list):
                for line in f["clients"]:
                    stages = line["stage_seconds"]
                    rows.append((f"{name}, {case}", f["tokens"], f["dtype"], line["clients"],
                                 number(line["seconds_per_request"]),
                                 f"{f['slowest_stage']}, {number(f['slowest_stage_seconds'])}",
                                 number(line["of_slowest_stage"]),
                                 *(number(stages[s]) for s in ("upload", "compute", "download"))))
    return table("Requests in flight, forward, seconds",
                 ("case", "tokens", "type", "clients", "per request", "slowest stage when alone",
                  "of that stage's rate", "upload", "compute", "download"), rows)


def memory_table(parts):
    rows = []
    for name, part in parts.items():
        for row in part.get("rows", []) if name.startswith("memory") else []:
            def cells(key, row=row):
                return ", ".join(gigabytes(value) for value in row[key])
            worst = max((a / p for a, p in zip(row["allocated"], row["predicted"]) if a and p),
                        default=None)
            rows.append((row["ring"], row["pass"], cells("predicted"), cells("allocated"),
                         number(worst, 4), cells("peak"), cells("idle")))
    return table("Memory per GPU, GB",
                 ("ring", "pass", "predicted", "allocated", "worst ratio", "in use at the peak",
                  "before the request"), rows)


def faults_table(parts):
    rows = [(part["signal"], part["command"], part.get("mid_pass"), part.get("error_seconds"),
             " ".join(part.get("error_codes", [])), part.get("ring_seconds"),
             part.get("first_ring_members"), part.get("full_ring_seconds"),
             part.get("replay", {}).get("attempts"), part.get("replay", {}).get("bit_equal"),
             part.get("repeat_bit_equal"))
            for part in parts.values() if "signal" in part]
    return table("A worker lost in the middle of a pass, seconds from the signal",
                 ("signal", "pass", "mid-pass", "typed error", "code", "ring again", "of",
                  "whole ring", "replay's attempts", "replay bit-equal", "repeat bit-equal"), rows)


def peer_table(parts):
    rows, rates = [], []
    for name, part in parts.items():
        if not name.startswith("peer") or "rows" not in part:
            continue
        rows += [(row["tokens"], f"{row['heads']}/{row['kv_heads']}", row["pass"],
                  number(row["tflops_per_gpu"]), ms(row["median_seconds"]),
                  number(row.get("ours_tflops_per_gpu")), number(row.get("ratio")))
                 for row in part["rows"]]
        rates += [(rate["pattern"], gigabytes(rate["bytes"]), gigabytes(rate["bytes_per_second"], 3))
                  for rate in part.get("p2p", [])]
    return (table("Zigzag ring attention on FA2 kernels, TFLOP/s per GPU, medians",
                  ("tokens", "heads", "pass", "peer", "ms", "ours", "ours / peer"), rows)
            + table("NCCL between GPUs", ("pattern", "GB", "GB/s per GPU and way"), rates))


def hosts_table(parts):
    found = [part for name, part in parts.items() if name.split("-")[0] == "hosts"]
    part = {key: {name: value for each in found for name, value in each.get(key, {}).items()}
            for key in ("hops", "layouts", "of_one_host", "exposed")}
    gpus = next((each["gpus"] for each in found if "gpus" in each), [])
    hops = [(name, gigabytes(ring["pair_bytes_per_second"]), number(ring.get("pair_of_one_host")),
             gigabytes(ring["ring_bytes_per_second"]), number(ring.get("ring_of_one_host")))
            for name, ring in part["hops"].items()]
    passes = [(name, *key.split(), ms(figures["ring_seconds"]),
               number(part["of_one_host"].get(f"{name}, {key}")))
              for name, layout in part["layouts"].items()
              for key, figures in layout["passes"].items() if figures]
    moved = [(name, ", ".join(f"{kind} {gigabytes(count)}" for kind, count in layout.get("ring_bytes", {}).items()),
              *(" ".join(gigabytes(rank.get(key, 0)) for rank in layout.get("rates", []))
                for key in ("link_bytes_per_second", "host_link_bytes_per_second",
                            "host_total_bytes_per_second")))
             for name, layout in part["layouts"].items()]
    exposed = [(*key.split(), ms(line["seconds"]), ms(line["simulated"]["seconds"]), ms(line["exposed_seconds"]),
                ms(line["simulated"]["exposed_seconds"]), line["compared"], number(line["ratio"]))
               for key, line in part["exposed"].items()]
    return (table("Exposed exchange between hosts, measured and simulated, ms",
                  ("of the hiding length", "tokens", "pass", "schedule", "pass", "simulated", "exposed", "simulated",
                   "compared", "ratio"), exposed)
            + table(f"A hop inside a host, GB/s each way; GPUs by rank {gpus}",
                  ("ring", "both ways", "of one host", "with a hop between hosts", "of one host"), hops)
            + table("Rings over emulated hosts", ("ring", "tokens", "pass", "schedule", "ms", "rate of one host's"),
                    passes)
            + table("GB between ranks, and GB/s measured while the ring formed, by rank",
                    ("ring", "GB sent by", "inside a host", "to another host", "of all workers of a host"), moved))


def goals_table(parts):
    return table("Goals", ("part", "what", "goal", "value", "met"), [
        (name, goal["what"], goal["goal"], number(goal["value"], 4),
         "yes" if goal["met"] else "**no**")
        for name, part in parts.items() for goal in part.get("goals", [])])


def markdown(summary, brief=False):
    """Returns the summary as Markdown. `brief` leaves out the details that help to locate lost time."""
    parts = summary["parts"]
    environment = parts.get("environment", {})
    lines = [f"## {len(environment.get('gpus', []))} GPUs, {environment.get('workers')} workers, ring "
             f"transport: {environment.get('ring_transport')}"]
    lines += sorted({f"- {name.split(': ', 1)[-1].split(' (')[0]}"
                     for name in environment.get("gpus", [])})
    details = () if brief else (rank_table, end_to_end_table, clocks_table)
    for make in (*details, wire_table, host_memory_table, direct_table, packed_table, cuda_memory_table, residual_table,
                 in_flight_table, memory_table, faults_table, peer_table, hosts_table, ring_table, kv_tables,
                 checks_table, goals_table, parts_table):
        lines += make(parts)
    return "\n".join(lines) + "\n"
