// StreamSlots: how many Forward and Backward streams may be open, in all and for each client.
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

// Whose a call is.
struct Caller {
  std::string principal;   // authenticated: a known client's name, or what its certificate
                           // says where no clients are listed; empty: anonymous
  std::string connection;  // gRPC's peer: "ipv4:10.0.0.7:40312", "unix:..."
  // Who shares a place with whom: the principal if there is one, else the connection. Many
  // clients may be behind one address, so the port counts too.
  std::string client;
  ClientTerms terms = {};
};

// What is full.
enum class ExhaustedLimit { kNone, kServer, kClient, kConnection };

// Two kinds of places. A stream begins among those without a header, where the oldest makes
// room for the newest; with its header it moves to the requests' places, which nobody is moved
// from. In both it counts for its client and its connection. Pure; not thread safe.
class StreamSlots {
 public:
  explicit StreamSlots(const Limits& limits);

  // REQUIRES: ids ascend. Not kNone, and no place taken: the client or its connection has
  // all its places.
  ExhaustedLimit Enter(StreamId id, const Caller& caller);
  // While too many are without a header: the oldest of them, named once. It counts for its
  // client until Leave.
  std::optional<StreamId> TakeEvicted();
  // Its header has come. kServer, and nothing changes, if the requests' places are full.
  // REQUIRES: it entered, has not left, and this is the first time.
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
