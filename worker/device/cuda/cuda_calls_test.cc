// Calls that are prepared together and share work, on a GPU or with fakes. Part of
// cuda_device_test.
#include "worker/device/cuda/cuda_calls.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/attention/dtype.h"
#include "gtest/gtest.h"
#include "worker/device/cuda/test_device.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kRows = 80, kBlockKeys = 48, kKeys = 2 * kBlockKeys;
constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 64;
constexpr int64_t kRowBytes = kKeys * 2;  // of dbias
constexpr int64_t kSpareBytes = 8 * kRowBytes;

// A causal bf16 problem with a bias per head, and the operands of its backward.
class BiasedBackward {
 public:
  BiasedBackward(CudaDevice& device, int64_t batch, bool per_batch) : device_(device) {
    problem_.dtype = DType::kBFloat16;
    problem_.batch = batch;
    problem_.num_heads = kHeads;
    problem_.num_kv_heads = kKvHeads;
    problem_.head_dim = problem_.head_dim_v = kDim;
    problem_.softmax_scale = 0.125f;
    problem_.bands = {Band{.upper = kKeys - kRows}};
    problem_.terms.shifts = {kKeys - kRows};
    problem_.terms.columns = kKeys;
    problem_.terms.bias = BiasForm{.per_batch = per_batch, .per_head = true, .gradient = true};
    const int64_t rows = batch * kRows * kHeads;
    planes_ = (per_batch ? batch : 1) * kHeads;
    q_ = Upload(Rounded(rows * kDim));
    dout_ = Upload(Rounded(rows * kDim));
    bias_ = Upload(Rounded(planes_ * kRows * kKeys));
    lse_ = Upload(std::vector<float>(rows, 0.5f));
    delta_ = Upload(Values(rows));
    dbias_ = Allocate(dbias_bytes());
    spare_ = Allocate(kSpareBytes);
    sums_.push_back(Allocate(rows * kDim * 4));
    for (Block& block : blocks_) {
      const int64_t keys = batch * kBlockKeys * kKvHeads;
      block = {Upload(Rounded(keys * kDim)), Upload(Rounded(keys * kDim)), sums_.size()};
      sums_.push_back(Allocate(keys * kDim * 4));
      sums_.push_back(Allocate(keys * kDim * 4));
    }
  }

  // Returns the backward over key blocks [begin, end) of two.
  BackwardCall Backward(int begin = 0, int end = 2) const {
    BackwardCall call;
    call.problem = &problem_;
    call.q_rows = kRows;
    call.q_pieces = {Piece{.length = kRows}};
    call.q = q_->data();
    call.dout = dout_->data();
    call.lse = static_cast<const float*>(lse_->data());
    call.delta = static_cast<const float*>(delta_->data());
    call.dq_acc = static_cast<float*>(sums_[0]->data());
    call.terms.bias = bias_->data();
    for (int n = begin; n < end; ++n) {
      KvBlock& block = call.blocks.emplace_back();
      block.rows = kBlockKeys;
      block.pieces = {Piece{.length = kBlockKeys, .position = n * kBlockKeys}};
      block.k = blocks_[n].k->data();
      block.v = blocks_[n].v->data();
      block.dk = static_cast<float*>(sums_[blocks_[n].sums]->data());
      block.dv = static_cast<float*>(sums_[blocks_[n].sums + 1]->data());
    }
    return call;
  }
  BiasGradientCall Gradient(int begin = 0, int end = 2) const {
    const BackwardCall backward = Backward(begin, end);
    BiasGradientCall call;
    call.problem = backward.problem;
    call.q_rows = backward.q_rows;
    call.q_pieces = backward.q_pieces;
    call.q = backward.q;
    call.dout = backward.dout;
    call.lse = backward.lse;
    call.delta = backward.delta;
    call.blocks = backward.blocks;
    call.terms = backward.terms;
    call.dbias = dbias_->data();
    return call;
  }
  // Zeroes bytes [begin, end) of dbias, by default all.
  ZeroCall Zero() const { return {dbias_->data(), dbias_bytes()}; }
  ZeroCall Zero(int64_t begin, int64_t end) const { return {dbias() + begin, end - begin}; }
  // Copies three rows into the spare memory, from dbias or from elsewhere in the spare memory.
  CopyCall Copy(bool from_dbias) const {
    return {spare(),  from_dbias ? dbias() : spare() + 4 * kRowBytes, 3, kRowBytes, kRowBytes,
            kRowBytes};
  }
  // Gathers the second and fourth rows of dbias.
  GatherCall Gather() const {
    GatherCall call;
    call.inner_bytes = kRowBytes;
    call.rows = kRows;
    call.part_rows = 2;
    call.row_runs = runs_;
    call.head_of = heads_;
    call.whole = dbias();
    call.part = spare();
    return call;
  }

