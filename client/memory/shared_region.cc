#include "client/memory/shared_region.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "common/local_memory/attach_protocol.h"
#include "common/local_memory/local_socket.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace ringattn::client {
namespace {

// A worker answers after it has mapped the memory. One that hangs is skipped.
constexpr int kSocketTimeoutSeconds = 5;
// Mapping all cudaMalloc memory of a GPU takes 14 s, and several requests may arrive at once.
constexpr int kCudaTimeoutSeconds = 60;
// How long the coordinator may take to learn from the workers what they have attached.
constexpr absl::Duration kConfirmTimeout = absl::Seconds(2);
constexpr absl::Duration kConfirmPause = absl::Milliseconds(5);
// A worker finishes the current piece of a copy before it answers a fence.
constexpr absl::Duration kFenceTimeout = absl::Seconds(10);
constexpr absl::Duration kMinBackoff = absl::Milliseconds(100);
constexpr absl::Duration kMaxBackoff = absl::Seconds(2);
constexpr int kPollMs = 100;

absl::Status OutOfMemory(absl::string_view what, int64_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " ", bytes, " bytes: ", std::strerror(errno)));
}

void SetTimeouts(int socket, int seconds) {
  const timeval timeout = {seconds, 0};
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::Make(int64_t bytes, AttachCall attach) {
  if (bytes < 1)
    return absl::InvalidArgumentError("bytes is less than 1; a region needs at least 1");
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t rounded = (bytes + page - 1) / page * page;
  ScopedDescriptor memory(memfd_create("ringattn-region", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ScopedDescriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!memory.valid() || !wake.valid()) return OutOfMemory("no descriptors for", rounded);
  if (ftruncate(memory.get(), rounded) != 0) return OutOfMemory("no memfd of", rounded);
  void* const data = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  if (data == MAP_FAILED) return OutOfMemory("cannot map", rounded);
  // A child process would share the pages with workers that do not know it.
  madvise(data, rounded, MADV_DONTFORK);
  madvise(data, rounded, MADV_HUGEPAGE);  // if the system allows it, and
  madvise(data, rounded,
          MADV_POPULATE_WRITE);  // with these pages; the loop below does it on older kernels
  if (fallocate(memory.get(), 0, 0, rounded) != 0 ||
      fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const absl::Status status = OutOfMemory("cannot allocate and seal", rounded);
    munmap(data, rounded);
    return status;
  }
  return std::shared_ptr<SharedRegion>(new SharedRegion(static_cast<uint8_t*>(data), rounded,
                                                        std::move(memory), nullptr, std::move(wake),
                                                        std::move(attach)));
}

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::MakeOf(
    std::shared_ptr<const CudaMemory> memory, AttachCall attach) {
  ScopedDescriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return OutOfMemory("no descriptors for", memory->bytes());
  uint8_t* const data = memory->data();
  const int64_t bytes = memory->bytes();
  return std::shared_ptr<SharedRegion>(new SharedRegion(
      data, bytes, ScopedDescriptor(), std::move(memory), std::move(wake), std::move(attach)));
}

SharedRegion::SharedRegion(uint8_t* data, int64_t bytes, ScopedDescriptor memory,
                           std::shared_ptr<const CudaMemory> cuda, ScopedDescriptor wake,
                           AttachCall attach)
    : data_(data),
      bytes_(bytes),
      memory_(std::move(memory)),
      cuda_(std::move(cuda)),
      wake_(std::move(wake)),
      attach_(std::move(attach)),
      backoff_(kMinBackoff),
      thread_([this] { Run(); }) {}

SharedRegion::~SharedRegion() {
  if (cuda_ == nullptr) munmap(data_, bytes_);
}

void SharedRegion::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  Wake();
  if (thread_.joinable()) thread_.join();
}

// --- Called by other threads ------------------------------------------------------

void SharedRegion::AwaitFirstRound(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  AwaitUntil(mutex_, absl::Condition(&first_round_over_), MonotonicNow() + timeout);
}

void SharedRegion::AttachAgain() {
  {
    absl::MutexLock lock(&mutex_);
    round_wanted_ = true;
  }
  Wake();
}

uint64_t SharedRegion::attachments() const {
  absl::MutexLock lock(&mutex_);
  return attachments_;
}

void SharedRegion::Reattach(uint64_t than, Reattached done) {
  bool stopped = false, taken = false;
  {
    absl::MutexLock lock(&mutex_);
    stopped = stopping_;
    taken = attachments_ > than;
    if (!stopped && !taken) {
      // A round that has already begun may have asked the coordinator too early.
      reattaches_.push_back({than, rounds_begun_ + 1, std::move(done)});
      round_wanted_ = true;
    }
  }
  if (stopped || taken) return done(taken);
  Wake();
}

std::string SharedRegion::id(std::string* why) const {
  absl::MutexLock lock(&mutex_);
  *why = trouble_;
  return id_;
}

std::vector<std::string> SharedRegion::workers() const {
  absl::MutexLock lock(&mutex_);
  return workers_;
}

std::string SharedRegion::trouble() const {
  absl::MutexLock lock(&mutex_);
  return trouble_;
}

void SharedRegion::Fence(uint64_t number, Fenced done) {
  bool stopped = false;
  {
    absl::MutexLock lock(&mutex_);
    stopped = stopping_;
    if (!stopped) fences_.push_back({number, done, {}, MonotonicNow() + kFenceTimeout});
  }
  if (stopped) return done("");
  Wake();
}

void SharedRegion::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
}

