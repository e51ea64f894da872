#!/usr/bin/env python3
"""Rules that the C++ sources keep and no compiler checks. Prints what breaks one, by line.

  tests/lib/source_rules.py [ROOT]     exit status 1 if a rule is broken or nothing was looked at
"""
import pathlib
import re
import sys

FOLDERS = ("client", "common", "server", "tests", "worker")
SUFFIXES = {".cc", ".h", ".cu", ".cuh"}

# (rule, what breaks it, files that may). A path is relative to the root.
RULES = (
    ("credentials are made in common/security/credentials.cc alone",
     re.compile(r"Insecure|\b(?:grpc::\w*::)*(?:Ssl|Tls|Local|Alts|GoogleDefault)"
                r"(?:Server|Channel)?Credentials\s*\("),
     re.compile(r"common/security/\w+\.(?:cc|h)")),
    ("secrets are compared by common/security/secret.h alone",
     re.compile(r"CRYPTO_memcmp|timing_?safe_?\w*memcmp|\bmemcmp\s*\([^)]*secret"
                r"|\bsecret_?\s*[!=]=|[!=]=\s*(?:\w+(?:\.|->))*secret_?\b(?!\s*[.(])"),
     re.compile(r"common/security/\w+\.(?:cc|h)|.*_test\.cc|.*/testing/.*|.*test_support\.(?:cc|h)")),
    ("devices and transports are named by worker/backend.cc and cuda_backend.cc alone",
     re.compile(r'#include "worker/(?:comm/(?:tcp|wire|nccl|peer|mixed|single_rank)/'
                r'|device/(?:cpu/cpu_device|cuda/cuda_device)\.h)'),
     re.compile(r"worker/(?:cuda_)?backend\.cc|worker/(?:comm|device|testing)/.*|tests/.*"
                r"|.*_test\.cc")),
    # gRPC converts a deadline that is passed to it at once, so `absl::Now() + timeout` is allowed there.
    ("intervals are measured by MonotonicNow(), because the wall clock may be set",
     re.compile(r"(?:[-<>=]|\breturn)\s*absl::Now\(\)|absl::Now\(\)\s*(?:-(?!\s*absl::UnixEpoch)|[<>])"),
     re.compile(r"common/base/.*|server/edge/call/request_call_end\.cc|worker/comm/contract/.*|tests/.*"
                r"|.*/testing/.*|.*_test\.cc|.*test_\w+\.h|.*/fake_\w+\.h")),
)


def sources(root):
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


def violations(root):
    """Lines "path:line: rule" and how many files were read."""
    found, files = [], 0
    for path in sources(root):
        files += 1
        name = path.relative_to(root).as_posix()
        rules = [(rule, broken) for rule, broken, allowed in RULES if not allowed.fullmatch(name)]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            code = line.split("//", 1)[0]
            found += [f"{name}:{number}: {rule}" for rule, broken in rules if broken.search(code)]
    return found, files


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
    if root.is_file():
        root = root.parents[2]
    found, files = violations(root)
    print("\n".join(found) or f"{files} files keep {len(RULES)} rules")
    return 1 if found or files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
