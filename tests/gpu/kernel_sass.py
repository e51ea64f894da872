#!/usr/bin/env python3
"""Prints a table of the attention kernels' machine code: registers, stack, shared memory and the number of
instructions of each kind. Two builds side by side show how a change affects the machine code; no GPU is
needed.

  kernel_sass.py [--cuobjdump=PATH] [--arch=sm_90] FILE [FILE_AFTER]

FILE is anything that holds the kernels: objects, libringattn_kernels.so, cuda_kernels_test. With two,
each kernel has a line that says what differs; exit status 1 if one has other matrix, load or store
instructions, registers, stack or shared memory.

cuobjdump and nvdisasm are in the toolkit or, as wheels, in nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm.
"""
import argparse
import collections
import os
import re
import subprocess
import sys

KINDS = ["HMMA", "HGMMA", "LDSM", "STSM", "LDGSTS", "LDG", "LDS", "STS", "STG", "RED", "UTMAREDG", "FFMA",
         "MUFU", "FMNMX", "LDL", "STL"]
# Properties that two builds of the same kernel must share.
SUBSTANCE = ["registers", "stack", "shared", "HMMA", "HGMMA", "LDSM", "LDGSTS", "STS", "LDG", "FFMA", "MUFU"]
DTYPES = {"__nv_bfloat16": "bf16", "__half": "fp16", "float": "fp32"}


def short_name(name):
    """sm80_bf16_forward_d128 for a kernel's demangled name; None for others than attention."""
    if match := re.search(r"(sm\d+|simt)_(bf16|fp16|fp32)_attention_(forward|backward)_d(\d+\w*)", name):
        return "_".join([match[1], match[2], match[3], "d" + match[4]])
    match = re.search(r"(sm\d+|simt)_attention<.*?(Forward|Backward)\w*<.*?(__nv_bfloat16|__half|float), "
                      r"(?:\(int\))?(\d+)", name)
    if match:
        return "_".join([match[1], DTYPES[match[3]], match[2].lower(), "d" + match[4]])
    match = re.search(r"(attention_\w+|add_fp32|convert_from_fp32)(?:<(\w+)>)?", name)
    return "_".join([DTYPES.get(match[2], ""), match[1]]).strip("_") if match else None


def demangle(names):
    names = sorted(names)
    lines = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True,
                           check=True).stdout.split("\n")
    return dict(zip(names, lines))


def run(cuobjdump, *arguments):
    environment = dict(os.environ)
    environment["PATH"] = os.path.dirname(cuobjdump) + os.pathsep + environment["PATH"]
    return subprocess.run([cuobjdump, *arguments], capture_output=True, text=True, check=True,
                          env=environment).stdout.split("\n")


def read(cuobjdump, arch, path):
    """{short name: Counter of KINDS, total, registers, stack, shared}"""
    found = collections.defaultdict(collections.Counter)
    function = None
    for line in run(cuobjdump, "-sass", "-arch", arch, path):
        if match := re.search(r"Function : (\S+)", line):
            function = match[1]
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", line):
            counter = found[function]
            counter["total"] += match[1] != "NOP"
            if match[1] in KINDS:
                counter[match[1]] += 1
    function = None
    for line in run(cuobjdump, "-res-usage", "-arch", arch, path):
        if match := re.search(r"Function (\S+):", line):
            function = match[1]
        elif match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            found[function].update(registers=int(match[1]), stack=int(match[2]), shared=int(match[3]))
    names = demangle(found)
    return {short: found[name] for name in found if (short := short_name(names[name]))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cuobjdump", default="cuobjdump")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("files", nargs="+", metavar="FILE")
    options = parser.parse_args()
    if len(options.files) > 2:
        parser.error("one file or two")
    builds = [read(options.cuobjdump, options.arch, path) for path in options.files]
    columns = ["registers", "stack", "total"] + [
        kind for kind in KINDS if any(kernel[kind] for build in builds for kernel in build.values())]
    print("kernel".ljust(28), *[column.rjust(9) for column in columns])
    changed = 0
    for name in sorted(set().union(*builds)):
        kernels = [build.get(name) for build in builds]
        if None in kernels:
            print(name.ljust(28), "only in", options.files[kernels[0] is None])
            changed += 1
            continue
        cells = []
        for column in columns:
            values = [str(kernel[column]) for kernel in kernels]
            cells.append((values[0] if len(set(values)) == 1 else ">".join(values)).rjust(9))
        differs = len(kernels) == 2 and any(kernels[0][kind] != kernels[1][kind] for kind in SUBSTANCE)
        changed += differs
        print(name.ljust(28), *cells, "  <--" if differs else "")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