// --- The region's thread ----------------------------------------------------------

void SharedRegion::Run() {
  while (true) {
    bool wants_round = false;
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) break;
      wants_round = round_wanted_ && MonotonicNow() >= next_round_;
      if (wants_round) {
        round_wanted_ = false;
        ++rounds_begun_;
      }
    }
    if (wants_round) AttachRound();
    if (wants_round) FinishShows();
    SendFences();
    Poll();
    FinishFences(MonotonicNow());
  }
  sockets_.clear();
  SendFences();  // no sockets are left, so all fences complete
  for (PendingFence& fence : std::exchange(sent_fences_, {})) fence.done("");
  attach_ = nullptr;
  std::vector<PendingReattach> shows;
  {
    absl::MutexLock lock(&mutex_);
    shows.swap(reattaches_);
  }
  for (PendingReattach& show : shows) show.done(false);
  absl::MutexLock lock(&mutex_);
  id_.clear();
  workers_.clear();
  trouble_ = "the region is released";
  first_round_over_ = true;
}

void SharedRegion::AttachRound() {
  v1::AttachRequest request;
  request.set_bytes(bytes_);
  request.set_kind(cuda_ == nullptr ? v1::REGION_KIND_HOST : v1::REGION_KIND_CUDA);
  std::string why;
  request.set_region_id(id(&why));
  absl::StatusOr<v1::AttachResponse> response = attach_(request);
  if (absl::IsNotFound(response.status()) && !request.region_id().empty()) {
    // A new coordinator, which does not know the region.
    sockets_.clear();
    request.clear_region_id();
    response = attach_(request);
  }
  std::vector<std::string> trouble;
  bool again = !response.ok();
  if (response.ok()) {
    request.set_region_id(response->region_id());
    for (const v1::AttachPoint& point : response->points()) again |= !Attach(point, &trouble);
    for (const std::string& detail : response->unavailable()) trouble.push_back(detail);
    Confirm(request);
  } else {
    trouble.emplace_back(response.status().message());
    again = !absl::IsFailedPrecondition(response.status()) &&
            !absl::IsUnimplemented(response.status()) &&
            !absl::IsInvalidArgument(response.status());
  }
  backoff_ = again ? std::min(2 * backoff_, kMaxBackoff) : kMinBackoff;
  next_round_ = MonotonicNow() + backoff_;
  absl::MutexLock lock(&mutex_);
  round_wanted_ = round_wanted_ || again;
  id_ = sockets_.empty() ? std::string() : request.region_id();
  workers_.clear();
  for (const auto& [worker, socket] : sockets_) workers_.push_back(worker);
  trouble_ = absl::StrJoin(trouble, "; ");
  first_round_over_ = true;
  attachments_ = taken_;
  rounds_over_ = rounds_begun_;
}

