// Decode steps of a K/V cache on CPUs: one row against a long sequence.
//
//   rate     the time of a layer call on a shard, and of the same kernel call on contiguous K and V
//   latency  the time of a layer call over a gRPC stream less its device time, and that of an empty
//            message there and back on the same stream
//
// Both sides of a comparison run in turn. The result of every layer call is compared with the
// kernel's on contiguous keys, bit by bit, before anything is timed.
//
//   kv_step_bench --keys=16384 --threads=2
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/kv/step_metadata.h"
#include "common/oracle/generator.h"
#include "common/security/credentials.h"
#include "common/wire/durations.h"
#include "common/wire/grpc_1_51/keep_awake.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/kv/step_streams.h"

ABSL_FLAG(int64_t, keys, 16384, "entries of the sequence");
ABSL_FLAG(int, heads, 32, "query heads");
ABSL_FLAG(int, kv_heads, 8, "kv heads");
ABSL_FLAG(int, head_dim, 128, "dim of a head");
ABSL_FLAG(int, block_tokens, 64, "entries of a block");
ABSL_FLAG(int, threads, 1, "compute threads");
ABSL_FLAG(int, calls, 200, "timed calls of each kind");

namespace ringattn::worker {
namespace {

using Clock = std::chrono::steady_clock;

double Micros(Clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(q * values.size()))];
}

std::string Random(int64_t elements, uint64_t stream) {
  std::string bytes(elements * 2, 0);
  oracle::FillNormal(DType::kBFloat16, 1, stream, 0, elements, 1.0, bytes.data());
  return bytes;
}

#define REQUIRE(condition)                                                 \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

class Bench {
 public:
  Bench()
      : keys_(absl::GetFlag(FLAGS_keys)),
        device_(absl::GetFlag(FLAGS_threads), 0),
        kernels_(*device_.MakeStepKernels()),
        budget_(int64_t{64} << 30),
        store_({.max_bytes = int64_t{64} << 30}, &device_, &budget_,
               [this](v1::JoinRequest message) {
                 absl::MutexLock lock(&mutex_);
                 sent_.push_back(std::move(message));
               }),
        service_(&store_, "", {}) {}

  void Run() {
    OpenCache();
    StartStream();
    Prefill();
    Prepare();
    MeasureRate();
    MeasureLatency();
  }

 private:
  int64_t heads() const { return absl::GetFlag(FLAGS_heads); }
  int64_t kv_heads() const { return absl::GetFlag(FLAGS_kv_heads); }
  int64_t dim() const { return absl::GetFlag(FLAGS_head_dim); }

