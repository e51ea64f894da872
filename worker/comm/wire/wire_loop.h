// WireLoop: polls connections to several peers and does what is possible on each.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_LOOP_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_LOOP_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "worker/comm/wire/wire_connection.h"

namespace ringattn::worker {

// Used by one thread, except Wake.
class WireLoop {
 public:
  WireLoop();
  ~WireLoop();
  WireLoop(const WireLoop&) = delete;
  WireLoop& operator=(const WireLoop&) = delete;

  // The connection outlives the loop's last call of Poll, Push and CloseAll.
  void Add(WireConnection* connection);
  // May be called from any thread.
  void Wake();
  // Waits for sockets or Wake, and does what is possible.
  void Poll(absl::Duration patience);
  // Lets the peer's connections here write what they can.
  void Push(const WirePeer* peer);
  void CloseAll();

 private:
  struct Entry {
    WireConnection* connection = nullptr;
    WireConnection::Rest rest;
  };

  void Control(int operation, const Entry& entry, size_t index);
  void Work(size_t index, bool readable);

  const int epoll_;
  const int wake_;
  std::vector<Entry> entries_;
  bool reads_more_ = false;  // of any of them
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_LOOP_H_
