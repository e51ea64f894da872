// Calls that start before all of their keys have arrived, on a GPU or with fakes. Part of
// cuda_device_test.
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "common/attention/dtype.h"
#include "gtest/gtest.h"
#include "worker/device/cuda/test_device.h"

namespace ringattn::worker {
namespace {

constexpr int64_t kRows = 300, kOwnKeys = 256, kLateKeys = 200;
constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 64;

// Queries that see all of two key blocks, the second of which arrives late.
class TwoBlocks {
 public:
  explicit TwoBlocks(CudaDevice& device) : device_(device) {
    problem_.dtype = DType::kBFloat16;
    problem_.num_heads = kHeads;
    problem_.num_kv_heads = kKvHeads;
    problem_.head_dim = problem_.head_dim_v = kDim;
    problem_.softmax_scale = 0.125f;
    problem_.bands = {Band{}};
    q_ = Upload(Drawn(kRows * kHeads));
    k_ = Upload(Drawn(kOwnKeys * kKvHeads));
    v_ = Upload(Drawn(kOwnKeys * kKvHeads));
    late_bits_ = Drawn(2 * kLateKeys * kKvHeads);
    late_ = Upload(late_bits_);
    out_ = *device.Allocate(kRows * kHeads * kDim * 2);
    lse_ = *device.Allocate(kRows * kHeads * 4);
  }

  ForwardCall Call(bool late) const {
    ForwardCall call;
    call.problem = &problem_;
    call.q_rows = kRows;
    call.q_pieces = {Piece{.length = kRows}};
    call.q = q_->data();
    call.lse = static_cast<float*>(lse_->data());
    call.out = out_->data();
    call.initial = call.final = true;
    call.blocks = {BlockOf(kOwnKeys, 0, k_->data(), v_->data()),
                   BlockOf(kLateKeys, kOwnKeys, late_->data(),
                           static_cast<char*>(late_->data()) + late_bytes() / 2)};
    call.blocks[1].late = late ? 1 : 0;
    call.late_after = {absl::Microseconds(200)};
    return call;
  }

  // The same with half of the late keys in a third block, which arrives after the other half.
  ForwardCall CallWithTwoArrivals() const {
    ForwardCall call = Call(/*late=*/true);
    KvBlock& first = call.blocks[1];
    first.rows = first.pieces[0].length = kLateKeys / 2;
    const int64_t bytes = first.rows * kKvHeads * kDim * 2;
    call.blocks.push_back(BlockOf(kLateKeys - first.rows, kOwnKeys + first.rows,
                                  static_cast<const char*>(first.k) + bytes,
                                  static_cast<const char*>(first.v) + bytes));
    call.blocks[2].late = 2;
    call.late_after.push_back(absl::Microseconds(400));
    return call;
  }

  void Forget() { Fill(*late_, 0xff); }  // NaN
  void ForgetResults() { Fill(*out_, 0xff); }
  void* late() const { return late_->data(); }
  int64_t late_bytes() const { return static_cast<int64_t>(late_bits_.size()) * 2; }
  const std::vector<uint16_t>& late_bits() const { return late_bits_; }

  std::vector<float> Results() const {
    std::vector<uint16_t> bits(out_->bytes() / 2);
    EXPECT_TRUE(device_.CopyToHost(bits.data(), out_->data(), out_->bytes()).ok());
    std::vector<float> values(bits.size());
    ConvertToFloat(DType::kBFloat16, bits.data(), values.data(), values.size());
    return values;
  }

 private:
  static KvBlock BlockOf(int64_t rows, int64_t position, const void* k, const void* v) {
    KvBlock block;
    block.rows = rows;
    block.pieces = {Piece{.length = rows, .position = position}};
    block.k = k;
    block.v = v;
    return block;
  }
  std::vector<uint16_t> Drawn(int64_t rows) {
    std::vector<float> values(rows * kDim);
    for (float& value : values) value = std::normal_distribution<float>()(random_);
    std::vector<uint16_t> bits(values.size());
    ConvertFromFloat(DType::kBFloat16, values.data(), bits.data(), values.size());
    return bits;
  }
  std::unique_ptr<DeviceBuffer> Upload(const std::vector<uint16_t>& bits) {
    const int64_t bytes = static_cast<int64_t>(bits.size()) * 2;
    std::unique_ptr<DeviceBuffer> buffer = *device_.Allocate(bytes);
    EXPECT_TRUE(device_.CopyFromHost(buffer->data(), bits.data(), bytes).ok());
    return buffer;
  }
  void Fill(DeviceBuffer& buffer, uint8_t byte) {
    const std::vector<uint8_t> bytes(buffer.bytes(), byte);
    EXPECT_TRUE(device_.CopyFromHost(buffer.data(), bytes.data(), buffer.bytes()).ok());
  }

