#include "client/cli/bench/payload_bound.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/cli/bench/loopback_rate.h"
#include "client/transfer/worker_channels.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

// Enough to exceed the caches and to hide the start of the threads.
constexpr int64_t kLeastCopied = 64 << 20, kMostCopied = 256 << 20;
constexpr int64_t kLeastSent = 256 << 20, kMostSent = 1 << 30;

int Cores() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

// The default of --copy_threads, summed over the workers.
int CopyThreads(int workers) { return workers * std::clamp(Cores() / (2 * workers), 2, 8); }

int WorkersOf(const CallReport& report) {
  const int planned = static_cast<int>(report.accepted.plan().world_size());
  return std::max(planned > 0 ? planned : report.summary.ranks_size(), 1);
}

double CopySeconds(uint8_t* to, const uint8_t* from, int64_t bytes, int threads) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> copiers;
  for (int i = 0; i < threads; ++i) {
    const int64_t first = bytes * i / threads, last = bytes * (i + 1) / threads;
    copiers.emplace_back([=] { std::memcpy(to + first, from + first, last - first); });
  }
  for (std::thread& copier : copiers) copier.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

std::string PayloadBound::Text() const {
  switch (kind) {
    case Kind::kTcp:
      return absl::StrCat("plain TCP over loopback, connections: ", side_by_side);
    case Kind::kMemcpy:
      return absl::StrCat("memcpy from shared memory, threads: ", side_by_side);
    case Kind::kNone:
      break;
  }
  return "not measured";
}

Json PayloadBound::ToJson() const {
  switch (kind) {
    case Kind::kTcp:
      return {
          {"kind", "tcp"}, {"connections", side_by_side}, {"bytes_per_second", bytes_per_second}};
    case Kind::kMemcpy:
      return {
          {"kind", "memcpy"}, {"threads", side_by_side}, {"bytes_per_second", bytes_per_second}};
    case Kind::kNone:
      break;
  }
  return {{"kind", "none"}};
}

absl::StatusOr<double> MemcpyBytesPerSecond(int64_t bytes, int threads) {
  const size_t size = static_cast<size_t>(std::clamp(bytes, kLeastCopied, kMostCopied));
  const int memory = memfd_create("ringattn-bench", MFD_CLOEXEC);
  if (memory < 0) return absl::ErrnoToStatus(errno, "memfd_create");
  const absl::Cleanup close_memory = [memory] { close(memory); };
  if (ftruncate(memory, static_cast<off_t>(size)) != 0) {
    return absl::ErrnoToStatus(errno, "ftruncate");
  }
  void* shared = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memory, 0);
  if (shared == MAP_FAILED) return absl::ErrnoToStatus(errno, "mmap");
  const absl::Cleanup unmap = [=] { munmap(shared, size); };
  std::memset(shared, 1, size);
  std::vector<uint8_t> own(size, 2);
  double seconds = 0;
  for (int pass = 0; pass < 2; ++pass) {
    const double took = CopySeconds(own.data(), static_cast<const uint8_t*>(shared),
                                    static_cast<int64_t>(size), threads);
    seconds = pass == 0 ? took : std::min(seconds, took);
  }
  if (own.front() != 1 || own.back() != 1) return absl::InternalError("the memcpy copied nothing");
  return static_cast<double>(size) / std::max(seconds, 1e-9);
}

PayloadBounds::PayloadBounds(int channels_per_worker, const PayloadBound& relay)
    : channels_per_worker_(channels_per_worker), measured_({relay}) {}

absl::StatusOr<PayloadBound> PayloadBounds::Of(const CallReport& report) {
  const int workers = WorkersOf(report);
  PayloadBound bound;
  switch (report.accepted.transport()) {
    case v1::TRANSPORT_HOST_MEMORY:
      bound = {.kind = PayloadBound::Kind::kMemcpy, .side_by_side = CopyThreads(workers)};
      break;
    case v1::TRANSPORT_DIRECT:
      bound = {.kind = PayloadBound::Kind::kTcp,
               .side_by_side = workers * (channels_per_worker_ > 0
                                              ? channels_per_worker_
                                              : WorkerChannels::PerWorker(workers, Cores()))};
      break;
    case v1::TRANSPORT_CUDA_MEMORY:
      return bound;
    default:
      return measured_.front();
  }
  for (const PayloadBound& known : measured_) {
    if (known.kind == bound.kind && known.side_by_side == bound.side_by_side) return known;
  }
  const auto bytes = static_cast<int64_t>(report.summary.bytes_up());
  const absl::StatusOr<double> rate =
      bound.kind == PayloadBound::Kind::kMemcpy
          ? MemcpyBytesPerSecond(bytes, bound.side_by_side)
          : LoopbackBytesPerSecond(std::clamp(bytes, kLeastSent, kMostSent), bound.side_by_side);
  if (!rate.ok()) return rate.status();
  bound.bytes_per_second = *rate;
  measured_.push_back(bound);
  return bound;
}

}  // namespace ringattn::client::cli
