#include "worker/measurement/device_measurement.h"

#include <atomic>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/testing/scalar_device.h"

namespace ringattn::worker {
namespace {

TEST(Measurement, MeasuresEveryServedDtypeAndDirection) {
  CpuDevice device(1, int64_t{1} << 30);
  const auto rates = MeasureKernelRates(device, {.rows = 16, .heads = 1}, absl::ZeroDuration());
  ASSERT_TRUE(rates.ok()) << rates.status();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      AttentionSpec spec;
      spec.dtype = dtype;
      const KernelRate* const rate = RateOf(*rates, spec, direction);
      ASSERT_NE(rate, nullptr) << DTypeName(dtype);
      EXPECT_GT(rate->flops_per_second, 1e6);
      EXPECT_LT(rate->flops_per_second, 1e15);
      EXPECT_EQ(rate->family, dtype == DType::kBFloat16 ? "cpu_bf16" : "cpu_fp32");
      // Score terms have separate rates. (Calls as small as these do not measure either well.)
      spec.options.segment_ids = true;
      const KernelRate* const with_terms = RateOf(*rates, spec, direction);
      ASSERT_NE(with_terms, nullptr) << DTypeName(dtype);
      EXPECT_TRUE(with_terms->kind.score_terms);
      EXPECT_GT(with_terms->flops_per_second, 1e5);
      EXPECT_LT(with_terms->flops_per_second, 1e15);
    }
  }
}

// Claims to serve calls that its kernels cannot compute.
class OverstatingDevice : public ScalarDevice {
 public:
  std::vector<ServedCalls> served_calls() const override {
    return {{"boast", {DType::kBFloat16}, false}};
  }
};

