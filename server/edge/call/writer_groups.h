// WriterGroups: the streams of requests that several clients send together (Writer in
// attention.proto). Streams wait here until all writers of their request have joined. The stream of
// writer 0 then leads: the core knows only this one, and it passes on what the core decides.
//
// Tests: tests/writers/test_writers.py
#ifndef RINGATTN_SERVER_EDGE_CALL_WRITER_GROUPS_H_
#define RINGATTN_SERVER_EDGE_CALL_WRITER_GROUPS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/base/limits.h"
#include "common/request/transport_choice.h"
#include "server/core/events/failure.h"

namespace ringattn::server {

class RequestCall;

// Request ids are unique per principal.
struct WriterKey {
  std::string principal;
  std::string request_id;

  auto operator<=>(const WriterKey&) const = default;
};

// The part of a writer's header that its group compares or joins. `transport` has a writer.
struct WriterHeader {
  WriterKey key;
  Direction direction = Direction::kForward;
  uint64_t fingerprint = 0;  // HeaderRequest::fingerprint
  int64_t seq_len_q = 0;
  int64_t seq_len_kv = 0;
  TransportChoice transport;
};

// Thread safe. Calls the streams without its lock.
class WriterGroups {
 public:
  explicit WriterGroups(const Limits& limits) : limits_(limits) {}

  // Adds a stream, which waits until StartAsLead, Follow or FailWriter is called on it. With the
  // last writer, the group starts. A stream with the index of an earlier one replaces it.
  void Join(std::shared_ptr<RequestCall> call, WriterHeader header) ABSL_LOCKS_EXCLUDED(mutex_);
  // A waiting stream has ended: ends the others of its group.
  void Leave(const RequestCall* call, const WriterKey& key, int index, const std::string& why)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // The request that `lead` led has ended. Streams that join later form a new group.
  void End(const RequestCall* lead, const WriterKey& key) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends all groups that still wait for writers.
  void FailWaiting(const Failure& failure) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends groups whose writers did not join in time.
  void OnTick(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

  // Streams that wait for other writers.
  int64_t waiting() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Group {
    WriterHeader first;  // without transport
    int count = 0;
    absl::Time since;  // of the first stream
    bool started = false;
    std::vector<std::shared_ptr<RequestCall>> calls;  // by index; null: has not joined
    std::vector<TransportChoice> choices;             // by index; empty once it has started
  };
  using Calls = std::vector<std::shared_ptr<RequestCall>>;

  static bool Matches(const Group& group, const WriterHeader& header);
  // Starts a group whose writers have all joined.
  void Start(Group group, const WriterKey& key);
  static void FailAll(const Calls& calls, const Failure& failure);

  const Limits limits_;
  mutable absl::Mutex mutex_;
  std::map<WriterKey, Group> groups_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CALL_WRITER_GROUPS_H_
