"""`ringattn bench` as a load generator: levels of concurrency and of request rate."""

import csv
import json

import pytest

from command_line import cli
from timing import in_time, timed

PROBLEM = ["--seq_len=64", "--heads=2", "--head_dim=16", "--dtype=fp32"]
QUICK = ["--measurement_interval=150", "--measurement-request-count=3", "--max_trials=4"]


def bench(ring, *flags, code=0, windows=QUICK):
    return cli("bench", f"--server={ring.address}", *PROBLEM, *windows, *flags, code=code)


@timed
def test_levels_of_concurrency(ring, tmp_path):
    table, whole = tmp_path / "load.csv", tmp_path / "load.json"
    done = bench(ring, "--concurrency-range=1:5:2", "--percentile=95", f"--export-csv={table}",
                 f"--export-json={whole}", "--json", "--causal")
    result = json.loads(done.stdout)
    assert result == json.loads(whole.read_text())
    assert result["verified"]["passed"] and result["load"]["mode"] == "concurrency"
    levels = result["load"]["levels"]
    assert [level["concurrency"] for level in levels] == [1, 3, 5]
    for level in levels:
        latency = level["latency_seconds"]
        assert level["succeeded"] >= 3 and not level["failed"] and level["delayed"] == 0
        assert (0 < latency["minimum"] <= latency["p50"] <= latency["p95"] <= latency["p99"]
                <= latency["maximum"])
        assert latency["chosen"] == latency["p95"]
        # Requests in flight follow from rate and latency (Little's law).
        in_flight = level["calls_per_second"]["value"] * latency["average"]
        in_time(in_flight == pytest.approx(level["concurrency"], rel=0.35), level)
        assert level["calls_per_second"]["bound"] > 0
        assert 0 < sum(level["stage_seconds"].values()) <= latency["average"] * 1.05
        assert level["windows"] <= 4
    rows = list(csv.DictReader(table.open()))
    assert [row["Concurrency"] for row in rows] == ["1", "3", "5"]
    assert float(rows[0]["p95 latency"]) == pytest.approx(
        1e6 * levels[0]["latency_seconds"]["p95"], abs=1)


@pytest.mark.parametrize("more", [[], ["--poisson"], ["--request-distribution=poisson"],
                                  ["--request_distribution=constant"]])
@timed
def test_levels_of_rate(ring, more):
    # With independent clients the number in a window varies by its square root: 4 of 20 here.
    done = bench(ring, "--request_rate_range=50:100:50", "--json", "--backward", *more,
                 windows=["--measurement_request_count=20", "--measurement_interval=100",
                          "--stability_percentage=60"])
    load = json.loads(done.stdout)["load"]
    assert load["distribution"] == ("poisson" if "poisson" in str(more) else "constant")
    assert [level["request_rate"] for level in load["levels"]] == [50, 100]
    for level in load["levels"]:
        in_time(level["calls_per_second"]["value"] == pytest.approx(level["request_rate"], rel=0.5),
                level)


@timed
def test_a_rate_that_is_too_high_is_seen_in_the_latency(ring):
    """One call at a time cannot be 5,000 a second: calls begin late, and their latency says so."""
    done = bench(ring, "--request_rate_range=5000", "--max_threads=1", "--json")
    level = json.loads(done.stdout)["load"]["levels"][0]
    assert level["calls_per_second"]["value"] < 5000
    assert level["delayed"] > 0
    in_time(level["latency_seconds"]["p99"] > 5 * (
        level["stage_seconds"]["compute"] + level["stage_seconds"]["queue"]), level)


def test_the_level_above_the_threshold_is_the_last(ring):
    done = bench(ring, "--concurrency_range=1:8", "--latency_threshold=0.001", "--json")
    levels = json.loads(done.stdout)["load"]["levels"]
    assert len(levels) == 1 and not levels[0]["within_threshold"]
    text = bench(ring, "--concurrency_range=1:8", "--latency_threshold=0.001").stdout
    assert "no level has a latency" in text
    text = bench(ring, "--concurrency_range=1:2", "--latency_threshold=60000").stdout
    assert "2 is the last level whose latency (average) is within" in text


def test_failures_are_counted_by_what_they_are(ring):
    done = bench(ring, "--concurrency_range=2", "--deadline=100us", "--json", code=3)
    assert "DEADLINE_EXCEEDED" in done.stderr  # the first call already
    done = bench(ring, "--concurrency_range=2", "--world_size=9", code=3)
    assert "plan.world_size" in done.stderr


