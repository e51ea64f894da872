// Messages of a control stream that wait at the same time travel as one, which costs both sides
// less than a message for each.
//
// Tests: packed_messages_test.cc
#ifndef RINGATTN_COMMON_WIRE_PACKED_MESSAGES_H_
#define RINGATTN_COMMON_WIRE_PACKED_MESSAGES_H_

#include <cstddef>
#include <deque>
#include <utility>

#include <google/protobuf/repeated_field.h>

namespace ringattn::wire {

// The first message is sent at any size.
inline constexpr size_t kPackedBytes = 64 << 10;

// Removes messages from the front of the queue, in order, and returns them as one. `Message` is
// v1::JoinRequest or v1::JoinResponse. REQUIRES: the queue is not empty, and no message has `more`.
template <typename Message>
Message TakePacked(std::deque<Message>& queue) {
  Message packed = std::move(queue.front());
  queue.pop_front();
  size_t bytes = queue.empty() ? 0 : packed.ByteSizeLong();
  while (!queue.empty()) {
    bytes += queue.front().ByteSizeLong();
    if (bytes > kPackedBytes) break;
    *packed.add_more() = std::move(queue.front());
    queue.pop_front();
  }
  return packed;
}

// Calls `take(Message&&, is_last)` for each message that was packed.
template <typename Message, typename Take>
void TakeApart(Message packed, const Take& take) {
  google::protobuf::RepeatedPtrField<Message> more;
  more.Swap(packed.mutable_more());
  take(std::move(packed), more.empty());
  for (int i = 0; i < more.size(); ++i) take(std::move(more[i]), i + 1 == more.size());
}

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_PACKED_MESSAGES_H_
