// How fast tensors travel client -> coordinator -> worker and back, compared with a plain TCP relay
// and a bare gRPC relay with the same two hops, and with the same RPC through ordinary protobuf
// messages. All move the same bytes, interleaved, in one run.
//
// The gRPC relay is the library's upper bound: it neither reads, stores nor computes with the raw
// messages, and it uses this service's transport settings.
//
//   transport_bench --server=127.0.0.1:7700 [--streams=4] [--megabytes=64] [--rounds=5]
//
// With --tls_server the library's path runs against that service too (tests/bench/tls_rate.py).
//
// The request is causal with one key, which the last row sees: nothing to compute, and
// every byte of the answer can be checked.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "client/api/client.h"
#include "common/security/credentials.h"
#include "common/wire/allocator.h"
#include "ringattn/v1/attention.grpc.pb.h"
#include "tests/bench/grpc_relay.h"
#include "tests/bench/tcp_relay.h"

ABSL_FLAG(std::string, server, "", "host:port of the service");
ABSL_FLAG(int, streams, 4, "requests at once");
ABSL_FLAG(int, megabytes, 64, "bytes of q, and of out, per request");
ABSL_FLAG(std::vector<std::string>, paths,
          std::vector<std::string>({"tcp", "grpc", "library", "stub"}),
          "what to run; one alone is for a profiler");
ABSL_FLAG(std::string, tls_server, "", "a second service, reached over TLS: the path \"tls\"");
ABSL_FLAG(std::string, tls_ca, "", "of --tls_server: as the command line's flags");
ABSL_FLAG(std::string, tls_cert, "", "likewise");
ABSL_FLAG(std::string, tls_key, "", "likewise");
ABSL_FLAG(int, rounds, 5, "rounds; medians are reported");

namespace ringattn::bench {

using namespace ringattn::client;  // what is under test
namespace {

constexpr int kHeads = 16;
constexpr int kDim = 256;
constexpr int64_t kRowBytes = int64_t{kHeads} * kDim * 4;

struct Request {
  int64_t rows;
  std::vector<float> q, k, v, out, lse;

  explicit Request(int64_t rows_in) : rows(rows_in) {
    q.assign(rows * kHeads * kDim, 0.25f);
    k.assign(kHeads * kDim, 0.5f);
    v.resize(kHeads * kDim);
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i % 977) - 400.0f;
    out.resize(q.size());
    lse.resize(rows * kHeads);
  }

  v1::AttentionShape Shape() const {
    v1::AttentionShape shape;
    shape.set_batch(1);
    shape.set_seq_len_q(rows);
    shape.set_seq_len_kv(1);
    shape.set_num_heads(kHeads);
    shape.set_num_kv_heads(kHeads);
    shape.set_head_dim(kDim);
    shape.set_head_dim_v(kDim);
    return shape;
  }

