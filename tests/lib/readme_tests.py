#!/usr/bin/env python3
"""Runs every command of README.md's quick start, in order, and prints one tally line per block.

  tests/lib/readme_tests.py [ROOT]

Blocks fenced as ```sh run in bash, blocks fenced as ```python in .venv/bin/python, all in ROOT. A block that
fails ends the run, because later blocks depend on it. The service is stopped and the files are removed at the
end. Port 7700 must be free.
"""
import pathlib
import re
import subprocess
import sys

BLOCK_SECONDS = 900
FILES = ("in.safetensors", "out.safetensors", "grad.safetensors")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.M | re.S)


def run(language, code, root):
    command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [root / ".venv/bin/python", "-c", code]
    try:
        return subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=BLOCK_SECONDS, check=False)
    except subprocess.TimeoutExpired as expired:
        return subprocess.CompletedProcess(command, 124, str(expired.output or ""))


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]).resolve()
    text = (root / "README.md").read_text(encoding="utf-8")
    blocks = [(match.group(1), match.group(2), text[:match.start()].count("\n") + 1) for match in BLOCK.finditer(text)]
    failed = not blocks
    if not blocks:
        print("fail README: no block to run")
    try:
        for language, code, line in blocks:
            name = f"README.md:{line} ({language})"
            if failed:
                print(f"fail {name}: an earlier block failed")
                continue
            result = run(language, code, root)
            failed = result.returncode != 0
            print(f"fail {name}: exit status {result.returncode}" if failed else f"pass {name}")
            if failed:
                print(result.stdout[-4000:], file=sys.stderr)
    finally:
        subprocess.run(["./deploy/quickstart.sh", "--stop"], cwd=root, stdout=subprocess.DEVNULL, check=False)
        for name in FILES:
            (root / name).unlink(missing_ok=True)
        subprocess.run(["rm", "-rf", ".venv"], cwd=root, check=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
