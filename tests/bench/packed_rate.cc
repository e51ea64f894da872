// How fast qkv- and kv-packed inputs reach the workers, compared with q, k and v apart, over each
// transport, interleaved in one run; every result is checked.
//
//   packed_rate --server=127.0.0.1:7700 [--paths=host,direct,relay] [--megabytes=96] [--rounds=9]
//               [--workers=1] [--channels=2] [--heads=8] [--head_dim=64]
//
// Each token sees its own key alone, so that next to nothing is computed: out equals v bit for bit,
// and lse is the product of that token's q and k. The measured time is the upload stage, as
// transport_rate has it. A packed tensor's rows lie in runs of heads * head_dim elements of bf16.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "client/api/client.h"
#include "client/api/region.h"
#include "common/wire/allocator.h"
#include "common/wire/durations.h"

ABSL_FLAG(std::string, server, "", "host:port of the service");
ABSL_FLAG(int, megabytes, 96, "bytes of q, k and v together");
ABSL_FLAG(std::vector<std::string>, paths, (std::vector<std::string>{"relay"}),
          "of host, direct, relay");
ABSL_FLAG(int, workers, 1, "of the ring that serves the request");
ABSL_FLAG(int, channels, 2, "direct: connections to each worker");
ABSL_FLAG(int, heads, 8, "of q, k and v");
ABSL_FLAG(int, head_dim, 64, "of q, k and v");
ABSL_FLAG(int, rounds, 9, "rounds; medians are reported");

namespace ringattn::bench {

using namespace ringattn::client;  // what is under test
namespace {

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

float ToFloat(uint16_t bf16) {
  const uint32_t bits = uint32_t{bf16} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Form {
  const char* name;
  v1::Packing packing;
};
constexpr Form kForms[] = {
    {"q, k, v", v1::PACKING_UNSPECIFIED}, {"qkv", v1::PACKING_QKV}, {"q, kv", v1::PACKING_KV}};

struct Way {
  const char* name;
  TransportPreference wish;
};

Way WayOf(const std::string& name) {
  if (name == "host") return {"host memory", TransportPreference::kHostMemory};
  if (name == "direct") return {"direct", TransportPreference::kDirect};
  if (name == "relay") return {"relay", TransportPreference::kRelay};
  Die(absl::StrCat("--paths: path is ", name, ", must be host, direct or relay"));
}

class Bench {
 public:
  Bench()
      : heads_(absl::GetFlag(FLAGS_heads)),
        row_(int64_t{heads_} * absl::GetFlag(FLAGS_head_dim)),
        tokens_(std::max<int64_t>(1, absl::GetFlag(FLAGS_megabytes) * 1'000'000 / (6 * row_))) {
    ClientOptions options;
    options.channels_per_worker = absl::GetFlag(FLAGS_channels);
    auto client = Client::Connect(absl::GetFlag(FLAGS_server), options);
    if (!client.ok()) Die(client.status().ToString());
    client_ = *std::move(client);
    // The same memory for all ways: three forms of the inputs, and the results.
    const int64_t bytes = 2 * tokens_ * row_;
    auto region = Region::Allocate(client_.get(), 9 * bytes + bytes + 4 * tokens_ * heads_);
    if (!region.ok()) Die(region.status().ToString());
    region_ = *std::move(region);
    uint8_t* memory = region_->memory().data();
    const auto take = [&](int64_t size) {
      memory += size;
      return MutableBytes(memory - size, size);
    };
    for (MutableBytes* part : {&q_, &k_, &v_, &out_}) *part = take(bytes);
    kv_ = take(2 * bytes);
    qkv_ = take(3 * bytes);
    lse_ = take(4 * tokens_ * heads_);
    Fill();
  }

  void Run() {
    std::printf(
        "%.0f MB of %lld tokens, %d heads, runs of %lld bytes, %d workers, medians of %d "
        "rounds, GB/s up\n",
        1e-6 * InputBytes(), static_cast<long long>(tokens_), heads_,
        static_cast<long long>(2 * row_), absl::GetFlag(FLAGS_workers),
        absl::GetFlag(FLAGS_rounds));
    for (const std::string& path : absl::GetFlag(FLAGS_paths)) Measure(WayOf(path));
  }

 private:
  double InputBytes() const { return 6.0 * static_cast<double>(tokens_ * row_); }

  // Values between 0.5 and 1 of either sign, which differ from row to row and from part to part.
  void Fill() {
    std::mt19937 random(3);
    const size_t row_bytes = 2 * row_;
    const MutableBytes* const parts[] = {&q_, &k_, &v_};
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int64_t part = 0; part < 3; ++part) {
        uint8_t* const row = parts[part]->data() + t * row_bytes;
        for (int64_t e = 0; e < row_; ++e) {
          const auto value = static_cast<uint16_t>(0x3f00 | (random() & 0x807f));
          std::memcpy(row + 2 * e, &value, 2);
        }
        std::memcpy(qkv_.data() + (3 * t + part) * row_bytes, row, row_bytes);
        if (part > 0) std::memcpy(kv_.data() + (2 * t + part - 1) * row_bytes, row, row_bytes);
      }
    }
  }

