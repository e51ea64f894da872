# Finds Go for Helm and Kubernetes, which need 1.24. Distributions may have an older one first in PATH. Sourced.

# Puts the first Go that is new enough in front of PATH. Without one returns 1 and prints the versions that it found.
use_go() {
  local go minor found=
  while read -r go; do
    minor=$(GOTOOLCHAIN=local "$go" version 2>/dev/null | sed -n 's/^go version go1\.\([0-9]*\).*$/\1/p')
    if ((${minor:-0} >= 24)); then
      PATH=$(dirname "$go"):$PATH
      export PATH
      return
    fi
    [[ -z $minor ]] || found+="${found:+, }1.$minor in $(dirname "$go")"
  done < <(type -ap go; ls -d /usr/local/go/bin/go /usr/lib/go-1.*/bin/go 2>/dev/null)
  echo "needs Go 1.24 or newer; found ${found:-none}"
  return 1
}