  struct Results {
    std::vector<float> dbias;
    std::vector<std::vector<float>> sums;  // dq, and dk and dv of each block
    std::vector<float> spare;
  };

  // Runs `calls`, prepared together or one by one, and returns their results. All memory except the
  // sums starts as NaN.
  Results Run(const std::vector<KernelCall>& calls, bool together) {
    Restart();
    std::vector<PreparedCalls> prepared;
    if (together) {
      prepared.push_back(Prepared(calls));
    } else {
      for (const KernelCall& call : calls) prepared.push_back(Prepared({call}));
    }
    RunControl control;  // must outlive the events of all calls
    std::vector<EventRef> events;
    for (const PreparedCalls& some : prepared) {
      for (const auto& call : some) events.push_back(device_.Start(*call, {}, &control));
    }
    for (const EventRef& event : events) EXPECT_TRUE(event->Wait(Soon()).ok());
    return Read();
  }

  // Prepares `calls` together, but runs only the first one.
  Results RunFirst(const std::vector<KernelCall>& calls) {
    Restart();
    const PreparedCalls prepared = Prepared(calls);
    RunControl control;
    EXPECT_TRUE(device_.Start(*prepared[0], {}, &control)->Wait(Soon()).ok());
    return Read();
  }

  int64_t dbias_bytes() const { return planes_ * kRows * kRowBytes; }
  int64_t planes() const { return planes_; }

 private:
  struct Block {
    std::unique_ptr<DeviceBuffer> k, v;
    size_t sums = 0;  // dk, followed by dv
  };

  char* dbias() const { return static_cast<char*>(dbias_->data()); }
  char* spare() const { return static_cast<char*>(spare_->data()); }

  std::vector<float> Values(int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) {
      random_ = random_ * 1664525u + 1013904223u;
      value = static_cast<float>(random_ >> 8) / (1 << 23) - 1.0f;
    }
    return values;
  }
  std::vector<uint16_t> Rounded(int64_t count) {
    std::vector<uint16_t> rounded;
    for (float value : Values(count)) rounded.push_back(FloatToBFloat16(value));
    return rounded;
  }
  std::unique_ptr<DeviceBuffer> Allocate(int64_t bytes) {
    auto buffer = device_.Allocate(bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return *std::move(buffer);
  }
  template <typename T>
  std::unique_ptr<DeviceBuffer> Upload(const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    auto buffer = Allocate(bytes);
    EXPECT_TRUE(device_.CopyFromHost(buffer->data(), values.data(), bytes).ok());
    return buffer;
  }
  void Fill(DeviceBuffer& buffer, int64_t bytes, char value) {
    const std::vector<char> host(bytes, value);
    EXPECT_TRUE(device_.CopyFromHost(buffer.data(), host.data(), bytes).ok());
  }
  template <typename T>
  std::vector<T> Download(DeviceBuffer& buffer, int64_t bytes) {
    std::vector<T> host(bytes / sizeof(T));
    EXPECT_TRUE(device_.CopyToHost(host.data(), buffer.data(), bytes).ok());
    return host;
  }
  PreparedCalls Prepared(std::vector<KernelCall> calls) {
    auto prepared = device_.Prepare(std::move(calls));
    EXPECT_TRUE(prepared.ok()) << prepared.status();
    return *std::move(prepared);
  }

  void Restart() {
    Fill(*dbias_, dbias_bytes(), static_cast<char>(0xff));
    Fill(*spare_, kSpareBytes, static_cast<char>(0xff));
    for (const auto& sum : sums_) Fill(*sum, sum->bytes(), 0);
  }
  Results Read() {
    Results results;
    const auto read = [this](DeviceBuffer& buffer, int64_t bytes) {
      std::vector<float> values;
      for (uint16_t bits : Download<uint16_t>(buffer, bytes)) {
        values.push_back(BFloat16ToFloat(bits));
      }
      return values;
    };
    results.dbias = read(*dbias_, dbias_bytes());
    for (const auto& sum : sums_) results.sums.push_back(Download<float>(*sum, sum->bytes()));
    results.spare = read(*spare_, kSpareBytes);
    return results;
  }

  CudaDevice& device_;
  AttentionProblem problem_;
  const std::vector<RowRun> runs_ = {{1, 2, 2, 0}};
  const std::vector<int32_t> heads_ = {0};
  uint32_t random_ = 1;
  int64_t planes_ = 0;
  std::unique_ptr<DeviceBuffer> q_, dout_, bias_, lse_, delta_, dbias_, spare_;
  std::vector<std::unique_ptr<DeviceBuffer>> sums_;
  Block blocks_[2];
};