  void Measure(const Way& way) {
    std::vector<double> seconds[std::size(kForms)];
    // The first round: faults and connections.
    for (int round = -1; round < absl::GetFlag(FLAGS_rounds); ++round) {
      for (size_t turn = 0; turn < std::size(kForms); ++turn) {
        // Each begins as often: what follows a form may find its memory.
        const size_t form = (turn + static_cast<size_t>(round + 1)) % std::size(kForms);
        const double took = Upload(way.wish, kForms[form].packing);
        if (round >= 0) seconds[form].push_back(took);
      }
    }
    for (size_t form = 0; form < std::size(kForms); ++form) {
      std::printf("%-12s %-8s %6.2f", way.name, kForms[form].name,
                  1e-9 * InputBytes() / Median(seconds[form]));
      if (form > 0) {
        std::vector<double> shares;
        for (size_t round = 0; round < seconds[form].size(); ++round) {
          shares.push_back(seconds[0][round] / seconds[form][round]);
        }
        std::printf("  %.2f of apart (%.2f to %.2f)", Median(shares),
                    *std::min_element(shares.begin(), shares.end()),
                    *std::max_element(shares.begin(), shares.end()));
      }
      std::printf("\n");
    }
  }

  double Upload(TransportPreference wish, v1::Packing packing) {
    ForwardArgs args;
    args.shape.set_batch(1);
    args.shape.set_seq_len_q(tokens_);
    args.shape.set_seq_len_kv(tokens_);
    args.shape.set_num_heads(heads_);
    args.shape.set_head_dim(row_ / heads_);
    args.shape.set_packing(packing);
    args.dtype = v1::DATA_TYPE_BFLOAT16;
    args.options.mutable_window()->set_left(0);
    args.options.mutable_window()->set_right(0);
    const int workers = absl::GetFlag(FLAGS_workers);
    args.plan.set_schedule(workers == 1 ? v1::SCHEDULE_SINGLE : v1::SCHEDULE_RING);
    args.plan.set_layout(v1::LAYOUT_CONTIGUOUS);
    args.plan.set_world_size(workers);
    if (packing == v1::PACKING_QKV) {
      args.more[v1::TENSOR_ID_QKV] = qkv_;
    } else {
      args.q = q_;
      if (packing == v1::PACKING_KV) {
        args.more[v1::TENSOR_ID_KV] = kv_;
      } else {
        args.k = k_;
        args.v = v_;
      }
    }
    std::memset(out_.data(), 0xff, out_.size());
    std::memset(lse_.data(), 0xff, lse_.size());
    CallOptions options;
    options.transport = wish;
    options.transport_required = wish != TransportPreference::kRelay;
    options.with_crc32c = false;
    const CallResult result = client_->Forward(args, {.out = out_, .lse = lse_}, options);
    if (!result.ok()) Die(FormatError(result.status()));
    if (!IsRight()) Die("a wrong result");
    for (const v1::StageTime& stage : result->summary.stages()) {
      if (stage.stage() == v1::STAGE_UPLOAD) return ToSeconds(stage.time());
    }
    Die("no time of the upload");
  }

  bool IsRight() const {
    if (std::memcmp(out_.data(), v_.data(), out_.size()) != 0) return false;
    const int64_t dim = row_ / heads_;
    const auto at = [](const MutableBytes& tensor, int64_t element) {
      uint16_t bf16;
      std::memcpy(&bf16, tensor.data() + 2 * element, 2);
      return ToFloat(bf16);
    };
    for (int64_t t = 0; t < tokens_; t += 61) {
      const int64_t head = t % heads_;
      double score = 0.0;
      for (int64_t e = t * row_ + head * dim; e < t * row_ + (head + 1) * dim; ++e) {
        score += double{at(q_, e)} * at(k_, e);
      }
      score /= std::sqrt(static_cast<double>(dim));
      float lse;
      std::memcpy(&lse, lse_.data() + 4 * (head * tokens_ + t), 4);
      if (!(std::abs(lse - score) <= 1e-4 * (1.0 + std::abs(score)))) return false;
    }
    return true;
  }

  const int heads_;
  const int64_t row_;  // elements of a token
  const int64_t tokens_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Region> region_;
  MutableBytes q_, k_, v_, kv_, qkv_, out_, lse_;
};

}  // namespace
}  // namespace ringattn::bench

int main(int argc, char** argv) {
  ringattn::wire::KeepFreedMemory();  // as the command line does
  absl::ParseCommandLine(argc, argv);
  ringattn::bench::Bench().Run();
  return 0;
}
