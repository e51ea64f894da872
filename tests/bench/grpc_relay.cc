#include "tests/bench/grpc_relay.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <utility>

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include "common/security/credentials.h"
#include "common/wire/transport.h"

namespace ringattn::bench {
namespace {

constexpr char kMethod[] = "/bench/Relay";
// As large as the client library's chunks.
constexpr int64_t kMessageBytes = 1 << 20;
// Messages that may wait in the relay for each direction, the one being written included.
constexpr size_t kQueuedMessages = 2;
// From the relay to the sink, as from the coordinator to a worker.
constexpr int kChannels = 4;

struct Sizes {
  int64_t up = 0;
  int64_t down = 0;
};

grpc::ByteBuffer Header(const Sizes& sizes) {
  const grpc::Slice slice(&sizes, sizeof(sizes));
  return grpc::ByteBuffer(&slice, 1);
}

Sizes ParseHeader(const grpc::ByteBuffer& buffer) {
  Sizes sizes;
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok() || buffer.Length() != sizeof(sizes)) std::_Exit(3);
  auto* out = reinterpret_cast<char*>(&sizes);
  for (const grpc::Slice& slice : slices) {
    std::memcpy(out, slice.begin(), slice.size());
    out += slice.size();
  }
  return sizes;
}

// Messages over the same memory again and again.
class Source {
 public:
  explicit Source(int64_t bytes) : left_(bytes) {}

  bool Next(grpc::ByteBuffer* message) {
    if (left_ == 0) return false;
    static std::vector<char>* const memory = new std::vector<char>(kMessageBytes, 'x');
    const int64_t bytes = std::min(left_, kMessageBytes);
    left_ -= bytes;
    const grpc::Slice slice(memory->data(), bytes, [](void*) {});
    *message = grpc::ByteBuffer(&slice, 1);
    return true;
  }

 private:
  int64_t left_;
};

// ------------------------------------------------------------------------ sink

class SinkCall : public grpc::ServerGenericBidiReactor {
 public:
  SinkCall() { StartRead(&incoming_); }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (source_ == nullptr) {
      const Sizes sizes = ParseHeader(incoming_);
      left_ = sizes.up;
      source_ = std::make_unique<Source>(sizes.down);
    } else {
      left_ -= incoming_.Length();
    }
    incoming_.Clear();
    if (left_ > 0) return StartRead(&incoming_);
    OnWriteDone(true);
  }

  void OnWriteDone(bool ok) override {
    if (ok && source_->Next(&outgoing_)) return StartWrite(&outgoing_);
    Finish(grpc::Status::OK);
  }

  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer incoming_, outgoing_;
  int64_t left_ = 0;
  std::unique_ptr<Source> source_;
};

// ----------------------------------------------------------------------- relay

// One direction: reads while there is room, writes the bytes it has read, then reports the end.
struct Pipe {
  std::function<void(grpc::ByteBuffer*)> start_read, start_write;
  std::function<void()> on_end;
  std::mutex mutex;
  grpc::ByteBuffer incoming;
  std::deque<grpc::ByteBuffer> waiting;
  bool reading = false, writing = false, ended = false, told = false;

  void Move() {
    if (!reading && !ended && waiting.size() < kQueuedMessages) {
      reading = true;
      start_read(&incoming);
    }
    if (writing) return;
    if (!waiting.empty()) {
      writing = true;
      start_write(&waiting.front());
    } else if (ended && !std::exchange(told, true)) {
      on_end();
    }
  }
  void OnRead(bool ok) {
    const std::lock_guard lock(mutex);
    reading = false;
    if (ok) {
      waiting.push_back(std::move(incoming));
    } else {
      ended = true;
    }
    Move();
  }
  void OnWritten(bool ok) {
    const std::lock_guard lock(mutex);
    writing = false;
    waiting.pop_front();
    Move();
  }
};

class RelayCall : public grpc::ServerGenericBidiReactor {
 public:
  explicit RelayCall(const std::shared_ptr<grpc::Channel>& channel) : stub_(channel), out_(this) {
    stub_.PrepareBidiStreamingCall(&context_, kMethod, {}, &out_);
    up_.start_read = [this](grpc::ByteBuffer* buffer) { StartRead(buffer); };
    up_.start_write = [this](grpc::ByteBuffer* buffer) { out_.StartWrite(buffer); };
    up_.on_end = [this] { out_.StartWritesDone(); };
    down_.start_read = [this](grpc::ByteBuffer* buffer) { out_.StartRead(buffer); };
    down_.start_write = [this](grpc::ByteBuffer* buffer) { StartWrite(buffer); };
    down_.on_end = [this] { out_.RemoveHold(); };
    out_.AddHold();
    {
      const std::lock_guard lock(up_.mutex);
      up_.Move();
    }
    {
      const std::lock_guard lock(down_.mutex);
      down_.Move();
    }
    out_.StartCall();
  }

