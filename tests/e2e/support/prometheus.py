"""A real Prometheus that scrapes a cluster, and its HTTP API."""

import json
import math
import pathlib
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

from cluster import free_port, wait_until


class Prometheus:
    """Scrapes `targets` ({job: [host:port]}) twice a second and evaluates `rules` as often."""

    def __init__(self, directory, targets, rules=None):
        directory = pathlib.Path(directory)
        config = directory / "prometheus.yml"
        jobs = [{"job_name": job, "static_configs": [{"targets": addresses}]}
                for job, addresses in targets.items()]
        # JSON is YAML.
        config.write_text(json.dumps({
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms",
                       "evaluation_interval": "500ms"},
            "rule_files": [str(rules)] if rules else [], "scrape_configs": jobs}))
        subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
        self.address = f"127.0.0.1:{free_port()}"
        self.log = open(directory / "prometheus.log", "wb")
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory}/data",
             f"--web.listen-address={self.address}"], stdout=self.log, stderr=self.log)
        self.asked_for = None
        wait_until(self._is_ready, 20, "Prometheus")

    def stop_clock(self):
        """Queries are answered as of now from now on, however slow the tests are."""
        self.asked_for = time.time()

    def _is_ready(self):
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=2) as reply:
                return reply.status == 200
        except OSError:
            return False

    def get(self, path, **parameters):
        """`data` of an API call; AssertionError with Prometheus' words if it fails."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {json.load(error)['error']}") from None

    def query(self, expression):
        """An instant vector as [(labels, value)]."""
        when = {"time": self.asked_for} if self.asked_for else {}
        result = self.get("query", query=expression, **when)
        assert result["resultType"] == "vector", expression
        return [(row["metric"], float(row["value"][1])) for row in result["result"]]

    def has_numbers(self, expression):
        """Whether the query has a result, and each value of it is a number."""
        rows = self.query(expression)
        return bool(rows) and all(math.isfinite(value) for _, value in rows)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.log.close()