// Tolerates bf16 rounding of sums in any order. NaN equals only NaN.
void ExpectNear(const std::vector<float>& found, const std::vector<float>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    if (std::isnan(found[i]) && std::isnan(expected[i])) continue;
    ASSERT_NEAR(found[i], expected[i], 0.02 * (1 + std::fabs(expected[i]))) << i;
  }
}

struct Sequence {
  const char* name;
  std::vector<KernelCall> calls;
  bool leaves;  // the first call leaves to the others what they store
};

std::vector<Sequence> SequencesOf(const BiasedBackward& made) {
  const int64_t bytes = made.dbias_bytes();
  return {
      {"alone", {made.Zero(), made.Backward(), made.Gradient()}, true},
      {"apart", {made.Zero(), made.Gradient(), made.Backward()}, true},
      {"a copy elsewhere", {made.Zero(), made.Copy(false), made.Backward(), made.Gradient()}, true},
      {"a copy of it", {made.Zero(), made.Copy(true), made.Backward(), made.Gradient()}, false},
      {"a gather of it", {made.Zero(), made.Gather(), made.Backward(), made.Gradient()}, false},
      {"a gather after it", {made.Zero(), made.Backward(), made.Gradient(), made.Gather()}, true},
      {"two gradients",
       {made.Zero(), made.Backward(0, 1), made.Gradient(0, 1), made.Backward(1, 2),
        made.Gradient(1, 2)},
       true},
      {"a copy between two gradients",
       {made.Zero(), made.Backward(0, 1), made.Gradient(0, 1), made.Copy(true), made.Backward(1, 2),
        made.Gradient(1, 2)},
       true},
      {"zeros of its first half",
       {made.Zero(), made.Zero(0, bytes / 2), made.Backward(), made.Gradient()},
       false},
      {"zeros of its second half",
       {made.Zero(), made.Zero(bytes / 2, bytes), made.Backward(), made.Gradient()},
       false},
  };
}

TEST(CudaCallsTest, SkippingZerosKeepsBiasGradient) {
  auto device = MakeDevice();
  for (const int64_t batch : {1, 2}) {
    for (const bool per_batch : {false, true}) {
      BiasedBackward made(*device, batch, per_batch);
      for (const Sequence& sequence : SequencesOf(made)) {
        SCOPED_TRACE(absl::StrCat(sequence.name, ", batch ", batch, " per_batch ", per_batch));
        const auto expected = made.Run(sequence.calls, /*together=*/false);
        const auto found = made.Run(sequence.calls, /*together=*/true);
        for (float value : expected.dbias) ASSERT_FALSE(std::isnan(value));
        ExpectNear(found.dbias, expected.dbias);
        for (size_t i = 0; i < expected.sums.size(); ++i) {
          ExpectNear(found.sums[i], expected.sums[i]);
        }
        ExpectNear(found.spare, expected.spare);
        // Row 10 sees keys up to 26.
        const std::vector<float> zeroed = made.RunFirst(sequence.calls).dbias;
        for (int64_t plane = 0; plane < made.planes(); ++plane) {
          const float* const row = zeroed.data() + (plane * kRows + 10) * kKeys;
          EXPECT_EQ(std::isnan(row[10]), sequence.leaves) << plane;
          if (!sequence.leaves) {
            EXPECT_EQ(row[10], 0.0f) << plane;
          }
          EXPECT_EQ(row[70], 0.0f) << plane;
        }
      }
    }
  }
  EXPECT_EQ(times_broken, 0);
}