@pytest.mark.parametrize("flags, says", [
    (["--concurrency_range=0"], "--concurrency_range"),
    (["--concurrency_range=4:1"], "ends before it starts"),
    (["--concurrency_range=1:2:0.5"], "whole numbers"),
    (["--concurrency_range=1:2001:1000"], "whole numbers up to 1024"),
    (["--request_rate_range=x"], "--request_rate_range"),
    (["--request_rate_range=1:100000"], "levels"),
    (["--concurrency_range=1", "--request_rate_range=1"], "excludes"),
    (["--concurrency_range=1", "--poisson"], "--poisson needs --request_rate_range"),
    (["--concurrency_range=1", "--request_distribution=constant"],
     "--request_distribution needs --request_rate_range"),
    (["--request_rate_range=9", "--request_distribution=even"], "--request_distribution"),
    (["--request_rate_range=9", "--poisson", "--request_distribution=constant"], "excludes"),
    (["--concurrency_range=1", "--trace=x.json"], "--trace"),
    (["--concurrency_range=1", "--percentile=100"], "--percentile"),
    (["--concurrency_range=1", "--stability_percentage=0"], "--stability_percentage"),
])
def test_what_is_wrong_is_said(ring, flags, says):
    assert says in bench(ring, *flags, code=2).stderr


# ------------------------------------------------------------------ --collect_metrics

SCRAPED = ["--measurement_interval=400", "--metrics-interval=50", "--max_trials=3"]


def endpoints(ring, workers=4):
    ports = [ring.ports["metrics"], *(ring.worker_ports(i)["metrics"] for i in range(workers))]
    return [f"http://{port}/metrics" for port in ports]


@timed
def test_metrics_of_the_windows(ring, tmp_path):
    table, whole = tmp_path / "load.csv", tmp_path / "load.json"
    urls = endpoints(ring)
    done = bench(ring, "--concurrency_range=1:2", "--collect-metrics",
                 f"--metrics-url={','.join(urls)}", f"--export_csv={table}", f"--export_json={whole}", "--json", "--schedule=ring",
                 "--world_size=4", windows=SCRAPED)
    load = json.loads(done.stdout)["load"]
    assert load == json.loads(whole.read_text())["load"]
    assert load["metrics"]["interval_seconds"] == 0.05
    described = load["metrics"]["endpoints"]
    assert [one["url"] for one in described] == urls
    assert [one["kind"] for one in described] == ["coordinator"] + 4 * ["worker"]
    assert [one["name"] for one in described] == ["coordinator"] + [f"worker-{i}" for i in range(4)]
    assert sorted(one["rank"] for one in described[1:]) == ["0", "1", "2", "3"]
    assert all(one["device"].startswith("cpu") for one in described[1:])
    flops = tokens = 0
    for level in load["levels"]:
        coordinator, *workers = [one["figures"] for one in level["metrics"]]
        assert len(level["metrics"][0]["windows"]) == min(level["windows"], 3)
        assert all(one["scrapes"] >= 2 and not one["failed_scrapes"]
                   for one in (coordinator, *workers))
        # The coordinator's counts equal the client's, except at the windows' ends and in the
        # scrapes next to them.
        rate = level["calls_per_second"]["value"]
        in_time(coordinator["requests_per_second"] == pytest.approx(rate, rel=0.3), level)
        assert 0 < coordinator["active_requests_average"] <= level["concurrency"] + 1
        moved = coordinator["bytes_up_per_second"] / coordinator["requests_per_second"]
        in_time(moved == pytest.approx(3 * 64 * 2 * 16 * 4, rel=0.2), level)
        assert coordinator["resident_bytes_maximum"] > 1e6
        assert all(0 <= one["compute_fraction"] <= 2 for one in workers)
        flops = sum(one["flops_per_second"] for one in workers)
        tokens = sum(one["tokens_per_second"] for one in workers)
        # Each run computes 64 tokens, of 4 * 64 * 64 * 16 * 2 operations.
        in_time(tokens == pytest.approx(64 * rate, rel=0.3), level)
        in_time(flops == pytest.approx(4 * 64 * 64 * 16 * 2 * rate, rel=0.3), level)
        assert all(one["flops_per_second"] > 0 < one["ring_bytes_per_second"] for one in workers)
        assert all(one["compute_fraction"] > 0 < one["exchange_fraction"] for one in workers)
        assert all(one["device_memory_used_bytes_maximum"] == 0 for one in workers)  # CPUs
    rows = list(csv.DictReader(table.open()))
    assert [row["Concurrency"] for row in rows] == ["1", "2"]
    cell = dict(pair.split(":") for pair in rows[1]["Worker Flops Per Second"].split(";") if pair)
    assert set(cell) == {f"worker-{i}" for i in range(4)}
    assert sum(map(float, cell.values())) == pytest.approx(flops, rel=1e-6)
    assert rows[0]["Coordinator Queue Depth Maximum"].startswith("coordinator:")


