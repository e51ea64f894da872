// How fast tensors travel client -> coordinator -> worker and back, beside a plain
// TCP relay with the same two hops, and beside the same RPC spoken with ordinary
// protobuf messages. All three move the same bytes, interleaved, in one run.
//
//   transport_bench --server=127.0.0.1:7700 [--streams=4] [--megabytes=64] [--rounds=5]
//
// The request has one key, so that out equals v's single row: nothing to compute,
// and every byte of the answer can be checked.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "client/client.h"
#include "ringattn/v1/attention.grpc.pb.h"
#include "tests/bench/tcp_relay.h"

ABSL_FLAG(std::string, server, "", "host:port of the service");
ABSL_FLAG(int, streams, 4, "requests at once");
ABSL_FLAG(int, megabytes, 64, "bytes of q, and of out, per request");
ABSL_FLAG(int, rounds, 5, "rounds; medians are reported");

namespace ringattn::bench {
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

  // Every row of out is v's row.
  bool Right() const {
    for (int64_t row = 0; row < rows; ++row) {
      if (std::memcmp(&out[row * kHeads * kDim], v.data(), kRowBytes) != 0) return false;
    }
    return true;
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
    std::vector<float>& target =
        chunk.tensor() == v1::TENSOR_ID_OUT ? request.out : request.lse;
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
  const TcpRelay relay;  // forks: before any thread
  const int streams = absl::GetFlag(FLAGS_streams);
  const int64_t rows = int64_t{absl::GetFlag(FLAGS_megabytes)} * 1000000 / kRowBytes;
  const std::string server = absl::GetFlag(FLAGS_server);
  auto client = Client::Connect(server, {.channels = streams});
  if (!client.ok()) Die(client.status().ToString());
  std::vector<std::unique_ptr<v1::AttentionService::Stub>> stubs;
  for (int i = 0; i < streams; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    stubs.push_back(v1::AttentionService::NewStub(
        grpc::CreateCustomChannel(server, grpc::InsecureChannelCredentials(), arguments)));
  }
  std::vector<Request> requests(streams, Request(rows));
  const int64_t bytes_up = rows * kRowBytes + 2 * kRowBytes;
  const int64_t bytes_down = rows * kRowBytes + rows * kHeads * 4;
  const double gigabytes = 1e-9 * streams * static_cast<double>(bytes_up + bytes_down);

  std::vector<double> tcp, library, stub;
  for (int round = 0; round <= absl::GetFlag(FLAGS_rounds); ++round) {
    const double a = relay.Exchange(streams, bytes_up, bytes_down);
    const double b = Together(requests, [&](size_t, Request& r) { WithLibrary(**client, r); });
    const double c = Together(requests, [&](size_t i, Request& r) { WithStub(*stubs[i], r); });
    if (round == 0) continue;  // warm up
    tcp.push_back(gigabytes / a);
    library.push_back(gigabytes / b);
    stub.push_back(gigabytes / c);
  }
  std::printf("%d streams, %.0f MB up and down each, medians of %d rounds\n", streams,
              1e-6 * static_cast<double>(bytes_up), absl::GetFlag(FLAGS_rounds));
  std::printf("  plain TCP relay      %6.2f GB/s\n", Median(tcp));
  std::printf("  client library       %6.2f GB/s  %.2f of the relay\n", Median(library),
              Median(library) / Median(tcp));
  std::printf("  generated stub       %6.2f GB/s  library is %.2f times as fast\n", Median(stub),
              Median(library) / Median(stub));
  return 0;
}

}  // namespace
}  // namespace ringattn::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return ringattn::bench::Run();
}