  CudaDevice& device_;
  std::mt19937 random_{7};
  AttentionProblem problem_;
  std::vector<uint16_t> late_bits_;
  std::unique_ptr<DeviceBuffer> q_, k_, v_, late_, out_, lse_;
};

// The late keys in flight: a copy that waits for a gate.
class Arrival {
 public:
  Arrival(const TwoBlocks& blocks, CudaEventPool* pool)
      : gate_(pool), event_(std::make_shared<CudaEvent>(pool, nullptr, 0)) {
    EXPECT_EQ(cudaHostAlloc(&pinned_, blocks.late_bytes(), cudaHostAllocDefault), cudaSuccess);
    std::memcpy(pinned_, blocks.late_bits().data(), blocks.late_bytes());
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    EXPECT_TRUE(WaitOnStream(stream_, {gate_.event()}).ok());
    EXPECT_TRUE(event_->RecordBegin(stream_).ok());
    EXPECT_EQ(cudaMemcpyAsync(blocks.late(), pinned_, blocks.late_bytes(), cudaMemcpyHostToDevice,
                              stream_),
              cudaSuccess);
    EXPECT_TRUE(event_->RecordEnd(stream_).ok());
  }
  ~Arrival() {
    (void)event_->Wait(Soon());
    (void)cudaStreamDestroy(stream_);
    (void)cudaFreeHost(pinned_);
  }
  void Open() { gate_.Open(); }
  EventRef event() const { return event_; }

 private:
  Gate gate_;
  void* pinned_ = nullptr;
  cudaStream_t stream_ = nullptr;
  const std::shared_ptr<CudaEvent> event_;
};

StartAfter BehindKeys(const EventRef& event) {
  StartAfter after;
  after.bring_keys = [event] { return std::vector<std::vector<EventRef>>{{event}}; };
  return after;
}

// A call with late keys, prepared, and the results of the same call without late keys.
class LateCall {
 public:
  //   late  a call of `blocks`
  LateCall(CudaDevice& device, TwoBlocks& blocks, const ForwardCall& late)
      : device_(device),
        blocks_(blocks),
        calls_(Ready(device, {blocks.Call(/*late=*/false), late})) {
    EXPECT_TRUE(device.Start(*calls_[0], {}, &control_)->Wait(Soon()).ok());
    expected_ = blocks.Results();
  }

  EventRef Start(StartAfter after) {
    return device_.Start(*calls_[1], std::move(after), &control_);
  }
  // Overwrites the late keys and the results of an earlier start.
  void Forget() {
    blocks_.Forget();
    blocks_.ForgetResults();
  }
  void ExpectResults() const {
    const std::vector<float> found = blocks_.Results();
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_NEAR(found[i], expected_[i], 0.01) << i;  // NaN is not near any value
    }
  }

