// For every file, the parser and its views stay inside the file's bytes.
#include <cstdlib>
#include <cstring>

#include "client/files/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // As large and as aligned as the file, so that a step outside is seen.
  void* copy = nullptr;
  if (posix_memalign(&copy, 64, size == 0 ? 1 : size) != 0) return 0;
  if (size > 0) std::memcpy(copy, data, size);
  const auto* file = static_cast<const uint8_t*>(copy);
  const auto contents = ringattn::client::ParseSafetensors({file, size});
  uint64_t total = 0;
  if (contents.ok()) {
    for (const ringattn::client::TensorView& tensor : contents->tensors) {
      const bool inside = tensor.data >= file && tensor.bytes >= 0 &&
                          static_cast<uint64_t>(tensor.bytes) <= size &&
                          tensor.data + tensor.bytes <= file + size;
      if (!inside) std::abort();
      total += tensor.bytes;
    }
    if (total > size) std::abort();
  }
  free(copy);
  return 0;
}
