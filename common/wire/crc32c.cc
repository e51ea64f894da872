#include "common/wire/crc32c.h"

#include <algorithm>
#include <cstring>

#include "isa-l/crc.h"

namespace ringattn::wire {

uint32_t ExtendCrc32c(uint32_t crc, const void* data, size_t size) {
  // crc32_iscsi takes and returns the register without the xor on either side, counts in int and
  // does not write through its pointer.
  constexpr size_t kMaxCallBytes = size_t{1} << 30;
  auto* bytes = static_cast<unsigned char*>(const_cast<void*>(data));
  uint32_t state = ~crc;
  while (size > 0) {
    const size_t now = std::min(size, kMaxCallBytes);
    state = crc32_iscsi(bytes, static_cast<int>(now), state);
    bytes += now;
    size -= now;
  }
  return ~state;
}

uint32_t Crc32c(absl::Span<const Fragment> fragments) {
  uint32_t crc = 0;
  for (const Fragment& fragment : fragments) {
    crc = ExtendCrc32c(crc, fragment.data, fragment.size);
  }
  return crc;
}

uint32_t CopyFragmentsAndCrc32c(absl::Span<const Fragment> fragments, void* target) {
  // Half of a small first-level cache, because source and copy both use it.
  constexpr size_t kPieceBytes = 16 * 1024;
  auto* out = static_cast<uint8_t*>(target);
  uint32_t crc = 0;
  for (const Fragment& fragment : fragments) {
    for (size_t at = 0; at < fragment.size; at += kPieceBytes) {
      const size_t now = std::min(kPieceBytes, fragment.size - at);
      std::memcpy(out, fragment.data + at, now);
      crc = ExtendCrc32c(crc, out, now);
      out += now;
    }
  }
  return crc;
}

}  // namespace ringattn::wire
