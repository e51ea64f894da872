#include "client/memory/copy_pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

namespace ringattn::client {
namespace {

// The unit of work of one thread; large compared with the cost of handing it over.
constexpr uint64_t kPartBytes = 4 << 20;
// One thread moves about 8 GB/s, and this many saturate the memory bandwidth. While one thread
// waits for memory to be allocated, another continues.
constexpr int kMinThreads = 2, kMaxThreads = 8;

}  // namespace

int CopyPool::DefaultThreads() {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(cores / 2, kMinThreads, kMaxThreads);
}

CopyPool::CopyPool(int threads, absl::Duration idle, std::function<void()> on_idle)
    : wanted_threads_(threads), idle_(idle), on_idle_(std::move(on_idle)) {}

CopyPool::~CopyPool() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

void CopyPool::StartThreads() {
  while (static_cast<int>(threads_.size()) < wanted_threads_) {
    const bool first = threads_.empty();
    threads_.emplace_back([this, first] { Run(first); });
  }
}

void CopyPool::Add(std::function<void()> work) {
  absl::MutexLock lock(&mutex_);
  StartThreads();
  work_.push_back(std::move(work));
}

void CopyPool::Copy(const std::vector<Piece>& pieces, std::function<bool()> wanted,
                    std::function<void()> done) {
  struct Job {
    std::vector<Piece> parts;
    std::atomic<size_t> next{0};
    std::atomic<int> copying{0};
    std::function<bool()> wanted;
    std::function<void()> done;
  };
  auto job = std::make_shared<Job>();
  for (Piece piece : pieces) {
    while (piece.bytes > 0) {
      const uint64_t bytes = std::min(piece.bytes, kPartBytes);
      job->parts.push_back({piece.to, piece.from, bytes});
      piece = {piece.to + bytes, piece.from + bytes, piece.bytes - bytes};
    }
  }
  job->wanted = std::move(wanted);
  job->done = std::move(done);
  const int threads =
      std::clamp(static_cast<int>(job->parts.size()), 1, std::max(wanted_threads_, 1));
  job->copying = threads;
  for (int i = 0; i < threads; ++i) {
    Add([job] {
      for (size_t part = job->next++; part < job->parts.size(); part = job->next++) {
        if (!job->wanted()) break;
        std::memcpy(job->parts[part].to, job->parts[part].from, job->parts[part].bytes);
      }
      if (--job->copying == 0) job->done();
    });
  }
}

void CopyPool::Run(bool minds_idleness) {
  const auto has_news = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return closing_ || !work_.empty();
  };
  while (true) {
    std::function<void()> work;
    {
      absl::MutexLock lock(&mutex_);
      const bool news = mutex_.AwaitWithTimeout(absl::Condition(&has_news),
                                                minds_idleness ? idle_ : absl::InfiniteDuration());
      if (news && work_.empty()) return;  // closing
      if (news) {
        work = std::move(work_.front());
        work_.pop_front();
      }
    }
    if (work != nullptr) {
      work();
    } else {
      on_idle_();
    }
  }
}

}  // namespace ringattn::client
