// ReachListener: a port on the ring's network that shows peers that they reach this worker.
// Tests: reach_test.cc
#ifndef RINGATTN_WORKER_COMM_REACH_REACH_LISTENER_H_
#define RINGATTN_WORKER_COMM_REACH_REACH_LISTENER_H_

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "worker/comm/sockets/owned_fd.h"

namespace ringattn::worker {

// Accepts connections and closes them at once. Reads and sends nothing. Thread safe.
class ReachListener {
 public:
  // Listens on a free port of `host`, a name or numeric address of this machine. Returns
  // INVALID_ARGUMENT if this machine has no such address, or if peers cannot connect to it.
  static absl::StatusOr<std::unique_ptr<ReachListener>> Start(const std::string& host);
  ~ReachListener();

  ReachListener(const ReachListener&) = delete;
  ReachListener& operator=(const ReachListener&) = delete;

  // Returns the numeric address "host:port", with brackets for IPv6.
  const std::string& address() const { return address_; }

 private:
  ReachListener(OwnedFd listener, OwnedFd stop, std::string address);
  void Accept() const;

  const OwnedFd listener_;
  const OwnedFd stop_;  // event; readable once the listener ends
  const std::string address_;
  std::thread accepting_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_REACH_REACH_LISTENER_H_
