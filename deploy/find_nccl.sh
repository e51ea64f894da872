#!/usr/bin/env bash
# Prints the path of a libnccl.so.2 on this machine, for `export RINGATTN_NCCL=$(./deploy/find_nccl.sh)`.
# Prints nothing if the loader's path has one, which workers find; exits 1 if there is none.
# Looks at the loader's cache, LD_LIBRARY_PATH, .deps/cuda (deploy/install_cuda.sh) and the package
# nvidia-nccl of the python3 in PATH, which PyTorch brings along.
set -uo pipefail
cd "$(dirname "$0")/.."
source deploy/lib_path.sh

IFS=: read -ra folders <<<"${LD_LIBRARY_PATH:-}"
for folder in "${folders[@]}"; do
  [[ -n $folder && -e $folder/libnccl.so.2 ]] && exit 0
done
[[ -z $(library_path libnccl.so.2) ]] || exit 0

for library in .deps/cuda/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2; do
  [[ -e $library ]] && { realpath "$library"; exit 0; }
done
python3 - 2>/dev/null <<'END'
import importlib.util
import pathlib
import sys

spec = importlib.util.find_spec("nvidia.nccl")
for folder in (spec.submodule_search_locations or []) if spec else []:
    library = pathlib.Path(folder) / "lib" / "libnccl.so.2"
    if library.exists():
        print(library)
        sys.exit(0)
sys.exit(1)
END
