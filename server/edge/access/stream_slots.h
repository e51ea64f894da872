// StreamSlots: bounds the open Forward and Backward streams, in total, per client and per
// connection.
#ifndef RINGATTN_SERVER_EDGE_ACCESS_STREAM_SLOTS_H_
#define RINGATTN_SERVER_EDGE_ACCESS_STREAM_SLOTS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "common/base/limits.h"
#include "server/core/events/events.h"

namespace ringattn::server {

// The identity of a call's sender.
struct Caller {
  std::string principal;   // authenticated: a known client's name, or the certificate's
                           // name where no clients file is used; empty: anonymous
  std::string connection;  // gRPC's peer: "ipv4:10.0.0.7:40312", "unix:..."
  // The unit that limits apply to: the principal, or else the connection. Many clients may share an
  // address, so the connection includes the port.
  std::string client;
  ClientTerms terms = {};
};

// The limit that was reached.
enum class ExhaustedLimit { kNone, kServer, kClient, kConnection };

// There are two kinds of slots. A stream starts in a slot without a header, where the oldest stream
// is evicted for the newest. With its header it moves to a request slot, which is never taken away.
// Both count towards the limits of client and connection. Pure; not thread safe.
class StreamSlots {
 public:
  explicit StreamSlots(const Limits& limits);

  // Takes a slot. If the client's or the connection's limit is reached, takes none and returns that
  // limit. REQUIRES: ids ascend.
  ExhaustedLimit Enter(StreamId id, const Caller& caller);
  // Returns the oldest stream without a header while there are too many, each stream once. It
  // counts towards its client until Leave.
  std::optional<StreamId> TakeEvicted();
  // Moves the stream to a request slot. Returns kServer, without a change, if there is none.
  // REQUIRES: entered, not left, first call for this stream.
  ExhaustedLimit HeaderCame(StreamId id);
  void Leave(StreamId id);

  int64_t without_header() const { return static_cast<int64_t>(headerless_.size()); }

 private:
  struct Place {
    Caller caller;
    bool is_request = false;
  };

  static void Release(std::map<std::string, int64_t>* counts, const std::string& key);

  const int64_t max_requests_;
  const int64_t max_without_header_;
  const int64_t max_per_client_;
  const int64_t max_per_connection_;
  std::map<StreamId, Place> streams_;
  std::set<StreamId> headerless_;
  int64_t requests_ = 0;
  std::map<std::string, int64_t> by_client_;
  std::map<std::string, int64_t> by_connection_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_ACCESS_STREAM_SLOTS_H_
