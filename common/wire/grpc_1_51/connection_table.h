// ConnectionTable: which of the sockets that were handed on are still open.
//
// gRPC closes the connections that it was given and tells nobody. A socket's cookie, which
// the kernel never gives out twice, says whether a descriptor still is the socket that it was.
#ifndef RINGATTN_COMMON_WIRE_GRPC_1_51_CONNECTION_TABLE_H_
#define RINGATTN_COMMON_WIRE_GRPC_1_51_CONNECTION_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace ringattn::wire {

// Thread compatible.
class ConnectionTable {
 public:
  // Call before `fd` is handed on: from then on it may be closed at any time.
  void Add(int fd);
  // Entries, some of which may have closed since the last Prune.
  size_t size() const { return cookies_.size(); }
  // Forgets what has closed: one system call an entry, some 0.2 us each. Returns size().
  size_t Prune();

 private:
  std::unordered_map<int, uint64_t> cookies_;  // by descriptor
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_1_51_CONNECTION_TABLE_H_
