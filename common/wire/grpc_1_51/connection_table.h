// ConnectionTable: which of the sockets that were passed to gRPC are still open.
//
// gRPC closes connections without notification. A socket's cookie, which the kernel never reuses,
// shows whether a descriptor still refers to the same socket.
#ifndef RINGATTN_COMMON_WIRE_GRPC_1_51_CONNECTION_TABLE_H_
#define RINGATTN_COMMON_WIRE_GRPC_1_51_CONNECTION_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace ringattn::wire {

// Thread compatible.
class ConnectionTable {
 public:
  // Call before passing on `fd`, because it may be closed at any time after that.
  void Add(int fd);
  // Returns the number of entries. Some may have closed since the last Prune.
  size_t size() const { return cookies_.size(); }
  // Removes closed sockets, at one system call (about 0.2 us) per entry. Returns size().
  size_t Prune();

 private:
  std::unordered_map<int, uint64_t> cookies_;  // by descriptor
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_1_51_CONNECTION_TABLE_H_
