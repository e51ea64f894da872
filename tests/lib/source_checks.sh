#!/usr/bin/env bash
# Checks of the sources that need no build: format, rules that no compiler checks (source_rules.py), and the
# table of tests for each option (option_table.py). One tally line each.
set -uo pipefail
cd "$(dirname "$0")/../.."
source tests/lib/tally.sh

export PYTHONDONTWRITEBYTECODE=1
status=0
# name, command
check() {
  local name=$1
  shift
  if "$@"; then
    record "pass $name"
  else
    record "fail $name"
    status=1
  fi
}

format() {
  local program log sources
  program=$(./deploy/install_clang_format.sh) || return 1
  mapfile -t sources < <(find client common server tests worker -type f \
    '(' -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' ')' | sort)
  ((${#sources[@]} > 0)) || return 1
  log=$("$program" --dry-run -Werror "${sources[@]}" 2>&1) && return 0
  grep ': error:' <<<"$log" | sort -u | head -40
  echo "to mend: ./deploy/install_clang_format.sh prints the program; run it with -i on these files"
  return 1
}

check "source format (clang-format 14)" format
check "source rules" python3 tests/lib/source_rules.py
check "folder rules" python3 tests/lib/folder_rules.py
check "plain English" python3 tests/lib/prose_rules.py
check "source rules find what breaks them" python3 tests/lib/source_rules_test.py
check "text rules find what breaks them" python3 tests/lib/text_rules_test.py
check "every option names its tests" python3 tests/lib/option_table.py
exit "$status"
