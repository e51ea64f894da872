"""What nvidia-smi knows."""

import subprocess
import tempfile


def names():
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20,
                              check=False)
    except OSError:
        return []
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")]


class MemoryWatch:
    """Samples memory in use while the `with` block runs; first and peak bytes by GPU index."""

    QUERY = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]

    def __init__(self):
        self.first, self.peak = {}, {}

    def __enter__(self):
        self.file = tempfile.TemporaryFile("w+")
        # Once before the block begins, so that `first` is from there.
        subprocess.run(self.QUERY, stdout=self.file, stderr=subprocess.DEVNULL, timeout=20,
                       check=False)
        self.process = subprocess.Popen([*self.QUERY, "-lms", "50"], stdout=self.file,
                                        stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.file.seek(0)
        for line in self.file:
            try:
                index, mebibytes = (int(word) for word in line.split(","))
            except ValueError:
                continue  # cut off in the middle
            used = mebibytes << 20
            self.first.setdefault(index, used)
            self.peak[index] = max(self.peak.get(index, 0), used)
