// Listener: the TCP port of a gRPC server, with a limit on its connections.
//
// gRPC 1.51's own listener has no limit and stops permanently at the first accept() without a free
// descriptor; the process then runs but accepts no connections. This one accepts on its own thread,
// rejects connections above the limit, and continues after failures.
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
  // Maximum number of open connections. A further one is accepted, gets an HTTP/2 GOAWAY with "too
  // many connections", and is closed: its calls end with UNAVAILABLE immediately.
  int64_t max_connections = 1024;
};

struct ListenerStats {
  int64_t open = 0;            // connections now
  int64_t refused = 0;         // above max_connections, since the start
  int64_t failed_accepts = 0;  // for lack of descriptors or memory, since the start
};

// Thread safe, except that AddTo, Start and Stop must be called in order.
class Listener {
 public:
  // Errors: UNAVAILABLE if the address cannot be resolved or bound.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const ListenerOptions& options);
  ~Listener();  // stops

  // Returns "host:port" as bound, with the host as given.
  const std::string& address() const { return address_; }

  // Call before BuildAndStart; the server then receives its connections from this listener.
  void AddTo(grpc::ServerBuilder* builder, std::shared_ptr<grpc::ServerCredentials> credentials);
  // Call after BuildAndStart.
  void Start();
  // The same without gRPC, for tests. `take` owns the descriptors that it receives.
  void StartWith(std::function<void(int listener, int connection)> take);
  // Stops accepting and closes the port. Connections that were passed on stay open.
  void Stop();

  ListenerStats Stats();

 private:
  explicit Listener(const ListenerOptions& options) : options_(options) {}

  absl::Status BindAll();
  void Run();
  // Accepts waiting connections, up to a fixed number. Returns false if it must pause before it
  // tries again.
  bool AcceptSome(int listener);
  bool Admit(int connection);
  // Without a free descriptor for accept(): releases the reserve for a moment, so that the peer is
  // rejected at once instead of waiting in the kernel's queue.
  void ShedOne(int listener);

  const ListenerOptions options_;
  std::string address_;
  std::vector<int> sockets_;
  int wake_ = -1;     // an eventfd; readable: stop
  int reserve_ = -1;  // a descriptor reserved for ShedOne; used only by the thread
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