  void OnReadDone(bool ok) override { up_.OnRead(ok); }
  void OnWriteDone(bool ok) override { down_.OnWritten(ok); }
  void OnDone() override { delete this; }

 private:
  struct Out : grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
    explicit Out(RelayCall* call) : call(call) {}
    void OnReadDone(bool ok) override { call->down_.OnRead(ok); }
    void OnWriteDone(bool ok) override { call->up_.OnWritten(ok); }
    void OnDone(const grpc::Status& status) override { call->Finish(status); }
    RelayCall* const call;
  };

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  Out out_;
  Pipe up_, down_;
};

// --------------------------------------------------------------------- processes

template <typename Make>
class Service : public grpc::CallbackGenericService {
 public:
  explicit Service(Make make) : make_(std::move(make)) {}

 private:
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return make_();
  }
  const Make make_;
};

std::vector<std::shared_ptr<grpc::Channel>> Dial(const std::string& address, int count) {
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < count; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    wire::SetTransport(&arguments);
    channels.push_back(
        grpc::CreateCustomChannel(address, TransportSecurity().ChannelCredentials(), arguments));
  }
  return channels;
}

// A process that serves calls with the reactors that `make()` makes; its address.
template <typename Make>
std::string Fork(pid_t* pid, const Make& make) {
  int ends[2];
  if (pipe(ends) != 0) std::_Exit(2);
  *pid = fork();
  if (*pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    auto* service = new Service(make());
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.SetMaxReceiveMessageSize(-1);
    wire::SetTransport(&builder);
    builder.RegisterCallbackGenericService(service);
    const auto server = builder.BuildAndStart();
    if (server == nullptr || write(ends[1], &port, sizeof(port)) != sizeof(port)) std::_Exit(2);
    server->Wait();
  }
  int port = 0;
  if (read(ends[0], &port, sizeof(port)) != sizeof(port)) std::_Exit(2);
  close(ends[0]);
  close(ends[1]);
  return "127.0.0.1:" + std::to_string(port);
}

// ------------------------------------------------------------------------ client

class ClientCall : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ClientCall(const std::shared_ptr<grpc::Channel>& channel, const Sizes& sizes)
      : stub_(channel), source_(sizes.up), left_(sizes.down) {
    stub_.PrepareBidiStreamingCall(&context_, kMethod, {}, this);
    outgoing_ = Header(sizes);
    StartWrite(&outgoing_);
    StartRead(&incoming_);
    StartCall();
  }

  // False unless everything came back.
  bool Wait() { return ended_.get_future().get() && left_ == 0; }

  void OnWriteDone(bool ok) override {
    if (!ok) return;
    if (source_.Next(&outgoing_)) {
      StartWrite(&outgoing_);
    } else {
      StartWritesDone();
    }
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    left_ -= incoming_.Length();
    StartRead(&incoming_);
  }
  void OnDone(const grpc::Status& status) override { ended_.set_value(status.ok()); }

 private:
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer outgoing_, incoming_;
  Source source_;
  int64_t left_;
  std::promise<bool> ended_;
};

}  // namespace

GrpcRelay::GrpcRelay() {
  using Reactor = grpc::ServerGenericBidiReactor;
  const std::string sink =
      Fork(&sink_, [] { return [] { return static_cast<Reactor*>(new SinkCall); }; });
  address_ = Fork(&relay_, [sink] {
    return [channels = Dial(sink, kChannels),
            next = std::make_shared<std::atomic<size_t>>(0)]() -> Reactor* {
      return new RelayCall(channels[next->fetch_add(1) % channels.size()]);
    };
  });
}

GrpcRelay::~GrpcRelay() {
  for (const pid_t pid : {sink_, relay_}) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
}

double GrpcRelay::Exchange(int streams, int64_t bytes_up, int64_t bytes_down) {
  if (channels_.empty()) channels_ = Dial(address_, streams);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::unique_ptr<ClientCall>> calls;
  for (int i = 0; i < streams; ++i) {
    calls.push_back(
        std::make_unique<ClientCall>(channels_[i % channels_.size()], Sizes{bytes_up, bytes_down}));
  }
  bool good = true;
  for (const auto& call : calls) good = call->Wait() && good;
  if (!good) {
    std::fprintf(stderr, "the gRPC relay lost bytes\n");
    std::exit(1);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace ringattn::bench
