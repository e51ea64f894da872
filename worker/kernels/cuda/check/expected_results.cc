#include "worker/kernels/cuda/check/expected_results.h"

#include <algorithm>
#include <utility>

namespace ringattn::worker::cuda::check {
namespace {

size_t Threads(size_t cases) {
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  return std::min(cores, cases);
}

}  // namespace

ExpectedResults::ExpectedResults(const std::vector<Case>& cases)
    : cases_(cases), most_ahead_(2 * Threads(cases.size())) {
  for (size_t i = 0; i < Threads(cases.size()); ++i) threads_.emplace_back([this] { Evaluate(); });
}

ExpectedResults::~ExpectedResults() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::unique_ptr<const Expected> ExpectedResults::Take() {
  std::unique_lock<std::mutex> lock(mutex_);
  const size_t index = taken_++;
  changed_.notify_all();
  changed_.wait(lock, [&] { return ready_.count(index) > 0; });
  auto result = std::move(ready_.at(index));
  ready_.erase(index);
  return result;
}

void ExpectedResults::Evaluate() {
  while (true) {
    size_t index = 0;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto may_go = [this] { return closing_ || next_ < taken_ + most_ahead_; };
      changed_.wait(lock, may_go);
      if (closing_ || next_ == cases_.size()) return;
      index = next_++;
    }
    auto expected = std::make_unique<Expected>();
    expected->inputs = InputsOf(cases_[index]);
    expected->result = oracle::EvaluateAll(cases_[index].spec, expected->inputs.view());
    std::lock_guard<std::mutex> lock(mutex_);
    ready_.emplace(index, std::move(expected));
    changed_.notify_all();
  }
}

}  // namespace ringattn::worker::cuda::check