  // Zeros for the rows that see no key, v's row for the last.
  bool Right() const {
    const size_t last = out.size() - v.size();
    return std::all_of(out.begin(), out.begin() + last, [](float x) { return x == 0; }) &&
           std::memcmp(&out[last], v.data(), kRowBytes) == 0;
  }
};

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

void WithLibrary(Client& client, Request& request) {
  ForwardArgs args;
  args.shape = request.Shape();
  args.dtype = v1::DATA_TYPE_FLOAT32;
  args.options.set_causal(true);
  args.plan.set_schedule(v1::SCHEDULE_SINGLE);
  args.q = BytesOf(request.q);
  args.k = BytesOf(request.k);
  args.v = BytesOf(request.v);
  CallOptions options;
  options.with_crc32c = false;  // the relay checks nothing either
  const CallResult result = client.Forward(
      args, {.out = MutableBytesOf(request.out), .lse = MutableBytesOf(request.lse)}, options);
  if (!result.ok()) Die(FormatError(result.status()));
}

void WithStub(v1::AttentionService::Stub& stub, Request& request) {
  grpc::ClientContext context;
  auto stream = stub.Forward(&context);
  v1::ForwardRequest message;
  *message.mutable_header()->mutable_shape() = request.Shape();
  message.mutable_header()->set_dtype(v1::DATA_TYPE_FLOAT32);
  message.mutable_header()->mutable_options()->set_causal(true);
  message.mutable_header()->mutable_plan()->set_schedule(v1::SCHEDULE_SINGLE);
  stream->Write(message);
  v1::ForwardResponse response;
  if (!stream->Read(&response)) Die(stream->Finish().error_message());
  const auto send = [&](v1::TensorId id, const std::vector<float>& tensor) {
    const char* data = reinterpret_cast<const char*>(tensor.data());
    const size_t bytes = tensor.size() * sizeof(float), chunk_bytes = 1 << 20;
    for (size_t offset = 0; offset < bytes; offset += chunk_bytes) {
      auto* chunk = message.mutable_chunk();
      chunk->set_tensor(id);
      chunk->set_offset(offset);
      chunk->set_data(data + offset, std::min(chunk_bytes, bytes - offset));
      if (!stream->Write(message)) return;
    }
  };
  send(v1::TENSOR_ID_Q, request.q);
  send(v1::TENSOR_ID_K, request.k);
  send(v1::TENSOR_ID_V, request.v);
  stream->WritesDone();
  while (stream->Read(&response)) {
    if (!response.has_chunk()) continue;
    const v1::TensorChunk& chunk = response.chunk();
    std::vector<float>& target = chunk.tensor() == v1::TENSOR_ID_OUT ? request.out : request.lse;
    std::memcpy(reinterpret_cast<char*>(target.data()) + chunk.offset(), chunk.data().data(),
                chunk.data().size());
  }
  if (const grpc::Status status = stream->Finish(); !status.ok()) Die(status.error_message());
}

// Runs `work` on every request at once; seconds.
template <typename Work>
double Together(std::vector<Request>& requests, const Work& work) {
  for (Request& request : requests) std::fill(request.out.begin(), request.out.end(), -1.0f);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (size_t i = 0; i < requests.size(); ++i) {
    threads.emplace_back([&, i] { work(i, requests[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (const Request& request : requests) {
    if (!request.Right()) Die("wrong output");
  }
  return seconds;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int Run() {
  wire::KeepFreedMemory();  // inherited by the relays' processes
  const TcpRelay relay;     // forks: before any thread
  GrpcRelay grpc_relay;
  const int streams = absl::GetFlag(FLAGS_streams);
  const int64_t rows = int64_t{absl::GetFlag(FLAGS_megabytes)} * 1000000 / kRowBytes;
  const std::string server = absl::GetFlag(FLAGS_server);
  auto client = Client::Connect(server, {.channels = streams});
  if (!client.ok()) Die(client.status().ToString());
  std::unique_ptr<Client> tls_client;
  if (const std::string tls_server = absl::GetFlag(FLAGS_tls_server); !tls_server.empty()) {
    auto connected = Client::Connect(tls_server, {.channels = streams,
                                                  .tls_ca = absl::GetFlag(FLAGS_tls_ca),
                                                  .tls_cert = absl::GetFlag(FLAGS_tls_cert),
                                                  .tls_key = absl::GetFlag(FLAGS_tls_key)});
    if (!connected.ok()) Die(connected.status().ToString());
    tls_client = *std::move(connected);
  }
  std::vector<std::unique_ptr<v1::AttentionService::Stub>> stubs;
  for (int i = 0; i < streams; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stubs.push_back(v1::AttentionService::NewStub(
        grpc::CreateCustomChannel(server, TransportSecurity().ChannelCredentials(), arguments)));
  }
  std::vector<Request> requests(streams, Request(rows));
  const int64_t bytes_up = rows * kRowBytes + 2 * kRowBytes;
  const int64_t bytes_down = rows * kRowBytes + rows * kHeads * 4;
  const double gigabytes = 1e-9 * streams * static_cast<double>(bytes_up + bytes_down);

  struct Path {
    const char* name;
    std::function<double()> seconds;
    std::vector<double> rates = {};
  };
  Path paths[] = {
      {"tcp", [&] { return relay.Exchange(streams, bytes_up, bytes_down); }},
      {"grpc", [&] { return grpc_relay.Exchange(streams, bytes_up, bytes_down); }},
      {"library",
       [&] { return Together(requests, [&](size_t, Request& r) { WithLibrary(**client, r); }); }},
      {"tls",
       [&] {
         return Together(requests, [&](size_t, Request& r) { WithLibrary(*tls_client, r); });
       }},
      {"stub",
       [&] { return Together(requests, [&](size_t i, Request& r) { WithStub(*stubs[i], r); }); }}};
  std::vector<std::string> wanted = absl::GetFlag(FLAGS_paths);
  if (tls_client != nullptr) wanted.push_back("tls");
  for (int round = 0; round <= absl::GetFlag(FLAGS_rounds); ++round) {
    for (Path& path : paths) {
      if (std::count(wanted.begin(), wanted.end(), path.name) == 0) continue;
      const double seconds = path.seconds();
      if (round > 0) path.rates.push_back(gigabytes / seconds);  // the first warms up
    }
  }
  std::printf("%d streams, %.0f MB up and down each, medians of %d rounds\n", streams,
              1e-6 * static_cast<double>(bytes_up), absl::GetFlag(FLAGS_rounds));
  for (const Path& path : paths) {
    if (path.rates.empty()) continue;
    std::printf("  %-8s %6.2f GB/s", path.name, Median(path.rates));
    if (!paths[0].rates.empty()) {
      std::printf("  %5.2f of tcp", Median(path.rates) / Median(paths[0].rates));
    }
    std::printf("\n");
  }
  return 0;
}

}  // namespace
}  // namespace ringattn::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::bench::Run();
}
