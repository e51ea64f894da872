// ProbeListener: a port on the ring's network that shows peers that they reach this worker.
// Tests: reach_test.cc
#ifndef RINGATTN_WORKER_COMM_REACH_PROBE_LISTENER_H_
#define RINGATTN_WORKER_COMM_REACH_PROBE_LISTENER_H_

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"

namespace ringattn::worker {

// Accepts connections and closes them at once. Reads and sends nothing. Thread safe.
class ProbeListener {
 public:
  // Listens on a free port of `host`, a name or numeric address of this machine. Returns
  // INVALID_ARGUMENT if this machine has no such address.
  static absl::StatusOr<std::unique_ptr<ProbeListener>> Start(const std::string& host);
  ~ProbeListener();

  ProbeListener(const ProbeListener&) = delete;
  ProbeListener& operator=(const ProbeListener&) = delete;

  // Returns the numeric address "host:port", with brackets for IPv6.
  const std::string& address() const { return address_; }

 private:
  ProbeListener(int listener, int stop, std::string address);
  void Accept() const;

  const int listener_;
  const int stop_;  // event; readable once the listener ends
  const std::string address_;
  std::thread accepting_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_REACH_PROBE_LISTENER_H_