// A call that the device rejects is an error; no rate is invented.
TEST(Measurement, FailsIfDeviceCannotCompute) {
  OverstatingDevice device;
  EXPECT_EQ(MeasureKernelRates(device, {}, absl::Milliseconds(10)).status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(MeasureCallSeconds(device, absl::ZeroDuration()).status().code(),
            absl::StatusCode::kUnimplemented);
}

// A slow family and a fast one are measured separately.
class SlowInFp32 : public CpuDevice {
 public:
  SlowInFp32() : CpuDevice(1, int64_t{1} << 30) {}
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override {
    slow_ = std::get<ForwardCall>(calls.front()).problem->dtype == DType::kFloat32;
    return CpuDevice::Prepare(std::move(calls));
  }
  std::vector<ServedCalls> served_calls() const override {
    return {{"fast", {DType::kBFloat16}, false}, {"slow", {DType::kFloat32}, false}};
  }
  EventRef Start(const PreparedCall& call, StartAfter after, RunControl* control) override {
    EventRef event = CpuDevice::Start(call, std::move(after), control);
    return slow_ ? std::make_shared<Stretched>(std::move(event)) : event;
  }

 private:
  // Reports a duration one second longer than the real one.
  class Stretched : public Event {
   public:
    explicit Stretched(EventRef inner) : inner_(std::move(inner)) {}
    bool Done() const override { return inner_->Done(); }
    absl::Status Wait(absl::Time deadline) const override { return inner_->Wait(deadline); }
    absl::Time begin_time() const override { return inner_->begin_time() - absl::Seconds(1); }
    absl::Time end_time() const override { return inner_->end_time(); }

   private:
    const EventRef inner_;
  };

  bool slow_ = false;
};

TEST(Measurement, MeasuresFamiliesSeparately) {
  SlowInFp32 device;
  const auto rates = MeasureKernelRates(device, {.rows = 64, .heads = 1}, absl::ZeroDuration());
  ASSERT_TRUE(rates.ok()) << rates.status();
  ASSERT_EQ(rates->size(), 2u);
  EXPECT_EQ((*rates)[0].family, "fast");
  EXPECT_EQ((*rates)[1].family, "slow");
  EXPECT_LT((*rates)[1].flops_per_second, (*rates)[0].flops_per_second / 10);
}

// Calls with terms may have another size, because their bias and mask are rows x rows.
class SizesOfCalls : public CpuDevice {
 public:
  SizesOfCalls() : CpuDevice(1, int64_t{1} << 30) {}
  absl::StatusOr<PreparedCalls> Prepare(std::vector<KernelCall> calls) override {
    if (const auto* forward = std::get_if<ForwardCall>(&calls.front())) {
      (forward->problem->terms.any() ? rows_with_terms : rows) = forward->q_rows;
    }
    return CpuDevice::Prepare(std::move(calls));
  }
  int64_t rows = 0;
  int64_t rows_with_terms = 0;
};

TEST(Measurement, MeasuresCallsWithTermsAtTheirOwnSize) {
  SizesOfCalls device;
  const MeasuredCall with_terms{.rows = 8, .heads = 2};
  const auto rates =
      MeasureKernelRates(device, {.rows = 16, .heads = 1}, absl::ZeroDuration(), &with_terms);
  ASSERT_TRUE(rates.ok()) << rates.status();
  EXPECT_EQ(device.rows, 16);
  EXPECT_EQ(device.rows_with_terms, 8);
}

// Adds 1 ms to each call, far more than a call costs.
class SlowToStart : public CpuDevice {
 public:
  SlowToStart() : CpuDevice(1, int64_t{1} << 30) {}
  EventRef Start(const PreparedCall& call, StartAfter after, RunControl* control) override {
    absl::SleepFor(absl::Milliseconds(1));
    return CpuDevice::Start(call, std::move(after), control);
  }
};

TEST(Measurement, MeasuresCallOverhead) {
  CpuDevice device(1, int64_t{1} << 30);
  const auto quick = MeasureCallSeconds(device, absl::Milliseconds(5));
  ASSERT_TRUE(quick.ok()) << quick.status();
  EXPECT_GT(*quick, 0);
  SlowToStart slow;
  const auto dear = MeasureCallSeconds(slow, absl::ZeroDuration());
  ASSERT_TRUE(dear.ok()) << dear.status();
  EXPECT_GE(*dear, 0.9e-3);
  EXPECT_LT(*quick, *dear);
}

// Records when its end has been observed. Until then it may use its control.
class Asked : public Event {
 public:
  Asked(EventRef inner, std::atomic<int>* unasked) : inner_(std::move(inner)), unasked_(unasked) {
    ++*unasked_;
  }
  bool Done() const override { return Note(inner_->Done()); }
  absl::Status Wait(absl::Time deadline) const override {
    const absl::Status status = inner_->Wait(deadline);
    Note(inner_->Done());
    return status;
  }
  absl::Time begin_time() const override { return inner_->begin_time(); }
  absl::Time end_time() const override { return inner_->end_time(); }

 private:
  bool Note(bool done) const {
    if (done && !noted_.exchange(true)) --*unasked_;
    return done;
  }

  const EventRef inner_;
  std::atomic<int>* const unasked_;
  mutable std::atomic<bool> noted_{false};
};

class AskedDevice : public CpuDevice {
 public:
  AskedDevice() : CpuDevice(1, int64_t{1} << 30) {}
  EventRef Start(const PreparedCall& call, StartAfter after, RunControl* control) override {
    return std::make_shared<Asked>(CpuDevice::Start(call, std::move(after), control), &unasked);
  }
  std::atomic<int> unasked{0};
};

TEST(Measurement, WaitsForEveryCall) {
  AskedDevice device;
  ASSERT_TRUE(MeasureCallSeconds(device, absl::ZeroDuration()).ok());
  EXPECT_EQ(device.unasked, 0);
  ASSERT_TRUE(MeasureKernelRates(device, {.rows = 16, .heads = 1}, absl::ZeroDuration()).ok());
  EXPECT_EQ(device.unasked, 0);
}

}  // namespace
}  // namespace ringattn::worker