void SharedRegion::FinishShows() {
  std::vector<PendingReattach> over;
  uint64_t attachments = 0;
  {
    absl::MutexLock lock(&mutex_);
    attachments = attachments_;
    const auto is_over = [&](const PendingReattach& show) ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return attachments_ > show.than || rounds_over_ >= show.round;
    };
    for (size_t i = reattaches_.size(); i-- > 0;) {
      if (!is_over(reattaches_[i])) continue;
      over.push_back(std::move(reattaches_[i]));
      reattaches_.erase(reattaches_.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  for (PendingReattach& show : over) show.done(attachments > show.than);
}

bool SharedRegion::Attach(const v1::AttachPoint& point, std::vector<std::string>* trouble) {
  const auto refuse = [&](absl::string_view why) {
    trouble->push_back(absl::StrCat(point.worker(), ": ", why));
    return false;
  };
  sockets_.erase(point.worker());  // of the worker's predecessor
  if (point.host_id() != HostId()) {
    refuse("is on another machine");
    return true;  // final: further attempts would only make the coordinator announce the region
                  // again
  }
  absl::StatusOr<ScopedDescriptor> socket = ConnectLocally(point.socket_path());
  if (!socket.ok()) return refuse(socket.status().message());
  SetTimeouts(socket->get(), cuda_ == nullptr ? kSocketTimeoutSeconds : kCudaTimeoutSeconds);
  AttachMessage message;
  if (cuda_ != nullptr) message = cuda_->message();
  message.token = point.token();
  const absl::Status sent = SendMessage(socket->get(), Encode(message),
                                        cuda_ == nullptr ? memory_.get() : cuda_->descriptor(), 0);
  // A worker that rejects every client of this user (--local_uids) says so at once and closes. The
  // message then cannot be sent, or is lost unread; the kernel reports this before the worker's
  // answer can be read.
  auto received =
      ReceiveMessage(socket->get(), kMaxAttachDatagramBytes, sent.ok() ? 0 : MSG_DONTWAIT);
  if (!received.ok()) {
    received = ReceiveMessage(socket->get(), kMaxAttachDatagramBytes, MSG_DONTWAIT);
  }
  if (!received.ok()) return refuse(sent.ok() ? "the worker did not answer" : sent.message());
  const std::optional<WorkerAnswer> answer = ReadWorkerAnswer(received->bytes);
  if (!answer.has_value())
    return refuse("the worker closed the socket or uses another protocol version");
  if (answer->code != AttachCode::kAttached) return refuse(answer->detail);
  sockets_[point.worker()] = *std::move(socket);
  ++taken_;
  return true;
}

// A request that arrives before the workers' reports would be relayed.
void SharedRegion::Confirm(const v1::AttachRequest& request) {
  const absl::Time deadline = MonotonicNow() + kConfirmTimeout;
  while (!sockets_.empty() && MonotonicNow() < deadline) {
    const absl::StatusOr<v1::AttachResponse> response = attach_(request);
    if (!response.ok()) return;
    const auto& attached = response->attached();
    const bool all = std::all_of(sockets_.begin(), sockets_.end(), [&](const auto& entry) {
      return std::find(attached.begin(), attached.end(), entry.first) != attached.end();
    });
    if (all) return;
    absl::SleepFor(kConfirmPause);
  }
}

void SharedRegion::Poll() {
  std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}};
  std::vector<std::string> workers;
  for (const auto& [worker, socket] : sockets_) {
    polled.push_back({socket.get(), POLLIN, 0});
    workers.push_back(worker);
  }
  bool waits = !sent_fences_.empty();
  {
    absl::MutexLock lock(&mutex_);
    waits = waits || round_wanted_;
  }
  poll(polled.data(), polled.size(), waits ? kPollMs : -1);
  uint64_t woken = 0;
  (void)!read(wake_.get(), &woken, sizeof(woken));
  for (size_t i = 0; i < workers.size(); ++i) {
    if (polled[i + 1].revents != 0) ServeSocket(workers[i]);
  }
}

void SharedRegion::ServeSocket(const std::string& worker) {
  const int socket = sockets_.at(worker).get();
  const auto received = ReceiveMessage(socket, kMaxAttachDatagramBytes, MSG_DONTWAIT);
  if (absl::IsUnavailable(received.status())) return;
  const std::optional<WorkerAnswer> answer =
      received.ok() ? ReadWorkerAnswer(received->bytes) : std::nullopt;
  if (!answer.has_value() || answer->code != AttachCode::kFenced) return DropWorker(worker);
  for (PendingFence& fence : sent_fences_) {
    if (fence.number != answer->number) continue;
    auto& names = fence.waits_for;
    names.erase(std::remove(names.begin(), names.end(), worker), names.end());
  }
}

// The worker is gone or has released the region, so it writes nothing more.
void SharedRegion::DropWorker(const std::string& worker) {
  sockets_.erase(worker);
  for (PendingFence& fence : sent_fences_) {
    auto& names = fence.waits_for;
    names.erase(std::remove(names.begin(), names.end(), worker), names.end());
  }
  absl::MutexLock lock(&mutex_);
  workers_.erase(std::remove(workers_.begin(), workers_.end(), worker), workers_.end());
  trouble_ = absl::StrCat(worker, ": the worker released the region");
  round_wanted_ = true;
}

void SharedRegion::SendFences() {
  std::deque<PendingFence> fences;
  {
    absl::MutexLock lock(&mutex_);
    fences.swap(fences_);
  }
  for (PendingFence& fence : fences) {
    std::vector<std::string> lost;
    for (const auto& [worker, socket] : sockets_) {
      const absl::Status sent =
          SendMessage(socket.get(), Encode(FenceMessage{fence.number}), -1, 0);
      (sent.ok() ? fence.waits_for : lost).push_back(worker);
    }
    for (const std::string& worker : lost) DropWorker(worker);
    sent_fences_.push_back(std::move(fence));
  }
}

void SharedRegion::FinishFences(absl::Time now) {
  std::vector<PendingFence> over;
  for (size_t i = sent_fences_.size(); i-- > 0;) {
    if (!sent_fences_[i].waits_for.empty() && sent_fences_[i].deadline > now) continue;
    over.push_back(std::move(sent_fences_[i]));
    sent_fences_.erase(sent_fences_.begin() + static_cast<ptrdiff_t>(i));
  }
  for (PendingFence& fence : over) {
    const std::string unsure = absl::StrJoin(fence.waits_for, ", ");
    // A suspended worker must not continue with the region when it resumes.
    for (const std::string& worker : std::vector<std::string>(fence.waits_for)) DropWorker(worker);
    fence.done(unsure);
  }
}

}  // namespace ringattn::client