  void Await() {
    const auto any = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !sent_.empty(); };
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&any));
    sent_.pop_front();
  }

  void OpenCache() {
    v1::KvReserve reserve;
    reserve.set_cache_id("c");
    v1::KvCacheSpec* spec = reserve.mutable_spec();
    spec->set_dtype(v1::DATA_TYPE_BFLOAT16);
    spec->set_block_tokens(absl::GetFlag(FLAGS_block_tokens));
    spec->set_blocks(keys_ / absl::GetFlag(FLAGS_block_tokens) + 2);
    v1::KvLayerGroup* group = spec->add_groups();
    group->add_layers(0);
    group->set_num_heads(heads());
    group->set_num_kv_heads(kv_heads());
    group->set_head_dim(dim());
    reserve.mutable_placement()->add_members(std::string("w"));
    reserve.mutable_placement()->set_head_parts(1);
    reserve.mutable_placement()->set_position_parts(1);
    store_.Reserve(reserve);
    Await();
    v1::KvOpen open;
    open.set_cache_id("c");
    open.set_epoch(1);
    open.set_token("token");
    store_.Open(open);
    Await();
    v1::KvSettle settle;
    settle.set_cache_id("c");
    settle.set_epoch(1);
    store_.Settle(settle);
    Await();
  }

  void StartStream() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", TransportSecurity().ServerCredentials(), &port);
    builder.SetMaxReceiveMessageSize(64 << 20);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    stub_ = v1::KvShardService::NewStub(grpc::CreateChannel(
        absl::StrCat("127.0.0.1:", port), TransportSecurity().ChannelCredentials()));
    v1::StepRequest request;
    request.mutable_hello()->set_cache_id("c");
    request.mutable_hello()->set_epoch(1);
    request.mutable_hello()->set_token("token");
    context_.AddMetadata(kStepHelloMetadataKey, request.hello().SerializeAsString());
    stream_ = stub_->Steps(&context_);
    REQUIRE(Ask(request).has_opened());
  }

  const v1::StepResponse& Ask(const v1::StepRequest& request) {
    REQUIRE(stream_->Write(request));
    REQUIRE(stream_->Read(&response_));
    return response_;
  }

  void Begin(int64_t append, int64_t queries) {
    v1::StepRequest request;
    request.mutable_begin()->set_step(++step_);
    v1::StepRow* row = request.mutable_begin()->add_rows();
    row->set_sequence(1);
    row->set_expected_length(length_);
    row->set_keep_length(length_);
    row->set_append_tokens(append);
    row->set_q_tokens(queries);
    REQUIRE(Ask(request).has_accepted());
    length_ += append;
  }

  v1::StepRequest CallOf(int64_t append, int64_t queries) {
    v1::StepRequest request;
    v1::LayerCall* call = request.mutable_call();
    call->set_step(step_);
    call->set_q(Random(queries * heads() * dim(), 3 * step_));
    call->set_k(Random(append * kv_heads() * dim(), 3 * step_ + 1));
    call->set_v(Random(append * kv_heads() * dim(), 3 * step_ + 2));
    k_ += call->k();
    v_ += call->v();
    return request;
  }

  void Prefill() {
    while (length_ < keys_ - 1) {
      const int64_t chunk = std::min<int64_t>(1024, keys_ - 1 - length_);
      Begin(chunk, 0);
      REQUIRE(Ask(CallOf(chunk, 0)).has_result());
    }
    Begin(1, 1);
    decode_ = CallOf(1, 1);
  }

  // The kernel's call on contiguous K and V; the first layer call must agree with it.
  void Prepare() {
    problem_.dtype = DType::kBFloat16;
    problem_.num_heads = heads();
    problem_.num_kv_heads = kv_heads();
    problem_.head_dim = problem_.head_dim_v = dim();
    problem_.softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim())));
    problem_.bands = {{-kUnboundedBand, keys_ - 1}};
    out_.resize(heads() * dim() * 2);
    lse_.resize(heads());
    ForwardCall call;
    call.problem = &problem_;
    call.q_rows = 1;
    call.q_pieces = {{0, 1, 0, 0, 1}};
    call.q = decode_.call().q().data();
    KvBlock block;
    block.rows = keys_;
    block.pieces = {{0, keys_, 0, 0, 1}};
    // Device memory, as the cache's: its pages are huge ones where the system has them.
    for (const std::string* tensor : {&k_, &v_}) {
      contiguous_.push_back(*device_.Allocate(static_cast<int64_t>(tensor->size())));
      std::memcpy(contiguous_.back()->data(), tensor->data(), tensor->size());
    }
    block.k = contiguous_[0]->data();
    block.v = contiguous_[1]->data();
    call.blocks = {block};
    call.initial = call.final = true;
    call.out = out_.data();
    call.lse = lse_.data();
    kernel_ = call;
    REQUIRE(kernels_->Run(kernel_, never_).ok());
    REQUIRE(Ask(decode_).has_result());
    REQUIRE(response_.result().out() == out_);
  }

  void MeasureRate() {
    std::vector<double> kernel, shard;
    for (int i = 0; i < absl::GetFlag(FLAGS_calls); ++i) {
      const auto begin = Clock::now();
      REQUIRE(kernels_->Run(kernel_, never_).ok());
      kernel.push_back(Micros(Clock::now() - begin));
      REQUIRE(Ask(decode_).has_result());
      shard.push_back(absl::ToDoubleMicroseconds(ToDuration(response_.result().device_time())));
    }
    const double bytes = static_cast<double>(k_.size() + v_.size());
    std::printf(
        "keys %lld, %d threads: kernel p50 %.1f us (%.2f GB/s), layer call p50 %.1f us; "
        "rate %.3f of the kernel's (at least 0.95)\n",
        static_cast<long long>(keys_), absl::GetFlag(FLAGS_threads), Quantile(kernel, 0.5),
        bytes / Quantile(kernel, 0.5) / 1e3, Quantile(shard, 0.5),
        Quantile(kernel, 0.5) / Quantile(shard, 0.5));
  }

  void MeasureLatency() {
    v1::StepRequest commit;
    std::vector<double> empty, paused, call;
    const absl::Duration pause = ToDuration(response_.result().device_time());
    for (int i = 0; i < absl::GetFlag(FLAGS_calls); ++i) {
      if (i > 0) {
        // Rolls the entry back, so that every step has equally many keys.
        length_ -= 1;
        v1::StepRequest begin;
        begin.mutable_begin()->set_step(++step_);
        v1::StepRow* row = begin.mutable_begin()->add_rows();
        row->set_sequence(1);
        row->set_expected_length(length_ + 1);
        row->set_keep_length(length_);
        row->set_append_tokens(1);
        row->set_q_tokens(1);
        REQUIRE(Ask(begin).has_accepted());
        length_ += 1;
        decode_.mutable_call()->set_step(step_);
      }
      auto start = Clock::now();
      REQUIRE(Ask(decode_).has_result());
      call.push_back(Micros(Clock::now() - start) -
                     absl::ToDoubleMicroseconds(ToDuration(response_.result().device_time())));
      commit.mutable_commit()->set_step(step_);
      REQUIRE(Ask(commit).has_committed());
      start = Clock::now();
      REQUIRE(Ask(commit).has_committed());  // repeated: an empty message
      empty.push_back(Micros(Clock::now() - start));
      // The other end of a call's connection has been idle while the call was computed.
      absl::SleepFor(pause);
      start = Clock::now();
      REQUIRE(Ask(commit).has_committed());
      paused.push_back(Micros(Clock::now() - start));
    }
    const double bytes =
        static_cast<double>(decode_.call().q().size() * 2 + decode_.call().k().size() * 2);
    std::printf(
        "empty message p50 %.1f us, p99 %.1f; after a pause as long as a call p50 %.1f; "
        "layer call less device time (%.0f bytes) p50 %.1f us, p99 %.1f; ratio of p50 %.2f "
        "(at most 2), to the message after a pause %.2f\n",
        Quantile(empty, 0.5), Quantile(empty, 0.99), Quantile(paused, 0.5), bytes,
        Quantile(call, 0.5), Quantile(call, 0.99), Quantile(call, 0.5) / Quantile(empty, 0.5),
        Quantile(call, 0.5) / Quantile(paused, 0.5));
  }

  const int64_t keys_;
  CpuDevice device_;
  const std::unique_ptr<StepKernels> kernels_;
  const std::atomic<bool> never_{false};
  MemoryBudget budget_;
  absl::Mutex mutex_;
  std::deque<v1::JoinRequest> sent_ ABSL_GUARDED_BY(mutex_);
  KvStore store_;
  KvShardServiceImpl service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::KvShardService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>> stream_;
  v1::StepResponse response_;
  uint64_t step_ = 0;
  int64_t length_ = 0;
  std::string k_, v_;  // all that was appended
  std::vector<std::unique_ptr<DeviceBuffer>> contiguous_;
  v1::StepRequest decode_;
  AttentionProblem problem_;
  KernelCall kernel_;
  std::string out_;
  std::vector<float> lse_;
};

}  // namespace
}  // namespace ringattn::worker

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const ringattn::wire::KeepAwake keep_awake;  // as in a worker
  ringattn::worker::Bench().Run();
  std::fflush(stdout);
  std::_Exit(0);  // without waiting for the stream, which stays open
}
