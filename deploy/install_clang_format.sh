#!/usr/bin/env bash
# Prints the path of clang-format 14.0.6, the one that the sources are formatted with: distributions
# differ, and so do their results. From a PyPI wheel (2 MB) in a private environment, on first use.
set -euo pipefail
cd "$(dirname "$0")/.."

VERSION=14.0.6
environment=.deps/clang-format
if [[ $(cat "$environment/.version" 2>/dev/null) != "$VERSION" ]]; then
  mkdir -p .deps
  staging=$(mktemp -d "$environment.XXXXXX")
  trap 'rm -rf "$staging"' EXIT
  python3 -m venv "$staging" >&2
  "$staging/bin/pip" install -q --disable-pip-version-check --no-deps "clang-format==$VERSION" >&2
  echo "$VERSION" >"$staging/.version"
  rm -rf "$environment"
  mv -T "$staging" "$environment"
fi
# The program itself: the script in bin/ carries the name of a folder that is gone.
program=$(echo "$PWD/$environment"/lib/python3*/site-packages/clang_format/data/bin/clang-format)
[[ -x $program ]] || { echo "install_clang_format.sh: no clang-format in $environment" >&2; exit 1; }
echo "$program"
