"""Parts with time limits, commands with logs, and one summary."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import tempfile
import time
import traceback


# Files that grow from part to part; those of an earlier call must not.
APPENDED = ("programs.log", "environment.txt", "cluster.log", "traces.zip")


class Failure(Exception):
    """A property that a part verifies does not hold."""


class PartTimeout(Exception):
    pass


def check(condition, what):
    if not condition:
        raise Failure(what)


class Harness:
    """Runs parts in order. Each part has a limit of `seconds`, and all together
    `budget_seconds`."""

    def __init__(self, out, budget_seconds):
        self.out = pathlib.Path(out)
        for name in APPENDED:
            (self.out / name).unlink(missing_ok=True)
        self.end = time.monotonic() + budget_seconds
        self.part_end = self.end
        self.log_file = open(self.out / "service.log", "w", encoding="utf-8")
        self.begin = time.monotonic()
        self.summary = {"parts": {}}
        signal.signal(signal.SIGALRM, self._on_alarm)

    @staticmethod
    def _on_alarm(signum, frame):
        raise PartTimeout()

    def log(self, text, aloud=True):
        line = f"[{time.monotonic() - self.begin:7.2f}] {text}"
        if aloud:
            print(line)
        self.log_file.write(line + "\n")
        self.log_file.flush()

    def remaining(self):
        return max(0.1, min(self.end, self.part_end) - time.monotonic())

    def part(self, name, seconds, function):
        """Runs `function(result)`; what it puts into `result` is kept even if it fails."""
        result = {"ok": False}
        self.summary["parts"][name] = result
        limit = min(seconds, self.end - time.monotonic())
        if limit < 1:
            result["error"] = "not run: no time left"
            self.write_summary()
            return False
        self.log(f"==== {name} (at most {limit:.0f} s)")
        begin = time.monotonic()
        self.part_end = begin + limit
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            function(result)
            result["ok"] = True
        except PartTimeout:
            result["error"] = f"not done within {limit:.0f} s"
        except Failure as failure:
            result["error"] = str(failure)
        except Exception:  # pylint: disable=broad-except
            result["error"] = traceback.format_exc(limit=4)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.part_end = self.end
        result["seconds"] = round(time.monotonic() - begin, 2)
        self.log(f"---- {name}: {'ok' if result['ok'] else 'FAILED: ' + result['error']}")
        self.write_summary()
        return result["ok"]

    def write_summary(self):
        temporary = self.out / "summary.tmp"
        temporary.write_text(json.dumps(self.summary, indent=1) + "\n")
        os.replace(temporary, self.out / "summary.json")

    def run(self, command, seconds=None, log_to=None, environment=None, cleans_up=False,
            stderr=subprocess.STDOUT):
        """Returns output and exit code; past its time the command is killed and the part fails. A
        command with cleans_up has `seconds` even if the part's time is up or ends meanwhile."""
        if cleans_up and (left := signal.setitimer(signal.ITIMER_REAL, 0)[0]) > 0:
            try:
                return self.run(command, seconds, log_to, environment, cleans_up, stderr)
            finally:
                signal.setitimer(signal.ITIMER_REAL, left)
        command = [str(word) for word in command]
        limit = seconds if cleans_up else min(seconds or 1e9, self.remaining())
        begin = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr,
                                   stdin=subprocess.DEVNULL, text=True, errors="replace",
                                   start_new_session=True, env=environment)
        killed = False
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            killed = True
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        self.log(f"$ {shlex.join(command)}  -> {process.returncode} "
                 f"in {time.monotonic() - begin:.2f} s", aloud=False)
        if log_to is None:
            self.log_file.write(output)
        else:
            with open(self.out / log_to, "a", encoding="utf-8") as log:
                log.write(f"$ {shlex.join(command)}\n{output}\n")
        if killed:
            raise Failure(f"{pathlib.Path(command[0]).name} not done within {limit:.0f} s: "
                          + output[-400:])
        return process.returncode, output

    def run_ok(self, command, **options):
        code, output = self.run(command, **options)
        check(code == 0, f"{shlex.join(map(str, command))} exits {code}: {output[-800:]}")
        return output

    def run_json(self, command, **options):
        """Returns the command's --json output. Long commands report their progress on stderr every
        ten seconds."""
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            code, output = self.run(command, stderr=errors, **options)
            errors.seek(0)
            said = errors.read()
        self.log_file.write(said)
        check(code == 0, f"{shlex.join(map(str, command))} exits {code}: "
                         f"{output[-800:]}{said[-800:]}")
        try:
            return json.loads(output)
        except ValueError:
            raise Failure(f"{shlex.join(map(str, command[:2]))} printed no JSON: {output[-300:]}") \
                from None
