#include "worker/region/descriptor_rules.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "absl/strings/str_cat.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace ringattn::worker {
namespace {

absl::Status Refused(absl::string_view why) { return absl::InvalidArgumentError(why); }

// the unit of stat's block counts
constexpr int64_t kStatBlockBytes = 512;

}  // namespace

absl::Status CheckRegionDescriptor(int fd, int64_t bytes) {
  struct stat file = {};
  if (fstat(fd, &file) != 0) return Refused("the descriptor is invalid");
  if (!S_ISREG(file.st_mode)) return Refused("the descriptor is not a memfd");
  struct statfs system = {};
  if (fstatfs(fd, &system) != 0) return Refused("the descriptor is not a memfd");
  if (static_cast<uint64_t>(system.f_type) == HUGETLBFS_MAGIC) {
    return Refused("the memfd uses hugetlbfs pages; ordinary pages are required");
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || static_cast<uint64_t>(system.f_type) != TMPFS_MAGIC) {
    return Refused("the descriptor is not a memfd");
  }
  if ((seals & F_SEAL_SHRINK) == 0) return Refused("the memfd is not sealed against shrinking");
  if ((seals & F_SEAL_SEAL) == 0) return Refused("the memfd is not sealed against more seals");
  if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0) {
    return Refused("the memfd is sealed against writing");
  }
  if ((fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR) {
    return Refused("the descriptor is not open for reading and writing");
  }
  if (file.st_size < bytes) {
    return Refused(
        absl::StrCat("the memfd has ", file.st_size, " bytes; the region needs ", bytes));
  }
  if (int64_t{file.st_blocks} * kStatBlockBytes < file.st_size) {
    return Refused("not all pages of the memfd are allocated (fallocate)");
  }
  return absl::OkStatus();
}

}  // namespace ringattn::worker
