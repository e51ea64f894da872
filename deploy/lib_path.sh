# Sourced: where the loader finds a library.

# The path of library $1 (a file's name as in "libz.so.1") as ldconfig knows it for this processor;
# nothing if it does not. Reads all that ldconfig says: under `pipefail`, who stops reading sometimes
# ends the script with ldconfig's SIGPIPE.
library_path() {
  { ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null |
    awk -v name="$1" '$1 == name && (/x86-64/ || /AArch64/) && !path { path = $NF } END { if (path) print path }'
}
