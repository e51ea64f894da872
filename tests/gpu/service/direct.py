"""Calls over direct streams: tensors pass between the client and the workers over TCP, compared with the relay
in the same run."""

import wire
from inputs import Shape

# Beside the relay's call.
RELAY_TO_DIRECT = 4
LISTEN = "--worker_flag=--client_data_listen=127.0.0.1:0"
# Timed calls of each pass, and of the relay for comparison.
RUNS = {"64k": (3, 2), "256k": (3, 2), "1m": (2, 1)}


def part(session, length):
    def run(result):
        ring = session.ring
        ring.down()
        ring.up_flags = [LISTEN]
        try:
            ring.ensure()
            shape = Shape(**session.profile["shape"], seq_len=session.profile["lengths"][length])
            result["direct"] = []
            result["goals"] = []
            for command in ("forward", "backward"):
                runs, relay_runs = RUNS[length]
                line = wire.bench(session, shape, command, f"--runs={runs}", "--transport=direct",
                                  "--staging_limit=64GiB", "--deadline=120s", transport="direct")
                relay = wire.bench(session, shape, command, f"--runs={relay_runs}", "--transport=relay",
                                   "--deadline=120s")
                line["relay_seconds"] = relay["call_seconds"]
                line["relay_payload_bytes_per_second"] = relay["payload_bytes_per_second"]
                rate = line["payload_bytes_per_second"] / relay["payload_bytes_per_second"]
                result["direct"].append({"pass": command, **line})
                result["goals"].append({
                    "what": f"{command} of {shape.seq_len} tokens over direct streams compared with the relay's rate",
                    "goal": RELAY_TO_DIRECT, "value": round(rate, 3), "met": rate >= RELAY_TO_DIRECT})
        finally:
            ring.down()
            ring.up_flags = []
    return run
