#!/usr/bin/env bash
# Makes the root file system of the container image out of a bundle (deploy/bundle.sh): the three
# programs and their libraries in /opt/ringattn, the parts of glibc that they load, an unprivileged
# user, and what says which distribution packages the libraries came from. No shell, no package manager.
# Used by deploy/image.sh and by deploy/image/Containerfile, so both make the same image.
#
#   ./deploy/image/rootfs.sh --bundle=DIR --output=DIR     the output is replaced
set -euo pipefail
cd "$(dirname "$0")/../.."
source deploy/lib_path.sh

bundle= output=
for option in "$@"; do
  case $option in
    --bundle=*) bundle=${option#*=} ;;
    --output=*) output=${option#*=} ;;
    *)
      sed -n '2,7s/^# \{0,1\}//p' "$0"
      exit 2
      ;;
  esac
done
fail() { echo "rootfs.sh: $*" >&2; exit 1; }
[[ -f $bundle/MANIFEST ]] || fail "--bundle must name a folder that deploy/bundle.sh made"
[[ -n $output && $output != / ]] || fail "--output must name a folder"
[[ ! -e $output || -f $output/opt/ringattn/MANIFEST ]] || fail "$output exists and was not created by this script"

rm -rf "$output"
mkdir -p "$output"/{etc,tmp,opt,lib64,proc,sys,dev,usr/lib,var/lib/dpkg/status.d}
# One tree, as in Debian, so that each library has one path.
ln -s usr/lib "$output/lib"
chmod 1777 "$output/tmp"
cp -a "$bundle" "$output/opt/ringattn"
cp LICENSE "$output/opt/ringattn/LICENSE"

# The rest of glibc that the bundle leaves to its host, as the loader finds it here, and the loader.
glibc=()
while read -r name path; do
  glibc+=("$path")
  mkdir -p "$output/usr/lib/x86_64-linux-gnu"
  cp -L "$path" "$output/usr/lib/x86_64-linux-gnu/$name"
done < <(env -i ldd "$output"/opt/ringattn/bin/* |
  awk '$2 == "=>" && $3 ~ /^\// { print $1, $3 }' | grep -v /opt/ringattn/ | sort -u)
((${#glibc[@]})) || fail "no library of glibc was found"
# Nothing here names these, but the GPU's driver and NCCL do.
for name in libdl.so.2 libpthread.so.0 librt.so.1 libresolv.so.2; do
  path=$(library_path "$name")
  [[ -z $path ]] || cp -L "$path" "$output/usr/lib/x86_64-linux-gnu/$name"
done
cp -L /lib64/ld-linux-x86-64.so.2 "$output/lib64/"

cat >"$output/etc/passwd" <<'END'
root:x:0:0:root:/:/sbin/nologin
ringattn:x:65532:65532:ringattn:/tmp:/sbin/nologin
END
printf 'root:x:0:\nringattn:x:65532:\n' >"$output/etc/group"
echo 'hosts: files dns' >"$output/etc/nsswitch.conf"
# NVIDIA's container runtime puts the driver's libraries where Debian's loader looks if it sees these.
cp -L /etc/debian_version /etc/os-release "$output/etc/" 2>/dev/null || cp -L /etc/os-release "$output/etc/"

# Licences, and the packages' names and versions in the form that scanners read.
package_of() {
  local path
  for path in "$1" "$(realpath "$1")" "/usr$1" "${1#/usr}"; do
    dpkg-query -S "$path" 2>/dev/null | awk -F: 'NR == 1 { print $1 }' | grep . && return
  done
}
while read -r package; do
  dpkg-query -s "$package" >"$output/var/lib/dpkg/status.d/$package"
  mkdir -p "$output/usr/share/doc/$package"
  cp -L "/usr/share/doc/$package/copyright" "$output/usr/share/doc/$package/"
done < <(
  for path in "${glibc[@]}"; do package_of "$path"; done
  for library in "$output"/opt/ringattn/lib/*; do
    path=$(library_path "$(basename "$library")")
    [[ -z $path ]] || package_of "$path"
  done | sort -u
)
find "$output" -type d -exec chmod u+w {} +
du -sb --apparent-size "$output" | cut -f1
