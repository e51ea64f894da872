// CRC-32C (Castagnoli, reflected, initial value and final xor 0xffffffff) of TensorChunk.crc32c.
// The crc of "123456789" is 0xe3069283. Pure, thread safe; uses the processor's CRC instructions if
// available.
#ifndef RINGATTN_COMMON_WIRE_CRC32C_H_
#define RINGATTN_COMMON_WIRE_CRC32C_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "common/wire/chunk_codec.h"

namespace ringattn::wire {

// Returns the crc of A followed by B, given the crc of A (0 for an empty A) and B's bytes.
uint32_t ExtendCrc32c(uint32_t crc, const void* data, size_t size);

inline uint32_t Crc32c(const void* data, size_t size) { return ExtendCrc32c(0, data, size); }

uint32_t Crc32c(absl::Span<const Fragment> fragments);

// CopyFragments and Crc32c in one pass: checksums each piece while it is in cache.
uint32_t CopyFragmentsAndCrc32c(absl::Span<const Fragment> fragments, void* target);

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_CRC32C_H_