def test_metrics_in_the_table(ring):
    text = bench(ring, "--concurrency_range=2", "--collect_metrics",
                 *(f"--metrics_url={url}" for url in endpoints(ring)), windows=SCRAPED).stdout
    assert "metrics of the same windows, scraped every 50 ms" in text
    assert "2  coordinator: queue" in text and "requests/s" in text
    lines = [line for line in text.splitlines() if ", cpu (1 threads): computes " in line]
    assert len(lines) == 4 and all("GFLOP/s" in line for line in lines)
    assert all(any(f"worker-{i}, rank " in line for line in lines) for i in range(4))


def test_metrics_are_found_by_themselves(tmp_path):
    """Port 7702 of --server's host, and the workers that the topology names: here on an address
    of loopback that no other test listens at."""
    from cluster import Cluster

    class Elsewhere(Cluster):
        def start_server(self):
            self.ports = {"listen": "127.0.77.2:0", "control": "127.0.0.1:0",
                          "metrics": "127.0.77.2:7702"}
            super().start_server()

    cluster = Elsewhere(tmp_path, workers=0)
    try:
        cluster.start_worker(0)
        cluster.start_worker(1, ["--metrics_listen", ""])
        cluster.wait_ready(2)
        load = json.loads(bench(cluster, "--concurrency_range=1", "--collect_metrics", "--json",
                                windows=SCRAPED).stdout)["load"]
        assert [one["url"] for one in load["metrics"]["endpoints"]] == endpoints(cluster, 1)
        assert load["metrics"]["workers_without_metrics"] == ["worker-1"]
        assert load["levels"][0]["metrics"][0]["figures"]["requests_per_second"] > 0
        text = bench(cluster, "--concurrency_range=1", "--collect_metrics", windows=SCRAPED).stdout
        assert "worker-1 exports none (--metrics_listen)" in text
    finally:
        cluster.close()


def test_endpoints_that_do_not_answer(ring):
    import http.server
    import threading
    urls = endpoints(ring)

    def fails(*flags):
        done = bench(ring, "--concurrency_range=1", "--collect_metrics", "--json", *flags, code=3,
                     windows=SCRAPED)
        return json.loads(done.stdout)["error"]

    error = fails("--metrics_url=http://127.0.0.1:1/metrics")
    assert error["code"] == "UNAVAILABLE" and "http://127.0.0.1:1/metrics" in error["message"]
    error = fails(f"--metrics_url={urls[0]}x")
    assert error["code"] == "FAILED_PRECONDITION" and "404" in error["message"]

    class Odd(http.server.BaseHTTPRequestHandler):
        asked = 0

        def do_GET(self):
            Odd.asked += 1
            if self.path == "/metrics" and Odd.asked > 1:  # found, and then never again
                self.send_error(503)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"ringattn_queue_depth 0\n" if self.path == "/metrics"
                             else b"process_cpu_seconds_total 5\n")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    other = f"http://127.0.0.1:{server.server_port}"
    try:
        error = fails(f"--metrics_url={other}/other")
        assert error["code"] == "FAILED_PRECONDITION"
        assert "neither a coordinator nor a worker" in error["message"]
        Odd.asked = 0
        error = fails(f"--metrics_url={urls[1]},{other}/metrics")
        assert error["code"] == "UNAVAILABLE" and f"{other}/metrics" in error["message"]
        assert "none came during the level" in error["message"] and "503" in error["message"]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("flags, says", [
    (["--collect_metrics"], "--metrics_interval: 1000 ms are more than half"),
    (["--collect_metrics", "--metrics_interval=80"], "--metrics_interval: 80 ms"),
    (["--collect_metrics", "--metrics_interval=0"], "--metrics_interval"),
    (["--collect_metrics", "--metrics_interval=50", "--metrics_url=127.0.0.1:7702"],
     "--metrics_url"),
    (["--collect_metrics", "--metrics_interval=50", "--metrics_url=https://a/metrics"], "is https"),
    (["--collect_metrics", "--metrics_interval=50", "--metrics_url=http://a,http://a:80/metrics"],
     "given twice"),
    (["--metrics_url=http://a"], "--metrics_url needs --collect_metrics"),
])
def test_what_is_wrong_with_metrics_is_said(ring, flags, says):
    assert says in bench(ring, "--concurrency_range=1", *flags, code=2).stderr
    if flags == ["--collect_metrics"]:
        done = cli("bench", f"--server={ring.address}", *PROBLEM, *flags, code=2)
        assert "--collect_metrics needs --concurrency_range or --request_rate_range" in done.stderr
