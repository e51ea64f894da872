"""What nvidia-smi knows."""

import os
import subprocess
import tempfile


def names():
    """A line for each GPU that workers see."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20,
                              check=False)
    except OSError:
        return []
    found = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]
    visible = [index for index in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if index.isdigit()]
    return [found[int(index)] for index in visible if int(index) < len(found)] if visible else found


class Watch:
    """Runs nvidia-smi for QUERY's columns, integers or decimal numbers after the GPU's index, once before
    the `with` block begins and then every PERIOD_MS while it runs; note() gets each line at the end."""

    QUERY, PERIOD_MS = "", 0

    def __enter__(self):
        command = ["nvidia-smi", f"--query-gpu=index,{self.QUERY}", "--format=csv,noheader,nounits"]
        self.file = tempfile.TemporaryFile("w+")
        subprocess.run(command, stdout=self.file, stderr=subprocess.DEVNULL, timeout=20, check=False)
        self.process = subprocess.Popen([*command, "-lms", str(self.PERIOD_MS)], stdout=self.file,
                                        stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.file.seek(0)
        for line in self.file:
            try:
                index, *values = (float(word) for word in line.split(","))
            except ValueError:
                continue  # cut off in the middle
            if len(values) == len(self.QUERY.split(",")) and line.endswith("\n"):
                self.note(int(index), *values)
        self.file.close()

    def note(self, index, *values):
        raise NotImplementedError


class MemoryWatch(Watch):
    """First and peak bytes in use by GPU index."""

    QUERY, PERIOD_MS = "memory.used", 50

    def __init__(self):
        self.first, self.peak = {}, {}

    def note(self, index, *values):
        used = int(values[0]) << 20
        self.first.setdefault(index, used)
        self.peak[index] = max(self.peak.get(index, 0), used)


class ClockWatch(Watch):
    """{GPU index: (MHz, watts)} where a GPU drew most, which is in the midst of its longest work. Fair
    only for passes much longer than the period."""

    QUERY, PERIOD_MS = "clocks.sm,power.draw", 20

    def __init__(self):
        self.at_peak = {}

    def note(self, index, *values):
        clock, power = values
        if power > self.at_peak.get(index, (0, -1))[1]:
            self.at_peak[index] = (clock, power)
