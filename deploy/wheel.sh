#!/usr/bin/env bash
# Builds the wheel of the Python package `ringattn` for one interpreter. It carries the extension and every shared
# library that this needs, so that pip installs it on a machine with the same or a newer glibc and nothing else.
#
#   ./deploy/wheel.sh [options]
#     --python=PATH      the interpreter to build for, CPython 3.11 to 3.14 with its headers [/usr/bin/python3]
#     --output=DIR       where the wheel is put [.bundle/python]
#
# The last line printed is the wheel's path. $BAZEL names the build command; $BAZEL_FLAGS follow `build`.
set -euo pipefail
cd "$(dirname "$0")/.."

MAX_BYTES=$((30 << 20))
PYBIND11_VERSION=3.1.0
# Part of glibc, or of what every machine with C++ programs has (manylinux allows both): a second libstdc++ in a process
# that also loads PyTorch's would be worse than none.
SYSTEM='^(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libresolv|libutil|libanl|libstdc\+\+|libgcc_s)\.so'

python=/usr/bin/python3
output=.bundle/python
for option in "$@"; do
  case $option in
    --python=*) python=${option#*=} ;;
    --output=*) output=${option#*=} ;;
    *)
      sed -n '2,10s/^# \{0,1\}//p' "$0"
      exit 2
      ;;
  esac
done

fail() { echo "wheel.sh: $*" >&2; exit 1; }
python=$(command -v "$python") || fail "the Python interpreter does not exist"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$python is older than CPython 3.11"
"$python" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
  fail "$python has no headers (python3-dev)"
command -v patchelf >/dev/null || ./deploy/install_deps.sh patchelf

# Debian 12's pybind11 knows CPython up to 3.11, Ubuntu 24.04's up to 3.12. Newer interpreters need a newer one.
if "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
  [[ -e /usr/include/pybind11/pybind11.h ]] || ./deploy/install_deps.sh pybind11-dev
  pybind11=/usr/include
else
  pybind11=$PWD/.deps/pybind11-$PYBIND11_VERSION
  if [[ ! -e $pybind11/include/pybind11/pybind11.h ]]; then
    ./deploy/install_deps.sh python3-pip
    mkdir -p .deps
    fetched=$(mktemp -d "$pybind11.XXXXXX")
    /usr/bin/python3 -m pip install -q --disable-pip-version-check --no-deps --target "$fetched" \
      "pybind11==$PYBIND11_VERSION" >&2 || { rm -rf "$fetched"; fail "pybind11 $PYBIND11_VERSION cannot be had from PyPI"; }
    rm -rf "$pybind11"
    mv -T "$fetched/pybind11" "$pybind11"
    rm -rf "$fetched"
  fi
  pybind11=$pybind11/include
fi

# shellcheck disable=SC2086  # several flags
RINGATTN_PYTHON=$python RINGATTN_PYBIND11=$pybind11 "${BAZEL:-bazel}" build --noshow_progress ${BAZEL_FLAGS:-} //client/python:_core.so
# shellcheck disable=SC2086
built=$(RINGATTN_PYTHON=$python RINGATTN_PYBIND11=$pybind11 "${BAZEL:-bazel}" info ${BAZEL_FLAGS:-} bazel-bin 2>/dev/null)
built+=/client/python/_core.so

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
package=$stage/ringattn
libraries=$stage/ringattn.libs
mkdir "$package" "$libraries"
cp client/python/ringattn/*.py client/python/ringattn/*.pyi client/python/ringattn/py.typed "$package"
extension=$package/_core$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
cp -L "$built" "$extension"
chmod 755 "$extension"

# Each library gets a unique name: the loader reuses a loaded library of the same name, and other packages
# (and Python itself, for TLS) bring other versions of some.
renames=()
while read -r name path; do
  [[ $name =~ $SYSTEM ]] && continue
  [[ $path == /* ]] || fail "$name is not on this machine"
  own=${name%%.so*}-$(sha256sum "$path" | cut -c1-8).so${name#*.so}
  cp -L "$path" "$libraries/$own"
  chmod 755 "$libraries/$own"
  renames+=(--replace-needed "$name" "$own")
done < <(ldd "$extension" | awk '$2 == "=>" { print $1, $3 }' | sort -u)
strip --strip-unneeded "$extension" "$libraries"/*
# A call for each kind of change: patchelf 0.14 mixes up the strings of several.
for library in "$libraries"/*; do
  patchelf --set-soname "$(basename "$library")" "$library"
  patchelf "${renames[@]}" "$library"
  patchelf --force-rpath --set-rpath '$ORIGIN' "$library"
done
patchelf "${renames[@]}" "$extension"
patchelf --force-rpath --set-rpath '$ORIGIN/../ringattn.libs' "$extension"

# The packed module must work on any system: only system libraries from outside, and no environment.
outside=$(env -i ldd "$extension" | awk '$2 == "=>" { print $1, $3 }' |
  while read -r name path; do
    [[ $name =~ $SYSTEM ]] || [[ $(realpath -m "$path") == "$(realpath "$libraries")"/* ]] || echo "$name"
  done)
[[ -z $outside ]] || fail "the extension needs from outside: $(xargs <<<"$outside")"
env -i "$python" -I -c 'import importlib.util as u, sys
spec = u.spec_from_file_location("_core", sys.argv[1]); spec.loader.exec_module(u.module_from_spec(spec))' \
  "$extension" || fail "the extension cannot be imported"

mkdir -p "$output"
wheel=$("$python" client/python/build_backend.py "$stage" "$output")
bytes=$(stat -c %s "$wheel")
((bytes <= MAX_BYTES)) || fail "$((bytes >> 20)) MiB are more than the $((MAX_BYTES >> 20)) MiB allowed"
echo "$wheel"
