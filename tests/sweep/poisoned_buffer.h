// Memory of a rank in tests: poisoned, and watched on both sides.
#ifndef RINGATTN_TESTS_SWEEP_POISONED_BUFFER_H_
#define RINGATTN_TESTS_SWEEP_POISONED_BUFFER_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace ringattn::tests {

// Memory between two guards.
class PoisonedBuffer {
 public:
  // NaN in fp32, bf16 and fp16 alike.
  static constexpr uint8_t kPoison = 0xff;

  explicit PoisonedBuffer(int64_t bytes)
      : bytes_(bytes), memory_(bytes + 2 * kGuardBytes + 63, kPoison) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory_.data()) + kGuardBytes;
    first_ = (begin + 63) / 64 * 64 - reinterpret_cast<uintptr_t>(memory_.data());
  }

  uint8_t* data() { return memory_.data() + first_; }
  int64_t bytes() const { return bytes_; }
  bool guards_intact() const {
    const auto poison = [](uint8_t byte) { return byte == kPoison; };
    return std::all_of(memory_.begin(), memory_.begin() + first_, poison) &&
           std::all_of(memory_.begin() + first_ + bytes_, memory_.end(), poison);
  }

 private:
  static constexpr int64_t kGuardBytes = 256;

  int64_t bytes_;
  std::vector<uint8_t> memory_;
  int64_t first_ = 0;
};

}  // namespace ringattn::tests

#endif  // RINGATTN_TESTS_SWEEP_POISONED_BUFFER_H_