// Two key blocks of a plain bf16 problem. Their sums start as NaN (all bytes 0xff).
class HintedBackward {
 public:
  HintedBackward(CudaDevice& device, float softcap) : device_(device) {
    problem_.dtype = DType::kBFloat16;
    problem_.num_heads = problem_.num_kv_heads = kHeads;
    problem_.head_dim = problem_.head_dim_v = kDim;
    problem_.softmax_scale = 0.125f;
    problem_.softcap = softcap;
    problem_.bands = {Band{}};
    call_.problem = &problem_;
    call_.q_rows = kRows;
    call_.q_pieces = {Piece{.length = kRows}};
    call_.q = Numbers(kRows);
    call_.dout = Numbers(kRows);
    call_.lse = static_cast<float*>(Filled(4 * kRows * kHeads, 0));
    call_.delta = static_cast<float*>(Filled(4 * kRows * kHeads, 0));
    call_.dq_acc = static_cast<float*>(Filled(4 * kRows * kHeads * kDim, 0));
    for (int n = 0; n < 2; ++n) {
      KvBlock& block = call_.blocks.emplace_back();
      block.rows = kBlockKeys;
      block.pieces = {Piece{.length = kBlockKeys, .position = n * kBlockKeys}};
      block.k = Numbers(kBlockKeys);
      block.v = Numbers(kBlockKeys);
      block.dk = static_cast<float*>(Filled(4 * kCount, 0xff));
      block.dv = static_cast<float*>(Filled(4 * kCount, 0xff));
    }
  }

  // Runs zero calls, the backward and conversions, which carry `store_hint`; the backward carries
  // it only if `hinted`. Returns the blocks' rounded dk and dv, then the sums, in which NaN marks
  // untouched values.
  std::vector<std::vector<uint16_t>> Run(bool hinted, int store_hint) {
    BackwardCall call = call_;
    std::vector<KernelCall> calls, behind;
    std::vector<void*> results, sums;
    for (KvBlock& block : call.blocks) {
      for (const auto& [sum, result] :
           {std::pair{block.dk, &block.dk_out}, std::pair{block.dv, &block.dv_out}}) {
        Fill(sum, 4 * kCount, 0xff);
        void* const rounded = Filled(2 * kCount, 0xff);
        sums.push_back(sum);
        results.push_back(rounded);
        calls.push_back(ZeroCall{sum, 4 * kCount, store_hint});
        behind.push_back(ConvertCall{problem_.dtype, rounded, sum, kCount, store_hint});
        if (hinted) *result = rounded;
      }
    }
    if (hinted) call.store_hint = 0;
    calls.push_back(call);
    calls.insert(calls.end(), behind.begin(), behind.end());
    const auto workspace = device_.WorkspaceBytes(calls);
    auto prepared = device_.Prepare(calls);
    EXPECT_TRUE(workspace.ok() && prepared.ok()) << prepared.status();
    RunControl control;
    std::vector<EventRef> events;
    for (const auto& ready : *prepared) {
      if (!ready->kernel().empty()) family_ = std::string(ready->kernel().family);
      events.push_back(device_.Start(*ready, {}, &control));
    }
    for (const EventRef& event : events) EXPECT_TRUE(event->Wait(Soon()).ok());
    EXPECT_EQ(control.progress.load(), static_cast<int64_t>(calls.size()));
    std::vector<std::vector<uint16_t>> found;
    for (void* result : results) found.push_back(Read(result, 2 * kCount));
    for (void* sum : sums) found.push_back(Read(sum, 4 * kCount));
    return found;
  }

