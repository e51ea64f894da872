// The time of an empty gRPC round trip between two processes of this machine: a new bidirectional
// call for each, and a message each way on an open one. It is the lower bound that the library sets
// to a small request. Uses the service's transport settings and none of its code.
//
//   bazel run //tests/bench:grpc_round_trip -- [--trips=N]
//
// Prints JSON: milliseconds.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "common/security/credentials.h"

ABSL_FLAG(int, trips, 5000, "round trips of each kind");

namespace ringattn::bench {
namespace {

constexpr char kMethod[] = "/bench/RoundTrip";

// Answers each message with an empty one.
class Echo final : public grpc::ServerGenericBidiReactor {
 public:
  Echo() { StartRead(&message_); }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    StartWrite(&message_);
  }
  void OnWriteDone(bool ok) override {
    if (ok) StartRead(&message_);
  }
  void OnDone() override { delete this; }

  grpc::ByteBuffer message_;
};

class EchoService final : public grpc::CallbackGenericService {
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Echo();
  }
};

// Never returns.
void Serve(int port_pipe) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  EchoService service;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
  builder.RegisterCallbackGenericService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (write(port_pipe, &port, sizeof(port)) != sizeof(port)) std::_Exit(3);
  server->Wait();
  std::_Exit(0);
}

class Call final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Call(grpc::GenericStub* stub) {
    stub->PrepareBidiStreamingCall(&context_, kMethod, {}, this);
    AddHold();
    StartCall();
  }

  void RoundTrip() {
    open_ = std::make_unique<absl::BlockingCounter>(2);
    StartRead(&answer_);
    StartWrite(&empty_);
    open_->Wait();
  }

  void End() {
    open_ = nullptr;
    StartWritesDone();
    RemoveHold();
    done_.WaitForNotification();
    if (!status_.ok()) std::_Exit(4);
  }

  // One message each way, and the end of the call.
  void WholeCall() {
    StartRead(&answer_);
    StartWriteLast(&empty_, {});
    RemoveHold();
    done_.WaitForNotification();
    if (!status_.ok()) std::_Exit(4);
  }

 private:
  void OnReadDone(bool) override { Complete(); }
  void OnWriteDone(bool) override { Complete(); }
  void OnDone(const grpc::Status& status) override {
    status_ = status;
    done_.Notify();
  }

  void Complete() {
    if (open_ != nullptr) open_->DecrementCount();
  }

  grpc::ClientContext context_;
  const grpc::Slice nothing_;
  grpc::ByteBuffer empty_{&nothing_, 1};
  grpc::ByteBuffer answer_;
  std::unique_ptr<absl::BlockingCounter> open_;  // the read and the write of a round trip
  grpc::Status status_;
  absl::Notification done_;
};

template <typename Trip>
std::string Measure(int trips, const Trip& trip) {
  std::vector<double> seconds;
  for (int i = 0; i < trips; ++i) {
    const absl::Time begin = MonotonicNow();
    trip();
    seconds.push_back(absl::ToDoubleSeconds(MonotonicNow() - begin));
  }
  std::sort(seconds.begin(), seconds.end());
  return absl::StrCat("{\"p50_ms\": ", 1e3 * seconds[trips / 2],
                      ", \"p99_ms\": ", 1e3 * seconds[trips * 99 / 100], "}");
}

void Run(int trips) {
  int ports[2];
  if (pipe(ports) != 0) std::_Exit(2);
  // Before any thread, and before gRPC is used.
  const pid_t server = fork();
  if (server == 0) Serve(ports[1]);
  int port = 0;
  if (read(ports[0], &port, sizeof(port)) != sizeof(port)) std::_Exit(3);
  {
    const auto channel = TransportSecurity().Dial(absl::StrCat("127.0.0.1:", port), {});
    grpc::GenericStub stub(channel);
    const auto call = [&stub] { Call(&stub).WholeCall(); };
    Measure(trips / 10 + 1, call);  // connects
    const std::string calls = Measure(trips, call);
    Call open(&stub);
    const std::string messages = Measure(trips, [&open] { open.RoundTrip(); });
    open.End();
    std::printf("{\"call\": %s, \"message\": %s}\n", calls.c_str(), messages.c_str());
  }
  kill(server, SIGKILL);
  waitpid(server, nullptr, 0);
}

}  // namespace
}  // namespace ringattn::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const int trips = absl::GetFlag(FLAGS_trips);
  if (trips < 1) {
    std::fprintf(stderr, "--trips is %d; it must be at least 1\n", trips);
    return 2;
  }
  ringattn::bench::Run(trips);
  return 0;
}
