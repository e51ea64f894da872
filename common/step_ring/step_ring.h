// The step ring: messages between the writer of a K/V cache and the worker of one rank, in host
// memory that the client shares with the worker (StepRing in kv_cache.proto).
//
// Layout, from an offset in the region that is a multiple of 4,096. Integers are little-endian.
//
//   offset  bytes                   content
//   0       8                       posted: number of requests, stored by the client (SharedWord)
//   64      8                       done: number of responses, stored by the worker (SharedWord)
//   4096    slots * request_bytes   slots for requests
//   then    slots * response_bytes  slots for responses
//
//   A slot:
//   0       4                       length of the frame, at most the slot's bytes - 64
//   64      length                  the frame: a serialized StepRequest or StepResponse
//
// Frame n of a direction, from 0, is in slot n mod slots. Counters are modulo 2^32. The writer of a
// frame writes the slot and then stores the counter n + 1; SharedWord has the memory order. The
// slot is free again when the frame has been answered, for a request, or when the client has sent
// another request after it has read the frame, for a response. So at most `slots` requests may be
// unanswered, and the client reads responses before it sends more requests.
//
// Neither side trusts the other: the peer may change its memory at any time. A reader copies a
// frame once, with a length that it has read once and checked, and interprets only its copy.
//
// Tests: step_ring_test.cc
#ifndef RINGATTN_COMMON_STEP_RING_STEP_RING_H_
#define RINGATTN_COMMON_STEP_RING_STEP_RING_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/step_ring/shared_word.h"

namespace ringattn {

struct StepRingLayout {
  static constexpr int64_t kAlignment = 4096;  // of a ring in its region, and of `bytes`
  static constexpr int64_t kSlotHeaderBytes = 64;
  static constexpr uint64_t kMinSlots = 2;
  static constexpr uint64_t kMaxSlots = 64;

  int64_t slots = kMinSlots;
  int64_t request_bytes = 0;   // of a slot
  int64_t response_bytes = 0;  // of a slot

  // Returns the bytes of a slot whose frames have up to `frame_bytes`.
  static int64_t SlotBytes(int64_t frame_bytes);

  int64_t requests_offset() const { return kAlignment; }
  int64_t responses_offset() const { return kAlignment + slots * request_bytes; }
  // Returns the bytes of the whole ring, rounded up to kAlignment.
  int64_t bytes() const;
};

// Values of a StepRing message. Returns INVALID_ARGUMENT, naming the field, unless the ring is
// valid and fits a region of `region_bytes`. No frame may exceed `max_frame_bytes`.
absl::StatusOr<StepRingLayout> CheckStepRing(uint64_t offset, uint64_t slots,
                                             uint64_t request_bytes, uint64_t response_bytes,
                                             int64_t region_bytes, int64_t max_frame_bytes);

// One direction of a ring: its counter and its slots.
struct StepRingQueue {
  uint8_t* word = nullptr;  // SharedWord
  uint8_t* slots = nullptr;
  int64_t count = 0;  // of slots
  int64_t slot_bytes = 0;

  // `ring`: the address of the ring.
  static StepRingQueue Requests(uint8_t* ring, const StepRingLayout& layout);
  static StepRingQueue Responses(uint8_t* ring, const StepRingLayout& layout);
};

// The side that writes frames. Not thread safe.
class StepRingWriter {
 public:
  // Does not touch the memory. `first`: the counter's value at the start.
  explicit StepRingWriter(const StepRingQueue& queue, uint32_t first = 0);

  // Sets the counter to its value at the start.
  void Reset();
  // The longest frame.
  int64_t capacity() const { return queue_.slot_bytes - StepRingLayout::kSlotHeaderBytes; }
  // Frames that were written, modulo 2^32.
  uint32_t count() const { return count_; }

  // Writes the next frame by calling `write` with its memory. Publish makes it visible. Requires
  // 0 <= bytes <= capacity() and a free slot.
  void Put(int64_t bytes, absl::FunctionRef<void(uint8_t* frame)> write);
  void Publish() { word_.Store(count_); }

 private:
  const StepRingQueue queue_;
  SharedWord word_;
  const uint32_t first_;
  uint32_t count_;
};

// The side that reads frames. Not thread safe, except for Interrupt.
class StepRingReader {
 public:
  explicit StepRingReader(const StepRingQueue& queue, uint32_t first = 0);

  void Reset() { count_ = first_; }
  // Frames that were read, modulo 2^32.
  uint32_t count() const { return count_; }

  // Copies the next frame; returns false if there is none. INVALID_ARGUMENT if the counter is more
  // than the number of slots ahead, or the frame is longer than a slot.
  absl::StatusOr<bool> Take(std::string* frame);

  // Waits until the counter differs from count(): SharedWord::Wait.
  SharedWord::Wake Wait(absl::Duration spin, absl::Duration sleep,
                        const std::atomic<bool>* stop = nullptr) {
    return word_.Wait(count_, spin, sleep, stop);
  }
  SharedWord::Wake WaitOr(absl::FunctionRef<bool()> other, absl::Duration spin,
                          absl::Duration sleep) {
    return word_.WaitOr(other, count_, spin, sleep);
  }
  void Interrupt() { word_.Interrupt(); }
  // Whether the counter differs from count().
  bool HasNext() const { return word_.Load() != count_; }

 private:
  const StepRingQueue queue_;
  SharedWord word_;
  const uint32_t first_;
  uint32_t count_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_STEP_RING_STEP_RING_H_