 private:
  CudaDevice& device_;
  TwoBlocks& blocks_;
  PreparedCalls calls_;
  RunControl control_;
  std::vector<float> expected_;
};

void ExpectStillWaits(const EventRef& done) {
  EXPECT_EQ(done->Wait(absl::Now() + absl::Milliseconds(50)).code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST(CudaLateKeysTest, CallStartsBeforeItsLateKeysArrive) {
  auto device = MakeDevice();
  TwoBlocks blocks(*device);
  const ForwardCall late = blocks.Call(/*late=*/true);
  if (!device->TakesLateKeys(late)) GTEST_SKIP() << "no kernel of this GPU waits for keys";
  LateCall call(*device, blocks, late);
  // Twice: a launch must leave everything ready for the next one.
  for (int time = 0; time < 2; ++time) {
    call.Forget();
    Arrival arrival(blocks, *CudaEventPool::ForDevice(0));
    const EventRef done = call.Start(BehindKeys(arrival.event()));
    ExpectStillWaits(done);
    EXPECT_TRUE(device->waits_for_transfer());
    arrival.Open();
    ASSERT_TRUE(done->Wait(Soon()).ok());
    EXPECT_FALSE(device->waits_for_transfer());
    ASSERT_TRUE(arrival.event()->Done());
    EXPECT_LT(done->begin_time() + absl::Milliseconds(40), arrival.event()->begin_time())
        << "the call waited for the keys before it began";
    EXPECT_GE(done->end_time(), arrival.event()->end_time());
    call.ExpectResults();
    ASSERT_FALSE(HasFatalFailure());
  }
}

TEST(CudaLateKeysTest, CallWaitsForEveryArrival) {
  auto device = MakeDevice();
  TwoBlocks blocks(*device);
  const ForwardCall late = blocks.CallWithTwoArrivals();
  if (!device->TakesLateKeys(late)) GTEST_SKIP() << "no kernel of this GPU waits for keys";
  LateCall call(*device, blocks, late);
  for (int time = 0; time < 2; ++time) {
    call.Forget();
    Arrival arrival(blocks, *CudaEventPool::ForDevice(0));
    Gate second(*CudaEventPool::ForDevice(0));
    StartAfter after;
    after.bring_keys = [&] {
      return std::vector<std::vector<EventRef>>{{arrival.event()}, {second.event()}};
    };
    const EventRef done = call.Start(std::move(after));
    arrival.Open();
    EXPECT_TRUE(arrival.event()->Wait(Soon()).ok());
    ExpectStillWaits(done);
    second.Open();
    ASSERT_TRUE(done->Wait(Soon()).ok());
    call.ExpectResults();
    ASSERT_FALSE(HasFatalFailure());
  }
}

// Two consecutive launches whose keys arrive in reverse order.
TEST(CudaLateKeysTest, EachLaunchWaitsForItsOwnKeys) {
  auto device = MakeDevice();
  TwoBlocks first(*device), second(*device);
  if (!device->TakesLateKeys(first.Call(true))) GTEST_SKIP() << "no kernel waits for keys";
  PreparedCalls calls = Ready(*device, {first.Call(true), second.Call(true), first.Call(false)});
  RunControl control;
  ASSERT_TRUE(device->Start(*calls[2], {}, &control)->Wait(Soon()).ok());
  const std::vector<float> expected = first.Results();
  first.Forget();
  second.Forget();
  second.ForgetResults();
  Arrival keys(first, *CudaEventPool::ForDevice(0)), others(second, *CudaEventPool::ForDevice(0));
  const EventRef one = device->Start(*calls[0], BehindKeys(keys.event()), &control);
  const EventRef two = device->Start(*calls[1], BehindKeys(others.event()), &control);
  others.Open();
  ExpectStillWaits(one);
  keys.Open();
  ASSERT_TRUE(one->Wait(Soon()).ok());
  ASSERT_TRUE(two->Wait(Soon()).ok());
  const std::vector<float> found = second.Results();  // both have the same inputs
  for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 0.01) << i;
}

TEST(CudaLateKeysTest, StoppedCallDoesNotWaitForever) {
  auto device = MakeDevice();
  TwoBlocks blocks(*device);
  if (!device->TakesLateKeys(blocks.Call(true))) GTEST_SKIP() << "no kernel waits for keys";
  PreparedCalls calls = Ready(*device, {blocks.Call(true)});
  RunControl control;
  Arrival arrival(blocks, *CudaEventPool::ForDevice(0));
  const EventRef done = device->Start(*calls[0], BehindKeys(arrival.event()), &control);
  absl::SleepFor(absl::Milliseconds(20));
  control.stop = true;
  // The keys still arrive, as transfers from peers do, and the call's memory is in use until then.
  ExpectStillWaits(done);
  arrival.Open();
  EXPECT_TRUE(done->Wait(Soon()).ok());
}

TEST(CudaLateKeysTest, FailedTransferOfKeysFailsCall) {
  auto device = MakeDevice();
  TwoBlocks blocks(*device);
  PreparedCalls calls = Ready(*device, {blocks.Call(true)});
  RunControl control;
  auto failed = std::make_shared<CudaEvent>(*CudaEventPool::ForDevice(0), nullptr, 0);
  failed->Fail(absl::UnavailableError("the peer is gone"));
  EXPECT_EQ(device->Start(*calls[0], BehindKeys(failed), &control)->Wait(Soon()),
            absl::UnavailableError("the peer is gone"));
}

}  // namespace
}  // namespace ringattn::worker
