"""End to end over RPC: a call's time compared with the ring's and with the wire's bound, and several
requests in flight, whose uploads, passes and downloads should overlap."""

import filecmp
import statistics
import threading
import time

from calls import call, figures, plan_flags, verify
from harness import check
from inputs import Shape
from session import CAUSAL

STAGES = ("upload", "compute", "download")


def bench(session, shape, command, *options, transport="relay", plan=None):
    """`ringattn bench` of a causal request, by the ring: verified, then the median call. Makes its inputs
    in memory; its backward pass gets out and lse from the client. `plan`: flags; None: a ring of all."""
    report = session.harness.run_json([
        session.ring.cli, "bench", f"--server={session.ring.address}", "--json", *CAUSAL,
        f"--seq_len={shape.seq_len}", f"--heads={shape.heads}", f"--kv_heads={shape.kv_heads}",
        f"--head_dim={shape.head_dim}", f"--dtype={shape.dtype}", "--rows=8",
        *(plan or plan_flags(session.workers, "zigzag")), *(["--backward"] if command == "backward" else []),
        *([] if any(o.startswith("--deadline") for o in options) else ["--deadline=60s"]),
        *([] if any(o.startswith("--transport") for o in options) else ["--transport=relay"]),
        *options])
    check(report["verified"]["passed"], f"{command}: {report['verified']}")
    last = report["last_run"]
    moved = last["bytes"].get(transport)
    check(moved, f"the tensors did not travel by {transport}: {last['bytes']}")
    return {"tokens": shape.seq_len,
            "plan": {key: last["plan"][key] for key in ("world_size", "schedule", "reason")},
            "call_seconds": report["seconds"]["median"],
            "ring_seconds": report["stage_seconds"]["compute"],
            "stage_seconds": report["stage_seconds"],
            # For the last run: the slowest rank's share of the compute stage. The stage lasts from
            # the coordinator's command to begin until the last rank reports its end.
            "rank_seconds": max(rank["compute_seconds"] + rank["ring_wait_seconds"]
                                for rank in last["ranks"]),
            # For the last run.
            "ranks": [{key: rank[key] for key in ("compute_seconds", "ring_wait_seconds")}
                      for rank in last["ranks"]],
            "last_compute_seconds": last["stage_seconds"]["compute"],
            "bytes_up": moved["up"],
            "bytes_down": moved["down"],
            "upload_bytes_per_second": report["upload_bytes_per_second"]["value"],
            "payload_bytes_per_second": report["payload_bytes_per_second"]["value"],
            "loopback_bytes_per_second": report["loopback_bytes_per_second"]}


def end_to_end(session):
    """Compares each pass with plain TCP over loopback in the same run."""
    def run(result):
        session.ring.ensure()
        shape = Shape(**session.profile["shape"], seq_len=session.profile["lengths"]["64k"])
        for command in ("forward", "backward"):
            result[command] = bench(session, shape, command, "--runs=3")
    return run


def in_flight(session):
    """Forward passes from 1, 2 and 4 clients at once: seconds per request, compared with the slowest stage of a
    request that runs alone. All results have the bits of the first, which is verified."""
    def run(result):
        session.ring.ensure()
        wide = Shape(**session.profile["shape"], seq_len=session.profile["lengths"]["64k"])
        long = Shape(**session.profile["fault"])
        if session.workers < 4:  # about as long to compute on 1 as twice as many tokens on 4
            long = long.share(2)
        for name, shape, mask in (("much to move", wide, CAUSAL), ("much to compute", long, [])):
            result[name] = several(session, shape, mask)
    return run


def at_once(clients, serve):
    """Runs serve(number) on a thread for each client; the seconds until all have returned. Fails with
    what any of them fails with."""
    errors = []

    def run(client):
        try:
            serve(client)
        except BaseException as error:  # pylint: disable=broad-except
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in range(clients)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(not errors, f"with {clients} clients: {errors}")
    return time.monotonic() - begin


def several(session, shape, mask, rounds=2):
    harness, ring = session.harness, session.ring
    source = session.view(shape, False)
    options = [*mask, *plan_flags(ring.workers)]
    first = session.output("alone")
    call(harness, ring, "forward", source, first, options)
    verify(harness, ring, source, first, mask, 8)

    reports = []

    def serve(client):
        for _ in range(rounds):
            reports.append(figures(call(harness, ring, "forward", source,
                                        session.output(f"client-{client}"), options)))

    found = {"tokens": shape.seq_len, "dtype": shape.dtype, "clients": []}
    for clients in (1, 2, 4):
        reports.clear()
        seconds = at_once(clients, serve)
        for client in range(clients):
            check(filecmp.cmp(first, session.output(f"client-{client}"), shallow=False),
                  f"with {clients} clients a result has other bits")
        stages = {stage: round(statistics.median(report["stage_seconds"].get(stage, 0.0)
                                                 for report in reports), 4) for stage in STAGES}
        if clients == 1:
            found["slowest_stage"] = max(stages, key=stages.get)
            found["slowest_stage_seconds"] = stages[found["slowest_stage"]]
            found["bytes_up"], found["bytes_down"] = reports[0]["bytes_up"], reports[0]["bytes_down"]
        period = seconds / (clients * rounds)
        found["clients"].append({
            "clients": clients, "seconds_per_request": round(period, 4),
            "of_slowest_stage": round(found["slowest_stage_seconds"] / period, 4),
            "stage_seconds": stages})
    return found
