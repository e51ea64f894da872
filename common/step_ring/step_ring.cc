#include "common/step_ring/step_ring.h"

#include <cassert>
#include <limits>

#include "absl/strings/str_cat.h"

namespace ringattn {
namespace {

constexpr int64_t kPostedOffset = 0;
constexpr int64_t kDoneOffset = 64;

// The peer may store the length at any time, so it is read once, atomically.
std::atomic<uint32_t>* LengthOf(uint8_t* slot) {
  return reinterpret_cast<std::atomic<uint32_t>*>(slot);
}

absl::Status CheckSlotBytes(const char* field, uint64_t bytes, int64_t max_frame_bytes) {
  const auto header = static_cast<uint64_t>(StepRingLayout::kSlotHeaderBytes);
  const uint64_t most = (static_cast<uint64_t>(max_frame_bytes) + 2 * header - 1) / header * header;
  if (bytes % header == 0 && bytes >= 2 * header && bytes <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("ring.", field, " is ", bytes,
                                                 "; it must be a multiple of ", header, " from ",
                                                 2 * header, " to ", most));
}

}  // namespace

int64_t StepRingLayout::SlotBytes(int64_t frame_bytes) {
  return (frame_bytes + 2 * kSlotHeaderBytes - 1) / kSlotHeaderBytes * kSlotHeaderBytes;
}

int64_t StepRingLayout::bytes() const {
  const int64_t used = responses_offset() + slots * response_bytes;
  return (used + kAlignment - 1) / kAlignment * kAlignment;
}

absl::StatusOr<StepRingLayout> CheckStepRing(uint64_t offset, uint64_t slots,
                                             uint64_t request_bytes, uint64_t response_bytes,
                                             int64_t region_bytes, int64_t max_frame_bytes) {
  if (slots < StepRingLayout::kMinSlots || slots > StepRingLayout::kMaxSlots ||
      (slots & (slots - 1)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ring.slots is ", slots, "; it must be a power of two from ",
                     StepRingLayout::kMinSlots, " to ", StepRingLayout::kMaxSlots));
  }
  if (auto status = CheckSlotBytes("request_bytes", request_bytes, max_frame_bytes); !status.ok()) {
    return status;
  }
  if (auto status = CheckSlotBytes("response_bytes", response_bytes, max_frame_bytes);
      !status.ok()) {
    return status;
  }
  StepRingLayout layout;
  layout.slots = static_cast<int64_t>(slots);
  layout.request_bytes = static_cast<int64_t>(request_bytes);
  layout.response_bytes = static_cast<int64_t>(response_bytes);
  const auto room = static_cast<uint64_t>(region_bytes);
  const auto needed = static_cast<uint64_t>(layout.bytes());
  if (offset % StepRingLayout::kAlignment != 0 || offset > room || needed > room - offset) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ring.offset is ", offset, "; it must be a multiple of ", StepRingLayout::kAlignment,
        ", and the ring's ", needed, " bytes must fit the region's ", region_bytes));
  }
  return layout;
}

StepRingQueue StepRingQueue::Requests(uint8_t* ring, const StepRingLayout& layout) {
  return {ring + kPostedOffset, ring + layout.requests_offset(), layout.slots,
          layout.request_bytes};
}

StepRingQueue StepRingQueue::Responses(uint8_t* ring, const StepRingLayout& layout) {
  return {ring + kDoneOffset, ring + layout.responses_offset(), layout.slots,
          layout.response_bytes};
}

StepRingWriter::StepRingWriter(const StepRingQueue& queue, uint32_t first)
    : queue_(queue), word_(queue.word), first_(first), count_(first) {}

void StepRingWriter::Reset() {
  count_ = first_;
  word_.Store(count_);
}

void StepRingWriter::Put(int64_t bytes, absl::FunctionRef<void(uint8_t* frame)> write) {
  assert(bytes >= 0 && bytes <= capacity());
  uint8_t* const slot = queue_.slots + (count_ % queue_.count) * queue_.slot_bytes;
  LengthOf(slot)->store(static_cast<uint32_t>(bytes), std::memory_order_relaxed);
  if (bytes > 0) write(slot + StepRingLayout::kSlotHeaderBytes);
  ++count_;
}

StepRingReader::StepRingReader(const StepRingQueue& queue, uint32_t first)
    : queue_(queue), word_(queue.word), first_(first), count_(first) {}

absl::StatusOr<bool> StepRingReader::Take(std::string* frame) {
  const uint32_t ahead = word_.Load() - count_;
  if (ahead == 0) return false;
  if (ahead > queue_.count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the ring's counter is ", ahead, " messages ahead; it has ", queue_.count, " slots"));
  }
  uint8_t* const slot = queue_.slots + (count_ % queue_.count) * queue_.slot_bytes;
  const uint32_t length = LengthOf(slot)->load(std::memory_order_relaxed);
  const int64_t most = queue_.slot_bytes - StepRingLayout::kSlotHeaderBytes;
  if (length > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message in the ring has ", length, " bytes; a slot holds ", most));
  }
  frame->assign(reinterpret_cast<const char*>(slot + StepRingLayout::kSlotHeaderBytes), length);
  ++count_;
  return true;
}

}  // namespace ringattn
