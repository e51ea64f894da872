// Listener: the TCP port of a gRPC server, with a bound on its connections.
//
// gRPC's own (1.51) bounds nothing, and ends for good at the first accept() that finds no
// descriptor: the process lives on and nobody reaches it. This one accepts on a thread of
// its own, refuses what is beyond the bound, and goes on after a failure.
//
//   auto listener = Listener::Bind({.address = "127.0.0.1:0"});
//   (*listener)->AddTo(&builder, credentials);
//   auto server = builder.BuildAndStart();
//   (*listener)->Start();
#ifndef RINGATTN_COMMON_WIRE_GRPC_1_51_LISTENER_H_
#define RINGATTN_COMMON_WIRE_GRPC_1_51_LISTENER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/wire/grpc_1_51/connection_table.h"

namespace ringattn::wire {

struct ListenerOptions {
  std::string address;  // "host:port", "[v6]:port"; port 0 picks a free one
  // Connections at a time. A further one is accepted, told "too many connections" by
  // HTTP/2's GOAWAY, and closed: calls on it end with UNAVAILABLE at once.
  int64_t max_connections = 1024;
};

struct ListenerStats {
  int64_t open = 0;            // connections now
  int64_t refused = 0;         // over max_connections, since the start
  int64_t failed_accepts = 0;  // for want of descriptors or memory, likewise
};

// Thread safe, but for the order of AddTo, Start and Stop.
class Listener {
 public:
  // Errors: UNAVAILABLE if the address cannot be resolved or bound.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const ListenerOptions& options);
  ~Listener();  // stops

  // "host:port" as bound, the host as it was given.
  const std::string& address() const { return address_; }

  // Before BuildAndStart; the server then takes connections from here.
  void AddTo(grpc::ServerBuilder* builder, std::shared_ptr<grpc::ServerCredentials> credentials);
  // After BuildAndStart.
  void Start();
  // Likewise, without gRPC: `take` owns the descriptors that it gets. For tests.
  void StartWith(std::function<void(int listener, int connection)> take);
  // Accepts nothing more and closes the port. Connections that were handed on stay.
  void Stop();

  ListenerStats Stats();

 private:
  explicit Listener(const ListenerOptions& options) : options_(options) {}

  absl::Status BindAll();
  void Run();
  // Accepts what waits, up to a number. False if it must rest before it tries again.
  bool AcceptSome(int listener);
  bool Admit(int connection);
  // Without a descriptor for accept(): gives the reserve away for a moment, so that the
  // peer is told at once instead of waiting in the kernel's queue.
  void ShedOne(int listener);

  const ListenerOptions options_;
  std::string address_;
  std::vector<int> sockets_;
  int wake_ = -1;     // an eventfd; readable: end
  int reserve_ = -1;  // a descriptor kept for ShedOne; the thread's own
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::function<void(int listener, int connection)> take_;
  std::thread thread_;

  absl::Mutex mutex_;
  ConnectionTable table_ ABSL_GUARDED_BY(mutex_);
  absl::Time pruned_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  ListenerStats stats_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_1_51_LISTENER_H_