  // The family that served the last call.
  const std::string& family() const { return family_; }

 private:
  static constexpr int64_t kCount = kBlockKeys * kHeads * kDim;

  void Fill(void* target, int64_t bytes, int value) {
    const std::vector<char> host(bytes, static_cast<char>(value));
    EXPECT_TRUE(device_.CopyFromHost(target, host.data(), bytes).ok());
  }
  void* Filled(int64_t bytes, int value) {
    memory_.push_back(*device_.Allocate(bytes));
    Fill(memory_.back()->data(), bytes, value);
    return memory_.back()->data();
  }
  void* Numbers(int64_t rows) {
    std::vector<uint16_t> values;
    for (int64_t i = 0; i < rows * kHeads * kDim; ++i) {
      values.push_back(FloatToBFloat16(static_cast<float>(i * 37 % 101) / 64 - 0.75f));
    }
    void* const target = Filled(2 * rows * kHeads * kDim, 0);
    EXPECT_TRUE(device_.CopyFromHost(target, values.data(), 2 * rows * kHeads * kDim).ok());
    return target;
  }
  std::vector<uint16_t> Read(void* source, int64_t bytes) {
    std::vector<uint16_t> host(bytes / 2);
    EXPECT_TRUE(device_.CopyToHost(host.data(), source, bytes).ok());
    return host;
  }

  CudaDevice& device_;
  AttentionProblem problem_;
  BackwardCall call_;
  std::string family_;
  std::vector<std::unique_ptr<DeviceBuffer>> memory_;
};

bool IsUntouched(const std::vector<uint16_t>& bits) {
  return std::all_of(bits.begin(), bits.end(), [](uint16_t each) { return each == 0xffff; });
}

std::vector<float> FloatsOf(const std::vector<uint16_t>& bits) {
  std::vector<float> values;
  for (uint16_t each : bits) values.push_back(BFloat16ToFloat(each));
  return values;
}

TEST(CudaCallsTest, StoredGradientsAreNotZeroedOrConverted) {
  auto device = MakeDevice();
  for (const float softcap : {0.0f, 30.0f}) {
    SCOPED_TRACE(softcap);
    HintedBackward made(*device, softcap);
    const auto expected = made.Run(/*hinted=*/false, kNoStoreHint);
    const auto found = made.Run(/*hinted=*/true, 0);
    const bool stores = softcap == 0 && (made.family() == "fake" || made.family() == "sm90");
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_FALSE(IsUntouched(expected[i])) << i;
      EXPECT_EQ(IsUntouched(found[i]), stores && i >= 4) << i;
      if (i < 4) ExpectNear(FloatsOf(found[i]), FloatsOf(expected[i]));
    }
    if (!stores) continue;
    // Zero calls of another hint, which no kernel took, still run.
    const auto others = made.Run(/*hinted=*/true, 1);
    for (size_t i = 4; i < expected.size(); ++i) EXPECT_FALSE(IsUntouched(others[i])) << i;
  }
  EXPECT_EQ(times_broken, 0);
}

// A dilated backward has as many zero calls as other calls. Searching the later calls for each of
// them would take 2^33 steps, or twenty seconds.
TEST(CudaCallsTest, PrepareTimeIsLinearInCalls) {
  auto device = MakeDevice();
  BiasedBackward made(*device, 1, false);
  std::vector<KernelCall> calls = {made.Zero()};
  auto* const elsewhere = reinterpret_cast<char*>(uintptr_t{1} << 60);
  for (int64_t i = 0; i < int64_t{1} << 17; ++i) {
    calls.push_back(ZeroCall{elsewhere + 256 * i, 256});
  }
  calls.push_back(made.Gradient());
  const absl::Time begin = absl::Now();
  const auto bytes = device->WorkspaceBytes(calls);
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
}

}  // namespace
}  // namespace ringattn::worker
