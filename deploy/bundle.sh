#!/usr/bin/env bash
# Packs the server, the workers and the command line with every shared library they need into a
# folder that runs wherever it is put, on a machine with the same or a newer glibc and nothing else
# (for GPUs: a driver, and NCCL, see deploy/find_nccl.sh).
#
#   ./deploy/bundle.sh [options]
#     --output=DIR       the folder; replaced if it is a bundle [.bundle/ringattn]
#     --with=LABEL,...   more programs than the three, such as //tests/e2e:service_sweep
#     --with-nccl        libnccl.so.2 too (200 MB)
#     --system-openssl   without OpenSSL, which the target machine must have (3.0 or newer). It may encrypt
#                        faster: Debian 12's does not use the wide AES instructions of recent processors
#     --bin=DIR          take what is built from this bazel-bin; build nothing
#
# Built with CUDA where a toolkit is found (deploy/install_cuda.sh). $BAZEL names the build command;
# $BAZEL_FLAGS follow `build`. Without NCCL the bundle stays under 60 MiB, or this fails.
set -euo pipefail
cd "$(dirname "$0")/.."
source deploy/lib_path.sh

MAX_BYTES=$((60 << 20))
# Part of glibc or of the driver: the target machine's own must be used.
SYSTEM='^(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libresolv|libutil|libanl|libcuda|libnvidia-.*)\.so'

output=.bundle/ringattn
labels=(//server:ringattn-server //worker:ringattn-worker //client:ringattn)
bin=bazel-bin
build=true
with_nccl=false
openssl=bundled
for option in "$@"; do
  case $option in
    --output=*) output=${option#*=} ;;
    --with=*) IFS=, read -ra more <<<"${option#*=}" && labels+=("${more[@]}") ;;
    --with-nccl) with_nccl=true ;;
    --system-openssl) openssl="the target machine's, 3.0 or newer" && SYSTEM+='|^lib(ssl|crypto)\.so\.3$' ;;
    --bin=*) bin=${option#*=} && build=false ;;
    *)
      sed -n '2,15s/^# \{0,1\}//p' "$0"
      exit 2
      ;;
  esac
done

fail() { echo "bundle.sh: $*" >&2; exit 1; }
[[ ! -e $output || -f $output/MANIFEST ]] || fail "$output exists and is not a bundle; remove it or choose another --output"
command -v patchelf >/dev/null || ./deploy/install_deps.sh patchelf

if $build; then
  # shellcheck disable=SC2086  # several flags
  "${BAZEL:-bazel}" build --noshow_progress ${BAZEL_FLAGS:-} "${labels[@]}"
fi

mkdir -p "$(dirname "$output")"
stage=$(mktemp -d "$output.XXXXXX")
trap 'rm -rf "$stage"' EXIT
mkdir "$stage/bin" "$stage/lib"

programs=()
for label in "${labels[@]}"; do
  path=${label#//}
  program=$stage/bin/${path#*:}
  cp -L "$bin/${path/://}" "$program"
  chmod 755 "$program"
  programs+=("$program")
done

# ldd prints "NAME => PATH (address)" for what the loader found, also for libraries' own needs.
ldd "${programs[@]}" | awk '$2 == "=>" { print $1, $3 }' | sort -u | while read -r name path; do
  [[ $name =~ $SYSTEM ]] && continue
  [[ $path == /* ]] || fail "$name is not on this machine"
  cp -L "$path" "$stage/lib/$name"
  chmod 644 "$stage/lib/$name"
done
strip --strip-unneeded "$stage"/lib/* "${programs[@]}"
for program in "${programs[@]}"; do
  # RPATH, not RUNPATH: it also holds for what the libraries need, and for dlopen.
  patchelf --force-rpath --set-rpath '$ORIGIN/../lib' "$program"
done

bytes=$(du -sb --apparent-size "$stage" | cut -f1)
if $with_nccl; then
  nccl=$(./deploy/find_nccl.sh) || fail "no libnccl.so.2 found"
  [[ -n $nccl ]] || nccl=$(library_path libnccl.so.2)
  cp -L "$nccl" "$stage/lib/libnccl.so.2"
fi
# What Bazel's rule found (deploy/bazel/local_cuda.bzl), as it stood when it built. bazel-bin lies in
# OUTPUT_BASE/execroot; asking Bazel would wait for a build that runs meanwhile.
kernels="not known: no Bazel here has built them"
found=$(realpath "$bin") && found=${found%%/execroot/*}/external/local_cuda/defs.bzl
if [[ -f $found ]]; then
  cuda=$(sed -n 's/^ARCHITECTURES = \["\(.*\)"\]$/sm_\1/p' "$found" | sed 's/", "/ sm_/g')
  kernels="the processor's${cuda:+, $cuda}"
  [[ -n $cuda ]] || kernels+="; no CUDA toolkit was found"
fi
cat >"$stage/MANIFEST" <<END
ringattn bundle
commit: $(git rev-parse --short HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD 2>/dev/null || echo " with changes")
glibc: $(ldd --version | awk 'NR == 1 { print $NF }') or newer
programs: $(ls "$stage/bin" | xargs)
kernels: $kernels
openssl: $openssl
bytes: $bytes$($with_nccl && echo ", and NCCL" || true)
END

# The packed programs must run without the rest of the system: only glibc from outside, no
# environment.
for program in "${programs[@]}"; do
  outside=$(env -i ldd "$program" | awk '$2 == "=>" { print $1, $3 }' |
    while read -r name path; do
      [[ $name =~ $SYSTEM ]] || [[ $(realpath -m "$path") == "$(realpath "$stage")"/lib/* ]] || echo "$name"
    done)
  [[ -z $outside ]] || fail "$(basename "$program") needs from outside: $(xargs <<<"$outside")"
done
for program in ringattn ringattn-server ringattn-worker; do
  env -i "$stage/bin/$program" --help >/dev/null || fail "$program does not start"
done
((bytes <= MAX_BYTES)) || fail "$((bytes >> 20)) MiB are more than the $((MAX_BYTES >> 20)) MiB allowed"

chmod 755 "$stage"
rm -rf "$output"
mv -T "$stage" "$output"
cat "$output/MANIFEST"
